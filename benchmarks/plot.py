"""The CSV files of benchmarks/results as SVG beside them: `python -m benchmarks.plot [CSV ...]`. The SVG text is written by hand.

Grouped bars on a white ground of their own, so that a dark page does not swallow them; Okabe and Ito's colours, which colour-blind
readers can tell apart. A contender without a time (wrong result, left out) has no bar.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.table import RESULTS, read

Row = dict[str, str]

COLOURS = {
    "eager": "#E69F00", "compile": "#56B4E9", "reference": "#999999", "cpp": "#0072B2", "triton": "#0072B2", "cuda": "#009E73",
}  # fmt: skip
MORE_COLOURS = ("#D55E00", "#CC79A7", "#F0E442", "#000000")
GAP, WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 16, 600, 240, 62, 76, 120
NARROWEST, WIDEST = 11, 34  # of a bar
LABELLED = 24  # a chart of more bars has its values in tool tips only
INK, GRID = "#222222", "#dddddd"


@dataclass(frozen=True)
class Chart:
    name: str  # of the file, without .svg
    title: str
    where: str  # device and commit
    unit: str
    bars: dict[tuple[str, str], float]  # (group, series) -> value
    log: bool = False
    roof: float | None = None  # a line across


@dataclass(frozen=True)
class Quantity:
    column: str
    unit: str
    scale: float = 1.0
    log: bool = False
    roof: float | None = None


TIME = Quantity("median_ms", "ms", log=True)
QUANTITIES = {
    "kernels": (Quantity("copy_share", "share of the copy bandwidth", roof=1.0),),
    "roofline": (Quantity("gb_s", "GB/s"),),
    "training_step": (
        Quantity("launches", "launches"),
        Quantity("saved_beyond_inputs", "MB that autograd keeps beyond the inputs", scale=1e-6),
    ),
    "advantages": (TIME,),
    "exchange": (TIME,),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="*", type=Path, help=f"default: all tables in {RESULTS}")
    args = parser.parse_args(arguments)
    strange = [path.name for path in args.csv if _kind(path) not in QUANTITIES]
    if strange:
        parser.error(f"{strange}: names of tables are <{', '.join(QUANTITIES)}>_<device>.csv")
    for path in args.csv or sorted(path for path in RESULTS.glob("*.csv") if _kind(path) in QUANTITIES):
        for chart in charts(path):
            target = path.with_name(f"{chart.name}.svg")
            target.write_text(draw(chart))
            print(target)
    return 0


def _kind(path: Path) -> str:
    return path.stem.rsplit("_", 1)[0]


def charts(path: Path) -> Iterator[Chart]:
    """One per quantity, op, variant and dtype; none where nothing was measured."""
    kind, rows = _kind(path), read(path)
    for op, variant, dtype in dict.fromkeys((row["op"], row["variant"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["op"], row["variant"], row["dtype"]) == (op, variant, dtype)]
        small = mine[0]["shape"] == "entries"  # ops without latents: bandwidth says nothing about them
        for quantity in (TIME,) if small else QUANTITIES[kind]:
            column = quantity.column
            key = _way if kind == "exchange" else _contender
            bars = {key(row): float(row[column]) * quantity.scale for row in mine if row[column]}
            if bars:
                name = (
                    "_".join(filter(None, (path.stem, op, variant, dtype, column))).replace(" ", "-").replace("+", "-")
                )
                title = f"{op} {variant}".strip() + f", {dtype}: {quantity.unit}"
                where = f"{mine[0]['device']}, commit {mine[0]['commit']}"
                yield Chart(name, title, where, quantity.unit, bars, quantity.log, quantity.roof)


def _contender(row: Row) -> tuple[str, str]:
    group = f"{row['batch']} entries" if row["shape"] == "entries" else f"{row['shape']} x {row['batch']}"
    return group, row["backend"]


def _way(row: Row) -> tuple[str, str]:
    return row["backend"], f"{row['batch']} samples of {row['shape']}"


def draw(chart: Chart) -> str:
    groups = list(dict.fromkeys(group for group, _ in chart.bars))
    series = list(dict.fromkeys(name for _, name in chart.bars))
    colours = _colours(series)
    bar = min(WIDEST, max(NARROWEST, (WIDTH // len(groups) - GAP) // len(series)))
    width_of_group = bar * len(series) + GAP
    legend = sum(7 * len(name) + 34 for name in series)
    width = max(LEFT + width_of_group * len(groups) + 30, LEFT + legend, LEFT + 7 * len(chart.title))
    ticks = _ticks(list(chart.bars.values()) + ([chart.roof] if chart.roof else []), chart.log)
    low, high = ticks[0], ticks[-1]

    def y(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if chart.log else value / high
        return TOP + HEIGHT * (1 - share)

    parts = [
        f'<rect width="{width}" height="{TOP + HEIGHT + BOTTOM}" fill="#ffffff"/>',
        _text(14, 20, chart.title, size=13, bold=True),
        _text(14, 36, chart.where, size=10),
    ]
    x = float(LEFT)
    for name in series:
        parts.append(f'<rect x="{x}" y="46" width="10" height="10" fill="{colours[name]}"/>' + _text(x + 14, 55, name))
        x += 7 * len(name) + 34
    for tick in ticks:
        parts.append(f'<line x1="{LEFT}" x2="{width - 14}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 6, y(tick) + 4, f"{tick:g}", anchor="end"))
    for i, group in enumerate(groups):
        x = LEFT + GAP / 2 + i * width_of_group
        for j, name in enumerate(series):
            value = chart.bars.get((group, name))
            if value is not None and (value > 0 or not chart.log):
                tip = escape(f"{group}, {name}: {value:g} {chart.unit}")
                box = (
                    f'x="{x + j * bar:.1f}" y="{y(value):.1f}" width="{bar - 1}" height="{TOP + HEIGHT - y(value):.1f}"'
                )
                parts.append(f'<rect {box} fill="{colours[name]}"><title>{tip}</title></rect>')
                if len(chart.bars) <= LABELLED:
                    parts.append(_text(x + (j + 0.5) * bar, y(value) - 3, _number(value), anchor="middle", size=9))
        parts.append(_text(x + width_of_group / 2, TOP + HEIGHT + 14, group, anchor="end", turn=-35))
    if chart.roof is not None:
        line = f'x1="{LEFT}" x2="{width - 14}" y1="{y(chart.roof):.1f}" y2="{y(chart.roof):.1f}"'
        parts.append(f'<line {line} stroke="{INK}" stroke-dasharray="5 4"/>')
    size = f'width="{width}" height="{TOP + HEIGHT + BOTTOM}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _colours(series: list[str]) -> dict[str, str]:
    """A contender has its colour in every chart; the others take the rest in order."""
    rest = iter((*MORE_COLOURS, *COLOURS.values()))
    return {name: COLOURS.get(name) or next(rest) for name in series}


def _ticks(values: list[float], log: bool) -> list[float]:
    """Powers of ten around the values, or about five round steps from 0."""
    positive = [value for value in values if value > 0] or [1.0]
    if log:
        first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        return [10.0**power for power in range(first, max(last, first + 1) + 1)]
    step = 10.0 ** math.floor(math.log10(max(positive) / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= max(positive) / 5)
    return [step * i for i in range(math.ceil(max(positive) / step) + 1)]


def _text(
    x: float, y: float, text: str, anchor: str = "start", size: int = 11, bold: bool = False, turn: int = 0
) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" fill="{INK}"' + (' font-weight="bold"' if bold else "")
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}{turned}>{escape(text)}</text>'


if __name__ == "__main__":
    raise SystemExit(main())
