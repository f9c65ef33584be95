"""sde_log_prob: log-prob, KL and direct log-ratio from one read of each input; the gradient from another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowgrpo_fast.ops._checks import optional_rows
from flowgrpo_fast.ops.triton._cfg import combine_backward_block, combine_block
from flowgrpo_fast.ops.triton._common import (
    BLOCKS_,
    CHUNK_,
    LANES_,
    LAUNCH,
    as_fp64,
    chunks,
    lanes_for,
    load_block,
    on_device,
    row_stride,
    store_block,
    sum_chunks,
    tree_sum,
)


@triton.jit
def sde_log_prob_kernel(
    x_ptr, v_ptr, neg_ptr, prev_ptr, ref_ptr, old_ptr, partial_ptr, a_ptr, b_ptr, scale_ptr,
    length, n_chunks, plane, x_row, v_row, neg_row, prev_row, ref_row, old_row,
    CFG: tl.constexpr, TOKEN: tl.constexpr, KL: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """Partial sums of one chunk: squared residual, squared distance to the reference's mean, direct log-ratio."""
    program = tl.program_id(0).to(tl.int64)
    row = program // n_chunks
    start = program % n_chunks * CHUNK_
    remaining = length - start
    a, b = tl.load(a_ptr + row), tl.load(b_ptr + row)
    square = tl.zeros([LANES_], tl.float32)
    distance = tl.zeros([LANES_], tl.float32)
    ratio = tl.zeros([LANES_], tl.float32)
    for i in tl.static_range(BLOCKS_):
        x = load_block(x_ptr + row * x_row + start, i, remaining)
        prev = load_block(prev_ptr + row * prev_row + start, i, remaining)
        v = load_block(v_ptr + row * v_row + start, i, remaining)
        if CFG:
            neg = load_block(neg_ptr + row * neg_row + start, i, remaining)
            v = combine_block(v, neg, tl.load(scale_ptr + row), TOKEN, v_ptr.dtype.element_ty)
        residual = prev - (x * a + v * b)
        square += residual * residual
        if KL:
            shift = b * (v - load_block(ref_ptr + row * ref_row + start, i, remaining))
            distance += shift * shift
        if RATIO:
            v_old = load_block(old_ptr + row * old_row + start, i, remaining)
            shift = b * (v - v_old)
            ratio += (2.0 * (prev - (x * a + v_old * b)) - shift) * shift
    tl.store(partial_ptr + program, tree_sum(square))
    if KL:
        tl.store(partial_ptr + plane + program, tree_sum(distance))
    if RATIO:
        tl.store(partial_ptr + 2 * plane + program, tree_sum(ratio))


@triton.jit
def finalize_kernel(
    partial_ptr, s_ptr, log_prob_ptr, kl_ptr, log_ratio_ptr, length, n_chunks, plane,
    GAUSSIAN: tl.constexpr, MEAN: tl.constexpr, KL: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The [B] results from the chunks' sums: fp64, rounded once, as `log_density` and `precision` in ops/coefficients.py."""
    row = tl.program_id(0).to(tl.int64)
    base = partial_ptr + row * n_chunks
    s = tl.load(s_ptr + row)
    ode = s == 0
    sigma = tl.where(ode, 1.0, s).to(tl.float64)
    count = as_fp64(length)
    divisor = count if MEAN else count * 0 + 1.0

    square = sum_chunks(base, n_chunks, WIDTH) / divisor
    value = -square
    if GAUSSIAN:
        constant = tl.log(sigma) + 0.9189385332046727
        if not MEAN:
            constant = constant * count
        value = -square / (2.0 * sigma * sigma) - constant
    tl.store(log_prob_ptr + row, tl.where(ode, 0.0, value).to(tl.float32))
    precision = 0.5 / (sigma * sigma)
    kl = precision * 0.0
    if KL:
        kl = sum_chunks(base + plane, n_chunks, WIDTH) / divisor * precision
    tl.store(kl_ptr + row, tl.where(ode, 0.0, kl).to(tl.float32))
    log_ratio = precision * 0.0
    if RATIO:
        log_ratio = sum_chunks(base + 2 * plane, n_chunks, WIDTH) / divisor
        if GAUSSIAN:
            log_ratio = log_ratio * precision
    tl.store(log_ratio_ptr + row, tl.where(ode, 0.0, log_ratio).to(tl.float32))


@triton.jit
def sde_log_prob_backward_kernel(
    grad_log_prob_ptr, grad_kl_ptr, grad_log_ratio_ptr, grad_loss_ptr,
    x_ptr, v_ptr, neg_ptr, prev_ptr, ref_ptr, out_ptr, out_neg_ptr, a_ptr, b_ptr, s_ptr, scale_ptr,
    length, n_chunks, x_row, v_row, neg_row, prev_row, ref_row,
    GAUSSIAN: tl.constexpr, MEAN: tl.constexpr, KL: tl.constexpr, RATIO: tl.constexpr, LOSS: tl.constexpr,
    CFG: tl.constexpr, TOKEN: tl.constexpr,
):  # fmt: skip
    """LOSS: all per-sample gradients are multiplied by one scalar, the gradient of the loss."""
    program = tl.program_id(0).to(tl.int64)
    row = program // n_chunks
    start = program % n_chunks * CHUNK_
    remaining = length - start
    a, b, s = tl.load(a_ptr + row), tl.load(b_ptr + row), tl.load(s_ptr + row)
    weight, kl_weight = sample_weights(
        row, grad_log_prob_ptr, grad_kl_ptr, grad_log_ratio_ptr, grad_loss_ptr, b, s, length,
        GAUSSIAN, MEAN, KL, RATIO, LOSS,
    )  # fmt: skip
    for i in tl.static_range(BLOCKS_):
        x = load_block(x_ptr + row * x_row + start, i, remaining)
        prev = load_block(prev_ptr + row * prev_row + start, i, remaining)
        pos = load_block(v_ptr + row * v_row + start, i, remaining)
        v = pos
        if CFG:
            scale = tl.load(scale_ptr + row)
            neg = load_block(neg_ptr + row * neg_row + start, i, remaining)
            v = combine_block(pos, neg, scale, TOKEN, v_ptr.dtype.element_ty)
        grad = tl.where(weight == 0, 0.0, weight * (prev - (x * a + v * b)))
        if KL:
            shift = v - load_block(ref_ptr + row * ref_row + start, i, remaining)
            grad += tl.where(kl_weight == 0, 0.0, kl_weight * shift)
        if CFG:
            grad, grad_neg = combine_backward_block(grad, pos, neg, scale, TOKEN)
            dead = (weight == 0) & (kl_weight == 0)  # its norms may be NaN
            grad = tl.where(dead, 0.0, grad)
            grad_neg = tl.where(dead, 0.0, grad_neg)
            store_block(out_neg_ptr + row * length + start, i, remaining, grad_neg)
        store_block(out_ptr + row * length + start, i, remaining, grad)


@triton.jit
def sample_weights(
    row, grad_log_prob_ptr, grad_kl_ptr, grad_log_ratio_ptr, grad_loss_ptr, b, s, length,
    GAUSSIAN: tl.constexpr, MEAN: tl.constexpr, KL: tl.constexpr, RATIO: tl.constexpr, LOSS: tl.constexpr,
):  # fmt: skip
    """What multiplies prev - mu and v - v_ref in the gradient of one sample; fp64, rounded once."""
    ode = s == 0
    sigma = tl.where(ode, 1.0, s).to(tl.float64)
    precision = tl.where(ode, 0.0, 0.5 / (sigma * sigma))
    slope = 2.0 * b.to(tl.float64)
    if MEAN:
        slope = slope / as_fp64(length)
    grad = tl.load(grad_log_prob_ptr + row).to(tl.float64)
    if RATIO:
        grad += tl.load(grad_log_ratio_ptr + row).to(tl.float64)
    if LOSS:
        grad *= tl.load(grad_loss_ptr).to(tl.float64)
    weight = grad * slope * precision if GAUSSIAN else tl.where(ode, 0.0, grad * slope)
    kl_weight = weight * 0.0
    if KL:
        grad_kl = tl.load(grad_kl_ptr + row).to(tl.float64)
        if LOSS:
            grad_kl *= tl.load(grad_loss_ptr).to(tl.float64)
        kl_weight = grad_kl * slope * b.to(tl.float64) * precision
    return weight.to(tl.float32), kl_weight.to(tl.float32)


def sde_log_prob(
    x: Tensor,
    v: Tensor,
    prev: Tensor,
    a: Tensor,
    b: Tensor,
    s: Tensor,
    v_ref: Tensor | None,
    v_old: Tensor | None,
    form: str,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return log_prob(x, v, None, None, 0, prev, a, b, s, v_ref, v_old, form, reduction)


def log_prob(
    x: Tensor,
    v: Tensor,
    v_neg: Tensor | None,
    scale: Tensor | None,
    token: int,
    prev: Tensor,
    a: Tensor,
    b: Tensor,
    s: Tensor,
    v_ref: Tensor | None,
    v_old: Tensor | None,
    form: str,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """sde_log_prob of v, or of both branches of the guidance combined on the way; token: its channels where it is rescaled, else 0."""
    batch = len(x)
    inputs = [optional_rows(tensor) for tensor in (x, v, v_neg, prev, v_ref, v_old)]
    length = inputs[0].shape[1]  # type: ignore[union-attr]
    n_chunks = chunks(length)
    partial = torch.empty(3, batch, n_chunks, dtype=torch.float32, device=x.device)
    if batch:
        with on_device(x):
            sde_log_prob_kernel[(batch * n_chunks,)](
                *inputs, partial, a, b, scale, length, n_chunks, batch * n_chunks, *map(row_stride, inputs),
                CFG=v_neg is not None, TOKEN=token, KL=v_ref is not None, RATIO=v_old is not None, **LAUNCH,
            )  # fmt: skip
    return finalize(partial, s, length, form, reduction, kl=v_ref is not None, log_ratio=v_old is not None)


def finalize(
    partial: Tensor, s: Tensor, length: int, form: str, reduction: str, *, kl: bool, log_ratio: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Chunk sums [1 or 3, B, chunks] -> log_prob, kl, log_ratio [B]; zeros where not asked for."""
    _, batch, n_chunks = partial.shape
    log_prob, kl_out, log_ratio_out = (torch.empty(batch, dtype=torch.float32, device=partial.device) for _ in range(3))
    if batch:
        with on_device(partial):
            finalize_kernel[(batch,)](
                partial, s, log_prob, kl_out, log_ratio_out, length, n_chunks, batch * n_chunks,
                GAUSSIAN=form == "gaussian", MEAN=reduction == "mean", KL=kl, RATIO=log_ratio,
                WIDTH=lanes_for(n_chunks), **LAUNCH,
            )  # fmt: skip
    return log_prob, kl_out, log_ratio_out


def sde_log_prob_backward(
    grad_log_prob: Tensor,
    grad_kl: Tensor,
    grad_log_ratio: Tensor,
    x: Tensor,
    v: Tensor,
    prev: Tensor,
    a: Tensor,
    b: Tensor,
    s: Tensor,
    v_ref: Tensor | None,
    form: str,
    reduction: str,
) -> Tensor:
    grads = (grad_log_prob, grad_kl, grad_log_ratio)
    grad_v, _ = gradient(grads, None, x, v, None, None, 0, prev, a, b, s, v_ref, form, reduction, v.dtype)
    return grad_v


def gradient(
    grads: tuple[Tensor, Tensor, Tensor | None],
    grad_loss: Tensor | None,
    x: Tensor,
    v: Tensor,
    v_neg: Tensor | None,
    scale: Tensor | None,
    token: int,
    prev: Tensor,
    a: Tensor,
    b: Tensor,
    s: Tensor,
    v_ref: Tensor | None,
    form: str,
    reduction: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of v and v_neg from those of log_prob, kl and log_ratio [B], all times grad_loss [] where that is given."""
    batch = len(x)
    grad_v = torch.empty(v.shape, dtype=dtype, device=v.device)
    grad_neg = None if v_neg is None else torch.empty_like(grad_v)
    inputs = [optional_rows(tensor) for tensor in (x, v, v_neg, prev, v_ref)]
    length = inputs[0].shape[1]  # type: ignore[union-attr]
    n_chunks = chunks(length)
    if batch:
        with on_device(x):
            sde_log_prob_backward_kernel[(batch * n_chunks,)](
                *grads, grad_loss, *inputs, grad_v, grad_neg, a, b, s, scale, length, n_chunks,
                *map(row_stride, inputs), GAUSSIAN=form == "gaussian", MEAN=reduction == "mean", KL=v_ref is not None,
                RATIO=grads[2] is not None, LOSS=grad_loss is not None, CFG=v_neg is not None, TOKEN=token,
                **LAUNCH,
            )  # fmt: skip
    return grad_v, grad_neg
