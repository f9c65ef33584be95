"""Model families: `build_adapter(family, path, ...)`. Importing this loads no model library."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch

from flowgrpo_fast.config import ConfigError
from flowgrpo_fast.models.base import ModelAdapter
from flowgrpo_fast.registry import load_named

FAMILIES = {"qwen_image": "flowgrpo_fast.models.qwen_image:QwenImageAdapter"}
BUILTIN = {"glyphs": "glyphs"}


def resolve_model_path(path: str) -> Path:
    """`builtin:NAME` or a diffusers folder (`~` expanded). Raises ConfigError where there is none."""
    if path.startswith("builtin:"):
        name = path.removeprefix("builtin:")
        if name not in BUILTIN:
            raise ConfigError(f"model.path = {path!r}: no such built-in model; there is {', '.join(BUILTIN)}")
        return Path(str(files("flowgrpo_fast") / "assets" / BUILTIN[name]))
    folder = Path(path).expanduser().resolve()
    if not (folder / "model_index.json").is_file():
        raise ConfigError(
            f"model.path = {path!r}: {folder} is not a diffusers folder (no model_index.json); give the folder that `save_pretrained` wrote"
        )
    return folder


def build_adapter(family: str, path: str, device: torch.device, dtype: torch.dtype) -> ModelAdapter:
    """The adapter of a registered family, or of the user's `module:Class`. Raises ConfigError."""
    adapter_class = load_named("model.family", family, FAMILIES)
    adapter: ModelAdapter = adapter_class(resolve_model_path(path), device, dtype)
    return adapter
