"""Offline preferences: instead of sampling, an agent loop that encodes two given images of a prompt, the better one first.

    rollout.agent_loop: preferences,  algorithm: {name: dpo, group_size: 2}

Prompt files have `chosen` and `rejected`, paths of images (python -m flowgrpo_fast.data.prepare pairs); they are scaled and cropped to the step's size
(rollout.height x width, or one of rollout.size_buckets). The configured rewards score validation samples only.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import torch

from flowgrpo_fast.batch import RolloutBatch
from flowgrpo_fast.data.images import load_image
from flowgrpo_fast.models.base import encode_positive
from flowgrpo_fast.rewards import RewardResult
from flowgrpo_fast.rollout.agent_loop import GroupTask, SingleTurnAgentLoop, Turn

KEYS = ("chosen", "rejected")


class PreferenceLoop(SingleTurnAgentLoop):
    async def run(self, task: GroupTask) -> list[Turn]:
        """Validation, one sample a prompt, is sampled and scored as usual."""
        if task.sample_id.shape[1] == 1:
            return await super().run(task)
        c = self.context
        size = c.queue.sampling.media_size
        files = [str(task.record.metadata[key]) for key in KEYS]
        images = torch.stack(await asyncio.gather(*(asyncio.to_thread(load_image, file, size) for file in files)))
        text = encode_positive(c.adapter, c.tokenize(task.record.prompt, c.source_images(task.record)))
        two = torch.zeros(2, dtype=torch.int64)
        batch = RolloutBatch(
            latents=c.adapter.encode_images(images, size)[:, None].contiguous(),
            log_probs=torch.empty(2, 0),
            step_index=torch.empty(2, 0, dtype=torch.int64),
            sigmas=c.adapter.sigmas(c.queue.sampling.num_steps, size, c.sigmas),
            prompt_index=two,
            group_id=two + int(task.group_id[0]),
            sample_id=task.sample_id[0],
            seed=two + c.queue.sampling.seed,
            prompt_embeds=text.embeds.contiguous(),
            prompt_embeds_mask=text.mask(),
            pooled_prompt_embeds=text.pooled,
            prompt_image_latents=text.image_latents,
            policy_version=c.queue.policy_version,
            images=images,
            **size._asdict(),
        )
        # 1 and 0 in each column, whatever the sign of its weight: the chosen image's weighted sum is the greater one.
        preferred = torch.stack([c.rewards.weights.sign().clamp(min=0), -c.rewards.weights.sign().clamp(max=0)])
        batch = replace(batch.to(c.adapter.device), images=images)
        return [Turn(task.record.prompt, batch.validate(), RewardResult(preferred, two == 0, {}, []))]
