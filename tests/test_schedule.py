"""Sigmas against diffusers bit for bit, coefficients against the peers' formulas, windows."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from torch import Tensor
from util import assert_same_bits, randn

from flowgrpo_fast import ops
from flowgrpo_fast.ops import NoiseKey, sde_step
from flowgrpo_fast.schedule import (
    StepCoefficients,
    WindowConfig,
    _linspace,
    draw_window_starts,
    dynamic_mu,
    make_sigmas,
    sde_coefficients,
    trainable_steps,
    window_size,
    window_step_index,
)

RULES = ("sde", "cps", "dance", "ode")
LENGTHS = (1, 2, 3, 6, 10, 25, 28, 40, 50)
TEN = make_sigmas(10)
ALL = torch.arange(10)


# Sigmas.


@pytest.mark.parametrize("shift_terminal", [None, 0.02])
@pytest.mark.parametrize("shift", [1.0, 1.15, 1.476, 3.0, 5.0])
def test_static_shifts_are_bit_equal_to_diffusers(shift: float, shift_terminal: float | None) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift, shift_terminal=shift_terminal)
    for count in LENGTHS[1:] if shift_terminal else LENGTHS:
        scheduler.set_timesteps(count)
        assert_same_bits(make_sigmas(count, "double_shift", shift, shift_terminal=shift_terminal), scheduler.sigmas)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / count, count))
        assert_same_bits(make_sigmas(count, "single_shift", shift, shift_terminal=shift_terminal), scheduler.sigmas)


@pytest.mark.parametrize("shift_terminal", [None, 0.02, 0.1])
@pytest.mark.parametrize("tokens", [64, 256, 1024, 4096, 8192])
def test_dynamic_shift_is_bit_equal_to_diffusers(tokens: int, shift_terminal: float | None) -> None:
    mu = dynamic_mu(tokens)
    assert mu == calculate_shift(tokens)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=shift_terminal)
    for count in LENGTHS[1:] if shift_terminal else LENGTHS:
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / count, count), mu=mu)
        assert_same_bits(make_sigmas(count, "dynamic_shift", mu=mu, shift_terminal=shift_terminal), scheduler.sigmas)


def test_row_24_double_and_single_shift_have_their_golden_values() -> None:
    double = [1, 0.96013, 0.91335, 0.85769, 0.79037, 0.70728, 0.60215, 0.46488, 0.27805, 0.00893, 0]
    single = [1, 0.96429, 0.92308, 0.875, 0.81818, 0.75, 0.66667, 0.5625, 0.42857, 0.25, 0]
    s_double = [0.7, 0.74296, 0.53615, 0.4459, 0.39179, 0.3528, 0.31907, 0.28201, 0.22536, 0.00628]
    s_single = [0.7, 0.73837, 0.53169, 0.44146, 0.38774, 0.35, 0.3195, 0.29047, 0.25617, 0.20207]
    for kind, sigmas, s in (("double_shift", double, s_double), ("single_shift", single, s_single)):
        made = make_sigmas(10, kind)
        assert made.tolist() == pytest.approx(sigmas, abs=6e-6)
        assert sde_coefficients(made, ALL).s.tolist() == pytest.approx(s, abs=6e-6)
    flux = [1, 0.90374, 0.7897, 0.65249, 0.48422, 0.273, 0]
    assert make_sigmas(6, "dynamic_shift", mu=0.63).tolist() == pytest.approx(flux, abs=6e-6)


def test_linspace_is_numpys_bit_for_bit() -> None:
    for count in range(1, 200):
        for start, stop in ((1.0, 1 / count), (1000.0, 2.993999980390072)):
            assert _linspace(start, stop, count).tolist() == np.linspace(start, stop, count).tolist()


@pytest.mark.parametrize("kind", ["single_shift", "double_shift", "dynamic_shift"])
def test_row_26_there_is_one_sigma_more_than_steps(kind: str) -> None:
    for count in LENGTHS:
        sigmas = make_sigmas(count, kind, mu=0.8 if kind == "dynamic_shift" else None)
        assert sigmas.shape == (count + 1,)
        assert sigmas.dtype == torch.float32
        assert sigmas[-1] == 0


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 4, "kind": "cosine"}, "kind"),
        ({"num_steps": 4, "shift": 0.0}, "shift"),
        ({"num_steps": 4, "kind": "dynamic_shift"}, "mu"),
        ({"num_steps": 4, "mu": 0.5}, "mu"),
        ({"num_steps": 1, "shift_terminal": 0.02}, "shift_terminal"),
        ({"num_steps": 4, "shift_terminal": 1.0}, "shift_terminal"),
    ],
)
def test_bad_sigma_arguments_are_named(arguments: dict, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: got"):
        make_sigmas(**arguments)


# Coefficients.


def peers_mean_and_spread(rule: str, x: float, v: float, sigma: float, after: float, sigma_1: float, eta: float):
    """The formulas as the peers write them (peers.md 1.1), in Python floats."""
    dt = after - sigma
    clean, noise = x - sigma * v, x + (1 - sigma) * v
    if rule == "sde":
        std = eta * math.sqrt(sigma / (1 - (sigma_1 if sigma == 1 else sigma)))
        mean = x * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
        return mean, std * math.sqrt(-dt)
    if rule == "cps":
        std = after * math.sin(eta * math.pi / 2)
        return clean * (1 - after) + noise * math.sqrt(after**2 - std**2), std
    if rule == "dance":
        return x + v * dt + 0.5 * eta**2 * (x - (1 - sigma) * clean) / sigma**2 * dt, eta * math.sqrt(-dt)
    return x + v * dt, 0.0


@pytest.mark.parametrize("kind", ["single_shift", "double_shift"])
@pytest.mark.parametrize(("rule", "eta"), [("sde", 0.7), ("sde", 1.2), ("cps", 0.8), ("dance", 0.3), ("ode", 0.7)])
def test_coefficients_are_the_peers_formulas_rounded_once(rule: str, eta: float, kind: str) -> None:
    sigmas = make_sigmas(10, kind)
    coef = sde_coefficients(sigmas, ALL, rule, eta)
    table = sigmas.tolist()
    for i in range(10):
        where = (table[i], table[i + 1], table[1], eta)
        a, spread = peers_mean_and_spread(rule, 1.0, 0.0, *where)
        b, _ = peers_mean_and_spread(rule, 0.0, 1.0, *where)
        for got, exact in ((coef.a[i], a), (coef.b[i], b), (coef.s[i], spread)):
            # Half an ulp of fp32, and fp64's own error in the peers' order of operations.
            assert abs(got.item() - exact) <= 2**-24 * abs(exact) + 1e-14


@pytest.mark.parametrize("rule", RULES)
def test_row_8_noise_level_zero_is_exactly_the_ode_step(rule: str) -> None:
    coef = sde_coefficients(TEN, ALL, rule, 0.0)
    assert_same_bits(coef.a, torch.ones(10))
    assert_same_bits(coef.b, TEN[1:] - TEN[:-1])
    assert_same_bits(coef.s, torch.zeros(10))
    # Where the rule itself would divide 0 by 0: sigma_0 and sigma_1 both count as 1.
    crowded = torch.tensor([1.0 + 2**-23, 1.0, 0.5, 0.0])
    assert_same_bits(sde_coefficients(crowded, torch.arange(3), rule, 0.0).b, crowded[1:] - crowded[:-1])


def test_noise_level_is_per_sample() -> None:
    levels = torch.tensor([0.0, 0.7, 0.0])
    index = torch.tensor([4, 4, 7])
    mixed = sde_coefficients(TEN, index, "sde", levels)
    ode = sde_coefficients(TEN, index, "ode")
    noisy = sde_coefficients(TEN, index, "sde", levels[1].item())
    for field in ("a", "b", "s"):
        got = getattr(mixed, field)
        assert_same_bits(got[[0, 2]], getattr(ode, field)[[0, 2]])
        assert_same_bits(got[1], getattr(noisy, field)[1])


def test_row_10_cps_at_the_end_lands_on_the_clean_sample_without_noise() -> None:
    coef = sde_coefficients(TEN, torch.tensor([9, 9]), "cps", 0.8)
    assert coef.s.tolist() == [0.0, 0.0]
    x, v = randn((2, 6), 1), randn((2, 6), 2)
    prev, log_prob = sde_step(x, v, coef, noise=randn((2, 6), 3))
    assert_same_bits(prev, x - TEN[9] * v)
    assert log_prob.tolist() == [0.0, 0.0]


def test_row_11_cps_noise_vanishes_with_sigma() -> None:
    sigmas = torch.tensor([1.0, 0.5, 1e-3, 1e-6, 1e-9, 0.0])
    s = sde_coefficients(sigmas, torch.arange(5), "cps", 0.8).s
    assert bool((s <= sigmas[1:]).all())
    assert s[-1] == 0


def test_row_15_s_is_the_noise_of_the_step_not_std_dev_t() -> None:
    """The peers' std_dev_t lacks sqrt(-dt); s has it."""
    std_dev_t = 0.7 * math.sqrt(TEN[4].item() / (1 - TEN[4].item()))
    s = sde_coefficients(TEN, 4).s.item()
    assert s == pytest.approx(std_dev_t * math.sqrt((TEN[4] - TEN[5]).item()), rel=1e-6)


@pytest.mark.parametrize("shift", [1.476, 1.942, 8.155])
def test_first_sigma_an_ulp_off_one_counts_as_one(shift: float) -> None:
    sigmas = make_sigmas(10, shift=shift)
    assert sigmas[0] != 1
    assert abs(sigmas[0].item() - 1) < 1e-6
    repaired = sigmas.clone()
    repaired[0] = 1.0
    got, expected = sde_coefficients(sigmas, 0), sde_coefficients(repaired, 0)
    torch.testing.assert_close(got.s, expected.s, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.b, expected.b, rtol=1e-5, atol=0)


def test_row_28_steps_are_found_by_index_and_nothing_is_kept() -> None:
    """Evaluating with 40 steps between two uses of the 10-step schedule changes nothing."""
    before = sde_coefficients(make_sigmas(10), ALL)
    sde_coefficients(make_sigmas(40), torch.arange(40))
    after = sde_coefficients(make_sigmas(10), ALL)
    for field in ("a", "b", "s"):
        assert_same_bits(getattr(before, field), getattr(after, field))


def test_row_63_each_sample_has_its_own_step_and_may_have_its_own_schedule() -> None:
    other = make_sigmas(10, "double_shift")
    index = torch.tensor([7, 0, 3])
    mixed = sde_coefficients(torch.stack((TEN, other, TEN)), index)
    for i, schedule in enumerate((TEN, other, TEN)):
        alone = sde_coefficients(schedule, int(index[i]))
        for field in ("a", "b", "s"):
            assert_same_bits(getattr(mixed, field)[i : i + 1], getattr(alone, field))


def test_coefficients_never_read_values_off_the_cpu() -> None:
    """The meta device has no values: any host sync would raise."""
    coef = sde_coefficients(TEN.to("meta"), ALL.to("meta"), "sde", torch.full((10,), 0.7, device="meta"))
    assert coef.s.shape == (10,)


def test_an_empty_batch_has_empty_coefficients() -> None:
    assert sde_coefficients(TEN, torch.zeros(0, dtype=torch.int64)).a.shape == (0,)


def test_step_coefficients_select_and_move() -> None:
    coef = sde_coefficients(TEN, ALL)
    assert ops.StepCoefficients is StepCoefficients
    assert_same_bits(coef[3].a, coef.a[3:4])
    assert_same_bits(coef[2:5].b, coef.b[2:5])
    assert_same_bits(coef[torch.tensor([8, 1])].s, coef.s[[8, 1]])
    assert_same_bits(coef[ALL > 6].s, coef.s[7:])
    assert coef.to("meta").a.device.type == "meta"
    with pytest.raises(ValueError, match=r"^b: got"):
        StepCoefficients(coef.a, coef.b[:3], coef.s)
    with pytest.raises(ValueError, match=r"^s: got torch.float64"):
        StepCoefficients(coef.a, coef.b, coef.s.double())


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"sigmas": TEN.bfloat16()}, "sigmas"),
        ({"sigmas": TEN.double()}, "sigmas"),
        ({"sigmas": TEN.flip(0)}, "sigmas"),
        ({"sigmas": TEN * 1000}, "sigmas"),
        ({"sigmas": torch.tensor([1.0, float("nan"), 0.0])}, "sigmas"),
        ({"sigmas": TEN[:1]}, "sigmas"),
        ({"step_index": 10}, "step_index"),
        ({"step_index": -1}, "step_index"),
        ({"step_index": torch.tensor([0, 10])}, "step_index"),
        ({"step_index": torch.tensor([0], dtype=torch.int32)}, "step_index"),
        ({"step_index": torch.tensor([0.0])}, "step_index"),
        ({"rule": "sdee"}, "rule"),
        ({"noise_level": -0.1}, "noise_level"),
        ({"noise_level": float("nan")}, "noise_level"),
        ({"noise_level": torch.tensor([0.1, 0.2])}, "noise_level"),
        ({"noise_level": torch.tensor([-0.1])}, "noise_level"),
        ({"noise_level": 1.2, "rule": "cps"}, "noise_level"),
    ],
)
def test_bad_coefficient_arguments_are_named(arguments: dict, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: got"):
        sde_coefficients(**{"sigmas": TEN, "step_index": 0, **arguments})


# What may be trained.


@pytest.mark.parametrize("rule", ["sde", "cps", "dance"])
def test_every_step_but_the_last_may_be_trained(rule: str) -> None:
    assert trainable_steps(TEN, rule, 0.7).tolist() == [True] * 9 + [False]


def test_row_10_a_degenerate_std_is_never_offered() -> None:
    assert not trainable_steps(TEN, "sde", 0.0).any()
    assert not trainable_steps(TEN, "ode", 0.7).any()
    assert not trainable_steps(torch.tensor([1.0, 0.0]), "sde", 0.7).any()
    # A schedule that ends above 0: its last step is still not offered.
    assert trainable_steps(torch.tensor([1.0, 0.6, 0.3]), "sde", 0.7).tolist() == [True, False]


# Windows.


def starts(window: WindowConfig, batch: int = 4000, iteration: int = 0, sigmas: Tensor = TEN, seed: int = 5) -> Tensor:
    ids = torch.arange(batch)
    return draw_window_starts(
        window, sigmas, "sde", 0.7, seed=seed, iteration=iteration, sample_id=ids, group_id=ids // 8
    )


def test_random_starts_are_uniform_on_lo_to_hi_minus_size_inclusive() -> None:
    counts = Counter(starts(WindowConfig(size=3, range=(0, 5))).tolist())
    assert sorted(counts) == [0, 1, 2]
    for count in counts.values():  # 4000 draws: 1333 expected, standard deviation 30
        assert abs(count - 4000 / 3) < 150
    assert set(starts(WindowConfig(size=3, range=(0, 3)), sigmas=make_sigmas(6)).tolist()) == {0}
    assert set(starts(WindowConfig(size=2)).tolist()) == set(range(8))  # all trainable steps: 0 .. 8


def test_no_size_means_all_trainable_steps_of_the_range() -> None:
    assert window_size(WindowConfig(), TEN, "sde", 0.7) == 9
    assert window_size(WindowConfig(range=(2, 6)), TEN, "sde", 0.7) == 4
    assert set(starts(WindowConfig(range=(2, 6))).tolist()) == {2}
    assert window_size(WindowConfig(size=3), TEN, "sde", 0.7) == 3


def test_row_63_starts_depend_on_the_ids_and_not_on_batch_or_rank() -> None:
    window = WindowConfig(size=2)
    whole = starts(window, batch=64)
    ids = torch.tensor([63, 5, 17])
    some = draw_window_starts(window, TEN, "sde", 0.7, seed=5, iteration=0, sample_id=ids, group_id=ids // 8)
    assert some.tolist() == whole[ids].tolist()
    assert not torch.equal(whole, starts(window, batch=64, iteration=1))
    assert not torch.equal(whole, starts(window, batch=64, seed=6))


def test_row_63_a_group_or_the_whole_batch_can_share_its_window() -> None:
    group = starts(WindowConfig(size=2, scope="group"), batch=320).reshape(40, 8)
    assert bool((group == group[:, :1]).all())
    assert len(set(group[:, 0].tolist())) > 3
    batch = {int(starts(WindowConfig(size=2, scope="batch"), batch=9, iteration=i).unique()) for i in range(60)}
    assert len(batch) > 3


def test_progressive_windows_slide_and_wrap_to_the_beginning() -> None:
    def walk(**arguments: int) -> list[int]:
        window = WindowConfig(size=4, range=(0, 9), strategy="progressive", **arguments)
        return [int(starts(window, batch=1, iteration=i)) for i in range(14)]

    assert walk(shift_every=2) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0, 0]
    assert walk(shift_every=1, shift_by=4) == [0, 4] * 7
    assert walk() == [0] * 14  # MixGRPO: every 25 iterations


def test_window_steps_are_consecutive() -> None:
    assert window_step_index(torch.tensor([2, 0]), 3).tolist() == [[2, 3, 4], [0, 1, 2]]


@pytest.mark.parametrize(
    ("window", "noise_level"),
    [
        (WindowConfig(size=3, range=(0, 10)), 0.7),  # covers the last step
        (WindowConfig(size=3, range=(8, 12)), 0.7),
        (WindowConfig(size=4, range=(2, 5)), 0.7),
        (WindowConfig(size=10), 0.7),
        (WindowConfig(size=2), 0.0),  # no noise, nothing to train
    ],
)
def test_a_window_that_does_not_fit_says_what_would(window: WindowConfig, noise_level: float) -> None:
    with pytest.raises(ValueError, match=r"window: got range .*, size .*, T = 10") as error:
        window_size(window, TEN, "sde", noise_level)
    if noise_level:
        assert "the last trainable step is 8" in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"size": 0},
        {"range": (3, 3)},
        {"range": (-1, 3)},
        {"scope": "rank"},
        {"strategy": "decay"},
        {"shift_every": 0},
        {"shift_by": 0},
    ],
)
def test_bad_window_arguments_are_named(arguments: dict) -> None:
    with pytest.raises(ValueError, match=rf"^window.{next(iter(arguments))}: got"):
        WindowConfig(**arguments)


def test_bad_draw_arguments_are_named() -> None:
    ids = torch.arange(3)
    good = {"seed": 0, "iteration": 0, "sample_id": ids, "group_id": ids}
    for field, value in (("seed", -1), ("iteration", 1 << 32), ("sample_id", ids.int()), ("group_id", ids[:2])):
        with pytest.raises(ValueError, match=rf"^{field}: got"):
            draw_window_starts(WindowConfig(size=2), TEN, "sde", 0.7, **{**good, field: value})


@pytest.mark.parametrize("iteration", [0, 3])
def test_random_starts_are_philox_words_of_their_own_stream(iteration: int) -> None:
    """start = lo + floor(word * number of starts / 2^32), the word's counter being (iteration, STREAM_WINDOW << 16, id)."""
    key = NoiseKey(5, 0, torch.arange(64), ops.STREAM_WINDOW)
    words = ops.philox_words(key, 4 * iteration + 1)[:, -1].tolist()
    assert starts(WindowConfig(size=3), batch=64, iteration=iteration).tolist() == [word * 7 >> 32 for word in words]
