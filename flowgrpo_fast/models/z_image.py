"""Z-Image: 16-channel latents, a Qwen3 for the prompt, a single-stream transformer that takes a list of images and a list of texts.

Its pipeline writes guidance as v_pos + g (v_pos - v_neg): g is `rollout.guidance_scale` - 1 here. The turbo checkpoint is sampled without (1.0). Its network predicts
minus the velocity and counts time from 0 (noise) to 1. Not for sequence parallelism: it pads each text to a multiple of 32 by itself.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, ZImagePipeline, ZImageTransformer2DModel
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.models.base import PromptEmbeds, PromptTokens
from flowgrpo_fast.models.pipeline import PipelineAdapter, decode_kl, encode_kl, padded_tokens

PATCH = 2


class ZImageAdapter(PipelineAdapter):
    family = "z_image"
    pipeline_class = ZImagePipeline
    transformer_class = ZImageTransformer2DModel
    vae_class = AutoencoderKL
    lora_target_modules: ClassVar[list[str]] = [
        "attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3",
    ]  # fmt: skip

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(path, device, dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(path / "tokenizer")
        self.tokenizer.padding_side = "right"
        self.vae_scale = 2 ** (len(self.vae_config["block_out_channels"]) - 1)

    @property
    def text_width(self) -> int:
        return int(self.transformer_config["cap_feat_dim"])

    @cached_property
    def text_encoder(self) -> Any:
        return self.component(AutoModel, "text_encoder", dtype=self.dtype)

    def latent_shape(self, size: MediaSize) -> tuple[int, ...]:
        self.require_multiple(size, self.vae_scale * PATCH)
        return self.transformer_config["in_channels"], size.height // self.vae_scale, size.width // self.vae_scale

    def image_tokens(self, size: MediaSize) -> int:
        _, height, width = self.latent_shape(size)
        return (height // PATCH) * (width // PATCH)

    def smallest_size(self) -> MediaSize:
        return MediaSize(2 * self.vae_scale * PATCH, 2 * self.vae_scale * PATCH)

    def tokenize(self, prompts: list[str], max_length: int) -> PromptTokens:
        """max_length counts the chat's own tokens too, as in the pipeline."""
        chats = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=True
            )
            for prompt in prompts
        ]
        return padded_tokens(self.tokenizer, chats, prompts, max_length)

    @torch.no_grad()
    def encode(self, tokens: PromptTokens) -> PromptEmbeds:
        ids, mask = tokens.input_ids.to(self.device), tokens.mask.to(self.device)
        hidden = self.text_encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states[-2]
        return PromptEmbeds(hidden * mask[..., None], tuple(int(n) for n in tokens.mask.sum(1)))

    def predict(self, transformer: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return -torch.stack(super().predict(transformer, inputs))[:, :, 0]  # type: ignore[arg-type]

    def network_inputs(
        self, x: Tensor, sigma: Tensor, prompt: PromptEmbeds, guidance_scale: float, size: MediaSize
    ) -> dict[str, Any]:
        texts = [row[:length].to(self.dtype) for row, length in zip(prompt.embeds, prompt.lengths, strict=True)]
        return {"x": list(x.to(self.dtype)[:, :, None]), "t": 1 - sigma, "cap_feats": texts}

    @torch.no_grad()
    def encode_images(self, images: Tensor, size: MediaSize) -> Tensor:
        return encode_kl(self.vae, images.to(self.device))

    @torch.no_grad()
    def decode(self, latents: Tensor, size: MediaSize) -> Tensor:
        return decode_kl(self.vae, latents)
