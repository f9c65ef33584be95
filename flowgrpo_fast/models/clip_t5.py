"""Prompts for CLIP and T5 encoders: fixed lengths, no attention mask, as Stable Diffusion 3 and FLUX were trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.models.pipeline import too_long

CLIP_TOKENS = 77


def clip_ids(tokenizer: Any, prompts: list[str]) -> Tensor:
    """int64 [P, 77]. Cut there, as in the pipelines: CLIP reads no more, and T5 has the whole prompt."""
    ids: Tensor = tokenizer(
        prompts, padding="max_length", max_length=CLIP_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
    return ids


def t5_ids(tokenizer: Any, prompts: list[str], max_length: int) -> Tensor:
    """int64 [P, max_length]. ValueError for a prompt that does not fit: nothing is cut."""
    rows = tokenizer(prompts).input_ids
    for prompt, row in zip(prompts, rows, strict=True):
        if len(row) > max_length:
            raise too_long(prompt, len(row), max_length)
    ids: Tensor = tokenizer(prompts, padding="max_length", max_length=max_length, return_tensors="pt").input_ids
    return ids


def all_tokens(*ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids of several tokenizers, one after another, and a mask that hides none."""
    joined = torch.cat(ids, 1)
    return joined, torch.ones_like(joined, dtype=torch.bool)
