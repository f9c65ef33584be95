"""The checks that every op makes on what a user hands it. All read shapes, dtypes and devices, never values on a device."""

from __future__ import annotations

import torch
from torch import Tensor


def require(ok: bool, field: str, got: object, fix: str) -> None:
    """Raise a ValueError that names the field, the value and the fix. `got` is put into words only then."""
    if not ok:
        raise ValueError(f"{field}: got {_describe(got)}; {fix}")


def require_choice(value: str, field: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        require(False, field, repr(value), f"choose one of {', '.join(map(repr, choices))}")


def require_float(tensor: Tensor, field: str, device: torch.device | None = None) -> None:
    require(tensor.is_floating_point(), field, tensor, "pass a floating-point tensor")
    require_device(tensor, field, device)


def require_device(tensor: Tensor, field: str, device: torch.device | None) -> None:
    if device is not None and tensor.device != device:
        require(False, field, f"a tensor on {tensor.device}", f"move it: {field}.to({str(device)!r})")


def require_shape(tensor: Tensor, field: str, *shapes: tuple[int, ...]) -> None:
    for shape in shapes:
        if tensor.shape == shape:  # not `in`: torch.compile cannot look symbolic sizes up
            return
    require(False, field, tensor, f"pass shape {' or '.join(str(list(shape)) for shape in shapes)}")


def require_latents(tensor: Tensor, field: str) -> None:
    """[B, ...] of rank >= 2 with at least one element per sample (an empty batch is fine)."""
    require_float(tensor, field)
    ok = tensor.dim() >= 2 and 0 not in tensor.shape[1:]
    require(ok, field, tensor, "pass [B, ...] of rank >= 2 with at least one element per sample")


def require_detached(tensor: Tensor | None, field: str) -> None:
    """No gradient is defined for this argument; better an error than a gradient that is silently missing."""
    if tensor is not None:
        require(not tensor.requires_grad, field, "a tensor that requires grad", f"pass {field}.detach()")


def values_are_readable(tensor: Tensor) -> bool:
    """May a check look at values? On a device it would be a host sync, under torch.compile a graph break."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """fp32, whatever the storage; fp64 where an input is fp64 (gradcheck needs it)."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, ...] -> contiguous [B, D] in the compute dtype. Contiguous, so that results do not inherit exotic strides."""
    return tensor.contiguous().flatten(1).to(dtype)


def rows_view(tensor: Tensor) -> Tensor:
    """[B, ...] -> [B, D] without a copy where every sample is contiguous, wherever the samples lie: a slot of a trajectory, the first
    tokens of a longer output, an expanded batch. Other strides cost a copy."""
    if not tensor.is_contiguous() and tensor.shape[0] and not tensor[0].is_contiguous():
        tensor = tensor.contiguous()
    return tensor.flatten(1)


def optional_rows(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else rows_view(tensor)


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    text = f"{value.dtype} {list(value.shape)}"
    return f"{text} {value.tolist()}" if value.device.type == "cpu" and value.numel() <= 32 else text
