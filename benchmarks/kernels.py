"""Every op against its rivals, by shape, batch and dtype: `python -m benchmarks.kernels` -> benchmarks/results/kernels_<device>.csv.

The default takes about 15 minutes on two idle cores. torch.compile makes two graphs per op, for a batch of 1 and for all others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.cases import BATCHES, DTYPES, ENTRIES, SHAPES, Inputs, Shape
from benchmarks.contest import compare, contenders
from benchmarks.measure import warn_if_busy
from benchmarks.ops import OPS, Op
from benchmarks.table import RESULTS, Table


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    return measure(args, "kernels", OPS)


def parse(arguments: Sequence[str] | None, description: str | None = __doc__) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--shapes", nargs="+", default=names, help=f"any of {names}, or a part of the name")
    parser.add_argument("--batch", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: float32, on CUDA bfloat16 too")
    parser.add_argument("--ops", nargs="+", choices=sorted({op.name for op in OPS}), help="default: all")
    parser.add_argument("--contenders", nargs="+", help="beside eager; default: compile and each backend of the device")
    parser.add_argument(
        "--seconds", type=float, help="timing of a case on the CPU (default 2), of a contender on CUDA (0.1)"
    )
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no new case is started")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    args.dtype = args.dtype or (["float32", "bfloat16"] if args.device == "cuda" else ["float32"])
    args.contenders = args.contenders or contenders(args.device)
    args.seconds = args.seconds or (0.1 if args.device == "cuda" else 2.0)
    strange = set(args.contenders) - set(contenders(args.device))
    if strange:
        parser.error(f"--contenders: {sorted(strange)} are none of {contenders(args.device)}")
    unknown = [part for part in args.shapes if not any(part.lower() in name.lower() for name in names)]
    if unknown:
        parser.error(f"--shapes: {unknown} fit none of {names}")
    return args


def measure(args: argparse.Namespace, name: str, ops: Sequence[Op]) -> int:
    """Writes <name>_<device>.csv. 1 if a result of ours was wrong."""
    end = time.monotonic() + args.budget
    if args.device == "cpu":
        warn_if_busy("before the measurement")
    right = True
    with Table(args.out / f"{name}_{args.device}.csv", args.device) as table:
        cases = list(_cases(args, ops))
        inputs = None
        for done, (shape, batch, dtype, op) in enumerate(cases):
            if time.monotonic() > end:
                left_out(table, cases[done:], args.budget)
                break
            if inputs is None or (inputs.shape, inputs.batch, inputs.dtype) != (shape, batch, DTYPES[dtype]):
                inputs = Inputs(shape, batch, DTYPES[dtype], args.device)
            right &= compare(table, op, inputs, args.contenders, args.seconds)
    if args.device == "cpu":
        warn_if_busy("after the measurement")
    return 0 if right else 1


def _cases(args: argparse.Namespace, ops: Sequence[Op]) -> Iterator[tuple[Shape, int, str, Op]]:
    """Ops innermost: they share their inputs."""
    ops = [op for op in ops if not args.ops or op.name in args.ops]
    for op in ops:
        for batch in op.batches:
            yield ENTRIES, batch, "float32", op
    shapes = [shape for shape in SHAPES if any(part.lower() in shape.name.lower() for part in args.shapes)]
    for batch in args.batch:
        for dtype in args.dtype:
            for shape in shapes:
                for op in ops:
                    if op.applies_to(shape):
                        yield shape, batch, dtype, op


def left_out(table: Table, cases: Sequence[tuple[Shape, int, str, Op]], budget: float) -> None:
    print(f"{len(cases)} cases left out: {budget:.0f} s are over", flush=True)
    for shape, batch, dtype, op in cases:
        about = dict(op=op.name, variant=op.variant, shape=shape.name, batch=batch, dtype=dtype)
        table.add(**about, note="left out: time budget")


if __name__ == "__main__":
    raise SystemExit(main())
