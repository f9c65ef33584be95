"""RolloutBatch: what a rollout hands to the trainer, as contiguous tensors that pack into one buffer.

    B samples, W trained steps, T sampler steps, P prompt rows, L text tokens, E embedding width

Packed form, the same bytes through shared memory, a socket or a file: 16 bytes (magic, version, header length),
a JSON header (name, dtype, shape, offset of each tensor; the integers), then the payload, each tensor aligned to
64 bytes. `unpack` gives views of the buffer: no copy, no pickle, no list.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAGIC = b"FGRB"
FORMAT_VERSION = 2
ALIGNMENT = 64
PREFIX = struct.Struct("<4sIQ")
DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)}  # fmt: skip

PER_SAMPLE = (
    "latents",
    "log_probs",
    "step_index",
    "prompt_index",
    "group_id",
    "sample_id",
    "seed",
    "old_v",
    "images",
    "videos",
)
PER_PROMPT = ("prompt_embeds", "prompt_embeds_mask", "pooled_prompt_embeds", "prompt_image_latents")
NEGATIVE = ("negative_prompt_embeds", "negative_prompt_embeds_mask", "negative_pooled_prompt_embeds")
INTEGERS = ("policy_version", "height", "width", "frames")
EXPECTED_DTYPE = {
    "latents": torch.float32, "log_probs": torch.float32, "step_index": torch.int64, "sigmas": torch.float32,
    "prompt_index": torch.int64, "group_id": torch.int64, "sample_id": torch.int64, "seed": torch.int64,
    "prompt_embeds_mask": torch.bool, "negative_prompt_embeds_mask": torch.bool, "prompt_image_latents": torch.float32, "images": torch.uint8, "videos": torch.uint8,
}  # fmt: skip


class BatchError(ValueError):
    """A RolloutBatch that breaks its contract: names the field and, where there is one, the sample."""


class MediaSize(NamedTuple):
    """Of an image or a video, in pixels and frames."""

    height: int
    width: int
    frames: int = 1


@dataclass(frozen=True)
class RolloutBatch:
    """One contiguous tensor per field. Trained steps only: `latents[:, w]` is the input of window slot w, `latents[:, w + 1]` its result."""

    latents: Tensor  # [B, W+1, ...] fp32
    log_probs: Tensor  # [B, W] fp32, from the op that the trainer uses
    step_index: Tensor  # [B, W] int64, index into sigmas; windows may differ per sample
    sigmas: Tensor  # [T+1] fp32, the sampler's own array: the trainer never recomputes it
    prompt_index: Tensor  # [B] int64, row of prompt_embeds
    group_id: Tensor  # [B] int64, run-unique; text is never compared to form groups
    sample_id: Tensor  # [B] int64, run-unique key of the sample's noise
    seed: Tensor  # [B] int64, run seed
    prompt_embeds: Tensor  # [P, L, E]
    prompt_embeds_mask: Tensor  # [P, L] bool
    policy_version: int  # which weights made it
    height: int  # pixels
    width: int  # pixels
    frames: int = 1  # of a video
    pooled_prompt_embeds: Tensor | None = None  # [P, E']
    negative_prompt_embeds: Tensor | None = None  # [P, L', E], or [1, L', E] shared by all
    negative_prompt_embeds_mask: Tensor | None = None  # [P or 1, L'] bool
    negative_pooled_prompt_embeds: Tensor | None = None  # [P or 1, E']
    prompt_image_latents: Tensor | None = None  # [P, N, C] fp32, tokens of the images to be edited
    old_v: Tensor | None = None  # [B, W, ...] the velocity that made each step, only for algorithms that read it
    images: Tensor | None = None  # [B, 3, H, W] uint8; for rewards, not for the trainer
    videos: Tensor | None = None  # [B, F, 3, H, W] uint8

    @property
    def size(self) -> int:
        return self.latents.shape[0]

    @property
    def window(self) -> int:
        return self.log_probs.shape[1]

    @property
    def media_size(self) -> MediaSize:
        return MediaSize(self.height, self.width, self.frames)

    @property
    def media(self) -> Tensor | None:
        """What the rewards look at: images or videos."""
        return self.images if self.images is not None else self.videos

    def tensors(self) -> dict[str, Tensor]:
        """Field name -> tensor, in declaration order, without the absent ones."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RolloutBatch:
        moved: dict[str, Any] = {name: t.to(device, non_blocking=non_blocking) for name, t in self.tensors().items()}
        return replace(self, **moved)

    def without_media(self) -> RolloutBatch:
        """The batch as the trainer keeps it: images and videos stay where the reward ran."""
        return replace(self, images=None, videos=None)

    def select(self, index: Tensor) -> RolloutBatch:
        """The samples `index` (int64 [N] or bool [B]); prompt rows stay as they are."""
        chosen: dict[str, Any] = {name: t[index] for name, t in self.tensors().items() if name in PER_SAMPLE}
        return replace(self, **chosen)

    def split_prompts(self) -> list[RolloutBatch]:
        """One batch per prompt row, in row order, each with its own row only."""
        parts = []
        for row in range(self.prompt_embeds.shape[0]):
            part = self.select((self.prompt_index == row).nonzero()[:, 0])
            kept: dict[str, Any] = {"prompt_index": torch.zeros_like(part.prompt_index)}
            for name, t in self.tensors().items():
                if name in PER_PROMPT or (name in NEGATIVE and t.shape[0] > 1):
                    kept[name] = t[row : row + 1]
            parts.append(replace(part, **kept))
        return parts

    @staticmethod
    def concat(batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """Joins batches of one schedule, image size and policy version. Text of different length is padded and masked.

        Raises BatchError where sigmas, sizes, versions or the set of fields differ.
        """
        if not batches:
            raise BatchError("concat: no batches given")
        first = batches[0]
        for other in batches[1:]:
            for name in INTEGERS:
                if getattr(other, name) != getattr(first, name):
                    raise BatchError(f"concat: {name} differs: {getattr(first, name)} and {getattr(other, name)}")
            if other.tensors().keys() != first.tensors().keys():
                raise BatchError(f"concat: fields differ: {sorted(other.tensors().keys() ^ first.tensors().keys())}")
            if not torch.equal(other.sigmas, first.sigmas):
                raise BatchError("concat: sigmas differ")
        offsets = torch.tensor([0] + [b.prompt_embeds.shape[0] for b in batches[:-1]]).cumsum(0).tolist()
        joined: dict[str, Any] = {}
        for name in first.tensors():
            values = [getattr(b, name) for b in batches]
            if name == "prompt_index":
                joined[name] = torch.cat([v + offset for v, offset in zip(values, offsets, strict=True)])
            elif name in PER_SAMPLE:
                joined[name] = torch.cat(values)
            elif name in PER_PROMPT:
                joined[name] = torch.cat(_pad_text(values) if name.startswith("prompt_embeds") else values)
        joined |= _concat_negative(batches)
        return replace(first, **joined)

    def validate(self) -> RolloutBatch:
        """Returns self. Raises BatchError naming field and sample on any wrong shape, dtype, layout, index or non-finite value."""
        B, W, P = self.size, self.window, self.prompt_embeds.shape[0]
        T = self.sigmas.shape[0] - 1
        tensors = self.tensors()
        for name, t in tensors.items():
            if name in EXPECTED_DTYPE and t.dtype != EXPECTED_DTYPE[name]:
                raise BatchError(f"{name}: dtype {t.dtype}, expected {EXPECTED_DTYPE[name]}")
            if not t.is_contiguous():
                raise BatchError(f"{name}: not contiguous (shape {list(t.shape)}, strides {list(t.stride())})")
            rows = B if name in PER_SAMPLE else P if name in PER_PROMPT else None
            if rows is not None and t.shape[:1] != (rows,):
                raise BatchError(f"{name}: shape {list(t.shape)}, expected first dimension {rows}")
            if name in NEGATIVE and t.shape[0] not in (1, P):
                raise BatchError(f"{name}: {t.shape[0]} rows, expected 1 (shared) or {P} (one per prompt)")
        expected = {
            "log_probs": (B, W), "step_index": (B, W), "prompt_index": (B,), "group_id": (B,), "sample_id": (B,), "seed": (B,),
            "prompt_embeds_mask": tuple(self.prompt_embeds.shape[:2]), "latents": (B, W + 1, *self.latents.shape[2:]),
            "old_v": (B, W, *self.latents.shape[2:]), "sigmas": (T + 1,),
        }  # fmt: skip
        for name, shape in expected.items():
            if name in tensors and tuple(tensors[name].shape) != shape:
                raise BatchError(f"{name}: shape {list(tensors[name].shape)}, expected {list(shape)}")
        if (self.negative_prompt_embeds is None) != (self.negative_prompt_embeds_mask is None):
            raise BatchError("negative_prompt_embeds and negative_prompt_embeds_mask go together: one is missing")
        if self.images is not None and self.images.shape[1:] != (3, self.height, self.width):
            raise BatchError(f"images: shape {list(self.images.shape)}, expected [{B}, 3, {self.height}, {self.width}]")
        video = (self.frames, 3, self.height, self.width)
        if self.videos is not None and self.videos.shape[1:] != video:
            raise BatchError(f"videos: shape {list(self.videos.shape)}, expected {[B, *video]}")
        for name in ("latents", "log_probs", "old_v"):
            if name in tensors:
                finite = tensors[name].flatten(1).isfinite().all(1) if B else torch.ones(0, dtype=torch.bool)
                if not finite.all():
                    row = int((~finite).nonzero()[0])
                    raise BatchError(f"{name}: non-finite value in sample {row} (sample_id {int(self.sample_id[row])})")
        if not self.sigmas.isfinite().all():
            raise BatchError("sigmas: non-finite value")
        for name, limit in (("step_index", T), ("prompt_index", P)):
            t = tensors[name].flatten(1) if tensors[name].dim() > 1 else tensors[name][:, None]
            bad = ((t < 0) | (t >= limit)).any(1)
            if bad.any():
                row = int(bad.nonzero()[0])
                raise BatchError(f"{name}: sample {row} holds {t[row].tolist()}, expected values in [0, {limit})")
        return self

    def packed_size(self) -> int:
        """Bytes that `pack` writes."""
        return self._layout()[2]

    def pack(self, out: Tensor | None = None) -> Tensor:
        """One uint8 buffer: header and every tensor, each copied once. out: where to, [packed_size()] on any device; else fresh memory
        on this batch's device. BatchError where `out` has another size."""
        entries, head, size = self._layout()
        buffer = torch.empty(size, dtype=torch.uint8, device=self.latents.device) if out is None else out
        if buffer.dtype != torch.uint8 or tuple(buffer.shape) != (size,):
            raise BatchError(f"pack: out is {buffer.dtype} {list(buffer.shape)}, expected torch.uint8 [{size}]")
        start = _aligned(len(head))
        _write_head(buffer, head)
        for entry, t in zip(entries, self.tensors().values(), strict=True):
            view = _view(buffer, start, entry)
            view.copy_(t)
            # The gaps that alignment leaves: the same batch gives the same bytes.
            end = start + entry["offset"] + t.numel() * t.element_size()
            buffer[end : start + _aligned(end - start)].zero_()
        return buffer

    def _layout(self) -> tuple[list[dict[str, Any]], bytes, int]:
        """The header's entries, prefix and header, and the size of it all in bytes."""
        entries, offset = [], 0
        for name, t in self.tensors().items():
            entries.append(
                {"name": name, "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "offset": offset}
            )
            offset += _aligned(t.numel() * t.element_size())
        header = json.dumps(
            {"tensors": entries, **{n: getattr(self, n) for n in INTEGERS}}, separators=(",", ":")
        ).encode()
        head = PREFIX.pack(MAGIC, FORMAT_VERSION, len(header)) + header
        return entries, head, _aligned(len(head)) + offset

    @staticmethod
    def unpack(buffer: Tensor) -> RolloutBatch:
        """Views of a buffer made by `pack`. Raises BatchError on a wrong magic, version or a truncated buffer."""
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise BatchError(f"unpack: need a contiguous 1-D uint8 tensor, got {buffer.dtype} {list(buffer.shape)}")
        if buffer.data_ptr() % 16:
            raise BatchError("unpack: the buffer must start at a 16-byte boundary; copy it into a fresh tensor first")
        if buffer.numel() < PREFIX.size:
            raise BatchError(f"unpack: truncated: {buffer.numel()} bytes, the prefix alone has {PREFIX.size}")
        magic, version, length = PREFIX.unpack(bytes(buffer[: PREFIX.size].cpu().numpy()))
        if magic != MAGIC:
            raise BatchError(f"unpack: not a RolloutBatch (magic {magic!r}, expected {MAGIC!r})")
        if version != FORMAT_VERSION:
            raise BatchError(f"unpack: format version {version}, this library reads {FORMAT_VERSION}")
        if buffer.numel() < PREFIX.size + length:
            raise BatchError(f"unpack: truncated: {buffer.numel()} bytes, the header needs {PREFIX.size + length}")
        try:
            header = json.loads(bytes(buffer[PREFIX.size : PREFIX.size + length].cpu().numpy()))
            start = _aligned(PREFIX.size + length)
            views: dict[str, Any] = {entry["name"]: _view(buffer, start, entry) for entry in header["tensors"]}
            return RolloutBatch(**views, **{name: header[name] for name in INTEGERS})
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise BatchError(f"unpack: corrupt header: {error!r}") from error


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _write_head(buffer: Tensor, head: bytes) -> None:
    """Prefix and header, zeros up to the payload."""
    padded = torch.frombuffer(bytearray(head.ljust(_aligned(len(head)), b"\0")), dtype=torch.uint8)
    buffer[: len(padded)].copy_(padded)


def _view(buffer: Tensor, start: int, entry: dict) -> Tensor:
    dtype = DTYPES[entry["dtype"]]
    count = 1
    for n in entry["shape"]:
        count *= n
    begin, end = start + entry["offset"], start + entry["offset"] + count * dtype.itemsize
    if end > buffer.numel():
        raise BatchError(f"unpack: truncated: {entry['name']} ends at byte {end} of {buffer.numel()}")
    return buffer[begin:end].view(dtype).view(entry["shape"])


def _pad_text(values: list[Tensor]) -> list[Tensor]:
    """Right-pads [P, L, ...] tensors with zeros (False in masks) to the longest L."""
    length = max(v.shape[1] for v in values)
    return [F.pad(v, (0, 0) * (v.dim() - 2) + (0, length - v.shape[1])) for v in values]


def _concat_negative(batches: Sequence[RolloutBatch]) -> dict[str, Tensor]:
    """One shared row stays one row where all batches hold the same; otherwise every batch's rows become one per prompt."""
    fields = {name: [getattr(b, name) for b in batches] for name in NEGATIVE if getattr(batches[0], name) is not None}
    if all(v.shape[0] == 1 and torch.equal(v, values[0]) for values in fields.values() for v in values):
        return {name: values[0] for name, values in fields.items()}
    joined: dict[str, Tensor] = {}
    for name, values in fields.items():
        rows = [v.expand(b.prompt_embeds.shape[0], *v.shape[1:]) for v, b in zip(values, batches, strict=True)]
        joined[name] = torch.cat(rows if "pooled" in name else _pad_text(rows))
    return joined
