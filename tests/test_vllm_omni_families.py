"""The other families by the real vllm-omni on the CPU: what the engine samples is what the in-process rollout samples, full weights and LoRA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig

from flowgrpo_fast.batch import MediaSize, RolloutBatch
from flowgrpo_fast.config import SigmasConfig
from flowgrpo_fast.engine import LORA
from flowgrpo_fast.models import build_adapter
from flowgrpo_fast.rollout.base import RolloutRequest
from flowgrpo_fast.rollout.in_process import InProcessRollout
from flowgrpo_fast.rollout.weights import FlatTensors, lora_checksums, probe
from tests.engines import (
    ALPHA,
    LORA_RUN,
    RANK,
    Running,
    lora_state,
    one_thread,
    push_full,
    push_lora,
    running_server,
    warm_servers,
)
from tests.matrix import ENGINE_FAMILIES, SETTINGS
from tests.pipelines import pipeline_folder
from tests.tiny import CPU, sampling

__all__ = ["one_thread", "warm_servers"]  # fixtures, used by name
PROMPTS = ("draw a cat", "draw a cat that is much larger than the other one")


@pytest.mark.parametrize("name", [*ENGINE_FAMILIES, "wan-2.2-ti2v"])
def test_the_engine_samples_what_the_trainer_does(name: str, tmp_path: Path) -> None:
    """Two prompts in one forward, guidance on, SDE windows at two places. The weights are not the checkpoint's: full ones first, then LoRA on every target of the preset.
    Latents to 1e-5 and log-probs to 1e-6: the engine fuses q, k and v, and its norms sum in another order."""
    family, folder = name.partition("-")[0], pipeline_folder(name)
    overrides = (f"model.family={family}", f"model.path={folder}", *SETTINGS[family])
    settings = dict(text.removeprefix("rollout.").split("=") for text in SETTINGS[family])
    size = MediaSize(int(settings.get("height", 64)), int(settings.get("width", 64)), int(settings.get("frames", 1)))
    params = sampling(guidance_scale=float(settings["guidance_scale"]), **size._asdict())
    adapter: Any = build_adapter(family, str(folder), CPU, torch.float32)
    network = adapter.load_transformer().eval()
    mine = InProcessRollout(adapter, network, SigmasConfig(), CPU)
    asked = requests(adapter, params.guidance_scale, size)
    with running_server(tmp_path, *overrides, *LORA_RUN) as server:
        move(network, "weight", 0.02)
        push_full(server.client, network, 1)
        assert_close_probes(adapter, network, server)
        assert_close(mine.generate(asked, params, 1), server.client.generate(asked, params, 1, "full"))
        preset = PeftLoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=adapter.lora_target_modules)
        network.add_adapter(preset, adapter_name=LORA)
        move(network, "lora_B", 0.05)
        state = lora_state(network)
        assert push_lora(server.client, state, 2) == lora_checksums(
            FlatTensors.pack(state, torch.float32), ALPHA / RANK, torch.float32
        )
        assert_close_probes(adapter, network, server)
        assert_close(mine.generate(asked, params, 2), server.client.generate(asked, params, 2, "lora"))


def requests(adapter: Any, guidance_scale: float, size: MediaSize) -> list[RolloutRequest]:
    negative = adapter.tokenize(["blurry"], 64) if adapter.needs_negative(guidance_scale) else None
    made, generator = [], torch.Generator().manual_seed(2)
    for i, prompt in enumerate(PROMPTS):
        shape = (1, min(adapter.max_source_images, 2), 3, size.height, size.width)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) if shape[1] else None
        tokens = replace(adapter.tokenize([prompt], 64), images=images)
        guided = None if negative is None else replace(negative, images=images)
        made.append(RolloutRequest(i, tokens, guided, 2 * i + torch.arange(2), torch.tensor([0, 1])))
    return made


def move(network: torch.nn.Module, which: str, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in network.named_parameters():
        if which in name:
            parameter.data.add_(scale * torch.randn(parameter.shape, generator=generator))


def assert_close_probes(adapter: Any, network: torch.nn.Module, server: Running) -> None:
    mine, theirs = probe(adapter, network, CPU), server.client.probe()
    torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-5 * float(mine.abs().max()))


def assert_close(mine: RolloutBatch, theirs: RolloutBatch) -> None:
    tolerance = {"latents": 1e-5, "log_probs": 1e-6, "images": 1, "videos": 1}
    assert mine.tensors().keys() == theirs.tensors().keys()
    for name, tensor in mine.tensors().items():
        difference = float((tensor.double() - theirs.tensors()[name].double()).abs().max())
        assert difference <= tolerance.get(name, 0), (name, difference)
