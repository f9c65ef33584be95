"""Qwen-Image's VAE is a video VAE: a single frame goes through 3x3x3 convolutions with two frames of zeros before it.

Two thirds of that work multiplies zeros. `decode_single_frames` lets the causal convolutions of one VAE use the last slice of
their kernels as a 2-D convolution where the input is a single frame: the same sums without the zeros. Measured on two CPU cores with
the glyphs VAE: 15.6 -> 3.9 ms an image, largest difference 4e-6.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor


def decode_single_frames(vae: AutoencoderKLQwenImage) -> AutoencoderKLQwenImage:
    """Changes this instance only, and returns it. Several frames still take diffusers' own path."""
    for module in vae.modules():
        if isinstance(module, QwenImageCausalConv3d):
            module.forward = partial(_forward, module)
    return vae


def _forward(conv: QwenImageCausalConv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    if cache_x is not None or x.shape[2] != 1 or conv.stride[0] != 1:
        return QwenImageCausalConv3d.forward(conv, x, cache_x)
    width, height = conv._padding[0], conv._padding[2]
    frame = F.conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, conv.stride[1:], (height, width))
    return frame[:, :, None]
