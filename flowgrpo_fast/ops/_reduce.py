"""Batch-invariant sums.

`torch.sum` picks its split from the whole tensor's layout, so the same sample can get other bits in another batch. Here the
tree depends on the length of the summed dimension only, and each node is one IEEE addition: a sample has the same bits
whatever its batch, its position in it, the number of threads and the device. Error: at most ceil(log2 D) * 2^-24 relative to
the sum of magnitudes (fp32), as pairwise summation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fold_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension, [..., D] -> [...]: fold the upper half onto the lower half until one element is left."""
    length = values.shape[-1]
    if isinstance(length, torch.SymInt):  # tracing: only the shape matters, and folding would pin this length
        return values.sum(-1)
    if length == 0:
        return values.new_zeros(values.shape[:-1])
    while length > 1:
        half = length // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        values = torch.cat((folded, values[..., 2 * half :]), dim=-1) if length % 2 else folded
        length = length - half
    return values[..., 0].clone()  # a clone: the caller must not hold on to the folded buffer, nor return its input
