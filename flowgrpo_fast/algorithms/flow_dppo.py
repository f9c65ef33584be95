"""Flow-DPPO (UniRL, verl-omni): no clip; samples that are far from the old policy and on their way further are left out.

    D    = mean((mu - mu_old)^2) / (2 s^2)
    keep = not (D >= divergence_limit and ((r > 1 and A > 0) or (r < 1 and A < 0)))
    L    = sum over kept of -A r / number of all

s is each pair's own (upstream multiplies by sqrt(-dt), which is right for one rule only). Advantages are not clamped there: algorithm.advantage_clip null.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowgrpo_fast.algorithms.base import Algorithm, LossInputs, old_velocity, per_element, with_reference_kl
from flowgrpo_fast.ops import policy_loss, sde_log_prob

NO_CLIP = 1e30


class FlowDPPO(Algorithm):
    clips_log_prob_ratio = False
    needs_old_v = True

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        c, i = self.config, inputs
        old_v = old_velocity(i)
        out = sde_log_prob(
            i.x, i.v, i.prev, i.coef, v_ref=old_v, v_old=old_v, form=c.log_prob_form, reduction=c.log_prob_reduction
        )
        assert out.kl is not None
        assert out.log_ratio is not None
        divergence = per_element(out.kl.detach(), i, c)
        far = divergence >= c.divergence_limit
        rising = out.log_ratio.detach().sign() * i.advantage > 0
        dropped = i.mask & far & rising
        loss, metrics = policy_loss(
            None,
            None,
            i.advantage,
            clip_low=NO_CLIP,
            clip_high=NO_CLIP,
            log_ratio=out.log_ratio,
            step_weight=i.step_weight,
            mask=i.mask & ~dropped,
            denominator=i.denominator,
        )
        # What the mean over all ranks divides by, and what weighs the other metrics.
        metrics["kept"] = i.mask.sum().float()
        metrics["dropped_fraction"] = dropped.sum() / i.mask.sum().clamp(min=1)
        metrics["divergence_max"] = torch.where(i.mask, divergence, 0.0).max()
        return with_reference_kl(loss, metrics, i, c), out.log_prob.detach(), metrics
