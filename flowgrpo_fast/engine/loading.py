"""The network under ZeRO-3 without a full copy per rank: built partitioned, filled shard by shard. And LoRA on top.

Every parameter is cut up as soon as its module is built, and gathered for a moment only, when its bytes come from the first rank. So host memory
beyond the partitions does not grow with the network: benchmarks/loading.py measures it.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import deepspeed
import torch
from diffusers.models.modeling_utils import no_init_weights
from peft import LoraConfig as PeftLoraConfig
from safetensors import safe_open
from torch import nn

from flowgrpo_fast import comm
from flowgrpo_fast.buckets import buckets
from flowgrpo_fast.config import Config, ConfigError
from flowgrpo_fast.models.base import ModelAdapter

LORA = "policy"
# The memory that a gather may take on a rank. It holds what it gathers up to three times: in the parameters, flat, and on its way through gloo.
BUCKET_BYTES = 96 * 2**20
COPIES = 3
# glibc's parameter of mallopt, and the value that it settles at by itself in a process that frees large tensors.
M_MMAP_THRESHOLD, SETTLED = -3, 32 * 2**20


def load_partitioned(adapter: ModelAdapter, settings: dict[str, Any]) -> nn.Module:
    """The network of adapter.transformer_folder, every rank holding its part. A collective.

    Not on the meta device: some networks keep tables as plain attributes (Qwen-Image's `pos_freqs`), which nothing would fill there.
    Raises ConfigError where the files and the network do not match.
    """
    # By config, not by zero.Init's `dtype`: DeepSpeed 0.19.8 ignores that where there is no fp16 (CPUs), and takes bf16.
    half = {"bf16": {"enabled": adapter.dtype is torch.bfloat16}, "fp16": {"enabled": adapter.dtype is torch.float16}}
    # Skipped initialisation: 33 -> 15 s for Qwen-Image in a trial.
    with _freed_memory_returned():
        with no_init_weights(), deepspeed.zero.Init(config_dict_or_path={**settings, **half}):
            network = adapter.build_transformer()
        stream_weights(network, adapter.transformer_folder)
    return network


def stream_weights(network: nn.Module, folder: Path) -> None:
    """Fills partitioned parameters from safetensors, one file after the other, a bucket of parameters at a time. A collective.

    Saved buffers (SD3's position table) are small: every rank reads them itself.
    """
    named, saved = dict(network.named_parameters()), saved_buffers(network)
    located = _located(folder)
    wanted = named.keys() | saved.keys()
    missing, unknown = sorted(wanted - located.keys()), sorted(located.keys() - wanted)
    if missing or unknown:
        raise ConfigError(
            f"{folder} does not fit its own config.json: {len(missing)} parameter(s) missing {missing[:3]}, {len(unknown)} unknown {unknown[:3]}"
        )
    files = sorted(set(located.values()))
    for file in files:
        with safe_open(folder / file, framework="pt") as shard:
            for name in (name for name in named if located[name] == file):
                _require_shape(name, shard.get_slice(name).get_shape(), list(named[name].ds_shape))  # type: ignore[attr-defined]
            for name in (name for name in saved if located[name] == file):
                _require_shape(name, shard.get_slice(name).get_shape(), list(saved[name].shape))
                saved[name].copy_(shard.get_tensor(name))
    for file in files:
        sizes = {name: p.ds_numel * p.element_size() for name, p in named.items() if located[name] == file}  # type: ignore[attr-defined]
        with safe_open(folder / file, framework="pt") as shard:
            for bucket in buckets(sizes, BUCKET_BYTES // COPIES):
                # The first rank's values reach all others on the way out.
                with deepspeed.zero.GatheredParameters([named[name] for name in bucket], modifier_rank=0):
                    if comm.rank() == 0:
                        for name in bucket:
                            named[name].data.copy_(shard.get_tensor(name))


def saved_buffers(network: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to a checkpoint, by name."""
    saved = dict(network.named_buffers())
    return {name: saved[name] for name in network.state_dict() if name in saved}


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


def _require_shape(name: str, in_file: list[int], in_network: list[int]) -> None:
    """On every rank, before the first collective: nobody is left waiting."""
    if in_file != in_network:
        raise ConfigError(f"model.path: {name} is {in_file} in the file and {in_network} in the network")


@contextmanager
def _freed_memory_returned() -> Iterator[None]:
    """Tensors of 1 MiB and more get pages of their own inside, which go back when they are freed.

    Else glibc takes them from its heap, where what is kept lies between what was freed: 0.1 to 0.4 GB more for a 1.8 GB network.
    """
    threshold = lambda size: ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, size)  # noqa: E731
    with suppress(AttributeError):  # not glibc
        threshold(2**20)
    try:
        yield
    finally:
        with suppress(AttributeError):
            threshold(SETTLED)


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
