"""What goes wrong in a run of one rank: rewards that fail, values that are not finite, a full disk, bad input. Real DeepSpeed, tiny model."""

from __future__ import annotations

import math
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowgrpo_fast.checkpoint import CheckpointError, checkpoints
from flowgrpo_fast.config import ConfigError
from flowgrpo_fast.inputs import Inputs
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.rewards import RewardFailure
from flowgrpo_fast.rollout.base import NonFiniteError
from flowgrpo_fast.train import main
from flowgrpo_fast.trainer import Trainer
from tests.test_trainer import LORA, in_one_rank, train
from tests.tiny import (
    CPU,
    TINY_YAML,
    brightness,
    exported,
    tiny_config,
    tiny_inputs,
    tiny_pipeline,
    unpartitioned_config,
)

__all__ = ["in_one_rank"]  # a fixture, used by name


def raising(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    raise RuntimeError("the scorer is broken")


def sometimes_nan(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    score = brightness(images, prompts, metadata)
    if len(images) > 1:
        score[1] = math.nan
    return score


def always_nan(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    return torch.full((len(images),), math.nan)


def test_a_reward_that_raises_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(RewardFailure, match="no valid reward.*\n.*the scorer is broken"):
        train(unpartitioned_config(tmp_path, "rewards.0.name=tests.test_trainer_faults:raising"))


def test_an_invalid_sample_is_left_out_and_counted(tmp_path: Path) -> None:
    train(
        unpartitioned_config(
            tmp_path,
            "rewards.0.name=tests.test_trainer_faults:sometimes_nan",
            "rewarding.max_failure_share=0.3",
            "trainer.total_steps=1",
        )
    )
    row = read_metrics(tmp_path)[0]
    assert row["reward/invalid_ratio"] == 0.25
    assert row["policy/kept"] == 12.0
    assert row["policy/first_ratio_max_deviation"] == 0.0


def test_without_any_valid_reward_the_step_is_skipped(tmp_path: Path) -> None:
    """peers.md row 39: all masked -> no optimizer step, and the weights stay."""
    trainer = train(
        unpartitioned_config(
            tmp_path,
            "rewards.0.name=tests.test_trainer_faults:always_nan",
            "rewarding.max_failure_share=1.0",
            "trainer.total_steps=1",
            "data.validation=null",
        )
    )
    assert read_metrics(tmp_path)[0]["optimizer/skipped"] == 1.0
    assert trainer.engine.updates == 0
    original = load_file(tiny_pipeline() / "transformer" / "diffusion_pytorch_model.safetensors")
    for name, t in exported(tmp_path).items():
        assert torch.equal(t, original[name]), name


def test_nan_from_the_model_stops_with_step_and_sample(tmp_path: Path) -> None:
    """The checkpoint of the step before is intact and resumable."""
    train(unpartitioned_config(tmp_path, "trainer.total_steps=1"))
    trainer = Trainer(
        unpartitioned_config(tmp_path, "trainer.total_steps=2"), Inputs(unpartitioned_config(tmp_path), 1), CPU
    )
    import deepspeed

    bias = trainer.engine.module.proj_out.bias
    with deepspeed.zero.GatheredParameters([bias], modifier_rank=0):
        bias.data[0] = math.nan
    with pytest.raises(NonFiniteError, match=r"not finite at denoising step 0, sample \d+"):
        trainer.run()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000001"]
    assert train(unpartitioned_config(tmp_path, "trainer.total_steps=2")).state.step == 2


def test_a_non_finite_log_prob_in_training_stops_before_the_weights_change(tmp_path: Path) -> None:
    """The rollout was fine; the network under training gives NaN (a bad kernel, an overflow in bf16)."""
    trainer = Trainer(unpartitioned_config(tmp_path), Inputs(unpartitioned_config(tmp_path), 1), CPU)
    velocity = trainer.adapter.velocity

    def broken(transformer: Any, *args: Any) -> Tensor:
        return velocity(transformer, *args) * (math.nan if transformer is trainer.engine else 1.0)

    trainer.adapter.velocity = broken
    before = trainer.engine.trained_state()
    with pytest.raises(
        NonFiniteError, match=r"not finite in training, at denoising step \d+, sample 0; the weights were not changed"
    ):
        trainer.run()
    for name, value in trainer.engine.trained_state().items():
        assert torch.equal(value, before[name]), name
    trainer.engine.close()


def test_missing_negative_prompt_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rollout.guidance_scale = 4.0 needs a negative prompt"):
        Inputs(tiny_config(tmp_path, "rollout.guidance_scale=4.0"), 1)


def test_a_prompt_over_the_limit_is_found_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="over rollout.max_sequence_length 8"):
        train(tiny_config(tmp_path, "rollout.max_sequence_length=8"))


@pytest.mark.parametrize("window", ["{size: 2, range: [2, 4]}", "{size: 3, range: [2, 9]}"])
def test_window_outside_the_schedule_is_a_config_error(tmp_path: Path, window: str) -> None:
    config = tiny_config(tmp_path, f"rollout.window={window}")
    with pytest.raises(ConfigError, match="last trainable step is 2"):
        Trainer(config, Inputs(config, 1), CPU)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewards.0.name=occr", "did you mean"),
        ("algorithm.name=flow_grop", "did you mean 'flow_grpo'"),
        ("data.train=/no/such/prompts.txt", "/no/such/prompts.txt"),
        ("model.path=/no/such/model", "not a diffusers folder"),
    ],
)
def test_bad_input_is_found_before_a_model_is_loaded(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Inputs(tiny_config(tmp_path, override), 1)


def test_a_dry_run_looks_for_the_checkpoint_to_resume_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--config", str(TINY_YAML), *tiny_inputs(tmp_path), "engine.threads=1", "--dry-run"]
    assert main([*command, "trainer.resume=nevr"]) == 2
    assert "trainer.resume = 'nevr': no checkpoint there" in capsys.readouterr().err
    assert main([*command, "trainer.resume=never"]) == 0


def test_lora_targets_that_match_nothing(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *LORA, "model.lora.target_modules=[to_nothing]")
    with pytest.raises(ValueError, match="to_nothing.*linear layers here end in"):
        Trainer(config, Inputs(config, 1), CPU)


def test_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """A file-size limit makes the kernel refuse the write in the middle, as a full disk does."""
    trainer = Trainer(
        unpartitioned_config(tmp_path, "trainer.total_steps=2", "trainer.save_every=1"),
        Inputs(unpartitioned_config(tmp_path), 1),
        CPU,
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    original = trainer._step

    def limited(step: int) -> dict[str, float]:
        metrics = original(step)
        if step == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
        return metrics

    trainer._step = limited  # type: ignore[method-assign]
    try:
        with pytest.raises(
            CheckpointError, match="could not write .*step-000002.*the previous checkpoint step-000001 is intact"
        ):
            trainer.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert train(unpartitioned_config(tmp_path, "trainer.total_steps=2")).state.step == 2


def test_no_space_is_reported_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(unpartitioned_config(tmp_path, "trainer.total_steps=1"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match="MiB are free; the previous checkpoint step-000001 is intact"):
        train(unpartitioned_config(tmp_path, "trainer.total_steps=2"))
