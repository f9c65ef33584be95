"""The report of a run: one self-contained HTML page made from what the run wrote.

    python -m flowgrpo_fast.report RUN_DIR      writes RUN_DIR/report.html again

Reads metrics.jsonl, and summary.json, config.yaml and samples/ where they exist. The look is in assets/report.html and page.css.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape as esc
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from flowgrpo_fast.charts import (
    Label,
    Rows,
    chart,
    finite,
    label_of,
    number,
    percent,
    plan_charts,
    points_of,
    step_range,
    words,
)
from flowgrpo_fast.metrics import format_seconds, read_metrics, read_summary, write_atomic
from flowgrpo_fast.samples import Sample, evenly, first_frame, moment_words, read_prompt_samples

Change = tuple[str, float, float, Label]  # name, before, after

PROMPTS, MOMENTS = 12, 8  # of the strips
THUMBNAIL = 192  # pixels wide, 1.6 times what the page shows
VIDEO_BYTES, ALL_VIDEO_BYTES = 400_000, 6_000_000  # a longer one, or one more, is shown by its first frame


def read_run(run_dir: Path) -> tuple[Rows, dict[str, Any]]:
    """metrics.jsonl and summary.json; where both are there, the validation before training is the row of step 0.

    Raises FileNotFoundError without metrics.jsonl and ValueError where one of them is corrupt.
    """
    rows, summary = read_metrics(run_dir), read_summary(run_dir)
    before = {k.replace("/before", ""): v for k, v in summary.items() if k.startswith("validation/before/")}
    if before and all(row["step"] > 0 for row in rows):
        rows.insert(0, {"step": 0, **before})  # the curves of validation start where training did
    return rows, summary


def write_report(run_dir: Path) -> Path:
    """Write run_dir/report.html and return its path. Same inputs, same bytes; a section without data is left out.

    Raises FileNotFoundError without metrics.jsonl and ValueError where metrics.jsonl or summary.json is corrupt.
    """
    run_dir = Path(run_dir)
    rows, summary = read_run(run_dir)
    recipe = esc(str(summary.get("recipe") or run_dir.resolve().name))
    sections = [
        _section("Samples before and after", "pair", _before_after(run_dir / "samples")),
        _section("Curves", "charts", _charts(rows)),
        _section("Where a step’s time goes", "time", _step_time(rows)),
        _section("Each prompt over time", "prompts", _strips(run_dir)),
        _section("Samples during training", "timeline", _timeline(run_dir / "samples")),
        _section("Environment", "versions", map(_term, sorted((summary.get("versions") or {}).items())), tag="dl"),
        _section("Details", "details", _details(run_dir / "config.yaml", summary)),
    ]
    head = _results(_changes(rows, summary)) + _facts(rows, summary)
    page = Template(asset("report.html")).substitute(
        style=asset("page.css"), recipe=recipe, head=head, body="".join(sections)
    )
    write_atomic(run_dir / "report.html", page.encode())
    return run_dir / "report.html"


def asset(name: str) -> str:
    """The text of a file of flowgrpo_fast/assets."""
    return (resources.files("flowgrpo_fast") / "assets" / name).read_text("utf-8")


def _section(title: str, kind: str, parts: Iterable[str], tag: str = "div") -> str:
    content = "".join(parts)
    return f'<section><h2>{title}</h2>\n<{tag} class="{kind}">{content}</{tag}></section>\n' if content else ""


def _changes(rows: Rows, summary: dict[str, Any]) -> list[Change]:
    """Every validation metric before and after, by the summary or else the log; without any, the training reward."""
    names = [re.sub("^validation/(before|after)/", "validation/", key) for group in (summary, *rows) for key in group]
    validations = filter(re.compile("validation/.+/.+").fullmatch, dict.fromkeys(names))
    changes: list[Change] = []
    for name in ["validation/reward", *validations, "reward/mean"]:
        logged = [v for _, v in points_of(rows, name) if v is not None]
        first, last = (logged[0], logged[-1]) if len(logged) > 1 else (None, None)
        before = finite(summary.get(name.replace("/", "/before/", 1), first))
        after = finite(summary.get(name.replace("/", "/after/", 1), last))
        if before is not None and after is not None and not (changes and name == "reward/mean"):
            changes.append((words(name) if name != "reward/mean" else "training reward", before, after, label_of(name)))
    return changes[:4]


def _results(changes: list[Change]) -> str:
    cells = []
    for name, before, after, label in changes:
        change = f"{100 * (after - before):+.1f} points" if label is percent else f"{after - before:+.3g}"
        times = f", {after / before:.1f} times" if before > 0 and after > 1.05 * before else ""
        numbers = f"<dd>{label(before)}<i>→</i><b>{label(after)}</b></dd><dd>{change.replace('-', '−')}{times}</dd>"
        cells.append(f"<div><dt>{esc(name[0].upper() + name[1:])}</dt>{numbers}</div>")
    return f'<dl class="results">{"".join(cells)}</dl>' if cells else ""


def _facts(rows: Rows, summary: dict[str, Any]) -> str:
    steps = finite(summary.get("steps")) or step_range(rows)[1]
    facts = [("Steps", f"{steps:,.0f}")]
    times = {"Set-up": "timing/setup_s", "Training": "timing/train_s", "In all": "timing/total_s"}
    facts += [(k, format_seconds(v)) for k, name in times.items() if (v := finite(summary.get(name))) is not None]
    if rates := [v for _, v in points_of(rows, "throughput/images_per_s") if v is not None]:
        facts.append(("Throughput", f"{number(math.fsum(rates) / len(rates))} images/s"))
    peaks = {
        side: [v for _, v in points_of(rows, f"memory/peak_{side}_gib") if v is not None] for side in ("device", "host")
    }
    if gib := [f"{number(max(values))} GiB {side}" for side, values in peaks.items() if values]:
        facts.append(("Peak memory", ", ".join(gib)))
    if (deviation := finite(summary.get("first_update_ratio_max_deviation"))) is not None:
        facts.append(("Max |ratio − 1|, first update", number(deviation) if deviation else "0, exact to the last bit"))
    return f'<dl class="facts">{"".join(map(_term, facts))}</dl>'


def _term(pair: tuple[Any, Any]) -> str:
    return f"<div><dt>{esc(str(pair[0]))}</dt><dd>{esc(str(pair[1]))}</dd></div>"


def _before_after(samples: Path) -> list[str]:
    found = [name for name in ("before", "after") if (samples / f"{name}.png").exists()]
    return [_picture(samples / f"{n}.png", f"<b>{n.title()}</b>", f"Samples {n} training", 1600) for n in found]


def _charts(rows: Rows) -> list[str]:
    steps = step_range(rows)
    plans = plan_charts(name for row in rows for name in row)
    lines = [{name: points_of(rows, metric) for name, metric in plan.lines.items()} for plan in plans]
    return [
        chart(plan.title, series, steps, plan.label, plan.log, plan.smooth)
        for plan, series in zip(plans, lines, strict=True)
    ]


def _step_time(rows: Rows) -> list[str]:
    """Mean seconds a step by phase. A phase of a few steps only (validation, saving) is spread over all of them."""
    timed = [{k[7:-2]: finite(v) or 0.0 for k, v in row.items() if re.fullmatch("timing/.+_s", k)} for row in rows]
    timed = [row for row in timed if "step" in row] or [row for row in timed if row]
    means = {name: math.fsum(row.get(name, 0.0) for row in timed) / len(timed) for row in timed for name in row}
    step, phases = means.pop("step", 0.0), math.fsum(means.values())
    usual = ["rollout", "reward", "update", "sync", "validation"]
    order = sorted(means, key=lambda name: (usual.index(name) if name in usual else len(usual), name))
    shares = [(name, means[name], f"p{i % 6}") for i, name in enumerate(order)]
    if step - phases > 0.005 * step:
        shares.append(("everything else" if means else "step", step - phases, "rest"))
    total = math.fsum(seconds for _, seconds, _ in shares)
    if total <= 0:
        return []
    note = f"{format_seconds(step or total)} a step, mean of {len(timed)} step{'s' * (len(timed) != 1)}."
    note += " Phases overlap: together they take longer than the step." if 0 < 1.005 * step < phases else ""
    bar = "".join(f'<span class="{css}" style="width:{100 * s / total:.2f}%"></span>' for _, s, css in shares)
    head = '<th scope="col">Phase</th><th scope="col">Seconds</th><th scope="col">Share</th>'
    lines = "".join(
        f'<tr><th scope="row"><span class="key {css}"></span>{esc(words(name))}</th>'
        f"<td>{seconds:.3f}</td><td>{100 * seconds / total:.1f}%</td></tr>"
        for name, seconds, css in shares
    )
    bar = f'<p class="note">{note}</p><div class="bar" aria-hidden="true">{bar}</div>'
    return [f"{bar}<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"]


def _timeline(samples: Path) -> list[str]:
    found = [(m, path) for path in samples.glob("*.png") if (m := re.fullmatch(r"step_(\d+)_?(.*)", path.stem))]
    names = evenly(sorted((int(m[1]), m[2], path) for m, path in found), 12)
    texts = [f"step {step:,}" + (f", {words(name)}" if name else "") for step, name, _ in names]
    return [_picture(path, esc(t), f"Samples at {t}", 800) for t, (_, _, path) in zip(texts, names, strict=True)]


def _strips(run_dir: Path) -> Iterable[str]:
    """Of the first prompts, each one's samples from the earliest to the latest."""
    room = ALL_VIDEO_BYTES
    for index, samples in read_prompt_samples(run_dir / "samples", PROMPTS, MOMENTS).items():
        figures = []
        for sample in samples:
            media, taken = _moment(sample, run_dir, room)
            room -= taken
            note = f"<small>{esc(sample.note)}</small>" if sample.note else ""
            figures.append(
                f"<figure>{media}<figcaption>{esc(moment_words(sample.moment))} {note}</figcaption></figure>"
            )
        yield f'<h3>{esc(samples[-1].prompt or f"Prompt {index}")}</h3><div class="strip">{"".join(figures)}</div>'


def _moment(sample: Sample, run_dir: Path, room: int) -> tuple[str, int]:
    """The sample inline, and the bytes that a video took."""
    alt = f"{sample.prompt or sample.path.parent.name}, {moment_words(sample.moment)}"
    data = sample.path.read_bytes()
    if sample.path.suffix == ".png":
        return _image(data, alt, THUMBNAIL, 30_000), 0
    if len(data) <= min(VIDEO_BYTES, room):
        source = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
        return f'<video src="{source}" aria-label="{esc(alt)}" controls autoplay loop muted playsinline></video>', len(
            data
        )
    first_frame(sample.path).save(still := io.BytesIO(), "PNG")
    where = f"<small>video: {esc(str(sample.path.relative_to(run_dir)))}</small>"
    return _image(still.getvalue(), f"First frame: {alt}", THUMBNAIL, 30_000) + where, 0


def _picture(path: Path, caption: str, alt: str, limit: int) -> str:
    return f"<figure><figcaption>{caption}</figcaption>{_image(path.read_bytes(), alt, limit)}</figure>"


def _image(data: bytes, alt: str, limit: int, most_bytes: int | None = None) -> str:
    """An <img> with a PNG inside; one wider than `limit` pixels, or heavier than `most_bytes`, is made lighter first."""
    from PIL import Image

    kind = "png"
    with Image.open(io.BytesIO(data)) as image:
        if image.width > limit or (most_bytes is not None and len(data) > most_bytes):
            image.thumbnail((limit, limit * image.height))
            image.save(small := io.BytesIO(), "WEBP", quality=90)
            data, kind = small.getvalue(), "webp"
        size = f'width="{image.width}" height="{image.height}"' + ' class="small"' * (image.width < 128)
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return f'<img src="{source}" {size} alt="{esc(alt)}">'


def _details(config: Path, summary: dict[str, Any]) -> Iterable[str]:
    if config.exists():
        yield f"<details><summary>Configuration</summary><pre>{esc(config.read_text('utf-8'))}</pre></details>"
    scalars = [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in sorted(summary.items()) if k != "versions"]
    if scalars:
        yield f"<details><summary>All values of the summary</summary><dl>{''.join(map(_term, scalars))}</dl></details>"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. A directory that cannot be reported on ends it with a message and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m flowgrpo_fast.report", description="Write RUN_DIR/report.html.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run's directory: it holds metrics.jsonl")
    try:
        print(write_report(parser.parse_args(argv).run_dir))
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
