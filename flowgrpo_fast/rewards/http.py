"""A scorer behind HTTP, and the bytes that both sides exchange: safetensors, or JSON with PNGs. Nothing is pickled.

POST url
    application/vnd.safetensors   tensor `images` uint8 [N, 3, H, W] (videos [N, F, 3, H, W]); header metadata `prompts` and `metadata`, JSON lists of length N
    application/json              {"images": [base64 PNG, ...], "prompts": [...], "metadata": [...]}
answers 200 in the same format: `reward` [N] and any further [N] that are only logged (JSON: {"reward": [...], ...}, null for a sample without a score).
`python -m flowgrpo_fast.rewards.serve` is such a server.
"""

from __future__ import annotations

import base64
import io
import json
import math
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flowgrpo_fast.rewards.base import TransientRewardError, register_reward

SAFETENSORS, JSON = "application/vnd.safetensors", "application/json"
FORMATS = {"safetensors": SAFETENSORS, "json": JSON}
# A server that restarts or is asked too often; other 4xx are mistakes, and asking again does not help.
TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)


@register_reward("http")
class HttpReward:
    """Sends samples to a scorer, at most `batch_size` a request. Retries, back-off and patience are the reward manager's."""

    def __init__(
        self,
        url: str,
        format: str = "safetensors",
        timeout_s: float = 60.0,
        batch_size: int = 16,
        headers: dict[str, str] | None = None,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {url!r}")
        if format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
        if timeout_s <= 0 or batch_size < 1:
            raise ValueError(f"timeout_s must be positive and batch_size at least 1, got {timeout_s} and {batch_size}")
        self.url, self.kind, self.timeout_s, self.batch_size = url, FORMATS[format], timeout_s, batch_size
        self.headers = {"Content-Type": self.kind, "Accept": self.kind, **(headers or {})}

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> dict[str, Tensor]:
        parts = []
        for at in range(0, len(images), self.batch_size):
            rows = slice(at, at + self.batch_size)
            body = encode_request(self.kind, images[rows], prompts[rows], metadata[rows])
            scores = decode_scores(self.kind, post(self.url, body, self.headers, self.timeout_s), self.url)
            expected = len(prompts[rows])
            for name, values in scores.items():
                if values.shape != (expected,):
                    raise ValueError(f"{self.url} answered {name} of shape {list(values.shape)} to {expected} samples")
            parts.append(scores)
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def post(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> bytes:
    """The answer's body. Raises TransientRewardError where asking again may help, ValueError for an answer that says the request is wrong."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=timeout_s) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace")
        problem = f"{url} answered {error.code}: {said}"
        raise (TransientRewardError if error.code in TRANSIENT_STATUS else ValueError)(problem) from error
    except (OSError, HTTPException) as error:
        raise TransientRewardError(f"{url}: {type(error).__name__}: {error}") from error


def encode_request(kind: str, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> bytes:
    if kind == SAFETENSORS:
        return save({"images": images.contiguous()}, {"prompts": json.dumps(prompts), "metadata": json.dumps(metadata)})
    if images.ndim != 4:
        raise ValueError("videos go as safetensors only: set format to safetensors")
    pictures = [base64.b64encode(png(image)).decode() for image in images]
    return json.dumps({"images": pictures, "prompts": prompts, "metadata": metadata}).encode()


def decode_request(kind: str, body: bytes) -> tuple[Tensor, list[str], list[dict[str, Any]]]:
    """Raises ValueError for what is not such a request."""
    try:
        if kind == SAFETENSORS:
            size = int.from_bytes(body[:8], "little")
            header = json.loads(body[8 : 8 + size])["__metadata__"]
            return load(body)["images"], json.loads(header["prompts"]), json.loads(header["metadata"])
        values = json.loads(body)
        pictures = [Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB") for picture in values["images"]]
        images = torch.stack(
            [torch.frombuffer(bytearray(p.tobytes()), dtype=torch.uint8).view(p.height, p.width, 3) for p in pictures]
        )
        return images.permute(0, 3, 1, 2).contiguous(), values["prompts"], values["metadata"]
    except (KeyError, TypeError, ValueError, SafetensorError, RuntimeError, OSError) as error:
        raise ValueError(f"not a request to score samples: {type(error).__name__}: {error}") from error


def encode_scores(kind: str, scores: dict[str, Tensor]) -> bytes:
    if kind == SAFETENSORS:
        return save({name: values.float().clone() for name, values in scores.items()})
    lists = {name: [v if math.isfinite(v) else None for v in values.tolist()] for name, values in scores.items()}
    return json.dumps(lists).encode()


def decode_scores(kind: str, body: bytes, url: str) -> dict[str, Tensor]:
    try:
        if kind == SAFETENSORS:
            scores = load(body)
        else:
            scores = {
                name: torch.tensor([math.nan if v is None else float(v) for v in values])
                for name, values in json.loads(body).items()
            }
    except (SafetensorError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{url} answered something else than scores: {type(error).__name__}: {error}") from error
    if "reward" not in scores:
        raise ValueError(f'{url} answered without "reward"; its names are {", ".join(scores) or "none"}')
    return scores


def png(image: Tensor) -> bytes:
    """uint8 [3, H, W] -> a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, format="PNG")
    return buffer.getvalue()
