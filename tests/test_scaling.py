"""The same training on more ranks: sequence parallelism, and checkpoints that move between rank counts. fp32, real ZeRO-3."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo_fast import comm, train, trainer
from flowgrpo_fast.checkpoint import checkpoints
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.rollout.agent_loop import RolloutResult
from tests.launching import finish, run_ranks, start_ranks
from tests.ranks import preload
from tests.tiny import exported, tiny_pipeline

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
        *SMALL, *kind, "trainer.total_steps=1", "optimizer.eps=1e3", "optimizer.learning_rate=1e3", "optimizer.weight_decay=0.0", "rollout.guidance_scale=3.0", "data.negative_prompt=blurry", "algorithm.updates_per_rollout=2", "algorithm.kl_coef=0.1",
    )  # fmt: skip
    run_ranks(2, tmp_path / "apart", *settings, "algorithm.old_log_probs=trainer")
    run_ranks(2, tmp_path / "together", *settings, "engine.sequence_parallel_size=2")
    (a,), (b,) = (read_metrics(tmp_path / name) for name in ("apart", "together"))
    assert b["reward/mean"] == a["reward/mean"]
    assert b["policy/first_ratio_max_deviation"] == 0.0
    assert b["rollout/log_ratio_max"] < 1e-5
    for name in ("optimizer/grad_norm", "policy/kl", "policy/kept"):
        assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-9), name
    # With eps so large AdamW is plain descent: each tensor has moved by its gradient. (An adapter's A hardly, whose gradient is zero while B is.)
    start = load_file(tiny_pipeline() / "transformer" / "diffusion_pytorch_model.safetensors")
    mine, theirs = exported(tmp_path / "together"), exported(tmp_path / "apart")
    moved = 0
    for name, t in ((name, t) for name, t in theirs.items() if "lora_A" not in name):
        gradient = t - start.get(name, torch.zeros_like(t))
        moved += bool(gradient.any())
        assert float((mine[name] - t).abs().max()) <= 1e-3 * float(gradient.abs().max()) + 1e-9, name
    assert moved > 10


class Dumping(trainer.Trainer):
    """Instead of training: what a resumed run starts from, whole, into $DUMP."""

    def run(self) -> dict[str, float]:
        engine = self.engine
        state = {f"weights/{name}": t for name, t in engine.trained_state().items()}
        with engine.sampling_weights():
            state |= {f"average/{name}": t for name, t in engine.trained_state().items()}
        with engine.old_weights():
            state |= {f"old/{name}": t for name, t in engine.trained_state().items()}
        assert engine.ema is not None
        masters, moments = engine.ema.masters, list(engine.engine.optimizer.optimizer.state.values())
        for kind in ("exp_avg", "exp_avg_sq"):
            for name, part in masters.named([moment[kind] for moment in moments]).items():
                whole = torch.cat(comm.gather_objects(part.clone()))
                state[f"{kind}/{name}"] = whole[: masters.numel(name)]
        if self.is_main:
            torch.save(state, os.environ["DUMP"])
        self.stop.close()
        return {}


def dump(arguments: Sequence[str]) -> int:
    trainer.Trainer = Dumping  # type: ignore[misc]
    return train.main(list(arguments))


NFT = (
    "algorithm.name=diffusion_nft",
    "algorithm.old_policy=linear_to_0_5",
    "algorithm.train_timesteps=1",
    "rollout.initial_noise=sample",
)


@pytest.mark.parametrize("settings", [(), ("model.train=lora", "model.lora.rank=4", *NFT)], ids=["full", "lora, nft"])
def test_a_checkpoint_moves_to_another_number_of_ranks(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """2 -> 1 and 4 ranks, by DeepSpeed's universal format: weights, both moments, the average and the old policy are the same bits; and the run goes on."""
    run_dir, common = tmp_path / "run", (*SMALL, *settings, "ema.decay=0.9", "trainer.keep_checkpoints=9")
    run_ranks(2, run_dir, *common, "trainer.total_steps=2")
    states = {}
    counts = (2, 4) if settings else (2, 1, 4)
    for ranks in counts:
        file = {"DUMP": str(tmp_path / f"{ranks}.pt")}
        codes, output = finish(start_ranks(ranks, run_dir, *common, "trainer.total_steps=3", extra=file, main=dump))
        assert codes == [0] * ranks, output
        states[ranks] = torch.load(file["DUMP"])
    assert {name.partition("/")[0] for name in states[2]} == {"weights", "average", "old", "exp_avg", "exp_avg_sq"}
    moments = [bool(t.any()) for name, t in states[2].items() if name.startswith("exp_avg")]
    assert sum(moments) > len(moments) / 2, f"{sum(moments)} of {len(moments)} moments are not zero"
    for ranks in counts[1:]:
        assert states[ranks].keys() == states[2].keys()
        for name, t in states[2].items():
            assert torch.equal(states[ranks][name], t), (ranks, name)
    if settings:  # how a run goes on is the same whatever it trains
        return
    run_ranks(1, run_dir, *common, "trainer.total_steps=3")
    run_ranks(2, run_dir, *common, "trainer.total_steps=4")
    assert [row["step"] for row in read_metrics(run_dir)] == [1, 2, 3, 4]
    assert not list((run_dir / "checkpoints").glob(".*")), "the converted copy is gone"
    assert [p.name for p in checkpoints(run_dir)] == ["step-000002", "step-000003", "step-000004"]


def test_rank_counts_that_cannot_change(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, *SMALL, "trainer.total_steps=1", "engine.zero_stage=2")
    codes, output = finish(start_ranks(1, tmp_path, *SMALL, "trainer.total_steps=2", "engine.zero_stage=2"))
    assert codes == [2], output
    assert "number of ranks: 2 -> 1 (which ZeRO stage 3 on shared storage alone can change)" in output
