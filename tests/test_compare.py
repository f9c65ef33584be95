"""Runs side by side: the numbers of the table, what differs in the configs, a page that opens alone, and errors that name the fix."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowgrpo_fast.compare import config_differences, load_runs, main, select_metrics, table


def make_run(
    run_dir: Path, rewards: list[float | None], config: str | None = None, summary: dict | None = None, **more: float
) -> Path:
    run_dir.mkdir(parents=True)
    rows = [{"step": i, "time": 1.0, "reward/mean": value, **more} for i, value in enumerate(rewards, start=1)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config is not None:
        (run_dir / "config.yaml").write_text(config)
    if summary is not None:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs that differ in the learning rate, in a list and in a key that one of them does not have."""
    common = "seed: 0\nmodel: {path: m, train: lora}\n"
    first = common + "run_dir: one\noptimizer: {learning_rate: 0.0003}\nrewards: [{name: ocr, weight: 1.0}]\n"
    second = (
        common + "run_dir: two\noptimizer: {learning_rate: 0.001, fused: true}\nrewards: [{name: ocr, weight: 0.5}]\n"
    )
    more = {"throughput/images_per_s": 20.0, "timing/step_s": 5.0, "policy/step_03/clip_fraction_low": 0.1}
    return [
        make_run(tmp_path / "one", [0.25, None, 0.75, 0.5], first, {"validation/before/reward": 0.125}, **more),
        make_run(tmp_path / "two", [0.5, 0.25], second, **more, **{"validation/reward": 0.625}),
    ]


def test_first_last_and_best_leave_gaps_out_and_validation_starts_before_training(runs: list[Path]) -> None:
    found = {
        (v.metric, v.run): v for v in table(load_runs(runs), ["reward/mean", "validation/reward", "timing/step_s"])
    }
    one = found["reward/mean", "one"]
    assert (one.first, one.last, one.best, one.best_step) == (0.25, 0.5, 0.75, 3)
    assert found["validation/reward", "one"].first == 0.125
    assert found["validation/reward", "two"].best_step == 1
    assert len(found) == 6


def test_best_is_the_least_where_less_is_better(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5, 0.5])
    rows = [{"step": i, "validation/invalid_ratio": v, "timing/step_s": v} for i, v in ((1, 0.5), (2, 0.25))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = table(load_runs([folder]), ["validation/invalid_ratio", "timing/step_s"])
    assert [(v.best, v.best_step) for v in values] == [(0.25, 2), (0.25, 2)]


def test_config_keys_that_differ(runs: list[Path]) -> None:
    assert config_differences(load_runs(runs)) == {
        "optimizer.learning_rate": ["0.0003", "0.001"],
        "rewards.0.weight": ["1.0", "0.5"],
        "optimizer.fused": ["-", "true"],
    }


def test_metrics_are_chosen_by_name_and_glob_in_the_order_asked_for(runs: list[Path]) -> None:
    loaded = load_runs(runs)
    assert select_metrics(loaded, ["timing/*", "reward/mean", "*step*"]) == [
        *("timing/step_s", "reward/mean", "policy/step_03/clip_fraction_low")
    ]
    with pytest.raises(ValueError, match=r"'rewards/mean'; nearest: reward/mean, .*; groups: policy/\*, reward/\*"):
        select_metrics(loaded, ["reward/mean", "rewards/mean"])


def test_command_line_prints_aligned_tables_and_writes_a_page_that_opens_alone(
    runs: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "pages/c.html"
    command = [sys.executable, "-m", "flowgrpo_fast.compare", *map(str, runs), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=60)
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    header, one = (next(line for line in lines if name in line) for name in ("metric", "0.750"))
    assert re.split(r"\s{2,}", one.strip()) == ["reward/mean", "one", "0.250", "0.500", "0.750", "3"]
    for column in ("first", "last", "best", "at step"):
        end = header.index(column) + len(column)
        assert one[end - 1] != " ", f"{column} is aligned to the right"
        assert one[end : end + 1] in ("", " ")
    assert any(re.fullmatch(r"\s*optimizer.learning_rate\s+0.0003\s+0.001", line) for line in lines)
    assert lines[-1] == str(out)

    page = out.read_text("utf-8")
    titles = re.findall(r"<figcaption><b>([^<]+)</b>", page)
    assert titles == ["reward/mean", "validation/reward", "throughput/images_per_s", "timing/step_s"]
    charts = page.split("<figure>")[1:]
    assert re.findall(r'class="end n(\d)"[^>]*>(\w+)<', charts[0]) == [("0", "one"), ("1", "two")]
    assert charts[1].count("<path") == 2
    assert "optimizer.learning_rate" in page
    assert not re.search(r"https?:|//\w|@import|url\(|<script|<link|src=", page)


def test_runs_of_different_length_are_smoothed_alike(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"run-{n}", [i % 2 / 2 for i in range(n)]) for n in (100, 30)]
    main([*map(str, folders), "--out", str(tmp_path / "c.html")])
    assert re.findall('class="(thin s.)"', (tmp_path / "c.html").read_text("utf-8")) == ["thin s0", "thin s1"]


def test_names_and_values_from_the_runs_are_escaped(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=y>&[red]"
    folders = [
        make_run(
            tmp_path / f"{hostile}{i}",
            [0.5],
            f"model: {json.dumps(hostile + str(i))}\n",
            **{f"reward/{hostile}/a": 1.0},
        )
        for i in range(2)
    ]
    main([*map(str, folders), "--out", str(tmp_path / "c.html")])
    page = (tmp_path / "c.html").read_text("utf-8")
    assert "<img" not in page
    assert page.count("&lt;img src=x onerror=y&gt;") > 6


def test_runs_of_one_name_are_named_by_their_paths(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / parent / "glyphs", [0.5]) for parent in "ab"]
    assert [run.name for run in load_runs(folders)] == [str(folder) for folder in folders]
    assert config_differences(load_runs(folders)) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/nowhere"], "nowhere is no run: it has no metrics.jsonl; give the run_dir of a run that has begun"),
        (["runs"], "runs is no run: it has no metrics.jsonl; it holds runs: one, two; give those"),
        (["runs/one", "runs/one"], "a run is given twice"),
        (["runs/one", "--metrics", "reward/*,no*thing"], "no run has a metric 'no*thing'"),
        (["runs/broken"], "line 1 is corrupt"),
        (["runs/one", "runs/half"], "config.yaml is corrupt"),
    ],
)
def test_errors_name_the_folder_and_the_fix(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        make_run(Path("runs") / name, [0.5])
    if "broken" in arguments[0]:
        (make_run(Path("runs/broken"), []) / "metrics.jsonl").write_text("x\n")
    if "half" in arguments[-1]:
        make_run(Path("runs/half"), [0.5], "seed: [0")
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "compare.html").exists()
