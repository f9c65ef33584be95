"""Sampling with a transformer that lives in this process: the trainer's own (one GPU, a CPU, tests), or the engine's in a rollout server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from flowgrpo_fast.batch import RolloutBatch
from flowgrpo_fast.config import SigmasConfig
from flowgrpo_fast.lifetime import alive
from flowgrpo_fast.models.base import ModelAdapter, PromptEmbeds, PromptTokens, encode_positive
from flowgrpo_fast.ops import STREAM_INITIAL, NoiseKey, philox_normal
from flowgrpo_fast.profile import span
from flowgrpo_fast.rollout.base import RolloutRequest, SamplingParams
from flowgrpo_fast.rollout.denoise import Velocity, denoise
from flowgrpo_fast.schedule import window_step_index

DECODE_BATCH = 32


class InProcessRollout:
    """whole_weights: entered for a phase; under ZeRO-3 the engine gathers the transformer once for it."""

    concurrency = 1

    def __init__(
        self,
        adapter: ModelAdapter,
        transformer: nn.Module,
        sigmas: SigmasConfig,
        device: torch.device,
        whole_weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.adapter, self.transformer, self.sigmas, self.device = adapter, transformer, sigmas, device
        self.whole_weights = whole_weights
        self._negative: tuple[PromptTokens, PromptEmbeds] | None = None
        self._cancelled = threading.Event()

    def phase(self, policy_version: int) -> AbstractContextManager[None]:
        return self.whole_weights()

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, policy_version: int
    ) -> RolloutBatch:
        # concurrency 1: what was cancelled before this call has ended.
        self._cancelled.clear()
        with span("rollout"):
            batch = self.sample(requests, sampling, policy_version, self._poll)
        # These go to the rewards, on the host; copied here, in the rollout's thread, not in the event loop.
        on_host = {name: t.cpu() for name, t in batch.tensors().items() if name in ("images", "videos")}
        return replace(batch, **on_host)  # type: ignore[arg-type]

    @torch.no_grad()
    def sample(
        self,
        requests: Sequence[RolloutRequest],
        sampling: SamplingParams,
        policy_version: int,
        poll: Callable[[], None] | None = None,
    ) -> RolloutBatch:
        """As `generate`, with everything on the device. poll: see `denoise`."""
        adapter, size = self.adapter, sampling.media_size
        sigmas = adapter.sigmas(sampling.num_steps, size, self.sigmas)
        T, W = sampling.num_steps, sampling.window_size
        sample_id = torch.cat([r.sample_id for r in requests])
        sizes = torch.tensor([len(r.sample_id) for r in requests])
        prompt_index = torch.arange(len(requests)).repeat_interleave(sizes)
        group_id = torch.tensor([r.group_id for r in requests])[prompt_index]
        window_start = torch.cat([r.window_start for r in requests]) if W else torch.zeros_like(sample_id)

        with span("encode"):
            positive = encode_positive(adapter, stack_tokens([r.tokens for r in requests]))
            negative = self._encode_negative(requests) if adapter.needs_negative(sampling.guidance_scale) else None

        def velocity_of(prompt_of: list[int]) -> Velocity:
            def velocity(x: Tensor, sigma: Tensor, rows: list[int]) -> Tensor:
                prompts = [prompt_of[row] for row in rows]
                text, other = positive.rows(prompts), negative
                if other is not None:
                    other = other.repeated(len(rows)) if len(other.lengths) == 1 else other.rows(prompts)
                return adapter.velocity(self.transformer, x, sigma, text, other, sampling.guidance_scale, size)

            return velocity

        shape, everything = adapter.latent_shape(size), list(range(len(requests)))
        if sampling.initial_noise == "group":
            # Same prompt, same noise, no SDE noise before the window: the steps before the group's first window are one trajectory.
            ids = torch.tensor([r.group_id for r in requests])
            first = torch.stack([r.window_start.min() for r in requests]) if W else torch.zeros_like(ids)
            if W and not torch.equal(first[prompt_index], window_start):
                # Windows differ inside a group: all leave together, or early groups would be done, and the batch smaller,
                # while late windows are still being sampled.
                first = first.min().expand_as(first)
            x = denoise(
                velocity_of(everything),
                self._initial_noise(sampling.seed, ids, shape),
                sigmas,
                replace(sampling, window_size=0),
                start=torch.zeros_like(first),
                stop=first,
                window_start=first,
                sample_id=ids,
                poll=poll,
            ).final[prompt_index.to(self.device)]
            start = first[prompt_index]
        else:
            x, start = self._initial_noise(sampling.seed, sample_id, shape), torch.zeros_like(sample_id)
        trajectory = denoise(
            velocity_of([int(i) for i in prompt_index]),
            x,
            sigmas,
            sampling,
            start=start,
            stop=torch.full_like(start, T),
            window_start=window_start,
            sample_id=sample_id,
            poll=poll,
        )
        with span("decode"):
            media = torch.cat([adapter.decode(chunk, size) for chunk in trajectory.final.split(DECODE_BATCH)])
        batch = RolloutBatch(
            latents=trajectory.latents,
            log_probs=trajectory.log_probs,
            step_index=window_step_index(window_start, W),
            sigmas=sigmas,
            prompt_index=prompt_index,
            group_id=group_id,
            sample_id=sample_id,
            seed=torch.full_like(sample_id, sampling.seed),
            prompt_embeds=positive.embeds.contiguous(),
            prompt_embeds_mask=positive.mask(),
            policy_version=policy_version,
            **size._asdict(),
            images=media if media.dim() == 4 else None,
            videos=media if media.dim() == 5 else None,
            old_v=trajectory.old_v,
            pooled_prompt_embeds=positive.pooled,
            prompt_image_latents=positive.image_latents,
            negative_prompt_embeds=None if negative is None else negative.embeds.contiguous(),
            negative_prompt_embeds_mask=None if negative is None else negative.mask(),
            negative_pooled_prompt_embeds=None if negative is None else negative.pooled,
        )
        return batch.to(self.device).validate()

    def cancel(self) -> None:
        """Ends the call that runs now, before its next denoising step."""
        self._cancelled.set()

    def _poll(self) -> None:
        alive()
        if self._cancelled.is_set():
            raise RuntimeError("the rollout was cancelled")

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing to release: the weights are the trainer's."""

    def _initial_noise(self, seed: int, ids: Tensor, shape: tuple[int, ...]) -> Tensor:
        return philox_normal(NoiseKey(seed, 0, ids.to(self.device), STREAM_INITIAL), shape)

    def _encode_negative(self, requests: Sequence[RolloutRequest]) -> PromptEmbeds:
        """One row where all requests share their negative prompt, encoded once per run; otherwise one row per request."""
        tokens = [r.negative_tokens for r in requests if r.negative_tokens is not None]
        if len(tokens) != len(requests):
            raise ValueError("guidance_scale > 1 needs a negative prompt in every request")
        # A family that edits encodes it together with each prompt's own image.
        if tokens[0].images is not None or any(not torch.equal(t.input_ids, tokens[0].input_ids) for t in tokens):
            return self.adapter.encode(stack_tokens(tokens))
        if self._negative is None or not torch.equal(self._negative[0].input_ids, tokens[0].input_ids):
            self._negative = (tokens[0], self.adapter.encode(tokens[0]))
        return self._negative[1]


def stack_tokens(parts: Sequence[PromptTokens]) -> PromptTokens:
    """Single rows -> one right-padded batch."""
    length = max(p.input_ids.shape[1] for p in parts)
    ids = torch.zeros(len(parts), length, dtype=torch.int64)
    mask = torch.zeros(len(parts), length, dtype=torch.bool)
    for i, part in enumerate(parts):
        n = part.input_ids.shape[1]
        ids[i, :n], mask[i, :n] = part.input_ids[0], part.mask[0]
    images = [part.images for part in parts if part.images is not None]
    if 0 < len(images) < len(parts):
        raise ValueError(f"{len(images)} of {len(parts)} prompts of one forward have an image to edit")
    return PromptTokens(ids, mask, torch.cat(images) if images else None)
