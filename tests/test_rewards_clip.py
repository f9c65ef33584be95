"""CLIP rewards over tiny random models: against transformers' own forward and image processor; videos; what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

from flowgrpo_fast.rewards import build_reward
from flowgrpo_fast.rewards.clip import preprocess
from flowgrpo_fast.rewards.frames import spread_frames
from tests.pipelines import clip_tokenizer

PROMPTS = ["a red square", "a red square", "two blue circles"]
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    tokenizer = clip_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    text = CLIPTextConfig(vocab_size=len(tokenizer), max_position_embeddings=16, **sizes, **ids)
    vision = CLIPVisionConfig(image_size=32, patch_size=8, **sizes)
    CLIPModel(
        CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=24)
    ).save_pretrained(path)
    tokenizer.save_pretrained(path)
    settings = {
        "image_mean": MEAN,
        "image_std": STD,
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
    }
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


def images(n: int = 3, height: int = 48, width: int = 64) -> Tensor:
    g = torch.Generator().manual_seed(1)
    coarse = torch.randint(0, 256, (n, 3, 6, 8), generator=g, dtype=torch.uint8).float()
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear").to(torch.uint8)


def score(name: str, folder: Path, media: Tensor, prompts: list[str] = PROMPTS, **kwargs: object) -> Tensor:
    found = build_reward(name, {"path": str(folder), **kwargs})(media, prompts, [{}] * len(media))
    assert isinstance(found, Tensor)
    return found


def test_scores_are_the_models_own(folder: Path) -> None:
    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), clip_tokenizer()
    pixels = preprocess(images(), {"image_mean": MEAN, "image_std": STD}, 32)
    tokens = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, pixel_values=pixels
        ).logits_per_image.diag()
    cosine = logits / model.logit_scale.exp()
    torch.testing.assert_close(score("clip_score", folder, images()), cosine, rtol=0, atol=1e-5)
    torch.testing.assert_close(score("hpsv2", folder, images()), cosine, rtol=0, atol=1e-5)
    torch.testing.assert_close(score("pickscore", folder, images()), logits / 26, rtol=0, atol=1e-4)
    assert float(cosine.detach().std()) > 1e-3


def test_preprocessing_is_pillows_within_rounding() -> None:
    media = images(2, 48, 80)
    got = preprocess(media, {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}, 32) * 255
    for image, tensor in zip(media, got, strict=True):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((53, 32), Image.Resampling.BICUBIC)
        wanted = (
            torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(32, 53, 3)[:, 10:42].permute(2, 0, 1)
        )
        assert float((tensor - wanted.float()).abs().max()) <= 1.5


def test_a_score_does_not_depend_on_the_batch(folder: Path) -> None:
    together = score("pickscore", folder, images())
    apart = torch.cat([score("pickscore", folder, images()[i : i + 1], PROMPTS[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-5)
    torch.testing.assert_close(score("pickscore", folder, images(), batch_size=2), together, rtol=0, atol=1e-5)


def test_aesthetic_head(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(24, 8), nn.Dropout(0.2), nn.Linear(8, 4), nn.Dropout(0.2), nn.Linear(4, 1)).eval()
    state = {f"layers.{name}": t for name, t in head.state_dict().items()}
    save_file(state, tmp_path / "head.safetensors")
    torch.save(state, tmp_path / "head.pth")
    reward = build_reward("clip_score", {"path": str(folder)})
    reward(images(), PROMPTS, [{}] * 3)
    expected = head(reward._embed_images(images()))[:, 0].detach()  # type: ignore[attr-defined]
    for file in ("head.safetensors", "head.pth"):
        got = score("aesthetic", folder, images(), head=str(tmp_path / file))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_videos_by_the_mean_of_evenly_spaced_frames(folder: Path) -> None:
    video = images(9).unflatten(0, (1, 9))
    assert torch.equal(spread_frames(video, 3)[0], video[0, [0, 4, 8]])
    apart = score("clip_score", folder, video[0, [0, 4, 8]], PROMPTS[:1] * 3)
    together = score("clip_score", folder, video, PROMPTS[:1], frames=3)
    assert float(together) == pytest.approx(float(apart.mean()), abs=1e-6)
    with pytest.raises(ValueError, match=r"takes uint8 .* got torch.float32 \[1, 3, 8, 8\]"):
        score("clip_score", folder, torch.zeros(1, 3, 8, 8), PROMPTS[:1])


def test_any_reward_of_images_scores_videos() -> None:
    video, arguments = images(10).unflatten(0, (2, 5)), (PROMPTS[1:], [{}] * 2)
    by_frame = [build_reward("jpeg_compressibility")(video[:, at], *arguments) for at in (0, 2, 4)]
    got = build_reward("frames", {"reward": "jpeg_compressibility", "frames": 3})(video, *arguments)
    assert isinstance(got, dict)
    torch.testing.assert_close(got["reward"], sum(by_frame) / 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "kwargs", "problem"),
    [
        ("pickscore", {"path": "/nowhere"}, "path '/nowhere' holds no config.json"),
        ("pickscore", {"dtype": "int8"}, "dtype must be one of float32"),
        ("pickscore", {"batch_size": 0}, "batch_size and frames must be at least 1"),
        ("aesthetic", {"head": "/nowhere.pth"}, "head '/nowhere.pth' is no file"),
    ],
)
def test_bad_arguments(folder: Path, name: str, kwargs: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        build_reward(name, {"path": str(folder), **kwargs})
