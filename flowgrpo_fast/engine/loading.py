"""The network under ZeRO-3 without a full copy per rank: built partitioned, filled shard by shard. And LoRA on top.

Every parameter is cut up as soon as its module is built, and gathered for a moment only, when its bytes come from the first rank. So host memory
beyond the partitions does not grow with the network: benchmarks/loading.py measures it.
"""

from __future__ import annotations

import ctypes
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import deepspeed
import torch
from diffusers.models.modeling_utils import no_init_weights
from peft import LoraConfig as PeftLoraConfig
from safetensors import safe_open
from torch import Tensor, nn

from flowgrpo_fast import comm
from flowgrpo_fast.buckets import buckets
from flowgrpo_fast.config import Config, ConfigError
from flowgrpo_fast.models.base import ModelAdapter

LORA = "policy"
# A gather holds its bucket several times for a moment: in the parameters, flat, and on its way through gloo.
BUCKET_ELEMENTS = 8 * 2**20


def load_partitioned(adapter: ModelAdapter, settings: dict[str, Any]) -> nn.Module:
    """The network of adapter.transformer_folder, every rank holding its part. A collective.

    Not on the meta device: some networks keep tables as plain attributes (Qwen-Image's `pos_freqs`), which nothing would fill there.
    Raises ConfigError where the files and the network do not match.
    """
    # By config, not by zero.Init's `dtype`: DeepSpeed 0.19.8 ignores that where there is no fp16 (CPUs), and takes bf16.
    half = {"bf16": {"enabled": adapter.dtype is torch.bfloat16}, "fp16": {"enabled": adapter.dtype is torch.float16}}
    # Skipped initialisation: 33 -> 15 s for Qwen-Image in a trial.
    with no_init_weights(), deepspeed.zero.Init(config_dict_or_path={**settings, **half}):
        network = adapter.build_transformer()
    _trim_heap()
    stream_weights(network, adapter.transformer_folder)
    return network


def stream_weights(network: nn.Module, folder: Path) -> None:
    """Fills partitioned parameters from safetensors, one file after the other, a bucket of parameters at a time. A collective."""
    named = dict(network.named_parameters())
    located = _located(folder)
    missing, unknown = sorted(named.keys() - located.keys()), sorted(located.keys() - named.keys())
    if missing or unknown:
        raise ConfigError(
            f"{folder} does not fit its own config.json: {len(missing)} parameter(s) missing {missing[:3]}, {len(unknown)} unknown {unknown[:3]}"
        )
    for file in sorted(set(located.values())):
        sizes = {name: int(p.ds_numel) for name, p in named.items() if located[name] == file}  # type: ignore[attr-defined]
        with safe_open(folder / file, framework="pt") as shard:
            for bucket in buckets(sizes, BUCKET_ELEMENTS):
                # The first rank's values reach all others on the way out.
                with deepspeed.zero.GatheredParameters([named[name] for name in bucket], modifier_rank=0):
                    if comm.rank() == 0:
                        for name in bucket:
                            _copy(named[name], shard.get_tensor(name), name)
                # glibc keeps what gathers have freed: 0.4 GB of a 1.8 GB network.
                _trim_heap()


def _located(folder: Path) -> dict[str, str]:
    """Tensor name -> file, from the index or from the only file."""
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    if index.is_file():
        return dict(json.loads(index.read_text())["weight_map"])
    single = folder / "diffusion_pytorch_model.safetensors"
    if not single.is_file():
        raise ConfigError(f"model.path: {folder} has no {single.name} and no index; save the pipeline as safetensors")
    with safe_open(single, framework="pt") as shard:
        return dict.fromkeys(shard.keys(), single.name)


@torch.no_grad()
def _copy(parameter: nn.Parameter, value: Tensor, name: str) -> None:
    if parameter.shape != value.shape:
        raise ConfigError(
            f"model.path: {name} is {list(value.shape)} in the file and {list(parameter.shape)} in the network"
        )
    parameter.copy_(value)


def _trim_heap() -> None:
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def peft_config(config: Config, adapter: ModelAdapter) -> PeftLoraConfig:
    lora = config.model.lora
    return PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.target_modules or adapter.lora_target_modules,
        init_lora_weights="gaussian" if lora.init == "gaussian" else True,
    )


def add_lora(transformer: nn.Module, config: Config, adapter: ModelAdapter) -> None:
    """PEFT LoRA in fp32 over the frozen base. Raises ConfigError where the target modules match nothing."""
    with torch.random.fork_rng():
        # Every rank draws the same initial adapter.
        torch.manual_seed(config.seed)
        transformer.requires_grad_(False)
        chosen = peft_config(config, adapter)
        try:
            transformer.add_adapter(chosen, adapter_name=LORA)  # type: ignore[operator]
        except ValueError as error:
            names = sorted(
                {name.rpartition(".")[2] for name, m in transformer.named_modules() if isinstance(m, nn.Linear)}
            )
            raise ConfigError(
                f"model.lora.target_modules = {chosen.target_modules!r}: {error}; linear layers here end in {', '.join(names)}"
            ) from error
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
