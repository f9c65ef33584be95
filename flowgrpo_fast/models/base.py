"""The adapter protocol: the only place that knows a model family. Everything above speaks latents, sigmas and prompt embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.config import SigmasConfig

Guidance = Literal["negative", "embedded"]
"""What guidance_scale is: the weight of a branch with the prompt against one with a negative prompt, or an input of the network."""


@dataclass(frozen=True)
class PromptTokens:
    """Template and prompt, right-padded: input_ids int64 [P, L], mask bool [P, L]. A family with several tokenizers has their ids one after another.
    images uint8 [P, M, 3, H, W]: what is to be edited, for families that do."""

    input_ids: Tensor
    mask: Tensor
    images: Tensor | None = None


@dataclass(frozen=True)
class PromptEmbeds:
    """One row per prompt, right-padded: embeds [P, L, E]; the text lengths on the host, so that no forward waits for the device
    to learn whether it needs a mask; pooled [P, E'] where the family has it; image_latents fp32 [P, N, C]: tokens of the images to be edited."""

    embeds: Tensor
    lengths: tuple[int, ...]
    pooled: Tensor | None = None
    image_latents: Tensor | None = None

    def rows(self, index: Sequence[int]) -> PromptEmbeds:
        """Rows `index`, trimmed to their longest text: the length that they had in a forward of their own."""
        at = torch.tensor(index, device=self.embeds.device)
        lengths = tuple(self.lengths[i] for i in index)
        pooled = None if self.pooled is None else self.pooled[at]
        image_latents = None if self.image_latents is None else self.image_latents[at]
        return PromptEmbeds(self.embeds[at, : max(lengths)], lengths, pooled, image_latents)

    def padded(self, multiple: int) -> PromptEmbeds:
        """Padded to a length that divides by `multiple`: sequence-parallel ranks hold equal parts of the text."""
        missing = -self.embeds.shape[1] % multiple
        return self if missing == 0 else replace(self, embeds=F.pad(self.embeds, (0, 0, 0, missing)))

    def repeated(self, times: int) -> PromptEmbeds:
        """A single row for `times` samples, without a copy."""
        pooled = None if self.pooled is None else self.pooled.expand(times, -1)
        image_latents = None if self.image_latents is None else self.image_latents.expand(times, -1, -1)
        return PromptEmbeds(self.embeds.expand(times, -1, -1), self.lengths * times, pooled, image_latents)

    def mask(self) -> Tensor:
        """bool [P, L], True at text."""
        lengths = torch.tensor(self.lengths, device=self.embeds.device)
        return torch.arange(self.embeds.shape[1], device=self.embeds.device) < lengths[:, None]

    def attention_mask(self) -> Tensor | None:
        """As the pipelines: None where nothing is padded. On CUDA a mask disables flash attention."""
        return None if min(self.lengths) == self.embeds.shape[1] else self.mask()


def join_branches(positive: PromptEmbeds, negative: PromptEmbeds) -> PromptEmbeds:
    """Both CFG branches for one forward: [2B, L, E], positive first, padded to the longer text. Both edit the same image."""
    length = max(positive.embeds.shape[1], negative.embeds.shape[1])
    embeds = [F.pad(e, (0, 0, 0, length - e.shape[1])) for e in (positive.embeds, negative.embeds)]
    pooled = (
        None if positive.pooled is None or negative.pooled is None else torch.cat([positive.pooled, negative.pooled])
    )
    image = positive.image_latents
    return PromptEmbeds(
        torch.cat(embeds),
        positive.lengths + negative.lengths,
        pooled,
        None if image is None else torch.cat([image, image]),
    )


class ModelAdapter(Protocol):
    """Between a diffusers pipeline folder and the trainer. Holds tokenizer, text encoder, VAE and scheduler settings; not the transformer."""

    family: ClassVar[str]
    pipeline_class: ClassVar[Any]
    """diffusers' pipeline: exports are in its formats."""
    guidance: ClassVar[Guidance]
    max_source_images: ClassVar[int]
    """Images beside a prompt, for families that edit; else 0."""
    path: Path
    device: torch.device
    dtype: torch.dtype
    lora_target_modules: ClassVar[list[str]]

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None: ...

    @property
    def text_width(self) -> int:
        """E of the prompt embeddings."""
        ...

    @property
    def pooled_width(self) -> int | None:
        """E' of the pooled ones; None where the family has none."""
        ...

    @classmethod
    def needs_negative(cls, guidance_scale: float) -> bool:
        """Does this scale take a second branch, of a negative prompt?"""
        ...

    @property
    def transformer_folder(self) -> Path:
        """config.json and safetensors of the trainable network."""
        ...

    def load_transformer(self) -> nn.Module:
        """The trainable network in `dtype` on `device`."""
        ...

    def build_transformer(self) -> nn.Module:
        """The same network from its config alone, for a caller that decides where parameters live and fills them."""
        ...

    def latent_shape(self, size: MediaSize) -> tuple[int, ...]:
        """Shape of one sample's latents. ValueError where the size does not fit the VAE and patches."""
        ...

    def smallest_size(self) -> MediaSize:
        """Of a small image or video that the network takes: for probes of the weights."""
        ...

    def sigmas(self, num_steps: int, size: MediaSize, config: SigmasConfig) -> Tensor:
        """fp32 [T+1], last 0."""
        ...

    def tokenize(self, prompts: list[str], max_length: int) -> PromptTokens:
        """Fast tokenizer; call it from one thread only. ValueError for a prompt over max_length tokens: nothing is cut."""
        ...

    def encode(self, tokens: PromptTokens) -> PromptEmbeds: ...

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
        """v of x [B, ...] at sigma fp32 [B]; with `negative`, both CFG branches in one forward."""
        ...

    def encode_images(self, images: Tensor, size: MediaSize) -> Tensor:
        """uint8 [B, 3, H, W] of this size -> latents fp32 [B, ...]: what `decode` takes. The mode of the VAE's distribution."""
        ...

    def encode_sources(self, images: Tensor) -> Tensor:
        """uint8 [P, M, 3, H, W], images to be edited -> their tokens fp32 [P, M N, C]. Only of families that edit."""
        ...

    def decode(self, latents: Tensor, size: MediaSize) -> Tensor:
        """[B, ...] fp32 -> uint8 [B, 3, H, W], of a video family [B, F, 3, H, W]."""
        ...


def encode_positive(adapter: ModelAdapter, tokens: PromptTokens) -> PromptEmbeds:
    """Prompts and the images that they edit. (A negative prompt needs the text alone: both branches edit the same image.)"""
    text = adapter.encode(tokens)
    return text if tokens.images is None else replace(text, image_latents=adapter.encode_sources(tokens.images))
