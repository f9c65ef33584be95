"""Training on the forward process: finished samples, noised anew to some levels, through the current network (DiffusionNFT, AWM, DPO).

Noise and levels are keyed by sample (for pairs by group), so neither batching nor the number of ranks changes them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.algorithms import ForwardInputs
from flowgrpo_fast.ops import STREAM_FORWARD_NOISE, STREAM_FORWARD_SIGMA, NoiseKey, philox_normal
from flowgrpo_fast.pairs import MicroBatch, PairTraining


class ForwardTraining(PairTraining):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        c, batch = self.config, self.batch
        self.key = batch.group_id if self.algorithm.shares_noise else batch.sample_id
        self.sigma = noise_levels(self.key, c.seed, self.plan.slots, c.algorithm.timesteps, batch.sigmas)
        # True guidance is for sampling: what is trained is the conditional velocity. Guidance as an input of the network stays.
        scale = c.rollout.guidance_scale
        self.guidance_scale = 1.0 if self.adapter.needs_negative(scale) else scale
        self.old_v: Tensor | None = None

    def begin(self, trusts_rollout: bool) -> None:
        """Velocities of the old policy. Until the first update of a rollout a `copy` of it is the current one."""
        if not self.algorithm.needs_old_v or (self.engine.old_policy is None and self.plan.updates == 1):
            return
        with torch.no_grad(), self.engine.old_weights():
            for index in range(self.plan.updates):
                for m in self._micro_batches(index):
                    v = self._at_level(self.engine, m, self._noised(m)[0])
                    if self.old_v is None:
                        self.old_v = torch.empty(*self.sigma.shape, *v.shape[1:], dtype=v.dtype, device=v.device)
                    self.old_v[m.samples, m.slots] = v

    @torch.no_grad()
    def velocity_once(self) -> None:
        m = self._micro_batches(0)[0]
        self._at_level(self.engine, m, self._noised(m)[0])

    def _loss(
        self, index: int, m: MicroBatch, advantages: Tensor, valid: Tensor, denominator: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        x, noise = self._noised(m)
        v_ref = None
        if self.algorithm.uses_reference:
            with torch.no_grad(), self.engine.reference_policy() as reference:
                v_ref = self._at_level(reference, m, x)
        inputs = ForwardInputs(
            x0=self.batch.latents[m.samples, 0],
            noise=noise,
            sigma=self.sigma[m.samples, m.slots],
            v=self._at_level(self.engine, m, x),
            old_v=None if self.old_v is None else self.old_v[m.samples, m.slots],
            v_ref=v_ref,
            advantage=advantages[m.samples],
            mask=valid[m.samples],
            denominator=denominator,
        )
        return self.algorithm.loss(inputs)

    def _place(self, sample: int, slot: int) -> str:
        return f"noise level {float(self.sigma[sample, slot]):.4f}"

    def _noised(self, m: MicroBatch) -> tuple[Tensor, Tensor]:
        """x = (1 - sigma) x0 + sigma noise, and the noise: fp32 [N, ...]."""
        x0, sigma = self.batch.latents[m.samples, 0], self.sigma[m.samples, m.slots]
        noise = philox_normal(
            NoiseKey(self.config.seed, m.slots, self.key[m.samples], STREAM_FORWARD_NOISE), x0.shape[1:]
        )
        sigma = sigma.view(-1, *[1] * (x0.dim() - 1))
        return (1 - sigma) * x0 + sigma * noise, noise

    def _at_level(self, transformer: Any, m: MicroBatch, x: Tensor) -> Tensor:
        return self._velocity(transformer, m, x, self.sigma[m.samples, m.slots], self.guidance_scale)


def noise_levels(key: Tensor, seed: int, count: int, timesteps: str, sigmas: Tensor) -> Tensor:
    """fp32 [B, count] in (0, 1), from the ids int64 [B] alone.

    uniform        u_k in [k / count, (k + 1) / count)
    logit_normal   sigmoid(z), z standard normal (SD3's training density)
    schedule       one of sigmas[:-1], in shares as for uniform; 1.0 is among them
    """
    z = philox_normal(NoiseKey(seed, 0, key, STREAM_FORWARD_SIGMA), (count,))
    if timesteps == "logit_normal":
        return z.sigmoid()
    share = (torch.arange(count, device=z.device) + torch.erfc(-z / math.sqrt(2)) / 2) / count
    if timesteps == "uniform":
        return share.clamp(1e-4, 1 - 1e-4)
    steps = len(sigmas) - 1
    return sigmas[(share * steps).long().clamp(max=steps - 1)]
