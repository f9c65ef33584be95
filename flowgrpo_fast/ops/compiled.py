"""The backends `cpp` and `cuda`: the extension built from csrc/, if it is there. Same arguments and outputs as the references.

Allocates outputs and scratch, turns [B, ...] into rows, and leaves the rest to `torch.ops.flowgrpo_fast_C`. Both devices share it.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from flowgrpo_fast.ops._checks import optional_rows, rows_view
from flowgrpo_fast.ops._fused import fused_loss
from flowgrpo_fast.ops._reduce import CHUNK
from flowgrpo_fast.ops.cfg_combine import cfg_combine_backward_reference, cfg_combine_reference, is_too_wide
from flowgrpo_fast.ops.group_advantage import group_advantage_reference
from flowgrpo_fast.ops.policy_loss import METRICS, entry_views, policy_loss_backward_reference

# Gradients above this come from csrc/pool.h: glibc may map and unmap such blocks each time, and above 32 MB it always does.
POOLED_BYTES = 1 << 20
# The CUDA kernel of group_advantage walks over the batch serially; above this the reference sorts, with the same bits.
MAX_CUDA_BATCH = 8192

_C = torch.ops.flowgrpo_fast_C


@functools.cache
def is_built(device_type: str) -> bool:
    """Has the extension been built for this kind of device, and does it load? Says why if it is there and does not."""
    try:
        import flowgrpo_fast._C  # noqa: F401
    except ModuleNotFoundError:
        return False
    except ImportError as error:
        warnings.warn(
            f"flowgrpo_fast._C does not load ({error}); rebuild it: pip install --no-build-isolation .", stacklevel=2
        )
        return False
    key = {"cpu": "CPU", "cuda": "CUDA"}[device_type]
    return torch._C._dispatch_has_kernel_for_dispatch_key("flowgrpo_fast_C::sde_step", key)


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
    x_rows = rows_view(x)
    partial, log_prob = _scratch(1, x_rows), _floats(len(x), x.device)
    _C.sde_step(
        x_rows, rows_view(v), a, b, s, optional_rows(noise), seed, _contiguous(step), _contiguous(sample_id), stream,
        prev, partial, log_prob, form == "gaussian", reduction == "mean",
    )  # fmt: skip
    return prev, log_prob


def sde_step_backward(grad_prev: Tensor, coefficient: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(grad_prev.shape, dtype=dtype, device=grad_prev.device)
    _C.scale_rows(rows_view(grad_prev), coefficient, out)
    return out


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
    return _log_prob(x, v, None, None, 0, prev, a, b, s, v_ref, v_old, form, reduction)


def _log_prob(
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
    x_rows = rows_view(x)
    log_prob, kl, log_ratio = (_floats(len(x), x.device) for _ in range(3))
    _C.sde_log_prob(
        x_rows, rows_view(v), optional_rows(v_neg), scale, token, rows_view(prev), a, b, s, optional_rows(v_ref),
        optional_rows(v_old), _scratch(3, x_rows), log_prob, kl, log_ratio, form == "gaussian", reduction == "mean",
    )  # fmt: skip
    return log_prob, kl, log_ratio


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
    grad_v, _ = _gradient(grads, None, x, v, None, None, 0, prev, a, b, s, v_ref, form, reduction, v.dtype)
    return grad_v


def _gradient(
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
    grad_v = _empty_gradient(v, dtype)
    grad_neg = None if v_neg is None else _empty_gradient(v, dtype)
    _C.sde_log_prob_backward(
        *grads, grad_loss, rows_view(x), rows_view(v), optional_rows(v_neg), scale, token, rows_view(prev), a, b, s,
        optional_rows(v_ref), grad_v, grad_neg, form == "gaussian", reduction == "mean",
    )  # fmt: skip
    return grad_v, grad_neg


def cfg_combine(v_pos: Tensor, v_neg: Tensor, scale: Tensor, rescale: bool) -> Tensor:
    width = v_pos.shape[-1]
    if is_too_wide(width, rescale):
        return cfg_combine_reference(v_pos, v_neg, scale, rescale)
    out = torch.empty(v_pos.shape, dtype=v_pos.dtype, device=v_pos.device)
    _C.cfg_combine(rows_view(v_pos), rows_view(v_neg), scale.float(), width if rescale else 0, out)
    return out


def cfg_combine_backward(
    grad: Tensor,
    v_pos: Tensor | None,
    v_neg: Tensor | None,
    scale: Tensor,
    rescale: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """dtype: that of the results, by default that of grad."""
    width = grad.shape[-1]
    if is_too_wide(width, rescale):
        grad_pos, grad_neg = cfg_combine_backward_reference(grad, v_pos, v_neg, scale, rescale)
        return grad_pos.to(dtype or grad.dtype), grad_neg.to(dtype or grad.dtype)
    grad_pos, grad_neg = (_empty_gradient(grad, dtype or grad.dtype) for _ in range(2))
    _C.cfg_combine_backward(
        rows_view(grad), optional_rows(v_pos), optional_rows(v_neg), scale.float(), width if rescale else 0,
        grad_pos, grad_neg,
    )  # fmt: skip
    return grad_pos, grad_neg


def group_advantage(
    rewards: Tensor, group: Tensor, valid: Tensor | None, normalize: str, eps: float, clip: float
) -> Tensor:
    if rewards.device.type == "cuda" and len(rewards) > MAX_CUDA_BATCH:
        return group_advantage_reference(rewards, group, valid, normalize, eps, clip)
    advantage = _floats(len(rewards), rewards.device)
    used = None if valid is None else valid.contiguous().view(torch.uint8)
    is_global, is_scaled = normalize == "global_std", normalize != "none"
    _C.group_advantage(rewards, group.contiguous(), used, is_global, is_scaled, eps, clip, advantage)
    return advantage


def policy_loss(
    log_ratio: Tensor,
    adv: Tensor,
    step_weight: Tensor | None,
    mask: Tensor | None,
    denominator: Tensor | None,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    loss, metrics, grad, _ = _loss(log_ratio, None, adv, step_weight, mask, denominator, None, 0.0, clip_low, clip_high)
    return loss, metrics[: len(METRICS)], grad


def _loss(
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
    shape, device = log_ratio.shape, log_ratio.device
    loss = torch.empty((), dtype=torch.float32, device=device)
    metrics = torch.zeros(len(METRICS) + 1, dtype=torch.float32, device=device)
    grad = torch.empty(shape, dtype=log_ratio.dtype, device=device)
    grad_kl = None if kl is None else torch.empty(shape, dtype=torch.float32, device=device)
    adv, step_weight, mask = entry_views(adv, step_weight, mask, shape)
    denominator = None if denominator is None else denominator.float()
    _C.policy_loss(
        log_ratio, old_log_prob, adv, step_weight, mask, denominator, kl, kl_weight, clip_low, clip_high,
        loss, metrics, grad, grad_kl,
    )  # fmt: skip
    return loss, metrics, grad, grad_kl


def policy_loss_backward(grad_log_ratio: Tensor, grad_loss: Tensor) -> Tensor:
    return policy_loss_backward_reference(grad_log_ratio, grad_loss)  # [B, T] numbers: nothing to gain


flow_grpo_loss, flow_grpo_loss_backward = fused_loss(
    combine=cfg_combine,
    combine_backward=cfg_combine_backward,
    log_prob=_log_prob,
    loss=_loss,
    gradient=_gradient,
)


def _empty_gradient(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised and contiguous, of like's shape and device; large ones on the CPU come from the pool of csrc/pool.h."""
    if like.device.type == "cpu" and like.numel() * dtype.itemsize > POOLED_BYTES:
        return _C.pooled_empty(like, dtype)
    return torch.empty(like.shape, dtype=dtype, device=like.device)


def _scratch(sums: int, x_rows: Tensor) -> Tensor:
    """The chunks' partial sums."""
    batch, length = x_rows.shape
    return _floats(sums * batch * -(-length // CHUNK), x_rows.device)


def _floats(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.float32, device=device)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
