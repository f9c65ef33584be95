"""Charts of a run's metrics: which metrics share one (`plan_charts`), and the chart as inline SVG (`chart`).

Used by the report and by the comparison; the dashboard takes the plan and draws in the browser. The look is in assets/page.css.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape as esc
from itertools import pairwise
from typing import Any

from flowgrpo_fast.samples import evenly

Rows = list[dict[str, Any]]
Points = Sequence[tuple[int, float | None]]  # (step, value); None is a gap
Label = Callable[[float], str]
End = tuple[float, str, str, str]  # of a line: height, colour, name, last value

COLORS = 8  # classes s0 ... s7 and n0 ... n7 of page.css; a ninth line is dashed in the first one's colour
FITTING_LABELS, FITTING_LETTERS = (
    4,
    12,
)  # more lines or longer names do not fit beside the chart: a legend above names them


@dataclass(frozen=True)
class ChartPlan:
    """What one chart shows: the metric of each line, by the line's name. A line's place is its colour, also where one is missing."""

    title: str
    lines: dict[str, str]
    smooth: bool = True
    log: bool = False

    @property
    def label(self) -> Label:
        return label_of(next(iter(self.lines.values())))


def plan_charts(names: Iterable[str]) -> list[ChartPlan]:
    """The charts for the metrics that a run has logged, in the order of a page; a chart without any of its metrics is left out."""
    logged = dict.fromkeys(names)
    clip, memory = "policy/clip_fraction_", "memory/peak_"
    plans = [
        ChartPlan("reward", {"training": "reward/mean", "validation": "validation/reward"}),
        *(_beside_validation(words(part), f"reward/{part}", part) for part in _components(logged)),
        *(_beside_validation(words(part), part, part) for part in _held_out(logged)),
        ChartPlan("advantage", {"mean": "advantage/mean", "std": "advantage/std", "mean |A|": "advantage/abs_mean"}),
        ChartPlan(
            "max |ratio − 1|",
            {"update": "policy/ratio_max_deviation", "vs rollout": "rollout/log_ratio_max"},
            smooth=False,
            log=True,
        ),
        ChartPlan("mean ratio", {"ratio": "policy/ratio_mean"}),
        ChartPlan("clip fraction", {"low": clip + "low", "high": clip + "high"}),
        *(ChartPlan(f"{words(part)} by denoising step", lines) for part, lines in _by_denoising_step(logged).items()),
        ChartPlan("KL of the update, approximate", {"KL": "policy/approx_kl"}),
        ChartPlan("KL to the reference", {"KL": "policy/kl"}),
        ChartPlan("gradient norm", {"norm": "optimizer/grad_norm"}),
        ChartPlan("learning rate", {"rate": "optimizer/lr"}, smooth=False),
        ChartPlan("skipped updates", {"skipped": "optimizer/skipped"}, smooth=False),
        ChartPlan("images per second", {"images/s": "throughput/images_per_s"}),
        ChartPlan("TFLOP/s of the update, one rank", {"TFLOP/s": "throughput/tflops_per_s"}),
        ChartPlan("model FLOPs utilisation", {"MFU": "throughput/mfu"}),
        ChartPlan("peak memory, GiB", {"device": memory + "device_gib", "host": memory + "host_gib"}, smooth=False),
    ]
    plans = [plan for plan in plans if not logged.keys().isdisjoint(plan.lines.values())]
    return [replace(plan, title=plan.title[0].upper() + plan.title[1:]) for plan in plans]


def _beside_validation(title: str, training: str, part: str) -> ChartPlan:
    return ChartPlan(title, {"training": training, "validation": f"validation/{part}"})


def _components(logged: Iterable[str]) -> list[str]:
    """The rewards that the reward is made of ("ocr"), unless it is one alone, and what they log besides ("ocr/exact_match")."""
    names = re.compile("(?:reward|validation)/(?!held_out/)(.+)")
    found = dict.fromkeys(m[1] for name in logged if (m := names.fullmatch(name)))
    whole = ("mean", "std", "zero_std_ratio", "invalid_ratio", "reward")
    labels = [name for name in found if "/" not in name and name not in whole]
    return [*(labels if len(labels) > 1 else []), *(name for name in found if "/" in name)]


def _held_out(logged: Iterable[str]) -> list[str]:
    names = re.compile("(?:validation/)?(held_out/.+)")
    return list(dict.fromkeys(m[1] for name in logged if (m := names.fullmatch(name))))


def _by_denoising_step(logged: Iterable[str]) -> dict[str, dict[str, str]]:
    """{"clip_fraction_low": {"step 3": "policy/step_03/clip_fraction_low", ...}, ...}, at most as many lines as colours."""
    found: dict[str, dict[int, str]] = {}
    for name in sorted(logged):
        if m := re.fullmatch(r"policy/step_(\d+)/(.+)", name):
            found.setdefault(m[2], {})[int(m[1])] = name
    return {
        part: {f"step {step}": metrics[step] for step in evenly(sorted(metrics), COLORS)}
        for part, metrics in found.items()
    }


def points_of(rows: Rows, metric: str) -> Points:
    return [(row["step"], finite(row[metric])) for row in rows if metric in row]


def step_range(rows: Rows) -> tuple[int, int]:
    """The first and the last step, (0, 0) without rows: the x axis of a run's charts."""
    return min((row["step"] for row in rows), default=0), max((row["step"] for row in rows), default=0)


def finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _power_of_ten(exponent: int) -> str:
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def number(value: float) -> str:
    """Three digits; a power of ten outside 0.001 to 99,999."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 99_999.5:
        return (f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")).replace("-", "−")
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}×{_power_of_ten(int(exponent))}".replace("-", "−")


def percent(value: float) -> str:
    return f"{100 * value:.1f}%" if value == 0 or abs(value) >= 5e-4 else f"{number(100 * value)}%"


def near_one(value: float) -> str:
    """Six digits: a mean ratio is 1 but for the last ones, which are what one looks for."""
    return f"{value:.6g}"


def label_of(metric: str) -> Label:
    if metric.endswith("ratio_mean"):
        return near_one
    return percent if metric.endswith(("exact_match", "fraction", "fraction_low", "fraction_high", "mfu")) else number


def words(metric: str) -> str:
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
    factor, unit = (100, "%") if label is percent else (1, "")
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
    title: str,
    series: dict[str, Points],
    steps: tuple[int, int],
    label: Label,
    log: bool = False,
    smooth: bool = False,
    one_metric: bool = False,
) -> str:
    """A line chart as <figure> with inline SVG; "" if there is nothing to show. `steps`: the x axis, the same for all charts.

    log: decades, with a row of its own for exact zeros. smooth: a long series is drawn thin and its running mean thick.
    one_metric: the lines are runs, which are smoothed alike however long each is. Lines are named at their ends, or, where that
    does not fit, in a legend above.
    """
    known = {name: [(step, v) for step, v in points if v is not None] for name, points in series.items()}
    values = [v for points in known.values() for _, v in points]
    if not values:
        return ""
    drawn = [name for name, points in known.items() if points]
    legend = len(drawn) > FITTING_LABELS or max(map(len, drawn)) > FITTING_LETTERS
    width, height, left, right, top, bottom = 480, 236, 54, 470 if legend else 392, 10, 210
    log = log and min(values) >= 0 < max(values)
    ticks, texts = _log_axis(values) if log else _linear_axis(values, label)

    def x(step: float) -> float:
        return left + (right - left) * ((step - steps[0]) / (steps[1] - steps[0]) if steps[1] > steps[0] else 0.5)

    def y(value: float) -> float:
        place = value if not log else math.log10(value) if value > 0 else ticks[0]
        return bottom - (bottom - top) * (place - ticks[0]) / (ticks[-1] - ticks[0])

    parts = [] if legend else [f'<text x="{right + 26}" y="{height - 6}">step</text>']
    for tick, text in zip(ticks, texts, strict=True):
        at = y(tick if not log else 0 if text == "0" else 10.0**tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    whole = sorted({round(t) for t in nice_ticks(*steps, 5) if t == round(t) and steps[0] <= t <= steps[1]})
    for step in whole or steps[:1]:
        parts.append(f'<text x="{x(step):.1f}" y="{height - 6}" text-anchor="middle">{step:,}</text>')

    note, ends, description = "", [], []
    for place, name, points in [(i, name, points) for i, (name, points) in enumerate(known.items()) if points]:
        count = max(map(len, known.values())) if one_metric else len(points)
        line, color = series[name], f"{place % COLORS}{' dash' if place >= COLORS else ''}"
        if smooth and count >= 40:
            half = max(2, count // 50)
            note = f"thick line: mean of {2 * half + 1} steps"
            parts.append(f'<path class="thin s{color}" d="{_path(line, x, y)}"/>')
            line = _running_mean(line, half)
        if not log:  # values that jump over decades and to zero: a line between them shows nothing
            parts.append(f'<path class="s{color}" d="{_path(line, x, y)}"/>')
        radius = 2.4 if len(points) < 300 else 1.2
        if log or len(points) <= 24:
            parts += [f'<circle class="n{color}" cx="{x(t):.1f}" cy="{y(v):.1f}" r="{radius}"/>' for t, v in points]
        final = next(v for _, v in reversed(line) if v is not None)
        ends.append((y(final), color, name, label(final)))
        first, last = (f"{label(v)} at step {step}" for step, v in (points[0], points[-1]))
        description.append(f"{name} from {first} to {last}")
    if not legend:
        parts += _end_labels(ends, right, top, bottom)

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
    above = f'<p class="legend">{"".join(map(_legend_entry, ends))}</p>' if legend else ""
    return f"<figure><figcaption><b>{esc(title)}</b><small>{note}</small></figcaption>{above}{svg}</figure>"


def _end_labels(ends: list[End], right: float, top: float, bottom: float) -> list[str]:
    """Name and last value beside the end of each line, moved apart where lines end close together."""
    parts, at = [], top - 32.0
    for i, (end, color, name, text) in enumerate(sorted(ends)):
        room = bottom - 18 - 32 * (len(ends) - 1 - i)  # the lowest place that leaves room for the labels below
        at = max(at + 32, min(max(end, top + 4), room))
        parts.append(f'<text class="end n{color}" x="{right + 9}" y="{at + 2:.1f}">{esc(name)}</text>')
        parts.append(f'<text x="{right + 9}" y="{at + 16:.1f}">{text}</text>')
    return parts


def _legend_entry(end: End) -> str:
    _, color, name, text = end
    line = f'<svg viewBox="0 0 18 10" aria-hidden="true"><path class="s{color}" d="M1 5h16"/></svg>'
    return f"<span>{line}{esc(name)} <small>{text}</small></span>"


def _path(points: Points, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    pairs = pairwise([(0, None), *points])  # h0, a line of no length, shows a point that stands alone between two gaps
    return "".join(f"{'M' if a is None else 'L'}{x(t):.1f} {y(v):.1f}h0" for (_, a), (t, v) in pairs if v is not None)


def _running_mean(points: Points, half: int) -> Points:
    """Over `half` neighbours on either side, where they exist; a gap stays a gap."""
    near = ([v for _, v in points[max(0, i - half) : i + half + 1] if v is not None] for i in range(len(points)))
    return [
        (step, None if v is None else math.fsum(some) / len(some)) for (step, v), some in zip(points, near, strict=True)
    ]
