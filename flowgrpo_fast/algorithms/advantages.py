"""Rewards of a step, of all ranks -> advantages, which the trainer then clips (algorithm.advantage_clip). Which one: algorithm.advantage, registered here or the user's `module:function`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo_fast.config import AlgorithmConfig
from flowgrpo_fast.ops import group_advantage


@dataclass(frozen=True)
class Rewards:
    """B samples of all ranks, K rewards."""

    components: Tensor  # fp32 [B, K]
    weights: Tensor  # [K]
    total: Tensor  # fp32 [B], the weighted sum; NaN where invalid
    group_id: Tensor  # int64 [B]
    valid: Tensor  # bool [B]


def group(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """A = (r - mean of the group) / (std + eps), fp32 [B]. FlowGRPO; normalize none: Dr.GRPO (arXiv:2503.20783)."""
    c = config
    return group_advantage(
        rewards.total, rewards.group_id, normalize=c.normalize, eps=c.advantage_eps, clip=None, valid=rewards.valid
    )  # fmt: skip


def gdpo(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """GDPO (arXiv:2601.05242): each reward normalised in its group, then weighted and added, then normalised over the step.

    A reward of large scale does not drown the others, and groups that agree in one reward still teach the other.
    """
    total = torch.zeros(len(rewards.valid), dtype=torch.float64, device=rewards.total.device)
    for values, weight in zip(rewards.components.unbind(1), rewards.weights.tolist(), strict=True):
        total += weight * group_advantage(
            values, rewards.group_id, normalize="group_std", eps=config.advantage_eps, clip=None, valid=rewards.valid
        )
    everyone = torch.zeros_like(rewards.group_id)
    return group_advantage(
        total.float(), everyone, normalize="global_std", eps=config.advantage_eps, clip=None, valid=rewards.valid
    )  # fmt: skip
