"""sde_step: the step, the log-prob of the rounded step, and what makes both exact."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from util import (
    DTYPES,
    SHAPES,
    assert_as_accurate,
    assert_batch_invariant,
    assert_same_bits,
    coefficients,
    column,
    randn,
    scrambled,
    steps,
)

from flowgrpo_fast.ops import NoiseKey, StepCoefficients, philox_normal, sde_log_prob, sde_step

OP = torch.ops.flowgrpo_fast


def eager_step(
    x: Tensor, v: Tensor, coef: StepCoefficients, noise: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The formula as one would write it in torch, everything in one dtype; in fp64 it is the truth."""
    a, b, s = (column(value, x).to(dtype) for value in (coef.a, coef.b, coef.s))
    mean = a * x.to(dtype) + b * v.to(dtype)
    prev = mean + s * noise.to(dtype)
    return prev, eager_log_prob(prev, mean, s)


def eager_log_prob(prev: Tensor, mean: Tensor, s: Tensor) -> Tensor:
    log_prob = -((prev - mean) ** 2) / (2 * s**2) - torch.log(s) - math.log(math.sqrt(2 * math.pi))
    return log_prob.mean(dim=tuple(range(1, prev.dim())))


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, StepCoefficients, Tensor]:
    return randn(shape, 1, dtype), randn(shape, 2, dtype), coefficients(shape[0]), randn(shape, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 65537)], ids=str)
def test_forward_is_as_accurate_as_eager(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, v, coef, noise = inputs(shape, dtype)
    prev, log_prob = sde_step(x, v, coef, noise=noise)
    true_prev, _ = eager_step(x, v, coef, noise, torch.float64)
    eager_prev, _ = eager_step(x, v, coef, noise, torch.float32)
    assert prev.shape == x.shape
    assert_as_accurate(prev, true_prev, eager_prev.to(dtype))
    # The density is that of the value that was stored.
    mean, s = (column(coef.a, x) * x.double() + column(coef.b, x) * v.double()), column(coef.s, x)
    eager_mean = column(coef.a, x).float() * x.float() + column(coef.b, x).float() * v.float()
    truth, eager = eager_log_prob(prev.double(), mean, s), eager_log_prob(prev.float(), eager_mean, s.float())
    assert log_prob.shape == (shape[0],)
    assert_as_accurate(log_prob, truth, eager)


def test_the_border_keeps_the_callers_dtype_and_out_dtype_overrides_it() -> None:
    x, v, coef, noise = inputs((3, 4, 5), torch.bfloat16)
    exact, _ = sde_step(x.float(), v.float(), coef, noise=noise)
    for out_dtype in (None, torch.float16, torch.float32, torch.bfloat16):
        prev, log_prob = sde_step(x, v, coef, noise=noise, out_dtype=out_dtype)
        assert_same_bits(prev, exact.to(out_dtype or torch.bfloat16))
        assert log_prob.dtype == torch.float32
    mixed, _ = sde_step(x.float(), v, coef, noise=noise.double())
    assert_same_bits(mixed, exact)
    assert sde_step(x.double(), v.double(), coef, noise=noise)[1].dtype == torch.float64


def test_row_14_log_prob_is_of_the_rounded_value() -> None:
    """Off by more than the clip range of 1e-5 if it were of the unrounded one."""
    x, v, coef, noise = inputs((3, 4096))
    rounded, log_prob = sde_step(x, v, coef, noise=noise, out_dtype=torch.bfloat16)
    replayed = sde_log_prob(x, v, rounded, coef).log_prob
    assert_same_bits(log_prob, replayed)
    _, unrounded = sde_step(x, v, coef, noise=noise)
    assert (unrounded - log_prob).abs().max().item() > 1e-5


@pytest.mark.parametrize("form", ["gaussian", "flow_grpo"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_13_replay_gives_ratio_exactly_one(dtype: torch.dtype, reduction: str, form: str) -> None:
    """In another batch and order too: with equal v the ratio is 1.0 to the last bit."""
    x, v, coef, noise = inputs((7, 3, 5, 11), dtype)
    prev, old = sde_step(x, v, coef, noise=noise, reduction=reduction, form=form)
    order = torch.tensor([5, 0, 6])
    new = sde_log_prob(x[order], v[order], prev[order], coef[order], reduction=reduction, form=form).log_prob
    assert torch.exp(new - old[order]).tolist() == [1.0, 1.0, 1.0]


def test_row_8_without_noise_the_step_is_eulers_bit_for_bit() -> None:
    x, v, _, noise = inputs((4, 3, 7))
    coef = coefficients(4, noise_level=0.0)
    for extra in ({"noise": noise}, {"noise": noise * float("nan")}, {"key": NoiseKey(0, 0, torch.arange(4))}):
        prev, log_prob = sde_step(x, v, coef, **extra)
        assert_same_bits(prev, x + v * coef.b[:, None, None])
        assert log_prob.tolist() == [0.0] * 4
    # b < 0: a x + b v is -0.0 only where x is and v is not.
    minus_zero, _ = sde_step(-x.abs() * 0, v.abs() * 0, coef, noise=noise)
    assert bool(minus_zero.signbit().all())


def test_row_63_one_batch_may_mix_steps_and_ode_samples() -> None:
    x, v, _, noise = inputs((4, 3, 7))
    coef = coefficients(4, noise_level=torch.tensor([0.7, 0.0, 1.2, 0.0]))
    prev, log_prob = sde_step(x, v, coef, noise=noise)
    for i in range(4):
        alone, alone_log_prob = sde_step(x[i : i + 1], v[i : i + 1], coef[i], noise=noise[i : i + 1])
        assert_same_bits(prev[i : i + 1], alone)
        assert_same_bits(log_prob[i : i + 1], alone_log_prob)
    assert (log_prob == 0).tolist() == [False, True, False, True]


def test_row_6_half_precision_overflow_is_avoided_and_bad_velocities_show() -> None:
    x, coef, noise = randn((2, 8), 1, torch.float16), coefficients(2), randn((2, 8), 3)
    v = torch.full((2, 8), 6e4, dtype=torch.float16)
    prev, log_prob = sde_step(x, v, coef, noise=noise, out_dtype=torch.float32)
    assert bool(prev.isfinite().all())
    assert bool(log_prob.isfinite().all())
    v[1, 3] = float("nan")
    prev, log_prob = sde_step(x, v, coef, noise=noise, out_dtype=torch.float32)
    assert log_prob.isfinite().tolist() == [True, False]
    assert prev.isfinite().all(1).tolist() == [True, False]


def test_a_key_is_the_noise_of_philox_normal() -> None:
    x, v, coef, _ = inputs((5, 3, 7))
    key = NoiseKey(12, steps(5), torch.arange(5) + 100, stream=4)
    by_key = sde_step(x, v, coef, key=key)
    by_noise = sde_step(x, v, coef, noise=philox_normal(key, (3, 7)))
    for left, right in zip(by_key, by_noise, strict=True):
        assert_same_bits(left, right)


@pytest.mark.parametrize("length", [1, 37, 65536])
def test_batch_invariance(length: int) -> None:
    x, v, coef, noise = inputs((33, length))
    assert_batch_invariant(
        lambda i: sde_step(x[i], v[i], coef[i], noise=noise[i], out_dtype=torch.bfloat16),
    )
    assert_batch_invariant(lambda i: sde_step(x[i, :50], v[i, :50], coef[i], key=NoiseKey(0, steps(33)[i], i)))


def test_one_coefficient_serves_a_whole_batch() -> None:
    x, v, _, noise = inputs((3, 6))
    one = coefficients(1)
    repeated = StepCoefficients(one.a.repeat(3), one.b.repeat(3), one.s.repeat(3))
    for left, right in zip(sde_step(x, v, one, noise=noise), sde_step(x, v, repeated, noise=noise), strict=True):
        assert_same_bits(left, right)


def test_non_contiguous_inputs_give_the_same_bits_and_a_contiguous_output() -> None:
    x, v, coef, noise = inputs((3, 4, 5, 2))
    expected = sde_step(x, v, coef, noise=noise)
    got = sde_step(scrambled(x), scrambled(v), coef, noise=scrambled(noise))
    for left, right in zip(got, expected, strict=True):
        assert_same_bits(left, right)
    assert got[0].is_contiguous()


def test_empty_batch() -> None:
    x, v, coef, noise = inputs((0, 4, 3))
    v.requires_grad_(True)
    prev, log_prob = sde_step(x, v, coef, noise=noise)
    assert prev.shape == (0, 4, 3)
    assert log_prob.shape == (0,)
    prev.sum().backward()
    assert v.grad is not None
    assert v.grad.shape == (0, 4, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_is_a_and_b(dtype: torch.dtype) -> None:
    x, v, coef, noise = inputs((3, 2, 9), dtype)
    x.requires_grad_(True)
    v.requires_grad_(True)
    prev, log_prob = sde_step(x, v, coef, noise=noise, out_dtype=torch.float32)
    assert not log_prob.requires_grad
    upstream = randn((3, 2, 9), 4)
    prev.backward(upstream)
    for grad, coefficient in ((x.grad, coef.a), (v.grad, coef.b)):
        assert grad is not None
        assert_same_bits(grad, (upstream * coefficient[:, None, None]).to(dtype))


def test_backward_takes_stride_0_and_half_precision_gradients() -> None:
    x, v, coef, noise = inputs((3, 4, 5))
    v.requires_grad_(True)
    sde_step(x, v, coef, noise=noise, out_dtype=torch.bfloat16)[0].sum().backward()
    assert v.grad is not None
    assert_same_bits(v.grad, coef.b[:, None, None].expand(3, 4, 5).contiguous())


def test_gradcheck() -> None:
    x, v = (randn((3, 2, 5), seed, torch.float64).requires_grad_(True) for seed in (1, 2))
    coef = coefficients(3, noise_level=torch.tensor([0.7, 0.0, 0.3]))
    noise = randn((3, 2, 5), 3, torch.float64)
    assert torch.autograd.gradcheck(lambda x, v: sde_step(x, v, coef, noise=noise)[0], (x, v))


def op_arguments(by_key: bool, dtype: torch.dtype) -> tuple:
    x, v, coef, noise = inputs((3, 2, 5), dtype)
    drawn = (None, 5, steps(3), torch.arange(3), 1) if by_key else (noise, 0, None, None, 0)
    leaves = (x.requires_grad_(True), v.requires_grad_(True), coef.a, coef.b, coef.s)
    return (*leaves, *drawn, torch.float32, "gaussian", "mean")


@pytest.mark.parametrize(("by_key", "dtype"), [(True, torch.float32), (False, torch.float32), (False, torch.bfloat16)])
def test_opcheck(by_key: bool, dtype: torch.dtype) -> None:
    torch.library.opcheck(OP.sde_step.default, op_arguments(by_key, dtype))


def test_opcheck_backward() -> None:
    torch.library.opcheck(OP.sde_step_backward.default, (randn((3, 2, 5), 1), coefficients(3).a, torch.bfloat16))


def test_compiles_without_a_graph_break() -> None:
    x, v, coef, _ = inputs((3, 2, 5))
    v.requires_grad_(True)
    key = NoiseKey(1, 2, torch.arange(3))

    def step(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return sde_step(x, v, coef, key=key)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for left, right in zip(compiled(x, v), step(x, v), strict=True):
        assert_same_bits(left, right)
    compiled(x, v)[0].sum().backward()
    assert v.grad is not None
    assert_same_bits(v.grad, coef.b[:, None, None].expand(3, 2, 5).contiguous())


def test_repeats_bit_for_bit() -> None:
    x, v, coef, noise = inputs((3, 4099))
    first = sde_step(x, v, coef, noise=noise)
    for _ in range(3):
        for left, right in zip(sde_step(x, v, coef, noise=noise), first, strict=True):
            assert_same_bits(left, right)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"x": torch.zeros(3)}, "x"),
        ({"x": torch.zeros(3, 4, dtype=torch.int64)}, "x"),
        ({"x": torch.zeros(3, 0)}, "x"),
        ({"v": torch.zeros(3, 5)}, "v"),
        ({"v": torch.zeros(3, 4, dtype=torch.int32)}, "v"),
        ({"v": torch.zeros(3, 4, device="meta")}, "v"),
        ({"noise": torch.zeros(4, 3)}, "noise"),
        ({"noise": torch.zeros(3, 4).requires_grad_(True)}, "noise"),
        ({"noise": None}, "noise, key"),
        ({"key": NoiseKey(0, 0, torch.arange(3))}, "noise, key"),
        ({"noise": None, "key": NoiseKey(0, 0, torch.arange(4))}, "key.sample_id"),
        ({"coef": coefficients(2)}, "coef"),
        ({"coef": coefficients(3).to("meta")}, "coef"),
        ({"out_dtype": torch.int8}, "out_dtype"),
        ({"form": "laplace"}, "form"),
        ({"reduction": "none"}, "reduction"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, field: str) -> None:
    zeros = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=rf"^{field}: got"):
        sde_step(**{"x": zeros, "v": zeros, "coef": coefficients(3), "noise": zeros, **arguments})
