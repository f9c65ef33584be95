"""metrics.jsonl survives kills and resumes, TensorBoard can be read back, the progress display is plain where it must be."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flowgrpo_fast.metrics import MetricsWriter, PhaseTimer, Progress, format_seconds, read_metrics


def write_run(run_dir: Path, steps: range, resume_step: int | None = None, tensorboard: bool = False) -> None:
    writer = MetricsWriter(run_dir, tensorboard=tensorboard, resume_step=resume_step)
    for step in steps:
        writer.log(step, {"reward/mean": step / 3, "policy/loss": -1e-17 * step})
    writer.close()


def without_time(run_dir: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "time"} for row in read_metrics(run_dir)]


def test_a_row_is_on_disk_when_log_returns_and_floats_come_back_bitwise(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.log(7, {"reward/mean": 0.1 + 0.2, "policy/loss": 5e-324})
    (row,) = read_metrics(tmp_path)  # the writer is still open
    assert {k: row[k] for k in ("step", "reward/mean", "policy/loss")} == {
        "step": 7,
        "reward/mean": 0.1 + 0.2,
        "policy/loss": 5e-324,
    }
    assert abs(row["time"] - time.time()) < 60
    writer.close()
    writer.close()


def test_nan_and_infinities_become_null_in_valid_json(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    writer.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (row["a"], row["b"], row["c"], row["d"]) == (None, None, None, 1.0)


def test_resume_drops_later_rows_so_that_the_file_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write_run(whole, range(8))
    write_run(cut, range(6))
    with open(cut / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 6, "reward/me')  # killed while writing
    write_run(cut, range(4, 8), resume_step=3)
    assert without_time(cut) == without_time(whole)
    assert [row["step"] for row in read_metrics(cut)] == list(range(8))
    assert sorted(p.name for p in cut.iterdir()) == ["metrics.jsonl"], "no temporary file is left"


def test_resume_without_an_earlier_file_starts_one(tmp_path: Path) -> None:
    write_run(tmp_path, range(4, 6), resume_step=3)
    assert [row["step"] for row in read_metrics(tmp_path)] == [4, 5]


def test_a_crash_during_the_resume_rewrite_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, range(6))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        MetricsWriter(tmp_path, tensorboard=False, resume_step=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_new_run_moves_an_earlier_one_aside(tmp_path: Path) -> None:
    for first in (0, 10, 20):
        writer = MetricsWriter(tmp_path, tensorboard=False)
        writer.log(first, {"x": 1.0})
        (tmp_path / "samples").mkdir()
        (tmp_path / "samples/before.png").write_bytes(b"png")
        writer.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [20]
    assert [row["step"] for row in read_metrics(tmp_path / "previous-1")] == [0]
    assert [row["step"] for row in read_metrics(tmp_path / "previous-2")] == [10]
    assert (tmp_path / "previous-2/samples/before.png").exists()


@pytest.mark.parametrize("torn", [b'{"step": 3, "rew', b"{", b'{"step": 3, "name": "\xc3', b"\x00\x00\x00"])
def test_a_torn_last_line_is_left_out(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    "content",
    [
        b'{"step": 1}\n{"step": 2, "re\n{"step": 3}\n',
        b'{"step": 1}\nnot json\n',  # a whole line, so no kill explains it
        b'{"step": 1}\n\n{"step": 3}\n',
        b'{"step": 1}\n[2]\n',
        b'{"step": 1}\n{"reward/mean": 1.0}\n',
        b'{"step": 1}\n{"step": 2\r{"step": 3}\n',
    ],
)
def test_corruption_anywhere_else_raises_and_names_the_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match="line 2 is corrupt"):
        read_metrics(tmp_path)


def test_a_complete_last_line_without_newline_counts_and_a_missing_file_raises(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    assert read_metrics(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "nowhere")


def test_tensorboard_reads_back_scalars_and_images_and_resume_purges(tmp_path: Path) -> None:
    write_run(tmp_path, range(6), tensorboard=True)
    writer = MetricsWriter(tmp_path, resume_step=3)
    for step in range(4, 8):
        writer.log(step, {"reward/mean": 100.0 + step})
    writer.log_images(7, "samples/after", Image.new("RGBA", (6, 4), (10, 20, 30, 255)))
    writer.close()

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("reward/mean")
    assert [event.step for event in scalars] == list(range(8)), "no step twice"
    assert [event.value for event in scalars] == pytest.approx([0, 1 / 3, 2 / 3, 1, 104, 105, 106, 107])
    (image,) = events.Images("samples/after")
    assert (image.step, image.width, image.height) == (7, 6, 4)
    with Image.open(io.BytesIO(image.encoded_image_string)) as read_back:
        assert read_back.convert("RGB").getpixel((0, 0)) == (10, 20, 30)


def test_wandb_asked_for_and_missing_stops_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # missing, whatever this machine has
    with pytest.raises(ValueError, match="pip install wandb"):
        MetricsWriter(tmp_path / "run", wandb_project="p")
    assert not (tmp_path / "run").exists()


def wandb_records(file: Path) -> Iterator[Any]:
    """What wandb wrote to be synchronised later: protobuf records in LevelDB's log format, in blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(raw):
        if (left := 0x8000 - at % 0x8000) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, at)
        whole += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


def test_wandb_offline_holds_the_config_every_row_and_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = {"algorithm": {"group_size": 8}}
    writer = MetricsWriter(tmp_path / "run", tensorboard=False, wandb_project="p", config=config)
    writer.log(1, {"reward/mean": 0.5})
    writer.log_images(1, "samples/after", Image.new("RGB", (6, 4), (10, 20, 30)))
    writer.log(2, {"reward/mean": 0.75})
    writer.close()

    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    records = list(wandb_records(file))
    (run,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_group, run.display_name) == ("p", "run", "run")
    assert {u.key: json.loads(u.value_json) for u in run.config.update}["algorithm"] == config["algorithm"]
    rows = [r.history for r in records if r.WhichOneof("record_type") == "history"]
    values = [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in r.item} for r in rows]
    assert [(v["_step"], v["reward/mean"]) for v in values] == [(1, 0.5), (2, 0.75)]
    with Image.open(file.parent / "files" / values[0]["samples/after/path"]) as grid:
        assert grid.convert("RGB").getpixel((0, 0)) == (10, 20, 30)


def test_phase_timer_adds_up_nests_survives_errors_and_resets() -> None:
    timer = PhaseTimer()
    with timer("step"):
        for _ in range(2):
            with timer("rollout"):
                time.sleep(0.02)
        with contextlib.suppress(KeyError), timer("reward"):
            time.sleep(0.01)
            raise KeyError
    timer.add("reward", 0.5)
    seconds = timer.pop()
    seconds["timing/reward_s"] -= 0.5
    assert set(seconds) == {"timing/step_s", "timing/rollout_s", "timing/reward_s"}
    assert 0.04 <= seconds["timing/rollout_s"] <= seconds["timing/step_s"] - seconds["timing/reward_s"]
    assert seconds["timing/reward_s"] >= 0.01
    assert timer.pop() == {}


STEP = {
    "reward/mean": 0.5,
    "reward/std": 0.25,
    "reward/ocr/exact_match": 0.125,
    "policy/ratio_max_deviation": 0.0,
    "policy/clip_fraction_low": 0.011,
    "policy/clip_fraction_high": 0.5,
    "optimizer/grad_norm": 0.75,
    "timing/rollout_s": 1.25,
    "timing/update_s": 1.5,
    "timing/step_s": 3.0,
}


def test_progress_prints_one_plain_aligned_line_a_step_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(100) as progress:
        progress.message("[bold]loading")
        progress.update(9, STEP)
        progress.update(
            10, {**STEP, "reward/mean": -12.5, "policy/ratio_max_deviation": 3e-5, "optimizer/grad_norm": 1234.5}
        )
        progress.update(11, {"validation/reward": 0.625, "policy/clip_fraction_low": 0.0})
    message, first, second, third = capsys.readouterr().out.splitlines()
    assert message == "[bold]loading"
    assert "\x1b" not in first + second + third
    assert "\r" not in first + second + third
    for shown in ("9/100", "0.500", "0.250", "0.125", "0.0e+00", "1.1%", "50.0%", "0.75", "rollout 1.2", "seconds 3.0"):
        assert shown in first
    assert "-12.500" in second
    assert [first.index(label) for label in ("std", "|ratio-1|", "grad")] == [
        second.index(label) for label in ("std", "|ratio-1|", "grad")
    ]
    assert third.split("  left")[0] == "step  11/100  clip-/+   0.0%/-  val reward    0.625"
    assert "left" not in first
    assert "left" in second


def test_progress_counts_the_pace_from_where_a_resumed_run_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([1000.0, 1010.0, 1030.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    progress = Progress(100)
    for step in (90, 91, 92):
        progress.update(step, {})
    ends = [line.rpartition("  ")[2] for line in capsys.readouterr().out.splitlines()]
    assert ends == ["90/100", "left 1 min 30 s", "left 2 min 00 s"]  # 9 steps of 10 s; 8 steps of 15 s


def test_progress_disabled_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3, enabled=False) as progress:
        progress.update(1, STEP)
        progress.message("hidden")
    assert capsys.readouterr().out == ""


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_progress_is_live_in_a_terminal_and_keeps_the_last_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    with Progress(10) as progress:
        progress.update(1, {"validation/reward": 0.375})
        progress.message("[bold]not markup")
        progress.update(2, STEP)
    shown = terminal.getvalue()
    assert "\x1b[" in shown
    assert "[bold]not markup" in shown
    last = shown[shown.rindex("2/10") :]
    for text in ("0.500", "0.375", "0.0e+00", "rollout 1.2"):
        assert text in last


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.6, "1 min 00 s"), (371.9, "6 min 12 s"), (7260, "2 h 01 min")],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
