"""Diffusion DPO (arXiv:2311.12908), the best sample of each group is preferred to the worst.

    e = mean((v - (noise - x0))^2),   L = mean over pairs of -log sigmoid(-beta / 2 ((e_w - e_w,ref) - (e_l - e_l,ref)))

Both samples of a pair get the same noise and noise level. A group without two different rewards makes no pair. beta 2000 (verl-omni, Flow-Factory).
Offline: rollout.agent_loop preferences, groups of two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flowgrpo_fast.algorithms.base import Algorithm, ForwardInputs, best_and_worst, with_velocity_kl
from flowgrpo_fast.config import AlgorithmConfig, ConfigError


class DiffusionDPO(Algorithm):
    process = "forward"
    needs_reference = True
    shares_noise = True
    beta = 2000.0

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__(config)
        if config.train_on not in (None, 2):
            raise ConfigError(
                f"algorithm.train_on = {config.train_on}: dpo trains on two samples of each group; remove it"
            )

    def trained_per_group(self) -> int:
        return 2

    def choose(self, advantages: Tensor, group_id: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        index = best_and_worst(advantages, group_id, valid, 2)
        worst, best = index.view(-1, 2).unbind(1)
        # Of a group of two, `index` is in order of appearance.
        swapped = advantages[worst] > advantages[best]
        worst, best = torch.where(swapped, best, worst), torch.where(swapped, worst, best)
        is_pair = valid[worst] & valid[best] & (advantages[best] > advantages[worst])
        return torch.stack([worst, best], 1).view(-1), is_pair.repeat_interleave(2)

    def loss(self, inputs: ForwardInputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        c, i = self.config, inputs
        assert i.v_ref is not None
        error = i.error(i.v)
        loser, winner = (error - i.error(i.v_ref)).view(-1, 2).unbind(1)
        margin = -self.strength / 2 * (winner - loser)
        # The mean over pairs: `mean` divides by samples, and each pair has two.
        loss = i.mean(-F.logsigmoid(margin).repeat_interleave(2))
        pairs = i.mask[::2]
        count = pairs.sum().clamp(min=1)
        metrics = {
            "kept": i.mask.sum().float(),
            "preference_accuracy": (pairs & (margin > 0)).sum() / count,
            "preference_margin": torch.where(pairs, margin.detach(), 0.0).sum() / count,
        }
        return with_velocity_kl(loss, metrics, i, c), error.detach(), metrics
