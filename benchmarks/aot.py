"""Ahead-of-time compilation of every Triton kernel variant, without a GPU: what the compiler made of them, for three architectures.

    python -m benchmarks.aot [--out benchmarks/results/aot.csv]

The real launchers run on meta tensors with the launch itself replaced by a recorder, so what is compiled is what would be launched:
dtypes, constants, and the divisibility by 16 that Triton would see. A row says, for aligned inputs: 16-byte loads and stores a thread,
the bytes a chunk loads and stores by them, narrower accesses of 16-bit elements, registers, stack, local memory.
Run in a process without TRITON_INTERPRET. `tests/test_aot.py` holds the ceilings.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from flowgrpo_fast.ops.triton import cfg_combine, group_advantage, policy_loss, sde_log_prob, sde_step

ARCHITECTURES = (80, 90, 100)
ONES = "ones"  # compiled for one architecture: it is about Triton, not about the machine code
RESULTS = Path(__file__).parent / "results" / "aot.csv"
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.uint8: "u8",
}
BATCH, TOKENS, CHANNELS = 8, 1024, 64  # Qwen-Image 512^2


@dataclass
class Row:
    """One kernel variant on one architecture. Bytes are a program's; narrow: accesses of single 16-bit elements."""

    kernel: str
    variant: str
    sm: int
    wide_loads: int
    wide_stores: int
    load_bytes: int
    store_bytes: int
    narrow: int
    registers: int
    stack: int
    local: int
    shared: int


@contextmanager
def recorded() -> Iterator[list[tuple[JITFunction, tuple, dict]]]:
    """Kernels launched inside the block are written down instead."""
    launches: list[tuple[JITFunction, tuple, dict]] = []
    before = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **named: launches.append((self, args, named))
    try:
        yield launches
    finally:
        JITFunction.run = before


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The combinations of flags and dtypes that change code, as calls of the launchers. fp16 differs from bf16 in one conversion: one each."""
    row = torch.empty(BATCH, device="meta")
    ids = torch.empty(BATCH, dtype=torch.int64, device="meta")
    small = torch.empty(BATCH, dtype=torch.bool, device="meta")

    def latents(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(BATCH, TOKENS, CHANNELS, dtype=dtype, device="meta")

    x, gaussian = latents(), ("gaussian", "mean")
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        v = latents(dtype)
        yield (
            f"v={name} noise",
            partial(sde_step.sde_step, x, v, row, row, row, x, 0, None, None, 0, torch.float32, *gaussian),
        )
        yield f"v={name}", partial(sde_log_prob.log_prob, x, v, None, None, 0, x, row, row, row, None, None, *gaussian)
        yield (
            f"v={name}",
            partial(sde_log_prob.sde_log_prob_backward, row, row, row, x, v, x, row, row, row, None, *gaussian),
        )
        if name == "fp16":
            continue
        yield (
            f"v={name} philox",
            partial(sde_step.sde_step, v, v, row, row, row, None, 7, ids, ids, 0, dtype, *gaussian),
        )
        yield f"v={name}", partial(sde_step.sde_step_backward, x, row, dtype)
        for rescale in (False, True):
            cfg = f"v={name} rescale={rescale}"
            yield cfg, partial(cfg_combine.cfg_combine, v, v, row, rescale)
            yield cfg, partial(cfg_combine.cfg_combine_backward, v, v, v, row, rescale)
        for what, neg, scale, token in (("", None, None, 0), (" cfg", v, row, 0), (" cfg rescale", v, row, CHANNELS)):
            everything, loss = f"v={name} ref old{what}", f"v={name} loss ref{what}"
            yield everything, partial(sde_log_prob.log_prob, x, v, neg, scale, token, x, row, row, row, v, v, *gaussian)
            grads = (row, row, None)
            yield loss, partial(sde_log_prob.gradient, grads, row[0], x, v, neg, scale, token, x, row, row, row, v, *gaussian, dtype)  # fmt: skip
    yield "sum ref old", partial(sde_log_prob.log_prob, x, x, None, None, 0, x, row, row, row, x, x, "gaussian", "sum")
    yield (
        "flow_grpo",
        partial(sde_log_prob.sde_log_prob_backward, row, row, row, x, x, x, row, row, row, x, "flow_grpo", "mean"),
    )
    yield (
        "flow_grpo",
        partial(sde_log_prob.log_prob, x, x, None, None, 0, x, row, row, row, None, x, "flow_grpo", "mean"),
    )
    # One element a sample, one sample: every integer argument is 1, which Triton turns into a constant.
    few, scalar = torch.empty(1, 1, device="meta"), torch.empty(1, device="meta")
    index = torch.empty(1, dtype=torch.int64, device="meta")
    total = torch.empty((), dtype=torch.float64, device="meta")
    rows = (scalar, scalar, scalar)
    yield ONES, partial(sde_step.sde_step, few, few, *rows, None, 1, index, index, 1, torch.float32, *gaussian)
    yield ONES, partial(sde_log_prob.log_prob, few, few, few, scalar, 1, few, *rows, few, few, *gaussian)
    yield ONES, partial(sde_log_prob.sde_log_prob_backward, *rows, few, few, few, *rows, few, *gaussian)
    yield ONES, partial(sde_step.sde_step_backward, few, scalar, torch.float32)
    for rescale in (False, True):
        yield ONES, partial(cfg_combine.cfg_combine, few, few, scalar, rescale)
        yield ONES, partial(cfg_combine.cfg_combine_backward, few, few, few, scalar, rescale)
    yield ONES, partial(group_advantage.group_advantage, scalar, index, None, "global_std", 1e-4, 5.0)
    yield ONES, partial(policy_loss.policy_loss, scalar, scalar, scalar, None, total, 1e-4, 1e-4)
    for normalize, valid in (("global_std", small), ("group_std", None), ("none", None)):
        yield normalize, partial(group_advantage.group_advantage, row, ids, valid, normalize, 1e-4, 5.0)
    entries = torch.empty(BATCH, 2, device="meta")
    yield "plain", partial(policy_loss.policy_loss, entries, row, None, None, None, 1e-4, 1e-4)
    yield "all", partial(policy_loss.loss, row, row, row, row, small, row[0], row, 0.1, 1e-4, 1e-4)


def source(kernel: JITFunction, args: tuple, named: dict) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton would compile for this launch, and its options."""
    options = {name: named[name] for name in ("num_warps", "enable_fp_fusion")}
    bound = inspect.signature(kernel.fn).bind(*args, **{k: v for k, v in named.items() if k not in options}).arguments
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        if (
            parameter.is_constexpr
            or value is None
            or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize)
        ):
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name], attributes[(index,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes), options


def inspect_kernel(kernel: JITFunction, variant: str, source: ASTSource, options: dict[str, Any], sm: int) -> Row:
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    ptx, threads = compiled.asm["ptx"], 32 * options["num_warps"]
    loads, stores = (len(re.findall(rf"{kind}\.global\S*\.v4\.b32", ptx)) for kind in ("ld", "st"))
    usage = resource_usage(compiled.asm["cubin"])
    return Row(
        kernel.fn.__name__, variant, sm, loads, stores, 16 * threads * loads, 16 * threads * stores,
        narrow=len(re.findall(r"(?:ld|st)\.global\S*\.[bu]16", ptx)),
        registers=usage["REG"], stack=usage["STACK"], local=usage["LOCAL"], shared=compiled.metadata.shared,
    )  # fmt: skip


def resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows, seen = [], set()
    for variant, call in variants():
        with recorded() as launches:
            call()
        for kernel, args, named in launches:
            built, options = source(kernel, args, named)
            if built.hash() in seen:
                continue
            seen.add(built.hash())
            architectures = (90,) if variant == ONES else ARCHITECTURES
            rows += [inspect_kernel(kernel, variant, built, options, sm) for sm in architectures]
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    print(f"{len(seen)} kernel variants, {len(rows)} compilations -> {arguments.out}")


if __name__ == "__main__":
    main()
