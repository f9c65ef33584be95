"""The same training on more ranks: sequence parallelism, and checkpoints that move between rank counts. fp32, real ZeRO-3."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowgrpo_fast import comm, train, trainer
from flowgrpo_fast.checkpoint import checkpoints
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.rollout.agent_loop import RolloutResult
from tests.launching import finish, run_ranks, start_ranks
from tests.ranks import preload
from tests.tiny import exported

SMALL = ("data.validation=null", "rollout.groups_per_batch=1", "optimizer.max_grad_norm=1e9")


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    preload()


class Stored(trainer.Trainer):
    """One rank stores its rollouts in $STORED; any number of ranks trains on them again."""

    def _training_rollout(self, step: int) -> RolloutResult:
        file = Path(os.environ["STORED"]) / f"{step}.pt"
        if not file.is_file():
            result = super()._training_rollout(step)
            file.parent.mkdir(exist_ok=True)
            torch.save(result, file)
            return result
        result = torch.load(file, weights_only=False)
        each = result.batch.size // comm.world_size()
        mine = torch.arange(comm.rank() * each, (comm.rank() + 1) * each)
        reward = replace(
            result.reward,
            components=result.reward.components[mine],
            valid=result.reward.valid[mine],
            metrics={name: value[mine] for name, value in result.reward.metrics.items()},
        )
        return replace(
            result, batch=result.batch.select(mine), reward=reward, prompts=[result.prompts[i] for i in mine.tolist()]
        )


def train_on_stored(arguments: Sequence[str]) -> int:
    trainer.Trainer = Stored  # type: ignore[misc]
    return train.main(list(arguments))


def test_one_two_and_four_ranks_learn_the_same_from_the_same_rollouts(tmp_path: Path) -> None:
    """Five steps. (Live rollouts diverge legitimately: a weight that differs by 1e-5 alters most images.)"""
    norms, gradients = {}, {}
    for ranks in (1, 2, 4):
        run_dir = tmp_path / f"{ranks} ranks"
        stored = {"STORED": str(tmp_path / "rollouts")}
        settings = (*SMALL, "algorithm.old_log_probs=trainer")
        codes, output = finish(start_ranks(ranks, run_dir, *settings, extra=stored, main=train_on_stored))
        assert codes == [0] * ranks, output
        norms[ranks] = {name: float(t.norm()) for name, t in exported(run_dir).items()}
        gradients[ranks] = [row["optimizer/grad_norm"] for row in read_metrics(run_dir)]
    assert len(gradients[1]) == 5
    for ranks in (2, 4):
        assert gradients[ranks] == pytest.approx(gradients[1], rel=1e-4)
        for name, norm in norms[ranks].items():
            assert norm == pytest.approx(norms[1][name], rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize(
    "kind",
    [(), ("model.train=lora", "model.lora.rank=4", "engine.gradient_checkpointing=true")],
    ids=["full", "lora, checkpointed"],
)
def test_sequence_parallel_ranks_make_the_same_gradient(tmp_path: Path, kind: tuple[str, ...]) -> None:
    """Two ranks that share every forward against two that share none. Guidance, prompts of several lengths (padded and masked), two updates a
    rollout; the first step, whose weights are the same. Old log-probs then come from the trainer, whose forwards have another shape than the rollout's."""
    settings = (
        *SMALL, *kind, "trainer.total_steps=1", "rollout.guidance_scale=3.0", "data.negative_prompt=blurry", "algorithm.updates_per_rollout=2", "algorithm.kl_coef=0.1",
    )  # fmt: skip
    run_ranks(2, tmp_path / "apart", *settings, "algorithm.old_log_probs=trainer")
    run_ranks(2, tmp_path / "together", *settings, "engine.sequence_parallel_size=2")
    (a,), (b,) = (read_metrics(tmp_path / name) for name in ("apart", "together"))
    assert b["reward/mean"] == a["reward/mean"]
    assert b["policy/first_ratio_max_deviation"] == 0.0
    assert b["rollout/log_ratio_max"] < 1e-5
    for name in ("optimizer/grad_norm", "policy/kl", "policy/kept"):
        assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-9), name
    mine, theirs = exported(tmp_path / "together"), exported(tmp_path / "apart")
    for name, t in mine.items():
        assert float(t.norm()) == pytest.approx(float(theirs[name].norm()), rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("settings", [(), ("model.train=lora", "model.lora.rank=4")], ids=["full", "lora"])
def test_a_checkpoint_moves_to_another_number_of_ranks(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """2 -> 1 -> 2 ranks, by DeepSpeed's universal format: weights exact, optimizer and average too, so the run goes on as it would have."""
    common = (*SMALL, *settings, "ema.decay=0.9", "trainer.keep_checkpoints=9")
    run_ranks(2, tmp_path / "moved", *common, "trainer.total_steps=2")
    before = exported(tmp_path / "moved")
    run_ranks(1, tmp_path / "moved", *common, "trainer.total_steps=3")
    run_ranks(2, tmp_path / "moved", *common, "trainer.total_steps=4")
    run_ranks(2, tmp_path / "still", *common, "trainer.total_steps=2")
    assert all(torch.equal(t, before[name]) for name, t in exported(tmp_path / "still").items())
    run_ranks(2, tmp_path / "still", *common, "trainer.total_steps=4")
    for a, b in zip(read_metrics(tmp_path / "moved"), read_metrics(tmp_path / "still"), strict=True):
        for name in ("reward/mean", "optimizer/grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-3), (a["step"], name)
    mine, theirs = exported(tmp_path / "moved"), exported(tmp_path / "still")
    for name, t in mine.items():
        assert float(t.norm()) == pytest.approx(float(theirs[name].norm()), rel=1e-3, abs=1e-5), name
    assert not list((tmp_path / "moved" / "checkpoints").glob(".*")), "the converted copy is gone"
    assert [p.name for p in checkpoints(tmp_path / "moved")] == ["step-000002", "step-000003", "step-000004"]


def test_rank_counts_that_cannot_change(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, *SMALL, "trainer.total_steps=1", "engine.zero_stage=2")
    codes, output = finish(start_ranks(1, tmp_path, *SMALL, "trainer.total_steps=2", "engine.zero_stage=2"))
    assert codes == [2], output
    assert "number of ranks: 2 -> 1 (which ZeRO stage 3 on shared storage alone can change)" in output
