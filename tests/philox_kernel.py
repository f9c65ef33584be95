"""A kernel that writes the words behind the noise, to be compared with the reference."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowgrpo_fast.ops.triton._philox import philox_words

COUNTERS = 16


@triton.jit(do_not_specialize=["seed", "stream"])
def words_kernel(step_ptr, id_ptr, out_ptr, seed, stream, COUNTERS: tl.constexpr):
    row = tl.program_id(0)
    counter = tl.arange(0, COUNTERS)
    w0, w1, w2, w3 = philox_words(seed, tl.load(step_ptr + row), stream, tl.load(id_ptr + row), counter)
    base = out_ptr + row * COUNTERS * 4 + counter * 4
    tl.store(base, w0.to(tl.int64))
    tl.store(base + 1, w1.to(tl.int64))
    tl.store(base + 2, w2.to(tl.int64))
    tl.store(base + 3, w3.to(tl.int64))


def triton_words(seed: int, step: Tensor, stream: int, sample_id: Tensor) -> Tensor:
    """int64 [B, 64]."""
    out = torch.empty(len(step), COUNTERS * 4, dtype=torch.int64, device=step.device)
    words_kernel[(len(step),)](step, sample_id, out, seed, stream, COUNTERS=COUNTERS)
    return out
