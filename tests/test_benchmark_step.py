"""The peers' loop of benchmarks/step.py computes what ours does: else its times would mean nothing. No speed is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import step
from benchmarks.table import read
from flowgrpo_fast.rollout.wire import free_port
from tests.launching import finish
from tests.ranks import Rank, preload


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    preload()


def start(folder: Path) -> None:
    shared = {"WORLD_SIZE": str(step.RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        Rank(
            ["--rank-of", str(folder)],
            {**shared, "RANK": str(r), "LOCAL_RANK": str(r)},
            folder / f"rank{r}.log",
            step.main,
        )
        for r in range(step.RANKS)
    ]
    codes, output = finish(ranks)
    assert codes == [0] * step.RANKS, output


def test_gradient_norms_and_log_probs_are_the_peers(tmp_path: Path) -> None:
    """Two ZeRO-3 ranks; micro-batches of the peer that are uneven and hold samples of two groups."""
    assert step.main(["--quick", "--out", str(tmp_path)], start) == 0
    rows = [row for row in read(tmp_path / "step_cpu.csv") if not row["phase"].startswith("span")]
    assert [row["phase"] for row in rows] == ["rollout", "training", "step"]
    for row in rows:
        assert row["match"] == "True"
        assert 0 < float(row["grad_norm_ours"]) == pytest.approx(float(row["grad_norm_peer"]), rel=1e-3)
        assert float(row["grad_norm_difference"]) <= 1e-4
        assert float(row["log_prob_difference"]) <= 1e-4
        assert float(row["ratio"]) > 0
