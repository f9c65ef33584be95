"""Each family with each algorithm: a step of LoRA on its tiny random pipeline, guidance on. See matrix.py."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from PIL import Image

from flowgrpo_fast.inputs import Inputs
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.train import settle_environment
from flowgrpo_fast.trainer import Trainer
from tests.matrix import ALGORITHMS, BY_ENGINE, ENGINE_FAMILIES, FAMILIES, SETTINGS
from tests.pipelines import pipeline_folder
from tests.tiny import CPU, tiny_config


@pytest.fixture(scope="module", autouse=True)
def one_rank(process_group: None) -> None:
    settle_environment(tiny_config(Path("unused"), "engine.threads=1"), None)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an image each, for the families that edit."""
    folder = tmp_path_factory.mktemp("prompts")
    Image.new("RGB", (64, 64), "teal").save(folder / "image.png")
    rows = [{"prompt": f"draw {word}", "image": str(folder / "image.png")} for word in ("a cat", "a dog")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "prompts.jsonl"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step(family: str, algorithm: str, prompts: Path, tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, f"data.train={prompts}", f"model.family={family}", f"model.path={pipeline_folder(family)}", "model.train=lora", "model.lora.rank=2", "data.validation=null",
        "data.negative_prompt=blurry", "rollout.max_sequence_length=64", "rollout.groups_per_batch=1", "algorithm.groups_per_step=2", "trainer.total_steps=1",
        "algorithm.train_timesteps=2", "engine.threads=1", "engine.zero_stage=0", *SETTINGS[family], *ALGORITHMS[algorithm],
    )  # fmt: skip
    trainer = Trainer(config, Inputs(config, 1), CPU)
    trainer.run()
    trainer.engine.close()
    (row,) = read_metrics(tmp_path)
    assert row["optimizer/grad_norm"] > 0
    assert math.isfinite(row["policy/loss"])
    if trainer.inputs.algorithm.process == "reverse":
        assert row["policy/first_ratio_max_deviation"] == 0.0


def test_tests_that_the_page_names_exist() -> None:
    for test in BY_ENGINE.values():
        file, _, name = test.partition("::")
        function, _, case = name.partition("[")
        text = (Path(__file__).parent / file).read_text()
        assert f"def {function}(" in text, test
        over_families = re.search(rf'parametrize\("name", \[\*ENGINE_FAMILIES\b.*\ndef {function}\(', text)
        assert not case or f'    "{case[:-1]}": (' in text or (over_families and case[:-1] in ENGINE_FAMILIES), test
