"""One case: all contenders for one op on one set of inputs. Results first; a contender with wrong ones gets no time and no ratio."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor

from benchmarks import count
from benchmarks.cases import Call, Inputs, by_rows, in_fp64, ready, run
from benchmarks.measure import COPY, Neighbours, Timing, copy_bytes, free_bytes, time_all
from benchmarks.ops import Op
from benchmarks.table import Table
from flowgrpo_fast.ops import BackendFallbackWarning, use_backend

EAGER, COMPILE = "eager", "compile"
BACKENDS = {"cpu": ("reference", "cpp"), "cuda": ("reference", "triton", "cuda")}
# Inductor sums in longer runs than eager does: off by 1.2e-6 at 2 million terms on the CPU. Its choice, not a wrong result.
SUM_SLACK = 4e-6
MEMORY_SHARE = 0.6  # of what is free; a case that needs more is left out

_missing: set[tuple[str, str]] = set()  # (op, backend) that fell back to the reference: an op says so only once


def contenders(device: str) -> tuple[str, ...]:
    return (EAGER, COMPILE, *BACKENDS[device])


@dataclass(frozen=True)
class Verdict:
    match: bool
    error: float  # largest error over all results, relative to the result's largest value
    note: str = ""


class MissingBackendError(RuntimeError):
    """The op has no such backend here."""


class Case:
    def __init__(self, op: Op, inputs: Inputs, names: Iterable[str]) -> None:
        self.op, self.inputs = op, inputs
        skipped = {backend for name, backend in _missing if name == op.name}
        skipped |= {COMPILE} if op.is_loop else set()
        others = (name for name in names if name not in skipped and name != EAGER)
        self.names = (EAGER, *others)  # eager is always there: its errors are the yardstick
        self.calls = {name: self._call(name) for name in self.names}

    def _call(self, name: str) -> Call:
        if name in (EAGER, COMPILE):
            call = ready(self.op.rival(self.inputs))
            return replace(call, function=compiled(call.function)) if name == COMPILE else call
        return ready(self.op.ours(self.inputs))

    def runner(self, name: str) -> Callable[[], tuple[Tensor, ...]]:
        call = self.calls[name]
        if name in (EAGER, COMPILE):
            return lambda: run(call)

        def with_backend() -> tuple[Tensor, ...]:
            with use_backend(name):
                return run(call)

        return with_backend

    def check(self) -> dict[str, Verdict]:
        """Runs every contender once. match: no result is off from the exact one by more than twice eager's error and four roundings."""
        exact: tuple[Tensor, ...] | None = None
        yardstick: list[float] = []
        verdicts = {}
        for name in self.names:
            try:
                results = self._first_run(name)
            except MissingBackendError as error:
                print(error, flush=True)
                continue
            except Exception as error:  # whatever a contender does, the others' rows are still wanted
                lines = str(error).strip().splitlines() or [""]
                verdicts[name] = Verdict(False, float("nan"), f"failed: {type(error).__name__}: {lines[0]}"[:200])
                continue
            truth = self._exact_of(name, results)
            if truth is None:
                exact = exact or self._evaluate((self.op.exact or self.op.rival)(self.inputs))
                truth = exact
            errors, scales = measured_errors(results, truth)
            if name == EAGER:
                yardstick = errors
            slack = SUM_SLACK if name == COMPILE else 0.0
            allowed = [
                2 * eager + (4 * torch.finfo(result.dtype).eps + slack) * scale
                for eager, result, scale in zip(yardstick or [0.0] * len(errors), results, scales, strict=True)
            ]
            match = all(error <= bound for error, bound in zip(errors, allowed, strict=True))
            relative = max(error / scale for error, scale in zip(errors, scales, strict=True))
            verdicts[name] = Verdict(match, relative, "" if match else "results differ: no time")
        self.names = tuple(verdicts)
        return verdicts

    def _first_run(self, name: str) -> tuple[Tensor, ...]:
        """Results and gradients that are compared. A backend that falls back to the reference is no contender."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = self.runner(name)()
        if any(issubclass(warning.category, BackendFallbackWarning) for warning in caught):
            _missing.add((self.op.name, name))
            raise MissingBackendError(
                f"{self.op.name}: no {name} backend on this machine; it is left out of this table"
            )
        gradients = len(self.calls[name].leaves)
        values, grads = results[: len(results) - gradients], results[len(results) - gradients :]
        return (*values[: self.op.compared], *grads)

    def _exact_of(self, name: str, results: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self.op.exact_of_rival is None or name not in (EAGER, COMPILE):
            return None
        return self._evaluate(self.op.exact_of_rival(self.inputs, results))

    def _evaluate(self, call: Call) -> tuple[Tensor, ...]:
        results = run(in_fp64(call, slice(None))) if self.op.batches else by_rows(call)
        gradients = len(call.leaves)
        return (*results[: self.op.compared], *results[len(results) - gradients :])

    def counts(self, name: str) -> dict[str, Any]:
        """Memory, what autograd keeps, launches: of one more run each."""
        if self.op.is_loop and name == EAGER:
            return {}  # a profile of a million operators tells nothing
        runner, call = self.runner(name), self.calls[name]
        memory = count.memory(runner, self.inputs.device)
        launches = memory.kernels
        if self.inputs.device == "cpu" and name not in (COMPILE, "reference"):
            launches = count.dispatched(runner)
        values: dict[str, Any] = dict(peak_bytes=memory.peak_bytes, launches=launches)
        if not self.op.batches:
            latent = min(self.inputs.size("x"), self.inputs.size("v"))
            values["extra_latents"] = sum(size >= latent / 2 for size in memory.temporaries)
        if call.leaves:
            with use_backend(name if name not in (EAGER, COMPILE) else "auto"):
                outputs = call.function(*call.arguments)
            kept = count.saved(outputs, self.inputs.tensors())
            values |= dict(saved_bytes=kept.total, saved_beyond_inputs=kept.beyond_inputs)
        return values


def measured_errors(results: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> tuple[list[float], list[float]]:
    """Largest error of each result, and the value that it is relative to: the largest exact one.

    At least 1 for results without latent dimensions: log-ratios and losses are differences of numbers of that size.
    """
    errors, scales = [], []
    for result, truth in zip(results, exact, strict=True):
        errors.append((result.reshape(truth.shape).double() - truth).abs().amax().item())
        scales.append(max(truth.abs().amax().item(), 1.0 if truth.dim() <= 1 else 1e-30))
    return errors, scales


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One graph for all sizes; a batch of 1 and each dtype still make one of their own, so the limit of 8 is raised.

    emulate_precision_casts: without it Inductor skips the rounding of the guided velocity to bf16, and the log-prob is off by as much
    as a clip range.
    """
    torch._dynamo.config.recompile_limit = 64
    torch._inductor.config.emulate_precision_casts = True
    return torch.compile(function, dynamic=True)


def shortage(op: Op, inputs: Inputs) -> str:
    """Why this case does not fit in memory; empty if it does."""
    latents = op.temporaries + len(set(op.reads)) + 6  # 6: exact results and their comparison, in fp64
    needed = 4 * inputs.batch * math.prod(inputs.shape.latent) * latents
    free = free_bytes(inputs.device)
    if needed <= MEMORY_SHARE * free:
        return ""
    return f"left out: needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"


def compare(table: Table, op: Op, inputs: Inputs, names: Iterable[str], seconds: float) -> bool:
    """Checks, times and counts all contenders and writes their rows. True if every one of ours that exists matched."""
    dtype = str(inputs.dtype).removeprefix("torch.")
    about = dict(op=op.name, variant=op.variant, shape=inputs.shape.name, batch=inputs.batch, dtype=dtype)
    lack = shortage(op, inputs)
    if lack:
        table.add(**about, note=lack)
        return True
    if COMPILE in names and op.is_loop:
        table.add(**about, backend=COMPILE, note="not compiled: a Python loop that reads every group id on the host")
    case = Case(op, inputs, names)
    verdicts = case.check()
    matched = [name for name in case.names if verdicts[name].match]
    with Neighbours() as neighbours:
        timings = time_all({name: case.runner(name) for name in matched}, inputs.device, seconds)
    copied = copy_bytes(inputs.device) / timings[COPY].median / 1e9
    for name, verdict in verdicts.items():
        row: dict[str, Any] = dict(match=verdict.match, error=verdict.error, note=verdict.note)
        row |= dict(idle=neighbours.idle, others=neighbours.others)
        if name in matched:
            row |= speed(timings[name], op.bytes(inputs), copied, timings.get(EAGER)) | case.counts(name)
        table.add(**about, backend=name, **row)
    return all(verdict.match for name, verdict in verdicts.items() if name not in (EAGER, COMPILE))


def speed(timing: Timing, moved: int, copy_gb_s: float, rival: Timing | None) -> dict[str, Any]:
    gb_s = moved / timing.median / 1e9
    return dict(
        median_ms=1e3 * timing.median,
        p20_ms=1e3 * timing.p20,
        p80_ms=1e3 * timing.p80,
        samples=timing.samples,
        bytes=moved,
        gb_s=gb_s,
        copy_gb_s=copy_gb_s,
        copy_share=gb_s / copy_gb_s,
        times_faster=rival.median / timing.median if rival else None,
    )
