"""GRPO-Guard (arXiv:2510.22319; flow_grpo's grpo_guard): ratios whose scale and centre do not depend on the step.

    ratio = exp(s (log p - log p_old + bias)),   bias = mean((mu - mu_old)^2) / (2 s^2)
    L     = mean of max(-A r, -A clip(r)) / -dt

In exact arithmetic s (log p - log p_old + bias) = mean(eps_old (mu - mu_old)): 1 on-policy, without a bias below 1. s and dt are each pair's own; upstream
takes them, and the bias, as means over the micro-batch, which mixes timesteps (flow_grpo #244).
"""

from __future__ import annotations

from torch import Tensor

from flowgrpo_fast.algorithms.base import Algorithm, LossInputs, old_velocity, with_reference_kl
from flowgrpo_fast.config import AlgorithmConfig, ConfigError
from flowgrpo_fast.ops import policy_loss, sde_log_prob


class GRPOGuard(Algorithm):
    clips_log_prob_ratio = False
    needs_old_v = True

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__(config)
        if (config.log_prob_form, config.log_prob_reduction) != ("gaussian", "mean"):
            raise ConfigError(
                f"algorithm.name grpo_guard needs log_prob_form gaussian and log_prob_reduction mean, got {config.log_prob_form} and"
                f" {config.log_prob_reduction}: its ratio is made of the density's exponent"
            )

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        c, i = self.config, inputs
        old_v = old_velocity(i)
        out = sde_log_prob(i.x, i.v, i.prev, i.coef, v_ref=old_v, v_old=old_v)
        assert out.kl is not None
        assert out.log_ratio is not None
        weight = 1 / i.minus_dt
        loss, metrics = policy_loss(
            None,
            None,
            i.advantage,
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            log_ratio=(out.log_ratio + out.kl) * i.coef.s,
            step_weight=weight if i.step_weight is None else weight * i.step_weight,
            mask=i.mask,
            denominator=i.denominator,
        )
        return with_reference_kl(loss, metrics, i, c), out.log_prob.detach(), metrics
