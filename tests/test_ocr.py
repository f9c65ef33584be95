"""The OCR reward on real renders: reads what is there, scores by edit distance, and the batch does not matter."""

from __future__ import annotations

import random
import socket
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowgrpo_fast.models.glyph_prompts import glyph_prompt, glyph_texts
from flowgrpo_fast.models.glyphs import render
from flowgrpo_fast.rewards.ocr import MODELS, OcrReward, levenshtein, wanted_text

TEXTS = glyph_texts("validation")[:64]
SHAPE = [3, 48, 64]


def pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.fixture(scope="module")
def images() -> Tensor:
    rng = random.Random(0)
    return torch.stack([pixels(render(text, rng)) for text in TEXTS])


@pytest.fixture(scope="module")
def reward() -> OcrReward:
    return OcrReward(rec_image_shape=SHAPE)


def score(reward: OcrReward, images: Tensor, texts: list[str]) -> dict[str, Tensor]:
    return reward(images, [glyph_prompt(text) for text in texts], [{"text": text} for text in texts])


def test_reads_clean_renders(reward: OcrReward, images: Tensor) -> None:
    scores = score(reward, images, TEXTS)
    assert scores["reward"].shape == scores["exact_match"].shape == (len(TEXTS),)
    assert scores["reward"].dtype == scores["exact_match"].dtype == torch.float32
    assert scores["exact_match"].mean() >= 0.95
    assert torch.equal(scores["exact_match"] == 1, scores["reward"] == 1)


def test_rapidocrs_own_width_reads_them_too(images: Tensor) -> None:
    assert score(OcrReward(), images[:8], TEXTS[:8])["exact_match"].mean() >= 0.95


def test_wrong_picture_scores_less(reward: OcrReward, images: Tensor) -> None:
    # Texts that share no character with the picture's, place by place or otherwise.
    pairs = [(i, t) for i, own in enumerate(TEXTS[:24]) for t in TEXTS if not set(t) & set(own)][::40]
    scores = score(reward, images[[i for i, _ in pairs]], [t for _, t in pairs])
    assert len(pairs) > 20
    assert scores["reward"].max() < 1
    assert scores["reward"].mean() < 0.05
    assert scores["exact_match"].sum() == 0


def test_partial_score(reward: OcrReward) -> None:
    rng = random.Random(1)
    drawn = torch.stack([pixels(render("K7", rng))] * 4)
    scores = score(reward, drawn, ["K7", "K8", "K7K7", "7"])
    assert scores["reward"].tolist() == [1.0, 0.5, 0.5, 0.0]
    assert scores["exact_match"].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_blank_image_reads_as_nothing(reward: OcrReward) -> None:
    blank = torch.full((1, 3, 64, 64), 205, dtype=torch.uint8)
    assert reward.read(blank[0]) == ""
    assert score(reward, blank, ["K7"])["reward"].tolist() == [0.0]


def test_score_does_not_depend_on_the_batch(reward: OcrReward, images: Tensor) -> None:
    # Half noise: near ties between characters are where a batch would show.
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(256, images.shape, dtype=torch.uint8, generator=generator)
    blurred = torch.where(torch.rand(images.shape, generator=generator) < 0.5, noise, images)
    together = score(reward, blurred, TEXTS)["reward"]
    assert 0 < together.mean() < 1
    order = torch.randperm(len(TEXTS), generator=generator)
    shuffled = score(reward, blurred[order], [TEXTS[i] for i in order])["reward"]
    alone = torch.cat([score(reward, blurred[i : i + 1], TEXTS[i : i + 1])["reward"] for i in range(len(TEXTS))])
    assert torch.equal(shuffled, together[order])
    assert torch.equal(alone, together)
    assert torch.equal(score(reward, blurred.contiguous(memory_format=torch.channels_last), TEXTS)["reward"], together)


def test_detection_joins_lines_in_reading_order() -> None:
    page = Image.new("RGB", (480, 320), "white")
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(size=40)
    draw.text((270, 40), "SECOND", font=font, fill="black")
    draw.text((30, 40), "FIRST", font=font, fill="black")
    draw.text((60, 200), "THIRD", font=font, fill="black")
    reward = OcrReward(use_detection=True)
    assert reward.read(pixels(page)) == "FIRST SECOND THIRD"
    scores = reward(pixels(page)[None], ["a sign"], [{"ground_truth": "FIRST SECONDTHIRD"}])
    assert scores["reward"].tolist() == [1.0]
    assert reward.read(torch.full((3, 320, 480), 255, dtype=torch.uint8)) == ""


def test_case_and_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    monkeypatch.setattr(OcrReward, "read", lambda self, image: "Hello World")

    def exact(text: str, **kwargs: Any) -> float:
        return OcrReward(**kwargs)(image, [""], [{"text": text}])["exact_match"].item()

    assert exact("HelloWorld") == 1
    assert exact("Hello World") == 1
    assert exact("hello world") == 0
    assert exact("hello world", case_sensitive=False) == 1
    assert exact("HelloWorld", ignore_spaces=False) == 0


def test_wanted_text() -> None:
    assert wanted_text(0, 'draw "A1" and "B2"', {"text": "C3", "ground_truth": "D4"}) == "C3"
    assert wanted_text(0, 'draw "A1" and "B2"', {"ground_truth": "D4"}) == "D4"
    assert wanted_text(0, 'draw "A1" and "B2"', {}) == "A1"
    for prompt, metadata in [
        ("a cat", {}),
        ('draw ""', {}),
        ('draw "A1"', {"text": 12}),
        ('draw "A1"', {"text": "  "}),
    ]:
        with pytest.raises(ValueError, match=r"sample 3 .*does not say which text"):
            wanted_text(3, prompt, metadata)


def test_sample_without_text_is_an_error(reward: OcrReward, images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"sample 1 \(prompt 'a cat'"):
        reward(images[:2], ['"K7"', "a cat"], [{}, {}])


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("abc", "", 3), ("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("AB", "BA", 2)],
)
def test_levenshtein(a: str, b: str, distance: int) -> None:
    assert levenshtein(a, b) == distance == levenshtein(b, a)


@pytest.mark.parametrize(
    "kwargs",
    [{"rec_image_shape": [48, 64]}, {"rec_image_shape": [1, 48, 64]}, {"rec_image_shape": [3, 0, 64]}, {"threads": 0}],
)
def test_bad_arguments(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        OcrReward(**kwargs)


def test_takes_images_only(reward: OcrReward) -> None:
    with pytest.raises(ValueError, match=r"the OCR reward takes images, uint8 \[N, 3, H, W\]"):
        score(reward, torch.zeros(1, 2, 3, 64, 64, dtype=torch.uint8), ["K7"])


def test_needs_no_network_and_says_nothing(
    images: Tensor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("OCR reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    before = sorted(MODELS.iterdir())
    for use_detection in (False, True):
        score(OcrReward(use_detection=use_detection, threads=10_000), images[:1], TEXTS[:1])
    assert sorted(MODELS.iterdir()) == before
    assert capfd.readouterr() == ("", "")
