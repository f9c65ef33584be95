"""Images a second, FLOPs of the training phase and the share of the device's peak that they are (MFU)."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo_fast.config import Config
from flowgrpo_fast.pairs import PairTraining
from flowgrpo_fast.plan import BatchPlan
from flowgrpo_fast.profile import peak_memory

# Dense bf16 peaks in TFLOP/s, as the makers state them. A substring of the device's name decides; the longer ones come first.
PEAK_TFLOPS = {
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "GH200": 989,
    "B200": 2250,
    "A100": 312,
    "L40S": 362,
    "4090": 165,
}
# Forward, and twice its work backward. What checkpointing computes again is not counted: model FLOPs.
PASSES = 3


class Throughput:
    """`measure` once, at the first update; then `metrics` for each step."""

    def __init__(self, config: Config, plan: BatchPlan, device: torch.device) -> None:
        self.plan = plan
        self.peak = config.logging.peak_tflops or _peak(device)
        self.forward_flops: int | None = None

    def measure(self, training: PairTraining) -> None:
        """Counts the FLOPs of one training forward, without gradient: a forward on every rank, in the first step of a run."""
        if self.forward_flops is not None:
            return
        with FlopCounterMode(display=False) as counter:
            training.velocity_once()
        self.forward_flops = counter.get_total_flops()

    def metrics(self, step_seconds: float, timings: dict[str, float]) -> dict[str, float]:
        """Step without its validation; throughput/images_per_s over all ranks; throughput/tflops_per_s and throughput/mfu of the update
        phase on this rank."""
        plan = self.plan
        result = {
            "timing/step_s": step_seconds,
            "throughput/images_per_s": plan.samples * plan.world_size / step_seconds,
        } | peak_memory()
        update = timings.get("timing/update_s")
        if update and self.forward_flops:
            # A sequence-parallel rank runs its share of every forward of its group.
            flops = PASSES * self.forward_flops * plan.shared().micro_batches * plan.updates
            result["throughput/tflops_per_s"] = flops / update / 1e12
            if self.peak is not None:
                result["throughput/mfu"] = flops / update / 1e12 / self.peak
        return result


def _peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((float(peak) for part, peak in PEAK_TFLOPS.items() if part in name), None)
