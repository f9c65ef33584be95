"""What the trainer asks of an algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flowgrpo_fast.config import AlgorithmConfig
from flowgrpo_fast.schedule import StepCoefficients


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of N (sample, step) pairs of mixed timesteps."""

    x: Tensor  # [N, ...] fp32, input of the step
    v: Tensor  # [N, ...] velocity of the current policy, with gradient
    prev: Tensor  # [N, ...] fp32, the step's stored result
    coef: StepCoefficients  # [N]
    old_log_prob: Tensor | None  # fp32 [N]; None: on-policy, take the current one, detached
    advantage: Tensor  # fp32 [N]
    mask: Tensor  # bool [N]; False: a sample without a valid reward
    denominator: Tensor  # 0-d; kept pairs of all ranks / number of ranks (DeepSpeed averages gradients over ranks)
    v_ref: Tensor | None  # [N, ...] velocity of the reference policy


class Algorithm(Protocol):
    def __init__(self, config: AlgorithmConfig) -> None: ...

    def advantages(self, rewards: Tensor, group_id: Tensor, valid: Tensor) -> Tensor:
        """Rewards fp32 [B] of all ranks, group_id int64 [B], valid bool [B] -> advantages fp32 [B]."""
        ...

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(loss with gradient, detached log_prob fp32 [N], metrics as 0-d device tensors)."""
        ...
