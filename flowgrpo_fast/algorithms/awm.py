"""Advantage-weighted matching (AWM, arXiv:2509.25050): the policy gradient whose log-prob is the pretraining loss.

    log p = -mean((v - (noise - x0))^2),   r = exp(log p - log p_old)
    L     = mean of max(-A r, -A clip(r, 1 - c_low, 1 + c_high)) + kl_coef mean((v - v_ref)^2)

On-policy its gradient is A times that of the flow matching loss. Samples come from the ODE; noise levels are drawn anew (algorithm.timesteps).
"""

from __future__ import annotations

from torch import Tensor

from flowgrpo_fast.algorithms.base import Algorithm, ForwardInputs, with_velocity_kl
from flowgrpo_fast.ops import policy_loss


class AdvantageWeightedMatching(Algorithm):
    process = "forward"
    needs_old_v = True

    def loss(self, inputs: ForwardInputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        c, i = self.config, inputs
        log_prob = -i.error(i.v)
        loss, metrics = policy_loss(
            log_prob,
            log_prob.detach() if i.old_v is None else -i.error(i.old_v),
            i.advantage,
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            mask=i.mask,
            denominator=i.denominator,
        )
        return with_velocity_kl(loss, metrics, i, c), log_prob.detach(), metrics
