"""FlowGRPO (arXiv:2505.05470): group-relative advantages and the clipped policy loss over SDE steps.

A = (r - mean_group) / (std + eps)          std over the whole batch or the group; "none" is Dr.GRPO
L = mean over kept (sample, step) pairs of max(-A r, -A clip(r, 1 - c_low, 1 + c_high)) + beta KL(policy || reference)
"""

from __future__ import annotations

from torch import Tensor

from flowgrpo_fast.algorithms.base import LossInputs
from flowgrpo_fast.config import AlgorithmConfig
from flowgrpo_fast.ops import group_advantage, policy_loss, sde_log_prob


class FlowGRPO:
    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    def advantages(self, rewards: Tensor, group_id: Tensor, valid: Tensor) -> Tensor:
        c = self.config
        return group_advantage(
            rewards, group_id, normalize=c.normalize, eps=c.advantage_eps, clip=c.advantage_clip, valid=valid
        )

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        c, i = self.config, inputs
        out = sde_log_prob(
            i.x, i.v, i.prev, i.coef, v_ref=i.v_ref, form=c.log_prob_form, reduction=c.log_prob_reduction
        )
        old = out.log_prob.detach() if i.old_log_prob is None else i.old_log_prob
        loss, metrics = policy_loss(
            out.log_prob,
            old,
            i.advantage,
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            mask=i.mask,
            denominator=i.denominator,
        )
        if out.kl is not None:
            kl = (out.kl * i.mask).sum() / i.denominator
            loss = loss + c.kl_coef * kl
            metrics["kl"] = kl.detach()
        return loss, out.log_prob.detach(), metrics
