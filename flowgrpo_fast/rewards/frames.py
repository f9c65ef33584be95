"""Videos for rewards that take images: some frames of each, evenly spaced with both ends, scored one by one; the mean.

rewards:
  - {name: frames, kwargs: {reward: ocr, frames: 4, kwargs: {use_detection: true}}}
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.rewards.base import build_reward, register_reward
from flowgrpo_fast.rewards.manager import per_sample


@register_reward("frames")
class FramesReward:
    """reward: a name or module:function, with its kwargs. What it logs besides is averaged too."""

    def __init__(self, reward: str, frames: int = 4, kwargs: dict[str, Any] | None = None):
        if frames < 1:
            raise ValueError(f"frames must be at least 1, got {frames}")
        self.reward, self.frames = build_reward(reward, kwargs), frames

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> dict[str, Tensor]:
        flat, count = spread_frames(images, self.frames)
        each = lambda values: [value for value in values for _ in range(count)]  # noqa: E731
        scores = per_sample(self.reward(flat, each(prompts), each(metadata)), len(flat))
        return {name: values.view(-1, count).mean(1) for name, values in scores.items()}


def spread_frames(media: Tensor, count: int) -> tuple[Tensor, int]:
    """Images as they are; of videos [N, F, 3, H, W], `count` frames, evenly spaced with both ends: ([N * count, 3, H, W], count)."""
    if media.dtype != torch.uint8 or media.dim() not in (4, 5) or media.shape[-3] != 3:
        raise ValueError(f"takes uint8 [N, 3, H, W] or [N, F, 3, H, W]; got {media.dtype} {list(media.shape)}")
    if media.dim() == 4:
        return media, 1
    count = min(count, media.shape[1])
    return media[:, torch.linspace(0, media.shape[1] - 1, count).round().long()].flatten(0, 1), count
