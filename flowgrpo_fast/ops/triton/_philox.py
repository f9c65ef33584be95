"""Philox-4x32-10 and its normals in a kernel: the words and the bits of `ops/_philox.py`."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from flowgrpo_fast.ops import _philox as spec

_SQRT_HALF_BITS: tl.constexpr = tl.constexpr(spec._SQRT_HALF_BITS)
_LN_2: tl.constexpr = tl.constexpr(spec._LN_2)
_QUARTER: tl.constexpr = tl.constexpr(2.0**-22 * math.pi / 2)
_A0, _A1, _A2, _A3, _A4, _A5, _A6 = map(tl.constexpr, spec._ARTANH)
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = map(tl.constexpr, spec._COS)
_S0, _S1, _S2, _S3, _S4, _S5, _S6 = map(tl.constexpr, spec._SIN)


@triton.jit
def philox_words(seed, step, stream, sample_id, counter):
    """Four uint32 words for each counter."""
    c0 = counter.to(tl.uint32)
    zero = c0 * 0
    c1 = zero + (step | (stream.to(tl.int64) << 16)).to(tl.uint32)
    c2 = zero + sample_id.to(tl.uint32)
    c3 = zero + (sample_id >> 32).to(tl.uint32)
    k0 = zero + seed.to(tl.uint32)
    k1 = zero + (seed.to(tl.int64) >> 32).to(tl.uint32)
    return tl.philox_impl(c0, c1, c2, c3, k0, k1, 10)


@triton.jit
def series(z, c0, c1, c2, c3, c4, c5, c6):
    """c0 + z (c1 + z (...))"""
    return c0 + z * (c1 + z * (c2 + z * (c3 + z * (c4 + z * (c5 + z * c6)))))


@triton.jit
def box_muller(word_0, word_1):
    u = ((word_0 >> 8).to(tl.float64) + 0.5) * 5.9604644775390625e-08  # 2^-24
    pattern = u.to(tl.int64, bitcast=True)
    exponent = (pattern - _SQRT_HALF_BITS) >> 52
    m = (pattern - (exponent << 52)).to(tl.float64, bitcast=True)
    f = (m - 1.0) / (m + 1.0)
    log_u = exponent.to(tl.float64) * _LN_2 + 2.0 * f * series(f * f, _A0, _A1, _A2, _A3, _A4, _A5, _A6)
    radius = tl.sqrt(-2.0 * log_u)

    bits = (word_1 >> 8).to(tl.int32)
    quarter = (bits + (1 << 21)) >> 22
    angle = ((bits - (quarter << 22)).to(tl.float64) + 0.5) * _QUARTER
    square = angle * angle
    cos = series(square, _C0, _C1, _C2, _C3, _C4, _C5, _C6)
    sin = angle * series(square, _S0, _S1, _S2, _S3, _S4, _S5, _S6)
    odd = (quarter & 1) == 1
    x = tl.where(odd, sin, cos)
    y = tl.where(odd, cos, sin)
    x = tl.where(((quarter + 1) & 2) == 2, -x, x)
    y = tl.where((quarter & 2) == 2, -y, y)
    return (radius * x).to(tl.float32), (radius * y).to(tl.float32)


@triton.jit
def normal_block(seed, step, stream, sample_id, start, LANES: tl.constexpr):
    """[LANES] normals of a sample, from element `start` (a multiple of 4) on."""
    counter = start // 4 + tl.arange(0, LANES // 4)
    w0, w1, w2, w3 = philox_words(seed, step, stream, sample_id, counter)
    z0, z1 = box_muller(w0, w1)
    z2, z3 = box_muller(w2, w3)
    # The inner join makes the index of the pair, the outer one the index inside it: element 2 pair + inside.
    return tl.reshape(tl.join(tl.join(z0, z2), tl.join(z1, z3)), [LANES])
