"""The whole training step on one op: from velocities to the clipped policy loss, its metrics and the gradient.

    v         = cfg_combine(v, v_neg, scale, rescale)           where v_neg is given, rounded to the dtype of v as that op stores it
    log_ratio = log_prob(v) - old_log_prob, or the direct log-ratio to v_old         as `sde_log_prob`
    loss      = policy_loss(log_ratio, ...) + kl_weight * mean KL to v_ref           as `policy_loss`
    dv        = (w (prev - mu) + w_kl (v - v_ref)),  then through the guidance        w, w_kl: one number a sample, known after the forward

Bytes that the kernels move, per latent element (fp32 x and prev, v in e bytes): forward reads 8 + e, backward reads 8 + e and writes e:
16 + 3 e, so 28 in fp32 and 22 with bf16 velocities. Every given v_neg adds 3 e, v_ref 2 e, v_old e. That is each input twice and each
gradient once, the least for a loss that needs a sum over the whole sample before the first element of its gradient, if nothing
of latent size is kept in between. (Writing prev - mu in the forward and scaling it in the backward would move 16 + 2 e; it would
keep a latent alive per call and round a bf16 gradient twice.)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.ops._checks import (
    compute_dtype,
    require,
    require_choice,
    require_detached,
    require_device,
    require_float,
    require_latents,
    require_shape,
)
from flowgrpo_fast.ops._registry import register_op
from flowgrpo_fast.ops.cfg_combine import cfg_combine_backward_reference, cfg_combine_reference, guidance_scale
from flowgrpo_fast.ops.coefficients import FORMS, REDUCTIONS, StepCoefficients
from flowgrpo_fast.ops.policy_loss import (
    METRICS,
    denominator_tensor,
    kept_denominator,
    policy_loss_reference,
    total_entries,
)
from flowgrpo_fast.ops.sde_log_prob import gradient_rows, sde_log_prob_reference


def flow_grpo_loss_reference(
    v: Tensor,
    v_neg: Tensor | None,
    scale: Tensor | None,
    rescale: bool,
    x: Tensor,
    prev: Tensor,
    a: Tensor,
    b: Tensor,
    s: Tensor,
    old_log_prob: Tensor | None,
    v_old: Tensor | None,
    v_ref: Tensor | None,
    kl_weight: float,
    adv: Tensor,
    step_weight: Tensor | None,
    mask: Tensor | None,
    denominator: Tensor | None,
    clip_low: float,
    clip_high: float,
    form: str,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> loss [], metrics [8] (METRICS and the mean KL), log_prob [B], d loss / d log_ratio [B], d loss / d kl [B]."""
    combined = _combined(v, v_neg, scale, rescale)
    log_prob, kl, log_ratio = sde_log_prob_reference(x, combined, prev, a, b, s, v_ref, v_old, form, reduction)
    if old_log_prob is not None:
        log_ratio = log_prob - old_log_prob.to(log_prob.dtype)
    loss, metrics, weight = policy_loss_reference(log_ratio, adv, step_weight, mask, denominator, clip_low, clip_high)
    kept, total = kept_denominator(kl, mask, denominator)
    kl = torch.where(kept, kl, 0.0)
    total = total.to(kl.dtype)
    mean_kl = (total_entries(kl) / total.double()).to(kl.dtype)
    kl_gradient = kept.to(kl.dtype) * kl_weight / total
    if v_ref is not None:
        loss = loss + kl_weight * mean_kl
    return loss, torch.cat((metrics, mean_kl.float()[None])), log_prob, weight, kl_gradient


def flow_grpo_loss_backward_reference(
    grad_loss: Tensor,
    weight: Tensor,
    kl_gradient: Tensor,
    v: Tensor,
    v_neg: Tensor | None,
    scale: Tensor | None,
    rescale: bool,
    x: Tensor,
    prev: Tensor,
    a: Tensor,
    b: Tensor,
    s: Tensor,
    v_ref: Tensor | None,
    form: str,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """-> gradients of v and v_neg (empty [0] where v_neg is None). In fp32 all the way, rounded once."""
    combined = _combined(v, v_neg, scale, rescale)
    upstream, kl_upstream = upstreams(grad_loss, weight, kl_gradient)
    grad = gradient_rows(upstream, kl_upstream, x, combined, prev, a, b, s, v_ref, form, reduction).reshape(v.shape)
    if v_neg is None or scale is None:
        return grad.to(v.dtype), v.new_empty(0)
    grad_v, grad_neg = cfg_combine_backward_reference(
        grad, v if rescale else None, v_neg if rescale else None, scale, rescale
    )
    dead = without_weight(upstream, kl_upstream, s, v_ref, v)
    return torch.where(dead, 0.0, grad_v).to(v.dtype), torch.where(dead, 0.0, grad_neg).to(v.dtype)


def upstreams(grad_loss: Tensor, weight: Tensor, kl_gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the loss with respect to each sample's log-prob and KL, fp64 [B]."""
    return weight.double() * grad_loss.double(), kl_gradient.double() * grad_loss.double()


def without_weight(upstream: Tensor, kl_upstream: Tensor, s: Tensor, v_ref: Tensor | None, like: Tensor) -> Tensor:
    """bool [B, 1, ...] of like's rank: samples whose gradient is 0, even where the norms of their tokens are infinite or NaN."""
    dead = (s == 0) | ((upstream == 0) & (kl_upstream == 0 if v_ref is not None else True))
    return dead.reshape(-1, *(1,) * (like.dim() - 1))


def _combined(v: Tensor, v_neg: Tensor | None, scale: Tensor | None, rescale: bool) -> Tensor:
    if v_neg is None:
        return v
    assert scale is not None
    return cfg_combine_reference(v, v_neg, scale, rescale)


_flow_grpo_loss_backward = register_op(
    "flow_grpo_loss_backward(Tensor grad_loss, Tensor weight, Tensor kl_gradient, Tensor v, Tensor? v_neg, Tensor? scale, "
    "bool rescale, Tensor x, Tensor prev, Tensor a, Tensor b, Tensor s, Tensor? v_ref, str form, str reduction) "
    "-> (Tensor, Tensor)",
    flow_grpo_loss_backward_reference,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    v, v_neg, scale, ctx.rescale, x, prev, a, b, s, _, _, v_ref, *_, ctx.form, ctx.reduction = inputs
    _, metrics, log_prob, weight, kl_gradient = output
    ctx.mark_non_differentiable(metrics, log_prob, weight, kl_gradient)
    ctx.save_for_backward(weight, kl_gradient, v, v_neg, scale, x, prev, a, b, s, v_ref)


def _backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Any, ...]:
    weight, kl_gradient, v, v_neg, scale, x, prev, a, b, s, v_ref = ctx.saved_tensors
    grad_v, grad_neg = _flow_grpo_loss_backward(
        grad_loss, weight, kl_gradient, v, v_neg, scale, ctx.rescale, x, prev, a, b, s, v_ref, ctx.form, ctx.reduction
    )
    return (grad_v, None if v_neg is None else grad_neg, *(None,) * 19)


_flow_grpo_loss = register_op(
    "flow_grpo_loss(Tensor v, Tensor? v_neg, Tensor? scale, bool rescale, Tensor x, Tensor prev, Tensor a, Tensor b, Tensor s, "
    "Tensor? old_log_prob, Tensor? v_old, Tensor? v_ref, float kl_weight, Tensor adv, Tensor? step_weight, Tensor? mask, "
    "Tensor? denominator, float clip_low, float clip_high, str form, str reduction) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    flow_grpo_loss_reference,
    setup_context=_setup_context,
    backward=_backward,
)


def flow_grpo_loss(
    v: Tensor,
    x: Tensor,
    prev: Tensor,
    coef: StepCoefficients,
    adv: Tensor,
    *,
    v_neg: Tensor | None = None,
    scale: float | Tensor | None = None,
    rescale: bool = False,
    old_log_prob: Tensor | None = None,
    v_old: Tensor | None = None,
    v_ref: Tensor | None = None,
    kl_weight: float = 0.0,
    clip_low: float = 1e-4,
    clip_high: float = 1e-4,
    step_weight: Tensor | None = None,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
    form: str = "gaussian",
    reduction: str = "mean",
) -> tuple[Tensor, dict[str, Tensor]]:
    """FlowGRPO's loss of B (sample, step) pairs, straight from the model's output; returns (loss, metrics).

    v: [B, ...] of rank >= 2, the model's output; x, prev: the step's latents, its shape; any floating dtypes. coef: fp32 [B] or [1].
    adv: [B]. Exactly one of old_log_prob [B] (of `sde_step`: the ratio is then exactly 1 for a bit-equal v) and v_old [B, ...] (the
    velocity that took the step: exact to 1e-11). v_neg with scale (a number or [B]) and rescale: as `cfg_combine`.
    v_ref [B, ...] with kl_weight: adds kl_weight times the mean KL to the reference. step_weight [B], mask bool [B], denominator,
    clip_low, clip_high: as `policy_loss`. form, reduction: as `sde_log_prob`.

    loss: 0-d fp32 (fp64 for fp64 latents), differentiable in v and v_neg only. metrics: those of `policy_loss`, 0-d fp32 on the
    device, with "kl" where v_ref is given, and log_prob [B]. Equal, bit for bit, to the chain of the three ops, but the gradient
    is rounded to the dtype of v once instead of twice. The backward keeps the inputs and nothing else of latent size. No host
    sync; deterministic. Bytes moved: see the module. Raises ValueError for wrong shapes, dtypes or devices.
    Source: flow_grpo's training loop (arXiv:2505.05470), design.md section 2.
    """
    require_latents(v, "v")
    require_choice(form, "form", FORMS)
    require_choice(reduction, "reduction", REDUCTIONS)
    for field, latents in (("x", x), ("prev", prev), ("v_neg", v_neg), ("v_old", v_old), ("v_ref", v_ref)):
        if latents is not None:
            require_float(latents, field, v.device)
            require_shape(latents, field, tuple(v.shape))
    given = f"{'neither' if old_log_prob is None and v_old is None else 'both'}"
    require((old_log_prob is None) != (v_old is None), "old_log_prob, v_old", given, "pass exactly one of the two")
    require((v_neg is None) == (scale is None), "v_neg, scale", "one of the two", "pass both, or neither")
    require(0 <= kl_weight < math.inf, "kl_weight", kl_weight, "pass a finite number >= 0")
    require(kl_weight == 0 or v_ref is not None, "v_ref", None, "pass the reference's velocity, or kl_weight=0")
    for field, clip in (("clip_low", clip_low), ("clip_high", clip_high)):
        require(0 <= clip < math.inf, field, clip, "pass a finite bound on |ratio - 1|, >= 0")
    batch = (v.shape[0],)
    for field, row in (("adv", adv), ("old_log_prob", old_log_prob), ("step_weight", step_weight)):
        if row is not None:
            require_float(row, field, v.device)
            require_shape(row, field, batch)
            require_detached(row, field)
    for field, latents in (("x", x), ("prev", prev), ("v_old", v_old), ("v_ref", v_ref)):
        require_detached(latents, field)
    if mask is not None:
        require(mask.dtype == torch.bool, "mask", mask, "pass a bool tensor")
        require_shape(mask, "mask", batch)
        require_device(mask, "mask", v.device)
    if v_neg is not None:
        require(v_neg.dtype == v.dtype, "v_neg", v_neg, f"pass {v.dtype}, as v")
    guidance = None if scale is None else guidance_scale(scale, v)
    # fp64 rewards make fp64 advantages; beside fp32 latents they would send the whole op to the reference.
    dtype = compute_dtype(v, x)
    adv = adv.to(dtype)
    old_log_prob = None if old_log_prob is None else old_log_prob.to(dtype)
    step_weight = None if step_weight is None else step_weight.to(dtype)
    loss, metrics, log_prob, _, _ = _flow_grpo_loss(
        v, v_neg, guidance, rescale and v_neg is not None, x, prev, *coef.expanded(v), old_log_prob, v_old, v_ref, kl_weight,
        adv, step_weight, mask, denominator_tensor(denominator, v), clip_low, clip_high, form, reduction,
    )  # fmt: skip
    named = dict(zip((*METRICS, "kl"), metrics.unbind(), strict=True))
    if v_ref is None:
        del named["kl"]
    return loss, {**named, "log_prob": log_prob}
