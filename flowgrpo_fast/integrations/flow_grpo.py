"""flow_grpo's `sde_step_with_logprob`, on the ops. Needs torch alone.

    from flowgrpo_fast.integrations.flow_grpo import sde_step_with_logprob      # instead of flow_grpo.diffusers_patch...

Arguments, results and their shapes are the original's; definitions and the places where values are more exact: `_step`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flowgrpo_fast.integrations._step import Generators, column, lookup, reverse_step

__all__ = ["Schedule", "sde_step_with_logprob"]


class Schedule(Protocol):
    """What a scheduler must have: diffusers' FlowMatchEulerDiscreteScheduler does, after set_timesteps."""

    sigmas: Tensor  # fp32 [T + 1], strictly falling within [0, 1]
    timesteps: Tensor  # fp32 [T]


def sde_step_with_logprob(
    scheduler: Schedule,
    model_output: Tensor,
    timestep: float | Tensor,
    sample: Tensor,
    noise_level: float | Tensor = 0.7,
    prev_sample: Tensor | None = None,
    generator: Generators = None,
    sde_type: str = "sde",
    return_sqrt_dt: bool = False,
) -> tuple[Tensor, ...]:
    """One reverse step and its log-prob: sampled in a rollout, replayed in training where prev_sample is given.

    model_output, sample, prev_sample: [B, ...] of rank >= 2 (packed, image or video latents), any floating dtypes.
    timestep: values of scheduler.timesteps, [B] or [1] for the whole batch; a batch may mix timesteps.
    noise_level: eta, a number or one value for each sample. sde_type: "sde", "cps", or "dance_sde" (which the original lacks).
    generator: draws the noise, as the original does with the same generator; a list of B draws each sample's own.

    Returns (prev_sample, log_prob, prev_sample_mean, std_dev_t), and sqrt_dt = sqrt(-dt) where return_sqrt_dt asks for it:
    prev_sample and prev_sample_mean [B, ...] in fp32, log_prob fp32 [B], std_dev_t and sqrt_dt fp32 [n, 1, ...] with n = 1 or B.
    fp32 becomes fp64 where sample or model_output is fp64. log_prob is the mean over the latent elements (for "cps" without variance
    and constants), with a gradient in model_output only; std_dev_t lacks the factor sqrt(-dt) for "sde", and only there.
    No host sync on a device if the scheduler's tensors are there: set_timesteps(..., device=...).
    Raises ValueError for wrong shapes, dtypes, devices or values, for a timestep that is not in the schedule (on the CPU), and where
    prev_sample and generator are both given (the original ignores the generator).
    """
    step = reverse_step(
        sample,
        model_output,
        scheduler.sigmas,
        lookup(timestep, scheduler.timesteps, sample),
        noise_level=noise_level,
        prev_sample=prev_sample,
        generator=generator,
        sde_type=sde_type,
    )
    assert step.log_prob is not None
    result = (step.prev_sample, step.log_prob, step.prev_sample_mean, column(step.std_dev_t, sample))
    return (*result, column(step.sqrt_dt, sample)) if return_sqrt_dt else result
