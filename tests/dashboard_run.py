"""A run under way, for the tests of the dashboard's server and of its page."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowgrpo_fast.dashboard import Dashboard
from flowgrpo_fast.metrics import MetricsWriter
from flowgrpo_fast.samples import image_grid, write_prompt_samples


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "my <run>")


@pytest.fixture
def live(run_dir: Path) -> Iterator[Dashboard]:
    dashboard = Dashboard(run_dir, port=0).start()
    yield dashboard
    dashboard.close()


def make_run(folder: Path) -> Path:
    """Three of forty steps, samples of two moments."""
    writer = MetricsWriter(folder, tensorboard=False)
    for step in (1, 2, 3):
        writer.log(step, step_metrics(step))
    writer.close()
    (folder / "config.yaml").write_text("trainer:\n  total_steps: 40\n")
    for i, moment in enumerate(("before", "step_000002")):
        images = torch.full((2, 3, 8, 8), 100 * i, dtype=torch.uint8)
        write_prompt_samples(folder / "samples", moment, images, [0, 4], [f"a <b>fox</b>\n0.{i}5", "a dog\n1.00"])
        image_grid(images).save(folder / f"samples/{moment}.png")
        os.utime(folder / f"samples/{moment}.png", (1000 + i, 1000 + i))
    return folder


def step_metrics(step: int) -> dict[str, float]:
    return {
        "reward/mean": 0.25 + step / 100,
        "policy/ratio_max_deviation": 1e-5,
        "optimizer/grad_norm": float("nan") if step == 2 else 0.5,
        "throughput/images_per_s": 20.0,
        "timing/rollout_s": 2.0,
        "timing/update_s": 1.0,
        "timing/step_s": 3.5,
    }
