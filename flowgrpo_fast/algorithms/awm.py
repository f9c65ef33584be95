"""Advantage-weighted matching (AWM, arXiv:2509.25050): the policy gradient whose log-prob is the pretraining loss.

    log p = -e,   e = mean((v - (noise - x0))^2),   r = exp(log p - log p_old)
    L     = mean of max(-A r, -A clip(r, 1 - c_low, 1 + c_high)) + kl_coef mean((v - v_ref)^2)

algorithm.matching: `sigma` is -sigma e, `ghuber` -sigma ((e + tiny)^p - tiny^p) / p with p = 1/4 and tiny = 1e-10.
On-policy (and `uniform`) the gradient is A times that of the flow matching loss. Samples come from the ODE; noise levels are drawn anew (algorithm.timesteps).
"""

from __future__ import annotations

from torch import Tensor

from flowgrpo_fast.algorithms.base import Algorithm, ForwardInputs, with_velocity_kl
from flowgrpo_fast.ops import policy_loss

POWER, TINY = 0.25, 1e-10


class AdvantageWeightedMatching(Algorithm):
    process = "forward"
    needs_old_v = True
    has_matching = True

    def log_prob(self, inputs: ForwardInputs, v: Tensor) -> Tensor:
        """fp32 [N]."""
        error = inputs.error(v)
        if self.config.matching == "uniform":
            return -error
        if self.config.matching == "ghuber":
            error = ((error + TINY).pow(POWER) - TINY**POWER) / POWER
        return -inputs.sigma * error

    def loss(self, inputs: ForwardInputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        c, i = self.config, inputs
        log_prob = self.log_prob(i, i.v)
        loss, metrics = policy_loss(
            log_prob,
            log_prob.detach() if i.old_v is None else self.log_prob(i, i.old_v),
            i.advantage,
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            mask=i.mask,
            denominator=i.denominator,
        )
        return with_velocity_kl(loss, metrics, i, c), log_prob.detach(), metrics
