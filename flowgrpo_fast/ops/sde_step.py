"""One reverse step: sample x' and take its log-prob, in one pass.

    prev     = round_to(out_dtype, a x + b v + s noise)            fp32: product, product, sum, then + s noise; no fused multiply-add
    log_prob = log N(prev; a x + b v, s^2)                         of the value that is stored, after rounding

Rounding comes first because the trainer sees only what was stored: with bf16 latents the density of the unrounded value is off
by 2.5e-5 (s = 0.64) to 4e-4 (s = 0.066), more than the clip range of 1e-5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.ops._checks import (
    compute_dtype,
    require,
    require_choice,
    require_detached,
    require_float,
    require_latents,
    require_shape,
    rows,
)
from flowgrpo_fast.ops._philox import NoiseKey, normal_rows
from flowgrpo_fast.ops._registry import register_op
from flowgrpo_fast.ops.coefficients import FORMS, REDUCTIONS, StepCoefficients, affine_mean, log_density


def sde_step_reference(
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
    dtype = compute_dtype(x, v)
    mean = affine_mean(x, v, a, b, dtype)
    if noise is None:
        assert step is not None
        assert sample_id is not None
        noise = normal_rows(seed, step, sample_id, stream, mean.shape[1])
    spread = s.to(dtype)[:, None]
    # Where s = 0 the mean itself, not mean + 0 * noise: that would turn -0.0 into 0.0, and a non-finite noise into NaN.
    prev = torch.where(spread == 0, mean, mean + spread * rows(noise, dtype)).to(out_dtype)
    return prev.reshape(x.shape), log_density(prev.to(dtype), mean, s, form, reduction)


def sde_step_backward_reference(grad_prev: Tensor, coefficient: Tensor, dtype: torch.dtype) -> Tensor:
    """d prev / dx = a and d prev / dv = b: the gradient of either input is the incoming one times its coefficient."""
    compute = torch.float64 if torch.float64 in (grad_prev.dtype, dtype) else torch.float32
    scaled = rows(grad_prev, compute) * coefficient.to(compute)[:, None]
    return scaled.to(dtype).reshape(grad_prev.shape)


_sde_step_backward = register_op(
    "sde_step_backward(Tensor grad_prev, Tensor coefficient, ScalarType dtype) -> Tensor", sde_step_backward_reference
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, v, a, b = inputs[:4]
    ctx.mark_non_differentiable(output[1])
    ctx.dtypes, ctx.needs = (x.dtype, v.dtype), (x.requires_grad, v.requires_grad)
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, grad_prev: Tensor, _: Tensor) -> tuple[Any, ...]:
    grads = [
        _sde_step_backward(grad_prev, coefficient, dtype) if needed else None
        for coefficient, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs, strict=True)
    ]
    return (*grads, *(None,) * 11)


_sde_step = register_op(
    "sde_step(Tensor x, Tensor v, Tensor a, Tensor b, Tensor s, Tensor? noise, int seed, Tensor? step, Tensor? sample_id, "
    "int stream, ScalarType out_dtype, str form, str reduction) -> (Tensor, Tensor)",
    sde_step_reference,
    setup_context=_setup_context,
    backward=_backward,
)


def sde_step(
    x: Tensor,
    v: Tensor,
    coef: StepCoefficients,
    noise: Tensor | None = None,
    key: NoiseKey | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    reduction: str = "mean",
    form: str = "gaussian",
) -> tuple[Tensor, Tensor]:
    """Take one step x -> prev of the sampler, and the log-prob of the prev that is stored.

    x, v: [B, ...] of any rank >= 2, any floating dtypes. coef: a, b, s, fp32 [B] or [1]. Exactly one of
    noise [B, ...] (any floating dtype) and key (`NoiseKey`: Philox noise that does not depend on the batch).
    Returns prev [B, ...] in out_dtype (default: that of x), contiguous, and log_prob fp32 [B] (fp64 where x or v is fp64):
        prev     = round(a x + b v + s noise)
        log_prob = -mean((prev - mu)^2) / (2 s^2) - log s - log sqrt(2 pi),   mu = a x + b v
    reduction="sum" sums over the D elements, constants included: its ratio is the mean's ratio to the power D.
    form="flow_grpo" is -mean((prev - mu)^2), as flow_grpo and verl-omni write their cps log-prob.

    Where s = 0 (an ODE step) prev is a x + b v bit for bit, and log_prob is 0.0: there is no density, and no NaN.
    Gradients: d prev/dx = a, d prev/dv = b (noise held fixed). log_prob is not differentiable here; `sde_log_prob` is, and gives
    bit-equal values. Deterministic and batch-invariant. Raises ValueError for wrong shapes, dtypes or devices.
    Source: design.md section 2 (flow_grpo's sde_step_with_logprob, Flow-CPS, DanceGRPO in one affine form).
    """
    require_latents(x, "x")
    require_float(v, "v", x.device)
    require_shape(v, "v", tuple(x.shape))
    require_choice(form, "form", FORMS)
    require_choice(reduction, "reduction", REDUCTIONS)
    require((noise is None) != (key is None), "noise, key", _given(noise, key), "pass exactly one of the two")
    out_dtype = x.dtype if out_dtype is None else out_dtype
    require(out_dtype.is_floating_point, "out_dtype", out_dtype, "pass a floating dtype")
    a, b, s = coef.expanded(x)
    if noise is not None:
        require_float(noise, "noise", x.device)
        require_shape(noise, "noise", tuple(x.shape))
        require_detached(noise, "noise")
        return _sde_step(x, v, a, b, s, noise, 0, None, None, 0, out_dtype, form, reduction)
    assert key is not None
    require_shape(key.sample_id, "key.sample_id", (x.shape[0],))
    step, sample_id = key.step_tensor().to(x.device), key.sample_id.to(x.device)
    return _sde_step(x, v, a, b, s, None, key.seed, step, sample_id, key.stream, out_dtype, form, reduction)


def _given(noise: Tensor | None, key: NoiseKey | None) -> str:
    return "neither" if noise is None and key is None else "both"
