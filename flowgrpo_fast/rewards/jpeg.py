"""How well an image compresses, the rewards of DDPO: cheap, deterministic, and easy to see in the images."""

from __future__ import annotations

import io
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowgrpo_fast.rewards.base import register_reward, require_images


class JpegSize:
    """reward = sign * bytes / 1000 of the image as JPEG. Returns fp32 [N]."""

    def __init__(self, sign: int, quality: int):
        if not 1 <= quality <= 100:
            raise ValueError(f"quality must be from 1 to 100, got {quality}")
        self.sign = sign
        self.quality = quality

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        require_images(images, "the JPEG reward")
        sizes = [self._bytes(image) for image in images]
        return self.sign * torch.tensor(sizes, dtype=torch.float32) / 1000

    def _bytes(self, image: Tensor) -> int:
        buffer = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, format="JPEG", quality=self.quality)
        return buffer.tell()


@register_reward("jpeg_compressibility")
def jpeg_compressibility(quality: int = 95) -> JpegSize:
    """Small files: minus the size in kB, as in DDPO (flow_grpo divides by a further 500: `weight: 0.002`)."""
    return JpegSize(-1, quality)


@register_reward("jpeg_incompressibility")
def jpeg_incompressibility(quality: int = 95) -> JpegSize:
    """Large files: the size in kB, as in DDPO and flow_grpo."""
    return JpegSize(1, quality)
