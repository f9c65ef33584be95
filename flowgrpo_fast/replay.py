"""Training on the reverse process: stored (sample, step) pairs through the current network, in micro-batches of mixed timesteps.

Order of pairs: rollout batch, then window slot, then sample. A micro-batch of the rollout's size is therefore one
rollout batch at one slot, row for row as it was sampled: the same shape, the same bits, ratio exactly 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.algorithms import LossInputs
from flowgrpo_fast.config import Config
from flowgrpo_fast.ops import sde_log_prob
from flowgrpo_fast.pairs import MicroBatch, PairTraining
from flowgrpo_fast.schedule import StepCoefficients, sde_coefficients, trainable_steps
from flowgrpo_fast.step_metrics import StepMetrics


class Replay(PairTraining):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.trusts_rollout = True
        self.recomputed: Tensor | None = None
        self.recomputed_v: Tensor | None = None
        weighted = self.config.algorithm.step_weight == "noise_level"
        self.step_weight = step_weights(self.config, self.batch.sigmas) if weighted else None

    def begin(self, trusts_rollout: bool) -> None:
        self.trusts_rollout = trusts_rollout
        if self.plan.updates > 1 and not trusts_rollout:
            self.recomputed = self._recompute_log_probs()

    def update(self, index: int, advantages: Tensor, valid: Tensor) -> dict[str, float]:
        c, steps = self.config.algorithm, len(self.batch.sigmas) - 1
        self.by_step = StepMetrics(steps, c.clip_low, c.clip_high, valid.device)
        metrics = super().update(index, advantages, valid)
        return metrics | self.by_step.reduced() if self.algorithm.clips_log_prob_ratio else metrics

    def velocity_once(self) -> None:
        self.log_probs(self.first_of_each_slot()[0])

    def _loss(
        self, index: int, m: MicroBatch, advantages: Tensor, valid: Tensor, denominator: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        inputs = self._inputs(index, m, advantages, valid, denominator)
        loss, log_prob, metrics = self.algorithm.loss(inputs)
        keep, batch = inputs.mask, self.batch
        old = log_prob if inputs.old_log_prob is None else inputs.old_log_prob
        self.by_step.add(batch.step_index[m.samples, m.slots], log_prob, old, inputs.advantage, keep)
        difference = torch.where(keep, (log_prob - batch.log_probs[m.samples, m.slots]).abs(), 0.0)
        metrics["rollout_log_ratio_max"] = difference.max()
        metrics["rollout_log_ratio_mean"] = difference.sum() / keep.sum().clamp(min=1)
        return loss, log_prob, metrics

    def _place(self, sample: int, slot: int) -> str:
        return f"denoising step {int(self.batch.step_index[sample, slot])}"

    def _inputs(self, index: int, m: MicroBatch, advantages: Tensor, valid: Tensor, denominator: Tensor) -> LossInputs:
        batch = self.batch
        x = batch.latents[m.samples, m.slots]
        v_ref = None
        if self.algorithm.uses_reference:
            with torch.no_grad(), self.engine.reference_policy() as reference:
                v_ref = self._at_step(reference, m, x)
        old: Tensor | None = None
        if self.trusts_rollout:
            old = batch.log_probs[m.samples, m.slots]
        elif index > 0:
            assert self.recomputed is not None
            old = self.recomputed[m.samples, m.slots]
        coef, at = self._coefficients(m), batch.step_index[m.samples, m.slots]
        minus_dt = batch.sigmas[at] - batch.sigmas[at + 1]
        return LossInputs(
            x=x,
            v=self._at_step(self.engine, m, x),
            prev=batch.latents[m.samples, m.slots + 1],
            coef=coef,
            minus_dt=minus_dt,
            std_dev=coef.s / minus_dt.sqrt() if self.config.rollout.rule == "sde" else coef.s,
            old_log_prob=old,
            old_v=self._old_velocity(index, m) if self.algorithm.needs_old_v else None,
            advantage=advantages[m.samples],
            mask=valid[m.samples],
            step_weight=None if self.step_weight is None else self.step_weight[at],
            denominator=denominator,
            v_ref=v_ref,
        )

    def _at_step(self, transformer: Any, m: MicroBatch, x: Tensor) -> Tensor:
        sigma = self.batch.sigmas[self.batch.step_index[m.samples, m.slots]]
        return self._velocity(transformer, m, x, sigma, self.config.rollout.guidance_scale)

    def _coefficients(self, m: MicroBatch) -> StepCoefficients:
        r = self.config.rollout
        at = self.batch.step_index[m.samples, m.slots]
        return sde_coefficients(self.batch.sigmas, at, rule=r.rule, noise_level=r.noise_level)

    def first_of_each_slot(self) -> list[MicroBatch]:
        """A micro-batch of the first samples at each window slot."""
        samples = torch.arange(min(self.plan.micro_batch_size, self.batch.size))
        device = self.batch.latents.device
        on_host = [int(i) for i in samples]
        return [
            MicroBatch(samples.to(device), torch.full_like(samples, slot).to(device), on_host)
            for slot in range(self.plan.slots)
        ]

    @torch.no_grad()
    def log_probs(self, m: MicroBatch) -> Tensor:
        """fp32 [N] under the current weights."""
        return self._log_probs(m)[0]

    @torch.no_grad()
    def _log_probs(self, m: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs fp32 [N] and velocities [N, ...] under the current weights."""
        c = self.config.algorithm
        x, prev = self.batch.latents[m.samples, m.slots], self.batch.latents[m.samples, m.slots + 1]
        v = self._at_step(self.engine, m, x)
        out = sde_log_prob(x, v, prev, self._coefficients(m), form=c.log_prob_form, reduction=c.log_prob_reduction)
        return out.log_prob, v

    def _recompute_log_probs(self) -> Tensor:
        """Log-probs [B, W] under the weights before the first update: what later updates of this rollout compare with."""
        result = torch.empty_like(self.batch.log_probs)
        for index in range(self.plan.updates):
            for m in self._micro_batches(index):
                result[m.samples, m.slots], v = self._log_probs(m)
                if self.algorithm.needs_old_v:
                    if self.recomputed_v is None:
                        self.recomputed_v = torch.empty_like(self.batch.latents[:, 1:], dtype=v.dtype)
                    self.recomputed_v[m.samples, m.slots] = v
        return result

    def _old_velocity(self, index: int, m: MicroBatch) -> Tensor | None:
        """Of the policy that made the steps; None: the current one."""
        if self.trusts_rollout:
            assert self.batch.old_v is not None
            return self.batch.old_v[m.samples, m.slots]
        return None if self.recomputed_v is None or index == 0 else self.recomputed_v[m.samples, m.slots]


def step_weights(config: Config, sigmas: Tensor) -> Tensor:
    """fp32 [T]: each step's noise s over the mean of those that a window may hold (TempFlow-GRPO, arXiv:2508.04324)."""
    r, host = config.rollout, sigmas.cpu()
    s = sde_coefficients(host, torch.arange(len(host) - 1), rule=r.rule, noise_level=r.noise_level).s
    trained = trainable_steps(host, r.rule, r.noise_level)
    if r.window.range is not None:
        trained[: r.window.range[0]] = False
        trained[r.window.range[1] :] = False
    return (s / s[trained].mean()).to(sigmas.device)
