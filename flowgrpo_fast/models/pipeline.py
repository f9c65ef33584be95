"""What the families share: the folder of a diffusers pipeline, its schedule, both branches of guidance in one forward."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.config import SigmasConfig
from flowgrpo_fast.models.base import Guidance, PromptEmbeds, PromptTokens, join_branches
from flowgrpo_fast.ops import cfg_combine
from flowgrpo_fast.schedule import dynamic_mu, make_sigmas


class PipelineAdapter(ABC):
    """Subclasses say what is special about a family; `ModelAdapter` is what they offer. Components are loaded at first use: a dry run needs none."""

    family: ClassVar[str]
    pipeline_class: ClassVar[Any]
    transformer_class: ClassVar[Any]
    vae_class: ClassVar[Any]
    lora_target_modules: ClassVar[list[str]]
    guidance: ClassVar[Guidance] = "negative"
    rescales: ClassVar[bool] = False
    """Guidance keeps the norm of each token of the branch with the prompt."""
    max_source_images: ClassVar[int] = 0
    pooled_width: int | None = None

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.path, self.device, self.dtype = path, device, dtype
        self.scheduler = self.component_config("scheduler", "scheduler_config.json")
        self.vae_config = self.component_config("vae")
        self.transformer_config = self.component_config("transformer")

    def component_config(self, component: str, file: str = "config.json") -> dict[str, Any]:
        return dict(json.loads((self.path / component / file).read_text()))

    def component(self, component_class: Any, name: str, **options: Any) -> Any:
        """A frozen part of the pipeline, in the adapter's dtype on its device."""
        loaded = component_class.from_pretrained(self.path / name, **options)
        return loaded.to(self.device).eval().requires_grad_(False)

    @cached_property
    def vae(self) -> Any:
        return self.component(self.vae_class, "vae", torch_dtype=self.dtype)

    @classmethod
    def needs_negative(cls, guidance_scale: float) -> bool:
        return cls.guidance == "negative" and guidance_scale > 1

    @property
    def text_width(self) -> int:
        return int(self.transformer_config["joint_attention_dim"])

    @property
    def transformer_folder(self) -> Path:
        return self.path / "transformer"

    def load_transformer(self) -> nn.Module:
        model = self.transformer_class.from_pretrained(self.transformer_folder, torch_dtype=self.dtype)
        network: nn.Module = model.to(self.device)
        return network

    def build_transformer(self) -> nn.Module:
        config = self.transformer_class.load_config(self.transformer_folder)
        network: nn.Module = self.transformer_class.from_config(config)
        return network

    def sigmas(self, num_steps: int, size: MediaSize, config: SigmasConfig) -> Tensor:
        """kind `pipeline`: linspace(1, 1/T, T) through the shift of the checkpoint's scheduler, once."""
        if config.kind != "pipeline":
            return make_sigmas(
                num_steps, config.kind, shift=config.shift, mu=config.mu, shift_terminal=config.shift_terminal
            )
        s = self.scheduler
        if not s.get("use_dynamic_shifting"):
            return make_sigmas(
                num_steps, "single_shift", shift=s.get("shift", 1.0), shift_terminal=s.get("shift_terminal")
            )
        mu = dynamic_mu(
            self.image_tokens(size),
            s.get("base_image_seq_len", 256),
            s.get("max_image_seq_len", 4096),
            s.get("base_shift", 0.5),
            s.get("max_shift", 1.15),
        )
        return make_sigmas(num_steps, "dynamic_shift", mu=mu, shift_terminal=s.get("shift_terminal"))

    def image_tokens(self, size: MediaSize) -> int:
        """Of the network: what the dynamic shift depends on."""
        return self.latent_shape(size)[0]

    def require_multiple(self, size: MediaSize, unit: int) -> None:
        if size.height % unit or size.width % unit:
            raise ValueError(
                f"rollout.height x width = {size.height} x {size.width}: both must divide by {unit} for {self.family}"
            )

    def velocity(
        self,
        transformer: nn.Module,
        x: Tensor,
        sigma: Tensor,
        positive: PromptEmbeds,
        negative: PromptEmbeds | None,
        guidance_scale: float,
        size: MediaSize,
    ) -> Tensor:
        prompt = positive
        if negative is not None:
            x, sigma, prompt = torch.cat([x, x]), torch.cat([sigma, sigma]), join_branches(positive, negative)
        inputs = self.network_inputs(x, sigma, prompt, guidance_scale, size)
        if prompt.image_latents is not None:
            # The tokens of images to be edited follow those of x.
            inputs["hidden_states"] = torch.cat([inputs["hidden_states"], prompt.image_latents.to(self.dtype)], 1)
        v = self.predict(transformer, inputs)[:, : x.shape[1]]
        if negative is None:
            return v
        v_pos, v_neg = v.chunk(2)
        return cfg_combine(v_pos, v_neg, guidance_scale, rescale=self.rescales)

    def encode_sources(self, images: Tensor) -> Tensor:
        """uint8 [P, M, 3, H, W] -> fp32 [P, M N, C]: tokens of images to be edited."""
        latents = self.encode_images(images.flatten(0, 1), MediaSize(*images.shape[3:]))
        return latents.unflatten(0, images.shape[:2]).flatten(1, 2).contiguous()

    def predict(self, transformer: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The network's velocity of all rows."""
        v: Tensor = transformer(**inputs, return_dict=False)[0]
        return v

    @abstractmethod
    def network_inputs(
        self, x: Tensor, sigma: Tensor, prompt: PromptEmbeds, guidance_scale: float, size: MediaSize
    ) -> dict[str, Any]:
        """Keyword arguments of the transformer for rows [N, ...]. `velocity` adds the tokens of images to be edited to hidden_states."""

    @abstractmethod
    def latent_shape(self, size: MediaSize) -> tuple[int, ...]: ...

    @abstractmethod
    def smallest_size(self) -> MediaSize: ...

    @abstractmethod
    def tokenize(self, prompts: list[str], max_length: int) -> PromptTokens: ...

    @abstractmethod
    def encode(self, tokens: PromptTokens) -> PromptEmbeds: ...

    @abstractmethod
    def encode_images(self, images: Tensor, size: MediaSize) -> Tensor: ...

    @abstractmethod
    def decode(self, latents: Tensor, size: MediaSize) -> Tensor: ...


def too_long(prompt: str, tokens: int, max_length: int) -> ValueError:
    return ValueError(
        f"prompt of {tokens} tokens is over rollout.max_sequence_length {max_length}: {prompt[:80]!r}; shorten it or raise the limit"
    )


def padded_tokens(
    tokenizer: Any, texts: list[str], prompts: list[str], max_length: int, uncounted: int = 0
) -> PromptTokens:
    """Right-padded ids of texts, the prompts in their templates. ValueError where one has over max_length tokens beside the `uncounted` ones."""
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    lengths = tokens.attention_mask.sum(1) - uncounted
    if int(lengths.max()) > max_length:
        row = int(lengths.argmax())
        raise too_long(prompts[row], int(lengths[row]), max_length)
    return PromptTokens(tokens.input_ids, tokens.attention_mask.bool())


def encode_kl(vae: Any, images: Tensor) -> Tensor:
    """uint8 [B, 3, H, W] -> latents fp32 [B, C, h, w] of an AutoencoderKL: the mode, shifted and scaled as the network knows them."""
    z = vae.encode(from_uint8(images).to(vae.dtype)).latent_dist.mode().float()
    scaled: Tensor = (z - vae.config.shift_factor) * vae.config.scaling_factor
    return scaled


def decode_kl(vae: Any, latents: Tensor) -> Tensor:
    """The way back, to uint8 [B, 3, H, W]."""
    z = latents / vae.config.scaling_factor + vae.config.shift_factor
    return to_uint8(vae.decode(z.to(vae.dtype), return_dict=False)[0])


def latent_statistics(vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the channels of a Qwen-Image or Wan VAE, [1, C, 1, 1, 1]."""
    mean, std = (torch.tensor(v, device=device) for v in (vae.config.latents_mean, vae.config.latents_std))
    return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)


def from_uint8(images: Tensor) -> Tensor:
    """uint8 -> fp32 in [-1, 1]."""
    return images.float() / 127.5 - 1


def to_uint8(pixels: Tensor) -> Tensor:
    """[-1, 1] -> uint8, as diffusers' image processor rounds."""
    # oneDNN hands over channels-last pixels.
    return ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).contiguous()
