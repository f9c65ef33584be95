"""GB/s of our ops by size, beside a copy of equally many bytes: `python -m benchmarks.roofline` -> roofline_<device>.csv.

All of these ops are bound by memory, so the roof is the copy. It depends on the size: small cases are bound by launches (CUDA) or live
in the cache (CPU), and a copy of the same size is bound alike. Here copy_gb_s is that copy's, not the large one's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.cases import DTYPES, SHAPES, Inputs
from benchmarks.contest import BACKENDS, EAGER, Case, shortage, speed
from benchmarks.kernels import parse
from benchmarks.measure import Neighbours, copy_run, time_all
from benchmarks.ops import OPS, Op
from benchmarks.table import Table

# 65,536 elements a sample (Qwen-Image at 512^2): 1.8 MB to 1.9 GB in the seven passes of sde_log_prob
BATCHES = {"cpu": (1, 4, 16, 64), "cuda": (1, 4, 16, 64, 256, 1024)}
TITLES = ("sde_step noise", "sde_log_prob", "cfg_combine", "flow_grpo_loss")
EQUAL_COPY = "copy of as many bytes"


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments, __doc__)
    end, right = time.monotonic() + args.budget, True
    shape = next(shape for shape in SHAPES if shape.name == "Qwen-Image 512")
    with Table(args.out / f"roofline_{args.device}.csv", args.device) as table:
        for dtype in args.dtype:
            for batch in BATCHES[args.device]:
                inputs = Inputs(shape, batch, DTYPES[dtype], args.device)
                for op in (op for op in OPS if op.title in TITLES):
                    late = "left out: time budget" if time.monotonic() > end else ""
                    right &= measure(table, op, inputs, args.seconds, late)
    return 0 if right else 1


def measure(table: Table, op: Op, inputs: Inputs, seconds: float, late: str) -> bool:
    dtype = str(inputs.dtype).removeprefix("torch.")
    about = dict(op=op.name, variant=op.variant, shape=inputs.shape.name, batch=inputs.batch, dtype=dtype)
    lack = late or shortage(op, inputs)
    if lack:
        table.add(**about, note=lack)
        return True
    fast = [name for name in BACKENDS[inputs.device] if name != "reference"]
    case, device, moved = Case(op, inputs, (EAGER, *fast)), inputs.device, op.bytes(inputs)
    verdicts = case.check()
    runs = {name: case.runner(name) for name in case.names if verdicts[name].match}
    with Neighbours() as neighbours:
        timings = time_all(runs | {EQUAL_COPY: copy_run(device, moved // 2)}, device, seconds)
    watched = dict(idle=neighbours.idle, others=neighbours.others)
    copied = moved / timings[EQUAL_COPY].median / 1e9
    table.add(**about, backend=EQUAL_COPY, **watched, **speed(timings[EQUAL_COPY], moved, copied, None))
    for name, verdict in verdicts.items():
        row = speed(timings[name], moved, copied, timings.get(EAGER)) if name in runs else {}
        table.add(**about, backend=name, match=verdict.match, error=verdict.error, note=verdict.note, **watched, **row)
    return all(verdict.match for verdict in verdicts.values())


if __name__ == "__main__":
    raise SystemExit(main())
