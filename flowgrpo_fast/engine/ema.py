"""Moving averages of the trained weights: fp32, sharded as the optimizer's master weights are.

For validation and exports: updated once per optimizer step. The old policy of DiffusionNFT: once per training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowgrpo_fast import comm
from flowgrpo_fast.config import ConfigError, EmaConfig

# At update n. DiffusionNFT's own (NVlabs; verl-omni has the names).
OLD_POLICY_DECAY: dict[str, Callable[[int], float]] = {
    "linear_to_0_5": lambda n: min(0.5, 0.001 * n),
    "delayed_linear_to_0_999": lambda n: min(0.999, 0.0075 * max(0, n - 75)),
}


def average_decay(config: EmaConfig) -> Callable[[int], float]:
    """With flow_grpo's warm-up: min(decay, (1 + n) / (10 + n)) at update n."""
    decay = config.decay
    assert decay is not None
    return lambda n: min(decay, (1 + n) / (10 + n)) if config.warmup else decay


class Masters:
    """This rank's share of the trained weights in fp32, where the optimizer keeps it, and the way from there into the network."""

    def __init__(self, engine: Any, zero_stage: int) -> None:
        self.optimizer, self.stage, self.network = engine.optimizer, zero_stage, engine.module
        # Stage 0 in fp32: torch's optimizer works on the parameters themselves.
        self.plain = isinstance(self.optimizer, torch.optim.Optimizer)

    def shards(self) -> list[Tensor]:
        if self.plain:
            return [p.data for p in self.network.parameters() if p.requires_grad]
        if self.stage == 3:
            flat = self.optimizer.fp32_partitioned_groups_flat
        elif self.stage == 0:
            flat = [p for group in self.optimizer.fp32_groups for p in group]
        else:
            flat = self.optimizer.single_partition_of_fp32_groups
        return [shard.data for shard in flat]

    def publish(self) -> None:
        """Master weights -> network, as after an optimizer step. A collective.

        Writing the partitions alone would miss the parameters below the persistence threshold, which stay gathered.
        """
        if self.plain:
            return
        if self.stage == 0:
            for half, full in zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True):
                for parameter, master in zip(half, full, strict=True):
                    parameter.data.copy_(master.data)
            return
        if self.stage < 3:
            self.optimizer.update_lp_params()
            return
        self.optimizer._partition_all_parameters()
        for group in range(len(self.optimizer.fp32_partitioned_groups_flat)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(group)
        persistent = self.optimizer.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    def named(self, shards: list[Tensor]) -> dict[str, Tensor]:
        """Views of tensors in the masters' layout: under stage 3 by parameter, its slice of this rank; else as they are, numbered."""
        if self.stage < 3:
            return {f"{i:05d}": shard for i, shard in enumerate(shards)}
        names = {id(p): name for name, p in self.network.named_parameters()}
        views = {}
        for group, flat in zip(self.optimizer.fp16_groups, shards, strict=True):
            at = 0
            for parameter in group:
                size = parameter.partition_numel()
                views[names[id(parameter)]] = flat[at : at + size]
                at += size
        return views

    def numel(self, name: str) -> int:
        return int(self.network.get_parameter(name).ds_numel)


class Ema:
    """`swapped()` puts the average into the network for a while; swapping back is bitwise."""

    def __init__(self, masters: Masters, decay: Callable[[int], float]) -> None:
        """decay: of update n, counted from 0."""
        self.masters, self.decay, self.updates = masters, decay, 0
        self.shadow = [shard.clone() for shard in masters.shards()]

    @torch.no_grad()
    def update(self) -> None:
        decay = self.decay(self.updates)
        for average, shard in zip(self.shadow, self.masters.shards(), strict=True):
            average.lerp_(shard, 1 - decay)
        self.updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The network holds the average inside. A collective."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, shard in zip(self.shadow, self.masters.shards(), strict=True):
            kept = shard.clone()
            shard.copy_(average)
            average.copy_(kept)
        self.masters.publish()

    def save(self, folder: Path) -> None:
        """This rank's file in `folder`."""
        tensors = {name: t.cpu().contiguous() for name, t in self.masters.named(self.shadow).items()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, _file(folder, comm.rank()), {"updates": str(self.updates), "ranks": str(comm.world_size())})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """What `save` wrote, on the same or, under stage 3, on another number of ranks. ValueError where it does not fit."""
        with safe_open(_file(folder, 0), framework="pt") as first:
            metadata = first.metadata()
        ranks = int(metadata["ranks"])
        self.updates = int(metadata["updates"])
        views = self.masters.named(self.shadow)
        if ranks == comm.world_size():
            with safe_open(_file(folder, comm.rank()), framework="pt") as mine:
                for name, view in views.items():
                    view.copy_(mine.get_tensor(name))
            return
        if self.masters.stage < 3:
            raise ValueError(f"the EMA of {ranks} ranks can be spread over {comm.world_size()} under ZeRO stage 3 only")
        files = [safe_open(_file(folder, rank), framework="pt") for rank in range(ranks)]
        for name, view in views.items():
            whole = torch.cat([file.get_tensor(name) for file in files])[: self.masters.numel(name)]
            mine = whole[comm.rank() * view.numel() : (comm.rank() + 1) * view.numel()]
            view.zero_()
            view[: mine.numel()].copy_(mine)


def read_average(folder: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The whole average on the CPU, fp32, from the files of all ranks: parameter name -> tensor. ConfigError where there is none."""
    if not _file(folder, 0).is_file():
        raise ConfigError(f"{folder} holds no average: the run had ema.decay null")
    with safe_open(_file(folder, 0), framework="pt") as first:
        metadata, names = first.metadata(), set(first.keys())
    if not shapes.keys() <= names:
        raise ConfigError(
            f"{folder} was written under ZeRO stage 0 to 2; the average can be exported by the trainer only"
        )
    files = [safe_open(_file(folder, rank), framework="pt") for rank in range(int(metadata["ranks"]))]
    return {
        name: torch.cat([file.get_tensor(name) for file in files])[: shape.numel()].view(shape)
        for name, shape in shapes.items()
    }


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"
