"""sde_log_prob: density, KL and direct log-ratio against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from util import (
    DTYPES,
    SHAPES,
    SIGMAS,
    assert_as_accurate,
    assert_batch_invariant,
    assert_same_bits,
    coefficients,
    column,
    randn,
    scrambled,
    steps,
)

from flowgrpo_fast.ops import SdeLogProb, StepCoefficients, sde_log_prob, sde_step

OP = torch.ops.flowgrpo_fast


def eager(
    x: Tensor,
    v: Tensor,
    prev: Tensor,
    coef: StepCoefficients,
    v_ref: Tensor,
    v_old: Tensor,
    form: str = "gaussian",
    reduction: str = "mean",
    dtype: torch.dtype = torch.float64,
) -> SdeLogProb:
    """As the peers write it: three means, and the log-ratio as a difference of log-probs. In fp64 it is the truth."""
    a, b, s = (column(value, x).to(dtype) for value in (coef.a, coef.b, coef.s))
    x, v, prev, v_ref, v_old = (value.to(dtype) for value in (x, v, prev, v_ref, v_old))
    dims = tuple(range(1, x.dim()))

    def reduce(values: Tensor) -> Tensor:
        return values.mean(dims) if reduction == "mean" else values.sum(dims)

    def log_prob(v: Tensor) -> Tensor:
        square = (prev - (a * x + b * v)) ** 2
        if form == "flow_grpo":
            return reduce(-square)
        return reduce(-square / (2 * s**2) - torch.log(s) - math.log(math.sqrt(2 * math.pi)))

    kl = reduce((a * x + b * v - (a * x + b * v_ref)) ** 2 / (2 * s**2))
    return SdeLogProb(log_prob(v), kl, log_prob(v) - log_prob(v_old))


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, gap: float = 1e-2) -> dict:
    """A step that v_old took, and velocities near it."""
    x, v_old = randn(shape, 1, dtype), randn(shape, 2, dtype)
    coef = coefficients(shape[0])
    prev, _ = sde_step(x, v_old, coef, noise=randn(shape, 3))
    v, v_ref = ((v_old.double() + gap * randn(shape, seed, torch.float64)).to(dtype) for seed in (4, 5))
    return {"x": x, "v": v, "prev": prev, "coef": coef, "v_ref": v_ref, "v_old": v_old}


@pytest.mark.parametrize("form", ["gaussian", "flow_grpo"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 65537)], ids=str)
def test_forward_is_as_accurate_as_eager(shape: tuple[int, ...], dtype: torch.dtype, reduction: str, form: str) -> None:
    given = inputs(shape, dtype)
    got = sde_log_prob(**given, form=form, reduction=reduction)
    truth = eager(**given, form=form, reduction=reduction)
    by_torch = eager(**given, form=form, reduction=reduction, dtype=torch.float32)
    for value, true_value, eager_value in zip(got, truth, by_torch, strict=True):
        assert value is not None
        assert value.shape == (shape[0],)
        assert_as_accurate(value, true_value, eager_value)


def test_only_what_was_asked_for_is_returned() -> None:
    given = inputs((2, 6))
    full = sde_log_prob(**given)
    for missing in ("v_ref", "v_old"):
        some = sde_log_prob(**{**given, missing: None})
        assert_same_bits(some.log_prob, full.log_prob)
        assert (some.kl is None) == (missing == "v_ref")
        assert (some.log_ratio is None) == (missing == "v_old")


def test_row_21_gaussian_form_is_the_density_of_a_normal() -> None:
    given = inputs((4, 3, 50))
    x, v, prev, coef = (given[name] for name in ("x", "v", "prev", "coef"))
    mean = column(coef.a, x) * x.double() + column(coef.b, x) * v.double()
    density = torch.distributions.Normal(mean, column(coef.s, x)).log_prob(prev.double())
    for reduction, expected in (("mean", density.mean((1, 2))), ("sum", density.sum((1, 2)))):
        got = sde_log_prob(x, v, prev, coef, reduction=reduction).log_prob
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)


def test_row_3_sum_is_the_mean_times_d() -> None:
    given = inputs((2, 65536), gap=1e-3)
    mean, total = sde_log_prob(**given), sde_log_prob(**given, reduction="sum")
    for one, all_of_them in zip(mean, total, strict=True):
        torch.testing.assert_close(one * 65536, all_of_them, rtol=1e-6, atol=0)


def test_rows_4_and_5_kl_is_the_true_one() -> None:
    """flow_grpo divides by std_dev_t^2, without the step length: true KL = flow_grpo's / (-dt)."""
    given = inputs((3, 40))
    coef, index = given["coef"], steps(3)
    minus_dt = (SIGMAS[index] - SIGMAS[index + 1]).double()
    std_dev_t = coef.s.double() / minus_dt.sqrt()
    shift = column(coef.b, given["v"]) * (given["v"].double() - given["v_ref"].double())
    flow_grpo_kl = (shift**2).mean(1) / (2 * std_dev_t**2)
    for form in ("gaussian", "flow_grpo"):
        kl = sde_log_prob(**given, form=form).kl
        torch.testing.assert_close(kl.double(), flow_grpo_kl / minus_dt, rtol=1e-5, atol=0)


def test_row_12_cps_of_flow_grpo_differs_from_the_density_by_variance_and_constants() -> None:
    given = {**inputs((3, 40)), "coef": coefficients(3, "cps", 0.8)}
    gaussian, peers = (sde_log_prob(**given, form=form) for form in ("gaussian", "flow_grpo"))
    s = given["coef"].s.double()
    constants = -s.log() - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(gaussian.log_prob.double(), peers.log_prob.double() / (2 * s**2) + constants)
    torch.testing.assert_close(gaussian.log_ratio.double(), peers.log_ratio.double() / (2 * s**2))
    assert_same_bits(gaussian.kl, peers.kl)


def test_row_18_every_latent_layout_gives_one_value_per_sample() -> None:
    flat = inputs((2, 240))
    expected = sde_log_prob(**flat)
    for shape in ((2, 20, 12), (2, 4, 6, 10), (2, 3, 4, 4, 5)):
        shaped = {name: value if name == "coef" else value.reshape(shape) for name, value in flat.items()}
        for left, right in zip(sde_log_prob(**shaped), expected, strict=True):
            assert_same_bits(left, right)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_13_equal_velocities_give_exact_zeros(dtype: torch.dtype) -> None:
    given = inputs((3, 4, 9), dtype)
    out = sde_log_prob(**{**given, "v": given["v_old"], "v_ref": given["v_old"].clone()})
    assert out.log_ratio.tolist() == [0.0] * 3
    assert out.kl.tolist() == [0.0] * 3


def test_row_19_direct_log_ratio_has_a_thousandth_of_the_error_of_a_difference() -> None:
    given = inputs((9, 16384), gap=1e-4)
    truth = eager(**given).log_ratio
    direct = sde_log_prob(**given).log_ratio.double()
    new, old = (sde_log_prob(**{**given, "v": given[name]}).log_prob for name in ("v", "v_old"))
    error, difference_error = ((value.double() - truth).abs().max().item() for value in (direct, new - old))
    assert error <= 1e-10
    assert difference_error > 1e-8


def test_row_1_samples_do_not_leak_into_each_other() -> None:
    given = inputs((2, 64))
    given["v"] = given["v_old"].clone()
    given["v"][1] += 0.1
    given["v_ref"] = given["v_old"]
    out = sde_log_prob(**given)
    assert out.log_ratio[0] == 0
    assert out.kl[0] == 0
    assert out.kl[1] > 0


def test_guard_ratio_follows_from_log_ratio_and_kl() -> None:
    """GRPO-Guard: exp((log r + bias) s) = exp(mean(eps_old * dmu)), with bias = the KL to the old policy."""
    given = inputs((3, 500))
    x, coef, v, v_old = (given[name] for name in ("x", "coef", "v", "v_old"))
    out = sde_log_prob(x, v, given["prev"], coef, v_ref=v_old, v_old=v_old)
    mean_old = column(coef.a, x) * x.double() + column(coef.b, x) * v_old.double()
    noise = (given["prev"].double() - mean_old) / column(coef.s, x)
    shift = column(coef.b, x) * (v.double() - v_old.double())
    expected = (noise * shift).mean(1).exp()
    torch.testing.assert_close(((out.log_ratio + out.kl) * coef.s).exp().double(), expected, rtol=1e-6, atol=0)


def test_row_8_ode_samples_are_zero_with_zero_gradient() -> None:
    given = inputs((3, 8))
    given["coef"] = coefficients(3, noise_level=torch.tensor([0.0, 0.7, 0.0]))
    given["v"].requires_grad_(True)
    for form in ("gaussian", "flow_grpo"):
        given["v"].grad = None
        out = sde_log_prob(**given, form=form)
        for value in out:
            assert (value == 0).tolist() == [True, False, True]
        (out.log_prob + out.kl + out.log_ratio).sum().backward()
        assert (given["v"].grad == 0).all(1).tolist() == [True, False, True]


def test_row_6_a_bad_velocity_shows_in_its_sample_and_only_there() -> None:
    given = inputs((3, 8))
    given["v"][1, 2] = float("inf")
    for value in sde_log_prob(**given):
        assert value.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("length", [1, 37, 65536])
def test_batch_invariance_forward_and_backward(length: int) -> None:
    given = inputs((33, length))

    def op(index: Tensor) -> tuple[Tensor, ...]:
        some = {name: value[index] for name, value in given.items()}
        some["v"].requires_grad_(True)
        out = sde_log_prob(**some)
        (out.log_prob + out.kl + out.log_ratio).sum().backward()
        return *(value.detach() for value in out), some["v"].grad

    assert_batch_invariant(op)


@pytest.mark.parametrize("form", ["gaussian", "flow_grpo"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_is_as_accurate_as_eager(dtype: torch.dtype, reduction: str, form: str) -> None:
    given = inputs((3, 5, 7), dtype, gap=0.3)
    weights = randn((3, 3), 6)

    def gradient(function, leaf_dtype: torch.dtype, **extra: object) -> Tensor:
        leaf = given["v"].detach().to(leaf_dtype).requires_grad_(True)
        out = function(**{**given, "v": leaf}, form=form, reduction=reduction, **extra)
        sum((weight.to(value.dtype) * value).sum() for weight, value in zip(weights, out, strict=True)).backward()
        return leaf.grad

    got = gradient(sde_log_prob, dtype)
    truth = gradient(eager, torch.float64)
    by_torch = gradient(eager, torch.float32, dtype=torch.float32)
    assert got.shape == given["v"].shape
    assert_as_accurate(got, truth, by_torch.to(dtype))


def test_row_16_kl_has_a_gradient_and_the_reference_has_none() -> None:
    given = inputs((2, 12))
    given["v"].requires_grad_(True)
    sde_log_prob(**given).kl.sum().backward()
    assert given["v"].grad.abs().min().item() > 0
    given["v_ref"].requires_grad_(True)
    with pytest.raises(ValueError, match=r"^v_ref: .*v_ref\.detach\(\)"):
        sde_log_prob(**given)


def test_each_output_alone_takes_a_stride_0_gradient() -> None:
    given = inputs((3, 4, 5))
    for i in range(3):
        leaves = [given["v"].detach().clone().requires_grad_(True) for _ in range(2)]
        sde_log_prob(**{**given, "v": leaves[0]})[i].sum().backward()
        sde_log_prob(**{**given, "v": leaves[1]})[i].backward(torch.ones(3))
        assert_same_bits(leaves[0].grad, leaves[1].grad)
        assert leaves[0].grad.abs().max().item() > 0


def test_the_backward_keeps_nothing_but_its_inputs() -> None:
    given = inputs((3, 4, 50))
    given["v"].requires_grad_(True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        sde_log_prob(**given)
    latents = {tensor.data_ptr() for tensor in kept if tensor.numel() > 3}
    assert latents == {given[name].data_ptr() for name in ("x", "v", "prev", "v_ref")}


@pytest.mark.parametrize("form", ["gaussian", "flow_grpo"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradcheck(reduction: str, form: str) -> None:
    given = inputs((3, 2, 5), torch.float64, gap=0.3)
    given["coef"] = coefficients(3, noise_level=torch.tensor([0.7, 0.0, 0.3]))
    leaf = given.pop("v").requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda v: tuple(sde_log_prob(v=v, **given, form=form, reduction=reduction)), (leaf,)
    )


def test_non_contiguous_inputs_give_the_same_bits() -> None:
    given = inputs((3, 4, 5, 2))
    expected = sde_log_prob(**given)
    strided = {name: value if name == "coef" else scrambled(value) for name, value in given.items()}
    strided["v"].requires_grad_(True)
    got = sde_log_prob(**strided)
    for left, right in zip(got, expected, strict=True):
        assert_same_bits(left.detach(), right)
    got.log_prob.sum().backward()
    given["v"].requires_grad_(True)
    sde_log_prob(**given).log_prob.sum().backward()
    assert_same_bits(strided["v"].grad, given["v"].grad)


def test_empty_batch() -> None:
    given = inputs((0, 4, 3))
    given["v"].requires_grad_(True)
    out = sde_log_prob(**given)
    assert [value.shape for value in out] == [(0,)] * 3
    out.log_prob.sum().backward()
    assert given["v"].grad.shape == (0, 4, 3)


def op_arguments(full: bool, dtype: torch.dtype) -> tuple:
    given = inputs((3, 2, 5), dtype)
    coef = given["coef"]
    tensors = (given["x"], given["v"].requires_grad_(True), given["prev"], coef.a, coef.b, coef.s)
    return (*tensors, *((given["v_ref"], given["v_old"]) if full else (None, None)), "gaussian", "mean")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("full", [True, False])
def test_opcheck(full: bool, dtype: torch.dtype) -> None:
    torch.library.opcheck(OP.sde_log_prob.default, op_arguments(full, dtype))


def test_opcheck_backward() -> None:
    *tensors, v_ref, _, form, reduction = op_arguments(True, torch.float32)
    tensors[1] = tensors[1].detach()
    grads = (randn((3,), seed) for seed in (7, 8, 9))
    torch.library.opcheck(OP.sde_log_prob_backward.default, (*grads, *tensors, v_ref, form, reduction))


def test_compiles_without_a_graph_break() -> None:
    given = inputs((3, 2, 5))
    leaf = given.pop("v").requires_grad_(True)

    def op(v: Tensor) -> tuple[Tensor, ...]:
        return tuple(sde_log_prob(v=v, **given))

    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    grads = []
    for function in (compiled, op):
        leaf.grad = None
        out = function(leaf)
        sum(out).sum().backward()
        grads.append((*(value.detach() for value in out), leaf.grad))
    for left, right in zip(*grads, strict=True):
        assert_same_bits(left, right)


def test_repeats_bit_for_bit() -> None:
    given = inputs((3, 4099))
    first = sde_log_prob(**given)
    for _ in range(3):
        for left, right in zip(sde_log_prob(**given), first, strict=True):
            assert_same_bits(left, right)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"x": torch.zeros(3)}, "x"),
        ({"v": torch.zeros(3, 5)}, "v"),
        ({"prev": torch.zeros(3, 4, 1)}, "prev"),
        ({"prev": torch.zeros(3, 4, dtype=torch.uint8)}, "prev"),
        ({"v_ref": torch.zeros(1, 4)}, "v_ref"),
        ({"v_old": torch.zeros(3, 4, device="meta")}, "v_old"),
        ({"x": torch.zeros(3, 4).requires_grad_(True)}, "x"),
        ({"prev": torch.zeros(3, 4).requires_grad_(True)}, "prev"),
        ({"v_old": torch.zeros(3, 4).requires_grad_(True)}, "v_old"),
        ({"coef": coefficients(2)}, "coef"),
        ({"form": "laplace"}, "form"),
        ({"reduction": "none"}, "reduction"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, field: str) -> None:
    zeros = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=rf"^{field}: got"):
        sde_log_prob(**{"x": zeros, "v": zeros, "prev": zeros, "coef": coefficients(3), **arguments})
