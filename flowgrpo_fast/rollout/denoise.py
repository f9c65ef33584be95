"""The denoising loop: one plain function for every rollout. It takes the transformer as a callable and knows no model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo_fast.ops import STREAM_SDE, NoiseKey, sde_step
from flowgrpo_fast.rollout.base import NonFiniteError, SamplingParams
from flowgrpo_fast.schedule import sde_coefficients

NOT_FINITE = "the model's velocity is not finite"  # a server's error is recognised by it
# velocity(x [N, ...], sigma fp32 [N], rows) -> v [N, ...]; `rows` are the batch rows that x holds.
Velocity = Callable[[Tensor, Tensor, list[int]], Tensor]


@dataclass(frozen=True)
class Trajectory:
    """The trained window and the end: latents [B, W+1, ...] fp32, log_probs [B, W] fp32, final [B, ...] fp32; old_v [B, W, ...] in the
    velocity's dtype, if it is kept."""

    latents: Tensor
    log_probs: Tensor
    final: Tensor
    old_v: Tensor | None = None


@torch.no_grad()
def denoise(
    velocity: Velocity,
    x: Tensor,
    sigmas: Tensor,
    sampling: SamplingParams,
    *,
    start: Tensor,
    stop: Tensor,
    window_start: Tensor,
    sample_id: Tensor,
    poll: Callable[[], None] | None = None,
) -> Trajectory:
    """Takes each sample from step start[b] to step stop[b]: SDE inside its window, ODE outside.

    Every sample keeps its own step, so one forward carries samples at different timesteps and the trained steps run in
    the full batch: the trainer can replay them in the same shape, row by row. Samples that are done leave the batch.

    Args:
        x: [B, ...] fp32, the state before step `start`.
        sigmas: fp32 [T+1] on the CPU.
        sampling: rule, noise level, log-prob form, seed and W = window_size; with W = 0 slot 0 of `latents` holds the final state.
        start, stop, window_start, sample_id: int64 [B] on the CPU; the loop's control never waits for the device.
        poll: called before every step; what it raises ends the loop (a cancelled request must not block the next one).
    Raises:
        NonFiniteError: naming the first step and sample whose velocity is not finite.
    """
    B, W, device = x.shape[0], sampling.window_size, x.device
    latents = torch.empty(B, W + 1, *x.shape[1:], device=device, dtype=torch.float32)
    log_probs = torch.empty(B, W, device=device, dtype=torch.float32)
    old_v: Tensor | None = None
    step, x, past = start.clone(), x.clone(), History(x)
    finite: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, their steps, flags on the device
    while len(rows := (step < stop).nonzero()[:, 0]):
        if poll is not None:
            poll()
        full = len(rows) == B
        at, slot = step[rows], step[rows] - window_start[rows]
        trained = (slot >= 0) & (slot < W)
        here = x if full else x[rows.to(device)]
        # fp64, as the trainer's Python float: an fp32 0.9 would shift the coefficients by an ulp, and with them the ratio.
        level = trained.double() * sampling.noise_level
        coef = sde_coefficients(sigmas, at, rule=sampling.rule, noise_level=level).to(device)
        v = velocity(here, sigmas[at].to(device), [int(row) for row in rows])
        finite.append((rows, at, v.isfinite().flatten(1).all(1)))
        if sampling.ode_order == 2:
            v = past.extrapolated(v, rows, sigmas[at + 1] - sigmas[at], follows=slot >= W)
        if trained.any():
            following, log_prob = sde_step(
                here,
                v,
                coef,
                key=NoiseKey(sampling.seed, at.to(device), sample_id[rows].to(device), STREAM_SDE),
                form=sampling.log_prob_form,
                reduction=sampling.log_prob_reduction,
            )
            kept = trained.nonzero()[:, 0]
            row, w, kept = rows[kept].to(device), slot[kept].to(device), kept.to(device)
            latents[row, w], latents[row, w + 1], log_probs[row, w] = here[kept], following[kept], log_prob[kept]
            if sampling.keep_old_v:
                if old_v is None:
                    old_v = torch.empty(B, W, *x.shape[1:], device=device, dtype=v.dtype)
                old_v[row, w] = v[kept]
        else:
            following, _ = sde_step(here, v, coef, noise=torch.zeros((), device=device).expand_as(here))
        if full:
            x = following
        else:
            x[rows.to(device)] = following
        step[rows] += 1
    _require_finite(finite, sample_id)
    if W == 0:
        latents[:, 0] = x
    return Trajectory(latents, log_probs, x, old_v)


class History:
    """Of the ODE steps after the window: each sample's last velocity, for second-order steps (Adams-Bashforth) at the price of first-order ones."""

    def __init__(self, x: Tensor) -> None:
        self.v = torch.zeros_like(x)
        self.dt = torch.zeros(len(x))  # 0: no such step yet

    def extrapolated(self, v: Tensor, rows: Tensor, dt: Tensor, follows: Tensor) -> Tensor:
        """v + dt / (2 dt_last) (v - v_last) where the step and the one before follow the window, else v. rows, dt, follows [N] on the CPU."""
        last = self.dt[rows]
        factor = torch.where(follows & (last != 0), 0.5 * dt / last, 0.0)
        self.dt[rows] = torch.where(follows, dt, 0.0)
        where = rows.to(v.device)
        before, self.v[where] = self.v[where], v.to(self.v.dtype)
        if not factor.any():
            return v
        factor = factor.to(v.device).view(-1, *[1] * (v.dim() - 1))
        return torch.where(factor == 0, v, v + factor * (v - before))


def _require_finite(finite: list[tuple[Tensor, Tensor, Tensor]], sample_id: Tensor) -> None:
    """One device wait for the whole loop."""
    if not finite or bool(torch.cat([flags for _, _, flags in finite]).all()):
        return
    for rows, at, flags in finite:
        bad = (~flags.cpu()).nonzero()[:, 0]
        if len(bad):
            row = int(bad[0])
            raise NonFiniteError(
                f"{NOT_FINITE} at denoising step {int(at[row])}, sample {int(sample_id[rows[row]])}"
                f" ({len(bad)} of {len(rows)} samples in that forward); a lower learning rate or bfloat16 instead of float16 are the usual cures"
            )
