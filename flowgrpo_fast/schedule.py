"""Sigmas, step coefficients and SDE windows.

Every reverse step is x' ~ N(a x + b v, s^2). With dt = sigma' - sigma < 0 and noise level eta:

| rule | a | b | s |
|---|---|---|---|
| `sde` (FlowGRPO), k = eta^2 / (2 (1 - sigma_c)) | 1 + k dt | (1 + k (1 - sigma)) dt | eta sqrt(sigma / (1 - sigma_c)) sqrt(-dt) |
| `cps` (Flow-CPS), n = sigma' sin(eta pi/2), r = sigma' cos(eta pi/2) | 1 - sigma' + r | -sigma (1 - sigma') + (1 - sigma) r | n |
| `dance` (DanceGRPO), h = eta^2 dt / (2 sigma) | 1 + h | dt + h (1 - sigma) | eta sqrt(-dt) |
| `ode` (Euler), and any rule where eta = 0 | 1 | dt | 0 |

sigma_c is sigma, except where sigma = 1 (division by zero): there it is sigmas[1].
A new rule is one more function of five lines; no kernel knows about rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo_fast.ops import STREAM_SIZE, STREAM_WINDOW, StepCoefficients
from flowgrpo_fast.ops._checks import require, require_choice, require_device, require_shape, values_are_readable
from flowgrpo_fast.ops._philox import philox_4x32, split_words

__all__ = [
    "StepCoefficients",
    "WindowConfig",
    "draw_window_starts",
    "dynamic_mu",
    "make_sigmas",
    "sde_coefficients",
    "trainable_steps",
    "window_size",
    "window_step_index",
]

KINDS = ("single_shift", "double_shift", "dynamic_shift")

# In fp32 and diffusers' order of operations, 5 % of the static shifts with three digits (1.476, say) put the first sigma up to 4e-7
# beside 1. Taken at its word, s would be a thousand times too large below 1, and NaN above.
_NEAR_ONE = 1e-6


def make_sigmas(
    num_steps: int,
    kind: str = "single_shift",
    shift: float = 3.0,
    mu: float | None = None,
    shift_terminal: float | None = None,
    num_train_timesteps: int = 1000,
) -> Tensor:
    """The sigmas of a sampler with num_steps steps, fp32 [num_steps + 1] on the CPU, 1 first and 0 last.

    kind: "single_shift"   linspace(1, 1/T, T), then the static shift:  sigma <- shift sigma / (1 + (shift - 1) sigma)
          "double_shift"   what diffusers does by default for SD3: end points already shifted, then shifted again (diffusers #13243)
          "dynamic_shift"  linspace(1, 1/T, T), then sigma <- e^mu / (e^mu + 1/sigma - 1)   (FLUX, Qwen-Image; mu from `dynamic_mu`)
    shift_terminal: stretch the schedule so that its last non-zero sigma has this value (Qwen-Image: 0.02). shift is not used by
    "dynamic_shift", num_train_timesteps only by "double_shift".
    Bit-equal to FlowMatchEulerDiscreteScheduler.sigmas: the arithmetic is fp32 where diffusers is in fp32, fp64 where it is in fp64.
    """
    require_choice(kind, "kind", KINDS)
    require(num_steps >= 1, "num_steps", num_steps, "pass at least 1")
    require(shift > 0, "shift", shift, "pass shift > 0")
    dynamic = kind == "dynamic_shift"
    require((mu is not None) == dynamic, "mu", mu, "pass mu with kind='dynamic_shift' (see dynamic_mu), and only there")
    terminal = shift_terminal is None or (0 < shift_terminal < 1 and num_steps >= 2)
    require(terminal, "shift_terminal", shift_terminal, "pass 0 < shift_terminal < 1 and num_steps >= 2, or None")

    if kind == "double_shift":
        ends = _static_shift(torch.tensor([num_train_timesteps, 1], dtype=torch.float32) / num_train_timesteps, shift)
        high, low = (end * num_train_timesteps for end in ends.tolist())
        sigmas = _static_shift(_linspace(high, low, num_steps) / num_train_timesteps, shift)
    elif mu is not None:
        unshifted = _linspace(1.0, 1.0 / num_steps, num_steps).float()
        peak = torch.tensor(
            math.exp(mu)
        )  # a tensor: torch turns number / tensor into a reciprocal and a product, an ulp off
        sigmas = peak / (peak + (1 / unshifted - 1))
    else:
        sigmas = _static_shift(_linspace(1.0, 1.0 / num_steps, num_steps).float(), shift)
    if shift_terminal is not None:
        complement = 1 - sigmas
        sigmas = 1 - complement / (complement[-1] / (1 - shift_terminal))
    return torch.cat((sigmas.float(), torch.zeros(1)))


def dynamic_mu(
    image_seq_len: int,
    base_seq_len: int = 256,
    max_seq_len: int = 4096,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
) -> float:
    """mu of the dynamic shift: linear in the number of image tokens (diffusers' calculate_shift)."""
    slope = (max_shift - base_shift) / (max_seq_len - base_seq_len)
    return image_seq_len * slope + (base_shift - slope * base_seq_len)


def _linspace(start: float, stop: float, count: int) -> Tensor:
    """numpy.linspace in fp64, bit for bit (torch.linspace fills from both ends and differs in the last bit)."""
    step = (stop - start) / (count - 1) if count > 1 else 0.0
    values = torch.arange(count, dtype=torch.float64) * step + start
    if count > 1:
        values[-1] = stop
    return values


def _static_shift(sigmas: Tensor, shift: float) -> Tensor:
    return shift * sigmas / (1 + (shift - 1) * sigmas)


Coefficients = tuple[Tensor, Tensor, Tensor]


def _sde(sigma: Tensor, after: Tensor, sigma_1: Tensor, eta: Tensor) -> Coefficients:
    dt = after - sigma
    rest = 1 - torch.where((sigma - 1).abs() <= _NEAR_ONE, sigma_1, sigma)
    k = eta.square() / (2 * rest)
    return 1 + k * dt, (1 + k * (1 - sigma)) * dt, eta * (sigma / rest).sqrt() * (-dt).sqrt()


def _cps(sigma: Tensor, after: Tensor, sigma_1: Tensor, eta: Tensor) -> Coefficients:
    angle = eta * (math.pi / 2)
    r = after * torch.cos(angle)  # sqrt(sigma'^2 - n^2) without the cancellation
    return 1 - after + r, -sigma * (1 - after) + (1 - sigma) * r, after * torch.sin(angle)


def _dance(sigma: Tensor, after: Tensor, sigma_1: Tensor, eta: Tensor) -> Coefficients:
    dt = after - sigma
    h = eta.square() * dt / (2 * sigma)
    return 1 + h, dt + h * (1 - sigma), eta * (-dt).sqrt()


def _ode(sigma: Tensor, after: Tensor, sigma_1: Tensor, eta: Tensor) -> Coefficients:
    return torch.ones_like(sigma), after - sigma, torch.zeros_like(sigma)


_RULES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Coefficients]] = {
    "sde": _sde,
    "cps": _cps,
    "dance": _dance,
    "ode": _ode,
}


def sde_coefficients(
    sigmas: Tensor, step_index: int | Tensor, rule: str = "sde", noise_level: float | Tensor = 0.7
) -> StepCoefficients:
    """a, b, s of the step sigmas[i] -> sigmas[i + 1] of each sample: fp32 [B], from fp64, rounded once.

    sigmas: fp32 [T + 1], or [B, T + 1] with a schedule per sample. step_index: int64 [B], or an int for B = 1.
    rule: "sde", "cps", "dance" or "ode" (formulas: see the module). noise_level: eta >= 0 (at most 1 for "cps"), a number or a floating
    tensor [B]; where it is 0 the step is the ODE's, exactly a = 1, b = dt, s = 0.
    All tensors on one device; no host sync there. On the CPU values are checked too: sigmas fall strictly within [0, 1], indices lie
    within [0, T). Raises ValueError naming the field, its value and the fix.
    """
    require_choice(rule, "rule", tuple(_RULES))
    _check_sigmas(sigmas)
    index = _index_tensor(step_index, sigmas)
    eta = _noise_tensor(noise_level, index, rule)
    table = sigmas.double().expand(len(index), -1)
    sigma, after = (table.gather(1, position[:, None])[:, 0] for position in (index, index + 1))
    noisy = _RULES[rule](sigma, after, table[:, 1], eta)
    a, b, s = (torch.where(eta == 0, *pair) for pair in zip(_ode(sigma, after, sigma, eta), noisy, strict=True))
    return StepCoefficients(a.float(), b.float(), s.float())


def trainable_steps(sigmas: Tensor, rule: str, noise_level: float) -> Tensor:
    """Which steps may be trained, bool [T]: not the last one, sigma' > 0 and s > 0. sigmas: fp32 [T + 1]."""
    _check_sigmas(sigmas)
    require(sigmas.dim() == 1, "sigmas", sigmas, "pass one schedule [T + 1]")
    steps = torch.arange(len(sigmas) - 1, device=sigmas.device)
    s = sde_coefficients(sigmas, steps, rule, noise_level).s
    return (steps < len(sigmas) - 2) & (sigmas[1:] > 0) & (s > 0)


def _check_sigmas(sigmas: Tensor) -> None:
    ok = sigmas.dtype == torch.float32 and sigmas.dim() in (1, 2) and sigmas.shape[-1] >= 2
    require(ok, "sigmas", sigmas, "pass fp32 [T + 1] or [B, T + 1] with T >= 1")
    if values_are_readable(sigmas):
        inside = (sigmas[..., -1] >= 0) & (sigmas[..., 0] <= 1 + _NEAR_ONE)
        falling = bool((sigmas.diff() < 0).all() & inside.all())
        require(falling, "sigmas", sigmas, "pass values that fall strictly, within [0, 1]")


def _index_tensor(step_index: int | Tensor, sigmas: Tensor) -> Tensor:
    steps = sigmas.shape[-1] - 1
    if not isinstance(step_index, Tensor):
        step_index = torch.full((1,), step_index, dtype=torch.int64, device=sigmas.device)
    ok = step_index.dtype == torch.int64 and step_index.dim() == 1
    require(ok, "step_index", step_index, "pass an int or an int64 tensor [B]")
    require_device(step_index, "step_index", sigmas.device)
    if sigmas.dim() == 2:
        require_shape(step_index, "step_index", tuple(sigmas.shape[:1]))
    if values_are_readable(step_index):
        inside = bool(((step_index >= 0) & (step_index < steps)).all())
        require(inside, "step_index", step_index, f"keep 0 <= step_index < {steps}, the number of steps")
    return step_index


def _noise_tensor(noise_level: float | Tensor, index: Tensor, rule: str) -> Tensor:
    highest = 1.0 if rule == "cps" else math.inf
    fix = f"pass a finite noise_level in [0, {highest}]"
    if not isinstance(noise_level, Tensor):
        require(0 <= noise_level <= highest and math.isfinite(noise_level), "noise_level", noise_level, fix)
        return torch.full(index.shape, noise_level, dtype=torch.float64, device=index.device)
    require(noise_level.is_floating_point(), "noise_level", noise_level, "pass a number or a floating tensor")
    require_shape(noise_level, "noise_level", tuple(index.shape))
    require_device(noise_level, "noise_level", index.device)
    if values_are_readable(noise_level):
        inside = bool(((noise_level >= 0) & (noise_level <= highest) & noise_level.isfinite()).all())
        require(inside, "noise_level", noise_level, fix)
    return noise_level.double()


@dataclass(frozen=True)
class WindowConfig:
    """Which steps of a trajectory are sampled with noise, and trained.

    size: number of consecutive steps; None = all trainable steps of the range. range: (lo, hi), the window lies within steps
    lo .. hi - 1, so it starts in [lo, hi - size]; None = all trainable steps. scope: samples, groups or the whole batch share a start.
    strategy: "random" draws a start each iteration; "progressive" (MixGRPO) begins at lo and moves by shift_by every shift_every
    iterations, back to lo once past the end.
    """

    size: int | None = None
    range: tuple[int, int] | None = None
    scope: str = "sample"
    strategy: str = "random"
    shift_every: int = 25
    shift_by: int = 1

    def __post_init__(self) -> None:
        require(self.size is None or self.size >= 1, "window.size", self.size, "pass at least 1, or None")
        require(
            self.range is None or 0 <= self.range[0] < self.range[1], "window.range", self.range, "pass 0 <= lo < hi"
        )
        require_choice(self.scope, "window.scope", ("sample", "group", "batch"))
        require_choice(self.strategy, "window.strategy", ("random", "progressive"))
        require(self.shift_every >= 1, "window.shift_every", self.shift_every, "pass at least 1")
        require(self.shift_by >= 1, "window.shift_by", self.shift_by, "pass at least 1")


def window_size(window: WindowConfig, sigmas: Tensor, rule: str, noise_level: float) -> int:
    """Number of steps W of the window on this schedule. Raises ValueError where the window does not fit (see `draw_window_starts`)."""
    return _window_bounds(window, sigmas, rule, noise_level)[2]


def draw_window_starts(
    window: WindowConfig,
    sigmas: Tensor,
    rule: str,
    noise_level: float,
    *,
    seed: int,
    iteration: int,
    sample_id: Tensor,
    group_id: Tensor,
) -> Tensor:
    """First step of each sample's window, int64 [B] on the device of sample_id.

    Random starts are uniform, from Philox keyed by (seed, iteration, sample or group id, STREAM_WINDOW): they depend neither on the
    batch nor on the rank. sample_id, group_id: int64 [B]. Raises ValueError, naming range, size, T and the last trainable step, where
    the window leaves the schedule or covers a step that must not be trained.
    """
    lo, last_start, _ = _window_bounds(window, sigmas, rule, noise_level)
    require(0 <= iteration < 1 << 32, "iteration", iteration, "keep 0 <= iteration < 2**32")
    require(0 <= seed < 1 << 63, "seed", seed, "pass an integer with 0 <= seed < 2**63")
    for field, tensor in (("sample_id", sample_id), ("group_id", group_id)):
        ok = tensor.dtype == torch.int64 and tensor.dim() == 1 and tensor.shape == sample_id.shape
        require(ok, field, tensor, "pass int64 [B]")
    starts = last_start - lo + 1
    if window.strategy == "progressive":
        stops = math.ceil(starts / window.shift_by)
        return torch.full_like(sample_id, lo + window.shift_by * (iteration // window.shift_every % stops))
    ids = {"sample": sample_id, "group": group_id, "batch": torch.zeros_like(sample_id)}[window.scope]
    counter = (torch.full_like(ids, iteration), torch.full_like(ids, STREAM_WINDOW << 16), *_split_ids(ids))
    word = philox_4x32(counter, split_words(seed))[0]
    return lo + (word * starts >> 32)


def draw_bucket(seed: int, iteration: int, count: int) -> int:
    """One of `count` sizes for a training step, uniform, from Philox keyed by (seed, iteration, STREAM_SIZE)."""
    one = torch.zeros(1, dtype=torch.int64)
    word = philox_4x32((one + iteration, one + (STREAM_SIZE << 16), one, one), split_words(seed))[0]
    return int(word * count >> 32)


def window_step_index(start: Tensor, size: int) -> Tensor:
    """Steps of each window: int64 [B], W -> int64 [B, W]."""
    return start[:, None] + torch.arange(size, device=start.device)


def _window_bounds(window: WindowConfig, sigmas: Tensor, rule: str, noise_level: float) -> tuple[int, int, int]:
    """First start, last start and size."""
    trainable = trainable_steps(sigmas, rule, noise_level).tolist()
    steps = [step for step, ok in enumerate(trainable) if ok]
    found = f"range {window.range}, size {window.size}, T = {len(trainable)}, rule {rule!r}, noise_level {noise_level}"
    require(bool(steps), "window", found, "no step is trainable: the noise is 0 or the schedule has a single step")
    lo, hi = window.range or (steps[0], steps[-1] + 1)
    size = hi - lo if window.size is None else window.size
    fits = size <= hi - lo and hi <= len(trainable) and all(trainable[lo:hi])
    require(fits, "window", found, f"keep lo + size <= hi <= {steps[-1] + 1}: the last trainable step is {steps[-1]}")
    return lo, hi - size, size


def _split_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    return ids & 0xFFFFFFFF, ids >> 32 & 0xFFFFFFFF
