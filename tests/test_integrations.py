"""One step, by the scheduler and by flow_grpo's function: the originals' formulas in fp64, gradients, noise, dtypes, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from util import SIGMAS, assert_as_accurate, assert_same_bits, column, randn

from flowgrpo_fast.integrations.diffusers_scheduler import FlowMatchSDEDiscreteScheduler
from flowgrpo_fast.integrations.flow_grpo import sde_step_with_logprob
from flowgrpo_fast.schedule import make_sigmas

NOISE_LEVELS = {"sde": 0.7, "cps": 0.8, "dance_sde": 0.3}
SHAPES = ((4, 32, 16), (4, 8, 8, 8), (4, 3, 4, 8, 6))  # packed, image and video latents
EARLY = torch.tensor([0, 3, 6, 8])
MIXED = torch.tensor([0, 4, 7, 9])  # the first step (sigma = 1), two others, the last step (sigma' = 0)


class Step(NamedTuple):
    prev_sample: Tensor
    log_prob: Tensor
    prev_sample_mean: Tensor
    std_dev_t: Tensor
    sqrt_dt: Tensor


def original(
    sample: Tensor,
    model_output: Tensor,
    index: Tensor,
    sde_type: str,
    prev_sample: Tensor | None = None,
    noise: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    sigmas: Tensor = SIGMAS,
    normalizer: bool = True,
) -> Step:
    """The step as flow_grpo, Flow-CPS and DanceGRPO define it (peers.md, sections 1.1 and 1.3), term by term."""
    eta = NOISE_LEVELS[sde_type]
    t, after = (column(sigmas[position], sample).to(dtype) for position in (index, index + 1))
    x, v = sample.to(dtype), model_output.to(dtype)
    dt, data, noised = after - t, x - t * v, x + (1 - t) * v
    if sde_type == "sde":
        std_dev_t = eta * (t / (1 - torch.where(t == 1, sigmas[1].to(dtype), t))).sqrt()
        mean = x * (1 + std_dev_t**2 / (2 * t) * dt) + v * (1 + std_dev_t**2 * (1 - t) / (2 * t)) * dt
        spread = std_dev_t * (-dt).sqrt()
    elif sde_type == "cps":
        std_dev_t = spread = after * math.sin(eta * math.pi / 2)
        mean = data * (1 - after) + noised * (after**2 - std_dev_t**2).sqrt()
    else:
        std_dev_t = spread = eta * (-dt).sqrt()
        score = -(x - (1 - t) * data) / t**2
        mean = x + v * dt - 0.5 * eta**2 * score * dt
    prev = mean + spread * noise.to(dtype) if prev_sample is None else prev_sample.to(dtype)
    density = -((prev.detach() - mean) ** 2)
    if sde_type != "cps":
        density = density / (2 * spread**2)
        if normalizer:
            density = density - spread.log() - math.log(math.sqrt(2 * math.pi))
    return Step(prev, density.mean(tuple(range(1, x.dim()))), mean, std_dev_t, (-dt).sqrt())


def build(sigmas: Tensor = SIGMAS, **config: Any) -> FlowMatchSDEDiscreteScheduler:
    """A scheduler on our sigmas: shift=3 over linspace(1, 1/T, T) is make_sigmas' single shift."""
    scheduler = FlowMatchSDEDiscreteScheduler(shift=3.0, **config)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.1, 10))
    assert_same_bits(scheduler.sigmas, SIGMAS)
    scheduler.sigmas, scheduler.timesteps = sigmas, sigmas[:-1] * 1000
    return scheduler


def by_scheduler(sample: Tensor, model_output: Tensor, index: Tensor, sde_type: str, **named: Any) -> Step:
    scheduler = build(named.pop("sigmas", SIGMAS))
    named = {"noise_level": NOISE_LEVELS.get(sde_type, 0.7), "sde_type": sde_type, "return_sqrt_dt": True, **named}
    return Step(*scheduler.sample_previous_step(sample, model_output, scheduler.timesteps[index], **named))


def by_flow_grpo(sample: Tensor, model_output: Tensor, index: Tensor, sde_type: str, **named: Any) -> Step:
    scheduler = build(named.pop("sigmas", SIGMAS))
    named = {"noise_level": NOISE_LEVELS.get(sde_type, 0.7), "sde_type": sde_type, "return_sqrt_dt": True, **named}
    step = Step(*sde_step_with_logprob(scheduler, model_output, scheduler.timesteps[index], sample, **named))
    assert step.sqrt_dt.shape == step.std_dev_t.shape
    return step._replace(sqrt_dt=step.sqrt_dt.flatten())


EntryPoint = Callable[..., Step]
both_entry_points = pytest.mark.parametrize("entry", [by_scheduler, by_flow_grpo])
every_type = pytest.mark.parametrize("sde_type", list(NOISE_LEVELS))


def inputs(shape: tuple[int, ...], sde_type: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A step that was sampled under another velocity nearby, as a trainer sees it."""
    sample, v, noise = randn(shape, 1, dtype), randn(shape, 2, dtype), randn(shape, 3)
    behind = v.double() + 1e-2 * randn(shape, 4, torch.float64)
    prev = original(sample, behind, MIXED, sde_type, noise=noise).prev_sample
    return {"sample": sample, "model_output": v, "prev_sample": prev.to(dtype)}


@both_entry_points
@every_type
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_given_step_has_the_originals_values(entry: EntryPoint, sde_type: str, shape: tuple[int, ...]) -> None:
    """Mixed timesteps; sigma = 1 and sigma' = 0 among them."""
    given = inputs(shape, sde_type)
    got = entry(**given, index=MIXED, sde_type=sde_type)
    truth, eager = (original(**given, index=MIXED, sde_type=sde_type, dtype=d) for d in (torch.float64, torch.float32))
    assert_same_bits(got.prev_sample, given["prev_sample"])
    assert got.log_prob.shape == (4,)
    assert got.std_dev_t.shape == (4, *(1,) * (len(shape) - 1))
    for name in ("log_prob", "prev_sample_mean", "std_dev_t"):
        assert_as_accurate(getattr(got, name), getattr(truth, name), getattr(eager, name))
    torch.testing.assert_close(got.sqrt_dt.double(), truth.sqrt_dt.flatten(), rtol=2e-7, atol=0)


@both_entry_points
@every_type
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp64_agrees_to_1e_6(entry: EntryPoint, sde_type: str, shape: tuple[int, ...]) -> None:
    given = inputs(shape, sde_type, torch.float64)
    got, truth = (function(**given, index=MIXED, sde_type=sde_type) for function in (entry, original))
    assert got.log_prob.dtype == torch.float64
    for name in ("log_prob", "prev_sample_mean", "std_dev_t"):
        expected = getattr(truth, name)
        torch.testing.assert_close(getattr(got, name).double(), expected, rtol=1e-6, atol=1e-6, msg=name)


@both_entry_points
@every_type
def test_the_tiny_noise_of_a_doubly_shifted_last_step(entry: EntryPoint, sde_type: str) -> None:
    """s = 6e-3 at sigma = 9e-3, and sigma' = 0 (peers.md, golden values)."""
    sigmas, index = make_sigmas(10, "double_shift"), torch.tensor([9, 8])
    sample, v, noise = (randn((2, 4096), seed) for seed in (1, 2, 3))
    prev = original(sample, v, index, sde_type, noise=noise, sigmas=sigmas).prev_sample.float()
    named = dict(sample=sample, model_output=v, index=index, sde_type=sde_type, prev_sample=prev, sigmas=sigmas)
    got = entry(**named)
    truth, eager = (original(**named, dtype=dtype) for dtype in (torch.float64, torch.float32))
    assert_as_accurate(got.log_prob, truth.log_prob, eager.log_prob)


@both_entry_points
@every_type
def test_a_sampled_step_takes_its_noise_from_the_generator(entry: EntryPoint, sde_type: str) -> None:
    shape = (4, 32, 16)
    named = dict(sample=randn(shape, 1), model_output=randn(shape, 2), index=MIXED, sde_type=sde_type)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    got, again = (entry(**named, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    truth = original(**named, noise=noise)
    torch.testing.assert_close(got.prev_sample.double(), truth.prev_sample, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.log_prob.double(), truth.log_prob, rtol=1e-6, atol=1e-6)
    for left, right in zip(got, again, strict=True):
        assert_same_bits(left, right)
    other = entry(**named, generator=torch.Generator().manual_seed(8))
    assert not torch.equal(other.prev_sample, got.prev_sample)


@both_entry_points
@every_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_has_the_bits_of_the_rollout(entry: EntryPoint, sde_type: str, dtype: torch.dtype) -> None:
    """The on-policy ratio is exactly 1, whatever the batch of the replay."""
    named = dict(sample=randn((4, 32, 16), 1, dtype), model_output=randn((4, 32, 16), 2, dtype))
    rollout = entry(**named, index=MIXED, sde_type=sde_type, generator=torch.Generator().manual_seed(7))
    assert rollout.prev_sample.dtype == torch.float32
    order = torch.tensor([3, 1])
    again = {name: value[order] for name, value in named.items()}
    replay = entry(**again, index=MIXED[order], sde_type=sde_type, prev_sample=rollout.prev_sample[order])
    assert_same_bits(replay.log_prob, rollout.log_prob[order])


@both_entry_points
def test_each_sample_may_have_a_generator(entry: EntryPoint) -> None:
    sample, v = randn((4, 5), 1), randn((4, 5), 2)
    seeds = (3, 1, 4, 5)
    together = entry(sample, v, MIXED, "sde", generator=[torch.Generator().manual_seed(seed) for seed in seeds])
    for i, seed in enumerate(seeds):
        one = slice(i, i + 1)
        alone = entry(sample[one], v[one], MIXED[one], "sde", generator=torch.Generator().manual_seed(seed))
        assert_same_bits(alone.prev_sample, together.prev_sample[one])
    with pytest.raises(ValueError, match=r"^generator: got 3 generators"):
        entry(sample, v, MIXED, "sde", generator=[torch.Generator()] * 3)


@both_entry_points
@every_type
@pytest.mark.parametrize("sampled", [False, True], ids=["given", "sampled"])
def test_gradients_reach_the_model(entry: EntryPoint, sde_type: str, sampled: bool) -> None:
    """Through log_prob (prev_sample held fixed) and through prev_sample_mean, as KL losses use it."""
    given = inputs((4, 32, 16), sde_type)
    if sampled:
        given["prev_sample"] = entry(**{**given, "prev_sample": None}, index=MIXED, sde_type=sde_type).prev_sample
    for name in ("log_prob", "prev_sample_mean"):
        gradients = []
        for function, extra in (
            (entry, {}),
            (original, {"dtype": torch.float64}),
            (original, {"dtype": torch.float32}),
        ):
            leaf = given["model_output"].to(extra.get("dtype", torch.float32)).clone().requires_grad_(True)
            out = getattr(function(**{**given, "model_output": leaf}, index=MIXED, sde_type=sde_type, **extra), name)
            (out * randn(tuple(out.shape), 5).to(out.dtype)).sum().backward()
            gradients.append(leaf.grad)
        assert_as_accurate(*gradients)


@both_entry_points
def test_a_sampled_step_can_be_differentiated_too(entry: EntryPoint) -> None:
    named = dict(sample=randn((4, 12), 1), index=MIXED, sde_type="sde")
    v = randn((4, 12), 2).requires_grad_(True)
    step = entry(**named, model_output=v, generator=torch.Generator().manual_seed(7))
    (from_sampled,) = torch.autograd.grad(step.log_prob.sum(), v, retain_graph=True)
    replay = entry(**named, model_output=v, prev_sample=step.prev_sample)
    (from_given,) = torch.autograd.grad(replay.log_prob.sum(), v)
    assert_same_bits(from_sampled, from_given)
    assert torch.autograd.grad(step.prev_sample.sum(), v)[0].abs().min() > 0


@both_entry_points
@every_type
def test_bf16_is_computed_in_fp32(entry: EntryPoint, sde_type: str) -> None:
    given = inputs((4, 32, 16), sde_type, torch.bfloat16)
    got = entry(**given, index=MIXED, sde_type=sde_type)
    wide = entry(**{name: value.float() for name, value in given.items()}, index=MIXED, sde_type=sde_type)
    for left, right in zip(got, wide, strict=True):
        assert_same_bits(left, right)
    given["model_output"].requires_grad_(True)
    entry(**given, index=MIXED, sde_type=sde_type).log_prob.sum().backward()
    assert given["model_output"].grad.dtype == torch.bfloat16


@every_type
def test_without_normalizer_only_the_quadratic_term_is_left(sde_type: str) -> None:
    given = inputs((4, 32, 16), sde_type)
    got = by_scheduler(**given, index=MIXED, sde_type=sde_type, include_logprob_normalizer=False)
    truth = original(**given, index=MIXED, sde_type=sde_type, normalizer=False)
    # Three roundings: s enters as fp32, and twice.
    torch.testing.assert_close(got.log_prob.double(), truth.log_prob, rtol=4e-7, atol=1e-9)
    full = by_scheduler(**given, index=MIXED, sde_type=sde_type)
    gradients = []
    for normalizer in (True, False):
        leaf = given["model_output"].clone().requires_grad_(True)
        out = by_scheduler(
            **{**given, "model_output": leaf}, index=MIXED, sde_type=sde_type, include_logprob_normalizer=normalizer
        )
        out.log_prob.sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=0)
    assert torch.equal(full.log_prob, got.log_prob) == (sde_type == "cps")


@every_type
def test_std_dev_t_lacks_the_step_length_for_sde_only(sde_type: str) -> None:
    """std_dev_t * sqrt_dt for "sde", std_dev_t alone else, is what multiplies the noise."""
    sample, v = torch.zeros(4, 4096), torch.zeros(4, 4096)
    got = by_scheduler(sample, v, MIXED, sde_type, generator=torch.Generator().manual_seed(7))
    noise = torch.randn(sample.shape, generator=torch.Generator().manual_seed(7))
    s = got.std_dev_t[:, 0] * (got.sqrt_dt if sde_type == "sde" else 1)
    torch.testing.assert_close(got.prev_sample, s[:, None] * noise, rtol=1e-6, atol=0)


@both_entry_points
@every_type
def test_noise_levels_may_differ_within_a_batch(entry: EntryPoint, sde_type: str) -> None:
    """As a rollout with windows of its own for each sample does. Where it is 0: the ODE's step, log_prob 0, no NaN anywhere."""
    sample, v, eta = randn((4, 6, 5), 1), randn((4, 6, 5), 2), NOISE_LEVELS[sde_type]
    levels = torch.tensor([0.0, eta, 0.0, eta])
    for shape in ((4,), (4, 1, 1)):
        mixed, plain = (
            entry(sample, v, EARLY, sde_type, noise_level=level, generator=torch.Generator().manual_seed(7))
            for level in (levels.reshape(shape), eta)
        )
        for left, right in zip(mixed, plain, strict=True):
            assert_same_bits(left[1::2], right[1::2])
        dt = column(SIGMAS[EARLY[::2] + 1] - SIGMAS[EARLY[::2]], sample).float()
        assert_same_bits(mixed.prev_sample[::2], sample[::2] + dt * v[::2])
        assert mixed.log_prob[::2].tolist() == [0.0, 0.0]
        assert mixed.std_dev_t[::2].flatten().tolist() == [0.0, 0.0]
        assert bool(mixed.log_prob.isfinite().all())


@both_entry_points
@every_type
@pytest.mark.parametrize("sampled", [False, True], ids=["given", "sampled"])
def test_no_value_is_read_on_the_host(entry: EntryPoint, sde_type: str, sampled: bool) -> None:
    """Meta tensors have no values, so reading one (a host sync on a GPU) is an error."""
    given = {name: value.to("meta") for name, value in inputs((4, 8, 6), sde_type).items()}
    if sampled:
        given["prev_sample"] = None
    given["model_output"].requires_grad_(True)
    out = entry(**given, index=MIXED, sde_type=sde_type, noise_level=torch.full((4, 1, 1), 0.5, device="meta"))
    out.log_prob.sum().backward()
    assert {tensor.device.type for tensor in out} == {"meta"}
    assert given["model_output"].grad.shape == (4, 8, 6)
