"""Counter-based noise: Philox-4x32-10 (Salmon et al., SC'11; Random123) in torch int64 arithmetic.

A word depends on its key and its position only, so noise is the same whatever the batch, the rank, the engine or a restart.

    key words      low and high 32 bits of the run seed
    counter words  index_in_sample // 4,  step | stream << 16,  low and high 32 bits of sample_id
    word i of a sample = lane i % 4 of counter i // 4

Normals (Box-Muller) from the lane pairs (0, 1) and (2, 3), at the positions of their words:
    u = ((word >> 8) + 0.5) * 2^-24,   z0 = sqrt(-2 ln u0) cos(2 pi u1),   z1 = sqrt(-2 ln u0) sin(2 pi u1)
u0 >= 2^-25, hence |z| <= 5.89. ln, cos and sin are short fp64 series made of IEEE operations alone (error below 2e-12), rounded once
to fp32: torch, Triton, C++ and CUDA give the same bits, which no two libraries' own ln and cos do. The series also vectorise, and
need no local memory on a GPU, where libdevice's cos does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo_fast.ops._checks import require, values_are_readable

# Tags that keep uses of one seed apart. The SDE is 0, the default of NoiseKey: a key handed to `sde_step` without a thought must
# not repeat the initial noise.
STREAM_SDE = 0
STREAM_INITIAL = 1
STREAM_WINDOW = 2
STREAM_FORWARD_NOISE = 3
STREAM_FORWARD_SIGMA = 4
STREAM_SIZE = 5

_LIMIT_16 = 1 << 16
_MASK_32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD  # sqrt(1/2) as fp64
_LN_2 = math.log(2.0)
_ARTANH = tuple(1.0 / (2 * k + 1) for k in range(7))
_COS = tuple((-1) ** k / math.factorial(2 * k) for k in range(7))
_SIN = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(7))


@dataclass(frozen=True, eq=False)
class NoiseKey:
    """Names the noise of a batch of samples.

    seed: run seed, 0 <= seed < 2^63. step: denoising step, int or int64 [B], below 65536. sample_id: int64 [B], unique in the run
    (or a group's id, for noise that the group shares). stream: which use of the noise, below 65536 (STREAM_SDE, STREAM_INITIAL, ...).
    """

    seed: int
    step: int | Tensor
    sample_id: Tensor
    stream: int = STREAM_SDE

    def __post_init__(self) -> None:
        ids, step = self.sample_id, self.step
        require(0 <= self.seed < 1 << 63, "seed", self.seed, "pass an integer with 0 <= seed < 2**63")
        require(0 <= self.stream < _LIMIT_16, "stream", self.stream, "pass an integer with 0 <= stream < 65536")
        is_ids = isinstance(ids, Tensor) and ids.dtype == torch.int64 and ids.dim() == 1
        require(is_ids, "sample_id", ids, "pass an int64 tensor [B]")
        if isinstance(step, Tensor):
            same = step.dtype == torch.int64 and step.shape == ids.shape
            require(same, "step", step, "pass an int, or an int64 tensor [B] as sample_id")
            if values_are_readable(step):
                inside = bool(((step >= 0) & (step < _LIMIT_16)).all())
                require(inside, "step", step, "keep 0 <= step < 65536")
        else:
            require(0 <= step < _LIMIT_16, "step", step, "keep 0 <= step < 65536")

    def step_tensor(self) -> Tensor:
        """step as int64 [B] on the device of sample_id."""
        if isinstance(self.step, Tensor):
            return self.step.to(self.sample_id.device)
        return torch.full_like(self.sample_id, self.step)


def philox_4x32(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox-4x32: four broadcastable int64 counter words -> four int64 words, all holding uint32 values.

    int64 products wrap modulo 2^64, so their bits are those of the unsigned product; the mask drops the sign of the shift.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> 32 & _MASK_32) ^ c1 ^ k0,
            p1 & _MASK_32,
            (p0 >> 32 & _MASK_32) ^ c3 ^ k1,
            p0 & _MASK_32,
        )
        k0, k1 = k0 + _WEYL[0] & _MASK_32, k1 + _WEYL[1] & _MASK_32
    return c0, c1, c2, c3


def split_words(value: int) -> tuple[int, int]:
    """Low and high 32 bits."""
    return value & _MASK_32, value >> 32 & _MASK_32


def philox_words(key: NoiseKey, n: int) -> Tensor:
    """The first n words of each sample, int64 [B, n] holding uint32 values, on the device of key.sample_id."""
    lanes = _lanes(key.seed, key.step_tensor(), key.sample_id, key.stream, n)
    return torch.stack(lanes, dim=-1).flatten(1)[:, :n].contiguous()


def philox_normal(key: NoiseKey, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Standard normal noise, fp32 [B, *shape], on `device` (default: that of key.sample_id). Formula: see the module."""
    device = key.sample_id.device if device is None else device
    noise = normal_rows(key.seed, key.step_tensor().to(device), key.sample_id.to(device), key.stream, math.prod(shape))
    return noise.reshape(len(key.sample_id), *shape)


def normal_rows(seed: int, step: Tensor, sample_id: Tensor, stream: int, n: int) -> Tensor:
    """The noise of `philox_normal` from the parts of a key: fp32 [B, n]."""
    w0, w1, w2, w3 = _lanes(seed, step, sample_id, stream, n)
    normals = torch.stack((*_box_muller(w0, w1), *_box_muller(w2, w3)), dim=-1)
    return normals.flatten(1)[:, :n].contiguous()


def _lanes(seed: int, step: Tensor, sample_id: Tensor, stream: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index = torch.arange((n + 3) // 4, device=sample_id.device)
    ids = sample_id[:, None]
    counter = (index, (step | stream << 16)[:, None], ids & _MASK_32, ids >> 32 & _MASK_32)
    return philox_4x32(counter, split_words(seed))


def _box_muller(word_0: Tensor, word_1: Tensor) -> tuple[Tensor, Tensor]:
    radius = torch.sqrt(-2.0 * _log_uniform(word_0 >> 8))
    cos, sin = _cos_sin_uniform(word_1 >> 8)
    return (radius * cos).float(), (radius * sin).float()


def _log_uniform(bits: Tensor) -> Tensor:
    """ln u of u = (bits + 0.5) 2^-24, fp64. u = 2^e m with m in [sqrt 1/2, sqrt 2); ln m = 2 artanh f, f = (m - 1) / (m + 1)."""
    u = (bits.double() + 0.5) * 2.0**-24
    pattern = u.view(torch.int64)
    exponent = pattern - _SQRT_HALF_BITS >> 52
    m = (pattern - (exponent << 52)).view(torch.float64)
    f = (m - 1.0) / (m + 1.0)
    return exponent.double() * _LN_2 + 2.0 * f * _horner(f * f, _ARTANH)


def _cos_sin_uniform(bits: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 pi u for u = (bits + 0.5) 2^-24, fp64: the nearest quarter turn, exact in integers, and the rest in [-pi/4, pi/4]."""
    quarter = bits + (1 << 21) >> 22
    angle = ((bits - (quarter << 22)).double() + 0.5) * (2.0**-22 * math.pi / 2)
    square = angle * angle
    cos, sin = _horner(square, _COS), angle * _horner(square, _SIN)
    odd = quarter & 1 == 1
    x, y = torch.where(odd, sin, cos), torch.where(odd, cos, sin)
    return torch.where(quarter + 1 & 2 == 2, -x, x), torch.where(quarter & 2 == 2, -y, y)


def _horner(z: Tensor, coefficients: Sequence[float]) -> Tensor:
    """coefficients[0] + z (coefficients[1] + z (...))"""
    total = torch.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = coefficient + z * total
    return total
