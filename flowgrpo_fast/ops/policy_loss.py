"""The clipped policy loss: ratio, clip, weights, mask, metrics and gradient in one pass.

    r1      = expm1(clamp(log_ratio, -10, 10))                              the ratio minus 1
    entry   = max(-A (1 + r1), -A (1 + clip(r1, -clip_low, clip_high)))
    loss    = sum over kept entries of entry * step_weight / denominator

Everything works on r1, because fp32 cannot hold a ratio of 1 + 2e-6 to better than 6 % of its clip range; r1 has all its digits.
The clamp at +-10 (a ratio of 22,026) keeps one broken sample from overflowing; beyond it the gradient is 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.ops._checks import (
    compute_dtype,
    require,
    require_detached,
    require_device,
    require_float,
    require_shape,
)
from flowgrpo_fast.ops._reduce import lane_sum
from flowgrpo_fast.ops._registry import register_op

LOG_RATIO_BOUND = 10.0
METRICS = (
    "ratio_mean",
    "ratio_max_deviation",
    "clip_fraction_low",
    "clip_fraction_high",
    "approx_kl",
    "advantage_mean",
    "kept",
)


def policy_loss_reference(
    log_ratio: Tensor,
    adv: Tensor,
    step_weight: Tensor | None,
    mask: Tensor | None,
    denominator: Tensor | None,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> loss [], metrics fp32 [7] in the order of METRICS, d loss / d log_ratio (shape and dtype of log_ratio)."""
    dtype = compute_dtype(log_ratio)
    shape = log_ratio.shape
    kept, total = kept_denominator(log_ratio, mask, denominator)
    log_r = torch.where(kept, log_ratio.to(dtype), 0.0)  # before any arithmetic: a masked NaN must not reach the sums
    bounded = log_r.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    advantage = torch.where(kept, per_sample(adv, shape).to(dtype), 0.0)
    count = total_entries(kept)
    weight = kept.to(dtype) if step_weight is None else torch.where(kept, step_weight.to(dtype), 0.0)
    scale = weight / total.to(dtype)

    r1 = torch.expm1(bounded.double()).to(dtype)  # rounded once: the same bits on every backend
    clipped_low = (advantage < 0) & (r1 < -clip_low)
    clipped_high = (advantage > 0) & (r1 > clip_high)
    clipped = clipped_low | clipped_high
    effective = torch.where(clipped, r1.clamp(-clip_low, clip_high), r1)
    loss = total_entries((-advantage - advantage * effective) * scale).to(dtype)
    inert = clipped | ~kept | (log_r.abs() > LOG_RATIO_BOUND)  # false for NaN, whose gradient must stay NaN
    grad = torch.where(inert, 0.0, (-advantage - advantage * r1) * scale).to(log_ratio.dtype)

    sums = [total_entries(value) for value in (r1, clipped_low, clipped_high, r1 - bounded, advantage)]
    r1_mean, low, high, approx_kl, advantage_mean = (value / count.clamp(min=1.0) for value in sums)
    deviation = torch.nn.functional.pad(r1.abs().flatten(), (0, 1)).amax()  # one zero more: no entries, no deviation
    ratio_mean = torch.where(count > 0, 1.0 + r1_mean, 0.0)
    metrics = torch.stack((ratio_mean, deviation, low, high, approx_kl, advantage_mean, count)).float()
    return loss, metrics, grad.contiguous()


def policy_loss_backward_reference(grad_log_ratio: Tensor, grad_loss: Tensor) -> Tensor:
    return grad_log_ratio * grad_loss.to(grad_log_ratio.dtype)


def per_sample(tensor: Tensor, shape: torch.Size) -> Tensor:
    """[B] against [B, T]: a view [B, 1] that broadcasts, nothing materialised."""
    return tensor.unsqueeze(1) if tensor.dim() < len(shape) else tensor


def entry_views(
    adv: Tensor, step_weight: Tensor | None, mask: Tensor | None, shape: torch.Size
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """For kernels: views of the entries' shape, the mask as bytes. Stride 0 where an operand broadcasts, nothing is materialised."""
    weight = None if step_weight is None else step_weight.expand(shape)
    kept = None if mask is None else per_sample(mask, shape).expand(shape).view(torch.uint8)
    return per_sample(adv, shape).expand(shape), weight, kept


def kept_denominator(entries: Tensor, mask: Tensor | None, denominator: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which entries count, and what divides their sum, fp64 []: 1 where nothing is kept here, whatever the other ranks kept."""
    shape = entries.shape
    kept = torch.ones_like(entries, dtype=torch.bool) if mask is None else per_sample(mask, shape).expand(shape)
    count = total_entries(kept)
    return kept, torch.where(count > 0, count if denominator is None else denominator.double(), 1.0)


def total_entries(values: Tensor) -> Tensor:
    """Sum of all entries, fp64 []."""
    return lane_sum(values.flatten().double())


_policy_loss_backward = register_op(
    "policy_loss_backward(Tensor grad_log_ratio, Tensor grad_loss) -> Tensor", policy_loss_backward_reference
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(output[2])


def _backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Any, ...]:
    (grad_log_ratio,) = ctx.saved_tensors
    return (_policy_loss_backward(grad_log_ratio, grad_loss), *(None,) * 6)


_policy_loss = register_op(
    "policy_loss(Tensor log_ratio, Tensor adv, Tensor? step_weight, Tensor? mask, Tensor? denominator, float clip_low, "
    "float clip_high) -> (Tensor, Tensor, Tensor)",
    policy_loss_reference,
    setup_context=_setup_context,
    backward=_backward,
)


def policy_loss(
    log_prob: Tensor | None,
    old_log_prob: Tensor | None,
    adv: Tensor,
    clip_low: float = 1e-4,
    clip_high: float = 1e-4,
    log_ratio: Tensor | None = None,
    step_weight: Tensor | None = None,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss (PPO's surrogate) over [B] or [B, T] entries; returns (loss, metrics).

    log_prob, old_log_prob: fp32 [B] or [B, T]; or log_ratio in their place (exact where `sde_log_prob` gives it), with both None.
    adv: [B] (holds for all T, not materialised) or the shape of the ratio. clip_low, clip_high: bounds on ratio - 1, >= 0.
    step_weight: [T] or [B, T] for [B, T] entries, [B] for [B] entries. mask: bool [B] or [B, T]; an entry that is not kept
    contributes nothing, even if it is NaN. denominator: None = number of kept entries (0 kept: loss 0, gradient 0); a positive
    number or a 0-d tensor, for a mean over all ranks.

    loss: 0-d, fp32 (fp64 for fp64 input), differentiable in log_prob (or log_ratio) only; formula: see the module.
    metrics: 0-d fp32 tensors on the device, without gradient, means over this call's kept entries: ratio_mean, ratio_max_deviation
    (max |ratio - 1|), clip_fraction_low and clip_fraction_high (where the clip changes the loss), approx_kl (ratio - 1 - log ratio),
    advantage_mean, kept (their number). All 0 where nothing is kept. No host sync; deterministic.
    Raises ValueError for wrong shapes, dtypes or devices, for a negative clip, and where old_log_prob or adv require grad.
    """
    ratio = _log_ratio(log_prob, old_log_prob, log_ratio)
    require(ratio.dim() in (1, 2), "log_prob", ratio, "pass [B] or [B, T]")
    full = tuple(ratio.shape)
    batch, last = full[:1], full[-1:]
    require_float(adv, "adv", ratio.device)
    require_shape(adv, "adv", batch, full)
    require_detached(adv, "adv")
    for field, clip in (("clip_low", clip_low), ("clip_high", clip_high)):
        require(0 <= clip < math.inf, field, clip, "pass a finite bound on |ratio - 1|, >= 0")
    if step_weight is not None:
        require_float(step_weight, "step_weight", ratio.device)
        require_shape(step_weight, "step_weight", last, full)
        require_detached(step_weight, "step_weight")
    if mask is not None:
        require(mask.dtype == torch.bool, "mask", mask, "pass a bool tensor")
        require_shape(mask, "mask", batch, full)
        require_device(mask, "mask", ratio.device)
    total = denominator_tensor(denominator, ratio)
    if ratio.dtype != torch.float64:  # fp64 weights beside fp32 entries would send the op to the reference
        adv = adv.float()
        step_weight = None if step_weight is None else step_weight.float()
    loss, metrics, _ = _policy_loss(ratio, adv, step_weight, mask, total, clip_low, clip_high)
    return loss, dict(zip(METRICS, metrics.unbind(), strict=True))


def _log_ratio(log_prob: Tensor | None, old_log_prob: Tensor | None, log_ratio: Tensor | None) -> Tensor:
    if log_ratio is not None:
        require_float(log_ratio, "log_ratio")
        return log_ratio
    if log_prob is None or old_log_prob is None:
        raise ValueError("log_prob, old_log_prob: got None; pass both, or log_ratio in their place")
    require_float(log_prob, "log_prob")
    require_float(old_log_prob, "old_log_prob", log_prob.device)
    require_shape(old_log_prob, "old_log_prob", tuple(log_prob.shape))
    require_detached(old_log_prob, "old_log_prob")
    dtype = compute_dtype(log_prob, old_log_prob)
    return log_prob.to(dtype) - old_log_prob.to(dtype)


def denominator_tensor(denominator: float | Tensor | None, ratio: Tensor) -> Tensor | None:
    if denominator is None:
        return None
    if isinstance(denominator, Tensor):
        require_shape(denominator, "denominator", ())
        require_device(denominator, "denominator", ratio.device)
        require_detached(denominator, "denominator")
        return denominator
    require(0 < denominator < math.inf, "denominator", denominator, "pass a positive number of entries")
    return torch.full((), float(denominator), dtype=torch.float64, device=ratio.device)
