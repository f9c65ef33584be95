"""Sums in one fixed order, the same on every backend.

`torch.sum` picks its split from the whole tensor's layout, and so does a compiler for a kernel: the same sample can get other
bits in another batch, at another alignment or on another device. Here the order is part of the definition. The reference, Triton,
C++ and CUDA all follow it, so a log-prob has the same bits wherever it was computed.

    lane_sum   LANES running sums, element i to lane i % LANES; then neighbours are added until one is left
    row_sum    lane_sum of each CHUNK elements in the dtype of the values; then lane_sum of the chunks' results in fp64

Lanes are what vector units and warps are good at, neighbours what one thread of a GPU holds after a 16-byte load. Error of
row_sum in fp32: at most 13 roundings, whatever the length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

LANES = 1024
CHUNK = 4 * LANES


def lane_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension, [..., n] -> [...], in the dtype of the values."""
    length = values.shape[-1]
    if isinstance(length, torch.SymInt):  # tracing: only the shape matters, and the loop would pin this length
        return values.sum(-1)
    if length == 0:
        return values.new_zeros(values.shape[:-1])
    # Zeros change no sum, so a short row may stop at the next power of two instead of LANES.
    lanes = min(LANES, 1 << (length - 1).bit_length())
    blocks = pad(values, (0, -length % lanes)).unflatten(-1, (-1, lanes))
    total = blocks[..., 0, :]
    for i in range(1, blocks.shape[-2]):
        total = total + blocks[..., i, :]
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return total[..., 0].clone()  # a clone: the caller must not hold on to the lanes, nor return its input


def row_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension, [..., n] -> fp64 [...]."""
    length = values.shape[-1]
    if isinstance(length, torch.SymInt):
        return values.sum(-1).double()
    chunks = pad(values, (0, -length % CHUNK)).unflatten(-1, (-1, CHUNK)) if length > CHUNK else values.unsqueeze(-2)
    return lane_sum(lane_sum(chunks).double())
