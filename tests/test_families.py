"""Each family's adapter against diffusers' own pipeline, and the trainer's replay of its rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.config import ConfigError, SigmasConfig
from flowgrpo_fast.inputs import Inputs
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.models import build_adapter
from flowgrpo_fast.models.pipeline import PipelineAdapter
from flowgrpo_fast.rollout.base import RolloutRequest
from flowgrpo_fast.rollout.in_process import InProcessRollout
from flowgrpo_fast.train import settle_environment
from flowgrpo_fast.trainer import Trainer
from tests.pipelines import pipeline_folder
from tests.tiny import CPU, exported, sampling, tiny_config

SQUARE = MediaSize(64, 64)
PROMPT, NEGATIVE = "draw a cat", "blurry, of low quality"


@dataclass(frozen=True)
class Family:
    """How diffusers' pipeline is called for the same sample."""

    name: str
    guidance: float
    size: MediaSize = SQUARE
    kind: str = "pipeline"
    max_length: int = 64
    """Text tokens."""

    @property
    def family(self) -> str:
        return self.name.partition("-")[0]


FAMILIES = [
    Family("qwen_image", 4.0),
    Family("sd3", 4.5, kind="double_shift"),
    Family("sd3", 1.0, kind="double_shift"),
    Family("flux", 3.5),
    Family("z_image", 3.0),
    Family("wan", 4.0, MediaSize(32, 48, 5), kind="double_shift"),
    Family("wan-2.2-ti2v", 4.0, MediaSize(32, 32, 5), kind="double_shift"),
]
each_family = pytest.mark.parametrize("case", FAMILIES, ids=lambda f: f"{f.name}-{f.guidance:g}")


@pytest.fixture(scope="module", autouse=True)
def in_one_rank(process_group: None) -> None:
    settle_environment(tiny_config(Path("unused"), "engine.threads=1"), None)


def adapter_of(case: Family) -> Any:
    return build_adapter(case.family, str(pipeline_folder(case.name)), CPU, torch.float32)


def theirs(case: Family, noise: torch.Tensor, output_type: str) -> Any:
    pipe = DiffusionPipeline.from_pretrained(pipeline_folder(case.name))
    pipe.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {"guidance_scale": case.guidance, "negative_prompt": NEGATIVE}
    if case.family == "qwen_image":
        options = {"true_cfg_scale": case.guidance, "negative_prompt": NEGATIVE}
    if case.family == "flux":
        options = {"guidance_scale": case.guidance}
    if case.family == "z_image":
        options["guidance_scale"] = case.guidance - 1  # v_pos + g (v_pos - v_neg)
    if case.size.frames > 1:
        options["num_frames"] = case.size.frames
    result = pipe(
        PROMPT, num_inference_steps=4, height=case.size.height, width=case.size.width, latents=noise.clone(), output_type=output_type,
        max_sequence_length=case.max_length, **options,
    )  # fmt: skip
    return result.frames if case.size.frames > 1 else result.images


@each_family
def test_ode_sample_is_diffusers_own(case: Family) -> None:
    """Same initial noise, schedule, guidance: latents to 1e-4, pixels within one grey level."""
    adapter = adapter_of(case)
    rollout = InProcessRollout(adapter, adapter.load_transformer().eval(), SigmasConfig(kind=case.kind, shift=3.0), CPU)
    guided = adapter.needs_negative(case.guidance)
    request = RolloutRequest(
        0,
        adapter.tokenize([PROMPT], case.max_length),
        adapter.tokenize([NEGATIVE], case.max_length) if guided else None,
        torch.tensor([0, 1]),
        torch.zeros(2, dtype=torch.int64),
    )
    params = sampling(**case.size._asdict(), num_steps=4, guidance_scale=case.guidance, window_size=0)
    batch = rollout.generate([request], params, 0)
    noise = rollout._initial_noise(params.seed, torch.tensor([0]), adapter.latent_shape(case.size))
    latents = theirs(case, noise, "latent")
    assert float((batch.latents[:1, 0] - noise).abs().max()) > 0.1, "the network does nothing"
    torch.testing.assert_close(batch.latents[:1, 0], latents, rtol=0, atol=1e-4)
    pixels = np.asarray(theirs(case, noise, "np"))[0]
    assert batch.media is not None
    ours = batch.media[0].movedim(-3, -1).numpy().astype(int)
    assert ours.shape == pixels.shape
    assert ours.std() > 1, "one colour"
    assert np.abs(ours - (pixels * 255).round().astype(int)).max() <= 1


@each_family
def test_the_prompt_matters(case: Family) -> None:
    adapter = adapter_of(case)
    network = adapter.load_transformer().eval()
    x, sigma = torch.randn(1, *adapter.latent_shape(case.size)), torch.full((1,), 0.6)
    texts = [adapter.encode(adapter.tokenize([p], case.max_length)) for p in (PROMPT, NEGATIVE)]
    with torch.no_grad():
        a, b = (adapter.velocity(network, x, sigma, text, None, 1.0, case.size) for text in texts)
    assert float((a - b).abs().max()) > 1e-3


# Qwen-Image is trained in test_trainer.py.
@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize(
    "case", [f for f in FAMILIES if f.name != "qwen_image" and f.guidance > 1], ids=lambda f: f.name
)
def test_replay_has_ratio_one_to_the_last_bit(case: Family, train: str, tmp_path: Path) -> None:
    """Two steps of the trainer; the LoRA preset binds, learns and exports."""
    config = tiny_config(
        tmp_path, f"model.family={case.family}", f"model.path={pipeline_folder(case.name)}", f"model.train={train}", f"engine.zero_stage={3 if train == 'full' else 0}", "model.lora.rank=2",
        f"rollout.height={case.size.height}", f"rollout.width={case.size.width}", f"rollout.frames={case.size.frames}",
        f"rollout.guidance_scale={case.guidance}", "rollout.max_sequence_length=64", "data.negative_prompt=blurry", "trainer.total_steps=2", "validation.num_prompts=1",
        "engine.threads=1",
    )  # fmt: skip
    trainer = Trainer(config, Inputs(config, 1), CPU)
    trainer.run()
    trainer.engine.close()
    for row in read_metrics(tmp_path):
        assert row["policy/first_ratio_max_deviation"] == 0.0
        assert row["rollout/log_ratio_max"] == 0.0
        assert row["optimizer/grad_norm"] > 0
    trained, start = exported(tmp_path), adapter_of(case).load_transformer().state_dict()
    assert all(bool(t.isfinite().all()) for t in trained.values())
    # A new adapter's B is zero.
    assert any(bool((t != start.get(name, 0)).any()) for name, t in trained.items() if "lora_A" not in name)
    if train == "full":
        pipe = DiffusionPipeline.from_pretrained(tmp_path / "export" / "final")
        loaded = pipe.transformer.state_dict()
        assert loaded.keys() == trained.keys()
        assert all(torch.equal(t, trained[name]) for name, t in loaded.items())


@pytest.mark.parametrize("name", ["sd3", "flux", "wan", "z_image"])
def test_sizes_and_prompts_that_do_not_fit(name: str) -> None:
    adapter: PipelineAdapter = build_adapter(name, str(pipeline_folder(name)), CPU, torch.float32)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=f"60 x 64: both must divide by 16 for {name}"):
        adapter.latent_shape(MediaSize(60, 64))
    with pytest.raises(
        ValueError, match=r"prompt of \d+ tokens is over rollout.max_sequence_length 8: 'a prompt that is too long'"
    ):
        adapter.tokenize(["short", "a prompt that is too long"], 8)


def test_wan_takes_one_more_than_a_multiple_of_four_frames() -> None:
    with pytest.raises(ValueError, match="rollout.frames = 6: one more than a multiple of 4 for wan"):
        build_adapter("wan", str(pipeline_folder("wan")), CPU, torch.float32).latent_shape(MediaSize(32, 32, 6))


def test_wan_with_two_transformers_is_refused(tmp_path: Path) -> None:
    import json
    import shutil

    shutil.copytree(pipeline_folder("wan"), tmp_path / "wan")
    index = tmp_path / "wan" / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"boundary_ratio": 0.875}))
    with pytest.raises(ConfigError, match="has two transformers .*Wan 2.2 A14B"):
        build_adapter("wan", str(tmp_path / "wan"), CPU, torch.float32)
