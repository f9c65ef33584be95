"""The importance ratio and its clipping by denoising step: where in the schedule does the policy move?

policy/step_03/{kept, ratio_mean, ratio_max_deviation, clip_fraction_low, clip_fraction_high}, over the kept pairs of one update and all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowgrpo_fast import comm


class StepMetrics:
    """`add` each micro-batch, without waiting for the device; `reduced` once an update. A collective."""

    def __init__(self, num_steps: int, clip_low: float, clip_high: float, device: torch.device) -> None:
        self.clip_low, self.clip_high = clip_low, clip_high
        # Kept pairs, and over them: ratio - 1, clipped below, clipped above.
        self.sums = torch.zeros(num_steps, 4, dtype=torch.float64, device=device)
        self.largest = torch.zeros(num_steps, dtype=torch.float64, device=device)

    def add(self, step_index: Tensor, log_prob: Tensor, old: Tensor, advantage: Tensor, keep: Tensor) -> None:
        """int64, fp32, fp32, fp32, bool, each [N]. A pair counts as clipped where the clip changes its loss."""
        # Of ratio - 1, not of the ratio: fp32 1 + 2e-6 has lost the clip range's digits.
        deviation = torch.where(keep, (log_prob - old).expm1(), 0.0)
        low = (deviation < -self.clip_low) & (advantage < 0)
        high = (deviation > self.clip_high) & (advantage > 0)
        self.sums.index_add_(0, step_index, torch.stack([keep, deviation, low & keep, high & keep], 1).double())
        self.largest.scatter_reduce_(0, step_index, deviation.abs().double(), "amax")

    def reduced(self) -> dict[str, float]:
        sums = comm.gather_rows(self.sums[None]).sum(0).cpu()
        largest = comm.gather_rows(self.largest[None]).amax(0).cpu()
        metrics: dict[str, float] = {}
        for i in sums[:, 0].nonzero()[:, 0].tolist():
            count, deviation, low, high = sums[i].tolist()
            values = {
                "kept": count,
                "ratio_mean": 1 + deviation / count,
                "ratio_max_deviation": float(largest[i]),
                "clip_fraction_low": low / count,
                "clip_fraction_high": high / count,
            }
            metrics |= {f"step_{i:02d}/{name}": value for name, value in values.items()}
        return metrics
