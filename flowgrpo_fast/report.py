"""The report of a run: one self-contained HTML page made from what the run wrote.

    python -m flowgrpo_fast.report RUN_DIR      writes RUN_DIR/report.html again

Reads metrics.jsonl, and summary.json, config.yaml and samples/*.png where they exist. The look is in assets/report.html.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape as esc
from importlib import resources
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from flowgrpo_fast.metrics import format_seconds, read_metrics, read_summary, write_atomic

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Rows = list[dict[str, Any]]
Points = Sequence[tuple[int, float | None]]  # (step, value); None is a gap
Label = Callable[[float], str]
Change = tuple[str, float, float, Label]  # name, before, after


def image_grid(
    images: Tensor, captions: list[str] | None = None, columns: int | None = None, scale: int | None = None
) -> Image:
    """Samples as one picture, transparent between the tiles (so that it sits on a light page and on a dark one).

    images: uint8 [N, 3, H, W], or videos [N, F, 3, H, W], of which the first frame is shown. captions: one a sample, cut to
    the tile's width. columns: by default what comes nearest to a square. scale: integer enlargement without smoothing;
    by default the least that makes a tile 128 pixels wide or high.
    """
    from PIL import Image, ImageDraw, ImageFont

    frames = images[:, 0] if images.ndim == 5 else images
    if frames.ndim != 4 or frames.shape[1] != 3 or str(frames.dtype) != "torch.uint8" or frames.numel() == 0:
        wanted = "uint8 [N, 3, H, W] or [N, F, 3, H, W] with N > 0"
        raise ValueError(f"image_grid wants {wanted}; got {images.dtype} {list(images.shape)}")
    count, _, height, width = frames.shape
    if captions is not None and len(captions) != count:
        raise ValueError(f"image_grid got {len(captions)} captions for {count} images")
    scale = scale or max(1, math.ceil(128 / max(height, width)))
    columns = min(count, columns or math.ceil(math.sqrt(count * height / width)))
    tile, gap = (width * scale, height * scale), max(4, width * scale // 32)
    size = max(11, min(28, tile[0] // 9))
    font, below = ImageFont.load_default(size), round(1.6 * size) if captions else 0
    pitch = tile[0] + gap, tile[1] + below + gap
    grid = Image.new("RGBA", (columns * pitch[0] - gap, math.ceil(count / columns) * pitch[1] - gap))
    draw = ImageDraw.Draw(grid)
    for i, pixels in enumerate(frames.permute(0, 2, 3, 1).cpu().contiguous().numpy()):
        x, y = i % columns * pitch[0], i // columns * pitch[1]
        grid.paste(Image.fromarray(pixels).resize(tile, Image.Resampling.NEAREST), (x, y))
        if captions is not None:
            text = whole = " ".join(captions[i].split())
            while text.strip("…") and font.getlength(text) > tile[0]:
                whole = whole[:-1]
                text = whole.rstrip() + "…"
            # Mid grey: contrast above 4 on white and on near-black alike.
            draw.text((x + tile[0] / 2, y + tile[1] + below / 2), text, (122, 122, 122), font, "mm")
    return grid


def _picture(path: Path, caption: str, alt: str, limit: int) -> str:
    """A <figure> with the file inside; a picture wider than `limit` pixels is made smaller first, to keep the page light."""
    from PIL import Image

    data, kind = path.read_bytes(), "png"
    with Image.open(io.BytesIO(data)) as image:
        if image.width > limit:
            image.thumbnail((limit, limit * image.height))
            image.save(small := io.BytesIO(), "WEBP", quality=90)
            data, kind = small.getvalue(), "webp"
        size = f'width="{image.width}" height="{image.height}"'
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return f'<figure><figcaption>{caption}</figcaption><img src="{source}" {size} alt="{esc(alt)}"></figure>'


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _power_of_ten(exponent: int) -> str:
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _number(value: float) -> str:
    """Three digits; a power of ten outside 0.001 to 99,999."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 99_999.5:
        return (f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")).replace("-", "−")
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}×{_power_of_ten(int(exponent))}".replace("-", "−")


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%" if value == 0 or abs(value) >= 5e-4 else f"{_number(100 * value)}%"


def _label(metric: str) -> Label:
    return _percent if metric.endswith(("exact_match", "fraction", "fraction_low", "fraction_high")) else _number


def _words(metric: str) -> str:
    return " ".join({"ocr": "OCR"}.get(word, word) for word in re.split("[/_]", metric))


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` + 1 multiples of 1, 2 or 5 times a power of ten, the first and the last enclosing [low, high]."""
    if high - low <= 1e-9 * abs(high):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * count >= (high - low) * 0.999)
    return [i * step for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def _linear_axis(values: list[float], label: Label) -> tuple[list[float], list[str]]:
    """Ticks and their texts. The axis starts at zero unless that would leave its lower half empty."""
    low, high = min(values), max(values)
    if low == high == 0:
        return [0.0, 1.0], ["0", ""]
    ticks = nice_ticks(0.0 if 0 < low < high / 2 else low, high)
    factor, unit = (100, "%") if label is _percent else (1, "")
    if not 1e-2 <= factor * max(map(abs, ticks)) < 1e5:
        return ticks, [label(tick) for tick in ticks]
    decimals = max(0, -math.floor(math.log10(factor * (ticks[1] - ticks[0])) + 1e-9))
    return ticks, [f"{factor * tick:,.{decimals}f}{unit}".replace("-", "−") for tick in ticks]


def _log_axis(values: list[float]) -> tuple[list[float], list[str]]:
    """Decades; and below them, where there are zeros, a row for the zeros, which have no place on a log scale."""
    positive = [math.log10(v) for v in values if v > 0]
    low = math.floor(min(positive))
    high = max(math.ceil(max(positive)), low + 1)
    stride = math.ceil((high - low) / 4)
    ticks = list(range(low, high + stride, stride))
    zero = [low - (ticks[-1] - low) / 7] if len(positive) < len(values) else []
    return [*zero, *ticks], ["0" for _ in zero] + [_power_of_ten(tick) for tick in ticks]


def chart(
    title: str, series: dict[str, Points], steps: tuple[int, int], label: Label, log: bool = False, smooth: bool = False
) -> str:
    """A line chart as <figure> with inline SVG; "" if there is nothing to show. `steps`: the x axis, the same for all charts.

    log: decades, with a row of its own for exact zeros. smooth: a long series is drawn thin and its running mean thick.
    """
    known = {name: [(step, v) for step, v in points if v is not None] for name, points in series.items()}
    values = [v for points in known.values() for _, v in points]
    if not values:
        return ""
    width, height, left, right, top, bottom = 480, 236, 54, 392, 10, 210
    log = log and min(values) >= 0 < max(values)
    ticks, texts = _log_axis(values) if log else _linear_axis(values, label)

    def x(step: float) -> float:
        return left + (right - left) * ((step - steps[0]) / (steps[1] - steps[0]) if steps[1] > steps[0] else 0.5)

    def y(value: float) -> float:
        place = value if not log else math.log10(value) if value > 0 else ticks[0]
        return bottom - (bottom - top) * (place - ticks[0]) / (ticks[-1] - ticks[0])

    parts = [f'<text x="{right + 26}" y="{height - 6}">step</text>']
    for tick, text in zip(ticks, texts, strict=True):
        at = y(tick if not log else 0 if text == "0" else 10.0**tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    whole = sorted({round(t) for t in nice_ticks(*steps, 5) if t == round(t) and steps[0] <= t <= steps[1]})
    for step in whole or steps[:1]:
        parts.append(f'<text x="{x(step):.1f}" y="{height - 6}" text-anchor="middle">{step:,}</text>')

    note, ends, description = "", [], []
    for color, name, points in [(i, name, points) for i, (name, points) in enumerate(known.items()) if points]:
        line = series[name]
        if smooth and len(points) >= 40:
            half = max(2, len(points) // 50)
            note = f"thick line: mean of {2 * half + 1} steps"
            parts.append(f'<path class="thin s{color}" d="{_path(line, x, y)}"/>')
            line = _running_mean(line, half)
        if not log:  # values that jump over decades and to zero: a line between them shows nothing
            parts.append(f'<path class="s{color}" d="{_path(line, x, y)}"/>')
        radius = 2.4 if len(points) < 300 else 1.2
        if log or len(points) <= 24:
            parts += [f'<circle class="n{color}" cx="{x(t):.1f}" cy="{y(v):.1f}" r="{radius}"/>' for t, v in points]
        final = next(v for _, v in reversed(line) if v is not None)
        ends.append((y(final), f"n{color}", name, label(final)))
        first, last = (f"{label(v)} at step {step}" for step, v in (points[0], points[-1]))
        description.append(f"{name} from {first} to {last}")
    at = top - 32.0
    for i, (end, css, name, text) in enumerate(sorted(ends)):
        room = bottom - 18 - 32 * (len(ends) - 1 - i)  # the lowest place that leaves room for the labels below
        at = max(at + 32, min(max(end, top + 4), room))
        parts.append(f'<text class="end {css}" x="{right + 9}" y="{at + 2:.1f}">{esc(name)}</text>')
        parts.append(f'<text x="{right + 9}" y="{at + 16:.1f}">{text}</text>')

    # Read-outs without a script: invisible columns whose <title> is the browser's own tooltip.
    said: dict[int, list[str]] = {}
    for name, line in series.items():
        for step, v in line:
            said.setdefault(step, [f"step {step}"]).append(f"{name} {'not finite' if v is None else label(v)}")
    shown = sorted(said)[:: max(1, len(said) // 150)]
    edges = [left, *((x(a) + x(b)) / 2 for a, b in pairwise(shown)), right]
    for step, (start, stop) in zip(shown, pairwise(edges), strict=True):
        box = f'x="{start:.1f}" y="{top}" width="{stop - start:.1f}" height="{bottom - top}"'
        parts.append(f'<rect class="hit" {box}><title>{esc(chr(10).join(said[step]))}</title></rect>')
    ident, text = "chart-" + re.sub(r"\W+", "-", title.lower()).strip("-"), esc("; ".join(description))
    parts.insert(0, f'<title id="{ident}">{esc(title)} by step</title><desc id="{ident}-text">{text}</desc>')
    names = f'role="img" aria-labelledby="{ident} {ident}-text"'
    svg = f'<svg viewBox="0 0 {width} {height}" {names}>{"".join(parts)}</svg>'
    return f"<figure><figcaption><b>{esc(title)}</b><small>{note}</small></figcaption>{svg}</figure>"


def _path(points: Points, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    pairs = pairwise([(0, None), *points])  # h0, a line of no length, shows a point that stands alone between two gaps
    return "".join(f"{'M' if a is None else 'L'}{x(t):.1f} {y(v):.1f}h0" for (_, a), (t, v) in pairs if v is not None)


def _running_mean(points: Points, half: int) -> Points:
    """Over `half` neighbours on either side, where they exist; a gap stays a gap."""
    near = ([v for _, v in points[max(0, i - half) : i + half + 1] if v is not None] for i in range(len(points)))
    return [
        (step, None if v is None else math.fsum(some) / len(some)) for (step, v), some in zip(points, near, strict=True)
    ]


def write_report(run_dir: Path) -> Path:
    """Write run_dir/report.html and return its path. Same inputs, same bytes; a section without data is left out.

    Raises FileNotFoundError without metrics.jsonl and ValueError where metrics.jsonl or summary.json is corrupt.
    """
    run_dir = Path(run_dir)
    rows, summary = read_metrics(run_dir), read_summary(run_dir)
    before = {k.replace("/before", ""): v for k, v in summary.items() if k.startswith("validation/before/")}
    if before and all(row["step"] > 0 for row in rows):
        rows.insert(0, {"step": 0, **before})  # the curves of validation start where training did
    recipe = esc(str(summary.get("recipe") or run_dir.resolve().name))
    template = Template((resources.files("flowgrpo_fast") / "assets" / "report.html").read_text("utf-8"))
    sections = [
        _section("Samples before and after", "pair", _before_after(run_dir / "samples")),
        _section("Curves", "charts", _charts(rows)),
        _section("Where a step’s time goes", "time", _step_time(rows)),
        _section("Samples during training", "timeline", _timeline(run_dir / "samples")),
        _section("Environment", "versions", map(_term, sorted((summary.get("versions") or {}).items())), tag="dl"),
        _section("Details", "details", _details(run_dir / "config.yaml", summary)),
    ]
    head = _results(_changes(rows, summary)) + _facts(rows, summary)
    page = template.substitute(recipe=recipe, head=head, body="".join(sections))
    write_atomic(run_dir / "report.html", page.encode())
    return run_dir / "report.html"


def _section(title: str, kind: str, parts: Iterable[str], tag: str = "div") -> str:
    content = "".join(parts)
    return f'<section><h2>{title}</h2>\n<{tag} class="{kind}">{content}</{tag}></section>\n' if content else ""


def _points(rows: Rows, metric: str) -> Points:
    return [(row["step"], _finite(row[metric])) for row in rows if metric in row]


def _changes(rows: Rows, summary: dict[str, Any]) -> list[Change]:
    """Every validation metric before and after, by the summary or else the log; without any, the training reward."""
    names = [re.sub("^validation/(before|after)/", "validation/", key) for group in (summary, *rows) for key in group]
    validations = filter(re.compile("validation/.+/.+").fullmatch, dict.fromkeys(names))
    changes: list[Change] = []
    for name in ["validation/reward", *validations, "reward/mean"]:
        logged = [v for _, v in _points(rows, name) if v is not None]
        first, last = (logged[0], logged[-1]) if len(logged) > 1 else (None, None)
        before = _finite(summary.get(name.replace("/", "/before/", 1), first))
        after = _finite(summary.get(name.replace("/", "/after/", 1), last))
        if before is not None and after is not None and not (changes and name == "reward/mean"):
            changes.append((_words(name) if name != "reward/mean" else "training reward", before, after, _label(name)))
    return changes[:4]


def _results(changes: list[Change]) -> str:
    cells = []
    for name, before, after, label in changes:
        change = f"{100 * (after - before):+.1f} points" if label is _percent else f"{after - before:+.3g}"
        times = f", {after / before:.1f} times" if before > 0 and after > 1.05 * before else ""
        numbers = f"<dd>{label(before)}<i>→</i><b>{label(after)}</b></dd><dd>{change.replace('-', '−')}{times}</dd>"
        cells.append(f"<div><dt>{esc(name[0].upper() + name[1:])}</dt>{numbers}</div>")
    return f'<dl class="results">{"".join(cells)}</dl>' if cells else ""


def _facts(rows: Rows, summary: dict[str, Any]) -> str:
    steps = _finite(summary.get("steps")) or max((row["step"] for row in rows), default=0)
    facts = [("Steps", f"{steps:,.0f}")]
    times = {"Set-up": "timing/setup_s", "Training": "timing/train_s", "In all": "timing/total_s"}
    facts += [(k, format_seconds(v)) for k, name in times.items() if (v := _finite(summary.get(name))) is not None]
    if rates := [v for _, v in _points(rows, "throughput/images_per_s") if v is not None]:
        facts.append(("Throughput", f"{_number(math.fsum(rates) / len(rates))} images/s"))
    if (deviation := _finite(summary.get("first_update_ratio_max_deviation"))) is not None:
        facts.append(("Max |ratio − 1|, first update", _number(deviation) if deviation else "0, exact to the last bit"))
    return f'<dl class="facts">{"".join(map(_term, facts))}</dl>'


def _term(pair: tuple[Any, Any]) -> str:
    return f"<div><dt>{esc(str(pair[0]))}</dt><dd>{esc(str(pair[1]))}</dd></div>"


def _before_after(samples: Path) -> list[str]:
    found = [name for name in ("before", "after") if (samples / f"{name}.png").exists()]
    return [_picture(samples / f"{n}.png", f"<b>{n.title()}</b>", f"Samples {n} training", 1600) for n in found]


def _charts(rows: Rows) -> list[str]:
    steps = min((row["step"] for row in rows), default=0), max((row["step"] for row in rows), default=0)
    # The reward's components, "ocr/exact_match", each beside its validation.
    found = dict.fromkeys(k.split("/", 1)[1] for row in rows for k in row if re.match("(reward|validation)/", k))
    whole = ("mean", "std", "zero_std_ratio", "invalid_ratio", "reward")
    labels = [name for name in found if "/" not in name and name not in whole]

    def one(title: str, names: dict[str, str], log: bool = False, smooth: bool = False) -> str:
        series = {name: _points(rows, metric) for name, metric in names.items()}
        return chart(title[0].upper() + title[1:], series, steps, _label(next(iter(names.values()))), log, smooth)

    names = ["mean", *(labels if len(labels) > 1 else []), *(name for name in found if "/" in name)]
    pairs = [(n, {"training": f"reward/{n}", "validation": f"validation/{n}"}) for n in names]
    pairs[0] = "reward", {"training": "reward/mean", "validation": "validation/reward"}
    ratio = {"update": "policy/ratio_max_deviation", "vs rollout": "rollout/log_ratio_max"}
    clip = {"low": "policy/clip_fraction_low", "high": "policy/clip_fraction_high"}
    return [
        *(one(_words(name), metrics, smooth=True) for name, metrics in pairs),
        one("Max |ratio − 1|", ratio, log=True),
        one("Clip fraction", clip, smooth=True),
        one("Gradient norm", {"norm": "optimizer/grad_norm"}, smooth=True),
        one("Learning rate", {"rate": "optimizer/lr"}),
    ]


def _step_time(rows: Rows) -> list[str]:
    """Mean seconds a step by phase. A phase of a few steps only (validation, saving) is spread over all of them."""
    timed = [{k[7:-2]: _finite(v) or 0.0 for k, v in row.items() if re.fullmatch("timing/.+_s", k)} for row in rows]
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
        f'<tr><th scope="row"><span class="key {css}"></span>{esc(_words(name))}</th>'
        f"<td>{seconds:.3f}</td><td>{100 * seconds / total:.1f}%</td></tr>"
        for name, seconds, css in shares
    )
    bar = f'<p class="note">{note}</p><div class="bar" aria-hidden="true">{bar}</div>'
    return [f"{bar}<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"]


def _timeline(samples: Path, most: int = 12) -> list[str]:
    found = [(m, path) for path in samples.glob("*.png") if (m := re.fullmatch(r"step_(\d+)_?(.*)", path.stem))]
    names = sorted((int(m[1]), m[2], path) for m, path in found)
    if len(names) > most:  # evenly spaced, the first and the last among them
        names = [names[round(i * (len(names) - 1) / (most - 1))] for i in range(most)]
    texts = [f"step {step:,}" + (f", {_words(name)}" if name else "") for step, name, _ in names]
    return [_picture(path, esc(t), f"Samples at {t}", 800) for t, (_, _, path) in zip(texts, names, strict=True)]


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
