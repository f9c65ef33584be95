"""The Qwen-Image adapter against diffusers' own pipeline; the glyphs assets; bad model paths."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from safetensors import safe_open

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.config import ConfigError, SigmasConfig
from flowgrpo_fast.models import build_adapter, resolve_model_path
from flowgrpo_fast.models.glyph_prompts import ALPHABET, glyph_prompt, glyph_texts
from flowgrpo_fast.models.glyphs import CAPTION_ERRORS, build_tokenizer, miscaption, pretrain
from flowgrpo_fast.models.image_vae import decode_single_frames
from flowgrpo_fast.models.qwen_image import TEMPLATE, TEMPLATE_DROP, QwenImageAdapter
from tests.tiny import CPU, tiny_adapter, tiny_pipeline


@pytest.fixture(scope="module")
def pipe() -> QwenImagePipeline:
    pipeline = QwenImagePipeline.from_pretrained(tiny_pipeline())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_template_is_the_pipelines(pipe: QwenImagePipeline) -> None:
    assert pipe.prompt_template_encode == TEMPLATE
    assert pipe.prompt_template_encode_start_idx == TEMPLATE_DROP


@pytest.mark.parametrize("prompts", [["draw K7"], ["draw K7", "a much longer prompt, with accents: é and 字"]])
def test_prompt_embeddings_are_the_pipelines(pipe: QwenImagePipeline, prompts: list[str]) -> None:
    embeds, mask = pipe.encode_prompt(prompts)
    ours = tiny_adapter().encode(tiny_adapter().tokenize(prompts, 200))
    torch.testing.assert_close(ours.embeds, embeds, rtol=0, atol=1e-6)
    ours_mask = ours.attention_mask()
    assert (mask is None) == (ours_mask is None)
    if mask is not None and ours_mask is not None:
        assert torch.equal(mask.bool(), ours_mask)


def test_sigmas_are_the_pipelines(pipe: QwenImagePipeline) -> None:
    for steps, side in ((6, 64), (10, 128)):
        pipe("x", num_inference_steps=steps, height=side, width=side, true_cfg_scale=1.0, output_type="latent")
        assert torch.equal(tiny_adapter().sigmas(steps, MediaSize(side, side), SigmasConfig()), pipe.scheduler.sigmas)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_ode_sample_is_the_pipelines_image(pipe: QwenImagePipeline, scale: float) -> None:
    """Same initial noise, ODE, with and without true CFG (text of different length: masked): the same image within one grey level."""
    from tests.tiny import request, sampling, tiny_rollout

    negative = "blurry, of low quality" if scale > 1 else None
    rollout = tiny_rollout()
    params = sampling(window_size=0, num_steps=4, guidance_scale=scale)
    batch = rollout.generate([request("draw K7", 0, [0, 0], negative)], params, 0)
    noise = rollout._initial_noise(3, torch.tensor([0, 1]), (16, 64))
    theirs = pipe(
        "draw K7", negative_prompt=negative, num_inference_steps=4, height=64, width=64, true_cfg_scale=scale,
        num_images_per_prompt=1, latents=noise[:1].clone(), output_type="latent",
    ).images  # fmt: skip
    torch.testing.assert_close(batch.latents[:1, 0], theirs, rtol=0, atol=1e-5)
    image = pipe(
        "draw K7", negative_prompt=negative, num_inference_steps=4, height=64, width=64, true_cfg_scale=scale,
        latents=noise[:1].clone(), output_type="np",
    ).images[0]  # fmt: skip
    assert batch.images is not None
    ours = batch.images[0].permute(1, 2, 0).numpy().astype(int)
    assert np.abs(ours - (image * 255).round().astype(int)).max() <= 1


def test_cfg_branches_in_one_forward_equal_two() -> None:
    """Within fp32 rounding (4 times that of one branch, by the guidance scale), for text of equal and of different length (masked)."""
    from flowgrpo_fast.ops import cfg_combine

    adapter, x, sigma = tiny_adapter(), torch.randn(3, 16, 64), torch.full((3,), 0.7)
    transformer = adapter.load_transformer().eval()
    for negative_text in ("draw B2", "blurry and of low quality"):
        pos, neg = (adapter.encode(adapter.tokenize([t], 99)).repeated(3) for t in ("draw K7", negative_text))
        with torch.no_grad():
            joint = adapter.velocity(transformer, x, sigma, pos, neg, 4.0, MediaSize(64, 64))
            apart = [adapter.velocity(transformer, x, sigma, e, None, 1.0, MediaSize(64, 64)) for e in (pos, neg)]
        torch.testing.assert_close(joint, cfg_combine(*apart, 4.0, rescale=True), rtol=0, atol=5e-6)


def test_single_frame_vae_is_diffusers_own_without_the_zeros() -> None:
    """Encoder and decoder agree to fp32 rounding, on one frame and on a video (whose first frame is a single one too)."""
    stock, ours = (AutoencoderKLQwenImage.from_pretrained(tiny_pipeline() / "vae").eval() for _ in range(2))
    decode_single_frames(ours)
    g = torch.Generator().manual_seed(0)
    for frames in (1, 5):
        x = torch.randn(2, 3, frames, 32, 32, generator=g)
        with torch.no_grad():
            z = stock.encode(x).latent_dist.mean
            torch.testing.assert_close(ours.encode(x).latent_dist.mean, z, rtol=0, atol=2e-5)
            torch.testing.assert_close(ours.decode(z).sample, stock.decode(z).sample, rtol=0, atol=2e-5)


def test_prompt_over_the_limit_is_refused_not_cut() -> None:
    with pytest.raises(ValueError, match=r"prompt of 3\d tokens is over rollout.max_sequence_length 20"):
        tiny_adapter().tokenize(["draw K7", "a prompt that is far too long"], 20)


def test_image_size_must_fit() -> None:
    with pytest.raises(ValueError, match="60 x 64: both must divide by 16"):
        tiny_adapter().latent_shape(MediaSize(60, 64))


def test_another_tokenizer_is_recognised(tmp_path: Path) -> None:
    """The trap of notes_glyphs: a tokenizer that loads without error and splits the template differently."""
    import shutil

    shutil.copytree(tiny_pipeline(), tmp_path / "model")
    plain = build_tokenizer()
    type(plain)(vocab={k: v for k, v in plain.get_vocab().items() if v < 259}, merges=[]).save_pretrained(
        tmp_path / "model" / "tokenizer"
    )
    with pytest.raises(ValueError, match="not Qwen-Image's tokenizer"):
        QwenImageAdapter(tmp_path / "model", CPU, torch.float32)


@pytest.mark.parametrize(
    ("family", "path", "message"),
    [
        ("qwen_image", "/no/such/folder", "not a diffusers folder"),
        ("qwen_image", "builtin:glyph", "there is glyphs"),
        ("qwen_imag", "builtin:glyphs", "did you mean 'qwen_image'"),
        ("tests.tiny:Nothing", "builtin:glyphs", "cannot import"),
    ],
)
def test_bad_model_settings(family: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_adapter(family, path, CPU, torch.float32)


def test_prompt_split_is_fixed_and_disjoint() -> None:
    train, validation = glyph_texts("train"), glyph_texts("validation")
    assert len(validation) == 128
    assert len(train) + 128 == len(ALPHABET) ** 2
    assert not set(train) & set(validation)
    assert validation[:3] == ["B3", "ND", "2C"]  # the shipped model has not seen them


def test_pretraining_script_runs_and_writes_what_it_did(tmp_path: Path) -> None:
    """One step of everything: the folder loads, with latent statistics, a card and a record."""
    pretrain(tmp_path, seed=3, vae_steps=1, flow_steps=1, careless_steps=1, images=4)
    adapter = build_adapter("qwen_image", str(tmp_path), CPU, torch.float32)
    assert adapter.load_transformer().dtype == torch.float32
    assert any(mean != 0.0 for mean in json.loads((tmp_path / "vae" / "config.json").read_text())["latents_mean"])
    record = json.loads((tmp_path / "training.json").read_text())
    assert (record["seed"], record["careless_steps"], record["caption_errors"]) == (3, 1, CAPTION_ERRORS)
    assert "--seed 3" in (tmp_path / "README.md").read_text()


def test_wrong_captions_are_a_known_share_and_never_validation_texts() -> None:
    rng, train = random.Random(0), glyph_texts("train")
    pairs = [(text, miscaption(text, set(train), rng)) for text in train]
    assert not {caption for _, caption in pairs} & set(glyph_texts("validation"))
    wrong = sum(a != b for text, caption in pairs for a, b in zip(text, caption, strict=True)) / (2 * len(train))
    assert CAPTION_ERRORS * 0.8 < wrong < CAPTION_ERRORS * 1.1


def test_shipped_glyphs_are_small_complete_and_what_their_card_says() -> None:
    folder = resolve_model_path("builtin:glyphs")
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < 8_000_000
    assert (folder / "README.md").read_text().startswith("---")
    record = json.loads((folder / "training.json").read_text())
    assert record["seed"] == 0
    with safe_open(folder / "transformer" / "diffusion_pytorch_model.safetensors", "pt") as weights:
        assert sum(weights.get_tensor(name).numel() for name in weights.keys()) == 1_888_768  # noqa: SIM118
    adapter = build_adapter("qwen_image", "builtin:glyphs", CPU, torch.float32)
    ids = adapter.tokenize([glyph_prompt("K7")], 32).input_ids
    assert torch.equal(ids[0], torch.tensor(build_tokenizer()(TEMPLATE.format('draw "K7"')).input_ids))
