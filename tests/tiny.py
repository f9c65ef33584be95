"""A tiny random Qwen-Image pipeline on disk and configs over it, shared by tests."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from flowgrpo_fast.config import Config, SigmasConfig
from flowgrpo_fast.config_file import load_config
from flowgrpo_fast.data.prompts import PromptRecord
from flowgrpo_fast.models.qwen_image import QwenImageAdapter
from flowgrpo_fast.rollout.agent_loop import GroupTask, MultiTurnAgentLoop, Turn
from flowgrpo_fast.rollout.base import RolloutRequest, SamplingParams
from flowgrpo_fast.rollout.in_process import InProcessRollout

TINY_YAML = Path(__file__).parent / "tiny.yaml"
# The first 32 of builtin:glyphs: all 833 are tokenized whenever a trainer starts, 0.1 s of 0.6.
TINY_PROMPTS = Path(__file__).parent / "tiny_prompts.txt"
CPU = torch.device("cpu")


@functools.cache
def tiny_pipeline() -> Path:
    """The folder of the pipeline, built once per test process."""
    from flowgrpo_fast.models.glyphs import build_pipeline

    folder = Path(tempfile.mkdtemp(prefix="flowgrpo_fast_tiny_"))
    build_pipeline("tiny").save_pretrained(folder)
    return folder


def tiny_config(run_dir: Path, *overrides: str) -> Config:
    return load_config(TINY_YAML, [*tiny_inputs(run_dir), *overrides])


def tiny_inputs(run_dir: Path) -> list[str]:
    """What TINY_YAML leaves open."""
    return [f"model.path={tiny_pipeline()}", f"data.train={TINY_PROMPTS}", f"run_dir={run_dir}"]


def unpartitioned_config(run_dir: Path, *overrides: str) -> Config:
    """ZeRO 0, for what is not about partitions: ZeRO-3's hooks around every tiny layer are half of a tiny run's time."""
    return tiny_config(run_dir, "engine.zero_stage=0", *overrides)


@functools.cache
def tiny_adapter() -> QwenImageAdapter:
    return QwenImageAdapter(tiny_pipeline(), CPU, torch.float32)


def tiny_rollout() -> InProcessRollout:
    adapter = tiny_adapter()
    return InProcessRollout(adapter, adapter.load_transformer().eval(), SigmasConfig(), CPU)


def sampling(**changes: Any) -> SamplingParams:
    values: dict[str, Any] = dict(
        height=64, width=64, frames=1, num_steps=5, guidance_scale=1.0, rule="sde", noise_level=0.7, log_prob_form="gaussian",
        log_prob_reduction="mean", window_size=2, initial_noise="sample", seed=3,
    )  # fmt: skip
    return SamplingParams(**(values | changes))


def request(prompt: str, group: int, starts: list[int], negative: str | None = None) -> RolloutRequest:
    G = len(starts)
    adapter = tiny_adapter()
    return RolloutRequest(
        group_id=group,
        tokens=adapter.tokenize([prompt], 64),
        negative_tokens=None if negative is None else adapter.tokenize([negative], 64),
        sample_id=group * G + torch.arange(G),
        window_start=torch.tensor(starts),
    )


def exported(run_dir: Path, name: str = "final") -> dict[str, Tensor]:
    """The trained tensors of an export: of a LoRA, or of a whole transformer."""
    folder = run_dir / "export" / name
    files = [folder / "pytorch_lora_weights.safetensors"]
    if not files[0].is_file():
        files = sorted((folder / "transformer").glob("*.safetensors"))
    assert files, folder
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def brightness(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    """A reward that needs no model and differs from sample to sample, of images and videos."""
    pixels = images.flatten(1).float() / 255
    return pixels.mean(1) + pixels.std(1)


def record(prompt: str, index: int = 0) -> PromptRecord:
    return PromptRecord(index, prompt, None, {})


class Refine(MultiTurnAgentLoop):
    """Second turn: asks again for the prompt, with the first turn's best score in words."""

    turns = 2

    async def next_prompt(self, task: GroupTask, history: Sequence[Turn]) -> str:
        return task.record.prompt if not history else f"{task.record.prompt} {history[0].reward.components.max():.1f}"
