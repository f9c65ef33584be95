"""Runs side by side: what differs in their configs, where their metrics began and ended, and their curves in one HTML page.

    python -m flowgrpo_fast.compare RUN... [--out compare.html] [--metrics name,glob*]

Prints the tables and writes the page, which opens alone. Exit code 2 where a folder is not a run, with what to do.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape as esc
from pathlib import Path
from string import Template
from typing import Any

from flowgrpo_fast.charts import Rows, chart, label_of, plan_charts, points_of, step_range
from flowgrpo_fast.metrics import METRICS_FILE, write_atomic
from flowgrpo_fast.report import asset, read_run

# Of the table, unless --metrics says otherwise.
HEADLINE = ("reward/mean", "validation/*", "throughput/images_per_s")
LOWER_IS_BETTER = ("*invalid_ratio", "*zero_std_ratio", "timing/*", "memory/*")


@dataclass(frozen=True)
class Run:
    name: str
    rows: Rows
    config: dict[str, str]
    """Flat: {"optimizer.learning_rate": "0.0003"}; without run_dir, which always differs. Empty without config.yaml."""


@dataclass(frozen=True)
class Values:
    """A metric of one run: its first, last and best value and the step of the best."""

    metric: str
    run: str
    first: float
    last: float
    best: float
    best_step: int


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs, named by folder: by its own name, or by the path as given where two have the same.

    Raises ValueError for a folder without metrics.jsonl and where a file is corrupt; the message names it and the fix.
    """
    names = [folder.resolve().name for folder in folders]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError("a run is given twice; name each once")
    runs = []
    for name, folder in zip(names, folders, strict=True):
        if not (folder / METRICS_FILE).is_file():
            inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}"))
            fix = (
                f"it holds runs: {', '.join(inside)}; give those"
                if inside
                else "give the run_dir of a run that has begun"
            )
            raise ValueError(f"{folder} is no run: it has no {METRICS_FILE}; {fix}")
        rows, _ = read_run(folder)
        runs.append(Run(name if names.count(name) == 1 else str(folder), rows, _read_config(folder / "config.yaml")))
    return runs


def _read_config(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        plain = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is corrupt: {error}") from error
    flat = dict(_flatten("", plain))
    flat.pop("run_dir", None)
    return flat


def _flatten(prefix: str, value: Any) -> Iterable[tuple[str, str]]:
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    if not items:
        yield prefix, value if isinstance(value, str) else json.dumps(value)
    for key, inner in items:
        yield from _flatten(f"{prefix}.{key}" if prefix else str(key), inner)


def config_differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The config keys whose values are not the same in all runs, with the value of each run ("-" where it has none)."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    values = {key: [run.config.get(key, "-") for run in runs] for key in keys}
    return {key: row for key, row in values.items() if len(set(row)) > 1}


def select_metrics(runs: Sequence[Run], patterns: Sequence[str]) -> list[str]:
    """The metrics of any run that match a name or glob, in the order of the patterns. ValueError for one that matches none."""
    logged = sorted({name for run in runs for row in run.rows for name in row} - {"step", "time"})
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matching = [name for name in logged if fnmatchcase(name, pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, logged, n=3, cutoff=0.0)
            groups = sorted({name.partition("/")[0] + "/*" for name in logged})
            raise ValueError(
                f"no run has a metric {pattern!r}; nearest: {', '.join(near)}; groups: {', '.join(groups)}"
            )
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def table(runs: Sequence[Run], metrics: Iterable[str]) -> list[Values]:
    """First, last and best of each metric and run. A run without a finite value of a metric has no line for it."""
    found = []
    for metric in metrics:
        best_of = min if any(fnmatchcase(metric, pattern) for pattern in LOWER_IS_BETTER) else max
        for run in runs:
            points = [(step, value) for step, value in points_of(run.rows, metric) if value is not None]
            if points:
                step, best = best_of(points, key=lambda point: point[1])
                found.append(Values(metric, run.name, points[0][1], points[-1][1], best, step))
    return found


def print_tables(runs: Sequence[Run], values: Sequence[Values], differences: dict[str, list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 240  # a file or a pipe has no width to fit: nothing is cut, nothing wrapped
    numbers = Table("metric", "run", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("first", "last", "best", "at step"):
        numbers.add_column(heading, justify="right", no_wrap=True)
    before = None
    for v in values:
        label = label_of(v.metric)
        if before not in (None, v.metric):
            numbers.add_section()
        texts = (label(v.first), label(v.last), label(v.best), str(v.best_step))
        numbers.add_row(Text(v.metric if v.metric != before else ""), Text(v.run), *texts)
        before = v.metric
    console.print(numbers)
    if differences:
        keys = Table("config", box=box.SIMPLE_HEAD, pad_edge=False)
        for run in runs:
            keys.add_column(Text(run.name))
        for key, row in differences.items():
            keys.add_row(Text(key), *map(Text, row))
        console.print(keys)
    else:
        console.print("configs: no difference")


def comparison_page(
    runs: Sequence[Run], values: Sequence[Values], differences: dict[str, list[str]], metrics: Sequence[str]
) -> str:
    """The HTML page: tables, and a chart for each metric with one line a run, in the same colour everywhere."""
    spans = [step_range(run.rows) for run in runs if run.rows]
    steps = min((first for first, _ in spans), default=0), max((last for _, last in spans), default=0)
    log = [metric for plan in plan_charts(metrics) if plan.log for metric in plan.lines.values()]
    figures = [
        chart(
            metric,
            {run.name: points_of(run.rows, metric) for run in runs},
            steps,
            label_of(metric),
            log=metric in log,
            smooth=metric not in log,
            one_metric=True,
        )
        for metric in metrics
    ]
    labels = [label_of(v.metric) for v in values]
    lines = [
        (v.metric, v.run, label(v.first), label(v.last), label(v.best), f"{v.best_step:,}")
        for v, label in zip(values, labels, strict=True)
    ]
    sections = [
        ("Curves", f'<div class="charts">{"".join(figures)}</div>' if any(figures) else ""),
        ("First, last and best", _html_table(["Metric", "Run", "First", "Last", "Best", "At step"], lines, 2)),
        (
            "What differs in the configs",
            _html_table(["Key", *(run.name for run in runs)], [(key, *row) for key, row in differences.items()], 1),
        ),
    ]
    body = "".join(f"<section><h2>{title}</h2>\n{content}</section>\n" for title, content in sections if content)
    return Template(asset("compare.html")).substitute(
        style=asset("page.css"), runs=esc(", ".join(run.name for run in runs)), body=body
    )


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> str:
    """The first `texts` columns are row headers, the rest figures."""
    if not rows:
        return ""
    lines = [
        "".join(
            f'<th scope="row">{esc(cell)}</th>' if i < texts else f"<td>{esc(cell)}</td>" for i, cell in enumerate(row)
        )
        for row in rows
    ]
    top = "".join(f'<th scope="col">{esc(cell)}</th>' for cell in head)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table class="t{texts}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def default_charts(runs: Sequence[Run]) -> list[str]:
    """The metrics of the report's charts, without those of single denoising steps (ask for them by --metrics)."""
    plans = plan_charts(name for run in runs for row in run.rows for name in row)
    logged = {name for run in runs for row in run.rows for name in row}
    names = dict.fromkeys(metric for plan in plans for metric in plan.lines.values() if metric in logged)
    return [*(name for name in names if not re.match(r"policy/step_\d+/", name)), *sorted({"timing/step_s"} & logged)]


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. A folder that is no run, or a metric that no run has, ends it with a message and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m flowgrpo_fast.compare", description="Compare runs: tables here, curves in an HTML page."
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's directory: it holds metrics.jsonl")
    parser.add_argument("--out", type=Path, default=Path("compare.html"), help="the page (default: %(default)s)")
    parser.add_argument("--metrics", metavar="NAME,GLOB*", help="what to show, e.g. 'reward/*,policy/step_*'")
    arguments = parser.parse_args(argv)
    try:
        runs = load_runs(arguments.runs)
        if arguments.metrics:
            shown = charted = select_metrics(runs, [name.strip() for name in arguments.metrics.split(",")])
        else:
            charted = default_charts(runs)
            shown = [name for pattern in HEADLINE for name in charted if fnmatchcase(name, pattern)]
        values, differences = table(runs, shown), config_differences(runs)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(arguments.out, comparison_page(runs, values, differences, charted).encode())
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print_tables(runs, values, differences)
    print(arguments.out)


if __name__ == "__main__":
    main()
