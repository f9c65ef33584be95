"""Model families: `build_adapter(family, path, ...)`. Importing this loads no model library."""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path

import torch

from flowgrpo_fast.config import ConfigError
from flowgrpo_fast.models.base import ModelAdapter
from flowgrpo_fast.registry import load_named

FAMILIES = {
    "flux": "flowgrpo_fast.models.flux:FluxAdapter",
    "flux_kontext": "flowgrpo_fast.models.flux_kontext:FluxKontextAdapter",
    "qwen_image": "flowgrpo_fast.models.qwen_image:QwenImageAdapter",
    "qwen_image_edit": "flowgrpo_fast.models.qwen_image_edit:QwenImageEditAdapter",
    "qwen_image_edit_plus": "flowgrpo_fast.models.qwen_image_edit:QwenImageEditPlusAdapter",
    "sd3": "flowgrpo_fast.models.sd3:SD3Adapter",
    "wan": "flowgrpo_fast.models.wan:WanAdapter",
    "z_image": "flowgrpo_fast.models.z_image:ZImageAdapter",
}
ENTRY_POINTS = "flowgrpo_fast.models"
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


def adapter_class(family: str) -> type[ModelAdapter]:
    """Of a registered family, of an installed package's (entry points in the group `flowgrpo_fast.models`), or the user's `module:Class`. Raises ConfigError."""
    installed = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    found: type[ModelAdapter] = load_named("model.family", family, FAMILIES | installed)
    return found


def build_adapter(family: str, path: str, device: torch.device, dtype: torch.dtype) -> ModelAdapter:
    """Raises ConfigError for an unknown family, and for a path that is not a pipeline's folder."""
    return adapter_class(family)(resolve_model_path(path), device, dtype)
