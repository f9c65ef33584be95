"""The trainer in this process, one rank, tiny model, real DeepSpeed: exactness, resume, faults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo_fast import trainer as trainer_module
from flowgrpo_fast.checkpoint import checkpoints, find_checkpoint
from flowgrpo_fast.config import Config, ConfigError, OptimizerConfig
from flowgrpo_fast.engine import learning_rate
from flowgrpo_fast.inputs import Inputs
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.train import settle_environment
from flowgrpo_fast.trainer import Trainer
from tests.tiny import CPU, exported, tiny_config, unpartitioned_config

LORA = ("model.train=lora", "model.lora.rank=4", "model.lora.alpha=8.0")
# Wall-clock values are the only ones that may differ between two equal runs.
CLOCK = ("time", "timing/", "throughput/", "memory/")


@pytest.fixture(scope="module", autouse=True)
def in_one_rank(process_group: None) -> None:
    settle_environment(tiny_config(Path("unused"), "engine.threads=1"), None)


def train(config: Config) -> Trainer:
    trainer = Trainer(config, Inputs(config, 1), CPU)
    try:
        trainer.run()
    finally:
        trainer.engine.close()
    return trainer


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in read_metrics(run_dir)]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("extra", [(), LORA], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_update_has_ratio_one_to_the_last_bit(
    tmp_path: Path, dtype: str, extra: tuple[str, ...], window: int
) -> None:
    """Replayed in the rollout's shape, old log-probs from the rollout: the deviation is 0.0, not small."""
    scope = "sample" if window == 2 else "group"
    train(
        tiny_config(
            tmp_path,
            f"model.dtype={dtype}",
            f"rollout.window={{size: {window}, range: [0,3], scope: {scope}}}",
            "trainer.total_steps=2",
            *extra,
        )
    )
    for row in read_metrics(tmp_path):
        assert row["policy/first_ratio_max_deviation"] == 0.0
        assert row["rollout/log_ratio_max"] == 0.0
        assert row["optimizer/grad_norm"] > 0


@pytest.mark.parametrize("form", ["gaussian", "flow_grpo"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ratio_is_one_in_every_form_of_the_log_prob(tmp_path: Path, form: str, reduction: str) -> None:
    """Rollout and trainer take the same form and reduction."""
    settings = (f"algorithm.log_prob_form={form}", f"algorithm.log_prob_reduction={reduction}", "rollout.rule=cps")
    train(unpartitioned_config(tmp_path, "trainer.total_steps=1", *settings))
    row = read_metrics(tmp_path)[0]
    assert row["policy/first_ratio_max_deviation"] == 0.0
    assert row["rollout/log_ratio_max"] == 0.0


def test_windows_that_differ_inside_a_group_replay_exactly(tmp_path: Path) -> None:
    """Shared noise, a window per sample, two groups a forward: nobody leaves the batch before the last window is done."""
    window = "rollout.window={size: 2, range: [0,5], scope: sample}"
    train(unpartitioned_config(tmp_path, window, "rollout.num_steps=6", "trainer.total_steps=2"))
    assert all(row["policy/first_ratio_max_deviation"] == 0.0 for row in read_metrics(tmp_path))


def test_guidance_replays_exactly_too(tmp_path: Path) -> None:
    train(
        unpartitioned_config(
            tmp_path, "rollout.guidance_scale=3.0", "data.negative_prompt=' '", "trainer.total_steps=1"
        )
    )
    assert read_metrics(tmp_path)[0]["policy/first_ratio_max_deviation"] == 0.0


def test_another_micro_batch_shape_changes_rounding_only(tmp_path: Path) -> None:
    """Ratio 1 by construction, the measured difference reported; gradient and parameter norms to 1e-5."""
    same, other = tmp_path / "same", tmp_path / "other"
    train(tiny_config(same, "trainer.total_steps=1", "optimizer.max_grad_norm=1e9"))
    train(tiny_config(other, "trainer.total_steps=1", "optimizer.max_grad_norm=1e9", "engine.micro_batch_size=2"))
    a, b = read_metrics(same)[0], read_metrics(other)[0]
    assert b["policy/first_ratio_max_deviation"] == 0.0
    assert b["rollout/log_ratio_max"] < 1e-5
    assert b["optimizer/grad_norm"] == pytest.approx(a["optimizer/grad_norm"], rel=1e-5)
    mine, theirs = exported(same), exported(other)
    for name, t in mine.items():
        assert float(theirs[name].norm()) == pytest.approx(float(t.norm()), rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("extra", [(), LORA], ids=["full", "lora"])
def test_resume_is_bitwise(tmp_path: Path, extra: tuple[str, ...]) -> None:
    """Steps 3 and 4 after a resume at 2 equal those of the uninterrupted run, metrics and weights."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    settings = (
        "trainer.total_steps=4",
        "trainer.save_every=2",
        "trainer.validate_every=2",
        "trainer.keep_checkpoints=9",
        *extra,
    )
    train(tiny_config(whole, *settings))
    shutil.copytree(whole / "checkpoints" / "step-000002", resumed / "checkpoints" / "step-000002")
    shutil.copy(whole / "metrics.jsonl", resumed / "metrics.jsonl")
    train(tiny_config(resumed, *settings))
    assert rows(resumed) == rows(whole)
    for name, t in exported(whole).items():
        assert torch.equal(t, exported(resumed)[name]), name


def test_resume_with_another_config_says_what_differs(tmp_path: Path) -> None:
    train(unpartitioned_config(tmp_path, "trainer.total_steps=1"))
    with pytest.raises(ConfigError, match=r"optimizer.learning_rate: 0.001 -> 0.1; seed: 0 -> 3\. Restore these"):
        train(unpartitioned_config(tmp_path, "trainer.total_steps=2", "seed=3", "optimizer.learning_rate=0.1"))
    # More steps of the same run are no difference.
    assert train(unpartitioned_config(tmp_path, "trainer.total_steps=2")).state.step == 2


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    """Run again, it says so and keeps its summary; with the summary lost it is validated and written again."""
    config = unpartitioned_config(tmp_path, "trainer.total_steps=2")
    train(config)
    summary = (tmp_path / "summary.json").read_bytes()
    train(config)
    assert (tmp_path / "summary.json").read_bytes() == summary
    (tmp_path / "summary.json").unlink()
    train(config)
    again = json.loads((tmp_path / "summary.json").read_text())
    assert again["validation/after/reward"] == json.loads(summary)["validation/after/reward"]
    assert again["validation/after/reward"] != again["validation/before/reward"]


def test_resume_never_sets_the_old_run_aside(tmp_path: Path) -> None:
    train(unpartitioned_config(tmp_path, "trainer.total_steps=2"))
    train(unpartitioned_config(tmp_path, "trainer.total_steps=1", "trainer.resume=never", "seed=5"))
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000001"]
    assert [p.name for p in checkpoints(tmp_path / "previous-1")] == ["step-000002"]


def test_resume_from_an_older_step_drops_the_later_ones(tmp_path: Path) -> None:
    settings = ("trainer.total_steps=3", "trainer.save_every=1", "trainer.keep_checkpoints=9")
    train(unpartitioned_config(tmp_path, *settings))
    older = tmp_path / "checkpoints" / "step-000001"
    train(
        unpartitioned_config(
            tmp_path,
            "trainer.total_steps=2",
            "trainer.save_every=1",
            "trainer.keep_checkpoints=9",
            f"trainer.resume={older}",
        )
    )
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000001", "step-000002"]


def test_two_turns_train_and_resume_bitwise(tmp_path: Path) -> None:
    """A multi-turn loop: twice the samples, a reward per turn, the same after a resume."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    settings = (
        "rollout.agent_loop=tests.tiny:Refine",
        "trainer.total_steps=3",
        "trainer.save_every=1",
        "trainer.keep_checkpoints=9",
    )
    train(unpartitioned_config(whole, *settings))
    assert read_metrics(whole)[0]["policy/kept"] == 2 * 16
    shutil.copytree(whole / "checkpoints" / "step-000001", resumed / "checkpoints" / "step-000001")
    shutil.copy(whole / "metrics.jsonl", resumed / "metrics.jsonl")
    train(unpartitioned_config(resumed, *settings))
    assert rows(resumed) == rows(whole)


def test_resume_from_nowhere(tmp_path: Path) -> None:
    assert find_checkpoint("auto", tmp_path) is None
    with pytest.raises(ConfigError, match="no checkpoint there"):
        find_checkpoint(str(tmp_path), tmp_path)


@pytest.mark.parametrize("mode", ["auto", "trainer"])
def test_second_update_of_a_rollout_is_off_policy(tmp_path: Path, mode: str) -> None:
    """peers.md row 58: the ratio is 1 in update 1 only; its old log-probs are those before the first update."""
    train(
        unpartitioned_config(
            tmp_path, "algorithm.updates_per_rollout=2", f"algorithm.old_log_probs={mode}", "trainer.total_steps=1"
        )
    )
    row = read_metrics(tmp_path)[0]
    assert row["policy/first_ratio_max_deviation"] == 0.0
    assert row["policy/ratio_max_deviation"] > 1e-6
    assert row["rollout/log_ratio_max"] < 1e-5


@pytest.mark.parametrize("extra", [(), LORA, ("engine.zero_stage=0", *LORA)], ids=["full", "lora", "zero0"])
def test_kl_to_the_reference(tmp_path: Path, extra: tuple[str, ...]) -> None:
    """0 before the first update (the policy is the reference), above 0 after it; the reference does not move."""
    train(tiny_config(tmp_path, "algorithm.kl_coef=0.1", "trainer.total_steps=2", *extra))
    first, second = read_metrics(tmp_path)
    assert first["policy/kl"] == 0.0
    assert second["policy/kl"] > 0


def test_zero_stages_agree(tmp_path: Path) -> None:
    norms = []
    for stage in range(4):
        train(tiny_config(tmp_path / str(stage), f"engine.zero_stage={stage}", "trainer.total_steps=1"))
        norms.append(read_metrics(tmp_path / str(stage))[0]["optimizer/grad_norm"])
    # The norm is summed in another order by each.
    assert norms == pytest.approx([norms[3]] * 4, rel=1e-4)


def test_learning_rate_schedules() -> None:
    """Warm-up over the first updates, then constant, or down to 0 at the last."""
    linear = OptimizerConfig(learning_rate=1.0, warmup_updates=4, schedule="linear")
    assert [learning_rate(linear, u, 14) for u in (0, 3, 4, 9, 14)] == [0.25, 1.0, 1.0, 0.5, 0.0]
    cosine = OptimizerConfig(learning_rate=1.0, schedule="cosine")
    assert [learning_rate(cosine, u, 10) for u in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    assert learning_rate(OptimizerConfig(learning_rate=0.5), 99, 10) == 0.5


def test_gradient_checkpointing_recomputes_the_same_forward(tmp_path: Path) -> None:
    """Ratio exactly 1 with it too; gradients of shared inputs are added in another order, so the norm agrees to rounding."""
    plain, saved = tmp_path / "plain", tmp_path / "saved"
    train(tiny_config(plain, "trainer.total_steps=1"))
    trainer = train(tiny_config(saved, "trainer.total_steps=1", "engine.gradient_checkpointing=true"))
    assert trainer.engine.module.is_gradient_checkpointing
    (a,), (b,) = read_metrics(plain), read_metrics(saved)
    assert b["policy/first_ratio_max_deviation"] == 0.0
    assert b["reward/mean"] == a["reward/mean"]
    assert b["optimizer/grad_norm"] == pytest.approx(a["optimizer/grad_norm"], rel=1e-5)


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, "trainer.total_steps=1", "logging.samples_every=1", "logging.tensorboard=true"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {
        "validation/before/reward",
        "validation/after/reward",
        "timing/train_s",
        "first_update_ratio_max_deviation",
    } <= summary.keys()
    for name in (
        "report.html",
        "config.yaml",
        "metrics.jsonl",
        "samples/before.png",
        "samples/after.png",
        "samples/training_000001.png",
    ):
        assert (tmp_path / name).stat().st_size > 0, name
    assert list((tmp_path / "tensorboard").iterdir())


def test_ratio_and_clipping_by_denoising_step_add_up_to_those_of_the_update(tmp_path: Path) -> None:
    """Two updates a rollout, so that the second is off-policy; windows per sample, so that steps have unequal numbers of pairs."""
    off_policy = ("algorithm.updates_per_rollout=2", "algorithm.clip_low=1e-6", "algorithm.clip_high=1e-6")
    train(unpartitioned_config(tmp_path, "rollout.window={size: 1, range: [0,3], scope: sample}", *off_policy))
    for row in read_metrics(tmp_path):
        by_step = {name.split("/")[1] for name in row if name.startswith("policy/step_")}
        assert by_step <= {"step_00", "step_01", "step_02"}
        assert len(by_step) > 1
        assert row["policy/ratio_max_deviation"] > 0
        largest = max(row[f"policy/{s}/ratio_max_deviation"] for s in by_step)
        # The op has the deviation from expm1, which rounds less.
        assert largest == pytest.approx(row["policy/ratio_max_deviation"], abs=1e-7)
        assert sum(row[f"policy/{s}/kept"] for s in by_step) == row["policy/kept"]
        for name in ("ratio_mean", "clip_fraction_low", "clip_fraction_high"):
            total = sum(row[f"policy/{s}/kept"] * row[f"policy/{s}/{name}"] for s in by_step)
            assert total / row["policy/kept"] == pytest.approx(row[f"policy/{name}"], abs=1e-6), name
    assert any(row["policy/clip_fraction_low"] > 0 for row in read_metrics(tmp_path))


def test_a_step_that_is_saved_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between the two renames that replace a checkpoint would lose it. So a stop right after a save, or after a resume, writes nothing."""
    config = unpartitioned_config(tmp_path, "trainer.save_every=1", "trainer.total_steps=2")
    written = []
    save = trainer_module.save_checkpoint
    monkeypatch.setattr(trainer_module, "save_checkpoint", lambda *given: (written.append(given), save(*given)))
    for _ in range(2):
        trainer = Trainer(config, Inputs(config, 1), CPU)
        log = trainer.recorder.metrics
        trainer.recorder.metrics = lambda *row, t=trainer, log=log: (log(*row), t.stop.ask("enough"))  # type: ignore[assignment,misc]
        if trainer.state.step == 1:
            trainer.stop.ask("enough")
        trainer.run()
        trainer.engine.close()
        (saved,) = checkpoints(tmp_path)
        assert saved.name == "step-000001"
        assert len(written) == 1


def test_the_best_validated_checkpoint_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (
        "trainer.save_every=1",
        "trainer.validate_every=1",
        "trainer.keep_checkpoints=1",
        "trainer.total_steps=4",
    )
    validate, scores = Trainer._validate, iter([0.1, 0.5, 0.9, 0.3, 0.7])  # before the first step, and after each
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_validate", lambda *at: validate(*at) | {"reward": next(scores)})
        train(unpartitioned_config(tmp_path, *settings))
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000002", "step-000004"]
    with pytest.raises(
        ConfigError, match="trainer.best_metric = 'brigthness' is not measured by validation, which has brightness"
    ):
        train(unpartitioned_config(tmp_path / "other", "trainer.best_metric=brigthness"))


def test_frozen_base_is_not_in_a_lora_checkpoint(tmp_path: Path) -> None:
    """peers.md row 46: adapter-sized, and it changes with training."""
    train(tiny_config(tmp_path, *LORA, "trainer.total_steps=2", "trainer.save_every=1"))
    adapter = exported(tmp_path)
    assert all("lora" in name and t.dtype == torch.float32 for name, t in adapter.items())
    first, second = (sum(f.stat().st_size for f in p.rglob("*.pt")) for p in checkpoints(tmp_path))
    assert first == pytest.approx(second, rel=0.05)
    # fp32 parameter, master copy and two moments, and what torch.save adds per tensor (19 kB in all); the base is 374 kB.
    adapter_bytes = sum(t.numel() * 4 for t in adapter.values())
    assert second < 4 * adapter_bytes + 100_000
