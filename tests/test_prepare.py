"""Prompt files from the field's sources, read back by the loader that training uses."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.data.images import load_image
from flowgrpo_fast.data.prepare import main
from flowgrpo_fast.data.prompts import load_prompts


def picture(color: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(buffer, format="JPEG")
    return buffer.getvalue()


@pytest.fixture
def pick_a_pic(tmp_path: Path) -> Path:
    rows = [
        {"caption": "a cat", "jpg_0": picture("red"), "jpg_1": picture("blue"), "label_0": 1.0},
        {"caption": "a cat", "jpg_0": picture("red"), "jpg_1": picture("blue"), "label_0": 0.0},
        {"caption": "a dog", "jpg_0": picture("red"), "jpg_1": picture("blue"), "label_0": 0.5},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pick.parquet")
    return tmp_path / "pick.parquet"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_ocr(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "in.txt").write_text('A sign that says "OPEN"\nA mug with “Hi 2”\n')
    out = tmp_path / f"out.{suffix}"
    assert (
        main(
            [
                "ocr",
                str(tmp_path / "in.txt"),
                "--out",
                str(out),
                "--negative-prompt",
                "blurry",
                "--system-prompt",
                "You draw.",
            ]
        )
        == 0
    )
    records = load_prompts(str(out))
    assert [(r.prompt, r.metadata["text"], r.negative_prompt) for r in records] == [
        ('A sign that says "OPEN"', "OPEN", "blurry"),
        ("A mug with “Hi 2”", "Hi 2", "blurry"),
    ]
    rows = (
        pyarrow.parquet.read_table(out).to_pylist()
        if suffix == "parquet"
        else [json.loads(line) for line in out.read_text().splitlines()]
    )
    assert [row["prompt"][0] for row in rows] == [{"role": "system", "content": "You draw."}] * 2


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "in.txt").write_text('"A"\n')
    assert main(["ocr", "~/in.txt", "--out", "~/deep/out.jsonl"]) == 0
    assert len(load_prompts("~/deep/out.jsonl")) == 1


def test_geneval_keeps_what_the_scorer_needs(tmp_path: Path) -> None:
    row = {"tag": "counting", "include": [{"class": "clock", "count": 2}], "prompt": "a photo of two clocks"}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["geneval", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]) == 0
    (record,) = load_prompts(str(tmp_path / "out.jsonl"))
    assert record.prompt == row["prompt"]
    assert record.metadata == {"tag": "counting", "include": row["include"]}


def test_geneval_as_a_table_would_have_fields_that_it_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["geneval", "in.jsonl", "--out", "out.parquet"])
    assert "GenEval's prompts have different fields" in capsys.readouterr().err


def test_rows_with_different_fields_keep_them_in_a_table(tmp_path: Path) -> None:
    rows = [{"prompt": '"a"'}, {"prompt": '"b"', "level": 3, "negative_prompt": "bad"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["ocr", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.parquet")]) == 0
    a, b = load_prompts(str(tmp_path / "out.parquet"))
    assert (a.metadata["level"], b.metadata["level"], b.negative_prompt) == (None, 3, "bad")


def test_pickapic_captions_once(tmp_path: Path, pick_a_pic: Path) -> None:
    assert main(["pickapic", str(pick_a_pic), "--out", str(tmp_path / "out.parquet")]) == 0
    assert [r.prompt for r in load_prompts(str(tmp_path / "out.parquet"))] == ["a cat", "a dog"]


def test_pairs_without_ties(tmp_path: Path, pick_a_pic: Path) -> None:
    assert (
        main(["pairs", str(pick_a_pic), "--out", str(tmp_path / "out.jsonl"), "--images", str(tmp_path / "images")])
        == 0
    )
    records = load_prompts(str(tmp_path / "out.jsonl"))
    colors = [[Image.open(r.metadata[key]).getpixel((4, 4)) for key in ("chosen", "rejected")] for r in records]
    assert [[pixel[0] > 200 for pixel in pair] for pair in colors] == [[True, False], [False, True]]  # type: ignore[index]


@pytest.mark.parametrize(
    ("instruction", "image", "is_struct"),
    [("edit_prompt", "original_image", True), ("instruction", "source_img", False)],
)
def test_edits_have_their_images(tmp_path: Path, instruction: str, image: str, is_struct: bool) -> None:
    def held(color: str) -> object:
        return {"bytes": picture(color), "path": None} if is_struct else picture(color)

    rows = [
        {instruction: "make it red", image: held("blue")},
        {instruction: " ", image: held("red")},
        {instruction: "x", image: held("red")},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    out = tmp_path / "out.jsonl"
    assert main(["edits", str(tmp_path / "in.parquet"), "--out", str(out), "--images", str(tmp_path / "images")]) == 0
    records = load_prompts(str(out))
    assert [r.prompt for r in records] == ["make it red", "x"]
    blue, red = (load_image(r.images[0], MediaSize(8, 8))[:, 4, 4].tolist() for r in records)
    assert (blue[2] > 200 > blue[0], red[0] > 200 > red[2]) == (True, True)


def test_held_out_prompts_are_drawn_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("".join(f'"{i}"\n' for i in range(20)))
    arguments = [
        "ocr",
        str(tmp_path / "in.txt"),
        "--out",
        str(tmp_path / "out.jsonl"),
        "--validation",
        "5",
        "--limit",
        "10",
    ]
    assert main(arguments) == 0
    train, held_out = load_prompts(str(tmp_path / "out.jsonl")), load_prompts(str(tmp_path / "out.validation.jsonl"))
    assert (len(train), len(held_out)) == (10, 5)
    assert not {r.prompt for r in train} & {r.prompt for r in held_out}
    before = [r.prompt for r in held_out]
    assert main([*arguments, "--seed", "1"]) == 0
    assert [r.prompt for r in load_prompts(str(tmp_path / "out.validation.jsonl"))] != before
    assert main([*arguments[:-3], "20"]) == 2
    assert "20 prompts found; none are left beside 20 for validation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("ocr", "no quotes", "prompt 0: no text between double quotes in 'no quotes'"),
        ("geneval", '{"prompt": "x"}', 'has no "include"'),
        ("pickapic", "x", "cannot be read as parquet"),
    ],
)
def test_what_cannot_be_used(
    tmp_path: Path, kind: str, text: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / ("in.jsonl" if text.startswith("{") else "in.txt")
    source.write_text(text + "\n")
    assert main([kind, str(source), "--out", str(tmp_path / "out.jsonl")]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
