"""Group-relative advantages, robust to what rewards do in practice.

    A_i = (r_i - mean of i's group) / (std + eps),  clipped to +-clip

Population statistics in fp64, over valid samples only. Where a group or the batch has nothing to compare, A is 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowgrpo_fast.ops._checks import require, require_choice, require_device, require_float, require_shape
from flowgrpo_fast.ops._registry import register_op

NORMALIZE = ("global_std", "group_std", "none")


def group_advantage_reference(
    rewards: Tensor, group: Tensor, valid: Tensor | None, normalize: str, eps: float, clip: float
) -> Tensor:
    used = rewards.isfinite() if valid is None else rewards.isfinite() & valid
    values = torch.where(used, rewards.double(), 0.0)
    ids = _dense_ids(group)
    deviation = values - _mean_by_id(values, ids, used)
    if normalize == "none":
        scale = torch.ones_like(values)
    elif normalize == "group_std":
        scale = _mean_by_id(deviation.square(), ids, used).sqrt() + eps
    else:
        everyone = torch.zeros_like(ids)
        spread = values - _mean_by_id(values, everyone, used)
        scale = _mean_by_id(spread.square(), everyone, used).sqrt() + eps
    advantage = torch.where(used & (scale > 0), deviation / scale, 0.0)
    return advantage.clamp(-clip, clip).float()


def _dense_ids(group: Tensor) -> Tensor:
    """Group ids of any value -> 0 .. n-1 by rank, [B]. Fixed shapes only: `torch.unique` would need to know n on the host."""
    order = torch.argsort(group, stable=True)
    ordered = group[order]
    is_first = torch.zeros_like(group)
    is_first[1:] = (ordered[1:] != ordered[:-1]).long()
    return torch.zeros_like(group).index_put_((order,), is_first.cumsum(0))


def _mean_by_id(values: Tensor, ids: Tensor, used: Tensor) -> Tensor:
    """Each sample's mean over the used samples that share its id, [B]; 0 where there is none.

    The second pass adds the mean of the residuals: the mean of equal values is then that very value, so their advantage is 0 and
    not 1e-17 / eps. `index_put_` accumulates fp64 in a fixed order on every device.
    """
    weight = used.double()
    count = torch.zeros_like(weight).index_put_((ids,), weight, accumulate=True).clamp(min=1.0)
    mean = torch.zeros_like(values)
    for _ in range(2):
        residual = torch.where(used, values - mean, 0.0)
        mean = mean + (torch.zeros_like(values).index_put_((ids,), residual, accumulate=True) / count)[ids]
    return mean


_group_advantage = register_op(
    "group_advantage(Tensor rewards, Tensor group, Tensor? valid, str normalize, float eps, float clip) -> Tensor",
    group_advantage_reference,
)


def group_advantage(
    rewards: Tensor,
    group: Tensor,
    normalize: str = "global_std",
    eps: float = 1e-4,
    clip: float | None = 5.0,
    valid: Tensor | None = None,
) -> Tensor:
    """Advantage of each sample within its group, fp32 [B]. No gradient.

    rewards: floating [B]. group: int64 [B], any values; samples with equal ids compare with each other, wherever they stand.
    normalize: "global_std" (std of all valid rewards about their common mean, as flow_grpo), "group_std" (GRPO) or "none" (Dr.GRPO).
    std is the population's; the divisor is std + eps. clip: bound on |A|, or None. valid: bool [B], None = all.

    An invalid or non-finite reward gets 0 and enters no statistic. Groups of one sample, of equal values or without a valid sample
    get 0. Statistics in fp64 with fixed shapes: no host sync, deterministic, the same on every rank that passes the same tensors.
    Raises ValueError for wrong shapes, dtypes, devices, or a negative eps or clip. Source: flow_grpo's PerPromptStatTracker.
    """
    require_float(rewards, "rewards")
    require(rewards.dim() == 1, "rewards", rewards, "pass [B]")
    require(group.dtype == torch.int64, "group", group, "pass int64 ids")
    require_shape(group, "group", tuple(rewards.shape))
    require_device(group, "group", rewards.device)
    require_choice(normalize, "normalize", NORMALIZE)
    require(eps >= 0, "eps", eps, "pass eps >= 0")
    require(clip is None or clip > 0, "clip", clip, "pass clip > 0, or None for no bound")
    if valid is not None:
        require(valid.dtype == torch.bool, "valid", valid, "pass a bool tensor")
        require_shape(valid, "valid", tuple(rewards.shape))
        require_device(valid, "valid", rewards.device)
    return _group_advantage(rewards.detach(), group, valid, normalize, eps, math.inf if clip is None else clip)
