"""Each algorithm's loss against a float64 transcription of its formula, value and gradient; advantages; choices of samples and steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo_fast.algorithms import Rewards, best_and_worst, build_advantage, build_algorithm
from flowgrpo_fast.algorithms.base import LossInputs
from flowgrpo_fast.config import AlgorithmConfig, ConfigError
from flowgrpo_fast.inputs import Inputs
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.ops import sde_step
from flowgrpo_fast.rollout.denoise import denoise
from flowgrpo_fast.schedule import make_sigmas, sde_coefficients
from flowgrpo_fast.train import settle_environment
from flowgrpo_fast.trainer import Trainer
from tests.tiny import CPU, sampling, tiny_config

N, SHAPE = 12, (6, 8)


def inputs(rule: str = "sde", moved: float = 0.02, seed: int = 0, **changes: Any) -> LossInputs:
    """Pairs at mixed timesteps, made by an old policy; the current one is `moved` away."""
    g = torch.Generator().manual_seed(seed)
    sigmas = make_sigmas(10)
    at = torch.arange(N) % 8
    coef = sde_coefficients(sigmas, at, rule=rule, noise_level=0.7)
    x, old_v, noise, shift, to_ref = (torch.randn(N, *SHAPE, generator=g) for _ in range(5))
    prev, old_log_prob = sde_step(x, old_v, coef, noise=noise)
    minus_dt = sigmas[at] - sigmas[at + 1]
    values: dict[str, Any] = dict(
        x=x, v=(old_v + moved * shift).requires_grad_(), prev=prev, coef=coef, minus_dt=minus_dt, old_log_prob=old_log_prob, old_v=old_v,
        std_dev=coef.s / minus_dt.sqrt() if rule == "sde" else coef.s,
        advantage=torch.randn(N, generator=g), mask=torch.arange(N) != 3, step_weight=None, denominator=torch.tensor(float(N - 1)),
        v_ref=old_v + 0.1 * to_ref,
    )  # fmt: skip
    return LossInputs(**(values | changes))


def config(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**({"clip_low": 1e-3, "clip_high": 2e-3, "kl_coef": 0.0} | changes))


def means(i: LossInputs, v: Tensor) -> Tensor:
    a, b = (value.double().view(N, 1, 1) for value in (i.coef.a, i.coef.b))
    return a * i.x.double() + b * v.double()


def over_elements(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)


def averaged(entries: Tensor, i: LossInputs) -> Tensor:
    return torch.where(i.mask, entries, 0.0).sum() / i.denominator.double()


def clipped(ratio: Tensor, i: LossInputs, c: AlgorithmConfig) -> Tensor:
    A = i.advantage.double()
    return torch.maximum(-A * ratio, -A * ratio.clamp(1 - c.clip_low, 1 + c.clip_high))


def flow_grpo(i: LossInputs, v: Tensor, c: AlgorithmConfig) -> Tensor:
    s = i.coef.s.double()
    log_prob = (
        -over_elements((i.prev.double() - means(i, v)) ** 2) / (2 * s**2) - s.log() - math.log(math.sqrt(2 * math.pi))
    )
    old = (
        -over_elements((i.prev.double() - means(i, i.old_v)) ** 2) / (2 * s**2)
        - s.log()
        - math.log(math.sqrt(2 * math.pi))
    )
    weight = 1.0 if i.step_weight is None else i.step_weight.double()
    return averaged(clipped((log_prob - old).exp(), i, c) * weight, i)


def grpo_guard(i: LossInputs, v: Tensor, c: AlgorithmConfig) -> Tensor:
    s, moved = i.coef.s.double(), means(i, v) - means(i, i.old_v)
    noise = (i.prev.double() - means(i, i.old_v)) / s.view(N, 1, 1)
    return averaged(clipped(over_elements(noise * moved).exp(), i, c) / i.minus_dt.double(), i)


def flow_dppo(i: LossInputs, v: Tensor, c: AlgorithmConfig) -> Tensor:
    s, moved, A = i.coef.s.double(), means(i, v) - means(i, i.old_v), i.advantage.double()
    ratio = (over_elements((2 * (i.prev.double() - means(i, i.old_v)) - moved) * moved) / (2 * s**2)).exp()
    far = over_elements(moved**2) / (2 * s**2) >= c.divergence_limit
    away = ((ratio > 1) & (A > 0)) | ((ratio < 1) & (A < 0))
    return averaged(torch.where(far & away, 0.0, -A * ratio), i)


FORMULAS: dict[str, Callable[[LossInputs, Tensor, AlgorithmConfig], Tensor]] = {
    "flow_grpo": flow_grpo,
    "grpo_guard": grpo_guard,
    "flow_dppo": flow_dppo,
}


@pytest.mark.parametrize("moved", [0.002, 0.05, 0.5])
@pytest.mark.parametrize("rule", ["sde", "cps", "dance"])
@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradient_are_the_formulas(name: str, rule: str, moved: float) -> None:
    c = config(name=name, divergence_limit=1e-4)
    i = inputs(rule, moved)
    loss, log_prob, metrics = build_algorithm(c).loss(i)
    loss.backward()
    v = i.v.detach().double().requires_grad_()
    expected = FORMULAS[name](i, v, c)
    expected.backward()
    assert v.grad is not None
    assert i.v.grad is not None
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-6)
    assert float((i.v.grad - v.grad).abs().max()) < 1e-6 * max(1.0, float(v.grad.abs().max()))
    assert log_prob.shape == (N,)
    assert not log_prob.requires_grad
    assert int(metrics["kept"]) == N - 1


@pytest.mark.parametrize("name", FORMULAS)
def test_on_policy_the_ratio_is_one_to_the_last_bit(name: str) -> None:
    """Equal velocities, and no old ones at all: both are on-policy."""
    for i in (inputs(moved=0.0), inputs(moved=0.0, old_v=None, old_log_prob=None)):
        _, _, metrics = build_algorithm(config(name=name)).loss(i)
        assert float(metrics["ratio_max_deviation"]) == 0.0


def test_guard_does_not_mix_samples() -> None:
    """flow_grpo #244: a batch mean where a sample's was meant."""
    still = inputs(moved=0.0)
    moved = inputs(moved=0.1)
    v = torch.where((torch.arange(N) == 0).view(N, 1, 1), still.v.detach(), moved.v.detach()).requires_grad_()
    alone = build_algorithm(config(name="grpo_guard", clip_low=1.0, clip_high=1.0))
    mask = torch.arange(N) == 0
    loss, _, metrics = alone.loss(inputs(v=v, mask=mask, denominator=torch.tensor(1.0)))
    assert float(metrics["ratio_max_deviation"]) == 0.0
    assert float(loss.detach()) == pytest.approx(-float(still.advantage[0]) / float(still.minus_dt[0]))


@pytest.mark.parametrize("rule", ["sde", "cps", "dance"])
@pytest.mark.parametrize("form", ["gaussian", "flow_grpo", "velocity_mse"])
@pytest.mark.parametrize("name", FORMULAS)
def test_kl_to_the_reference_in_each_form(name: str, form: str, rule: str) -> None:
    """Value, and a gradient that flows (Flow-Factory #122 had none)."""
    c = config(name=name, kl_coef=0.5, kl_form=form)
    i = inputs(rule, advantage=torch.zeros(N))
    loss, _, metrics = build_algorithm(c).loss(i)
    loss.backward()
    v = i.v.detach().double().requires_grad_()
    assert i.v_ref is not None
    if form == "velocity_mse":
        kl = over_elements((v - i.v_ref.double()) ** 2)
    else:
        divisor = i.coef.s.double() if form == "gaussian" else i.std_dev.double()
        kl = over_elements((means(i, v) - means(i, i.v_ref)) ** 2) / (2 * divisor**2)
    expected = averaged(kl, i)
    (0.5 * expected).backward()
    assert v.grad is not None
    assert i.v.grad is not None
    assert float(metrics["kl"]) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(loss.detach()) == pytest.approx(0.5 * float(expected.detach()), rel=1e-5)
    assert float((i.v.grad - v.grad).abs().max()) < 1e-4 * float(v.grad.abs().max())


def test_flow_grpos_kl_is_the_true_one_times_minus_dt() -> None:
    i = inputs("sde")
    one = torch.tensor(1.0)
    for pair in range(3):
        mask = torch.arange(N) == pair
        values = []
        for form in ("flow_grpo", "gaussian"):
            _, _, metrics = build_algorithm(config(kl_coef=1.0, kl_form=form)).loss(
                inputs("sde", mask=mask, denominator=one)
            )
            values.append(float(metrics["kl"]))
        assert values[0] == pytest.approx(values[1] * float(i.minus_dt[pair]), rel=1e-5)


def test_step_weights_scale_each_pairs_loss() -> None:
    weight = torch.linspace(0.5, 1.5, N)
    c = config()
    i = inputs(step_weight=weight)
    loss, _, _ = build_algorithm(c).loss(i)
    assert float(loss.detach()) == pytest.approx(float(flow_grpo(i, i.v.detach(), c)), rel=1e-6, abs=1e-6)


def test_dppo_drops_only_what_is_far_and_going_further() -> None:
    c = config(name="flow_dppo", divergence_limit=1e-12)
    i = inputs(moved=0.05)
    loss, _, metrics = build_algorithm(c).loss(i)
    loss.backward()
    assert i.v.grad is not None
    still = (i.v.grad.flatten(1) == 0).all(1)
    assert 0 < float(metrics["dropped_fraction"]) < 1
    assert int(still[i.mask].sum()) == round(float(metrics["dropped_fraction"]) * (N - 1))
    wide, _, kept = build_algorithm(config(name="flow_dppo", divergence_limit=1e9)).loss(inputs(moved=0.05))
    assert float(kept["dropped_fraction"]) == 0.0
    assert float(wide) != float(loss)


def test_guard_refuses_a_log_prob_that_is_no_density() -> None:
    with pytest.raises(
        ConfigError, match="grpo_guard needs log_prob_form gaussian and log_prob_reduction mean, got flow_grpo and mean"
    ):
        build_algorithm(config(name="grpo_guard", log_prob_form="flow_grpo"))


def table(components: list[list[float]], groups: list[int], weights: list[float]) -> Rewards:
    values, weight = torch.tensor(components, dtype=torch.float32), torch.tensor(weights)
    valid = values.isfinite().all(1)
    total = torch.where(valid, values @ weight, math.nan)
    return Rewards(values, weight, total, torch.tensor(groups), valid)


def test_gdpo_normalises_each_reward_in_its_group_first() -> None:
    """A reward a thousand times larger does not drown the other; a group that agrees in one reward is judged by the other."""
    rewards = table([[0, 1000], [1, 3000], [2, 2000], [5, 7], [5, 9], [5, 8]], [4, 4, 4, 9, 9, 9], [1.0, 0.5])
    c = config(advantage="gdpo", advantage_eps=0.0, advantage_clip=None)
    found = build_advantage(c)(rewards, c)

    def z(values: list[float]) -> Tensor:
        t = torch.tensor(values, dtype=torch.float64)
        return torch.zeros_like(t) if t.std() == 0 else (t - t.mean()) / t.std(correction=0)

    total = torch.cat([z([0, 1, 2]) + 0.5 * z([1000, 3000, 2000]), z([5, 5, 5]) + 0.5 * z([7, 9, 8])])
    expected = (total - total.mean()) / total.std(correction=0)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    # By the sum alone the first reward would not matter.
    plain = build_advantage(config())(rewards, config(advantage_eps=0.0, normalize="group_std", advantage_clip=None))
    assert float(plain[0]) < float(plain[2]) < float(plain[1])
    assert float(found[2]) > float(found[1])


def test_gdpo_leaves_invalid_samples_out() -> None:
    rewards = table([[1.0, 2.0], [math.nan, 1.0], [3.0, 1.0]], [0, 0, 0], [1.0, 1.0])
    c = config(advantage="gdpo")
    found = build_advantage(c)(rewards, c)
    assert bool(found.isfinite().all())
    assert float(found[1]) == 0.0


def test_best_and_worst_of_each_group() -> None:
    """Whole groups in order of appearance; each from low to high. Too few valid ones: filled up with invalid ones, which are masked."""
    value, group = torch.tensor([3.0, 1, 2, 5, 7, 7, 7, 8]), torch.tensor([9, 9, 9, 9, 2, 2, 2, 2])
    valid = torch.ones(8, dtype=torch.bool)
    assert best_and_worst(value, group, valid, 2).tolist() == [1, 3, 4, 7]
    assert best_and_worst(value, group, valid, 3).tolist() == [1, 0, 3, 4, 6, 7]
    assert best_and_worst(value, group, valid, 4).tolist() == list(range(8))
    valid[:3] = False
    algorithm = build_algorithm(config(train_on=2, group_size=4))
    index, kept = algorithm.choose(value, group, valid)
    assert index.tolist() == [3, 0, 4, 7]
    assert kept.tolist() == [True, False, True, True]


@pytest.fixture(scope="module")
def one_rank(process_group: None) -> None:
    settle_environment(tiny_config(Path("unused"), "engine.threads=1"), None)


TWO_REWARDS = (
    "rewards=[{name: tests.tiny:brightness, label: a}, {name: tests.test_algorithms:darkness, label: b, weight: 0.5}]"
)
TRAINED: dict[str, tuple[str, ...]] = {
    "guard": ("algorithm.name=grpo_guard", "algorithm.normalize=group_std"),
    "guard, several updates": ("algorithm.name=grpo_guard", "algorithm.updates_per_rollout=2"),
    "guard, own log-probs": ("algorithm.name=grpo_guard", "algorithm.updates_per_rollout=2", "algorithm.old_log_probs=trainer"),
    "dppo": ("algorithm.name=flow_dppo", "algorithm.advantage_clip=null"),
    "gdpo": ("algorithm.advantage=gdpo", TWO_REWARDS),
    "dance, best of n": ("rollout.rule=dance", "algorithm.train_on=2", "rollout.noise_level=0.3"),
    "tempflow": ("algorithm.step_weight=noise_level", "rollout.window={size: 2, range: [0,3], scope: sample}"),
    "mix": ("rollout.ode_order=2", "rollout.window={size: 1, range: [0,2], strategy: progressive, shift_every: 1}"),
    "kl": ("algorithm.kl_coef=0.1", "algorithm.kl_form=velocity_mse"),
}  # fmt: skip


def darkness(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    return -images.flatten(1).float().mean(1)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", TRAINED)
def test_trained_with_first_ratio_one(name: str, tmp_path: Path) -> None:
    run_config = tiny_config(
        tmp_path,
        *TRAINED[name],
        "trainer.total_steps=2",
        "data.validation=null",
        "engine.threads=1",
        "engine.zero_stage=0",
    )
    trainer = Trainer(run_config, Inputs(run_config, 1), CPU)
    trainer.run()
    trainer.engine.close()
    rows = read_metrics(tmp_path)
    assert len(rows) == 2
    for row in rows:
        assert row["policy/first_ratio_max_deviation"] == 0.0
        assert row["optimizer/grad_norm"] > 0
        if "updates_per_rollout" in str(TRAINED[name]):
            assert row["policy/ratio_max_deviation"] > 0
    assert ("policy/step_00/kept" in rows[0]) == (not name.startswith(("guard", "dppo")))
    if name == "dance, best of n":
        assert trainer.plan.trained_samples == 8
        assert rows[0]["policy/kept"] == 8


def test_second_order_steps_follow_the_window_only() -> None:
    """On dx/dsigma = x: closer to exp than Euler's; what comes before the window, and in it, is the same bits."""
    T, params = 16, sampling(num_steps=16, window_size=2)
    sigmas, ids = make_sigmas(T), torch.arange(3)
    x, start = torch.ones(3, 2, 4), torch.tensor([0, 2, 5])
    results = [
        denoise(
            lambda x, sigma, rows: x, x, sigmas, replace(params, ode_order=order), start=torch.zeros(3, dtype=torch.int64),
            stop=torch.full((3,), T), window_start=start, sample_id=ids,
        )
        for order in (1, 2)
    ]  # fmt: skip
    assert torch.equal(results[0].latents, results[1].latents)
    assert torch.equal(results[0].log_probs, results[1].log_probs)
    after = results[0].latents[:, -1] * torch.exp(-sigmas[start + 2]).view(3, 1, 1)
    errors = [float((r.final - after).abs().max()) for r in results]
    assert errors[1] < errors[0] / 5
