"""Where a step's time goes. `span("decode")` marks a part of the work anywhere; trainer.profile_steps names the steps that are measured.

For each of those: run_dir/profile/step_000003_rank0.json (seconds by part, peak memory) and ..._trace.json.gz (Chrome: chrome://tracing or
ui.perfetto.dev). Outside them a span is one `is None`.
"""

from __future__ import annotations

import json
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flowgrpo_fast.metrics import write_atomic

# Inside the parts of a step, in the order in which they are printed. `forward` and `backward` contain their `gather`.
PARTS = ("sync", "rollout_wait", "rollout", "encode", "decode", "reward", "advantage", "update", "forward", "backward", "gather", "optimizer", "validation")  # fmt: skip
_active: StepProfile | None = None


@contextmanager
def span(part: str) -> Iterator[None]:
    """Seconds of `part`, over all threads. On CUDA the device is waited for at both ends, in profiled steps only."""
    profile = _active
    if profile is None:
        yield
        return
    _wait()
    began = time.perf_counter()
    try:
        with torch.profiler.record_function(f"flowgrpo_fast::{part}"):
            yield
            _wait()
    finally:
        profile.add(part, time.perf_counter() - began)


class StepProfile:
    """Seconds and calls by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, part: str, seconds: float) -> None:
        with self._lock:
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds
            self.calls[part] = self.calls.get(part, 0) + 1


@contextmanager
def profiled_step(run_dir: Path, step: int, rank: int, gathers: Callable[[], Any] | None) -> Iterator[None]:
    """Measures everything inside and writes both files. gathers: a context that marks DeepSpeed's gathers as spans, or None."""
    global _active
    folder = run_dir / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"step_{step:06d}_rank{rank}"
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
    # Rollouts run in a thread of their own.
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profile, began = StepProfile(), time.perf_counter()
    with torch.profiler.profile(activities=activities, experimental_config=everywhere) as recorded:
        _active = profile
        try:
            if gathers is None:
                yield
            else:
                with gathers():
                    yield
        finally:
            _active = None
    total = time.perf_counter() - began
    recorded.export_chrome_trace(f"{stem}_trace.json.gz")
    known = [part for part in PARTS if part in profile.seconds]
    rows = {part: {"seconds": profile.seconds[part], "calls": profile.calls[part]} for part in known}
    breakdown = {"step": step, "rank": rank, "step_seconds": total, "parts": rows} | peak_memory()
    write_atomic(stem.with_suffix(".json"), (json.dumps(breakdown, indent=2) + "\n").encode())


def peak_memory() -> dict[str, float]:
    """memory/peak_host_gib: this process since its start. memory/peak_device_gib: torch's allocator, where there is a GPU."""
    peak = {"memory/peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if torch.cuda.is_available():
        peak["memory/peak_device_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return peak


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
