"""What training on any rollout shares: pairs of a sample and a slot, cut into micro-batches, forwards, one optimizer step, metrics of all ranks.

A slot is a step of the trained window (replay.py) or a noise level (forward.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast import comm
from flowgrpo_fast.algorithms import Algorithm
from flowgrpo_fast.batch import RolloutBatch
from flowgrpo_fast.config import Config
from flowgrpo_fast.engine import Engine
from flowgrpo_fast.lifetime import alive
from flowgrpo_fast.models.base import ModelAdapter, PromptEmbeds
from flowgrpo_fast.plan import BatchPlan
from flowgrpo_fast.rollout.base import NonFiniteError

# How a metric of micro-batches (and ranks) becomes one number; everything else is a mean weighted by kept pairs.
SUMMED = {"loss", "kl", "kept"}
# Divided by kept pairs per rank, as the gradient wants it; their sum over ranks is then world_size times too large.
AVERAGED_OVER_RANKS = {"loss", "kl"}
MAXIMUM = ("_max", "_max_deviation")  # endings of names


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
                values,
                tuple(int(n) for n in mask.sum(1).cpu()),
                getattr(batch, f"{prefix}pooled_prompt_embeds"),
                None if prefix else batch.prompt_image_latents,
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


class PairTraining(ABC):
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
        """plan, batch: of this rank, or of its sequence-parallel group (`BatchPlan.shared`, `share_batch`); the samples that are trained on."""
        self.config, self.plan, self.adapter, self.engine, self.algorithm = config, plan, adapter, engine, algorithm
        self.batch, self.text = batch, Text.of(batch)

    @abstractmethod
    def begin(self, trusts_rollout: bool) -> None:
        """Before the first update, on every rank: what is computed with the weights of now. trusts_rollout: take the rollout's log-probs as the old
        ones; else the trainer's."""

    @abstractmethod
    def velocity_once(self) -> None:
        """One training forward without gradient, for its FLOPs."""

    @abstractmethod
    def _loss(
        self, index: int, m: MicroBatch, advantages: Tensor, valid: Tensor, denominator: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """One forward of update `index`: what Algorithm.loss returns."""

    @abstractmethod
    def _place(self, sample: int, slot: int) -> str:
        """Of a pair, for an error message."""

    def update(self, index: int, advantages: Tensor, valid: Tensor) -> dict[str, float]:
        """Pairs of update `index` -> gradients -> optimizer step. advantages fp32 [B], valid bool [B] of the batch's samples.

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
        checked: list[Tensor] = []
        with self.engine.accumulation():
            for m in micro_batches:
                loss, values, metrics = self._loss(index, m, advantages, valid, denominator)
                metrics["loss"] = loss.detach()
                self.engine.backward(loss)
                for name in AVERAGED_OVER_RANKS & metrics.keys():
                    metrics[name] = metrics[name] / self.plan.world_size
                for name in SUMMED & metrics.keys():
                    metrics[name] = metrics[name] / self.plan.sequence_parallel
                rows.append(metrics)
                checked.append(values)
                alive()
        self._require_finite(micro_batches, checked)
        grad_norm, rate, applied = self.engine.step()
        return reduce_metrics(rows) | {"grad_norm": grad_norm, "lr": rate, "skipped": float(not applied)}

    def _micro_batches(self, index: int) -> list[MicroBatch]:
        """The pairs of update `index`, cut into forwards of micro_batch_size."""
        plan, device = self.plan, self.batch.latents.device
        share = plan.trained_samples // plan.updates
        samples = torch.arange(index * share, (index + 1) * share).view(-1, 1, plan.trained_batch_size)
        samples = samples.expand(-1, plan.slots, -1)
        slots = torch.arange(plan.slots)[None, :, None].expand_as(samples)
        size = plan.micro_batch_size
        cut = zip(samples.reshape(-1).split(size), slots.reshape(-1).split(size), strict=True)
        return [MicroBatch(sample.to(device), slot.to(device), [int(i) for i in sample]) for sample, slot in cut]

    def _velocity(self, transformer: Any, m: MicroBatch, x: Tensor, sigma: Tensor, guidance_scale: float) -> Tensor:
        positive, negative = self.text.samples(m.samples_host)
        if not self.adapter.needs_negative(guidance_scale):
            negative = None
        n = self.plan.sequence_parallel
        positive, negative = positive.padded(n), None if negative is None else negative.padded(n)
        return self.adapter.velocity(transformer, x, sigma, positive, negative, guidance_scale, self.batch.media_size)

    def _require_finite(self, micro_batches: list[MicroBatch], values: list[Tensor]) -> None:
        finite = torch.cat(values).isfinite()
        if comm.all_ok(bool(finite.all()), finite.device):
            return
        where = "on another rank"
        if not finite.all():
            pair = int((~finite).nonzero()[0])
            sample = int(torch.cat([m.samples for m in micro_batches])[pair])
            slot = int(torch.cat([m.slots for m in micro_batches])[pair])
            where = f"at {self._place(sample, slot)}, sample {int(self.batch.sample_id[sample])}"
        raise NonFiniteError(
            f"the loss is not finite in training, {where}; the weights were not changed by this update"
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
        elif name.endswith(MAXIMUM):
            value = column.max()
        else:
            value = (column * weight).sum() / weight.sum()
        reduced[name] = float(value)
    return reduced
