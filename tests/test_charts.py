"""Charts show what they were given, and each logged metric has one."""

from __future__ import annotations

import re

import pytest

from flowgrpo_fast.charts import COLORS, chart, label_of, nice_ticks, number, plan_charts


def test_each_logged_metric_has_a_chart_and_nothing_else_has() -> None:
    names = [
        *("step", "time", "reward/mean", "reward/std", "reward/zero_std_ratio", "reward/ocr/exact_match", "reward/ocr"),
        *("validation/reward", "validation/invalid_ratio", "validation/ocr/exact_match", "validation/held_out/clip"),
        *(
            "held_out/pick",
            "advantage/mean",
            "advantage/abs_mean",
            "policy/approx_kl",
            "policy/kl",
            "policy/ratio_mean",
        ),
        *("policy/clip_fraction_low", "optimizer/skipped", "throughput/mfu", "memory/peak_host_gib", "timing/step_s"),
        *(f"policy/step_{i:02d}/clip_fraction_low" for i in (3, 10)),
    ]
    assert [plan.title for plan in plan_charts(names)] == [
        *("Reward", "OCR exact match", "Held out clip", "Held out pick", "Advantage", "Mean ratio", "Clip fraction"),
        *("Clip fraction low by denoising step", "KL of the update, approximate", "KL to the reference"),
        *("Skipped updates", "Model FLOPs utilisation", "Peak memory, GiB"),
    ]
    plans = {plan.title: plan.lines for plan in plan_charts(names)}
    assert plans["Held out pick"] == {"training": "held_out/pick", "validation": "validation/held_out/pick"}
    assert plans["Clip fraction low by denoising step"] == {
        "step 3": "policy/step_03/clip_fraction_low",
        "step 10": "policy/step_10/clip_fraction_low",
    }
    assert plan_charts([]) == []


def test_several_rewards_have_a_chart_each_and_many_denoising_steps_are_thinned_to_the_colours() -> None:
    plans = plan_charts([f"policy/step_{i:02d}/ratio_mean" for i in range(20)] + ["reward/ocr", "reward/aesthetic"])
    assert [plan.title for plan in plans] == ["OCR", "Aesthetic", "Ratio mean by denoising step"]
    lines = list(plans[-1].lines)
    assert len(lines) == COLORS
    assert (lines[0], lines[-1]) == ("step 0", "step 19")


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("policy/ratio_mean", 1.0000123, "1.00001"),
        ("policy/step_03/clip_fraction_low", 0.125, "12.5%"),
        ("throughput/mfu", 0.381, "38.1%"),
        ("optimizer/lr", 3e-4, "3×10⁻⁴"),
        ("reward/mean", -0.5, "−0.500"),
    ],
)
def test_figures_are_written_as_their_metric_is_read(metric: str, value: float, text: str) -> None:
    assert label_of(metric)(value) == text


def test_few_short_names_stand_at_the_ends_of_their_lines_and_others_in_a_legend() -> None:
    def figure(names: list[str]) -> str:
        return chart("r", {name: [(0, 1.0), (1, 2.0)] for name in names}, (0, 1), number)

    beside = figure(["a", "b", "c", "d"])
    assert beside.count('class="end ') == 4
    assert "legend" not in beside
    for names in (["a", "b", "c", "d", "e"], ["a", "a-name-that-does-not-fit"]):
        above = figure(names)
        assert 'class="end ' not in above
        legend = above.split('<p class="legend">')[1].split("</p>")[0]
        assert re.findall(r"</svg>([^ ]+) <small>2.00", legend) == names


def test_a_line_keeps_its_colour_where_another_is_missing_and_the_ninth_is_dashed() -> None:
    points = [(0, 1.0), (1, 2.0)]
    assert re.findall(r'<path class="(\w+)"', chart("r", {"a": [], "b": points}, (0, 1), number)) == ["s1"]
    many = chart("r", {f"run {i}": points for i in range(10)}, (0, 1), number)
    assert re.findall(r'<path class="([\w ]+)" d="M\d+\.', many)[-3:] == ["s7", "s0 dash", "s1 dash"]


def test_runs_of_different_length_are_smoothed_alike() -> None:
    series = {"long": [(i, float(i % 2)) for i in range(200)], "short": [(i, float(i % 2)) for i in range(30)]}
    alone, alike = (chart("r", series, (0, 199), number, smooth=True, one_metric=same) for same in (False, True))
    assert alone.count('class="thin') == 1
    assert alike.count('class="thin') == 2
    assert "mean of 9 steps" in alike


@pytest.mark.parametrize(
    "values", [[0.0, 0.0], [0.0, 1e-7], [1e-9, 1e-2], [2e-5, 2e-5], [1.0, 1e-12, 0.0], [1e-4, 1e-3]]
)
def test_log_chart_keeps_zeros_on_a_row_of_their_own_and_everything_inside(values: list[float]) -> None:
    figure = chart("r", {"update": list(enumerate(values))}, (0, len(values) - 1), lambda v: f"{v:g}", log=True)
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', figure)]
    assert len(heights) == len(values)
    lines = sorted(float(y) for y in re.findall(r'y1="([\d.]+)"', figure))
    for height, value in zip(heights, values, strict=True):
        assert lines[0] - 0.05 <= height <= lines[-1] + 0.05
        if value == 0:
            assert height == lines[-1]
    ordered = [h for _, h in sorted(zip(values, heights, strict=True))]
    assert ordered == sorted(heights, reverse=True)
    if 0.0 in values and max(values) > 0:
        assert lines[-2] < lines[-1] - 10, "the lowest decade is well above the zeros"
        assert max(h for h, v in zip(heights, values, strict=True) if v > 0) < lines[-2] + 0.05


def test_long_series_get_a_running_mean_that_keeps_gaps() -> None:
    points = [(i, None if 20 <= i < 30 else float(i % 2)) for i in range(60)]
    figure = chart("r", {"training": points}, (0, 59), lambda v: f"{v:g}", smooth=True)
    thin, thick = re.findall(r'<path class="([^"]*)" d="([^"]*)"', figure)
    assert (thin[0], thick[0]) == ("thin s0", "s0")
    assert "mean of 5 steps" in figure
    assert [path.count("M") for path in (thin[1], thick[1])] == [2, 2]
    spread = [{float(y) for y in re.findall(r" ([\d.]+)h0", path)} for path in (thin[1], thick[1])]
    assert max(spread[0]) - min(spread[0]) > 2.4 * (max(spread[1]) - min(spread[1]))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.13, 0.66, [0.0, 0.2, 0.4, 0.6, 0.8]),
        (0, 100, [0, 50, 100]),
        (-12, 3, [-15, -10, -5, 0, 5]),
        (0, 2e-4, [0, 5e-5, 1e-4, 1.5e-4, 2e-4]),
        (0.5, 0.5, [0.2, 0.4, 0.6, 0.8]),
        (0, 0, [0.0, 0.5, 1.0]),
    ],
)
def test_nice_ticks_enclose_the_data(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)
    assert nice_ticks(low, high)[0] <= low <= high <= nice_ticks(low, high)[-1]
