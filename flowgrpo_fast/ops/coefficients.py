"""The affine Gaussian of a reverse step, x' ~ N(a x + b v, s^2): its coefficients, its mean and its log-density.

`sde_step` and `sde_log_prob` both take the mean and the density from here: that is what makes the ratio of an on-policy update
exactly 1 when v is bit-equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.ops._checks import require, require_detached, require_device, rows
from flowgrpo_fast.ops._reduce import row_sum

FORMS = ("gaussian", "flow_grpo")
REDUCTIONS = ("mean", "sum")
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True, eq=False)
class StepCoefficients:
    """a, b, s of x' = a x + b v + s noise: fp32 [B], one device. [1] stands for a whole batch. Made by `schedule.sde_coefficients`."""

    a: Tensor
    b: Tensor
    s: Tensor

    def __post_init__(self) -> None:
        for field, value in (("a", self.a), ("b", self.b), ("s", self.s)):
            ok = value.dtype == torch.float32 and value.dim() == 1 and value.shape == self.a.shape
            require(ok, field, value, "pass fp32 tensors a, b, s of one shape [B]")
            require_device(value, field, self.a.device)
            require_detached(value, field)

    def to(self, device: torch.device | str) -> StepCoefficients:
        return StepCoefficients(self.a.to(device), self.b.to(device), self.s.to(device))

    def __getitem__(self, index: Any) -> StepCoefficients:
        """The coefficients of some samples, by integer, slice, index tensor or mask; always [n]."""
        return StepCoefficients(self.a[index].reshape(-1), self.b[index].reshape(-1), self.s[index].reshape(-1))

    def expanded(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """a, b, s as contiguous [B] tensors for a batch x, checked against it."""
        batch, length = x.shape[0], self.a.shape[0]
        require(length in (1, batch), "coef", self.a, "pass coefficients for one sample, or for as many as x has")
        require_device(self.a, "coef", x.device)
        a, b, s = (value.expand(batch).contiguous() for value in (self.a, self.b, self.s))
        return a, b, s


def affine_mean(x: Tensor, v: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """mu = a x + b v as [B, D]. Two products, each rounded, and one sum: a fused multiply-add would round only once."""
    return rows(x, dtype) * a.to(dtype)[:, None] + rows(v, dtype) * b.to(dtype)[:, None]


def log_density(prev: Tensor, mean: Tensor, s: Tensor, form: str, reduction: str) -> Tensor:
    """log N(prev; mean, s^2) of rows [B, D] -> [B]; 0 where s = 0 (an ODE step has no density).

    The [B] scalars are worked out in fp64 and rounded once: that costs nothing, and log s then has the same bits in every lane.
    """
    residual = prev - mean
    length = prev.shape[1]
    square = reduced(residual * residual, reduction)
    if form == "flow_grpo":
        value = -square
    else:
        sigma = torch.where(s == 0, 1.0, s).double()
        constant = (torch.log(sigma) + _LOG_SQRT_2PI) * (1 if reduction == "mean" else length)
        value = -square / (2.0 * sigma * sigma) - constant
    return torch.where(s == 0, 0.0, value).to(prev.dtype)


def reduced(values: Tensor, reduction: str) -> Tensor:
    """Mean or sum over the latent elements, [B, D] -> fp64 [B], batch-invariant."""
    total = row_sum(values)
    return total / values.shape[1] if reduction == "mean" else total


def precision(s: Tensor, form: str = "gaussian") -> Tensor:
    """What multiplies a squared distance: 1/(2 s^2), or 1 in flow_grpo's form; 0 where s = 0. fp64 [B]."""
    inverse = torch.ones_like(s, dtype=torch.float64) if form == "flow_grpo" else 0.5 / s.double().square()
    return torch.where(s == 0, 0.0, inverse)
