"""FLUX.1-dev: 2x2-packed latents, CLIP's pooled vector and a T5, guidance as an input of the network (no second branch)."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from torch import Tensor
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.models.base import PromptEmbeds, PromptTokens
from flowgrpo_fast.models.clip_t5 import CLIP_TOKENS, all_tokens, clip_ids, t5_ids
from flowgrpo_fast.models.pipeline import PipelineAdapter, decode_kl, encode_kl

PATCH = 2


class FluxAdapter(PipelineAdapter):
    family = "flux"
    pipeline_class = FluxPipeline
    transformer_class = FluxTransformer2DModel
    vae_class = AutoencoderKL
    guidance = "embedded"
    lora_target_modules: ClassVar[list[str]] = [
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    ]  # fmt: skip

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(path, device, dtype)
        self.clip, self.t5 = (AutoTokenizer.from_pretrained(path / name) for name in ("tokenizer", "tokenizer_2"))
        self.vae_scale = 2 ** (len(self.vae_config["block_out_channels"]) - 1)
        self.pooled_width = self.transformer_config["pooled_projection_dim"]

    @cached_property
    def clip_encoder(self) -> CLIPTextModel:
        encoder: CLIPTextModel = self.component(CLIPTextModel, "text_encoder", dtype=self.dtype)
        return encoder

    @cached_property
    def t5_encoder(self) -> T5EncoderModel:
        encoder: T5EncoderModel = self.component(T5EncoderModel, "text_encoder_2", dtype=self.dtype)
        return encoder

    def latent_shape(self, size: MediaSize) -> tuple[int, ...]:
        unit = self.vae_scale * PATCH
        self.require_multiple(size, unit)
        return (size.height // unit) * (size.width // unit), self.transformer_config["in_channels"]

    def smallest_size(self) -> MediaSize:
        return MediaSize(2 * self.vae_scale * PATCH, 2 * self.vae_scale * PATCH)

    def tokenize(self, prompts: list[str], max_length: int) -> PromptTokens:
        return PromptTokens(*all_tokens(clip_ids(self.clip, prompts), t5_ids(self.t5, prompts, max_length)))

    @torch.no_grad()
    def encode(self, tokens: PromptTokens) -> PromptEmbeds:
        ids = tokens.input_ids.to(self.device)
        pooled = self.clip_encoder(ids[:, :CLIP_TOKENS]).pooler_output
        embeds = self.t5_encoder(ids[:, CLIP_TOKENS:])[0]
        return PromptEmbeds(embeds, (embeds.shape[1],) * len(ids), pooled)

    def network_inputs(
        self, x: Tensor, sigma: Tensor, prompt: PromptEmbeds, guidance_scale: float, size: MediaSize
    ) -> dict[str, Any]:
        assert prompt.pooled is not None
        unit, device = self.vae_scale * PATCH, x.device
        guided = self.transformer_config["guidance_embeds"]
        return {
            "hidden_states": x.to(self.dtype),
            "timestep": sigma,
            "guidance": torch.full((len(x),), guidance_scale, device=device) if guided else None,
            "encoder_hidden_states": prompt.embeds.to(self.dtype),
            "pooled_projections": prompt.pooled.to(self.dtype),
            "txt_ids": torch.zeros(prompt.embeds.shape[1], 3, device=device, dtype=self.dtype),
            "img_ids": FluxPipeline._prepare_latent_image_ids(
                len(x), size.height // unit, size.width // unit, device, self.dtype
            ),
        }

    @torch.no_grad()
    def encode_images(self, images: Tensor, size: MediaSize) -> Tensor:
        z = encode_kl(self.vae, images.to(self.device))
        return FluxPipeline._pack_latents(z, *z.shape)

    @torch.no_grad()
    def decode(self, latents: Tensor, size: MediaSize) -> Tensor:
        return decode_kl(self.vae, FluxPipeline._unpack_latents(latents, size.height, size.width, self.vae_scale))
