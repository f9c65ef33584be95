"""Triton kernels, one file an op, named as the op. Imported at the first CUDA call: `flowgrpo_fast.ops` needs torch alone.

All kernels cover a sample's D elements in chunks of 4,096, one program a chunk, each as four blocks of 1,024 lanes: 8 elements
a thread, so that bf16 and fp32 both move in 16-byte loads and stores. Sums follow `ops/_reduce.py` to the letter. FP fusion is
off in every launch: with a fused multiply-add the mean would be rounded once instead of twice, and the bits would differ
from those of the other backends (and from those of Triton 3.10, which flips the default).
"""
