"""What both sides of a weight sync must agree on: the layout of what is sent, its checksums, and the probe that proves it took effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.models.base import ModelAdapter, PromptEmbeds
from flowgrpo_fast.ops import STREAM_INITIAL, NoiseKey, philox_normal

CHECKSUM_CHUNK = 1 << 22
PROBE_SEED, PROBE_TOKENS, PROBE_SIGMA = 20_240_611, 4, 0.5
# Largest |difference| of the probe, as a share of its largest |value|. fp32: measured 0 to 1e-6; bf16: the engine adds LoRA in another order.
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class WeightSyncError(RuntimeError):
    """The server does not hold the weights that the trainer sent. Nothing was generated with them."""


def checksum(tensor: Tensor) -> int:
    """Of a tensor's bits and their order, on its own device: words times their position (mod a prime), summed modulo 2^64."""
    words = tensor.detach().contiguous().reshape(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), CHECKSUM_CHUNK):
        part = words[start : start + CHECKSUM_CHUNK].to(torch.int64)
        position = torch.arange(start, start + len(part), device=part.device) % 65_521 + 1
        total += (part * position).sum()
    return int(total)


@dataclass(frozen=True)
class FlatTensors:
    """Named tensors of one dtype behind one another in one flat buffer: one message, one copy."""

    flat: Tensor  # [n], on the CPU
    manifest: list[dict[str, Any]]  # name, shape, offset in elements

    @staticmethod
    def pack(tensors: dict[str, Tensor], dtype: torch.dtype, out: Tensor | None = None) -> FlatTensors:
        """Casts and copies each tensor once. out: where to, [>= n] of dtype; else fresh memory."""
        manifest: list[dict[str, Any]] = []
        offset = 0
        for name, tensor in tensors.items():
            manifest.append({"name": name, "shape": [*tensor.shape], "offset": offset})
            offset += tensor.numel()
        flat = torch.empty(offset, dtype=dtype) if out is None else out[:offset]
        for entry, tensor in zip(manifest, tensors.values(), strict=True):
            flat[entry["offset"] : entry["offset"] + tensor.numel()].copy_(tensor.detach().reshape(-1))
        return FlatTensors(flat, manifest)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Name and view of each. Raises ValueError where the manifest does not fit the buffer."""
        for entry in self.manifest:
            shape, start = entry["shape"], entry["offset"]
            end = start + torch.Size(shape).numel()
            if not 0 <= start <= end <= len(self.flat):
                raise ValueError(f"{entry['name']}: elements {start} to {end} of a buffer of {len(self.flat)}")
            yield entry["name"], self.flat[start:end].view(shape)


def lora_tensors(state: dict[str, Tensor], adapter_name: str) -> dict[str, Tensor]:
    """PEFT's trained parameters -> `<module>.lora_A.weight`, `<module>.lora_B.weight`, in a fixed order."""
    return {name.replace(f".{adapter_name}.weight", ".weight"): state[name] for name in sorted(state)}


def lora_modules(names: list[str]) -> list[str]:
    """The adapted modules of tensors named as `lora_tensors` names them."""
    return sorted({name.rpartition(".lora_")[0] for name in names})


def lora_checksums(lora: FlatTensors, scaling: float, dtype: torch.dtype) -> dict[str, int]:
    """By name, of what an engine binds: A, and B times alpha / rank, both in the engine's dtype."""
    return {name: checksum(t.to(dtype) * (scaling if ".lora_B." in name else 1.0)) for name, t in lora.items()}


@torch.no_grad()
def probe(adapter: ModelAdapter, transformer: Any, device: torch.device) -> Tensor:
    """Velocity of a fixed input, fp32 on the CPU: equal weights that are really used give equal probes on both sides."""
    size = adapter.smallest_size()
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    x = philox_normal(NoiseKey(PROBE_SEED, 0, ids, STREAM_INITIAL), adapter.latent_shape(size))
    embeds = philox_normal(NoiseKey(PROBE_SEED, 1, ids, STREAM_INITIAL), (PROBE_TOKENS, adapter.text_width))
    sigma = torch.full((1,), PROBE_SIGMA, device=device)
    pooled = None
    if adapter.pooled_width is not None:
        pooled = philox_normal(NoiseKey(PROBE_SEED, 2, ids, STREAM_INITIAL), (adapter.pooled_width,))
    text = PromptEmbeds(embeds, (PROBE_TOKENS,), pooled)
    return adapter.velocity(transformer, x, sigma, text, None, 1.0, size).float().cpu()


def require_equal_probe(mine: Tensor, theirs: Tensor, dtype: torch.dtype, what: str) -> float:
    """-> largest difference relative to the largest value. Raises WeightSyncError above the dtype's tolerance."""
    difference = float((mine - theirs).abs().max() / mine.abs().max().clamp(min=1e-30))
    if not difference <= PROBE_TOLERANCE[dtype]:
        raise WeightSyncError(
            f"{what}: the server's velocity of the probe input differs from the trainer's by {difference:.3g} of its largest value"
            f" (allowed {PROBE_TOLERANCE[dtype]:g} in {dtype}): the server runs other weights than it was sent, or ignores some of them"
        )
    return difference
