"""`pytest benchmarks`: each op and each contender at Qwen-Image 512^2, batch 8 (or 4,096 entries). A wrong result fails and gets no time."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from benchmarks.cases import ENTRIES, SHAPES, Inputs
from benchmarks.contest import COMPILE, Case, Verdict, contenders
from benchmarks.ops import OPS, Op
from flowgrpo_fast.ops import _registry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = next(shape for shape in SHAPES if shape.name == "Qwen-Image 512")
ROWS = [
    (op, name)
    for op in OPS
    for name in contenders(DEVICE)
    if not (op.is_loop and name == COMPILE)
    and (name not in ("triton", "cuda", "cpp") or _registry._find(op.name, name, DEVICE))
]


@functools.cache
def checked(op: Op) -> tuple[Case, dict[str, Verdict]]:
    shape, batch = (ENTRIES, 4096) if op.batches else (SHAPE, 8)
    case = Case(op, Inputs(shape, batch, torch.float32, DEVICE), contenders(DEVICE))
    return case, case.check()


@pytest.mark.parametrize(("op", "contender"), ROWS, ids=[f"{op.title}-{name}".replace(" ", "-") for op, name in ROWS])
def test_op(benchmark: Any, op: Op, contender: str) -> None:
    case, verdicts = checked(op)
    assert verdicts[contender].match, f"{verdicts[contender].note} (relative error {verdicts[contender].error:.1e})"
    run = case.runner(contender)
    benchmark.group = op.title
    benchmark.extra_info.update(bytes=op.bytes(case.inputs), error=verdicts[contender].error)

    def on_device() -> None:
        run()
        torch.cuda.synchronize()

    benchmark(run if DEVICE == "cpu" else on_device)
