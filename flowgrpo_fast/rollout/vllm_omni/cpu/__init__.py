"""vllm-omni on a CPU, for tests and laptops: what the CUDA wheels lack there. Loaded by `plugin.cpu_platform`, never imported elsewhere."""

from __future__ import annotations

import torch

# The ops that torchvision's Python code mentions at import; its C extension does not load beside a CPU torch. Nothing here calls them.
TORCHVISION_OPS = (
    "nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d", "_roi_align_backward",
    "_roi_pool_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward", "_deform_conv2d_backward",
)  # fmt: skip
_libraries: list[torch.library.Library] = []  # dropping one would take its schemas away


def stand_in_for_missing_ops() -> None:
    """Schemas for torchvision, and the activations of vllm's CUDA extension in plain torch."""
    if _libraries:
        return
    vision = torch.library.Library("torchvision", "FRAGMENT")
    for name in TORCHVISION_OPS:
        if not hasattr(torch.ops.torchvision, name):
            vision.define(f"{name}(Tensor x) -> Tensor")
    c = torch.library.Library("_C", "FRAGMENT")
    for name, function in (
        ("gelu_new", _gelu),
        ("gelu_fast", _gelu),
        ("gelu_quick", _gelu_quick),
        ("silu_and_mul", _silu_and_mul),
    ):
        if not hasattr(torch.ops._C, name):
            c.define(f"{name}(Tensor! out, Tensor input) -> ()")
            c.impl(name, function, "CPU")
    _libraries.extend((vision, c))


def _gelu(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(torch.nn.functional.gelu(x, approximate="tanh"))


def _gelu_quick(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(x * torch.sigmoid(1.702 * x))


def _silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, value = x.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * value)
