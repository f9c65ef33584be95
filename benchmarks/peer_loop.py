"""The rival of `benchmarks.step`: a training step as the peers make it, in eager PyTorch, over our engine, weights, prompts and noise.

The loop is verl-omni's for Qwen-Image (commit a1139baf; pipelines/qwen_image_flow_grpo/vllm_omni_rollout_adapter.py = QRA,
diffusers_training_adapter.py = QTA, trainer/diffusion/diffusion_algos.py = ALG, workers/engine/fsdp/diffusers_impl.py = ENG):
- every sample's prompt and negative prompt is tokenised and encoded anew (QRA:816-832), and its embeddings are kept per sample;
- the rollout runs every step of every sample, the ODE steps before the window too, and CFG as two forwards (QRA:443-467);
- rewards follow when all images are there;
- advantages sample by sample in Python (ALG:241-263);
- old log-probs are computed again, a forward without gradient per micro-batch and timestep, two with CFG (ENG; `bypass_mode` is off by default);
- the update runs micro-batch by micro-batch, timestep by timestep, CFG as two forwards with gradient (QTA:222-227); eager log-prob,
  ratio and clipped loss; gradients are reduced at every backward (no `no_sync`, ENG:899-945).
Micro-batches: 16 in verl-omni's Qwen-Image recipes, 4 in flow_grpo's, 1 in Flow-Factory's and DanceGRPO's; the rollout takes the same here. So a
batch of 4 is a blend: flow_grpo's own loop joins the CFG branches and keeps the rollout's log-probs. It goes one micro-batch and timestep
at a time too, encodes each sample's text, and reduces at every backward (scripts/train_qwenimage.py at zhtmike/flow_grpo@27b6ef8).

ZeRO-3 stands for their FSDP full sharding: a gather a forward and a backward, a reduction a backward. None of them trains under ZeRO-3.
In the peer's favour: it samples with whole weights, gathered once a phase as ours are (flow_grpo samples through its shards, a gather a forward;
verl-omni sends the weights to another engine); its noise is drawn outside its time; it decodes with our adapter (4 times as fast as diffusers'
own, models/image_vae.py); no gradient checkpointing, which both recipes have and which gathers once more; no Ray, nothing copied between processes.
Against it: DeepSpeed's hooks run for each layer, FSDP's for each block (the span `gather` contains them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks import rivals
from flowgrpo_fast import comm
from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.models.base import PromptEmbeds
from flowgrpo_fast.models.pipeline import PipelineAdapter
from flowgrpo_fast.ops import STREAM_INITIAL, STREAM_SDE, NoiseKey, philox_normal
from flowgrpo_fast.profile import span
from flowgrpo_fast.trainer import Trainer


def brightness(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    """A reward that costs next to nothing and differs from sample to sample."""
    return images.float().mean((1, 2, 3)) / 255 + images.float().std((1, 2, 3)) / 255


@dataclass(frozen=True)
class Job:
    """A step's B samples of this rank: the trainer's own, with the noise that its keys give."""

    prompts: list[str]
    metadata: list[dict[str, Any]]
    group_id: Tensor  # [B]
    window_start: int  # of all samples
    initial: Tensor  # [B, ...]
    noise: list[Tensor]  # W times [B, ...]


@dataclass(frozen=True)
class Samples:
    """What the rollout keeps, a row (or a list entry) a sample."""

    latents: Tensor  # [B, W + 1, ...]
    log_probs: Tensor  # [B, W]
    positive: list[Tensor]  # B times [L, E]
    negative: list[Tensor]
    images: Tensor  # uint8 [B, 3, H, W]


@dataclass(frozen=True)
class Outcome:
    grad_norm: float
    log_probs: dict[str, Tensor]  # [B, W], of the rollout, before the update and in the update


class PeerLoop:
    """batch: samples in a forward, of the rollout and of a micro-batch."""

    def __init__(self, trainer: Trainer, batch: int) -> None:
        self.trainer, self.batch = trainer, batch
        self.engine, self.config = trainer.engine, trainer.config
        assert isinstance(trainer.adapter, PipelineAdapter)
        self.adapter = trainer.adapter
        self.window, self.sigmas = trainer.plan.slots, trainer.sigmas

    def job(self, step: int) -> Job:
        """Outside the time."""
        r, seed = self.config.rollout, self.config.seed
        tasks = self.trainer._tasks(step)
        sample_id = torch.cat([task.sample_id[0] for task in tasks])
        group_id = torch.cat([task.group_id.expand(task.sample_id.shape[1]) for task in tasks])
        start = torch.cat([task.window_start[0] for task in tasks])
        assert bool((start == start[0]).all()), "rollout.window.scope is batch"
        shape = self.adapter.latent_shape(MediaSize(r.height, r.width))
        initial_id = group_id if r.initial_noise == "group" else sample_id
        return Job(
            prompts=[task.record.prompt for task in tasks for _ in task.sample_id[0]],
            metadata=[task.record.metadata for task in tasks for _ in task.sample_id[0]],
            group_id=group_id,
            window_start=int(start[0]),
            initial=philox_normal(NoiseKey(seed, 0, initial_id, STREAM_INITIAL), shape),
            noise=[
                philox_normal(NoiseKey(seed, int(start[0]) + w, sample_id, STREAM_SDE), shape)
                for w in range(self.window)
            ],
        )

    def step(self, job: Job) -> Outcome:
        with self.engine.whole_weights(), torch.no_grad(), span("rollout"):
            samples = self._rollout(job)
        reward = self.trainer.inputs.rewards.score(samples.images, job.prompts, job.metadata).components[:, 0]
        rewards, group = comm.gather_rows(reward), comm.gather_rows(job.group_id)
        (advantages,) = rivals.advantage_by_sample(rewards, group)
        mine = slice(comm.rank() * len(reward), (comm.rank() + 1) * len(reward))
        # The trainer's own name for its training phase.
        with self.trainer.timer("update"):
            old = self._old_log_probs(job, samples)
            current = self._update(job, samples, old, advantages[mine])
            grad_norm, _, _ = self.engine.step()
        return Outcome(grad_norm, {"rollout": samples.log_probs, "old": old, "update": current})

    def _rollout(self, job: Job) -> Samples:
        parts = [self._sample(job, rows) for rows in self._batches(len(job.prompts))]
        return Samples(
            latents=torch.cat([part.latents for part in parts]),
            log_probs=torch.cat([part.log_probs for part in parts]),
            positive=[row for part in parts for row in part.positive],
            negative=[row for part in parts for row in part.negative],
            images=torch.cat([part.images for part in parts]),
        )

    def _sample(self, job: Job, rows: slice) -> Samples:
        r, prompts = self.config.rollout, job.prompts[rows]
        negative_prompt = self.config.data.negative_prompt
        assert negative_prompt is not None
        with span("encode"):
            positive, negative = self._encode(prompts), self._encode([negative_prompt] * len(prompts))
        texts = together(positive), together(negative)
        x = job.initial[rows]
        latents, log_probs = [], []
        for i in range(r.num_steps):
            sigma, after, sigma_1 = self._sigmas(i, len(x))
            v = self._velocity(self.engine.module, x, sigma, texts)
            slot = i - job.window_start
            if 0 <= slot < self.window:
                if slot == 0:
                    latents.append(x)
                x, log_prob = rivals.step(x, v, job.noise[slot][rows], sigma, after, sigma_1)
                latents.append(x)
                log_probs.append(log_prob)
            else:
                x = x + v * (after - sigma)[:, None, None]
        with span("decode"):
            images = self.adapter.decode(x, MediaSize(r.height, r.width))
        return Samples(torch.stack(latents, 1), torch.stack(log_probs, 1), positive, negative, images)

    @torch.no_grad()
    def _old_log_probs(self, job: Job, samples: Samples) -> Tensor:
        old = torch.empty_like(samples.log_probs)
        for rows in self._batches(len(old)):
            texts = together(samples.positive[rows]), together(samples.negative[rows])
            for w in range(self.window):
                old[rows, w] = self._log_prob(job, samples, rows, w, texts)
        return old

    def _update(self, job: Job, samples: Samples, old: Tensor, advantages: Tensor) -> Tensor:
        """Gradients of all micro-batches and timesteps. Returns the log-probs that they came from."""
        current = torch.empty_like(old)
        # verl-omni divides a micro-batch's mean by their number and the window's size.
        denominator = torch.tensor(float(old.numel()))
        for rows in self._batches(len(old)):
            texts = together(samples.positive[rows]), together(samples.negative[rows])
            for w in range(self.window):
                log_prob = self._log_prob(job, samples, rows, w, texts)
                loss, metrics = rivals.clipped_loss(log_prob, old[rows, w], advantages[rows], denominator)
                self.engine.backward(loss)
                metrics.tolist()
                current[rows, w] = log_prob.detach()
        return current

    def _log_prob(
        self, job: Job, samples: Samples, rows: slice, w: int, texts: tuple[PromptEmbeds, PromptEmbeds]
    ) -> Tensor:
        x, prev = samples.latents[rows, w], samples.latents[rows, w + 1]
        sigma, after, sigma_1 = self._sigmas(job.window_start + w, len(x))
        v = self._velocity(self.engine, x, sigma, texts)
        return rivals.log_prob(x, v, prev, sigma, after, sigma_1)[0]

    def _velocity(self, network: Any, x: Tensor, sigma: Tensor, texts: tuple[PromptEmbeds, PromptEmbeds]) -> Tensor:
        r = self.config.rollout
        size = MediaSize(r.height, r.width)
        inputs = (self.adapter.network_inputs(x, sigma, text, r.guidance_scale, size) for text in texts)
        v, v_neg = (network(**given, return_dict=False)[0] for given in inputs)
        return rivals.cfg_rescale(v, v_neg)[0]

    def _encode(self, prompts: list[str]) -> list[Tensor]:
        text = self.adapter.encode(self.adapter.tokenize(prompts, self.config.rollout.max_sequence_length))
        return [row[:length] for row, length in zip(text.embeds, text.lengths, strict=True)]

    def _sigmas(self, step: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """sigma [rows], the next one [rows], and the schedule's second value."""
        return self.sigmas[step].expand(rows), self.sigmas[step + 1].expand(rows), self.sigmas[1]

    def _batches(self, samples: int) -> Iterator[slice]:
        return (slice(at, min(at + self.batch, samples)) for at in range(0, samples, self.batch))


def together(rows: list[Tensor]) -> PromptEmbeds:
    """Texts of a forward, padded to the longest."""
    return PromptEmbeds(pad_sequence(rows, batch_first=True), tuple(len(row) for row in rows))
