"""The agreement gate: do rollout and trainer give the same log-prob to the same step? Measured, logged, and acted upon.

Two engines with the same weights round differently, and clip ranges here are 1e-5 to 1e-4. So the trainer replays some samples at the
first step and every `rollout.check_every` steps. Under `old_log_probs: auto` the rollout's log-probs are taken as the old ones only
while the largest |log ratio| stays within a tenth of the clip range; above it, the trainer's own are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowgrpo_fast import comm
from flowgrpo_fast.config import Config
from flowgrpo_fast.plan import BatchPlan
from flowgrpo_fast.replay import Replay

SHARE_OF_CLIP = 0.1


class AgreementGate:
    """One for a run. In process, with the rollout's batch shape, both run the same code on the same bits: nothing to measure."""

    def __init__(self, config: Config, plan: BatchPlan) -> None:
        self.config, self.plan = config, plan
        self.is_remote = config.rollout.backend != "in_process"
        c = config.algorithm
        self.limit = SHARE_OF_CLIP * min(c.clip_low, c.clip_high)
        self.largest: float | None = None

    def trusts_rollout(self) -> bool:
        """May the rollout's log-probs be the old ones of an update?"""
        choice = self.config.algorithm.old_log_probs
        if choice != "auto":
            return choice == "rollout"
        if self.config.rollout.overlap:
            # The policy that sampled is not the trainer's any more; only its own log-probs make the ratio a correction.
            return True
        if self.is_remote:
            return self.largest is not None and self.largest <= self.limit
        return self.plan.replays_rollout_shape

    def may_trust_rollout(self) -> bool:
        """Can `trusts_rollout` ever be true? Else the rollout need not keep what is only for its own log-probs."""
        choice = self.config.algorithm.old_log_probs
        return choice == "rollout" or (choice == "auto" and (self.is_remote or self.plan.replays_rollout_shape))

    def is_due(self, step: int, staleness: int) -> bool:
        due = self.largest is None or step % self.config.rollout.check_every == 0
        return self.is_remote and due and staleness == 0

    def measure(self, replay: Replay) -> dict[str, float]:
        """Replays the first forward batch of each window slot on every rank. Returns mean and max |log ratio|, in all and per
        step index."""
        steps = len(replay.batch.sigmas) - 1
        table = torch.zeros(steps, 3, dtype=torch.float64)  # count, sum, max per step index
        for m in replay.first_of_each_slot():
            difference = (replay.log_probs(m) - replay.batch.log_probs[m.samples, m.slots]).abs().double().cpu()
            for index, value in zip(replay.batch.step_index[m.samples, m.slots].cpu(), difference, strict=True):
                row = table[index]
                row += torch.stack([torch.ones_like(value), value, torch.zeros_like(value)])
                row[2] = torch.maximum(row[2], value)
        tables = comm.gather_rows(table[None])
        count, total, largest = tables[..., 0].sum(0), tables[..., 1].sum(0), tables[..., 2].amax(0)
        self.largest = float(largest.max())
        metrics = {
            "agreement/log_ratio_mean": float(total.sum() / count.sum()),
            "agreement/log_ratio_max": self.largest,
            "agreement/limit": self.limit,
        }
        sampled: Tensor = count.nonzero()[:, 0]
        metrics |= {f"agreement/step_{int(i)}_mean": float(total[i] / count[i]) for i in sampled}
        return metrics | {f"agreement/step_{int(i)}_max": float(largest[i]) for i in sampled}
