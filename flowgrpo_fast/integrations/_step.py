"""One reverse step in flow_grpo's terms, sampled or given: what `diffusers_scheduler` and `flow_grpo` share. Needs torch alone.

    prev_sample ~ N(prev_sample_mean, s^2),   prev_sample_mean = a sample + b model_output      (`schedule.sde_coefficients`)

| sde_type | std_dev_t | log_prob, mean over the latent elements |
|---|---|---|
| `sde` | s / sqrt(-dt): without the step length | log-density of the Gaussian |
| `cps` | s | -(prev_sample - prev_sample_mean)^2: neither variance nor constants |
| `dance_sde` | s | log-density of the Gaussian |

Without its normalizer the density keeps -(prev_sample - prev_sample_mean)^2 / (2 s^2) only; `cps` is not affected.

More exact than the originals, on purpose: coefficients are worked out in fp64 and rounded once; `cps` takes sqrt(sigma'^2 - s^2)
without its cancellation; a first sigma within 1e-6 of 1 counts as 1 (fp32 shifts land beside it); where s = 0 a Gaussian log-prob is 0
with zero gradient, not NaN. Log-probs are the same bits whether a step is sampled or replayed, in whatever batch.
Source: flow_grpo's sde_step_with_logprob and verl-omni's FlowMatchSDEDiscreteScheduler; formulas in peers.md sections 1.1 and 1.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowgrpo_fast.ops import StepCoefficients, sde_log_prob, sde_step
from flowgrpo_fast.ops._checks import (
    compute_dtype,
    require,
    require_choice,
    require_float,
    require_latents,
    require_shape,
    values_are_readable,
)
from flowgrpo_fast.ops.coefficients import precision
from flowgrpo_fast.schedule import sde_coefficients

RULES = {"sde": "sde", "cps": "cps", "dance_sde": "dance"}  # sde_type -> our rule

Generators = torch.Generator | list[torch.Generator] | None


class ReverseStep(NamedTuple):
    """n is 1 where the whole batch takes the same step, else B."""

    prev_sample: Tensor  # [B, ...]
    log_prob: Tensor | None  # [B], differentiable in model_output
    prev_sample_mean: Tensor  # [B, ...], differentiable in sample and model_output
    std_dev_t: Tensor  # fp32 [n]
    sqrt_dt: Tensor  # sqrt(-dt), fp32 [n]


def reverse_step(
    sample: Tensor,
    model_output: Tensor,
    sigmas: Tensor,
    step_index: Tensor,
    *,
    noise_level: float | Tensor,
    prev_sample: Tensor | None,
    generator: Generators,
    sde_type: str,
    return_logprobs: bool = True,
    include_logprob_normalizer: bool = True,
    out_dtype: torch.dtype | None = None,
) -> ReverseStep:
    """Sample prev_sample, or take the given one, and score it.

    sample, model_output, prev_sample: [B, ...] of rank >= 2, any floating dtypes; computed in fp32 (fp64 where an input is fp64).
    sigmas: fp32 [T + 1], falling. step_index: int64 [1] or [B]. noise_level: a number, or a tensor with one value or B of them in any
    shape; 0 is the ODE's step, and "cps" takes at most 1. out_dtype: what a sampled prev_sample is rounded to, before it is scored.
    Raises ValueError for wrong shapes, dtypes, devices or values, and where prev_sample and generator are both given.
    """
    require_choice(sde_type, "sde_type", tuple(RULES))
    require_latents(sample, "sample")
    for field, tensor in (("model_output", model_output), ("prev_sample", prev_sample)):
        if tensor is not None:
            require_float(tensor, field, sample.device)
            require_shape(tensor, field, tuple(sample.shape))
    given_both = prev_sample is not None and generator is not None
    require(
        not given_both, "prev_sample, generator", "both", "pass prev_sample to score it, or a generator to sample one"
    )
    if return_logprobs:
        fix = "pass sample.detach(): log_prob has a gradient in model_output only (or return_logprobs=False)"
        require(not sample.requires_grad, "sample", "a tensor that requires grad", fix)

    sigmas = sigmas.to(sample.device)
    index, eta = _per_sample(step_index, noise_level, sample)
    coef = sde_coefficients(sigmas, index, RULES[sde_type], eta)
    sqrt_dt = (sigmas[index] - sigmas[index + 1]).sqrt()
    std_dev_t = coef.s / sqrt_dt if sde_type == "sde" else coef.s

    dtype = compute_dtype(sample, model_output)
    if prev_sample is None:
        noise = _normal(sample, generator)
        prev, _ = sde_step(sample, model_output, coef, noise, out_dtype=dtype if out_dtype is None else out_dtype)
    else:
        prev = prev_sample.to(dtype)
    # Where s = 0 the op returns a x + b v bit for bit, whatever the noise; `sample` stands in for it, to allocate none.
    still = StepCoefficients(coef.a, coef.b, torch.zeros_like(coef.s))
    mean, _ = sde_step(sample, model_output, still, sample.detach(), out_dtype=dtype)
    normalized = include_logprob_normalizer and sde_type != "cps"
    log_prob = _log_prob(sample, model_output, prev.detach(), coef, sde_type, normalized) if return_logprobs else None
    return ReverseStep(prev, log_prob, mean, std_dev_t, sqrt_dt)


def lookup(timestep: float | Tensor, timesteps: Tensor, sample: Tensor) -> Tensor:
    """Position of each timestep in the schedule, int64 [1] or [B] on the device of sample: one comparison, no loop, no host sync.

    timestep: a number, or a tensor of one value or B. As diffusers' index_for_timestep: the second position where there are two.
    """
    timesteps = timesteps.to(sample.device)
    if not isinstance(timestep, Tensor):
        timestep = torch.full((1,), timestep, dtype=timesteps.dtype, device=sample.device)
    wanted = timestep.to(sample.device).reshape(-1)
    require(wanted.numel() in (1, len(sample)), "timestep", timestep, "pass one timestep, or one for each sample")
    matches = wanted[:, None] == timesteps
    rank = matches.cumsum(1)
    chosen = matches & (rank == rank[:, -1:].clamp(max=2))
    found = chosen.any(1)
    if values_are_readable(found):
        require(bool(found.all()), "timestep", timestep, "pass values of scheduler.timesteps, unrounded (fp32)")
    # On a device that check would be a host sync. There a position past the end makes the reading of sigmas fail instead.
    return torch.where(found, chosen.byte().argmax(1), timesteps.numel())


def column(values: Tensor, like: Tensor) -> Tensor:
    """[n] -> [n, 1, ...], to broadcast against latents."""
    return values.reshape(-1, *(1,) * (like.dim() - 1))


def _per_sample(step_index: Tensor, noise_level: float | Tensor, sample: Tensor) -> tuple[Tensor, float | Tensor]:
    """step_index and noise_level with one length, 1 or B."""
    if not isinstance(noise_level, Tensor):
        return step_index, noise_level
    one_each = noise_level.numel() in (1, len(sample))
    require(one_each, "noise_level", noise_level, "pass a number, or one value for each sample")
    index, eta = torch.broadcast_tensors(step_index, noise_level.to(sample.device).reshape(-1))
    return index, eta


def _normal(sample: Tensor, generator: Generators) -> Tensor:
    """fp32 noise of sample's shape, drawn where the generator lives. A list of generators: one for each sample."""
    if not isinstance(generator, list):
        device = sample.device if generator is None else generator.device
        return torch.randn(sample.shape, generator=generator, device=device).to(sample.device)
    if len(generator) == 1:
        return _normal(sample, generator[0])
    require(
        len(generator) == len(sample), "generator", f"{len(generator)} generators", "pass one, or one for each sample"
    )
    return torch.cat([_normal(row, each) for row, each in zip(sample.split(1), generator, strict=True)])


def _log_prob(
    sample: Tensor, model_output: Tensor, prev: Tensor, coef: StepCoefficients, sde_type: str, normalized: bool
) -> Tensor:
    if normalized:
        return sde_log_prob(sample, model_output, prev, coef).log_prob
    # -mean((prev - mu)^2) has no variance in it, so s = 0 (the last step of "cps") is nothing special: s = 1 keeps the op from
    # returning 0 there.
    unit = StepCoefficients(coef.a, coef.b, torch.ones_like(coef.s))
    value = sde_log_prob(sample, model_output, prev, unit, form="flow_grpo").log_prob
    return value if sde_type == "cps" else (value.double() * precision(coef.s)).to(value.dtype)
