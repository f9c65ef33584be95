"""The report: self-contained, escaped, whole on partial data, deterministic."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowgrpo_fast import report
from flowgrpo_fast.report import main, write_report
from flowgrpo_fast.samples import write_prompt_samples

VOID = {"meta", "img"}
HOSTILE = "</pre><script>alert('x')</script>&\"<img src=x onerror=y>$title ${body}"


class Page(HTMLParser):
    """Tags with attributes, text by enclosing tag; fails on a tag that does not close."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.source = write_report(run_dir).read_text("utf-8")
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open:
            self.text.setdefault(self.open[-1], []).append(data.strip())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.tags if name == tag]

    def charts(self) -> list[str]:
        return [t.removesuffix(" by step") for t in self.text.get("title", []) if t.endswith(" by step")]


def row(step: int, **more: float | None) -> dict[str, float | None]:
    return {
        "step": step,
        "time": 1.0,
        "reward/mean": 0.25 + step / 100,
        "reward/ocr/exact_match": 0.125,
        "policy/ratio_max_deviation": 0.0 if step == 1 else 1e-5,
        "policy/clip_fraction_low": 0.01,
        "policy/clip_fraction_high": 0.02,
        "optimizer/grad_norm": 0.5,
        "optimizer/lr": 1e-4,
        "timing/rollout_s": 1.0,
        "timing/update_s": 2.0,
        "timing/step_s": 4.0,
        **more,
    }


def make_run(
    run_dir: Path, rows: list[dict], summary: dict | None = None, images: dict[str, int] | None = None
) -> Path:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if summary is not None:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    for name, shade in (images or {}).items():
        (run_dir / "samples").mkdir(exist_ok=True)
        Image.new("RGB", (8, 6), (shade,) * 3).save(run_dir / f"samples/{name}.png")
    return run_dir


SUMMARY = {
    "recipe": "glyphs",
    "steps": 30,
    "validation/before/reward": 0.25,
    "validation/after/reward": 0.625,
    "validation/before/ocr/exact_match": 0.15,
    "validation/after/ocr/exact_match": 0.6,
    "timing/train_s": 371.9,
    "first_update_ratio_max_deviation": 0.0,
    "versions": {"torch": "2.13.0", "python": "3.11.9"},
}
IMAGES = {"before": 10, "after": 20, "step_000020": 30, "step_000010": 40}


@pytest.fixture
def full(tmp_path: Path) -> Path:
    rows = [
        row(s, **({"validation/reward": 0.5, "validation/ocr/exact_match": 0.3} if s % 10 == 0 else {}))
        for s in range(1, 31)
    ]
    run_dir = make_run(tmp_path / "run", rows, SUMMARY, IMAGES)
    write_prompt_samples(run_dir / "samples", "after", torch.zeros(1, 4, 3, 8, 8, dtype=torch.uint8), [5])
    (run_dir / "config.yaml").write_text("algorithm:\n  name: flow_grpo\n")
    return run_dir


def test_the_page_refers_to_nothing_outside_itself(full: Path) -> None:
    page = Page(full)
    for tag, attrs in page.tags:
        assert tag not in {"script", "link", "iframe", "object", "base"}
        for name in {"src", "href", "xlink:href", "srcset", "data", "action", "poster"} & attrs.keys():
            assert attrs[name].startswith(("data:image/", "data:video/mp4;base64,")), (tag, name)
    assert not re.search(r"https?:|//\w|@import|url\(", re.sub(r"base64,[^\"]*", "", page.source))


def test_headline_before_after_change_and_facts(full: Path) -> None:
    page = Page(full)
    shown = " ".join(page.text["dd"] + page.text["b"] + page.text["dt"])
    for text in ("0.250", "0.625", "+0.375, 2.5 times", "15.0%", "60.0%", "+45.0 points, 4.0 times", "6 min 12 s"):
        assert text in shown
    for text in ("Validation reward", "Validation OCR exact match", "0, exact to the last bit", "2.13.0", "python"):
        assert text in shown
    assert page.text["h1"] == ["glyphs"]
    assert page.text["pre"] == ["algorithm:\n  name: flow_grpo"]


def test_charts_have_paths_titles_descriptions_and_start_validation_at_step_0(full: Path) -> None:
    page = Page(full)
    assert page.charts() == [
        "Reward",
        "OCR exact match",
        "Max |ratio − 1|",
        "Clip fraction",
        "Gradient norm",
        "Learning rate",
    ]
    assert len(page.all("svg")) == 6
    identifiers = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    for svg in page.all("svg"):
        assert svg["role"] == "img"
        assert set(svg["aria-labelledby"].split()) <= identifiers
    assert len(identifiers) == 12, "identifiers are unique"
    assert "validation from 0.250 at step 0 to 0.500 at step 30" in page.text["desc"][0]
    paths = [attrs["d"] for attrs in page.all("path")]
    assert len(paths) == 8  # 2 + 2 + 0 (dots) + 2 + 1 + 1
    for path in paths:
        assert re.fullmatch(r"M[\d. ]+h0(L[\d. ]+h0)*", path)
    assert paths[1].count("L") == 3  # validation: steps 0, 10, 20, 30


def test_images_are_inline_in_order_with_alt_text(full: Path) -> None:
    shades = []
    for img in Page(full).all("img"):
        assert img["alt"]
        with Image.open(io.BytesIO(base64.b64decode(img["src"].split("base64,")[1]))) as image:
            assert image.size == (int(img["width"]), int(img["height"])) == (8, 6)
            shades.append(image.convert("RGB").getpixel((0, 0))[0])
    assert shades == [10, 20, 40, 30]  # before, after, step 10, step 20


def test_large_pictures_are_made_smaller_and_a_long_timeline_is_thinned(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, [row(1)], images={f"step_{10 * i:06d}": i for i in range(40)})
    Image.new("RGB", (4000, 1000)).save(run_dir / "samples/before.png")
    page = Page(run_dir)
    first, *timeline = page.all("img")
    assert (first["width"], first["height"]) == ("1600", "400")
    assert len(timeline) == 12
    assert (timeline[0]["alt"], timeline[-1]["alt"]) == ("Samples at step 0", "Samples at step 390")


def test_each_prompt_has_a_strip_from_the_earliest_to_the_latest(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, [row(1)])
    for i, moment in enumerate(["before", *(f"step_{10 * i:06d}" for i in range(1, 12)), "after"]):
        images = torch.full((14, 3, 300, 400), 10 * i, dtype=torch.uint8)
        captions = [f"<b>prompt {k}</b>\n0.{i:02d}" for k in range(14)]
        write_prompt_samples(run_dir / "samples", moment, images, range(14), captions)
    page = Page(run_dir)
    assert page.text["h3"] == [f"<b>prompt {k}</b>" for k in range(12)], "the first twelve, escaped"
    first = page.all("img")[:8]
    assert [img["alt"].split(", ")[1] for img in first] == [
        *("before", "step 20", "step 30", "step 50", "step 70", "step 90", "step 100", "after")
    ]
    assert {(img["width"], img["height"]) for img in page.all("img")} == {("192", "144")}
    assert page.text["small"][-2:] == ["0.10", "0.12"]
    shades = [Image.open(io.BytesIO(base64.b64decode(img["src"].split("base64,")[1]))).convert("L") for img in first]
    assert [image.getpixel((9, 9)) for image in shades] == [10 * i for i in (0, 2, 3, 5, 7, 9, 10, 12)]
    assert len(page.source) < 200_000


def test_small_videos_are_inside_and_larger_ones_are_a_first_frame_with_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path, [row(1)])
    noise = torch.randint(0, 255, (1, 6, 3, 64, 64), dtype=torch.uint8)
    for moment in ("before", "step_000010", "after"):
        write_prompt_samples(run_dir / "samples", moment, noise, [0], ["a fox\n0.5"])
    size = (run_dir / "samples/prompts/00000/after.mp4").stat().st_size
    monkeypatch.setattr(report, "ALL_VIDEO_BYTES", 2 * size)
    page = Page(run_dir)
    assert [video["aria-label"] for video in page.all("video")] == ["a fox, before", "a fox, step 10"]
    video = base64.b64decode(page.all("video")[0]["src"].removeprefix("data:video/mp4;base64,"))
    assert video == (run_dir / "samples/prompts/00000/before.mp4").read_bytes()
    (still,) = page.all("img")
    assert still["alt"] == "First frame: a fox, after"
    assert "video: samples/prompts/00000/after.mp4" in page.text["small"]


def test_metrics_of_memory_and_held_out_rewards_are_shown(tmp_path: Path) -> None:
    more = {"memory/peak_device_gib": 61.25, "held_out/pick": 5.0, "policy/step_02/clip_fraction_low": 0.25}
    page = Page(make_run(tmp_path, [row(1, **more), row(2, **{**more, "memory/peak_device_gib": 60.0})]))
    assert "61.2 GiB device" in page.text["dd"]
    assert {"Held out pick", "Clip fraction low by denoising step", "Peak memory, GiB"} <= set(page.charts())


def test_step_time_adds_up_to_the_step(full: Path) -> None:
    page = Page(full)
    cells = page.text["td"]
    assert cells == ["1.000", "25.0%", "2.000", "50.0%", "1.000", "25.0%"]
    assert page.text["th"][3:] == ["rollout", "update", "everything else"]
    widths = [float(m) for m in re.findall(r"width:([\d.]+)%", "".join(a.get("style", "") for a in page.all("span")))]
    assert sum(widths) == pytest.approx(100, abs=0.05)


def test_step_time_spreads_rare_phases_and_says_when_phases_overlap(tmp_path: Path) -> None:
    rows = [row(s, **({"timing/save_s": 8.0} if s == 4 else {}), **{"timing/step_s": 2.0}) for s in range(1, 5)]
    page = Page(make_run(tmp_path, [{"step": 0, "timing/validation_s": 99.0}, *rows]))
    assert page.text["td"] == ["1.000", "20.0%", "2.000", "40.0%", "2.000", "40.0%"]
    assert "overlap" in page.text["p"][0]
    assert "mean of 4 steps" in page.text["p"][0]


def test_everything_that_comes_from_data_is_escaped(tmp_path: Path) -> None:
    rows = [row(s, **{f"reward/{HOSTILE}/{HOSTILE}": 0.5, f"timing/{HOSTILE}_s": 1.0}) for s in (1, 2)]
    summary = {
        "recipe": HOSTILE,
        HOSTILE: HOSTILE,
        "versions": {HOSTILE: HOSTILE},
        f"validation/before/{HOSTILE}/x": 1.0,
        f"validation/after/{HOSTILE}/x": 2.0,
    }
    run_dir = make_run(tmp_path, rows, summary)
    (run_dir / "config.yaml").write_text(f"prompt: {HOSTILE}\n")
    (run_dir / "samples").mkdir()
    Image.new("RGB", (2, 2)).save(run_dir / 'samples/step_1_"><script>.png')
    page = Page(run_dir)
    assert not [tag for tag, attrs in page.tags if tag == "script" or "onerror" in attrs]
    assert page.text["pre"] == [f"prompt: {HOSTILE}"], "shown as it is, also what looks like a template's field"
    assert page.text["h1"] == [HOSTILE]
    assert HOSTILE in page.text["dt"]
    assert HOSTILE in page.text["dd"]


def test_same_inputs_same_bytes(full: Path) -> None:
    assert write_report(full).read_bytes() == write_report(full).read_bytes()


def test_one_step_only(tmp_path: Path) -> None:
    page = Page(make_run(tmp_path, [row(1)]))
    assert len(page.charts()) == 6
    assert len(page.all("circle")) == 7  # a point a series
    assert "results" not in {attrs.get("class") for attrs in page.all("dl")}, "one value is no change"


def test_no_validation_falls_back_to_the_training_reward(tmp_path: Path) -> None:
    page = Page(make_run(tmp_path, [row(s) for s in range(1, 6)]))
    assert "Training reward" in page.text["dt"]
    assert "0.260" in page.text["dd"]
    assert "0.300" in page.text["b"]


def test_an_unfinished_run_shows_the_logged_validation(tmp_path: Path) -> None:
    rows = [row(1), row(2, **{"validation/reward": 0.5}), row(3), row(4, **{"validation/reward": 0.75})]
    page = Page(make_run(tmp_path, rows, {"validation/before/reward": 0.125}))
    assert "Validation reward" in page.text["dt"]
    assert "Training reward" not in page.text["dt"]
    assert "0.125" in page.text["dd"]
    assert "0.750" in page.text["b"]


def test_no_rows_no_images_no_summary(tmp_path: Path) -> None:
    page = Page(make_run(tmp_path / "empty-run", []))
    assert page.text["h1"] == ["empty-run"]
    assert page.all("svg") == page.all("img") == page.all("section") == []


def test_nulls_are_gaps_and_never_numbers(tmp_path: Path) -> None:
    rows = [row(s, **{"optimizer/grad_norm": None if s in (3, 5) else 0.5, "reward/mean": None}) for s in range(1, 8)]
    rows[0]["timing/rollout_s"] = None
    page = Page(
        make_run(tmp_path, rows, {**SUMMARY, "timing/train_s": None, "validation/after/reward": None, "versions": None})
    )
    assert "Reward" in page.charts(), "validation/before is a point"
    norm = page.all("path")[-2]["d"]
    assert [part.count("h0") for part in norm.split("M")[1:]] == [2, 1, 2]
    assert "nan" not in re.sub(r"base64,[^\"]*", "", page.source).lower()
    assert any("norm not finite" in text for text in page.text["title"])


def test_command_line(full: Path) -> None:
    command = [sys.executable, "-m", "flowgrpo_fast.report", str(full)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, str(full / "report.html")), done.stderr
    assert (full / "report.html").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "metrics.jsonl"),
        ({"metrics.jsonl": "x\n"}, "line 1"),
        ({"metrics.jsonl": "", "summary.json": "{"}, "summary.json"),
    ],
)
def test_command_line_on_something_that_is_no_run(
    tmp_path: Path, files: dict[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path)])
    assert stop.value.code == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
