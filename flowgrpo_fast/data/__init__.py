"""Prompts, and which of them each iteration trains on."""

from flowgrpo_fast.data.prompts import PromptFileError, PromptRecord, load_prompts
from flowgrpo_fast.data.sampler import GroupSampler, rank_slice

__all__ = ["GroupSampler", "PromptFileError", "PromptRecord", "load_prompts", "rank_slice"]
