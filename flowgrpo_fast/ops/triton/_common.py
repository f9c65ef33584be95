"""What the kernels share: launch geometry, rows without copies, loads, rounding, and the two sums of `ops/_reduce.py`."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowgrpo_fast.ops._reduce import CHUNK, LANES

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
LANES_: tl.constexpr = tl.constexpr(LANES)
CHUNK_: tl.constexpr = tl.constexpr(CHUNK)
BLOCKS_: tl.constexpr = tl.constexpr(CHUNK // LANES)
_INTERPRET: tl.constexpr = tl.constexpr(INTERPRET)

LAUNCH: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def chunks(length: int) -> int:
    return triton.cdiv(length, CHUNK)


def lanes_for(count: int) -> int:
    """WIDTH of `sum_chunks`."""
    return max(2, min(LANES, triton.next_power_of_2(count)))


def row_stride(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)


def on_device(tensor: Tensor) -> Any:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device_of(tensor)


@triton.jit
def load_block(base, block: tl.constexpr, remaining):
    """Lanes of one block of a chunk in fp32, zeros beyond the sample's end."""
    lane = block * LANES_ + tl.arange(0, LANES_)
    return tl.load(base + lane, mask=lane < remaining, other=0.0).to(tl.float32)


@triton.jit
def store_block(base, block: tl.constexpr, remaining, values):
    lane = block * LANES_ + tl.arange(0, LANES_)
    tl.store(base + lane, round_to(values, base.dtype.element_ty), mask=lane < remaining)


@triton.jit
def round_to(values, dtype: tl.constexpr):
    """fp32 -> dtype, to nearest even. The interpreter (3.9) truncates to bf16, so it gets the rounding spelt out."""
    if _INTERPRET and dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        values = tl.where(values == values, rounded.to(tl.float32, bitcast=True), values)
    return values.to(dtype)


@triton.jit
def as_fp64(number):
    """An integer argument as fp64. Not `.to`: Triton turns an argument of 1 into a Python int."""
    return tl.zeros([], tl.float64) + number


@triton.jit
def tree_sum(values):
    """[n] -> scalar by adding neighbours; n a power of two, 2 .. 1,024. Explicit, because the order inside tl.sum follows the layout, and
    that the pointers' alignment. The first three levels stay inside a thread."""
    for _ in tl.static_range(10):
        if values.shape[0] > 2:
            even, odd = tl.split(tl.reshape(values, [values.shape[0] // 2, 2]))
            values = even + odd
    even, odd = tl.split(values)
    return even + odd


@triton.jit
def tree_sum_rows(values):
    """[rows, n] -> [rows] by adding neighbours; n a power of two, 1 .. 1,024."""
    for _ in tl.static_range(10):
        if values.shape[1] > 1:
            even, odd = tl.split(tl.reshape(values, [values.shape[0], values.shape[1] // 2, 2]))
            values = even + odd
    return tl.reshape(values, [values.shape[0]])


@triton.jit
def sum_chunks(base, count, WIDTH: tl.constexpr):
    """lane_sum in fp64 of a row of `count` fp32 partial sums; WIDTH: LANES, or the next power of two of a shorter row (>= 2)."""
    lane = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float64)
    for start in range(0, count, WIDTH):
        total += tl.load(base + start + lane, mask=start + lane < count, other=0.0).to(tl.float64)
    return tree_sum(total)
