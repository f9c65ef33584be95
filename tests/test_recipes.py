"""Every recipe in configs/: --dry-run as it stands, and two steps on its family's tiny random pipeline."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from flowgrpo_fast import train
from flowgrpo_fast.config_file import load_config
from flowgrpo_fast.inputs import Inputs
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.trainer import Trainer
from tests.engines import PYTHON
from tests.pipelines import pipeline_folder
from tests.tiny import CPU, tiny_config

ROOT = Path(__file__).parents[1]
# The demo's have tests of their own.
RECIPES = sorted(path for path in (ROOT / "configs").glob("*.yaml") if not path.name.startswith("glyphs"))
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


@pytest.fixture(scope="module", autouse=True)
def one_rank(process_group: None) -> None:
    train.settle_environment(tiny_config(Path("unused"), "engine.threads=1"), None)


@pytest.fixture
def inputs(tmp_path: Path, recipe: Path) -> list[str]:
    """What a user gives: the model, prompts, images to edit, and where the rewards' models are."""
    prompts, image = tmp_path / "prompts.jsonl", tmp_path / "image.png"
    Image.new("RGB", (64, 64), "teal").save(image)
    rows = [{"prompt": f'the word "{w}"', "text": w, "image": str(image)} for w in ("one", "two", "six")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(recipe, ["model.path=x", "data.train=x"])
    given = [
        f"model.path={pipeline_folder(config.model.family)}",
        f"data.train={prompts}",
        f"run_dir={tmp_path / 'run'}",
    ]
    for i, reward in enumerate(config.rewards):
        if "path" in reward.kwargs:
            given.append(f"rewards.{i}.kwargs.path={tmp_path}")
            (tmp_path / "config.json").touch()
            (tmp_path / "preprocessor_config.json").touch()
    return given


@each_recipe
def test_dry_run(recipe: Path, inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Those that sample by vllm-omni with its checks: the environment, the engine's settings. Here it has no GPUs."""
    engine = ("rollout.server.cpu=true", f"rollout.python={PYTHON}")
    assert train.main(["--config", str(recipe), *inputs, *engine, "engine.threads=1", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "memory of each of 1 rank(s)" in printed
    assert "update: " in printed


@each_recipe
def test_two_steps_on_a_tiny_pipeline(recipe: Path, inputs: list[str], tmp_path: Path) -> None:
    """Its algorithm, schedule, window and KL; fewer and smaller samples, another reward, fp32, ZeRO 0 (the hooks of ZeRO 3 would be most of the time)."""
    frames = load_config(recipe, inputs).rollout.frames
    config = load_config(recipe, [
        *inputs, "model.dtype=float32", "rollout.height=64", "rollout.width=64", f"rollout.frames={min(frames, 5)}",
        "rollout.backend=in_process", "rollout.colocated=false", "algorithm.group_size=2", "algorithm.groups_per_step=2", "rollout.max_sequence_length=32", "engine.gradient_checkpointing=false", "engine.micro_batch_size=null",
        "engine.offload_optimizer=none", "engine.threads=1", "engine.zero_stage=0", "rewards=[{name: tests.tiny:brightness}]", "trainer.total_steps=2",
        "logging.tensorboard=false", "logging.samples_every=0",
    ])  # fmt: skip
    trainer = Trainer(config, Inputs(config, 1), CPU)
    trainer.run()
    trainer.engine.close()
    rows: list[dict[str, Any]] = read_metrics(tmp_path / "run")
    assert len(rows) == 2
    assert all(row["optimizer/grad_norm"] > 0 for row in rows)
    if trainer.inputs.algorithm.process == "reverse":
        assert rows[0]["policy/first_ratio_max_deviation"] == 0.0


def test_every_recipe_says_where_it_is_from_and_how_it_is_run() -> None:
    for path in RECIPES:
        head = path.read_text().split("\n\n")[0].split("run_dir")[0]
        assert f"--config configs/{path.name}" in head, path.name
        assert re.search(r"flow_grpo|DanceGRPO|MixGRPO|DiffusionNFT", head), f"{path.name} cites no source"
        assert yaml.safe_load(path.read_text())["run_dir"] == f"runs/{path.stem}".removesuffix("_8gpu"), path.name
