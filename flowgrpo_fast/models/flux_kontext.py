"""FLUX.1 Kontext: FLUX.1-dev that edits. The image's latents follow those of the sample, marked by 1 in the first coordinate of their ids.

The image is brought to the size of the samples. (Its pipeline has a list of sizes of its own, all of about a megapixel: give one of them as rollout.height x width, or
several as rollout.size_buckets.)
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxKontextPipeline
from torch import Tensor

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.models.base import PromptEmbeds
from flowgrpo_fast.models.flux import FluxAdapter


class FluxKontextAdapter(FluxAdapter):
    family = "flux_kontext"
    pipeline_class = FluxKontextPipeline
    max_source_images = 1

    def network_inputs(
        self, x: Tensor, sigma: Tensor, prompt: PromptEmbeds, guidance_scale: float, size: MediaSize
    ) -> dict[str, Any]:
        inputs = super().network_inputs(x, sigma, prompt, guidance_scale, size)
        if prompt.image_latents is None:
            return inputs
        of_image = inputs["img_ids"].clone()
        of_image[:, 0] = 1
        return inputs | {"img_ids": torch.cat([inputs["img_ids"], of_image])}
