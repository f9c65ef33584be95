"""Prompts from a .txt, .jsonl or .parquet file, or the built-in ones. Used verbatim; an error names file, place and fix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from flowgrpo_fast.models.glyph_prompts import glyph_prompt, glyph_texts

Split = Literal["train", "validation"]


class PromptFileError(ValueError):
    """A prompt file that cannot be used."""


@dataclass(frozen=True)
class PromptRecord:
    """One prompt. `index` is its place in the file; `metadata` goes to the rewards; `images` are paths, for editing."""

    index: int
    prompt: str
    negative_prompt: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    images: tuple[str, ...] = ()


def load_prompts(source: str, split: Split = "train") -> list[PromptRecord]:
    """The prompts of `source`: "builtin:glyphs" (of which `split` picks a part), or the path of a file, `~` expanded.

    .txt      one prompt a line
    .jsonl    one object a line: prompt, negative_prompt, image (a path, or a list of them), metadata; any further key becomes metadata
    .parquet  the same as columns. In both, verl's form is understood: a prompt that is a chat (its last user message
              is taken: the system prompt is the model's template here), reward_model.ground_truth -> ground_truth

    Raises PromptFileError for anything missing, empty, misspelt or not UTF-8.
    """
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {get_args(Split)}, got {split!r}")
    if source.startswith("builtin:"):
        if source != "builtin:glyphs":
            raise PromptFileError(f"there are no built-in prompts {source!r}; use 'builtin:glyphs' or a file")
        return [
            PromptRecord(i, glyph_prompt(text), metadata={"text": text}) for i, text in enumerate(glyph_texts(split))
        ]
    path = Path(source).expanduser().absolute()
    if path.suffix.lower() not in READERS:
        raise PromptFileError(
            f"{path}: prompts come from {', '.join(READERS)} files, not {path.suffix or 'one without extension'!r}"
        )
    if not path.is_file():
        raise PromptFileError(f"{path}: there is no such file; a relative path counts from {Path.cwd()}")
    records = [_record(i, where, row) for i, (where, row) in enumerate(READERS[path.suffix.lower()](path))]
    if not records:
        raise PromptFileError(f"{path}: holds no prompts; write at least one")
    return records


Rows = Iterator[tuple[str, Any]]  # where a row stands, for errors, and what it holds


def _lines(path: Path) -> Rows:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        broken = data[: error.start].count(b"\n") + 1
        raise PromptFileError(
            f"{path}, line {broken}: byte {data[error.start]:#04x} at offset {error.start} is not UTF-8; save the file as UTF-8"
        ) from error
    # Not splitlines(): a prompt may hold U+2028 and its like.
    lines = text.removeprefix("\ufeff").removesuffix("\n").split("\n") if text.strip("\ufeff") else []
    for number, line in enumerate((line.removesuffix("\r") for line in lines), 1):
        if not line.strip():
            raise PromptFileError(f"{path}, line {number}: is empty; delete the line or write a prompt")
        yield f"{path}, line {number}", line


def _txt(path: Path) -> Rows:
    return ((where, {"prompt": line}) for where, line in _lines(path))


def _jsonl(path: Path) -> Rows:
    for where, line in _lines(path):
        try:
            yield where, json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptFileError(
                f"{where}: is not JSON: {error.msg} at column {error.colno}; write one object a line"
            ) from error


def _parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise PromptFileError(f"{path}: cannot be read as parquet ({error}); write the file again") from error
    return ((f"{path}, row {i} (from 0)", row) for i, row in enumerate(rows))


READERS = {".txt": _txt, ".jsonl": _jsonl, ".parquet": _parquet}


def _record(index: int, where: str, row: Any) -> PromptRecord:
    if not isinstance(row, dict):
        raise PromptFileError(f'{where}: holds a {type(row).__name__}; write an object such as {{"prompt": "a cat"}}')
    if "prompt" not in row:
        raise PromptFileError(f'{where}: has no "prompt", only {", ".join(map(repr, row)) or "nothing"}; add it')
    rest = dict(row)
    prompt = _text(where, "prompt", rest.pop("prompt"))
    if prompt is None or not prompt.strip():
        raise PromptFileError(f'{where}: "prompt" is empty; write one or delete the row')
    negative_prompt = _text(where, "negative_prompt", rest.pop("negative_prompt", None))
    images = _paths(where, rest.pop("image", None))
    metadata = rest.pop("metadata", None)
    if metadata is not None and not isinstance(metadata, dict):
        raise PromptFileError(f'{where}: "metadata" is a {type(metadata).__name__}; write an object')
    metadata = dict(metadata or {})
    if isinstance(rest.get("reward_model"), dict):
        rest["ground_truth"] = rest.pop("reward_model").get("ground_truth")
    if twice := sorted(metadata.keys() & rest.keys()):
        raise PromptFileError(f'{where}: {twice[0]!r} stands in "metadata" and beside it; keep one')
    return PromptRecord(index, prompt, negative_prompt, metadata | rest, images)


def _paths(where: str, value: Any) -> tuple[str, ...]:
    paths = [] if value is None else value if isinstance(value, list) else [value]
    if wrong := [path for path in paths if not isinstance(path, str)]:
        raise PromptFileError(f'{where}: "image" holds a {type(wrong[0]).__name__}; write a path, or a list of them')
    return tuple(paths)


def _text(where: str, key: str, value: Any) -> str | None:
    """A string, or the last user message of a chat."""
    if isinstance(value, list) and value and all(isinstance(m, dict) and "content" in m for m in value):
        value = next((m["content"] for m in reversed(value) if m.get("role") == "user"), None)
    if value is not None and not isinstance(value, str):
        raise PromptFileError(f'{where}: "{key}" is a {type(value).__name__}; write a string')
    return value
