"""Classifier-free guidance inside other kernels: both branches of a block combined on the way, and its gradient.

The norms of the rescale are sums over a token's channels. Where a token is a power of two up to 1,024 wide, a block of 1,024
lanes holds whole tokens and [LANES] <-> [tokens, TOKEN] moves no data. TOKEN: channels of a token, 0 for no rescale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flowgrpo_fast.ops.triton._common import LANES_, round_to, tree_sum_rows


@triton.jit
def or_zero(numerator, norm):
    """numerator / norm correctly rounded, and 0 where the norm is 0."""
    return tl.where(norm > 0, tl.div_rn(numerator, tl.where(norm > 0, norm, 1.0)), 0.0)


@triton.jit
def rescaled(pos, combined):
    """combined ||pos|| / ||combined|| of [tokens, channels]."""
    norm_pos = tl.sqrt_rn(tree_sum_rows(pos * pos))
    norm = tl.sqrt_rn(tree_sum_rows(combined * combined))
    return combined * or_zero(norm_pos, norm)[:, None]


@triton.jit
def rescaled_backward(grad, pos, combined, scale):
    """Gradients of pos and neg, as `cfg_combine_backward_reference`."""
    norm_pos = tl.sqrt_rn(tree_sum_rows(pos * pos))[:, None] + tl.zeros_like(pos)
    norm = tl.sqrt_rn(tree_sum_rows(combined * combined))[:, None] + tl.zeros_like(pos)
    unit = or_zero(combined, norm)
    along = tree_sum_rows(grad * unit)[:, None]
    grad_combined = or_zero(norm_pos, norm) * (grad - along * unit)
    return scale * grad_combined + along * or_zero(pos, norm_pos), (1.0 - scale) * grad_combined


@triton.jit
def combine_block(pos, neg, scale, TOKEN: tl.constexpr, DTYPE: tl.constexpr):
    """The v that `cfg_combine` would have stored in DTYPE, in fp32."""
    combined = neg + scale * (pos - neg)
    if TOKEN > 0:
        tokens = rescaled(tl.reshape(pos, [LANES_ // TOKEN, TOKEN]), tl.reshape(combined, [LANES_ // TOKEN, TOKEN]))
        combined = tl.reshape(tokens, [LANES_])
    return round_to(combined, DTYPE).to(tl.float32)


@triton.jit
def combine_backward_block(grad, pos, neg, scale, TOKEN: tl.constexpr):
    if TOKEN == 0:
        grad_pos = scale * grad
        grad_neg = (1.0 - scale) * grad
    else:
        ROWS: tl.constexpr = LANES_ // TOKEN
        combined = neg + scale * (pos - neg)
        grad_pos, grad_neg = rescaled_backward(
            tl.reshape(grad, [ROWS, TOKEN]), tl.reshape(pos, [ROWS, TOKEN]), tl.reshape(combined, [ROWS, TOKEN]), scale
        )
        grad_pos, grad_neg = tl.reshape(grad_pos, [LANES_]), tl.reshape(grad_neg, [LANES_])
    return grad_pos, grad_neg
