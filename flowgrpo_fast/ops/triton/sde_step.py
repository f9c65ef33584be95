"""sde_step: one read of x, v (and noise), one write of prev, and the log-prob of what was written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowgrpo_fast.ops._checks import optional_rows
from flowgrpo_fast.ops.triton._common import (
    BLOCKS_,
    CHUNK_,
    LANES_,
    LAUNCH,
    chunks,
    load_block,
    on_device,
    round_to,
    row_stride,
    store_block,
    tree_sum,
)
from flowgrpo_fast.ops.triton._philox import normal_block
from flowgrpo_fast.ops.triton.sde_log_prob import finalize


@triton.jit(do_not_specialize=["seed", "stream"])
def sde_step_kernel(
    x_ptr, v_ptr, noise_ptr, prev_ptr, partial_ptr, a_ptr, b_ptr, s_ptr, step_ptr, id_ptr,
    seed, stream, length, n_chunks, x_row, v_row, noise_row,
    PHILOX: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // n_chunks
    start = program % n_chunks * CHUNK_
    remaining = length - start
    a, b, s = tl.load(a_ptr + row), tl.load(b_ptr + row), tl.load(s_ptr + row)
    square = tl.zeros([LANES_], tl.float32)
    for i in tl.static_range(BLOCKS_):
        # Noise before x and v: Philox and Box-Muller need the registers.
        if PHILOX:
            step, sample_id = tl.load(step_ptr + row), tl.load(id_ptr + row)
            noise = normal_block(seed, step, stream, sample_id, start + i * LANES_, LANES_)
        else:
            noise = load_block(noise_ptr + row * noise_row + start, i, remaining)
        x = load_block(x_ptr + row * x_row + start, i, remaining)
        v = load_block(v_ptr + row * v_row + start, i, remaining)
        mean = x * a + v * b
        stored = round_stored(tl.where(s == 0, mean, mean + s * noise), prev_ptr)
        store_block(prev_ptr + row * length + start, i, remaining, stored)
        residual = stored - mean
        inside = i * LANES_ + tl.arange(0, LANES_) < remaining
        square += tl.where(inside, residual * residual, 0.0)
    tl.store(partial_ptr + program, tree_sum(square))


@triton.jit
def round_stored(values, ptr):
    """What a reader of the stored value will see, in fp32."""
    return round_to(values, ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def scale_rows_kernel(grad_ptr, coefficient_ptr, out_ptr, length, n_chunks, grad_row):
    program = tl.program_id(0).to(tl.int64)
    row = program // n_chunks
    start = program % n_chunks * CHUNK_
    coefficient = tl.load(coefficient_ptr + row)
    for i in tl.static_range(BLOCKS_):
        grad = load_block(grad_ptr + row * grad_row + start, i, length - start)
        store_block(out_ptr + row * length + start, i, length - start, grad * coefficient)


def sde_step(
    x: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    s: Tensor,
    noise: Tensor | None,
    seed: int,
    step: Tensor | None,
    sample_id: Tensor | None,
    stream: int,
    out_dtype: torch.dtype,
    form: str,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    prev = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    batch, x, v, noise = len(x), optional_rows(x), optional_rows(v), optional_rows(noise)  # type: ignore[assignment]
    n_chunks = chunks(x.shape[1])
    partial = torch.empty(1, batch, n_chunks, dtype=torch.float32, device=x.device)
    if batch:
        with on_device(x):
            sde_step_kernel[(batch * n_chunks,)](
                x, v, noise, prev, partial, a, b, s, step, sample_id, seed, stream, x.shape[1], n_chunks,
                row_stride(x), row_stride(v), row_stride(noise), PHILOX=noise is None, **LAUNCH,
            )  # fmt: skip
    log_prob, _, _ = finalize(partial, s, x.shape[1], form, reduction, kl=False, log_ratio=False)
    return prev, log_prob


def sde_step_backward(grad_prev: Tensor, coefficient: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(grad_prev.shape, dtype=dtype, device=grad_prev.device)
    grad = optional_rows(grad_prev)
    assert grad is not None
    n_chunks = chunks(grad.shape[1])
    if len(grad):
        with on_device(grad):
            scale_rows_kernel[(len(grad) * n_chunks,)](
                grad, coefficient, out, grad.shape[1], n_chunks, grad.stride(0), **LAUNCH
            )
    return out
