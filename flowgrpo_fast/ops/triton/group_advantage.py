"""group_advantage: one launch, no sort. Each program takes ROWS samples and walks over the batch, five times at most.

The walks are serial: fine for the few thousand samples of a step. Above MAX_BATCH the reference sorts instead, with the same bits. Samples are added one at a time in the order of the batch, so
the sums have the bits of the reference, and a group's do not depend on what else is in the batch (zeros change no sum).
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowgrpo_fast.ops.group_advantage import group_advantage_reference
from flowgrpo_fast.ops.triton._common import on_device

ROWS = 32
MAX_BATCH = 8192


@triton.jit(do_not_specialize=["eps_bits", "clip_bits"])
def group_advantage_kernel(
    reward_ptr, group_ptr, valid_ptr, out_ptr, batch, eps_bits, clip_bits,
    GLOBAL: tl.constexpr, SCALED: tl.constexpr, VALID: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    eps = eps_bits.to(tl.int64).to(tl.float64, bitcast=True)
    clip = clip_bits.to(tl.int64).to(tl.float64, bitcast=True)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < batch
    own, own_used = used_reward(reward_ptr + row, valid_ptr, row, inside, VALID)
    group = tl.load(group_ptr + row, mask=inside, other=0)
    zero = tl.zeros([ROWS], tl.float64)

    count, total, everyone = zero, zero, zero
    for j in range(batch):
        reward, used = used_reward(reward_ptr + j, valid_ptr, j, j < batch, VALID)
        same = tl.where(tl.load(group_ptr + j) == group, used, 0.0)
        count += same
        total += same * reward
        everyone += used
    mean = total / tl.maximum(count, 1.0)
    whole = zero
    if GLOBAL:
        total = zero
        for j in range(batch):
            total += used_reward(reward_ptr + j, valid_ptr, j, j < batch, VALID)[0]
        whole = total / tl.maximum(everyone, 1.0)

    # The mean of the residuals, added: the mean of equal rewards is then that very reward.
    total, total_whole = zero, zero
    for j in range(batch):
        reward, used = used_reward(reward_ptr + j, valid_ptr, j, j < batch, VALID)
        same = tl.where(tl.load(group_ptr + j) == group, used, 0.0)
        total += same * (reward - mean)
        total_whole += used * (reward - whole)
    mean += total / tl.maximum(count, 1.0)
    whole += total_whole / tl.maximum(everyone, 1.0)

    scale = zero + 1.0
    if SCALED:
        square = zero
        if GLOBAL:
            count = everyone
        for _ in range(2):
            total = zero
            for j in range(batch):
                reward, used = used_reward(reward_ptr + j, valid_ptr, j, j < batch, VALID)
                if GLOBAL:
                    deviation = reward - whole
                    total += used * (deviation * deviation - square)
                else:
                    deviation = reward - mean
                    same = tl.where(tl.load(group_ptr + j) == group, used, 0.0)
                    total += same * (deviation * deviation - square)
            square += total / tl.maximum(count, 1.0)
        scale = tl.sqrt(square) + eps
    deviation = own - mean
    advantage = tl.where((own_used > 0) & (scale > 0), deviation / tl.where(scale > 0, scale, 1.0), 0.0)
    advantage = tl.where(advantage > clip, clip, tl.where(advantage < -clip, -clip, advantage))
    tl.store(out_ptr + row, advantage.to(tl.float32), mask=inside)


@triton.jit
def used_reward(ptr, valid_ptr, index, mask, VALID: tl.constexpr):
    """The reward in fp64 (0 where it does not count) and whether it counts, 1.0 or 0.0: a factor, which changes no bit of a sum."""
    reward = tl.load(ptr, mask=mask, other=float("nan")).to(tl.float64)
    used = tl.abs(reward) < float("inf")
    if VALID:
        used &= tl.load(valid_ptr + index, mask=mask, other=0) != 0
    return tl.where(used, reward, 0.0), used.to(tl.float64)


def _bits(value: float) -> int:
    """A float argument of a kernel is fp32, and eps = 1e-4 would lose its digits; its bits travel as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def group_advantage(
    rewards: Tensor, group: Tensor, valid: Tensor | None, normalize: str, eps: float, clip: float
) -> Tensor:
    if len(rewards) > MAX_BATCH:
        return group_advantage_reference(rewards, group, valid, normalize, eps, clip)
    out = torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device)
    if len(rewards):
        with on_device(rewards):
            group_advantage_kernel[(triton.cdiv(len(rewards), ROWS),)](
                rewards.contiguous(), group.contiguous(), valid if valid is None else valid.contiguous().view(torch.uint8),
                out, len(rewards), _bits(eps), _bits(clip), GLOBAL=normalize == "global_std", SCALED=normalize != "none",
                VALID=valid is not None, ROWS=ROWS, num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
    return out
