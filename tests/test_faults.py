"""A run is hit from outside: killed, told to stop, left by its launcher, hung, out of luck. Real ranks, no mocks."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo_fast.checkpoint import checkpoints
from flowgrpo_fast.lifetime import launchers
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.rollout.wire import free_port
from tests.launching import arguments, environment, finish, run_ranks, start_ranks
from tests.ranks import preload, wait_for
from tests.tiny import brightness, exported

SMALL = ("data.validation=null", "logging.tensorboard=false")
KILLS = 20


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    preload()


def rows(run_dir: Path) -> list[dict[str, Any]]:
    clock = ("time", "timing/", "throughput/", "memory/")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in read_metrics(run_dir)]


def steps(run_dir: Path) -> int:
    return len(read_metrics(run_dir)) if (run_dir / "metrics.jsonl").is_file() else 0


def test_twenty_kills_lose_nothing_before_the_last_save(tmp_path: Path) -> None:
    """kill -9 at random moments of a run that saves every step, resumed each time: the metrics of the whole are those of a calm run, bitwise.

    Moments are drawn over the whole life of a process: imports, loading, rollout, update, saving, pruning.
    """
    # Two updates' worth of state that a save must hold: the average, and a second moment. Steps of 0.3 s, half of which is saving.
    settings = (
        *SMALL, "algorithm.group_size=2", "algorithm.groups_per_step=1", "rollout.groups_per_batch=1", "rollout.num_steps=2",
        "rollout.window.range=[0, 1]", "trainer.save_every=1", "trainer.total_steps=12", "ema.decay=0.9", "trainer.keep_checkpoints=1",
    )  # fmt: skip
    # The first rank waits 12 s for the server that ranks are forked from.
    run_ranks(1, tmp_path / "first", *SMALL, "trainer.total_steps=1")
    began = time.monotonic()
    run_ranks(1, tmp_path / "calm", *settings)
    life = time.monotonic() - began
    draw, kills, resumed_at = random.Random(0), 0, set()
    while kills < KILLS:
        (rank,) = start_ranks(1, tmp_path / "killed", *settings)
        # A quarter of the runs may save nothing; the others get some steps further.
        time.sleep(draw.uniform(0.1, 0.6) * life)
        if rank.is_running():
            os.kill(rank.pid, signal.SIGKILL)
            kills += 1
        rank.process.join()
        found = checkpoints(tmp_path / "killed")
        resumed_at.add(found[-1].name if found else None)
        if (tmp_path / "killed" / "summary.json").is_file():
            # Done early: it must be as the calm one, and another run begins.
            assert rows(tmp_path / "killed") == rows(tmp_path / "calm")
            shutil.rmtree(tmp_path / "killed")
    assert len(resumed_at) > 3, resumed_at
    run_ranks(1, tmp_path / "killed", *settings)
    assert rows(tmp_path / "killed") == rows(tmp_path / "calm")
    mine, theirs = exported(tmp_path / "killed"), exported(tmp_path / "calm")
    assert all(torch.equal(t, theirs[name]) for name, t in mine.items())


def slow_brightness(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    time.sleep(0.3)
    return brightness(images, prompts, metadata)


LONG = (*SMALL, "trainer.total_steps=1000", "rewards.0.name=tests.test_faults:slow_brightness")


def assert_saved_and_resumable(run_dir: Path, world: int, reason: str, output: str) -> None:
    saved = checkpoints(run_dir)
    assert saved, output
    step = int(saved[-1].name.removeprefix("step-"))
    assert f"stopped at step {step}: {reason}" in output, output
    assert [row["step"] for row in read_metrics(run_dir)] == list(range(1, step + 1))
    run_ranks(world, run_dir, *LONG, f"trainer.total_steps={step + 1}")
    assert [row["step"] for row in read_metrics(run_dir)] == list(range(1, step + 2))


def test_sigterm_to_one_rank_saves_on_all_and_exits_0(tmp_path: Path) -> None:
    """Slurm's way."""
    ranks = start_ranks(2, tmp_path, *LONG)
    wait_for(lambda: steps(tmp_path) >= 2, 120, "two steps")
    os.kill(ranks[1].pid, signal.SIGTERM)
    codes, output = finish(ranks, 60)
    assert codes == [0, 0], output
    assert_saved_and_resumable(tmp_path, 2, "SIGTERM", output)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_notice_that_their_launcher_is_gone(tmp_path: Path, number: signal.Signals) -> None:
    """`deepspeed` dies of either signal without a word to its ranks."""
    launcher = Path(sys.executable).parent / "deepspeed"
    overrides = (*LONG, "engine.threads=1")
    command = [str(launcher), "--num_accelerators=1", f"--master_port={free_port()}", *arguments(tmp_path, *overrides)]
    with open(tmp_path.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)), stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_for(lambda: steps(tmp_path) >= 1, 120, "a step")
        (rank,) = [pid for pid in session(process.pid) if process.pid in launchers(pid) and is_rank(pid)]
        os.kill(process.pid, number)
        process.wait()
        wait_for(lambda: not is_rank(rank), 60, "the end of the rank")
        output = tmp_path.with_suffix(".log").read_text()
        assert_saved_and_resumable(tmp_path, 1, f"the deepspeed launcher (process {process.pid}) is gone", output)
    finally:
        for pid in session(process.pid):
            os.kill(pid, signal.SIGKILL)


ROOT = Path(__file__).parents[1]


def session(leader: int) -> list[int]:
    found = subprocess.run(["ps", "-s", str(leader), "-o", "pid="], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def is_rank(pid: int) -> bool:
    """A live process that runs train.py itself, not a launcher that names it."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return len(command) > 2 and b"train.py" in b" ".join(command[1:3]) and b"deepspeed" not in b" ".join(command[:2])


def hang_in_step_two(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    """On rank 1, in native code that holds the GIL."""
    hang_in_step_two.calls += 1
    if hang_in_step_two.calls > 2 and os.environ["RANK"] == "1":
        import ctypes

        ctypes.PyDLL(None).sleep(1000)
    return brightness(images, prompts, metadata)


hang_in_step_two.calls = 0


def test_a_hung_rank_ends_the_job_with_its_stack(tmp_path: Path) -> None:
    ranks = start_ranks(
        2, tmp_path, *SMALL, "rewards.0.name=tests.test_faults:hang_in_step_two", "engine.timeout_s=8", "rewarding.patience_s=5", "trainer.save_every=1",
    )  # fmt: skip
    began = time.monotonic()
    codes, output = finish(ranks, 90)
    assert time.monotonic() - began < 60
    assert all(code != 0 for code in codes), output
    assert "Timeout (0:00:08)!" in output
    assert "in hang_in_step_two" in output
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000001"]


def down_from_step_two(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    """A service that refuses connections on rank 1: for a while, or for good."""
    state = Path(os.environ["FLOWGRPO_TEST_SERVICE"])
    if os.environ["RANK"] == "1" and state.exists():
        raise ConnectionError("connection refused by 10.0.0.1:8000")
    return brightness(images, prompts, metadata)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_reward_service_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool) -> None:
    """The run waits with back-off; when patience ends it saves what it has and stops, on all ranks."""
    down = tmp_path / "down"
    monkeypatch.setenv("FLOWGRPO_TEST_SERVICE", str(down))
    patience = 100 if comes_back else 2
    run_dir = tmp_path / "run"
    ranks = start_ranks(
        2, run_dir, *SMALL, "trainer.total_steps=100" if not comes_back else "trainer.total_steps=15", "rewards.0.name=tests.test_faults:down_from_step_two",
        f"rewarding.patience_s={patience}", "rewarding.max_retries=1", extra={"FLOWGRPO_TEST_SERVICE": str(down)},
    )  # fmt: skip
    wait_for(lambda: steps(run_dir) >= 1, 120, "a step")
    down.touch()
    if comes_back:
        wait_for(
            lambda: "a reward is down, waiting for it for up to 100 s" in ranks[1].output.read_text(), 60, "a wait"
        )
        down.unlink()
    codes, output = finish(ranks, 120)
    if comes_back:
        assert codes == [0, 0], output
        assert steps(run_dir) == 15
        return
    assert codes == [1, 1], output
    assert "ConnectionError: connection refused by 10.0.0.1:8000" in output
    assert len(checkpoints(run_dir)) == 1
    assert checkpoints(run_dir)[0].name == f"step-{steps(run_dir):06d}"


def nan_on_rank_one(self: Any, inputs: Any) -> Any:
    loss, log_prob, metrics = flow_grpo_loss(self, inputs)
    return loss * (float("nan") if os.environ["RANK"] == "1" else 1.0), log_prob, metrics


def poisoned_main(arguments: Sequence[str]) -> int:
    from flowgrpo_fast.algorithms.flow_grpo import FlowGRPO
    from flowgrpo_fast.train import main

    FlowGRPO.loss = nan_on_rank_one
    return main(list(arguments))


def flow_grpo_loss(self: Any, inputs: Any) -> Any:
    return ORIGINAL_LOSS(self, inputs)


def _original() -> Any:
    from flowgrpo_fast.algorithms.flow_grpo import FlowGRPO

    return FlowGRPO.loss


ORIGINAL_LOSS = _original()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_nan_gradient_on_one_rank_skips_the_update_on_both(tmp_path: Path, stage: int) -> None:
    ranks = start_ranks(2, tmp_path, *SMALL, f"engine.zero_stage={stage}", "trainer.total_steps=2", main=poisoned_main)
    codes, output = finish(ranks, 120)
    assert codes == [0, 0], output
    assert [row["optimizer/skipped"] for row in read_metrics(tmp_path)] == [1.0, 1.0]


def test_a_disk_that_is_full_on_one_rank_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """Rank 1 cannot write its shard of the second checkpoint."""
    ranks = start_ranks(2, tmp_path, *SMALL, "trainer.save_every=1", "trainer.total_steps=3", main=full_disk_main)
    codes, output = finish(ranks, 120)
    assert codes == [1, 1], output
    assert "No space left on device" in output
    assert "the previous checkpoint step-000001 is intact" in output
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    run_ranks(2, tmp_path, *SMALL, "trainer.save_every=1", "trainer.total_steps=3")
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]


def full_disk_main(arguments: Sequence[str]) -> int:
    from flowgrpo_fast.engine import Engine
    from flowgrpo_fast.train import main

    save = Engine.save

    def failing(self: Engine, folder: Path) -> None:
        if os.environ["RANK"] == "1" and self.updates == 2:
            write = self.engine.checkpoint_engine.save

            def full(*_: Any, **__: Any) -> None:
                raise OSError(28, "No space left on device")

            self.engine.checkpoint_engine.save = full
            try:
                save(self, folder)
            finally:
                self.engine.checkpoint_engine.save = write
        save(self, folder)

    Engine.save = failing
    return main(list(arguments))
