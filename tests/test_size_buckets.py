"""rollout.size_buckets: each training step has one size of samples, drawn by seed and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowgrpo_fast.config import ConfigError
from flowgrpo_fast.inputs import Inputs, step_size
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.train import settle_environment
from flowgrpo_fast.trainer import Trainer
from tests.tiny import CPU, tiny_adapter, tiny_config

SIZES = [[64, 64], [32, 64], [96, 32]]


@pytest.fixture(scope="module", autouse=True)
def one_rank(process_group: None) -> None:
    settle_environment(tiny_config(Path("unused"), "engine.threads=1"), None)


def test_each_step_takes_one(tmp_path: Path) -> None:
    """The ratio is 1 at each size."""
    config = tiny_config(
        tmp_path, f"rollout.size_buckets={SIZES}", "data.validation=null", "engine.threads=1", "trainer.total_steps=5"
    )
    trainer = Trainer(config, Inputs(config, 1), CPU)
    seen: list[list[int]] = []
    sample = trainer._sample

    def watched(*arguments: Any) -> Any:
        result = sample(*arguments)
        assert result.batch.images is not None
        seen.append(list(result.batch.images.shape[2:]))
        return result

    trainer._sample = watched  # type: ignore[method-assign]
    trainer.run()
    trainer.engine.close()
    assert seen == [list(step_size(config, step)[:2]) for step in range(5)]
    assert len({tuple(size) for size in seen}) > 1
    assert all(row["policy/first_ratio_max_deviation"] == 0.0 for row in read_metrics(tmp_path))


def test_all_are_drawn_about_equally_often(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, f"rollout.size_buckets={SIZES}")
    drawn = [list(step_size(config, step)[:2]) for step in range(300)]
    assert all(60 < drawn.count(size) < 140 for size in SIZES)
    other = tiny_config(tmp_path, f"rollout.size_buckets={SIZES}", "seed=1")
    assert drawn != [list(step_size(other, step)[:2]) for step in range(300)]


@pytest.mark.parametrize(
    ("buckets", "problem"),
    [
        ("[[64]]", r"rollout.size_buckets: \[64\] is not a \[height, width\]"),
        ("[[64, 60]]", "64 x 60: both must divide by 16"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path: Path, buckets: str, problem: str) -> None:
    config = tiny_config(tmp_path, f"rollout.size_buckets={buckets}")
    with pytest.raises(ConfigError, match=problem):
        Inputs(config, 1).plan(config, tiny_adapter())
