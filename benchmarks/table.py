"""One table format for all benchmarks: the columns, what every row says of its machine, CSV and printed lines."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import flowgrpo_fast

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# name -> meaning. An empty cell means "not measured": a contender whose results are wrong has no time and no ratio.
COLUMNS = {
    "device": "GPU, or CPU model and threads",
    "commit": "of this repository; +dirty: with local changes",
    "versions": "Python, torch, triton, flowgrpo_fast",
    "op": "as in flowgrpo_fast.ops",
    "variant": "which optional arguments",
    "backend": "contender: eager, compile (the peers' form), or one of ours",
    "shape": "model and size",
    "batch": "samples, or entries",
    "dtype": "of the velocities; stored latents are fp32",
    "median_ms": "one call, forward and backward where there is one",
    "p20_ms": "20th percentile",
    "p80_ms": "80th percentile",
    "samples": "timed samples (empty: do_bench)",
    "bytes": "that the op must move: each input read once a pass, each result written once",
    "gb_s": "bytes / median",
    "copy_gb_s": "copy_ of a large buffer in the same run, bytes read + written",
    "copy_share": "gb_s / copy_gb_s; small cases live in the cache and may exceed 1",
    "times_faster": "median of the rival (eager; lists in the exchange; one request an image in the rollout) / this median",
    "peak_bytes": "most bytes alive at once beyond the inputs; results and gradients included",
    "extra_latents": "allocations of latent size that are no result and no gradient",
    "saved_bytes": "held by the autograd graph, distinct storages",
    "saved_beyond_inputs": "of these, not held by the inputs",
    "launches": "CUDA: kernels; CPU: dispatched operators (empty where inner calls are not visible)",
    "match": "error <= 2 x eager's + 4 eps (compile: + 4e-6 for its sums), against fp64",
    "error": "largest error against fp64, relative to the largest value",
    "idle": "no: other processes ran",
    "others": "cores that other processes kept busy meanwhile",
    "note": "why there is no time",
}
_PRINTED = {
    "op": 17, "variant": 11, "shape": 16, "batch": 6, "dtype": 9, "backend": 11, "median_ms": 10, "gb_s": 8, "copy_share": 10,
    "times_faster": 12, "peak_bytes": 12, "extra_latents": 13, "saved_beyond_inputs": 19, "launches": 8, "match": 5, "idle": 4,
    "note": 0,
}  # fmt: skip


def environment(device: str) -> dict[str, str]:
    return {"device": device_name(device), "commit": commit(), "versions": versions()}


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def commit() -> str:
    """FLOWGRPO_COMMIT speaks for a copy of the tree without its .git."""
    if "FLOWGRPO_COMMIT" in os.environ:
        return os.environ["FLOWGRPO_COMMIT"]
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or no repository: the caller writes "unknown"
    return done.stdout.strip()


def versions() -> str:
    parts = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    try:
        parts.append(f"triton {version('triton')}")
    except PackageNotFoundError:
        parts.append("no triton")
    return ", ".join([*parts, f"flowgrpo_fast {flowgrpo_fast.__version__}"])


class Table:
    """Writes each row when it is known, so that a run that is cut short leaves what it measured.

    columns: of the file. printed: name -> width, of what is printed.
    """

    def __init__(
        self, path: Path, device: str, columns: Iterable[str] = COLUMNS, printed: Mapping[str, int] = _PRINTED
    ) -> None:
        self.path, self._environment, self._printed = path, environment(device), printed
        self.busy = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, list(columns))
        self._writer.writeheader()

    def __enter__(self) -> Table:
        print(", ".join(self._environment.values()))
        print("  ".join(name.ljust(width) for name, width in self._printed.items()), flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        busy = f"; {self.busy} rows were measured beside a busy neighbour (idle=no)" if self.busy else ""
        print(f"{self.path}{busy}", flush=True)

    def add(self, **values: Any) -> None:
        row = {name: _text(value) for name, value in (self._environment | values).items()}
        self.busy += values.get("idle") == "no"
        self._writer.writerow(row)
        self._file.flush()
        print("  ".join(row.get(name, "").ljust(width) for name, width in self._printed.items()).rstrip(), flush=True)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _text(value: Any) -> str:
    if value is None or value != value:  # NaN: not measured
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
