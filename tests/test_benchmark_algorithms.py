"""benchmarks/algorithms.py: its runs are configured as the trainer wants them, covers every algorithm, and its table is of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.algorithms import ALGORITHMS, append, found, main
from flowgrpo_fast.algorithms import ADVANTAGES
from flowgrpo_fast.algorithms import ALGORITHMS as REGISTERED
from flowgrpo_fast.config_file import load_config
from flowgrpo_fast.inputs import Inputs
from tests.tiny import tiny_adapter


def test_every_algorithm_is_there_and_can_be_started() -> None:
    names, advantages = set(), set()
    for settings in ALGORITHMS.values():
        config = load_config(Path(__file__).parents[1] / "configs" / "glyphs.yaml", list(settings))
        Inputs(config, 1).plan(config, tiny_adapter())
        names.add(config.algorithm.name)
        advantages.add(config.algorithm.advantage)
    assert names == REGISTERED.keys()
    assert advantages == ADVANTAGES.keys()


def test_rows_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.csv"
    for seed, after in enumerate((0.5, 0.7)):
        append(file, {
            "algorithm": "awm", "seed": seed, "steps": 12, "reward_before": 0.4, "reward_after": after, "exact_before": 0.1, "exact_after": 0.2,
            "seconds": 60, "cpu_seconds": 90,
        })  # fmt: skip
    assert len(found(file)) == 2
    # What is there is not run again.
    assert main(["--out", str(file), "--algorithms", "awm", "--seeds", "0,1"]) == 0
    assert (
        "| awm | 2 | 0.400 -> 0.600 | +0.200 (+0.100 to +0.300) | 10.0% -> 20.0% | 60 | 90 |" in capsys.readouterr().out
    )
    with pytest.raises(SystemExit):
        main(["--algorithms", "nothing"])
    assert "there is no 'nothing'; choose from flow_grpo" in capsys.readouterr().err
