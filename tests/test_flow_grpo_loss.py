"""flow_grpo_loss: the chain of ops that it replaces, fp64 autograd, and what it keeps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from util import (
    DTYPES,
    assert_as_accurate,
    assert_batch_invariant,
    assert_same_bits,
    coefficients,
    column,
    largest,
    randn,
    scrambled,
)

from flowgrpo_fast.ops import cfg_combine, flow_grpo_loss, policy_loss, sde_log_prob, sde_step
from flowgrpo_fast.ops._checks import rows_view

OP = torch.ops.flowgrpo_fast
SHAPES = ((3, 1), (2, 5, 3), (3, 4, 64), (2, 2, 3, 4, 8), (2, 4099))
# What may be given; "guided" and "rescaled" add a negative branch.
CASES = ("plain", "direct", "guided", "rescaled", "reference", "summed", "everything")


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict:
    """A step that v_old took, and velocities a little off it."""
    x, v_old = randn(shape, 1, dtype).to(torch.promote_types(dtype, torch.float32)), randn(shape, 2, dtype)
    coef = coefficients(shape[0])
    prev, old_log_prob = sde_step(x, v_old, coef, noise=randn(shape, 3))
    v, v_neg, v_ref = ((v_old.double() + 0.3 * randn(shape, seed, torch.float64)).to(dtype) for seed in (4, 5, 6))
    adv = randn(shape[:1], 7)
    return dict(
        x=x, v=v, prev=prev, coef=coef, adv=adv, v_neg=v_neg, v_ref=v_ref, v_old=v_old, old_log_prob=old_log_prob
    )


def options(given: dict, case: str) -> dict:
    chosen: dict = {"clip_low": 0.2, "clip_high": 0.28}
    if case in ("direct", "summed", "everything"):
        chosen["v_old"] = given["v_old"]
    else:
        chosen["old_log_prob"] = given["old_log_prob"]
    if case in ("guided", "rescaled", "everything"):
        chosen |= {"v_neg": given["v_neg"], "scale": 1.0 + given["adv"].abs(), "rescale": case != "guided"}
    if case in ("reference", "summed", "everything"):
        chosen |= {"v_ref": given["v_ref"], "kl_weight": 0.04}
    if case == "summed":
        chosen |= {"form": "flow_grpo", "reduction": "sum"}
    if case == "everything":
        batch = len(given["adv"])
        chosen |= {"step_weight": 0.5 + torch.arange(batch), "mask": torch.arange(batch) != 1, "denominator": 5.0}
    return chosen


def run(function, given: dict, chosen: dict, dtype: torch.dtype | None = None) -> tuple[Tensor, dict, list[Tensor]]:
    """Loss, metrics and the gradients of v (and v_neg)."""
    names = [name for name in ("v", "v_neg") if name == "v" or name in chosen]
    leaves = {
        name: (given[name] if dtype is None else given[name].to(dtype)).detach().clone().requires_grad_(True)
        for name in names
    }
    rest = {name: value for name, value in chosen.items() if name not in leaves}
    loss, metrics = function(x=given["x"], prev=given["prev"], coef=given["coef"], adv=given["adv"], **leaves, **rest)
    loss.backward()
    return loss.detach(), metrics, [leaf.grad for leaf in leaves.values()]


def chain(
    v: Tensor, x: Tensor, prev: Tensor, coef, adv: Tensor, v_neg=None, scale=None, rescale=False, old_log_prob=None, v_old=None,
    v_ref=None, kl_weight=0.0, clip_low=1e-4, clip_high=1e-4, step_weight=None, mask=None, denominator=None, **named: str,
) -> tuple[Tensor, dict]:  # fmt: skip
    """The three ops that it replaces. named: form, reduction."""
    if v_neg is not None:
        v = cfg_combine(v, v_neg, scale, rescale)
    out = sde_log_prob(x, v, prev, coef, v_ref=v_ref, v_old=v_old, **named)
    loss, metrics = policy_loss(
        None if v_old is not None else out.log_prob, old_log_prob, adv, clip_low, clip_high, log_ratio=out.log_ratio,
        step_weight=step_weight, mask=mask, denominator=denominator,
    )  # fmt: skip
    if v_ref is not None:
        kept = torch.ones_like(adv, dtype=torch.bool) if mask is None else mask
        kl = torch.where(kept, out.kl, 0.0).double().sum() / (kept.sum() if denominator is None else denominator)
        loss = loss + kl_weight * kl.float()
    return loss, metrics


def eager(
    v: Tensor, x: Tensor, prev: Tensor, coef, adv: Tensor, v_neg=None, scale=None, rescale=False, old_log_prob=None, v_old=None,
    v_ref=None, kl_weight=0.0, clip_low=1e-4, clip_high=1e-4, step_weight=None, mask=None, denominator=None,
    form="gaussian", reduction="mean",
) -> tuple[Tensor, dict]:  # fmt: skip
    """As the peers write it, in the dtype of v throughout."""
    dtype, dims = v.dtype, tuple(range(1, v.dim()))
    a, b, s = (column(value, v).to(dtype) for value in (coef.a, coef.b, coef.s))
    x, prev, adv = x.to(dtype), prev.to(dtype), adv.to(dtype)
    if v_neg is not None:
        g = column(scale, v).to(dtype)
        combined = v_neg.to(dtype) + g * (v - v_neg.to(dtype))
        if rescale:
            combined = combined * (v.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))
        v = combined

    def reduce(values: Tensor) -> Tensor:
        return values.mean(dims) if reduction == "mean" else values.sum(dims)

    def log_prob(v: Tensor) -> Tensor:
        square = (prev - a * x - b * v) ** 2
        if form == "flow_grpo":
            return reduce(-square)
        return reduce(-square / (2 * s**2) - s.log() - math.log(math.sqrt(2 * math.pi)))

    old = old_log_prob.to(dtype) if v_old is None else log_prob(v_old.to(dtype))
    ratio = (log_prob(v) - old).exp()
    entry = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - clip_low, 1 + clip_high))
    if step_weight is not None:
        entry = entry * step_weight.to(dtype)
    kept = torch.ones_like(adv, dtype=torch.bool) if mask is None else mask
    total = kept.sum() if denominator is None else denominator
    loss = entry[kept].sum() / total
    if v_ref is not None:
        kl = reduce((b * (v - v_ref.to(dtype))) ** 2 / (2 * s**2))
        loss = loss + kl_weight * kl[kept].sum() / total
    return loss, {}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradients_are_as_accurate_as_eager(shape: tuple[int, ...], dtype: torch.dtype, case: str) -> None:
    given = inputs(shape, dtype)
    chosen = options(given, case)
    if "v_neg" in chosen and dtype != torch.float32:
        # The op rounds the combined velocity to the dtype of v, as the rollout stores it; the fp64 truth does not.
        loss, _, grads = run(flow_grpo_loss, given, chosen)
        by_chain = run(chain, given, chosen)
        torch.testing.assert_close(loss, by_chain[0], rtol=1e-6, atol=1e-7)
        for left, right in zip(grads, by_chain[2], strict=True):
            # The chain rounds the gradient of the combined velocity to the dtype on the way.
            limits = torch.finfo(dtype)
            bound = 4 * limits.eps * largest(right.double()).clamp_min(limits.smallest_normal)
            error = largest(left.double() - right.double())
            assert bool((error <= bound).all()), f"errors {error.tolist()}, bounds {bound.tolist()}"
        return
    loss, _, grads = run(flow_grpo_loss, given, chosen)
    true_loss, _, true_grads = run(eager, given, chosen, torch.float64)
    eager_loss, _, eager_grads = run(eager, given, chosen, torch.float32)
    assert_as_accurate(loss, true_loss, eager_loss)
    for got, true, by_eager in zip(grads, true_grads, eager_grads, strict=True):
        assert got.dtype == dtype
        assert_as_accurate(got, true, by_eager.to(dtype))


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_chain_of_ops(case: str) -> None:
    given = inputs((3, 6, 64))
    chosen = options(given, case)
    (loss, metrics, grads), (chain_loss, chain_metrics, chain_grads) = (
        run(flow_grpo_loss, given, chosen),
        run(chain, given, chosen),
    )
    assert_same_bits(loss, chain_loss)
    for name, value in chain_metrics.items():
        assert_same_bits(metrics[name], value)
    for left, right in zip(grads, chain_grads, strict=True):
        torch.testing.assert_close(left, right, rtol=2e-6, atol=1e-9)
    assert set(metrics) - set(chain_metrics) == {"log_prob"} | ({"kl"} if "v_ref" in chosen else set())


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_13_on_policy_the_ratio_is_exactly_1_through_the_guidance(dtype: torch.dtype, rescale: bool) -> None:
    """The rollout combines with `cfg_combine` and steps with `sde_step`; the fused op sees both branches and must find the same bits."""
    for width in (64, 6):  # 64: inside the kernel; 6: not a power of two, combined first
        pos, neg = randn((3, 5, width), 1, dtype), randn((3, 5, width), 2, dtype)
        x, coef = randn((3, 5, width), 3), coefficients(3)
        prev, old = sde_step(x, cfg_combine(pos, neg, 4.0, rescale), coef, noise=randn((3, 5, width), 4))
        _, metrics = flow_grpo_loss(
            pos, x, prev, coef, torch.ones(3), v_neg=neg, scale=4.0, rescale=rescale, old_log_prob=old
        )
        assert metrics["ratio_max_deviation"] == 0
        assert metrics["ratio_mean"] == 1
        assert_same_bits(metrics["log_prob"], old)


def test_batch_invariance_of_log_probs_and_gradients() -> None:
    given = inputs((33, 2, 64))

    def op(index: Tensor) -> tuple[Tensor, ...]:
        some = {name: value[index] for name, value in given.items()}
        chosen = {**options(some, "rescaled"), "denominator": 33.0}
        _, metrics, grads = run(flow_grpo_loss, some, chosen)
        return metrics["log_prob"], *grads

    assert_batch_invariant(op)


def test_non_contiguous_inputs_and_a_stride_0_gradient() -> None:
    given = inputs((3, 4, 5, 8))
    chosen = options(given, "everything")
    expected = run(flow_grpo_loss, given, chosen)
    strided = {
        name: scrambled(value) if isinstance(value, Tensor) and value.dim() > 1 else value
        for name, value in given.items()
    }
    got = run(flow_grpo_loss, strided, options(strided, "everything"))
    assert_same_bits(got[0], expected[0])
    for left, right in zip(got[2], expected[2], strict=True):
        assert_same_bits(left, right)
    leaf = given["v"].clone().requires_grad_(True)
    flow_grpo_loss(leaf, given["x"], given["prev"], given["coef"], given["adv"], v_old=given["v_old"])[0].expand(
        3
    ).sum().backward()
    once = given["v"].clone().requires_grad_(True)
    flow_grpo_loss(once, given["x"], given["prev"], given["coef"], given["adv"], v_old=given["v_old"])[0].backward()
    torch.testing.assert_close(leaf.grad, 3 * once.grad)


def test_rows_of_a_trajectory_are_read_where_they_lie() -> None:
    """Slots of [B, W + 1, ...] and the first tokens of a longer output: no copy is needed, and the result is the same."""
    given = inputs((3, 4, 64))
    path = torch.stack((given["x"], given["prev"]), 1)
    longer = {name: torch.cat((given[name], torch.full((3, 2, 64), float("nan"))), 1) for name in ("v", "v_neg")}

    def loss(v: Tensor, v_neg: Tensor, **rest) -> tuple[Tensor, dict]:
        for view in (rest["x"], rest["prev"], v[:, :4]):
            assert not view.is_contiguous()
            assert rows_view(view).data_ptr() == view.data_ptr()
        return flow_grpo_loss(v[:, :4], v_neg=v_neg[:, :4], **rest)

    expected = run(flow_grpo_loss, given, options(given, "everything"))
    got = run(loss, {**given, **longer, "x": path[:, 0], "prev": path[:, 1]}, options(given, "everything"))
    assert_same_bits(got[0], expected[0])
    for left, right in zip(got[2], expected[2], strict=True):
        assert_same_bits(left, torch.nn.functional.pad(right, (0, 0, 0, 2)))


def test_row_39_masked_and_empty() -> None:
    given = inputs((3, 8))
    given["v"][1] = float("nan")
    mask = torch.tensor([True, False, True])
    loss, metrics, (grad,) = run(flow_grpo_loss, given, {**options(given, "plain"), "mask": mask})
    assert loss.isfinite()
    assert metrics["kept"] == 2
    assert grad[0].abs().max() > 0
    nothing = run(flow_grpo_loss, given, {**options(given, "plain"), "mask": torch.zeros(3, dtype=torch.bool)})
    assert nothing[0] == 0
    empty = inputs((0, 4))
    loss, metrics, (grad,) = run(flow_grpo_loss, empty, options(empty, "plain"))
    assert loss == 0
    assert grad.shape == (0, 4)


def test_the_backward_keeps_nothing_but_its_inputs() -> None:
    given = inputs((3, 4, 64))
    chosen = options(given, "everything")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        flow_grpo_loss(
            given["v"].requires_grad_(True), given["x"], given["prev"], given["coef"], given["adv"], **chosen
        )
    latents = {tensor.data_ptr() for tensor in kept if tensor.numel() > 3}
    assert latents == {given[name].data_ptr() for name in ("x", "v", "prev", "v_neg", "v_ref")}


def test_gradcheck() -> None:
    given = inputs((3, 2, 4), torch.float64)
    chosen = options(given, "everything")
    v, v_neg = (given[name].requires_grad_(True) for name in ("v", "v_neg"))
    rest = {name: value for name, value in chosen.items() if name != "v_neg"}

    def loss(v: Tensor, v_neg: Tensor) -> Tensor:
        return flow_grpo_loss(v, given["x"], given["prev"], given["coef"], given["adv"], v_neg=v_neg, **rest)[0]

    assert torch.autograd.gradcheck(loss, (v, v_neg))


def test_opcheck() -> None:
    given = inputs((3, 2, 8))
    coef = given["coef"]
    common = (given["x"], given["prev"], coef.a, coef.b, coef.s)
    tail = (given["v_ref"], 0.1, given["adv"], None, None, None, 0.1, 0.1, "gaussian", "mean")
    v, neg = given["v"].requires_grad_(True), given["v_neg"].requires_grad_(True)
    torch.library.opcheck(
        OP.flow_grpo_loss.default, (v, neg, torch.full((3,), 2.0), True, *common, None, given["v_old"], *tail)
    )
    torch.library.opcheck(
        OP.flow_grpo_loss.default, (v, None, None, False, *common, given["old_log_prob"], None, *tail)
    )


def test_compiles_without_a_graph_break_and_repeats_bit_for_bit() -> None:
    given = inputs((3, 2, 8))
    chosen = options(given, "everything")
    compiled = torch.compile(flow_grpo_loss, fullgraph=True, backend="aot_eager")
    first = run(flow_grpo_loss, given, chosen)
    for function in (flow_grpo_loss, compiled):
        loss, _, grads = run(function, given, chosen)
        assert_same_bits(loss, first[0])
        for left, right in zip(grads, first[2], strict=True):
            assert_same_bits(left, right)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"v": torch.zeros(3)}, "v"),
        ({"x": torch.zeros(3, 5)}, "x"),
        ({"prev": torch.zeros(3, 4, 1)}, "prev"),
        ({"prev": torch.zeros(3, 4).requires_grad_(True)}, "prev"),
        ({"v_neg": torch.zeros(3, 4)}, "v_neg, scale"),
        ({"scale": 3.0}, "v_neg, scale"),
        ({"v_neg": torch.zeros(3, 4, dtype=torch.bfloat16), "scale": 3.0}, "v_neg"),
        ({"v_neg": torch.zeros(3, 4), "scale": torch.zeros(2)}, "scale"),
        ({"old_log_prob": None}, "old_log_prob, v_old"),
        ({"v_old": torch.zeros(3, 4)}, "old_log_prob, v_old"),
        ({"old_log_prob": torch.zeros(4)}, "old_log_prob"),
        ({"adv": torch.zeros(3, 1)}, "adv"),
        ({"kl_weight": 0.1}, "v_ref"),
        ({"kl_weight": -1.0}, "kl_weight"),
        ({"clip_low": -1.0}, "clip_low"),
        ({"step_weight": torch.zeros(4)}, "step_weight"),
        ({"mask": torch.ones(3)}, "mask"),
        ({"denominator": 0.0}, "denominator"),
        ({"coef": coefficients(2)}, "coef"),
        ({"form": "laplace"}, "form"),
        ({"reduction": "none"}, "reduction"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, field: str) -> None:
    zeros = torch.zeros(3, 4)
    good = {
        "v": zeros,
        "x": zeros,
        "prev": zeros,
        "coef": coefficients(3),
        "adv": torch.zeros(3),
        "old_log_prob": torch.zeros(3),
    }
    with pytest.raises(ValueError, match=rf"^{field}: got"):
        flow_grpo_loss(**{**good, **arguments})
