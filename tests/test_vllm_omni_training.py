"""Training over the real vllm-omni on the CPU: agreement to the last bit, averages, the gate, overlap. Two engines serve the file: one takes LoRA, one
full weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flowgrpo_fast.inputs import Inputs
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.trainer import Trainer
from tests.engines import (
    LORA_RUN,
    VLLM,
    Running,
    assert_same_training,
    finish,
    full_server,
    lora_server,
    lora_state,
    lora_transformer,
    one_thread,
    run_trainer,
    warm_servers,
)
from tests.tiny import CPU, exported, tiny_config, unpartitioned_config

__all__ = ["full_server", "lora_server", "one_thread", "warm_servers"]  # fixtures, used by name


def by_hand(running: Running) -> tuple[str, ...]:
    return (*VLLM, "rollout.server.replicas=0", f"rollout.server.addresses=[{running.process.address}]")


def test_a_lora_run_agrees_with_its_engine_to_the_last_bit(lora_server: Running, tmp_path: Path) -> None:
    config = unpartitioned_config(
        tmp_path,
        *by_hand(lora_server),
        *LORA_RUN,
        "model.lora.target_modules=all-linear",
        "rollout.check_every=1",
    )
    run_trainer(config)
    rows = read_metrics(tmp_path)
    assert [row["policy/version"] for row in rows] == [0.0, 1.0, 2.0]
    for row in rows:
        assert row["agreement/log_ratio_max"] == 0.0
        assert row["policy/ratio_max_deviation"] == 0.0
        assert row["rollout/probe_difference"] < 1e-5
        assert row["rollout/bound_modules"] == len(lora_state(lora_transformer())) // 2
    assert any(bool(t.any()) for name, t in exported(tmp_path).items() if "lora_B" in name), "nothing was learned"


@pytest.mark.parametrize("old_log_probs", ["rollout", "trainer"])
def test_a_full_run_equals_the_in_process_run_bitwise(full_server: Running, tmp_path: Path, old_log_probs: str) -> None:
    """Weights in a dozen buckets, two in turn; the engine asleep while the trainer trains; two updates a rollout, the second off-policy."""
    several = ("rollout.server.bucket_mb=0.02", "rollout.colocated=true")
    updates = ("algorithm.updates_per_rollout=2", f"algorithm.old_log_probs={old_log_probs}")
    run_trainer(tiny_config(tmp_path / "engine", *by_hand(full_server), *several, *updates))
    run_trainer(tiny_config(tmp_path / "here", *updates))
    assert_same_training(tmp_path / "engine", tmp_path / "here")
    assert all(row["policy/ratio_max_deviation"] > 0 for row in read_metrics(tmp_path / "engine"))


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_average_is_sampled_by_the_engine_too(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Validation is of the EMA weights: the engine gets them as a policy of their own, then the trained ones again."""
    server: Running = request.getfixturevalue(f"{kind}_server")
    averaged = ("ema.decay=0.9", "ema.warmup=false", "trainer.validate_every=1", "trainer.total_steps=2")
    if kind == "lora":
        averaged = (*averaged, *LORA_RUN, "optimizer.learning_rate=0.05")
    runs = {
        "engine": (*by_hand(server), *averaged),
        "here": averaged,
        "raw": (*averaged, "ema.sample=false"),
    }
    seen = {}
    for name, overrides in runs.items():
        run_trainer(tiny_config(tmp_path / name, *overrides))
        seen[name] = [row["validation/reward"] for row in read_metrics(tmp_path / name)]
    assert len(seen["engine"]) == 2
    assert seen["engine"] == seen["here"]
    assert seen["engine"] != seen["raw"]
    assert_same_training(tmp_path / "engine", tmp_path / "here")


@pytest.mark.parametrize(("clip", "trusted"), [(1e-9, False), (1e-3, True)])
def test_the_gate_takes_the_trainers_log_probs_where_the_engine_is_too_far_off(
    full_server: Running, tmp_path: Path, clip: float, trusted: bool
) -> None:
    """A trainer whose network rounds differently: too far off for one clip range, near enough for another."""
    config = unpartitioned_config(
        tmp_path, *by_hand(full_server), "trainer.total_steps=1", "data.validation=null",
        f"algorithm.clip_low={clip}", f"algorithm.clip_high={clip}",
    )  # fmt: skip
    trainer = Trainer(config, Inputs(config, 1), CPU)
    velocity = trainer.adapter.velocity

    def rounded_otherwise(transformer: Any, *given: Any) -> Tensor:
        return velocity(transformer, *given) * (1 + 1e-5 if transformer is trainer.engine else 1.0)

    trainer.adapter.velocity = rounded_otherwise
    finish(trainer)
    (row,) = read_metrics(tmp_path)
    assert 0 < row["agreement/log_ratio_max"] < 1e-4
    assert row["agreement/log_ratio_mean"] <= row["agreement/log_ratio_max"]
    assert row["agreement/limit"] == pytest.approx(clip / 10)
    assert (row["agreement/log_ratio_max"] <= row["agreement/limit"]) == trusted
    assert (row["policy/ratio_max_deviation"] > 0) == trusted
    assert any(name.startswith("agreement/step_") for name in row)


def test_overlap_is_one_step_off_policy_and_says_so(full_server: Running, tmp_path: Path) -> None:
    run_trainer(unpartitioned_config(tmp_path, *by_hand(full_server), "rollout.overlap=true", "trainer.total_steps=4"))
    rows = read_metrics(tmp_path)
    assert [row["policy/staleness"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    assert rows[0]["policy/ratio_max_deviation"] == 0.0
    assert all(row["policy/ratio_max_deviation"] > 0 for row in rows[1:])
