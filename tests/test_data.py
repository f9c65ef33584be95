"""Prompt files, good and bad, and the group sampler: equal counts, the same on every rank, resumable."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowgrpo_fast.data import GroupSampler, PromptFileError, PromptRecord, load_prompts, rank_slice

# ---- prompt files


def written(tmp_path: Path, name: str, content: bytes | str | list[dict[str, Any]]) -> str:
    path = tmp_path / name
    if isinstance(content, list):
        pq.write_table(pa.Table.from_pylist(content), path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_builtin_glyphs() -> None:
    train, validation = load_prompts("builtin:glyphs"), load_prompts("builtin:glyphs", "validation")
    assert (len(train), len(validation)) == (833, 128)
    assert not {r.prompt for r in train} & {r.prompt for r in validation}
    assert [r.index for r in train] == list(range(833))
    assert all(r.prompt == f'draw "{r.metadata["text"]}"' for r in train + validation)
    assert train[0].negative_prompt is None
    assert train[0].images == ()


@pytest.mark.parametrize("content", ["a cat\n  a dog \n", "a cat\r\n  a dog \r\n", "\ufeffa cat\n  a dog "])
def test_txt_is_verbatim_but_for_line_ends_and_bom(tmp_path: Path, content: str) -> None:
    assert load_prompts(written(tmp_path, "p.txt", content)) == [PromptRecord(0, "a cat"), PromptRecord(1, "  a dog ")]


def test_only_line_ends_separate_prompts(tmp_path: Path) -> None:
    odd = "one\u2028still one\x0bstill\x0cone\x85"
    assert [r.prompt for r in load_prompts(written(tmp_path, "p.TXT", f"{odd}\ntwo"))] == [odd, "two"]


def test_jsonl_keys(tmp_path: Path) -> None:
    lines = [
        {"prompt": 'draw "K7"', "negative_prompt": " ", "image": "in.png", "metadata": {"text": "K7"}, "level": 2},
        {"prompt": "écrire", "negative_prompt": None},
    ]
    path = written(tmp_path, "p.jsonl", "\ufeff" + "\r\n".join(json.dumps(line) for line in lines) + "\r\n")
    assert load_prompts(path) == [
        PromptRecord(0, 'draw "K7"', " ", {"text": "K7", "level": 2}, ("in.png",)),
        PromptRecord(1, "écrire"),
    ]


def test_parquet_plain(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "negative_prompt": "b", "text": "K7"},
        {"prompt": "c", "negative_prompt": None, "text": "L8"},
    ]
    assert load_prompts(written(tmp_path, "p.parquet", rows)) == [
        PromptRecord(0, "a", "b", {"text": "K7"}),
        PromptRecord(1, "c", None, {"text": "L8"}),
    ]


def test_parquet_in_verls_form(tmp_path: Path) -> None:
    def chat(text: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": "describe"}, {"role": "user", "content": text}]

    row = {
        "data_source": "ocr",
        "prompt": chat("a sign"),
        "negative_prompt": chat("blur"),
        "reward_model": {"style": "rule", "ground_truth": "OPEN"},
        "extra_info": {"index": 3},
    }
    expected = {"data_source": "ocr", "extra_info": {"index": 3}, "ground_truth": "OPEN"}
    assert load_prompts(written(tmp_path, "p.parquet", [row])) == [PromptRecord(0, "a sign", "blur", expected)]


def test_home_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "p.txt", "a cat\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_prompts("~/p.txt") == [PromptRecord(0, "a cat")]
    monkeypatch.chdir(tmp_path)
    assert load_prompts("p.txt") == [PromptRecord(0, "a cat")]
    with pytest.raises(PromptFileError) as caught:
        load_prompts("absent.txt")
    assert str(tmp_path / "absent.txt") in str(caught.value), "the absolute path"


BAD_FILES = [
    ("p.txt", b"", "holds no prompts"),
    ("p.txt", b"\xef\xbb\xbf", "holds no prompts"),
    ("p.txt", b"\n", "line 1: is empty; delete the line"),
    ("p.txt", b"a\n\nb\n", "line 2: is empty"),
    ("p.txt", b"a\r\n \t\r\nb\r\n", "line 2: is empty"),
    ("p.txt", b"a\nb\n\n", "line 3: is empty"),
    ("p.txt", b"a\nb\xff\n", "line 2: byte 0xff at offset 3 is not UTF-8; save the file as UTF-8"),
    ("p.txt", b"\xef\xbb\xbfa\n\n\xe9t\xe9", "line 3: byte 0xe9 at offset 6 is not UTF-8"),
    ("p.jsonl", b"", "holds no prompts"),
    ("p.jsonl", b'{"prompt": "a"}\n\n', "line 2: is empty"),
    ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \xff}', "line 2: byte 0xff at offset 27"),
    (
        "p.jsonl",
        b'{"prompt": "a"}\n{"prompt": a}',
        "line 2: is not JSON: Expecting value at column 12; write one object",
    ),
    ("p.jsonl", b'"a cat"', "line 1: holds a str; write an object"),
    ("p.jsonl", b'{"promt": "a", "text": "b"}', "line 1: has no \"prompt\", only 'promt', 'text'"),
    ("p.jsonl", b"{}", 'line 1: has no "prompt", only nothing'),
    ("p.jsonl", b'{"prompt": " "}', 'line 1: "prompt" is empty'),
    ("p.jsonl", b'{"prompt": null}', 'line 1: "prompt" is empty'),
    ("p.jsonl", b'{"prompt": 3}', 'line 1: "prompt" is a int; write a string'),
    ("p.jsonl", b'{"prompt": [{"role": "system", "content": "x"}]}', 'line 1: "prompt" is empty'),
    ("p.jsonl", b'{"prompt": ["x"]}', 'line 1: "prompt" is a list; write a string'),
    ("p.jsonl", b'{"prompt": "a", "negative_prompt": 3}', 'line 1: "negative_prompt" is a int'),
    ("p.jsonl", b'{"prompt": "a", "image": 3}', 'line 1: "image" holds a int'),
    ("p.jsonl", b'{"prompt": "a", "metadata": "K7"}', 'line 1: "metadata" is a str; write an object'),
    ("p.jsonl", b'{"prompt": "a", "metadata": {"t": 1}, "t": 2}', "line 1: 't' stands in \"metadata\" and beside it"),
    ("p.parquet", b"not parquet", "cannot be read as parquet"),
    ("p.parquet", [{"prompt": "a"}, {"prompt": ""}], 'row 1 (from 0): "prompt" is empty'),
    ("p.parquet", [{"prompt": "a"}, {"prompt": None}], 'row 1 (from 0): "prompt" is empty'),
    ("p.parquet", [{"prompt": b"a"}], 'row 0 (from 0): "prompt" is a bytes'),
    ("p.parquet", [{"caption": "a"}], "row 0 (from 0): has no \"prompt\", only 'caption'"),
    ("p.csv", b"a", "prompts come from .txt, .jsonl, .parquet files, not '.csv'"),
    ("p", b"a", "not 'one without extension'"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_bad_file_names_file_place_and_fix(tmp_path: Path, name: str, content: Any, message: str) -> None:
    source = written(tmp_path, name, content)
    with pytest.raises(PromptFileError) as caught:
        load_prompts(source)
    assert str(caught.value).startswith(source)
    assert message in str(caught.value)


def test_bad_builtin_split_and_folder(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="'builtin:glyph'; use 'builtin:glyphs'"):
        load_prompts("builtin:glyph")
    with pytest.raises(ValueError, match="split must be one of"):
        load_prompts("builtin:glyphs", "test")  # type: ignore[arg-type]
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(PromptFileError, match="there is no such file"):
        load_prompts(str(tmp_path / "folder.txt"))


# ---- the sampler (rows 31 and 32 of the peers' failures: wrong group sizes, assertions when groups > prompts)


@pytest.mark.parametrize(("prompts", "groups"), [(3, 8), (8, 3), (10, 10), (1, 4), (7, 1), (12, 4)])
def test_every_epoch_holds_each_prompt_exactly_once(prompts: int, groups: int) -> None:
    sampler = GroupSampler(prompts, groups, seed=0)
    iterations = [sampler.indices(i) for i in range(6 * prompts)]
    assert {len(i) for i in iterations} == {groups}
    stream = [index for iteration in iterations for index in iteration]
    epochs = [stream[e : e + prompts] for e in range(0, len(stream), prompts)]
    assert len(epochs) == 6 * groups
    assert all(sorted(epoch) == list(range(prompts)) for epoch in epochs)
    assert set(Counter(stream).values()) == {6 * groups}


@pytest.mark.parametrize("prompts", [3, 64])
def test_four_ranks_share_the_groups_evenly(prompts: int) -> None:
    world, groups, iterations = 4, 8, 3 * prompts
    seen: Counter[int] = Counter()
    for i in range(iterations):
        # Each rank has a sampler of its own, as separate processes do.
        shares = [rank_slice(GroupSampler(prompts, groups, seed=5).indices(i), rank, world) for rank in range(world)]
        assert [len(share) for share in shares] == [2] * world
        assert [index for share in shares for index in share] == GroupSampler(prompts, groups, seed=5).indices(i)
        seen.update(index for share in shares for index in share)
    assert seen == dict.fromkeys(range(prompts), iterations * groups // prompts)


def test_resume_and_prefetch_change_nothing() -> None:
    straight = GroupSampler(10, 4, seed=1)
    expected = [straight.indices(i) for i in range(20)]
    resumed = GroupSampler(10, 4, seed=1)
    assert [resumed.indices(i) for i in range(13, 20)] == expected[13:]
    ahead = GroupSampler(10, 4, seed=1)
    assert [ahead.indices(i) for i in (7, 0, 19, 3, 3)] == [expected[i] for i in (7, 0, 19, 3, 3)]


def test_epochs_and_seeds_differ() -> None:
    epochs = [tuple(GroupSampler(50, 50, seed=s).indices(e)) for s in range(4) for e in range(4)]
    assert len(set(epochs)) == 16
    assert tuple(range(50)) not in epochs


def test_order_is_pinned() -> None:
    """A resumed run needs the order of the run before, whatever was upgraded in between."""
    sampler = GroupSampler(8, 4, seed=42)
    assert [sampler.indices(i) for i in range(4)] == [[7, 1, 6, 4], [3, 5, 0, 2], [4, 5, 3, 0], [2, 7, 1, 6]]


def test_unshuffled_is_the_files_order() -> None:
    sampler = GroupSampler(3, 4, seed=0, shuffle=False)
    assert [sampler.indices(i) for i in range(3)] == [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0, 1, 2]]


def test_far_iterations_replay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = GroupSampler(1000, 4, seed=0)
    made: list[int] = []
    epoch = sampler._epoch
    monkeypatch.setattr(sampler, "_epoch", lambda e: made.append(e) or epoch(e))  # type: ignore[func-returns-value]
    assert len(set(sampler.indices(10**12))) == 4
    assert made == [4 * 10**9]


@pytest.mark.parametrize(("prompts", "groups", "seed"), [(0, 4, 0), (4, 0, 0), (4, 4, -1), (4, 4, 2**64)])
def test_sampler_misuse(prompts: int, groups: int, seed: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        GroupSampler(prompts, groups, seed)


def test_rank_slice_says_what_does_not_divide() -> None:
    assert rank_slice("abcdef", 1, 3) == "cd"
    with pytest.raises(ValueError, match=r"^8 groups per iteration do not divide among 3 ranks: choose .* 6 or 9$"):
        rank_slice(range(8), 0, 3)
    with pytest.raises(ValueError, match=r"2 groups per iteration do not divide among 4 ranks: .* as 4$"):
        rank_slice([0, 1], 0, 4)
    with pytest.raises(ValueError, match="rank must be from 0 to 3, got 4"):
        rank_slice(range(8), 4, 4)
    with pytest.raises(ValueError, match="must not be negative"):
        GroupSampler(3, 8, 0).indices(-1)
