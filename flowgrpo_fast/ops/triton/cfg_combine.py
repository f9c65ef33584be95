"""cfg_combine: linear in chunks without the rescale; with it, tiles of whole tokens (wider than 1,024 channels: the reference)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowgrpo_fast.ops._checks import optional_rows
from flowgrpo_fast.ops._reduce import LANES
from flowgrpo_fast.ops.cfg_combine import cfg_combine_backward_reference, cfg_combine_reference, is_too_wide
from flowgrpo_fast.ops.triton._cfg import combine_backward_block, combine_block, rescaled, rescaled_backward
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
)


@triton.jit
def linear_kernel(pos_ptr, neg_ptr, scale_ptr, out_ptr, length, n_chunks, pos_row, neg_row):
    program = tl.program_id(0).to(tl.int64)
    row = program // n_chunks
    start = program % n_chunks * CHUNK_
    scale = tl.load(scale_ptr + row)
    for i in tl.static_range(BLOCKS_):
        pos = load_block(pos_ptr + row * pos_row + start, i, length - start)
        neg = load_block(neg_ptr + row * neg_row + start, i, length - start)
        combined = combine_block(pos, neg, scale, 0, out_ptr.dtype.element_ty)
        store_block(out_ptr + row * length + start, i, length - start, combined)


@triton.jit
def linear_backward_kernel(grad_ptr, scale_ptr, out_pos_ptr, out_neg_ptr, length, n_chunks, grad_row):
    program = tl.program_id(0).to(tl.int64)
    row = program // n_chunks
    start = program % n_chunks * CHUNK_
    scale = tl.load(scale_ptr + row)
    for i in tl.static_range(BLOCKS_):
        grad = load_block(grad_ptr + row * grad_row + start, i, length - start)
        grad_pos, grad_neg = combine_backward_block(grad, grad, grad, scale, 0)
        store_block(out_pos_ptr + row * length + start, i, length - start, grad_pos)
        store_block(out_neg_ptr + row * length + start, i, length - start, grad_neg)


@triton.jit
def tile(tokens, width, n_tiles, WIDTH: tl.constexpr):
    """Row of the batch, offsets inside it and the mask of this program's tile of whole tokens, padded to WIDTH channels."""
    ROWS: tl.constexpr = LANES_ // WIDTH
    program = tl.program_id(0).to(tl.int64)
    token = (program % n_tiles * ROWS + tl.arange(0, ROWS))[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    return program // n_tiles, token * width + channel, (token < tokens) & (channel < width)


@triton.jit
def rescale_kernel(
    pos_ptr, neg_ptr, scale_ptr, out_ptr, tokens, width, n_tiles, pos_row, neg_row, WIDTH: tl.constexpr
):  # fmt: skip
    row, offset, mask = tile(tokens, width, n_tiles, WIDTH)
    scale = tl.load(scale_ptr + row)
    pos = tl.load(pos_ptr + row * pos_row + offset, mask=mask, other=0.0).to(tl.float32)
    neg = tl.load(neg_ptr + row * neg_row + offset, mask=mask, other=0.0).to(tl.float32)
    combined = rescaled(pos, neg + scale * (pos - neg))
    out = round_to(combined, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * tokens * width + offset, out, mask=mask)


@triton.jit
def rescale_backward_kernel(
    grad_ptr, pos_ptr, neg_ptr, scale_ptr, out_pos_ptr, out_neg_ptr,
    tokens, width, n_tiles, grad_row, pos_row, neg_row, WIDTH: tl.constexpr,
):  # fmt: skip
    row, offset, mask = tile(tokens, width, n_tiles, WIDTH)
    scale = tl.load(scale_ptr + row)
    grad = tl.load(grad_ptr + row * grad_row + offset, mask=mask, other=0.0).to(tl.float32)
    pos = tl.load(pos_ptr + row * pos_row + offset, mask=mask, other=0.0).to(tl.float32)
    neg = tl.load(neg_ptr + row * neg_row + offset, mask=mask, other=0.0).to(tl.float32)
    combined = neg + scale * (pos - neg)
    grad_pos, grad_neg = rescaled_backward(grad, pos, combined, scale)
    base = row * tokens * width
    tl.store(out_pos_ptr + base + offset, round_to(grad_pos, out_pos_ptr.dtype.element_ty), mask=mask)
    tl.store(out_neg_ptr + base + offset, round_to(grad_neg, out_neg_ptr.dtype.element_ty), mask=mask)


def _tiles(v: Tensor) -> tuple[int, int, int, int]:
    """Tokens a sample, channels a token, tiles a sample, channels padded to a power of two."""
    width = v.shape[-1]
    tokens = v[0].numel() // width if len(v) else 1
    padded = triton.next_power_of_2(width)
    return tokens, width, triton.cdiv(tokens, LANES // padded), padded


def cfg_combine(v_pos: Tensor, v_neg: Tensor, scale: Tensor, rescale: bool) -> Tensor:
    if is_too_wide(v_pos.shape[-1], rescale):
        return cfg_combine_reference(v_pos, v_neg, scale, rescale)
    out = torch.empty(v_pos.shape, dtype=v_pos.dtype, device=v_pos.device)
    if not len(v_pos):
        return out
    scale, (pos, neg) = scale.float(), (optional_rows(v_pos), optional_rows(v_neg))
    assert pos is not None
    with on_device(out):
        if rescale:
            tokens, width, n_tiles, padded = _tiles(v_pos)
            rescale_kernel[(len(pos) * n_tiles,)](
                pos, neg, scale, out, tokens, width, n_tiles, row_stride(pos), row_stride(neg), WIDTH=padded, **LAUNCH
            )
        else:
            n_chunks = chunks(pos.shape[1])
            linear_kernel[(len(pos) * n_chunks,)](
                pos, neg, scale, out, pos.shape[1], n_chunks, row_stride(pos), row_stride(neg), **LAUNCH
            )
    return out


def cfg_combine_backward(
    grad: Tensor,
    v_pos: Tensor | None,
    v_neg: Tensor | None,
    scale: Tensor,
    rescale: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    if is_too_wide(grad.shape[-1], rescale):
        grad_pos, grad_neg = cfg_combine_backward_reference(grad, v_pos, v_neg, scale, rescale)
        return grad_pos.to(dtype or grad.dtype), grad_neg.to(dtype or grad.dtype)
    out_pos, out_neg = (torch.empty(grad.shape, dtype=dtype or grad.dtype, device=grad.device) for _ in range(2))
    if not len(grad):
        return out_pos, out_neg
    scale, (flat, pos, neg) = scale.float(), map(optional_rows, (grad, v_pos, v_neg))
    assert flat is not None
    with on_device(grad):
        if rescale:
            tokens, width, n_tiles, padded = _tiles(grad)
            rescale_backward_kernel[(len(flat) * n_tiles,)](
                flat, pos, neg, scale, out_pos, out_neg, tokens, width, n_tiles,
                row_stride(flat), row_stride(pos), row_stride(neg), WIDTH=padded, **LAUNCH,
            )  # fmt: skip
        else:
            n_chunks = chunks(flat.shape[1])
            linear_backward_kernel[(len(flat) * n_chunks,)](
                flat, scale, out_pos, out_neg, flat.shape[1], n_chunks, row_stride(flat), **LAUNCH
            )
    return out_pos, out_neg
