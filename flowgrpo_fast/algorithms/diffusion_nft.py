"""DiffusionNFT (arXiv:2509.16117): learns the direction between what was good and what was bad, on the forward process, without log-probs.

    v+ = beta v + (1 - beta) v_old        v- = (1 + beta) v_old - beta v        x0+- = x - sigma v+-
    r  = clip(A / c, -1, 1) / 2 + 1/2     c = algorithm.advantage_clip
    L  = c / beta mean(r |x0+ - x0|^2 / w+  +  (1 - r) |x0- - x0|^2 / w-),   w+- = mean|x0+- - x0| of the pair, no gradient

Samples by the ODE of the old policy (algorithm.old_policy), usually without guidance. flow_grpo, verl-omni: beta 0.1, c 5.
"""

from __future__ import annotations

from torch import Tensor

from flowgrpo_fast.algorithms.base import Algorithm, ForwardInputs, old_velocity, squared_distance, with_velocity_kl
from flowgrpo_fast.config import AlgorithmConfig, ConfigError

LEAST_WEIGHT = 1e-5


class DiffusionNFT(Algorithm):
    process = "forward"
    needs_old_v = True
    beta = 0.1

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__(config)
        if config.advantage_clip is None:
            raise ConfigError(
                "algorithm.advantage_clip = null: diffusion_nft maps [-clip, clip] to [0, 1]; set it, 5 is usual"
            )

    def loss(self, inputs: ForwardInputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        c, i, beta = self.config, inputs, self.strength
        assert c.advantage_clip is not None
        v, old_v = i.v.float(), old_velocity(i).float()
        good = ((i.advantage / c.advantage_clip).clamp(-1, 1) + 1) / 2
        entries = good * self._distance(i, old_v + beta * (v - old_v))
        entries = entries + (1 - good) * self._distance(i, old_v - beta * (v - old_v))
        loss = i.mean(entries) * (c.advantage_clip / beta)
        metrics = {
            "kept": i.mask.sum().float(),
            "old_velocity_distance": i.kept_mean(squared_distance(v.detach(), old_v)),
        }
        return with_velocity_kl(loss, metrics, i, c), i.error(v).detach(), metrics

    @staticmethod
    def _distance(i: ForwardInputs, v: Tensor) -> Tensor:
        """|x0' - x0|^2 / w of each pair, fp32 [N]. x0' - x0 = sigma (noise - x0 - v)."""
        difference = i.sigma.view(-1, *[1] * (v.dim() - 1)) * (i.noise - i.x0 - v)
        weight = difference.detach().abs().flatten(1).mean(1).clamp(min=LEAST_WEIGHT)
        return difference.square().flatten(1).mean(1) / weight
