"""Pictures from files, at the size of the samples: images to be edited, and given pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from flowgrpo_fast.batch import MediaSize

SOURCE_IMAGES = "source_images"
"""Where rewards find, in a sample's metadata, the paths of the images that were edited."""


def load_image(file: str, size: MediaSize) -> Tensor:
    """uint8 [3, H, W]: scaled to cover the size, centre-cropped. ValueError for a file that is no image."""
    picture = ImageOps.fit(_opened(file), (size.width, size.height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def _opened(file: str) -> Image.Image:
    """RGB, `~` expanded, turned as the camera was held."""
    try:
        with Image.open(Path(file).expanduser()) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file} is not an image that can be read: {error}") from error
