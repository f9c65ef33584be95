"""The training phase: stored (sample, step) pairs through the current network, in micro-batches of mixed timesteps.

Order of pairs: rollout batch, then window slot, then sample. A micro-batch of the rollout's size is therefore one
rollout batch at one slot, row for row as it was sampled: the same shape, the same bits, ratio exactly 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast import comm
from flowgrpo_fast.algorithms import Algorithm, LossInputs
from flowgrpo_fast.batch import RolloutBatch
from flowgrpo_fast.config import Config
from flowgrpo_fast.engine import Engine
from flowgrpo_fast.lifetime import alive
from flowgrpo_fast.models.base import ModelAdapter, PromptEmbeds
from flowgrpo_fast.ops import sde_log_prob
from flowgrpo_fast.plan import BatchPlan
from flowgrpo_fast.rollout.base import NonFiniteError
from flowgrpo_fast.schedule import StepCoefficients, sde_coefficients
from flowgrpo_fast.step_metrics import StepMetrics

# How a metric of micro-batches (and ranks) becomes one number; everything else is a mean weighted by kept pairs.
SUMMED = {"loss", "kl", "kept"}
# Divided by kept pairs per rank, as the gradient wants it; their sum over ranks is then world_size times too large.
AVERAGED_OVER_RANKS = {"loss", "kl"}
MAXIMUM = ("ratio_max_deviation", "rollout_log_ratio_max")


@dataclass(frozen=True)
class Text:
    """Prompt embeddings of a batch, and which row each sample has (on the host)."""

    positive: PromptEmbeds
    negative: PromptEmbeds | None
    row: list[int]

    @staticmethod
    def of(batch: RolloutBatch) -> Text:
        def embeds(prefix: str) -> PromptEmbeds | None:
            values, mask = getattr(batch, f"{prefix}prompt_embeds"), getattr(batch, f"{prefix}prompt_embeds_mask")
            if values is None:
                return None
            return PromptEmbeds(
                values, tuple(int(n) for n in mask.sum(1).cpu()), getattr(batch, f"{prefix}pooled_prompt_embeds")
            )

        positive = embeds("")
        assert positive is not None
        return Text(positive, embeds("negative_"), [int(i) for i in batch.prompt_index.cpu()])

    def samples(self, index: Sequence[int]) -> tuple[PromptEmbeds, PromptEmbeds | None]:
        rows = [self.row[i] for i in index]
        negative = self.negative
        if negative is not None:
            negative = negative.repeated(len(rows)) if len(negative.lengths) == 1 else negative.rows(rows)
        return self.positive.rows(rows), negative


@dataclass(frozen=True)
class MicroBatch:
    """N pairs: int64 [N] on the device, and the samples on the host, where the text rows are chosen."""

    samples: Tensor
    slots: Tensor
    samples_host: list[int]


class Replay:
    """One rollout's training: `update(u)` accumulates gradients over the pairs of update u and makes one optimizer step."""

    def __init__(
        self,
        config: Config,
        plan: BatchPlan,
        adapter: ModelAdapter,
        engine: Engine,
        algorithm: Algorithm,
        batch: RolloutBatch,
    ) -> None:
        """plan, batch: of this rank, or of its sequence-parallel group: `BatchPlan.shared`, `share_batch`."""
        self.config, self.plan, self.adapter, self.engine, self.algorithm = config, plan, adapter, engine, algorithm
        self.batch, self.text = batch, Text.of(batch)
        self.trusts_rollout = True
        self.recomputed: Tensor | None = None

    def begin(self, trusts_rollout: bool) -> None:
        """Before the first update. trusts_rollout: take the rollout's log-probs as the old ones; else the trainer's."""
        self.trusts_rollout = trusts_rollout
        if self.plan.updates > 1 and not trusts_rollout:
            self.recomputed = self._recompute_log_probs()

    def update(self, index: int, advantages: Tensor, valid: Tensor) -> dict[str, float]:
        """Pairs of update `index` -> gradients -> optimizer step. advantages fp32 [B], valid bool [B] of this rank.

        Returns metrics over all ranks, without prefix. Where no pair of any rank is kept the optimizer step is skipped, on every rank alike.
        Raises NonFiniteError, on every rank alike, before the weights change.
        """
        micro_batches = self._micro_batches(index)
        kept = torch.stack([valid[m.samples].sum() for m in micro_batches]).sum()
        # Ranks that share forwards have counted the same pairs.
        kept_everywhere = int(comm.gather_rows(kept[None]).sum()) // self.plan.sequence_parallel
        if kept_everywhere == 0:
            return {"kept": 0.0, "skipped": 1.0}
        denominator = torch.tensor(kept_everywhere / self.plan.world_size, device=valid.device)
        rows: list[dict[str, Tensor]] = []
        log_probs: list[Tensor] = []
        c, steps = self.config.algorithm, len(self.batch.sigmas) - 1
        by_step = StepMetrics(steps, c.clip_low, c.clip_high, valid.device)
        with self.engine.accumulation():
            for m in micro_batches:
                inputs = self._inputs(index, m, advantages, valid, denominator)
                loss, log_prob, metrics = self.algorithm.loss(inputs)
                metrics["loss"] = loss.detach()
                self.engine.backward(loss)
                keep = inputs.mask
                old = log_prob if inputs.old_log_prob is None else inputs.old_log_prob
                by_step.add(self.batch.step_index[m.samples, m.slots], log_prob, old, inputs.advantage, keep)
                difference = torch.where(keep, (log_prob - self.batch.log_probs[m.samples, m.slots]).abs(), 0.0)
                for name in AVERAGED_OVER_RANKS & metrics.keys():
                    metrics[name] = metrics[name] / self.plan.world_size
                for name in SUMMED & metrics.keys():
                    metrics[name] = metrics[name] / self.plan.sequence_parallel
                metrics["rollout_log_ratio_max"] = difference.max()
                metrics["rollout_log_ratio_mean"] = difference.sum() / keep.sum().clamp(min=1)
                rows.append(metrics)
                log_probs.append(log_prob)
                alive()
        self._require_finite(micro_batches, log_probs)
        grad_norm, rate, applied = self.engine.step()
        own = {"grad_norm": grad_norm, "lr": rate, "skipped": float(not applied)}
        return reduce_metrics(rows) | by_step.reduced() | own

    def _micro_batches(self, index: int) -> list[MicroBatch]:
        """The pairs of update `index`, cut into forwards of micro_batch_size."""
        plan, device = self.plan, self.batch.latents.device
        share = plan.samples // plan.updates
        samples = torch.arange(index * share, (index + 1) * share).view(-1, 1, plan.rollout_batch_size)
        samples = samples.expand(-1, plan.window, -1)
        slots = torch.arange(plan.window)[None, :, None].expand_as(samples)
        size = plan.micro_batch_size
        cut = zip(samples.reshape(-1).split(size), slots.reshape(-1).split(size), strict=True)
        return [MicroBatch(sample.to(device), slot.to(device), [int(i) for i in sample]) for sample, slot in cut]

    def _inputs(self, index: int, m: MicroBatch, advantages: Tensor, valid: Tensor, denominator: Tensor) -> LossInputs:
        batch = self.batch
        x = batch.latents[m.samples, m.slots]
        v_ref = None
        if self.config.algorithm.kl_coef > 0:
            with torch.no_grad(), self.engine.reference_policy() as reference:
                v_ref = self._velocity(reference, m, x)
        old: Tensor | None = None
        if self.trusts_rollout:
            old = batch.log_probs[m.samples, m.slots]
        elif index > 0:
            assert self.recomputed is not None
            old = self.recomputed[m.samples, m.slots]
        return LossInputs(
            x=x,
            v=self._velocity(self.engine, m, x),
            prev=batch.latents[m.samples, m.slots + 1],
            coef=self._coefficients(m),
            old_log_prob=old,
            advantage=advantages[m.samples],
            mask=valid[m.samples],
            denominator=denominator,
            v_ref=v_ref,
        )

    def _velocity(self, transformer: Any, m: MicroBatch, x: Tensor) -> Tensor:
        batch = self.batch
        positive, negative = self.text.samples(m.samples_host)
        n = self.plan.sequence_parallel
        positive, negative = positive.padded(n), None if negative is None else negative.padded(n)
        return self.adapter.velocity(
            transformer,
            x,
            batch.sigmas[batch.step_index[m.samples, m.slots]],
            positive,
            negative,
            self.config.rollout.guidance_scale,
            batch.media_size,
        )

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
            for slot in range(self.plan.window)
        ]

    @torch.no_grad()
    def log_probs(self, m: MicroBatch) -> Tensor:
        """fp32 [N] under the current weights."""
        c = self.config.algorithm
        x, prev = self.batch.latents[m.samples, m.slots], self.batch.latents[m.samples, m.slots + 1]
        v = self._velocity(self.engine, m, x)
        out = sde_log_prob(x, v, prev, self._coefficients(m), form=c.log_prob_form, reduction=c.log_prob_reduction)
        return out.log_prob

    def _recompute_log_probs(self) -> Tensor:
        """Log-probs [B, W] under the weights before the first update: what later updates of this rollout compare with."""
        result = torch.empty_like(self.batch.log_probs)
        for index in range(self.plan.updates):
            for m in self._micro_batches(index):
                result[m.samples, m.slots] = self.log_probs(m)
        return result

    def _require_finite(self, micro_batches: list[MicroBatch], log_probs: list[Tensor]) -> None:
        finite = torch.cat(log_probs).isfinite()
        if comm.all_ok(bool(finite.all()), finite.device):
            return
        where = "on another rank"
        if not finite.all():
            pair = int((~finite).nonzero()[0])
            sample = torch.cat([m.samples for m in micro_batches])[pair]
            slot = torch.cat([m.slots for m in micro_batches])[pair]
            where = f"at denoising step {int(self.batch.step_index[sample, slot])}, sample {int(self.batch.sample_id[sample])}"
        raise NonFiniteError(
            f"the log-prob is not finite in training, {where}; the weights were not changed by this update"
        )


def share_batch(
    batch: RolloutBatch, advantages: Tensor, valid: Tensor, plan: BatchPlan
) -> tuple[RolloutBatch, Tensor, Tensor]:
    """What a rank trains on: its own samples, or those of its sequence-parallel group, update by update in rank order.

    batch: this rank's B samples. advantages fp32, valid bool [world_size * B], of all ranks. A collective.
    """
    n, B = plan.sequence_parallel, batch.size
    if n == 1:
        mine = slice(comm.rank() * B, (comm.rank() + 1) * B)
        return batch, advantages[mine], valid[mine]
    first = comm.rank() // n * n
    everyone = comm.gather_bytes(batch.pack())
    joined = RolloutBatch.concat([RolloutBatch.unpack(packed) for packed in everyone[first : first + n]])
    order = torch.arange(n * B).view(n, plan.updates, -1).transpose(0, 1).reshape(-1).to(valid.device)
    rows = slice(first * B, (first + n) * B)
    return joined.to(batch.latents.device).select(order), advantages[rows][order], valid[rows][order]


def reduce_metrics(rows: list[dict[str, Tensor]]) -> dict[str, float]:
    """Metrics of micro-batches on all ranks -> one number each, with one transfer to the host."""
    names = list(rows[0])
    table = comm.gather_rows(torch.stack([torch.stack([row[name].float() for name in names]) for row in rows])).cpu()
    weight = table[:, names.index("kept")]
    reduced = {}
    for i, name in enumerate(names):
        column = table[:, i]
        if name in SUMMED:
            value = column.sum()
        elif name in MAXIMUM:
            value = column.max()
        else:
            value = (column * weight).sum() / weight.sum()
        reduced[name] = float(value)
    return reduced
