"""Stable Diffusion 3 and 3.5 (medium, large): 16-channel latents, two CLIPs and a T5, plain CFG.

diffusers' pipeline shifts its schedule twice (diffusers #13243), and so did flow_grpo's recipes: `rollout.sigmas.kind: double_shift`. `pipeline` shifts once.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor
from transformers import AutoTokenizer, CLIPTextModelWithProjection, T5EncoderModel

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.models.base import PromptEmbeds, PromptTokens
from flowgrpo_fast.models.clip_t5 import CLIP_TOKENS, all_tokens, clip_ids, t5_ids
from flowgrpo_fast.models.pipeline import PipelineAdapter, decode_kl, encode_kl


class SD3Adapter(PipelineAdapter):
    family = "sd3"
    pipeline_class = StableDiffusion3Pipeline
    transformer_class = SD3Transformer2DModel
    vae_class = AutoencoderKL
    # flow_grpo's: the attention of both streams.
    lora_target_modules: ClassVar[list[str]] = [
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    ]  # fmt: skip

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(path, device, dtype)
        names = ("tokenizer", "tokenizer_2", "tokenizer_3")
        self.clip_l, self.clip_g, self.t5 = (AutoTokenizer.from_pretrained(path / name) for name in names)
        self.vae_scale = 2 ** (len(self.vae_config["block_out_channels"]) - 1)
        self.pooled_width = self.transformer_config["pooled_projection_dim"]

    @cached_property
    def clip_encoders(self) -> list[CLIPTextModelWithProjection]:
        return [
            self.component(CLIPTextModelWithProjection, n, dtype=self.dtype) for n in ("text_encoder", "text_encoder_2")
        ]

    @cached_property
    def t5_encoder(self) -> T5EncoderModel:
        encoder: T5EncoderModel = self.component(T5EncoderModel, "text_encoder_3", dtype=self.dtype)
        return encoder

    def latent_shape(self, size: MediaSize) -> tuple[int, ...]:
        self.require_multiple(size, self.vae_scale * self.transformer_config["patch_size"])
        return self.transformer_config["in_channels"], size.height // self.vae_scale, size.width // self.vae_scale

    def smallest_size(self) -> MediaSize:
        side = 2 * self.vae_scale * self.transformer_config["patch_size"]
        return MediaSize(side, side)

    def tokenize(self, prompts: list[str], max_length: int) -> PromptTokens:
        ids = [clip_ids(self.clip_l, prompts), clip_ids(self.clip_g, prompts), t5_ids(self.t5, prompts, max_length)]
        return PromptTokens(*all_tokens(*ids))

    @torch.no_grad()
    def encode(self, tokens: PromptTokens) -> PromptEmbeds:
        """[P, 77 + max_length, E]: both CLIPs side by side, padded to T5's width, then T5's; pooled: both CLIPs' projections."""
        ids = tokens.input_ids.to(self.device)
        of_clip, of_t5 = ids[:, : 2 * CLIP_TOKENS].split(CLIP_TOKENS, 1), ids[:, 2 * CLIP_TOKENS :]
        outputs = [
            encoder(part, output_hidden_states=True) for encoder, part in zip(self.clip_encoders, of_clip, strict=True)
        ]
        clip = torch.cat([out.hidden_states[-2] for out in outputs], -1)
        t5 = self.t5_encoder(of_t5)[0]
        embeds = torch.cat([F.pad(clip, (0, t5.shape[-1] - clip.shape[-1])), t5], 1)
        pooled = torch.cat([out.text_embeds for out in outputs], -1)
        return PromptEmbeds(embeds, (embeds.shape[1],) * len(ids), pooled)

    def network_inputs(
        self, x: Tensor, sigma: Tensor, prompt: PromptEmbeds, guidance_scale: float, size: MediaSize
    ) -> dict[str, Any]:
        assert prompt.pooled is not None
        return {
            "hidden_states": x.to(self.dtype),
            "timestep": sigma * 1000,
            "encoder_hidden_states": prompt.embeds.to(self.dtype),
            "pooled_projections": prompt.pooled.to(self.dtype),
        }

    @torch.no_grad()
    def encode_images(self, images: Tensor, size: MediaSize) -> Tensor:
        return encode_kl(self.vae, images.to(self.device))

    @torch.no_grad()
    def decode(self, latents: Tensor, size: MediaSize) -> Tensor:
        return decode_kl(self.vae, latents)
