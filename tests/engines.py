"""Trainers over the real vllm-omni on the CPU, shared by test_vllm_omni.py and test_vllm_omni_faults.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo_fast.config import Config
from flowgrpo_fast.inputs import Inputs
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.train import settle_environment
from flowgrpo_fast.trainer import Trainer
from tests.tiny import CPU, exported, request, tiny_config

ROOT = Path(__file__).parents[1]
PYTHON = os.environ.get("FLOWGRPO_ROLLOUT_PYTHON", str(ROOT / ".venv-rollout" / "bin" / "python"))
RANK, ALPHA = 4, 8.0
TRAINED = ("reward/", "advantage/", "policy/", "optimizer/", "validation/")
VLLM = (
    "rollout.backend=vllm_omni",
    "rollout.server.cpu=true",
    f"rollout.python={PYTHON}",
    "rollout.server.threads=1",
)
LORA_RUN = ("model.train=lora", f"model.lora.rank={RANK}", f"model.lora.alpha={ALPHA}")


@pytest.fixture(scope="module", autouse=True)
def one_thread(process_group: None) -> None:
    torch.use_deterministic_algorithms(False)
    settle_environment(tiny_config(Path("unused"), "engine.threads=1"), None)


def run_trainer(config: Config) -> Trainer:
    return finish(Trainer(config, Inputs(config, 1), CPU))


def finish(trainer: Trainer) -> Trainer:
    try:
        trainer.run()
    finally:
        trainer.engine.close()
        trainer.rollout.close()
    return trainer


def assert_same_training(a: Path, b: Path) -> None:
    """Every metric of rewards, advantages, updates and validation that both have, and the exported weights, to the last bit."""
    for mine, theirs in zip(read_metrics(a), read_metrics(b), strict=True):
        common = {name for name in mine.keys() & theirs.keys() if name.startswith(TRAINED)}
        assert {"reward/mean", "policy/loss", "optimizer/grad_norm"} <= common
        for name in common:
            assert mine[name] == theirs[name], name
    weights, others = exported(a), exported(b)
    assert weights.keys() == others.keys()
    assert all(torch.equal(t, others[name]) for name, t in weights.items())


PROMPTS = ("two words", "a much longer prompt with many more words in it")


def groups(negative: str | None = None, starts: tuple[int, ...] = (0, 0, 1, 1), count: int = 2) -> list[Any]:
    return [request(prompt, i, list(starts), negative) for i, prompt in enumerate(PROMPTS[:count])]
