"""A packed batch from one process to another on the same GPU, by a CUDA IPC handle: the bytes never leave the device.

The sender keeps its tensor until the receiver has copied it and says so. Devices are compared by UUID: each process numbers those that it may
see from 0. Not run on a GPU by us yet: tests/test_cuda_ipc.py does it where there is one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def device_uuid(device: torch.device) -> str | None:
    """None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def share(tensor: Tensor) -> dict[str, Any]:
    """The address of a contiguous CUDA tensor [n] uint8, as JSON values. Work queued on it is waited for first."""
    torch.cuda.current_stream(tensor.device).synchronize()
    _, handle, size, offset, counter, counter_offset, event, needs_event = tensor.untyped_storage()._share_cuda_()
    return {
        "uuid": device_uuid(tensor.device), "handle": handle.hex(), "size": size, "offset": offset, "counter": counter.hex(),
        "counter_offset": counter_offset, "event": event.hex(), "needs_event": needs_event, "bytes": tensor.numel(),
    }  # fmt: skip


def fetch(address: dict[str, Any], device: torch.device) -> Tensor:
    """A copy of the shared tensor in this process's own memory; the sender may free its own when this returns. ValueError on another GPU."""
    if address["uuid"] != device_uuid(device):
        raise ValueError(f"the tensor lies on GPU {address['uuid']}, this process uses {device_uuid(device)}")
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0, bytes.fromhex(address["handle"]), address["size"], address["offset"], bytes.fromhex(address["counter"]),
        address["counter_offset"], bytes.fromhex(address["event"]), address["needs_event"],
    )  # fmt: skip
    shared = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (address["bytes"],), (1,))
    copy = shared.clone()
    torch.cuda.current_stream(device).synchronize()
    return copy
