"""The real vllm-omni dies, and so does its trainer. A file of its own: an idle engine polls its queues with a quarter of a core, and those of
test_vllm_omni.py have ended by now or run on the other worker."""

from __future__ import annotations

import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from flowgrpo_fast.batch import RolloutBatch
from flowgrpo_fast.config import Config
from flowgrpo_fast.inputs import Inputs
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.rollout.wire import free_port
from flowgrpo_fast.trainer import Trainer
from tests.engines import (
    LORA_RUN,
    PYTHON,
    ROOT,
    VLLM,
    assert_same_training,
    finish,
    one_thread,
    orphans,
    run_trainer,
    warm_servers,
)
from tests.ranks import Rank, preload, wait_for
from tests.tiny import CPU, tiny_config

__all__ = ["one_thread", "warm_servers"]  # fixtures, used by name


@pytest.fixture(scope="module")
def calm_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("calm")
    run_trainer(tiny_config(run_dir, *LORA_RUN))
    return run_dir


def run_disturbed(config: Config) -> Trainer:
    """kill -9 of the first server in the middle of the second step."""
    trainer = Trainer(config, Inputs(config, 1), CPU)
    generate, killed = trainer.rollout.generate, []

    def with_a_kill(requests: Any, params: Any, version: int) -> RolloutBatch:
        if version == 1 and params.window_size and not killed:
            pid = trainer.rollout.clients[0].pid
            killed.append(pid)
            threading.Timer(0.05, os.kill, (pid, signal.SIGKILL)).start()
        return generate(requests, params, version)

    trainer.rollout.generate = with_a_kill
    finish(trainer)
    assert killed
    return trainer


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_killed_server_costs_no_bits(calm_run: Path, tmp_path: Path, replicas: int) -> None:
    """Alone, it is replaced and the phase is sampled again; with a second one, that takes over. The metrics are those of a calm run."""
    trainer = run_disturbed(tiny_config(tmp_path, *VLLM, *LORA_RUN, f"rollout.server.replicas={replicas}"))
    assert trainer.rollout.starts == replicas + 1
    assert_same_training(tmp_path, calm_run)
    assert read_metrics(tmp_path)[-1]["rollout/server_failures"] >= 1


def test_a_run_ends_after_too_many_failures(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="more than rollout.max_failures 0: .*exited with code -9"):
        run_disturbed(tiny_config(tmp_path, *VLLM, *LORA_RUN, "rollout.max_failures=0"))


def test_two_ranks_and_a_server_and_what_is_left_when_a_rank_is_killed(tmp_path: Path) -> None:
    """glyphs, LoRA, ZeRO-3 on two ranks, one engine that sleeps while they train: five steps. Then kill -9 of the rank that started the server.
    (Validation prompts are odd in number: a rank that is done first must not put the engine to sleep under the other.)"""
    before = orphans()
    preload()
    port = str(free_port())
    overrides = [
        f"run_dir={tmp_path}", f"rollout.python={PYTHON}", "rollout.server.threads=1", "engine.threads=1", *LORA_RUN,
        "model.lora.target_modules=all-linear", "rollout.groups_per_batch=1", "algorithm.group_size=4", "algorithm.groups_per_step=2",
        "optimizer.learning_rate=1e-3", "validation.num_prompts=3", "rollout.colocated=true", "trainer.total_steps=1000", "rollout.check_every=1",
        "logging.samples_every=0", "logging.tensorboard=false", "trainer.save_every=0", "trainer.validate_every=0",
    ]  # fmt: skip
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = ["--config", str(ROOT / "configs" / "glyphs_vllm_omni.yaml"), *overrides]
    ranks = [
        Rank(command, {**shared, "RANK": str(r), "LOCAL_RANK": str(r)}, tmp_path / f"rank{r}.log") for r in range(2)
    ]
    try:
        steps = lambda: len(read_metrics(tmp_path)) if (tmp_path / "metrics.jsonl").is_file() else 0  # noqa: E731
        ended = lambda: steps() >= 5 or not all(rank.is_running() for rank in ranks)  # noqa: E731
        wait_for(ended, 300, "five steps")
        output = "".join(rank.output.read_text() for rank in ranks)
        assert steps() >= 5, output
        rows = read_metrics(tmp_path)[:5]
        assert [row["policy/version"] for row in rows] == [0.0, 1.0, 2.0, 3.0, 4.0]
        for row in rows:
            assert all(math.isfinite(row[name]) for name in ("reward/mean", "policy/loss", "optimizer/grad_norm"))
            assert row["rollout/probe_difference"] < 1e-5
            assert row["rollout/bound_modules"] == 48  # linear layers of glyphs
            assert row["agreement/log_ratio_max"] < 1e-6
        servers = children_of(ranks[0].pid)
        assert servers
        os.kill(ranks[0].pid, signal.SIGKILL)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers), 10, "the server's death")
        wait_for(lambda: not any(rank.is_running() for rank in ranks), 10, "the other rank's end")
        wait_for(lambda: orphans() <= before, 10, "the end of every shared-memory file")
    finally:
        for rank in ranks:
            rank.process.kill()


def children_of(pid: int) -> list[int]:
    return [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
