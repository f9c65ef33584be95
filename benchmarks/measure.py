"""Times, the copy bandwidth of the same run, and whether the machine was idle.

CPU: all contenders of a case take turns in rounds, the copy among them, so that drift and neighbours hit all alike.
CUDA: `triton.testing.do_bench`, which clears the L2 cache before each run.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

COPY = "copy"
_HERTZ = os.sysconf("SC_CLK_TCK")
Run = Callable[[], Any]

# A call this slow is not repeated: its first timed run is its one sample.
SLOW_SECONDS = 2.0
# Shorter calls are timed several at a time: perf_counter and the loop cost about 0.2 us.
SAMPLE_SECONDS = 1e-3
MIN_ROUNDS, MAX_ROUNDS, MAX_PER_ROUND = 3, 50, 10
# Share of all cores that other processes may use on an idle machine (a tenth of a core of two).
IDLE_SHARE = 0.05
# Far above the caches (a server's L3 has up to 32 MiB a core complex, an H200's L2 has 50 MiB).
COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}


@dataclass(frozen=True)
class Timing:
    """Seconds of one call. samples is None where the timer does not tell."""

    median: float
    p20: float
    p80: float
    samples: int | None = None


def time_all(runs: Mapping[str, Run], device: str, seconds: float) -> dict[str, Timing]:
    """Times every contender, and under the name COPY a copy of `copy_bytes(device)` bytes.

    seconds: what a case may take on the CPU (each contender gets at least 3 rounds, slow ones 1 sample); on CUDA, of one contender.
    """
    if device == "cuda":
        return {name: _time_cuda(run, seconds) for name, run in runs.items()} | {COPY: _cuda_copy()}
    return _interleaved({**runs, COPY: _large_copy()}, seconds)


def copy_bytes(device: str) -> int:
    """Bytes that one copy moves: as many read as written."""
    return 2 * COPY_BYTES[device]


def copy_run(device: str, size: int) -> Run:
    source = torch.ones(size // 4, device=device)
    return functools.partial(torch.empty_like(source).copy_, source)


@functools.cache
def _large_copy() -> Run:
    return copy_run("cpu", COPY_BYTES["cpu"])


@functools.cache
def _cuda_copy() -> Timing:
    return _time_cuda(copy_run("cuda", COPY_BYTES["cuda"]), 0.1)


def _time_cuda(run: Run, seconds: float) -> Timing:
    from triton.testing import do_bench

    milliseconds = do_bench(
        run, warmup=max(1, round(250 * seconds)), rep=round(1000 * seconds), quantiles=[0.5, 0.2, 0.8]
    )
    return Timing(*(value / 1000 for value in milliseconds))


def _interleaved(runs: Mapping[str, Run], seconds: float) -> dict[str, Timing]:
    """Samples taken in turns. Fast contenders get up to ten a round: that costs a quarter of the slowest one's time each."""
    once = {name: _seconds(run, 1) for name, run in runs.items()}
    samples = {name: [took] if took > SLOW_SECONDS else [] for name, took in once.items()}
    timed = [name for name, taken in samples.items() if not taken]
    calls = {name: max(1, math.ceil(SAMPLE_SECONDS / once[name])) for name in timed}
    cost = {name: calls[name] * once[name] for name in timed}
    slowest = max((cost[name] for name in timed), default=0.0)
    per_round = {name: min(MAX_PER_ROUND, max(1, int(slowest / (4 * cost[name])))) for name in timed}
    a_round = sum(cost[name] * per_round[name] for name in timed)
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(seconds / a_round))) if timed else 0
    with _no_garbage_collection():
        for _ in range(rounds):
            for name in timed:
                for _ in range(per_round[name]):
                    samples[name].append(_seconds(runs[name], calls[name]) / calls[name])
    return {name: summarize(taken) for name, taken in samples.items()}


def _seconds(run: Run, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - start


def summarize(samples: list[float]) -> Timing:
    if len(samples) == 1:
        return Timing(samples[0], samples[0], samples[0], 1)
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(statistics.median(samples), tenths[1], tenths[7], len(samples))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Neighbours:
    """A region in which other processes are watched: `others` is the number of cores that they kept busy, on average.

    All busy time of /proc/stat, time stolen by the host included, less the CPU time of this process and of `ours`, other processes
    of the benchmark. Ticks are 10 ms, so a region should last 0.5 s or more. NaN where there is no /proc/stat.
    """

    def __init__(self, ours: Sequence[int] = ()) -> None:
        self._ours, self.others = ours, math.nan

    def __enter__(self) -> Neighbours:
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        busy, own, wall = (now - then for now, then in zip(self._now(), self._start, strict=True))
        self.others = max(busy - own, 0.0) / wall  # in this order NaN stays NaN

    def _now(self) -> tuple[float, float, float]:
        if not Path("/proc/stat").exists():
            return math.nan, 0.0, time.perf_counter()
        user, nice, system, _, _, irq, softirq, steal = _ticks("/proc/stat", 1, 9)
        own = sum(sum(_ticks(f"/proc/{pid}/stat", 13, 15)) for pid in self._ours) / _HERTZ
        busy = (user + nice + system + irq + softirq + steal) / _HERTZ
        return busy, time.process_time() + own, time.perf_counter()

    @property
    def idle(self) -> str:
        if math.isnan(self.others):
            return "unknown"
        return "yes" if self.others <= IDLE_SHARE * (os.cpu_count() or 1) else "no"


def _ticks(path: str, first: int, last: int) -> list[int]:
    """Numbers of a file's first line, by position."""
    with open(path) as lines:
        return [int(word) for word in lines.readline().split()[first:last]]


def warn_if_busy(when: str) -> None:
    """Looks at the machine for half a second while we do nothing."""
    with Neighbours() as neighbours:
        time.sleep(0.5)
    if neighbours.idle == "no":
        print(
            f"WARNING, {when}: other processes keep {neighbours.others:.2f} of {os.cpu_count()} cores busy. Rows measured beside "
            "a neighbour say idle=no; do not publish them.",
            flush=True,
        )


def free_bytes(device: str) -> int:
    """Memory that a case could take now."""
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
