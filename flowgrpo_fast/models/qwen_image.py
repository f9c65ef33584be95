"""Qwen-Image: 2x2-packed latents, a fixed prompt template, true CFG with per-token norm rescale."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from flowgrpo_fast.config import ConfigError, SigmasConfig
from flowgrpo_fast.models.base import PromptEmbeds, PromptTokens, join_branches
from flowgrpo_fast.models.image_vae import decode_single_frames
from flowgrpo_fast.ops import cfg_combine
from flowgrpo_fast.schedule import dynamic_mu, make_sigmas

# Qwen-Image's own template; the first 34 tokens (everything before the prompt) are dropped after encoding.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships"
    " of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_DROP = 34
PATCH = 2


class QwenImageAdapter:
    family = "qwen_image"
    pipeline_class: ClassVar[Any] = QwenImagePipeline
    lora_target_modules: ClassVar[list[str]] = [
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
        "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
    ]  # fmt: skip

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.path, self.device, self.dtype = path, device, dtype
        self.tokenizer = Qwen2Tokenizer.from_pretrained(path / "tokenizer")
        self.tokenizer.padding_side = "right"
        self.scheduler = json.loads((path / "scheduler" / "scheduler_config.json").read_text())
        self.vae_config = json.loads((path / "vae" / "config.json").read_text())
        self.vae_scale = 2 ** len(self.vae_config["temperal_downsample"])
        head = self.tokenizer(TEMPLATE.partition("{}")[0]).input_ids
        if len(head) != TEMPLATE_DROP:
            raise ConfigError(
                f"model.path: the tokenizer of {path} gives {len(head)} tokens for Qwen-Image's template, the model drops {TEMPLATE_DROP};"
                " this is not Qwen-Image's tokenizer"
            )

    # Loaded at first use: a dry run needs neither.
    @cached_property
    def text_encoder(self) -> Qwen2_5_VLForConditionalGeneration:
        encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(self.path / "text_encoder", dtype=self.dtype)
        return encoder.to(self.device).eval().requires_grad_(False)

    @cached_property
    def vae(self) -> AutoencoderKLQwenImage:
        vae = AutoencoderKLQwenImage.from_pretrained(self.path / "vae", torch_dtype=self.dtype)
        return decode_single_frames(vae).to(self.device).eval().requires_grad_(False)

    @property
    def transformer_folder(self) -> Path:
        return self.path / "transformer"

    def load_transformer(self) -> nn.Module:
        model = QwenImageTransformer2DModel.from_pretrained(self.transformer_folder, torch_dtype=self.dtype)
        return model.to(self.device)

    def build_transformer(self) -> nn.Module:
        return QwenImageTransformer2DModel.from_config(QwenImageTransformer2DModel.load_config(self.transformer_folder))

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        unit = self.vae_scale * PATCH
        if height % unit or width % unit:
            raise ValueError(
                f"rollout.height x width = {height} x {width}: both must divide by {unit} for {self.family}"
            )
        return (height // unit) * (width // unit), self.vae_config["z_dim"] * PATCH**2

    def smallest_size(self) -> tuple[int, int]:
        return (2 * self.vae_scale * PATCH,) * 2

    @cached_property
    def text_width(self) -> int:
        config = json.loads((self.path / "transformer" / "config.json").read_text())
        return int(config["joint_attention_dim"])

    def sigmas(self, num_steps: int, height: int, width: int, config: SigmasConfig) -> Tensor:
        if config.kind != "pipeline":
            return make_sigmas(
                num_steps, config.kind, shift=config.shift, mu=config.mu, shift_terminal=config.shift_terminal
            )
        s = self.scheduler
        mu = dynamic_mu(
            self.latent_shape(height, width)[0],
            s.get("base_image_seq_len", 256),
            s.get("max_image_seq_len", 4096),
            s.get("base_shift", 0.5),
            s.get("max_shift", 1.15),
        )
        return make_sigmas(num_steps, "dynamic_shift", mu=mu, shift_terminal=s.get("shift_terminal"))

    def tokenize(self, prompts: list[str], max_length: int) -> PromptTokens:
        tokens = self.tokenizer([TEMPLATE.format(p) for p in prompts], padding=True, return_tensors="pt")
        lengths = tokens.attention_mask.sum(1) - TEMPLATE_DROP
        if int(lengths.max()) > max_length:
            row = int(lengths.argmax())
            raise ValueError(
                f"prompt of {int(lengths[row])} tokens is over rollout.max_sequence_length {max_length}: {prompts[row][:80]!r}; shorten it or raise the limit"
            )
        return PromptTokens(tokens.input_ids, tokens.attention_mask.bool())

    @torch.no_grad()
    def encode(self, tokens: PromptTokens) -> PromptEmbeds:
        ids, mask = tokens.input_ids.to(self.device), tokens.mask.to(self.device)
        # The inner model's last hidden state is what the pipeline reads as hidden_states[-1], without the vocabulary projection.
        hidden = self.text_encoder.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        lengths = tuple(int(n) - TEMPLATE_DROP for n in tokens.mask.sum(1))
        return PromptEmbeds(hidden[:, TEMPLATE_DROP:] * mask[:, TEMPLATE_DROP:, None], lengths)

    def velocity(
        self,
        transformer: nn.Module,
        x: Tensor,
        sigma: Tensor,
        positive: PromptEmbeds,
        negative: PromptEmbeds | None,
        guidance_scale: float,
        height: int,
        width: int,
    ) -> Tensor:
        prompt = positive
        if negative is not None:
            x, sigma, prompt = torch.cat([x, x]), torch.cat([sigma, sigma]), join_branches(positive, negative)
        v = transformer(**self.network_inputs(x, sigma, prompt, height, width))[0]
        if negative is None:
            return v
        v_pos, v_neg = v.chunk(2)
        return cfg_combine(v_pos, v_neg, guidance_scale, rescale=True)

    def network_inputs(self, x: Tensor, sigma: Tensor, prompt: PromptEmbeds, height: int, width: int) -> dict[str, Any]:
        """Keyword arguments of the transformer for rows [N, ...]."""
        unit = self.vae_scale * PATCH
        return {
            "hidden_states": x.to(self.dtype),
            # sigma itself, fp32: times 1000 and back is off by an ulp, which AdaLN amplifies. The network casts it to its own dtype,
            # as it did when it was pretrained.
            "timestep": sigma,
            "encoder_hidden_states": prompt.embeds.to(self.dtype),
            "encoder_hidden_states_mask": prompt.attention_mask(),
            "img_shapes": [[(1, height // unit, width // unit)]] * x.shape[0],
            "return_dict": False,
        }

    @torch.no_grad()
    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        z = QwenImagePipeline._unpack_latents(latents, height, width, self.vae_scale)
        mean = torch.tensor(self.vae.config.latents_mean, device=z.device).view(1, -1, 1, 1, 1)
        std = torch.tensor(self.vae.config.latents_std, device=z.device).view(1, -1, 1, 1, 1)
        pixels = self.vae.decode((z * std + mean).to(self.vae.dtype), return_dict=False)[0][:, :, 0]
        # oneDNN hands over channels-last pixels.
        return ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).contiguous()
