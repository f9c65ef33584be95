"""Families that edit: against diffusers' own pipelines, trained with ratio 1, and what is asked of the prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImagePipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from transformers import BatchFeature
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.config import ConfigError, SigmasConfig
from flowgrpo_fast.data.images import load_image
from flowgrpo_fast.data.prompts import PromptRecord
from flowgrpo_fast.inputs import Inputs, require_images
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.models import build_adapter
from flowgrpo_fast.models.base import PromptTokens
from flowgrpo_fast.rollout.base import RolloutRequest
from flowgrpo_fast.rollout.in_process import InProcessRollout, stack_tokens
from flowgrpo_fast.train import settle_environment
from flowgrpo_fast.trainer import Trainer
from tests.pipelines import pipeline_folder
from tests.tiny import CPU, sampling, tiny_config

SIZE, PROMPT, NEGATIVE = MediaSize(64, 64), "draw a cat", "blurry, of low quality"
GUIDANCE = {"flux_kontext": 2.5, "qwen_image_edit": 4.0, "qwen_image_edit_plus": 4.0}
each_family = pytest.mark.parametrize("family", GUIDANCE)


@pytest.fixture(scope="module", autouse=True)
def one_rank(process_group: None) -> None:
    settle_environment(tiny_config(Path("unused"), "engine.threads=1"), None)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    files = [folder / f"{i}.png" for i in range(2)]
    for file in files:
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((64, 64), Image.Resampling.BICUBIC).save(file)
    return files


class Processor:
    """Text and image halves of Qwen2VLProcessor, whose video half needs torchvision."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder / "processor")
        self.tokenizer = tokenizer

    def __call__(self, text: list[str], images: Any, padding: bool, return_tensors: str) -> BatchFeature:
        seen = self.image_processor(images=images, return_tensors=return_tensors)
        each = int(seen["image_grid_thw"][0].prod()) // 4
        expanded = [t.replace("<|image_pad|>", "<|image_pad|>" * each) for t in text]
        return BatchFeature({**self.tokenizer(expanded, padding=padding, return_tensors=return_tensors), **seen})


def theirs(
    family: str, noise: torch.Tensor, files: list[Path], output_type: str, monkeypatch: pytest.MonkeyPatch
) -> Any:
    pictures = [Image.open(file).convert("RGB") for file in files]
    folder = pipeline_folder(family)
    common: dict[str, Any] = {
        "height": 64, "width": 64, "num_inference_steps": 4, "latents": noise.clone(), "output_type": output_type, "max_sequence_length": 64,
    }  # fmt: skip
    if family == "flux_kontext":
        kontext = FluxKontextPipeline.from_pretrained(folder)
        kontext.set_progress_bar_config(disable=True)
        return kontext(
            pictures[0], PROMPT, guidance_scale=GUIDANCE[family], _auto_resize=False, max_area=64 * 64, **common
        ).images
    base = QwenImagePipeline.from_pretrained(folder)
    edit = {"qwen_image_edit": QwenImageEditPipeline, "qwen_image_edit_plus": QwenImageEditPlusPipeline}[family]
    pipe = edit(**base.components, processor=Processor(folder, base.tokenizer))
    pipe.set_progress_bar_config(disable=True)
    # A megapixel, where the size of the samples is meant.
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        original = module.calculate_dimensions
        monkeypatch.setattr(
            module,
            "calculate_dimensions",
            lambda area, ratio, of=original: (64, 64) if area == 1024 * 1024 else of(area, ratio),
        )
    if family == "qwen_image_edit":
        monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (64, 64, None))
    picture = pictures if family == "qwen_image_edit_plus" else pictures[0]
    return pipe(picture, PROMPT, true_cfg_scale=GUIDANCE[family], negative_prompt=NEGATIVE, **common).images


def with_images(tokens: PromptTokens, files: list[Path]) -> PromptTokens:
    return replace(tokens, images=torch.stack([load_image(str(file), SIZE) for file in files])[None])


@each_family
def test_ode_sample_is_diffusers_own(family: str, pictures: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    adapter: Any = build_adapter(family, str(pipeline_folder(family)), CPU, torch.float32)
    network = adapter.load_transformer().eval()
    rollout = InProcessRollout(adapter, network, SigmasConfig(), CPU)
    results = []
    # Edit-Plus gets both pictures, and then in the other order.
    sources = [order[: adapter.max_source_images] for order in (pictures, pictures[::-1])]
    for files in sources:
        guided = adapter.needs_negative(GUIDANCE[family])
        negative = with_images(adapter.tokenize([NEGATIVE], 64), files) if guided else None
        request = RolloutRequest(
            0, with_images(adapter.tokenize([PROMPT], 64), files), negative, torch.tensor([0, 1]), torch.zeros(2, dtype=torch.int64)
        )  # fmt: skip
        results.append(
            rollout.generate([request], sampling(num_steps=4, guidance_scale=GUIDANCE[family], window_size=0), 0)
        )
    # Other images, another sample.
    assert float((results[0].latents - results[1].latents).abs().max()) > 1e-3
    batch = results[0]
    noise = rollout._initial_noise(3, torch.tensor([0]), adapter.latent_shape(SIZE))
    latents = theirs(family, noise, sources[0], "latent", monkeypatch)
    pixels = np.asarray(theirs(family, noise, sources[0], "np", monkeypatch))[0]
    torch.testing.assert_close(batch.latents[:1, 0], latents, rtol=0, atol=1e-4)
    assert batch.images is not None
    assert np.abs(batch.images[0].permute(1, 2, 0).numpy().astype(int) - (pixels * 255).round().astype(int)).max() <= 1


@each_family
def test_trained_with_ratio_one(family: str, pictures: list[Path], tmp_path: Path) -> None:
    """In full; with LoRA in test_matrix.py."""
    rows = [
        {
            "prompt": f"draw {word}",
            "image": [str(pictures[(i + j) % 2]) for j in range(2 if family.endswith("plus") else 1)],
        }
        for i, word in enumerate(("cat", "a big dog", "x", "y y"))
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config(
        tmp_path / "run", f"model.family={family}", f"model.path={pipeline_folder(family)}", "model.train=full",
        f"data.train={tmp_path / 'prompts.jsonl'}", f"data.validation={tmp_path / 'prompts.jsonl'}", "data.negative_prompt=blurry",
        f"rollout.guidance_scale={GUIDANCE[family]}", "rollout.max_sequence_length=64", "trainer.total_steps=2", "engine.threads=1", "engine.zero_stage=0",
    )  # fmt: skip
    trainer = Trainer(config, Inputs(config, 1), CPU)
    trainer.run()
    trainer.engine.close()
    for row in read_metrics(tmp_path / "run"):
        assert row["policy/first_ratio_max_deviation"] == 0.0
        assert row["rollout/log_ratio_max"] == 0.0
        assert row["optimizer/grad_norm"] > 0


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([None], "prompt 0 .'draw'. has 0 images: flux_kontext edits 1; write"),
        ([["a.png", "b.png"]], "prompt 0 .'draw'. has 2 images: flux_kontext edits 1; write"),
        (["/nowhere.png"], "prompt 0 .'draw'. has image '/nowhere.png', which is no file"),
    ],
)
def test_a_prompt_without_its_images_stops_before_loading(images: list[Any], message: str, tmp_path: Path) -> None:
    rows = [{"prompt": "draw", "image": image} for image in images]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config(
        tmp_path, "model.family=flux_kontext", f"model.path={pipeline_folder('flux_kontext')}", f"data.train={tmp_path / 'prompts.jsonl'}", "data.validation=null",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        Inputs(config, 1)


def test_prompts_have_as_many_images_as_each_other(pictures: list[Path]) -> None:
    one, two = (PromptRecord(i, "draw", images=tuple(map(str, pictures[: i + 1]))) for i in range(2))
    require_images([two, two], "qwen_image_edit_plus", 3)
    with pytest.raises(ConfigError, match="prompt 1 .'draw'. has 2 images, prompt 0 1: give all as many"):
        require_images([one, two], "qwen_image_edit_plus", 3)


def test_images_of_some_prompts_of_a_forward_alone_are_an_error(pictures: list[Path]) -> None:
    adapter: Any = build_adapter("flux_kontext", str(pipeline_folder("flux_kontext")), CPU, torch.float32)
    tokens = adapter.tokenize([PROMPT], 64)
    with pytest.raises(ValueError, match="1 of 2 prompts of one forward have an image to edit"):
        stack_tokens([with_images(tokens, pictures[:1]), tokens])
