"""Qwen-Image-Edit and Edit-Plus: Qwen-Image that edits. The text encoder sees the images beside the prompt; their latents follow those of the sample.

Images are brought to the size of the samples, where the pipelines bring them to a megapixel. Edit-Plus takes several, and shows its text encoder about 384 x 384 pixels of each. As in diffusers 0.40, the text encoder counts the image's tokens in one dimension (no mm_token_type_ids are handed over).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.config import ConfigError
from flowgrpo_fast.models.base import PromptEmbeds, PromptTokens
from flowgrpo_fast.models.qwen_image import QwenImageAdapter

SYSTEM = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, background), then explain how the user's text"
    " instruction should alter or modify the image. Generate a new image that meets the user's requirements while maintaining consistency with the original"
    " input where appropriate.<|im_end|>\n<|im_start|>user\n"
)
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
END = "{}<|im_end|>\n<|im_start|>assistant\n"


class QwenImageEditAdapter(QwenImageAdapter):
    family = "qwen_image_edit"
    pipeline_class = QwenImageEditPipeline
    max_source_images = 1
    template = SYSTEM + PICTURE + END
    template_drop = 64
    template_head = SYSTEM
    seen_area: ClassVar[int | None] = None
    """Pixels that the text encoder sees; None: as they are."""

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(path, device, dtype)
        if not (path / "processor" / "preprocessor_config.json").is_file():
            raise ConfigError(
                f"model.path: {path} has no processor/preprocessor_config.json, which brings images to the text encoder;"
                " take the whole checkpoint"
            )

    @cached_property
    def image_processor(self) -> Qwen2VLImageProcessorPil:
        return Qwen2VLImageProcessorPil.from_pretrained(self.path / "processor")

    @torch.no_grad()
    def encode(self, tokens: PromptTokens) -> PromptEmbeds:
        """[P, vision and text tokens, E]. Without images, as Qwen-Image."""
        if tokens.images is None:
            return super().encode(tokens)
        pictures = [self._seen(image) for image in tokens.images.flatten(0, 1)]
        seen = self.image_processor(images=pictures, return_tensors="pt")
        each = int(seen["image_grid_thw"][0].prod()) // self.image_processor.merge_size**2
        ids, mask = (t.to(self.device) for t in self._with_places(tokens, each, tokens.images.shape[1]))
        hidden = self.text_encoder.model(
            input_ids=ids,
            attention_mask=mask.long(),
            pixel_values=seen["pixel_values"].to(self.device, self.dtype),
            image_grid_thw=seen["image_grid_thw"].to(self.device),
        ).last_hidden_state
        return self.without_template(hidden, mask)

    def _with_places(self, tokens: PromptTokens, each: int, count: int) -> tuple[Tensor, Tensor]:
        """In the place of the template's one image token: as many as the text encoder has for an image, and the same for each further picture."""
        pad, end = self.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|vision_end|>"])
        at = int((tokens.input_ids[0] == pad).nonzero()[0])
        middle = [pad] * each
        for number in range(2, count + 1):
            middle += [end, *self.tokenizer(f"Picture {number}: <|vision_start|>").input_ids, *[pad] * each]
        ids = torch.tensor(middle).expand(len(tokens.input_ids), -1)
        parts = ((tokens.input_ids, ids), (tokens.mask, torch.ones_like(ids, dtype=torch.bool)))
        whole = [torch.cat([t[:, :at], new, t[:, at + 1 :]], 1) for t, new in parts]
        return whole[0], whole[1]

    def _seen(self, image: Tensor) -> Image.Image:
        picture = Image.fromarray(image.permute(1, 2, 0).cpu().numpy())
        if self.seen_area is None:
            return picture
        width, height = plus.calculate_dimensions(self.seen_area, picture.width / picture.height)
        return picture.resize((int(width), int(height)), Image.Resampling.LANCZOS)

    def network_inputs(
        self, x: Tensor, sigma: Tensor, prompt: PromptEmbeds, guidance_scale: float, size: MediaSize
    ) -> dict[str, Any]:
        inputs = super().network_inputs(x, sigma, prompt, guidance_scale, size)
        if prompt.image_latents is None:
            return inputs
        images = 1 + prompt.image_latents.shape[1] // x.shape[1]
        return inputs | {"img_shapes": [shapes * images for shapes in inputs["img_shapes"]]}


class QwenImageEditPlusAdapter(QwenImageEditAdapter):
    family = "qwen_image_edit_plus"
    pipeline_class = QwenImageEditPlusPipeline
    max_source_images = 3
    template = SYSTEM + "Picture 1: " + PICTURE + END
    seen_area = plus.CONDITION_IMAGE_SIZE
