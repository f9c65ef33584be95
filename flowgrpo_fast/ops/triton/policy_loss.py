"""policy_loss: loss, metrics and gradient in one launch of one program. Entries are a few thousand numbers, not latents.

Sums are fp64 and rounded to fp32 once, which hides their order (odds of 2^-26 a number); eight explicit trees of fp64 spill registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowgrpo_fast.ops.policy_loss import LOG_RATIO_BOUND, METRICS, entry_views, policy_loss_backward_reference
from flowgrpo_fast.ops.triton._common import on_device, round_to

_BOUND: tl.constexpr = tl.constexpr(LOG_RATIO_BOUND)
BLOCK_: tl.constexpr = tl.constexpr(256)  # one entry a thread keeps it at 48 registers


@triton.jit
def policy_loss_kernel(
    log_ratio_ptr, old_ptr, adv_ptr, weight_ptr, mask_ptr, denominator_ptr, kl_ptr,
    loss_ptr, metrics_ptr, grad_ptr, grad_kl_ptr,
    entries, steps, clip_low, clip_high, kl_weight, adv_row, adv_step, weight_row, weight_step, mask_row, mask_step,
    OLD: tl.constexpr, WEIGHT: tl.constexpr, MASK: tl.constexpr, DENOMINATOR: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    """Entry i is (row i // steps, step i % steps); stride 0 broadcasts. OLD: log_ratio_ptr holds log-probs. KL: adds kl_weight * mean KL."""
    lane = tl.arange(0, BLOCK_)
    zero = tl.zeros([BLOCK_], tl.float64)
    count = zero
    for start in range(0, entries, BLOCK_):
        index = start + lane
        count += is_kept(mask_ptr, index, entries, steps, mask_row, mask_step, MASK).to(tl.float64)
    kept_count = tl.sum(count, axis=0)
    total = kept_count.to(tl.float32)
    if DENOMINATOR:
        total = tl.load(denominator_ptr).to(tl.float32)
    total = tl.where(kept_count > 0, total, 1.0)

    loss, ratio, low, high, approx_kl, advantages, kls = zero, zero, zero, zero, zero, zero, zero
    deviation = tl.zeros([BLOCK_], tl.float32)
    for start in range(0, entries, BLOCK_):
        index = start + lane
        inside = index < entries
        row, step = (index // steps).to(tl.int64), (index % steps).to(tl.int64)
        kept = is_kept(mask_ptr, index, entries, steps, mask_row, mask_step, MASK)
        log_r = tl.load(log_ratio_ptr + index, mask=inside, other=0.0).to(tl.float32)
        if OLD:
            log_r -= tl.load(old_ptr + index, mask=inside, other=0.0).to(tl.float32)
        log_r = tl.where(kept, log_r, 0.0)
        bounded = tl.where(log_r > _BOUND, _BOUND, tl.where(log_r < -_BOUND, -_BOUND, log_r))
        advantage = tl.load(adv_ptr + row * adv_row + step * adv_step, mask=inside, other=0.0).to(tl.float32)
        advantage = tl.where(kept, advantage, 0.0)
        weight = kept.to(tl.float32)
        if WEIGHT:
            given = tl.load(weight_ptr + row * weight_row + step * weight_step, mask=inside, other=0.0)
            weight = tl.where(kept, given.to(tl.float32), 0.0)
        scale = tl.div_rn(weight, total + tl.zeros_like(weight))

        r1 = expm1(bounded.to(tl.float64)).to(tl.float32)
        clipped_low = (advantage < 0) & (r1 < -clip_low)
        clipped_high = (advantage > 0) & (r1 > clip_high)
        clipped = clipped_low | clipped_high
        effective = tl.where(clipped_low, -clip_low, tl.where(clipped_high, clip_high, r1))
        loss += ((-advantage - advantage * effective) * scale).to(tl.float64)
        inert = clipped | ~kept | (tl.abs(log_r) > _BOUND)
        grad = tl.where(inert, 0.0, (-advantage - advantage * r1) * scale)
        tl.store(grad_ptr + index, round_to(grad, grad_ptr.dtype.element_ty), mask=inside)

        ratio += r1.to(tl.float64)
        low += clipped_low.to(tl.float64)
        high += clipped_high.to(tl.float64)
        approx_kl += (r1 - bounded).to(tl.float64)
        advantages += advantage.to(tl.float64)
        size = tl.abs(r1)
        deviation = tl.where((size > deviation) | (size != size), size, deviation)  # a NaN stays
        if KL:
            kl = tl.where(kept, tl.load(kl_ptr + index, mask=inside, other=0.0), 0.0)
            kls += kl.to(tl.float64)
            grad_kl = tl.div_rn(tl.where(kept, kl_weight, 0.0), total + tl.zeros_like(weight))
            tl.store(grad_kl_ptr + index, grad_kl, mask=inside)

    value = tl.sum(loss, axis=0).to(tl.float32)
    mean_kl = (tl.sum(kls, axis=0) / total.to(tl.float64)).to(tl.float32)
    if KL:
        value += kl_weight * mean_kl
    tl.store(metrics_ptr + 7, mean_kl)
    tl.store(loss_ptr, value)
    divisor = tl.maximum(kept_count, 1.0)
    ratio_mean = tl.where(kept_count > 0, 1.0 + tl.sum(ratio, axis=0) / divisor, 0.0)
    tl.store(metrics_ptr, ratio_mean.to(tl.float32))
    broken = tl.max((deviation != deviation).to(tl.int32), axis=0) > 0
    largest = tl.max(tl.where(deviation == deviation, deviation, 0.0), axis=0)
    tl.store(metrics_ptr + 1, tl.where(broken, float("nan"), largest))
    tl.store(metrics_ptr + 2, (tl.sum(low, axis=0) / divisor).to(tl.float32))
    tl.store(metrics_ptr + 3, (tl.sum(high, axis=0) / divisor).to(tl.float32))
    tl.store(metrics_ptr + 4, (tl.sum(approx_kl, axis=0) / divisor).to(tl.float32))
    tl.store(metrics_ptr + 5, (tl.sum(advantages, axis=0) / divisor).to(tl.float32))
    tl.store(metrics_ptr + 6, kept_count.to(tl.float32))


@triton.jit
def is_kept(mask_ptr, index, entries, steps, mask_row, mask_step, MASK: tl.constexpr):
    inside = index < entries
    if MASK:
        row, step = (index // steps).to(tl.int64), (index % steps).to(tl.int64)
        inside = inside & (tl.load(mask_ptr + row * mask_row + step * mask_step, mask=inside, other=0) != 0)
    return inside


@triton.jit
def expm1(x):
    """exp(x) - 1 of fp64 to 1e-15: a series below 1/2, where the difference would cancel."""
    series = tl.zeros_like(x) + 1.0
    for k in tl.static_range(15, 1, -1):
        series = 1.0 + series * x * (1.0 / k)
    return tl.where(tl.abs(x) < 0.5, x * series, tl.exp(x) - 1.0)


def policy_loss(
    log_ratio: Tensor,
    adv: Tensor,
    step_weight: Tensor | None,
    mask: Tensor | None,
    denominator: Tensor | None,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    value, metrics, grad, _ = loss(log_ratio, None, adv, step_weight, mask, denominator, None, 0.0, clip_low, clip_high)
    return value, metrics[: len(METRICS)], grad


def loss(
    log_ratio: Tensor,
    old_log_prob: Tensor | None,
    adv: Tensor,
    step_weight: Tensor | None,
    mask: Tensor | None,
    denominator: Tensor | None,
    kl: Tensor | None,
    kl_weight: float,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """-> loss [], metrics [8] (METRICS and the mean KL, 0 without one), d loss / d log_ratio, d loss / d kl."""
    device, shape = log_ratio.device, log_ratio.shape
    log_ratio = log_ratio.contiguous()
    old_log_prob = None if old_log_prob is None else old_log_prob.contiguous()
    value = torch.empty((), dtype=torch.float32, device=device)
    metrics = torch.empty(len(METRICS) + 1, dtype=torch.float32, device=device)
    grad = torch.empty(shape, dtype=log_ratio.dtype, device=device)
    grad_kl = None if kl is None else torch.empty(shape, dtype=torch.float32, device=device)
    adv, step_weight, mask = entry_views(adv, step_weight, mask, shape)
    strides = [stride for tensor in (adv, step_weight, mask) for stride in _strides(tensor)]
    with on_device(log_ratio):
        policy_loss_kernel[(1,)](
            log_ratio, old_log_prob, adv, step_weight, mask, denominator, kl, value, metrics, grad, grad_kl,
            log_ratio.numel(), shape[1] if len(shape) == 2 else 1, clip_low, clip_high, kl_weight, *strides,
            OLD=old_log_prob is not None, WEIGHT=step_weight is not None, MASK=mask is not None,
            DENOMINATOR=denominator is not None, KL=kl is not None, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return value, metrics, grad, grad_kl


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """Row and step stride."""
    if tensor is None:
        return 0, 0
    return tensor.stride(0), tensor.stride(1) if tensor.dim() == 2 else 0


def policy_loss_backward(grad_log_ratio: Tensor, grad_loss: Tensor) -> Tensor:
    return policy_loss_backward_reference(grad_log_ratio, grad_loss)  # [B, T] numbers: torch does this in one launch
