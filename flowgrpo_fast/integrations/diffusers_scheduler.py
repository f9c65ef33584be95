"""A diffusers scheduler that samples by SDE and returns log-probs, on the ops: verl-omni's FlowMatchSDEDiscreteScheduler.

    from flowgrpo_fast.integrations.diffusers_scheduler import FlowMatchSDEDiscreteScheduler
    pipe.scheduler = FlowMatchSDEDiscreteScheduler.from_config(pipe.scheduler.config)

Definitions of std_dev_t and log_prob for each sde_type, and the places where values are more exact than the original's: `_step`.
Unlike the original, which wants fp32 everywhere, it takes bf16 and fp16 as well and computes in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils import BaseOutput
from torch import Tensor

from flowgrpo_fast.integrations._step import Generators, ReverseStep, column, lookup, reverse_step
from flowgrpo_fast.ops._checks import require

__all__ = ["FlowMatchSDEDiscreteScheduler", "FlowMatchSDEDiscreteSchedulerOutput"]


@dataclass
class FlowMatchSDEDiscreteSchedulerOutput(BaseOutput):
    """Result of `step`: tensors as `sample_previous_step` returns them; log_prob and sqrt_dt are None unless asked for."""

    prev_sample: Tensor
    log_prob: Tensor | None
    prev_sample_mean: Tensor
    std_dev_t: Tensor
    sqrt_dt: Tensor | None = None


class FlowMatchSDEDiscreteScheduler(FlowMatchEulerDiscreteScheduler):
    """FlowMatchEulerDiscreteScheduler with an SDE step. Config, set_timesteps, saving and loading are the parent's.

    Schedules must fall within [0, 1]: invert_sigmas is refused at the first step. stochastic_sampling is not read: noise_level says
    how much noise a step adds.
    """

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        s_churn: float = 0.0,
        s_tmin: float = 0.0,
        s_tmax: float = float("inf"),
        s_noise: float = 1.0,
        generator: Generators = None,
        per_token_timesteps: Tensor | None = None,
        return_dict: bool = True,
        noise_level: float | Tensor = 0.7,
        prev_sample: Tensor | None = None,
        sde_type: str = "sde",
        return_logprobs: bool = True,
        include_logprob_normalizer: bool = True,
        return_sqrt_dt: bool = False,
    ) -> FlowMatchSDEDiscreteSchedulerOutput | tuple[Tensor | None, ...]:
        """The next step of a sampling loop; advances step_index by one, as the parent does.

        timestep: one of scheduler.timesteps; it is looked up (one host sync) at the first step of a loop only, and not at all after
        set_begin_index. s_churn, s_tmin, s_tmax and s_noise are there for the parent's signature, which does not use them either.
        Other arguments, results and errors: `sample_previous_step`, but for two things. A sampled prev_sample has the dtype of
        model_output, as in diffusers, and is rounded to it before it is scored: a replay of stored bf16 latents has the same log-prob.
        And std_dev_t is 0-d where noise_level is a number.

        With noise_level=0 and fp32 inputs prev_sample is bit-equal to FlowMatchEulerDiscreteScheduler.step. With a bf16 model_output
        it is closer to the true value: the parent rounds dt * model_output to bf16 before it adds.
        """
        whole = isinstance(timestep, int) or (isinstance(timestep, Tensor) and not timestep.is_floating_point())
        require(not whole, "timestep", timestep, "pass one of scheduler.timesteps, not its position")
        if self.step_index is None:
            self._init_step_index(timestep)
        result = reverse_step(
            sample,
            model_output,
            self.sigmas,
            self._positions(None, per_token_timesteps, sample),
            noise_level=noise_level,
            prev_sample=prev_sample,
            generator=generator,
            sde_type=sde_type,
            return_logprobs=return_logprobs,
            include_logprob_normalizer=include_logprob_normalizer,
            out_dtype=model_output.dtype,
        )
        self._step_index += 1
        outputs = self._shaped(result, sample, None, return_sqrt_dt)
        return FlowMatchSDEDiscreteSchedulerOutput(*outputs) if return_dict else outputs

    def sample_previous_step(
        self,
        sample: Tensor,
        model_output: Tensor,
        timestep: float | Tensor | None = None,
        generator: Generators = None,
        per_token_timesteps: Tensor | None = None,
        noise_level: float | Tensor = 0.7,
        prev_sample: Tensor | None = None,
        sde_type: str = "sde",
        return_logprobs: bool = True,
        return_sqrt_dt: bool = False,
        include_logprob_normalizer: bool = True,
    ) -> tuple[Tensor | None, ...]:
        """A step from any timesteps, without touching step_index: sampled, or scored where prev_sample is given (training).

        sample, model_output, prev_sample: [B, ...] of rank >= 2 (packed, image or video latents), any floating dtypes.
        timestep: [B] or [1], values of scheduler.timesteps, mixed as you like; None: the one at step_index.
        noise_level: eta, a number or one value for each sample ([B], [B, 1, ...]); 0 is the ODE's step; at most 1 for "cps".
        sde_type: "sde" (FlowGRPO), "cps" (Flow-CPS) or "dance_sde" (DanceGRPO).
        generator: draws the noise, as the original does with the same generator; a list of B draws each sample's own.

        Returns (prev_sample, log_prob, prev_sample_mean, std_dev_t), followed by sqrt_dt if return_sqrt_dt:
        prev_sample, prev_sample_mean: [B, ...] in fp32; a given prev_sample comes back.
        log_prob: fp32 [B], mean over the latent elements, with a gradient in model_output only; None if not return_logprobs.
        include_logprob_normalizer=False leaves out -log s - log sqrt(2 pi); "cps" has neither these nor the variance.
        std_dev_t: fp32 [B, 1, ...] ([1, 1, ...] for one timestep, 0-d for None): s for "cps" and "dance_sde"; s / sqrt(-dt) for "sde".
        sqrt_dt: sqrt(-dt), fp32 [B].
        fp32 becomes fp64 where sample or model_output is fp64.

        No host sync on a device if the schedule is there: set_timesteps(..., device=...). Raises ValueError for wrong shapes, dtypes,
        devices or values, for a timestep that is not in the schedule (on the CPU), for per_token_timesteps (the original has none
        either), and where prev_sample and generator are both given (the original ignores the generator).
        """
        result = reverse_step(
            sample,
            model_output,
            self.sigmas,
            self._positions(timestep, per_token_timesteps, sample),
            noise_level=noise_level,
            prev_sample=prev_sample,
            generator=generator,
            sde_type=sde_type,
            return_logprobs=return_logprobs,
            include_logprob_normalizer=include_logprob_normalizer,
        )
        return self._shaped(result, sample, timestep, return_sqrt_dt)

    def _positions(self, timestep: float | Tensor | None, per_token_timesteps: Tensor | None, sample: Tensor) -> Tensor:
        """Where the step starts in the schedule, int64 [1] or [B]."""
        require(per_token_timesteps is None, "per_token_timesteps", per_token_timesteps, "pass None: not supported")
        if timestep is not None:
            return lookup(timestep, self.timesteps, sample)
        require(self.step_index is not None, "timestep", None, "pass it, or call step before")
        return torch.full((1,), self.step_index, dtype=torch.int64, device=sample.device)

    @staticmethod
    def _shaped(
        result: ReverseStep, sample: Tensor, timestep: float | Tensor | None, return_sqrt_dt: bool
    ) -> tuple[Tensor | None, ...]:
        """The original's shapes of the per-step values."""
        whole_batch = timestep is None and len(result.std_dev_t) == 1
        std_dev_t = result.std_dev_t[0] if whole_batch else column(result.std_dev_t, sample)
        outputs = (result.prev_sample, result.log_prob, result.prev_sample_mean, std_dev_t)
        return (*outputs, result.sqrt_dt.expand(len(sample)).clone()) if return_sqrt_dt else outputs
