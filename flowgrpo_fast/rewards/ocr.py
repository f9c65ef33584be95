"""Does the image show the text that was asked for? Read by rapidocr, whose models are part of its wheel.

    reward = max(0, 1 - levenshtein(text, read) / len(text))        exact_match = 1 where text == read

The text is metadata["text"], else metadata["ground_truth"], else what stands between the prompt's first double quotes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import rapidocr
import torch
from torch import Tensor

from flowgrpo_fast.rewards.base import register_reward, require_images

MODELS = Path(rapidocr.__file__).parent / "models"


def levenshtein(a: str, b: str) -> int:
    """The least number of insertions, deletions and substitutions that turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


@register_reward("ocr")
class OcrReward:
    """Args:
        use_detection: find lines of text first, and join them in reading order. For text somewhere in a large image;
            without it the whole image is read as one line.
        rec_image_shape: [3, height, least width] at which a line is read; None is rapidocr's [3, 48, 320]. The cost is
            proportional to the width: for square images [3, 48, 64] reads as well at a quarter of the time.
        case_sensitive: "k7" is not "K7".
        threads: CPU threads for one image.
        ignore_spaces: compare without white space.

    Reads one image at a time, so that a score cannot depend on the batch; batches of 6 to 32 were no faster
    (16 ms an image either way at [3, 48, 64]). Safe to call from several threads.
    """

    def __init__(
        self,
        use_detection: bool = False,
        rec_image_shape: list[int] | None = None,
        case_sensitive: bool = True,
        threads: int = 1,
        ignore_spaces: bool = True,
    ):
        shape = [3, 48, 320] if rec_image_shape is None else list(rec_image_shape)
        if len(shape) != 3 or shape[0] != 3 or min(shape) < 1:
            raise ValueError(f"rec_image_shape must be [3, height, width], got {rec_image_shape}")
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self.case_sensitive = case_sensitive
        self.ignore_spaces = ignore_spaces
        self.engine = rapidocr.RapidOCR(
            params={
                "Global.use_det": use_detection,
                # Turns what it takes for upside-down text. On glyphs it read 91 % of upright renders instead of 100 %,
                # and passed 52 % of upside-down ones instead of 20 %.
                "Global.use_cls": False,
                "Global.log_level": "critical",
                # Given a path, rapidocr has nothing to look up and so nothing to download.
                "Det.model_path": str(MODELS / "PP-OCRv6_det_small.onnx"),
                "Rec.model_path": str(MODELS / "PP-OCRv6_rec_small.onnx"),
                "Rec.rec_img_shape": shape,
                # rapidocr ignores a number above the machine's, and then takes all of them.
                "EngineConfig.onnxruntime.intra_op_num_threads": min(threads, os.cpu_count() or 1),
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> dict[str, Tensor]:
        """images uint8 [N, 3, H, W] -> {"reward", "exact_match"}: fp32 [N]. ValueError where a sample has no text."""
        require_images(images, "the OCR reward")
        texts = [
            self._normalise(wanted_text(i, *sample)) for i, sample in enumerate(zip(prompts, metadata, strict=True))
        ]
        reads = [self._normalise(self.read(image)) for image in images]
        pairs = list(zip(texts, reads, strict=True))
        similarity = [max(0.0, 1 - levenshtein(text, read) / len(text)) for text, read in pairs]
        exact = [float(text == read) for text, read in pairs]
        return {
            "reward": torch.tensor(similarity, dtype=torch.float32),
            "exact_match": torch.tensor(exact, dtype=torch.float32),
        }

    def read(self, image: Tensor) -> str:
        """The text in one image, uint8 [3, H, W]; "" where there is none."""
        bgr = image.flip(0).permute(1, 2, 0).contiguous().numpy()
        lines: tuple[str, ...] | None = self.engine(bgr).txts  # type: ignore[union-attr]
        return " ".join(lines or ())

    def _normalise(self, text: str) -> str:
        text = text if self.case_sensitive else text.casefold()
        return "".join(text.split()) if self.ignore_spaces else text


def wanted_text(sample: int, prompt: str, metadata: dict[str, Any]) -> str:
    """The text that an image should show. ValueError, naming the sample, where nothing says so."""
    text = metadata.get("text") or metadata.get("ground_truth")
    if text is None and (quoted := re.search(r'"([^"]+)"', prompt)):
        text = quoted[1]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"sample {sample} (prompt {prompt!r}) does not say which text to look for: give its metadata a non-empty "
            'string "text", or put the text in double quotes in the prompt'
        )
    return text
