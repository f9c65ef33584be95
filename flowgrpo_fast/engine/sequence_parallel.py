"""Ulysses sequence parallelism of training forwards, by diffusers' context parallel: ranks of a group hold a part of every sequence each,
and of all heads during attention.

Rollouts stay data-parallel: every rank samples its own groups. For an update the ranks of a sequence-parallel group exchange their batches and
go through all of them together. Each rank's gradient is then that of its own tokens; the sum over the group is the whole gradient, and
DeepSpeed's mean over all ranks is the same mean as without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flowgrpo_fast.config import ConfigError


class SequenceParallel:
    """`active()` around forwards and backwards in which each group of `size` neighbouring ranks acts as one."""

    def __init__(self, network: nn.Module, size: int, device: torch.device) -> None:
        """Raises ConfigError for a network that cannot be split."""
        self.network, self.size = network, size
        if getattr(network, "_cp_plan", None) is None:
            raise ConfigError(
                f"engine.sequence_parallel_size {size}: {type(network).__name__} has no context-parallel plan in diffusers"
            )
        heads = int(network.config.num_attention_heads)  # type: ignore[union-attr, arg-type]
        if heads % size:
            raise ConfigError(
                f"engine.sequence_parallel_size {size} does not divide the {heads} attention heads of the network"
            )
        shape = (dist.get_world_size() // size, 1, size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "ring", "ulysses"))["ring", "ulysses"]
        context = ContextParallelConfig(ulysses_degree=size, mesh=mesh)
        # Not by `enable_parallelism`, which cannot be undone and divides by the number of accelerators (0 on a CPU).
        context.setup(dist.get_rank(), dist.get_world_size(), device, mesh)
        self.config = ParallelConfig(context_parallel_config=context)
        self.group: dist.ProcessGroup = mesh["ulysses"].get_group()

    @contextmanager
    def active(self) -> Iterator[None]:
        plan = self.network._cp_plan
        self._tell_attention(self.config)
        apply_context_parallel(self.network, self.config.context_parallel_config, plan)
        try:
            yield
        finally:
            remove_context_parallel(self.network, plan)
            self._tell_attention(None)

    def _tell_attention(self, config: ParallelConfig | None) -> None:
        for module in self.network.modules():
            processor = getattr(module, "processor", None)
            if processor is not None and hasattr(processor, "_parallel_config"):
                processor._parallel_config = config
