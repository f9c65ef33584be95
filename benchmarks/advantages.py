"""Group advantages of 64 to 65,536 rewards in groups of 16, against the peers' Python loops.

`python -m benchmarks.advantages` -> benchmarks/results/advantages_<device>.csv. Two rivals, by variant: "sample loop" is
verl-omni's (0-d tensors, one by one), "group loop" is flow_grpo's (a mask over all samples for each group).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.kernels import measure, parse
from benchmarks.ops import OPS, group_loop

ENTRIES = (64, 256, 1024, 4096, 16384, 65536)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments, __doc__)
    op = replace(next(op for op in OPS if op.name == "group_advantage"), batches=ENTRIES)
    return measure(args, "advantages", (op, replace(op, variant="group loop", rival=group_loop)))


if __name__ == "__main__":
    raise SystemExit(main())
