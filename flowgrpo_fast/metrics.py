"""What a run records and what a person sees while it runs.

MetricsWriter   metrics.jsonl (the source of truth: the report and resume read it), TensorBoard, W&B
PhaseTimer      wall seconds of each phase of a step
Progress        live display in a terminal, one aligned line a step everywhere else

One process writes: rank 0 makes a MetricsWriter, the others make none and a Progress with `enabled=False`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import RenderableType

METRICS_FILE = "metrics.jsonl"
# What a run makes out of its metrics. A new run in a used directory moves these aside, so that two runs never mix in one report.
RUN_OUTPUTS = (
    METRICS_FILE, "samples", "tensorboard", "summary.json", "report.html", "config.yaml", "export", "profile", "checkpoints",
)  # fmt: skip


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of run_dir/metrics.jsonl, in file order: {"step": int, "time": float, name: float | None}.

    A last line without its newline that does not parse was torn by a killed process: it is left out. Anything else that is
    not a row raises ValueError with the line's number; a missing file raises FileNotFoundError.
    """
    path = Path(run_dir) / METRICS_FILE
    rows: list[dict[str, Any]] = []
    *lines, tail = path.read_bytes().split(b"\n")  # tail: empty, or a line whose newline was never written
    for number, line in enumerate([*lines, tail] if tail else lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise ValueError("not an object with an integer step")
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            if number > len(lines):
                break
            raise ValueError(f"{path}, line {number} is corrupt: {error}") from error
        rows.append(row)
    return rows


def read_summary(run_dir: Path) -> dict[str, Any]:
    """run_dir/summary.json, which the trainer writes at the end of a run; {} before that. ValueError if it is corrupt."""
    path = Path(run_dir) / "summary.json"
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is corrupt: {error}") from error


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new and never a part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class MetricsWriter:
    """Writes the metrics of one run to metrics.jsonl and, if asked, to TensorBoard and W&B.

    `resume_step=k` continues a run from its checkpoint at step k: what was logged after k is dropped first, so the file ends
    up with the rows of an uninterrupted run (equal but for `time` and the timings). `resume_step=None` starts a run: where the
    directory already holds one, its outputs move to `previous-<n>/`.

    A backend that is asked for and missing raises ValueError before anything is written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        tensorboard: bool = True,
        wandb_project: str | None = None,
        config: dict[str, Any] | None = None,
        resume_step: int | None = None,
    ) -> None:
        wandb = _import_wandb() if wandb_project else None
        summary_writer = _import_summary_writer() if tensorboard else None

        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        path = self.run_dir / METRICS_FILE
        if resume_step is None:
            _set_previous_run_aside(self.run_dir)
        elif path.exists():
            kept = [row for row in read_metrics(self.run_dir) if row["step"] <= resume_step]
            write_atomic(path, b"".join(map(_json_line, kept)))
        # Unbuffered and one write a line: a killed process loses at most the line that it was writing.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close())

        self._tensorboard: Any = None
        if summary_writer is not None:
            purge = None if resume_step is None else resume_step + 1  # TensorBoard hides steps >= purge_step
            self._tensorboard = summary_writer(str(self.run_dir / "tensorboard"), purge_step=purge)
        self._wandb: Any = None
        if wandb is not None:
            # W&B refuses steps that go backwards, so a resumed run is a second W&B run in the same group.
            name = self.run_dir.name if resume_step is None else f"{self.run_dir.name}@{resume_step}"
            self._wandb = wandb.init(
                project=wandb_project, group=self.run_dir.name, name=name, config=config, dir=str(self.run_dir)
            )
            self._wandb_image = wandb.Image

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row. NaN and infinities are written as null (JSON has no word for them)."""
        assert not {"step", "time"} & metrics.keys(), "`step` and `time` are the row's own keys"
        values = {name: float(value) for name, value in metrics.items()}
        self._file.write(_json_line({"step": step, "time": round(time.time(), 3), **values}))
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def log_images(self, step: int, name: str, grid: Image) -> None:
        """Show a grid in TensorBoard and W&B. The PNG that the report reads is the caller's to save."""
        if self._tensorboard is not None:
            import numpy as np

            self._tensorboard.add_image(name, np.asarray(grid), step, dataformats="HWC")
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log({name: self._wandb_image(grid)}, step=step)

    def close(self) -> None:
        """Close every backend. Calling it twice is harmless."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None


def _json_line(row: Mapping[str, Any]) -> bytes:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def _set_previous_run_aside(run_dir: Path) -> None:
    if not (run_dir / METRICS_FILE).exists():
        return
    aside = next(path for n in itertools.count(1) if not (path := run_dir / f"previous-{n}").exists())
    aside.mkdir()
    for name in RUN_OUTPUTS:
        if (run_dir / name).exists():
            shutil.move(run_dir / name, aside / name)


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError("a W&B project is set but wandb is missing: `pip install wandb`, or unset it") from error
    return wandb


def _import_summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("TensorBoard is on but missing: `pip install tensorboard`, or turn it off") from error
    return SummaryWriter


class PhaseTimer:
    """Wall seconds of each phase of a step: `with timer("rollout"): ...`, then `timer.pop()` -> {"timing/rollout_s": ...}.

    A phase that runs several times adds up, also when it raises. Phases may nest; each counts its own whole time. On CUDA it
    does not synchronise: kernels still queued when a phase ends are counted in the phase that next waits for them. Phases of
    the trainer end in a host read (images to the rewards, the step's metrics), so the error is small, and a synchronisation
    would cost what the timer is there to show. Not for use from several threads.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Seconds that were measured elsewhere."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def pop(self) -> dict[str, float]:
        """Seconds by phase since the last pop, as metrics."""
        seconds, self._seconds = self._seconds, {}
        return {f"timing/{phase}_s": value for phase, value in seconds.items()}


class Progress:
    """Shows the latest step: a live bar and one row of figures in a terminal, else one plain line for each update.

    `step` counts finished steps: 0 is the state before training, `total_steps` the end. Metrics that are missing are left
    out. The time left comes from the pace since this object's first update, so a resumed run's is right too.
    """

    def __init__(self, total_steps: int, enabled: bool = True) -> None:
        self.total_steps = total_steps
        self.enabled = enabled
        self._live: Any = None
        self._step = 0
        self._metrics: dict[str, float] = {}
        self._first: tuple[int, float] | None = None
        self._last_time = 0.0

    def __enter__(self) -> Progress:
        if self.enabled and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.live import Live

            # A callable, not a fixed renderable: the remaining time counts down between steps.
            self._live = Live(get_renderable=self._render, console=Console(highlight=False), refresh_per_second=2)
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step's metrics. The last validation stays on the live display until the next one."""
        now = time.monotonic()
        self._first = self._first or (step, now)
        sticky = {name: value for name, value in self._metrics.items() if name.startswith("validation/")}
        self._step, self._last_time, self._metrics = step, now, {**sticky, **metrics}
        if self._live is not None:
            self._live.refresh()
        elif self.enabled:
            width = len(str(self.total_steps))
            cells = [f"{label} {text}" for label, text in _cells(metrics)]
            left = self._seconds_left()
            tail = [_seconds(metrics), "" if left is None else f"left {format_seconds(left)}"]
            print("  ".join([f"step {step:>{width}}/{self.total_steps}", *cells, *filter(None, tail)]), flush=True)

    def message(self, text: str) -> None:
        """Print a line above the live display; a plain line elsewhere."""
        if self._live is not None:
            self._live.console.print(text, markup=False)
        elif self.enabled:
            print(text, flush=True)

    def _seconds_left(self) -> float | None:
        if self._first is None or self._step <= self._first[0]:
            return None
        pace = (self._last_time - self._first[1]) / (self._step - self._first[0])
        return max(0.0, pace * (self.total_steps - self._step))

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        left = self._seconds_left()
        if left is not None:
            left = max(0.0, left - (time.monotonic() - self._last_time))
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text(f"step {self._step}/{self.total_steps}", style="bold"),
            ProgressBar(total=max(1, self.total_steps), completed=self._step, width=32),
            Text("" if left is None else f"{format_seconds(left)} left", style="dim"),
        )
        row = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        cells = _cells(self._metrics)
        for label, _ in cells:
            row.add_column(label, no_wrap=True)
        row.add_row(*(Text(text.strip()) for _, text in cells))
        return Group(bar, *([row] if cells else []), Text(_seconds(self._metrics), style="dim"))


def _cells(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, text) of the figures worth a glance, in a fixed order; a text's width does not depend on its value."""
    cells: list[tuple[str, str]] = []

    def add(label: str, name: str | None, layout: str) -> None:
        if name is not None and name in metrics:
            cells.append((label, format(float(metrics[name]), layout)))

    def exact_match(prefix: str) -> str | None:
        return next((k for k in metrics if k.startswith(prefix) and k.endswith("/exact_match")), None)

    add("reward", "reward/mean", "8.3f")
    add("std", "reward/std", "7.3f")
    add("exact", exact_match("reward/"), "5.3f")
    add("|ratio-1|", "policy/ratio_max_deviation", "7.1e")
    clip = [metrics.get(f"policy/clip_fraction_{side}") for side in ("low", "high")]
    if any(value is not None for value in clip):
        cells.append(("clip-/+", "/".join("-" if value is None else f"{value:6.1%}" for value in clip)))
    add("grad", "optimizer/grad_norm", "8.3g")
    add("val reward", "validation/reward", "8.3f")
    add("val exact", exact_match("validation/"), "5.3f")
    return cells


def _seconds(metrics: Mapping[str, float]) -> str:
    """'seconds 3.0 (rollout 1.2 reward 0.3 update 1.4)', or what of it is there."""
    phases = {k[len("timing/") : -len("_s")]: v for k, v in metrics.items() if k.startswith("timing/")}
    total = phases.pop("step", None)
    parts = " ".join(f"{name} {value:.1f}" for name, value in phases.items())
    if total is None:
        return f"seconds {parts}" if parts else ""
    return f"seconds {total:.1f}" + (f" ({parts})" if parts else "")


def format_seconds(seconds: float) -> str:
    """5.2 -> '5.2 s', 75 -> '1 min 15 s', 7260 -> '2 h 01 min'."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
