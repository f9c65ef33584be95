"""The built-in prompts: every pair of 31 characters, split into train and validation. Imports nothing of ours."""

from __future__ import annotations

import random
from typing import Literal

# Without I, O, Q, 0 and 1, which no OCR can tell apart on their own.
ALPHABET = "ABCDEFGHJKLMNPRSTUVWXYZ23456789"
VALIDATION_SIZE = 128
Split = Literal["train", "validation"]


def glyph_prompt(text: str) -> str:
    """The prompt that asks for `text`."""
    return f'draw "{text}"'


def glyph_texts(split: Split) -> list[str]:
    """All two-character texts of a split: 128 for validation, the other 833 for training (pretraining and RL alike)."""
    pairs = [a + b for a in ALPHABET for b in ALPHABET]
    random.Random("glyphs").shuffle(pairs)
    return pairs[:VALIDATION_SIZE] if split == "validation" else pairs[VALIDATION_SIZE:]
