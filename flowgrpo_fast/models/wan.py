"""Wan 2.1 and Wan 2.2 TI2V-5B, text to video: [C, F', H', W'] latents, UMT5, plain CFG.

Sampled and trained with Euler steps over the checkpoint's flow shift. diffusers' default for Wan is UniPC, which truncates timesteps to integers; it is another sampler.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.config import ConfigError, SigmasConfig
from flowgrpo_fast.models.base import PromptEmbeds, PromptTokens
from flowgrpo_fast.models.pipeline import PipelineAdapter, from_uint8, latent_statistics, to_uint8, too_long
from flowgrpo_fast.schedule import make_sigmas


class WanAdapter(PipelineAdapter):
    family = "wan"
    pipeline_class = WanPipeline
    transformer_class = WanTransformer3DModel
    vae_class = AutoencoderKLWan
    lora_target_modules: ClassVar[list[str]] = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(path, device, dtype)
        index = json.loads((path / "model_index.json").read_text())
        if index.get("boundary_ratio") is not None:
            raise ConfigError(
                f"model.path: {path} has two transformers (boundary_ratio {index['boundary_ratio']}, Wan 2.2 A14B), and one is trained here;"
                " use Wan 2.1 or Wan 2.2 TI2V-5B"
            )
        self.timestep_per_token = bool(index.get("expand_timesteps"))
        self.tokenizer = AutoTokenizer.from_pretrained(path / "tokenizer")
        self.vae_scale = self.vae_config.get("scale_factor_spatial", 8)
        self.frame_scale = self.vae_config.get("scale_factor_temporal", 4)

    @property
    def text_width(self) -> int:
        return int(self.transformer_config["text_dim"])

    @cached_property
    def text_encoder(self) -> UMT5EncoderModel:
        encoder: UMT5EncoderModel = self.component(UMT5EncoderModel, "text_encoder", dtype=self.dtype)
        return encoder

    def sigmas(self, num_steps: int, size: MediaSize, config: SigmasConfig) -> Tensor:
        """kind `pipeline`: the checkpoint's flow_shift (UniPC's name for it), once."""
        if config.kind == "pipeline":
            s = self.scheduler
            return make_sigmas(num_steps, "single_shift", shift=s.get("flow_shift", s.get("shift", 1.0)))
        return super().sigmas(num_steps, size, config)

    def latent_shape(self, size: MediaSize) -> tuple[int, ...]:
        _, height, width = self.transformer_config["patch_size"]
        self.require_multiple(size, self.vae_scale * max(height, width))
        if (size.frames - 1) % self.frame_scale:
            raise ValueError(
                f"rollout.frames = {size.frames}: one more than a multiple of {self.frame_scale} for {self.family}"
            )
        frames = (size.frames - 1) // self.frame_scale + 1
        return (
            self.transformer_config["in_channels"],
            frames,
            size.height // self.vae_scale,
            size.width // self.vae_scale,
        )

    def smallest_size(self) -> MediaSize:
        side = 2 * self.vae_scale * self.transformer_config["patch_size"][1]
        return MediaSize(side, side, 1 + self.frame_scale)

    def tokenize(self, prompts: list[str], max_length: int) -> PromptTokens:
        prompts = [prompt_clean(prompt) for prompt in prompts]
        for prompt, ids in zip(prompts, self.tokenizer(prompts).input_ids, strict=True):
            if len(ids) > max_length:
                raise too_long(prompt, len(ids), max_length)
        tokens = self.tokenizer(prompts, padding="max_length", max_length=max_length, return_tensors="pt")
        return PromptTokens(tokens.input_ids, tokens.attention_mask.bool())

    @torch.no_grad()
    def encode(self, tokens: PromptTokens) -> PromptEmbeds:
        """[P, max_length, E], zero past the prompt: the network was trained without a mask."""
        ids, mask = tokens.input_ids.to(self.device), tokens.mask.to(self.device)
        hidden = self.text_encoder(ids, mask.long()).last_hidden_state
        return PromptEmbeds(hidden * mask[..., None], (hidden.shape[1],) * len(ids))

    def network_inputs(
        self, x: Tensor, sigma: Tensor, prompt: PromptEmbeds, guidance_scale: float, size: MediaSize
    ) -> dict[str, Any]:
        timestep = sigma * 1000
        if self.timestep_per_token:
            frames, height, width = (
                n // p for n, p in zip(x.shape[2:], self.transformer_config["patch_size"], strict=True)
            )
            timestep = timestep[:, None].expand(-1, frames * height * width)
        return {
            "hidden_states": x.to(self.dtype),
            "timestep": timestep,
            "encoder_hidden_states": prompt.embeds.to(self.dtype),
        }

    @torch.no_grad()
    def encode_images(self, images: Tensor, size: MediaSize) -> Tensor:
        """Each as a video of one frame."""
        pixels = from_uint8(images.to(self.device))[:, :, None].to(self.vae.dtype)
        mean, std = latent_statistics(self.vae, self.device)
        return (self.vae.encode(pixels).latent_dist.mode().float() - mean) / std

    @torch.no_grad()
    def decode(self, latents: Tensor, size: MediaSize) -> Tensor:
        mean, std = latent_statistics(self.vae, latents.device)
        video = self.vae.decode((latents * std + mean).to(self.vae.dtype), return_dict=False)[0]
        return to_uint8(video.transpose(1, 2))
