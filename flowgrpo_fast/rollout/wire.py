"""What trainer and rollout server say to each other: JSON headers, raw tensor bytes, nothing pickled and no tensor made a list.

A message is a ZeroMQ multipart: one JSON header, then one frame per buffer. On one host a buffer is not sent at all: it lies in
a `Segment`, anonymous shared memory that the other side opens as /proc/<pid>/fd/<fd>. It has no name, so there is nothing
to leave behind: the kernel frees it when both sides have closed it or died, kill -9 included.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.batch import DTYPES

PROTOCOL = 2
VLLM_OMNI = "0.30"
HANDSHAKE_PROMPT = "a handshake: two characters, one image"
DIGEST_BYTES = 1 << 20


def text_encoder_digest(model: Path) -> str:
    """Of the pipeline's text encoders: names, sizes and both ends of each file. Cheap where the trainer never loads them (8 B parameters)."""
    digest = hashlib.sha256()
    for file in sorted(model.glob("text_encoder*/*")):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(model)} {size}".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(DIGEST_BYTES))
            opened.seek(max(0, size - DIGEST_BYTES))
            digest.update(opened.read(DIGEST_BYTES))
    return digest.hexdigest()


class WireError(RuntimeError):
    """A message that breaks the protocol: truncated, corrupt, of another version. Nothing of it was used."""


class RemoteError(RuntimeError):
    """The server answered that a request failed. `kind` is the exception's name there."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Segment:
    """A flat uint8 buffer in anonymous shared memory. The creator fills `tensor` and hands `address()` to the other side."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        try:
            self.map = mmap.mmap(fd, size)
        except OSError:
            os.close(fd)
            raise
        self.tensor: Tensor | None = torch.frombuffer(self.map, dtype=torch.uint8, count=size)

    @classmethod
    def create(cls, size: int) -> Segment:
        fd = os.memfd_create("flowgrpo_fast", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size)

    @classmethod
    def open(cls, address: dict[str, int]) -> Segment:
        """Raises WireError where the other side is on another host, or gone."""
        path = f"/proc/{address['pid']}/fd/{address['fd']}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WireError(f"shared memory {path} cannot be opened: {error}") from error
        if os.fstat(fd).st_size != address["size"]:
            os.close(fd)
            raise WireError(f"shared memory {path} has another size than the {address['size']} bytes announced")
        return cls(fd, address["size"])

    @staticmethod
    def is_here(address: dict[str, int], content: bytes) -> bool:
        """Do both sides see one memory? The same pid and descriptor may lead to something else on another host: the content decides."""
        try:
            segment = Segment.open(address)
        except WireError:
            return False
        found = segment.map[:]
        segment.close()
        return found == content

    def address(self) -> dict[str, int]:
        return {"pid": os.getpid(), "fd": self.fd, "size": self.size}

    def close(self) -> None:
        """Drops this side's descriptor. The memory itself lives as long as tensors that view it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd, self.tensor = -1, None


@dataclass(frozen=True)
class Message:
    """header: small JSON values; buffers: uint8 [n] each, in the order that the header's fields name them."""

    header: dict[str, Any]
    buffers: tuple[Tensor, ...] = ()


def encode(message: Message) -> list[Any]:
    """-> frames. Buffers are sent from where they lie."""
    header = {**message.header, "protocol": PROTOCOL, "sizes": [b.numel() for b in message.buffers]}
    return [json.dumps(header, separators=(",", ":")).encode(), *(b.numpy().data for b in message.buffers)]


def decode(frames: Sequence[Any]) -> Message:
    """Frames (bytes or zmq.Frame) -> message; its buffers view the frames. Raises WireError."""
    if not frames:
        raise WireError("empty message")
    try:
        header = json.loads(bytes(memoryview(frames[0])))
        protocol, sizes = header.pop("protocol"), header.pop("sizes")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WireError(f"corrupt header: {error!r}") from error
    if protocol != PROTOCOL:
        raise WireError(
            f"the other side speaks protocol {protocol}, this one {PROTOCOL}: install one version of flowgrpo_fast in both environments"
        )
    buffers = []
    for frame, size in zip(frames[1:], sizes, strict=False):
        view = memoryview(frame)
        if view.nbytes != size:
            raise WireError(f"truncated: a buffer of {size} bytes came with {view.nbytes}")
        buffers.append(_as_tensor(view))
    if len(buffers) != len(sizes) or len(frames) != 1 + len(sizes):
        raise WireError(f"truncated: {len(frames) - 1} buffers for {len(sizes)} announced")
    return Message(header, tuple(buffers))


def _as_tensor(view: memoryview) -> Tensor:
    """uint8 [n] over a frame that nobody writes to, 16-byte aligned as RolloutBatch.unpack asks: copied only where ZeroMQ placed it otherwise."""
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        tensor = torch.frombuffer(view, dtype=torch.uint8)
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def pack_tensors(tensors: dict[str, Tensor | None]) -> tuple[list[dict[str, Any]], tuple[Tensor, ...]]:
    """Named tensors -> (manifest for the header, one uint8 buffer each). Absent ones are left out."""
    manifest, buffers = [], []
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        manifest.append({"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": [*tensor.shape]})
        buffers.append(flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8))
    return manifest, tuple(buffers)


def unpack_tensors(manifest: list[dict[str, Any]], buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    """The reverse of pack_tensors; views. Raises WireError."""
    if len(manifest) != len(buffers):
        raise WireError(f"truncated: {len(buffers)} buffers for {len(manifest)} tensors")
    tensors = {}
    for entry, buffer in zip(manifest, buffers, strict=True):
        try:
            tensors[entry["name"]] = buffer.view(DTYPES[entry["dtype"]]).view(entry["shape"])
        except (RuntimeError, KeyError) as error:
            raise WireError(f"tensor {entry.get('name')!r} does not fit its buffer: {error}") from error
    return tensors


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
