"""Pictures from files, at the size of the samples: images to be edited, and given pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from flowgrpo_fast.batch import MediaSize


def load_image(file: str, size: MediaSize) -> Tensor:
    """uint8 [3, H, W]: scaled to cover the size, centre-cropped. ValueError for a file that is no image."""
    return _as_tensor(ImageOps.fit(_opened(file), (size.width, size.height), Image.Resampling.LANCZOS))


def read_image(file: str) -> Tensor:
    """uint8 [3, H, W] as it is in the file. ValueError for a file that is no image."""
    return _as_tensor(_opened(file))


def _opened(file: str) -> Image.Image:
    """RGB, `~` expanded, turned as the camera was held."""
    try:
        with Image.open(Path(file).expanduser()) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB")
    except OSError as error:
        raise ValueError(f"{file} is not an image that can be read: {error}") from error


def _as_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
