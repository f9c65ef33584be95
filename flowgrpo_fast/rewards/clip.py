"""Rewards of CLIP models, loaded by transformers from a local folder: does the image fit the prompt, do people like it?

    clip_score   cos(image, prompt)                       e.g. openai/clip-vit-large-patch14
    pickscore    exp(logit_scale) cos / 26                yuvalkirstain/PickScore_v1 (flow_grpo's scale: about 0.8 to 0.9)
    hpsv2        cos, of a CLIP tuned on preferences      HPSv2's weights as a transformers folder
    aesthetic    MLP(image / |image|), 1 to 10            a ViT-L/14 and the head of improved-aesthetic-predictor

Videos are scored by `frames` of them, evenly spaced: the mean.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowgrpo_fast.rewards.base import register_reward
from flowgrpo_fast.rewards.frames import spread_frames

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PICKSCORE_SCALE = 26.0


class ClipReward:
    """Args:
        path: folder of a transformers CLIP model with its tokenizer and preprocessor_config.json.
        device: `auto` is this rank's GPU where there is one.
        dtype: of the network; scores are fp32.
        batch_size: images in one forward.
        frames: of a video.

    Checked at once; loaded with the first call. Raises ValueError for a folder that holds no model.
    """

    needs_text = True

    def __init__(self, path: str, device: str = "auto", dtype: str = "float32", batch_size: int = 16, frames: int = 4):
        self.path = Path(path).expanduser()
        for name in ("config.json", "preprocessor_config.json"):
            if not (self.path / name).is_file():
                raise ValueError(f"path {path!r} holds no {name}; give the local folder of a transformers CLIP model")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if min(batch_size, frames) < 1:
            raise ValueError(f"batch_size and frames must be at least 1, got {batch_size} and {frames}")
        self.device = own_device() if device == "auto" else torch.device(device)
        self.dtype, self.batch_size, self.frames = DTYPES[dtype], batch_size, frames
        self._model: Any = None
        self._lock = threading.Lock()

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """uint8 [N, 3, H, W] or [N, F, 3, H, W] -> fp32 [N]. Each image by itself: the batch does not matter but for rounding."""
        self._load()
        frames, count = spread_frames(images, self.frames)
        of_images = torch.cat([self._embed_images(part) for part in frames.split(self.batch_size)])
        of_texts = None
        if self.needs_text:
            once = list(dict.fromkeys(prompts))
            rows = torch.tensor([once.index(prompt) for prompt in prompts]).repeat_interleave(count)
            of_texts = torch.cat(
                [self._embed_texts(once[i : i + self.batch_size]) for i in range(0, len(once), self.batch_size)]
            )
            of_texts = of_texts[rows.to(of_texts.device)]
        return self.score(of_images, of_texts).float().view(-1, count).mean(1).cpu()

    def score(self, images: Tensor, texts: Tensor | None) -> Tensor:
        """Unit vectors fp32 [M, D], [M, D] -> [M]."""
        assert texts is not None
        return (images * texts).sum(1)

    def _load(self) -> None:
        with self._lock:
            if self._model is not None:
                return
            from transformers import AutoTokenizer, CLIPModel

            self._settings = json.loads((self.path / "preprocessor_config.json").read_text())
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self.path) if self.needs_text else None
            model = CLIPModel.from_pretrained(self.path, torch_dtype=self.dtype)
            self._model = model.to(self.device).eval().requires_grad_(False)

    def _embed_images(self, images: Tensor) -> Tensor:
        pixels = preprocess(images.to(self.device), self._settings, self._model.config.vision_config.image_size)
        pooled = self._model.vision_model(pixel_values=pixels.to(self.dtype)).pooler_output
        return F.normalize(self._model.visual_projection(pooled).float(), dim=1)

    def _embed_texts(self, texts: list[str]) -> Tensor:
        length = self._model.config.text_config.max_position_embeddings
        # As the models were trained: a prompt that is too long is cut.
        tokens = self._tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt").to(
            self.device
        )
        pooled = self._model.text_model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).pooler_output
        return F.normalize(self._model.text_projection(pooled).float(), dim=1)


register_reward("clip_score")(ClipReward)


@register_reward("hpsv2")
class HpsV2(ClipReward):
    """A name of its own, so that both can be in one run."""


@register_reward("pickscore")
class PickScore(ClipReward):
    def score(self, images: Tensor, texts: Tensor | None) -> Tensor:
        return super().score(images, texts) * self._model.logit_scale.exp().float() / PICKSCORE_SCALE


@register_reward("aesthetic")
class Aesthetic(ClipReward):
    """head: file of the head (.safetensors or .pth), linear layers 768 -> 1024 -> 128 -> 64 -> 16 -> 1 named layers.0, .2, .4, .6, .7."""

    needs_text = False

    def __init__(self, path: str, head: str, **settings: Any):
        super().__init__(path, **settings)
        self.head_path = Path(head).expanduser()
        if not self.head_path.is_file():
            raise ValueError(f"head {head!r} is no file; give the weights of improved-aesthetic-predictor's MLP")
        self._head: nn.Module | None = None

    def score(self, images: Tensor, texts: Tensor | None) -> Tensor:
        assert self._head is not None
        scores: Tensor = self._head(images)[:, 0]
        return scores

    def _load(self) -> None:
        super()._load()
        with self._lock:
            if self._head is not None:
                return
            if self.head_path.suffix == ".safetensors":
                from safetensors.torch import load_file

                state = load_file(self.head_path)
            else:
                state = torch.load(self.head_path, map_location="cpu", weights_only=True)
            state = {name.removeprefix("layers."): t.float() for name, t in state.items()}
            layers: dict[int, nn.Module] = {}
            for name, t in state.items():
                if name.endswith(".weight"):
                    layers[int(name.split(".")[0])] = nn.Linear(t.shape[1], t.shape[0])
            # The dropouts between them, which do nothing here.
            head = nn.Sequential(*(layers.get(i, nn.Identity()) for i in range(max(layers) + 1)))
            head.load_state_dict(state)
            self._head = head.to(self.device).eval().requires_grad_(False)


def own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def preprocess(images: Tensor, settings: dict[str, Any], size: int) -> Tensor:
    """uint8 [N, 3, H, W] -> fp32 [N, 3, size, size]: shorter side to `size` by antialiased bicubic, centre crop, normalised. No torchvision.

    Within 1.5 grey levels of transformers' own image processor, which resizes in integers.
    """
    H, W = images.shape[-2:]
    scale = size / min(H, W)
    shape = (size, max(size, int(W * scale))) if H <= W else (max(size, int(H * scale)), size)
    x = images.float()
    if shape != (H, W):
        x = F.interpolate(x, shape, mode="bicubic", antialias=True, align_corners=False).round().clamp(0, 255)
    top, left = (shape[0] - size) // 2, (shape[1] - size) // 2
    x = x[..., top : top + size, left : left + size] / 255
    mean, std = (torch.tensor(settings[key], device=x.device).view(3, 1, 1) for key in ("image_mean", "image_std"))
    return (x - mean) / std
