"""Classifier-free guidance, with the per-token norm rescale of Qwen-Image's true CFG.

c = neg + g (pos - neg)
v = c                                 rescale=False
v = c ||pos|| / ||c||                 rescale=True: norms over the last dimension; 0 where ||c|| = 0
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.ops._checks import (
    compute_dtype,
    require,
    require_detached,
    require_float,
    require_latents,
    require_shape,
)
from flowgrpo_fast.ops._reduce import LANES, lane_sum
from flowgrpo_fast.ops._registry import announce_reference, register_op


def is_too_wide(width: int, rescale: bool) -> bool:
    """The kernels hold a token's channels in one program. Wider ones are rescaled by the reference, which says so once."""
    if not rescale or width <= LANES:
        return False
    announce_reference("cfg_combine", f"no kernel rescales tokens of more than {LANES} channels")
    return True


def cfg_combine_reference(v_pos: Tensor, v_neg: Tensor, scale: Tensor, rescale: bool) -> Tensor:
    pos, neg, g = _operands(v_pos, v_neg, scale)
    combined = neg + g * (pos - neg)
    if rescale:
        combined = combined * _or_zero(_norm(pos), _norm(combined))
    return combined.to(v_pos.dtype)


def cfg_combine_backward_reference(
    grad: Tensor, v_pos: Tensor | None, v_neg: Tensor | None, scale: Tensor, rescale: bool
) -> tuple[Tensor, Tensor]:
    """-> gradients of v_pos and v_neg. Without rescale the inputs are not needed, and None.

    With u = c / ||c||:  dc = ||pos|| / ||c|| (grad - (grad . u) u),  and ||pos|| adds (grad . u) pos / ||pos|| to dpos.
    """
    if not rescale:
        flat, _, g = _operands(grad, grad, scale)
        return (g * flat).to(grad.dtype), ((1.0 - g) * flat).to(grad.dtype)
    assert v_pos is not None
    assert v_neg is not None
    pos, neg, g = _operands(v_pos, v_neg, scale)
    upstream = grad.to(pos.dtype)
    combined = neg + g * (pos - neg)
    norm_pos, norm = _norm(pos), _norm(combined)
    # Unit vectors, not c / ||c||^2: squares underflow below 1e-19, and u u = 1 cancels exactly.
    unit = _or_zero(combined, norm)
    along = lane_sum(upstream * unit)[..., None]
    grad_combined = _or_zero(norm_pos, norm) * (upstream - along * unit)
    grad_pos = g * grad_combined + along * _or_zero(pos, norm_pos)
    return grad_pos.to(grad.dtype), ((1.0 - g) * grad_combined).to(grad.dtype)


def _operands(v_pos: Tensor, v_neg: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(v_pos)
    g = scale.to(dtype).reshape(-1, *(1,) * (v_pos.dim() - 1))
    return v_pos.contiguous().to(dtype), v_neg.contiguous().to(dtype), g


def _norm(values: Tensor) -> Tensor:
    """Correctly rounded by way of fp64: torch's fp32 square root on a CPU is not (two of ten values were an ulp off)."""
    return lane_sum(values * values).double().sqrt().to(values.dtype)[..., None]


def _or_zero(numerator: Tensor, norm: Tensor) -> Tensor:
    """numerator / norm, and 0 where the norm is 0."""
    return torch.where(norm > 0, numerator / norm, 0.0)


_cfg_combine_backward = register_op(
    "cfg_combine_backward(Tensor grad, Tensor? v_pos, Tensor? v_neg, Tensor scale, bool rescale) -> (Tensor, Tensor)",
    cfg_combine_backward_reference,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    v_pos, v_neg, scale, ctx.rescale = inputs
    ctx.save_for_backward(*((v_pos, v_neg) if ctx.rescale else (None, None)), scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*_cfg_combine_backward(grad, *ctx.saved_tensors, ctx.rescale), None, None)


_cfg_combine = register_op(
    "cfg_combine(Tensor v_pos, Tensor v_neg, Tensor scale, bool rescale) -> Tensor",
    cfg_combine_reference,
    setup_context=_setup_context,
    backward=_backward,
)


def cfg_combine(v_pos: Tensor, v_neg: Tensor, scale: float | Tensor, rescale: bool = False) -> Tensor:
    """Combine the velocities of the prompt and of the negative prompt: neg + g (pos - neg), [B, ...] in the dtype of v_pos.

    v_pos, v_neg: [B, ...] of rank >= 2, one shape and floating dtype. scale: a number, or a floating tensor [B].
    rescale=True multiplies each token by ||v_pos|| / ||combined||, norms over the last dimension (packed latents [B, tokens, C]), and
    gives 0 where the combined token is 0. fp32 inside (fp64 for fp64). Differentiable in v_pos and v_neg, through the norms too.
    Deterministic and batch-invariant. Raises ValueError for wrong shapes, dtypes or devices, or a scale that requires grad.
    Source: diffusers' QwenImagePipeline (true_cfg_scale).
    """
    require_latents(v_pos, "v_pos")
    require_float(v_neg, "v_neg", v_pos.device)
    require_shape(v_neg, "v_neg", tuple(v_pos.shape))
    require(v_neg.dtype == v_pos.dtype, "v_neg", v_neg, f"pass {v_pos.dtype}, as v_pos")
    return _cfg_combine(v_pos, v_neg, guidance_scale(scale, v_pos), rescale)


def guidance_scale(scale: float | Tensor, v: Tensor) -> Tensor:
    """The scale as a tensor [B], checked against a batch v."""
    if not isinstance(scale, Tensor):
        return torch.full((v.shape[0],), scale, dtype=compute_dtype(v), device=v.device)
    require_float(scale, "scale", v.device)
    require_shape(scale, "scale", (v.shape[0],))
    require_detached(scale, "scale")
    return scale.to(compute_dtype(v))
