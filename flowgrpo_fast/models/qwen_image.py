"""Qwen-Image: 2x2-packed latents, a fixed prompt template, true CFG with per-token norm rescale."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.config import ConfigError
from flowgrpo_fast.models.base import PromptEmbeds, PromptTokens
from flowgrpo_fast.models.image_vae import decode_single_frames
from flowgrpo_fast.models.pipeline import PipelineAdapter, from_uint8, latent_statistics, padded_tokens, to_uint8

# Qwen-Image's own template; the first 34 tokens (everything before the prompt) are dropped after encoding.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships"
    " of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_DROP = 34
PATCH = 2


class QwenImageAdapter(PipelineAdapter):
    family = "qwen_image"
    pipeline_class = QwenImagePipeline
    transformer_class = QwenImageTransformer2DModel
    vae_class = AutoencoderKLQwenImage
    rescales = True
    template: ClassVar[str] = TEMPLATE
    template_drop: ClassVar[int] = TEMPLATE_DROP
    template_head: ClassVar[str] = TEMPLATE.partition("{}")[0]
    """What of it is dropped."""
    lora_target_modules: ClassVar[list[str]] = [
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
        "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
    ]  # fmt: skip

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(path, device, dtype)
        self.tokenizer = Qwen2Tokenizer.from_pretrained(path / "tokenizer")
        self.tokenizer.padding_side = "right"
        self.vae_scale = 2 ** len(self.vae_config["temperal_downsample"])
        head = self.tokenizer(self.template_head).input_ids
        if len(head) != self.template_drop:
            raise ConfigError(
                f"model.path: the tokenizer of {path} gives {len(head)} tokens for Qwen-Image's template, the model drops {self.template_drop};"
                " this is not Qwen-Image's tokenizer"
            )

    @cached_property
    def text_encoder(self) -> Qwen2_5_VLForConditionalGeneration:
        encoder: Qwen2_5_VLForConditionalGeneration = self.component(
            Qwen2_5_VLForConditionalGeneration, "text_encoder", dtype=self.dtype
        )
        return encoder

    @cached_property
    def vae(self) -> AutoencoderKLQwenImage:
        vae = AutoencoderKLQwenImage.from_pretrained(self.path / "vae", torch_dtype=self.dtype)
        return decode_single_frames(vae).to(self.device).eval().requires_grad_(False)

    def latent_shape(self, size: MediaSize) -> tuple[int, ...]:
        unit = self.vae_scale * PATCH
        self.require_multiple(size, unit)
        return (size.height // unit) * (size.width // unit), self.vae_config["z_dim"] * PATCH**2

    def smallest_size(self) -> MediaSize:
        return MediaSize(2 * self.vae_scale * PATCH, 2 * self.vae_scale * PATCH)

    def tokenize(self, prompts: list[str], max_length: int) -> PromptTokens:
        return padded_tokens(
            self.tokenizer, [self.template.format(p) for p in prompts], prompts, max_length, self.template_drop
        )

    @torch.no_grad()
    def encode(self, tokens: PromptTokens) -> PromptEmbeds:
        ids, mask = tokens.input_ids.to(self.device), tokens.mask.to(self.device)
        # The inner model's last hidden state is what the pipeline reads as hidden_states[-1], without the vocabulary projection.
        hidden = self.text_encoder.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return self.without_template(hidden, mask)

    def without_template(self, hidden: Tensor, mask: Tensor) -> PromptEmbeds:
        kept = mask[:, self.template_drop :]
        return PromptEmbeds(hidden[:, self.template_drop :] * kept[..., None], tuple(int(n) for n in kept.sum(1).cpu()))

    def network_inputs(
        self, x: Tensor, sigma: Tensor, prompt: PromptEmbeds, guidance_scale: float, size: MediaSize
    ) -> dict[str, Any]:
        unit = self.vae_scale * PATCH
        return {
            "hidden_states": x.to(self.dtype),
            # sigma itself, fp32: times 1000 and back is off by an ulp, which AdaLN amplifies. The network casts it to its own dtype,
            # as it did when it was pretrained.
            "timestep": sigma,
            "encoder_hidden_states": prompt.embeds.to(self.dtype),
            "encoder_hidden_states_mask": prompt.attention_mask(),
            "img_shapes": [[(1, size.height // unit, size.width // unit)]] * x.shape[0],
        }

    @torch.no_grad()
    def encode_images(self, images: Tensor, size: MediaSize) -> Tensor:
        pixels = from_uint8(images.to(self.device))[:, :, None].to(self.vae.dtype)
        z = self.vae.encode(pixels).latent_dist.mode().float()
        mean, std = latent_statistics(self.vae, z.device)
        z = ((z - mean) / std)[:, :, 0]
        return QwenImagePipeline._pack_latents(z, *z.shape)

    @torch.no_grad()
    def decode(self, latents: Tensor, size: MediaSize) -> Tensor:
        z = QwenImagePipeline._unpack_latents(latents, size.height, size.width, self.vae_scale)
        mean, std = latent_statistics(self.vae, z.device)
        return to_uint8(self.vae.decode((z * std + mean).to(self.vae.dtype), return_dict=False)[0][:, :, 0])
