"""flow_grpo_loss out of a backend's kernels: the same sequence for Triton, C++ and CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.ops._reduce import LANES
from flowgrpo_fast.ops.flow_grpo_loss import upstreams, without_weight


def fused_loss(
    *,
    combine: Callable[..., Tensor],
    combine_backward: Callable[..., tuple[Tensor, Tensor]],
    log_prob: Callable[..., tuple[Tensor, Tensor, Tensor]],
    loss: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]],
    gradient: Callable[..., tuple[Tensor, Tensor | None]],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """-> implementations of flow_grpo_loss and flow_grpo_loss_backward.

    The guidance happens inside the kernels, whose blocks of 1,024 lanes hold whole tokens. Where the rescale has tokens that do not fit
    (not a power of two up to 1,024 channels), `combine` runs first and one more tensor of latent size exists for the time of the call.
    """

    def forward(
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
        if rescale and not _fits(v):
            v, v_neg, scale, rescale = combine(v, v_neg, scale, True), None, None, False
        token = v.shape[-1] if rescale else 0
        log_probs, kl, log_ratio = log_prob(x, v, v_neg, scale, token, prev, a, b, s, v_ref, v_old, form, reduction)
        value, metrics, weight, kl_gradient = loss(
            log_probs if v_old is None else log_ratio, old_log_prob, adv, step_weight, mask, denominator,
            None if v_ref is None else kl, kl_weight, clip_low, clip_high,
        )  # fmt: skip
        return value, metrics, log_probs, weight, kl if kl_gradient is None else kl_gradient

    def backward(
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
        grads, rest = (weight, kl_gradient, None), (prev, a, b, s, v_ref, form, reduction)
        if rescale and not _fits(v):
            combined = combine(v, v_neg, scale, True)
            grad, _ = gradient(grads, grad_loss, x, combined, None, None, 0, *rest, torch.float32)
            grad_v, grad_v_neg = combine_backward(grad, v, v_neg, scale, True, v.dtype)
            dead = without_weight(*upstreams(grad_loss, weight, kl_gradient), s, v_ref, v)
            return grad_v.masked_fill_(dead, 0.0), grad_v_neg.masked_fill_(dead, 0.0)
        token = v.shape[-1] if rescale else 0
        grad, grad_neg = gradient(grads, grad_loss, x, v, v_neg, scale, token, *rest, v.dtype)
        return grad, v.new_empty(0) if grad_neg is None else grad_neg

    return forward, backward


def _fits(v: Tensor) -> bool:
    width = v.shape[-1]
    return width & (width - 1) == 0 and width <= LANES
