"""A vision-language model as judge, behind any OpenAI-compatible server (`vllm serve MODEL`): it sees the image, is asked a question, and its answer holds a number.

Of an edited image it is first shown what was edited (`source_images` of the metadata), as the network saw it.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.data.images import SOURCE_IMAGES, load_image
from flowgrpo_fast.rewards.base import register_reward
from flowgrpo_fast.rewards.frames import spread_frames
from flowgrpo_fast.rewards.http import png, post

QUESTION = (
    "How well does this image show the following? {prompt}\n"
    "Answer with one number from 0 (not at all) to 10 (perfectly), and nothing else."
)
EDIT_QUESTION = (
    "What comes before the last image was to be edited as follows: {prompt}\n"
    "The last is the result. How well does it follow the instruction and leave the rest as it was?"
    " Answer with one number from 0 (not at all) to 10 (perfectly), and nothing else."
)

# "8", "8/10", "Score: 8 out of 10." and "**8**"; not the 10 of those, and nothing of "8-9" or "7 (of ten)".
NUMBER_AT_THE_END = r"(?:^|[\s:*])(-?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*\d+)?[\s.*]*$"


@functools.lru_cache(maxsize=64)
def source_png(file: str, size: MediaSize) -> bytes:
    """Once for all samples of a group."""
    return png(load_image(file, size))


@register_reward("vlm_judge")
class VlmJudge:
    """reward = (number - low) / (high - low), from 0 to 1; NaN, a sample without a score, where the answer ends in no number, or in one outside.

    question: by default QUESTION, or EDIT_QUESTION; `{prompt}` and the fields of the sample's metadata are filled in. pattern: a regular expression whose first group is the number; the
    last match counts, so a judge may think aloud first. By default the number at the end of the answer. Videos: `frames` of them, evenly spaced, in one message. The key is read from $`api_key_env`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        question: str | None = None,
        pattern: str = NUMBER_AT_THE_END,
        low: float = 0.0,
        high: float = 10.0,
        frames: int = 4,
        concurrency: int = 8,
        timeout_s: float = 120.0,
        max_tokens: int = 256,
        api_key_env: str = "OPENAI_API_KEY",
    ):
        if high <= low:
            raise ValueError(f"high must be more than low, got {low} to {high}")
        if re.compile(pattern).groups != 1:
            raise ValueError(f"pattern must have one group, the number, got {pattern!r}")
        if min(frames, concurrency, max_tokens) < 1 or timeout_s <= 0:
            raise ValueError("frames, concurrency and max_tokens must be at least 1, timeout_s positive")
        self.url = url.rstrip("/") + "/chat/completions"
        self.model, self.question, self.pattern, self.low, self.high = model, question, re.compile(pattern), low, high
        self.frames, self.concurrency, self.timeout_s, self.max_tokens = frames, concurrency, timeout_s, max_tokens
        self.headers = {"Content-Type": "application/json"}
        if key := os.environ.get(api_key_env):
            self.headers["Authorization"] = f"Bearer {key}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        with ThreadPoolExecutor(min(self.concurrency, max(1, len(images)))) as pool:
            scores = pool.map(self._score, images, prompts, metadata)
            return torch.tensor(list(scores), dtype=torch.float32)

    def _score(self, image: Tensor, prompt: str, metadata: dict[str, Any]) -> float:
        shown, _ = spread_frames(image[None], self.frames)
        files = [png(frame) for frame in shown]
        sources = metadata.get(SOURCE_IMAGES, [])
        files = [source_png(source, MediaSize(*image.shape[-2:])) for source in sources] + files
        question = self.question or (EDIT_QUESTION if sources else QUESTION)
        urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content.append({"type": "text", "text": question.format(**{**metadata, "prompt": prompt})})
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
        }
        answer = post(self.url, json.dumps(request).encode(), self.headers, self.timeout_s)
        try:
            text = json.loads(answer)["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{self.url} answered no chat completion: {answer[:200]!r}") from error
        return self.score_of(text)

    def score_of(self, text: str) -> float:
        found = self.pattern.findall(text)
        number = float(found[-1]) if found else math.nan
        return (number - self.low) / (self.high - self.low) if self.low <= number <= self.high else math.nan
