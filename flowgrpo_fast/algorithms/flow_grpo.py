"""FlowGRPO (arXiv:2505.05470): the clipped policy loss over SDE steps.

L = mean over kept (sample, step) pairs of max(-A r, -A clip(r, 1 - c_low, 1 + c_high)) + beta KL(policy || reference)

Its relatives differ in settings, not in the loss: Flow-GRPO-Fast (rollout.window), Flow-CPS (rollout.rule cps), DanceGRPO (rule dance, shared
initial noise, algorithm.train_on), MixGRPO (a progressive window), Dr.GRPO (normalize none), TempFlow-GRPO (step_weight noise_level).
"""

from __future__ import annotations

from torch import Tensor

from flowgrpo_fast.algorithms.base import Algorithm, LossInputs, with_reference_kl
from flowgrpo_fast.ops import policy_loss, sde_log_prob


class FlowGRPO(Algorithm):
    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        c, i = self.config, inputs
        out = sde_log_prob(
            i.x, i.v, i.prev, i.coef, v_ref=i.v_ref, form=c.log_prob_form, reduction=c.log_prob_reduction
        )
        loss, metrics = policy_loss(
            out.log_prob,
            out.log_prob.detach() if i.old_log_prob is None else i.old_log_prob,
            i.advantage,
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            step_weight=i.step_weight,
            mask=i.mask,
            denominator=i.denominator,
        )
        return with_reference_kl(loss, metrics, i, c, out.kl), out.log_prob.detach(), metrics
