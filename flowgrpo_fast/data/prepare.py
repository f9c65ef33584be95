"""Prompt files from the field's sources.

    python -m flowgrpo_fast.data.prepare ocr      prompts.txt                  --out ocr.jsonl       a line: A sign that says "OPEN"
    python -m flowgrpo_fast.data.prepare geneval  evaluation_metadata.jsonl    --out geneval.jsonl   GenEval's own file
    python -m flowgrpo_fast.data.prepare pickapic train-*.parquet              --out pick.parquet    Pick-a-Pic: its captions, each once
    python -m flowgrpo_fast.data.prepare pairs    train-*.parquet --out pairs.jsonl --images pairs/  Pick-a-Pic: pairs for offline DPO
    python -m flowgrpo_fast.data.prepare edits    train-*.parquet --out edits.jsonl --images edits/  InstructPix2Pix or MagicBrush: instructions and the images to edit

The output is what `data.train` reads: prompt, negative_prompt, and whatever the rewards want. Its name ends in .jsonl or .parquet.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flowgrpo_fast.data.prompts import PromptFileError, PromptRecord, load_prompts

Row = dict[str, Any]
QUOTED = re.compile(r'["“]([^"“”]+)["”]')


def ocr(sources: list[Path], images: Path | None) -> Iterator[Row]:
    """Prompts that say what to write between double quotes -> text, which the reward `ocr` looks for."""
    for source in sources:
        for record in load_prompts(str(source)):
            found = QUOTED.search(record.prompt)
            if found is None:
                raise PromptFileError(
                    f"{source}, prompt {record.index}: no text between double quotes in {record.prompt!r}"
                )
            yield _row(record) | {"text": found[1]}


def geneval(sources: list[Path], images: Path | None) -> Iterator[Row]:
    """GenEval's metadata: tag, include, exclude and the rest stay, for a GenEval scorer behind the reward `http`."""
    for source in sources:
        for record in load_prompts(str(source)):
            if "include" not in record.metadata:
                raise PromptFileError(
                    f'{source}, prompt {record.index}: has no "include"; give GenEval\'s evaluation_metadata.jsonl'
                )
            yield _row(record)


def _row(record: PromptRecord) -> Row:
    negative = {} if record.negative_prompt is None else {"negative_prompt": record.negative_prompt}
    return {"prompt": record.prompt, **record.metadata, **negative}


def pickapic(sources: list[Path], images: Path | None) -> Iterator[Row]:
    seen: set[str] = set()
    for source in sources:
        for row in _columns(source, ["caption"]):
            caption = row["caption"].strip()
            if caption and caption not in seen:
                seen.add(caption)
                yield {"prompt": caption}


def pairs(sources: list[Path], images: Path | None) -> Iterator[Row]:
    """Ties are left out: they prefer nothing."""
    assert images is not None
    images.mkdir(parents=True, exist_ok=True)
    count = 0
    for source in sources:
        for row in _columns(source, ["caption", "jpg_0", "jpg_1", "label_0"]):
            if row["label_0"] not in (0, 1) or not row["caption"].strip():
                continue
            files = [images / f"{count:07d}_{i}.jpg" for i in range(2)]
            for i, file in enumerate(files):
                file.write_bytes(row[f"jpg_{i}"])
            count += 1
            order = files if row["label_0"] == 1 else files[::-1]
            yield {"prompt": row["caption"], "chosen": str(order[0].absolute()), "rejected": str(order[1].absolute())}


# Instruction and source image: InstructPix2Pix, MagicBrush.
EDIT_COLUMNS = (("edit_prompt", "original_image"), ("instruction", "source_img"))


def edits(sources: list[Path], images: Path | None) -> Iterator[Row]:
    """Each row's source image as a file; the edited one is left out: rewards judge what the model makes."""
    assert images is not None
    images.mkdir(parents=True, exist_ok=True)
    count = 0
    for source in sources:
        names = _names(source)
        found = next((list(columns) for columns in EDIT_COLUMNS if names.issuperset(columns)), None)
        if found is None:
            known = " nor ".join(f"{a!r} with {b!r}" for a, b in EDIT_COLUMNS)
            raise PromptFileError(f"{source}: has neither {known}, only {', '.join(sorted(names))}")
        for row in _columns(source, found):
            prompt, image = (row[name] for name in found)
            data = image["bytes"] if isinstance(image, dict) else image
            if not prompt or not prompt.strip() or not data:
                continue
            # Whatever its format: what opens it looks at the content.
            file = images / f"{count:07d}.img"
            file.write_bytes(data)
            count += 1
            yield {"prompt": prompt.strip(), "image": str(file.absolute())}


KINDS: dict[str, Callable[[list[Path], Path | None], Iterator[Row]]] = {
    "ocr": ocr,
    "geneval": geneval,
    "pickapic": pickapic,
    "pairs": pairs,
    "edits": edits,
}
WITH_IMAGES = ("pairs", "edits")


def _names(source: Path) -> set[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        return set(pyarrow.parquet.read_schema(source).names)
    except (OSError, pyarrow.ArrowException) as error:
        raise PromptFileError(f"{source}: cannot be read as parquet ({error})") from error


def _columns(source: Path, names: list[str]) -> Iterator[Row]:
    """Rows of a parquet file, a batch at a time: these files hold images."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(source)
        if missing := set(names) - set(file.schema_arrow.names):
            raise PromptFileError(
                f"{source}: has no column {sorted(missing)[0]!r}, only {', '.join(file.schema_arrow.names)}"
            )
        for batch in file.iter_batches(256, columns=names):
            yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise PromptFileError(f"{source}: cannot be read as parquet ({error})") from error


def write(rows: list[Row], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".jsonl":
        out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return
    import pyarrow
    import pyarrow.parquet

    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    pyarrow.parquet.write_table(table, out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flowgrpo_fast.data.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("sources", nargs="+", help="files; ~ is expanded")
    parser.add_argument("--out", required=True, help=".jsonl or .parquet")
    parser.add_argument("--images", help="pairs, edits: folder for the pictures")
    parser.add_argument("--negative-prompt", help="of every prompt; without it data.negative_prompt counts")
    parser.add_argument(
        "--system-prompt", help="writes each prompt as a chat, verl's form; here the model's template has its own"
    )
    parser.add_argument("--limit", type=int, help="so many prompts, drawn by --seed")
    parser.add_argument(
        "--validation", type=int, default=0, help="hold out so many, drawn by --seed, in OUT's name + .validation"
    )
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args(argv)
    out, sources = Path(a.out).expanduser(), [Path(source).expanduser() for source in a.sources]
    if out.suffix not in (".jsonl", ".parquet"):
        parser.error(f"--out {a.out}: name it .jsonl or .parquet")
    if (a.kind in WITH_IMAGES) != (a.images is not None):
        parser.error(f"--images goes with {' and '.join(WITH_IMAGES)}, which need it")
    if a.kind == "geneval" and out.suffix == ".parquet":
        parser.error("--out: GenEval's prompts have different fields, which a table would fill up; name it .jsonl")
    try:
        rows = list(KINDS[a.kind](sources, None if a.images is None else Path(a.images).expanduser()))
    except (PromptFileError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for row in rows:
        if a.system_prompt is not None:
            row["prompt"] = [{"role": "system", "content": a.system_prompt}, {"role": "user", "content": row["prompt"]}]
        if a.negative_prompt is not None:
            row["negative_prompt"] = a.negative_prompt
    # Rows of one prompt stay on one side.
    prompts = list(dict.fromkeys(json.dumps(row["prompt"]) for row in rows))
    if a.limit is not None or a.validation:
        random.Random(a.seed).shuffle(prompts)
    wanted = len(prompts) if a.limit is None else min(len(prompts), a.limit + a.validation)
    if wanted <= a.validation:
        print(
            f"error: {len(prompts)} prompts found; none are left beside {a.validation} for validation", file=sys.stderr
        )
        return 2
    files = {out: set(prompts[a.validation : wanted])}
    if a.validation:
        files[out.with_name(f"{out.stem}.validation{out.suffix}")] = set(prompts[: a.validation])
    for file, chosen in files.items():
        kept = [row for row in rows if json.dumps(row["prompt"]) in chosen]
        write(kept, file)
        print(f"{file}: {len(chosen)} prompts, {len(kept)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
