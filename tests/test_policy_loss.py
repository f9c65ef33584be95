"""policy_loss: against PPO's surrogate in fp64 with autograd, clip ranges that fp32 ratios cannot hold, masks and metrics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from util import assert_as_accurate, assert_same_bits, randn, scrambled

from flowgrpo_fast.ops import policy_loss

OP = torch.ops.flowgrpo_fast
NAN = float("nan")


def eager(
    log_ratio: Tensor,
    adv: Tensor,
    clip_low: float,
    clip_high: float,
    step_weight: Tensor | None = None,
    mask: Tensor | None = None,
    denominator: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The surrogate as every trainer writes it; in fp64 it is the truth (fp64 holds the clip range on 1 + r1)."""
    ratio = log_ratio.to(dtype).exp()
    adv = adv.to(dtype) if adv.dim() == log_ratio.dim() else adv.to(dtype)[:, None]
    entry = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - clip_low, 1 + clip_high))
    if step_weight is not None:
        entry = entry * step_weight.to(dtype)
    kept = torch.ones_like(entry, dtype=torch.bool)
    if mask is not None:
        kept = mask.expand_as(entry) if mask.dim() == entry.dim() else mask[:, None].expand_as(entry)
    return entry[kept].sum() / (kept.sum() if denominator is None else denominator)


def inputs(shape: tuple[int, ...], scale: float = 0.3) -> tuple[Tensor, Tensor]:
    return scale * randn(shape, 1), randn(shape[:1], 2)


def loss_and_gradient(log_ratio: Tensor, adv: Tensor, **named: object) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    leaf = log_ratio.clone().requires_grad_(True)
    loss, metrics = policy_loss(None, None, adv, log_ratio=leaf, **named)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, metrics


SHAPES = ((1,), (7,), (33,), (1, 1), (5, 3), (16, 9))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward_are_as_accurate_as_eager(shape: tuple[int, ...], masked: bool, weighted: bool) -> None:
    log_ratio, adv = inputs(shape)
    named = {
        "step_weight": randn(shape[-1:], 3).abs() if weighted else None,
        "mask": (torch.arange(math.prod(shape)).reshape(shape) % 3 != 1) if masked else None,
        "denominator": 11.0 if weighted and masked else None,
    }
    loss, grad, _ = loss_and_gradient(log_ratio, adv, clip_low=0.2, clip_high=0.28, **named)
    results = []
    for dtype in (torch.float64, torch.float32):
        leaf = log_ratio.to(dtype).requires_grad_(True)
        expected = eager(leaf, adv, 0.2, 0.28, **named, dtype=dtype)
        expected.backward()
        results.append((expected.detach(), leaf.grad))
    (true_loss, true_grad), (eager_loss, eager_grad) = results
    assert loss.shape == ()
    assert_as_accurate(loss, true_loss, eager_loss)
    assert_as_accurate(grad, true_grad, eager_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_log_probs_and_their_ratio_are_two_ways_in(dtype: torch.dtype) -> None:
    log_prob, old, adv = randn((5, 3), 1, dtype), randn((5, 3), 4, dtype), randn((5,), 2)
    log_prob.requires_grad_(True)
    loss, _ = policy_loss(log_prob, old, adv, 0.2, 0.2)
    loss.backward()
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    by_ratio, grad, _ = loss_and_gradient(
        log_prob.detach().to(compute) - old.to(compute), adv, clip_low=0.2, clip_high=0.2
    )
    assert loss.dtype == compute
    assert_same_bits(loss.detach(), by_ratio)
    assert log_prob.grad is not None
    assert_same_bits(log_prob.grad, grad.to(dtype))


def test_on_policy_the_gradient_is_minus_a_over_n_bit_for_bit() -> None:
    log_prob, adv, weight = randn((8, 2), 1).requires_grad_(True), randn((8,), 2), torch.tensor([0.5, 2.0])
    loss, metrics = policy_loss(log_prob, log_prob.detach(), adv, step_weight=weight)
    loss.backward()
    assert_same_bits(log_prob.grad, -adv[:, None] * weight / 16)
    assert metrics["ratio_max_deviation"] == 0
    assert metrics["ratio_mean"] == 1
    assert metrics["approx_kl"] == 0


@pytest.mark.parametrize("clip", [2e-6, 1e-5, 1e-4])
def test_clip_holds_its_digits_where_a_clip_on_the_ratio_loses_them(clip: float) -> None:
    """Ratios 1 % inside and outside of the range, on both sides. fp32 1 + 2e-6 is a multiple of 1.2e-7: 6 % of the range."""
    log_ratio = torch.log1p(torch.tensor([0.99, 1.01, -0.99, -1.01], dtype=torch.float64) * clip).float()
    for sign, active in ((1.0, [False, True, False, False]), (-1.0, [False, False, False, True])):
        adv = torch.full((4,), sign)
        _, grad, metrics = loss_and_gradient(log_ratio, adv, clip_low=clip, clip_high=clip)
        assert (grad == 0).tolist() == active
        assert metrics["clip_fraction_high"].item() == (0.25 if sign > 0 else 0)
        assert metrics["clip_fraction_low"].item() == (0.25 if sign < 0 else 0)
    assert metrics["ratio_max_deviation"].item() == pytest.approx(1.01 * clip, rel=1e-5)
    if clip == 2e-6:
        ratio = log_ratio.exp()
        assert (ratio != ratio.clamp(1 - clip, 1 + clip)).tolist() != [False, True, False, True]


def test_clip_bounds_are_separate() -> None:
    log_ratio = torch.tensor([0.1, 0.3, -0.1, -0.3])
    _, grad, _ = loss_and_gradient(log_ratio, torch.ones(4), clip_low=0.01, clip_high=0.2)
    assert (grad == 0).tolist() == [False, True, False, False]
    _, grad, _ = loss_and_gradient(log_ratio, -torch.ones(4), clip_low=0.2, clip_high=0.01)
    assert (grad == 0).tolist() == [False, False, False, True]


def test_log_ratio_is_bounded_before_the_exponential() -> None:
    log_ratio, adv = torch.tensor([200.0, -200.0, 10.0, 0.0]), torch.tensor([-1.0, 1.0, -1.0, 1.0])
    loss, grad, metrics = loss_and_gradient(log_ratio, adv, clip_low=0.2, clip_high=0.2)
    assert loss.item() == pytest.approx((2 * math.exp(10) - math.exp(-10) - 1) / 4, rel=1e-6)
    assert grad.tolist() == pytest.approx([0, 0, math.exp(10) / 4, -0.25], rel=1e-6)
    assert metrics["ratio_max_deviation"].item() == pytest.approx(math.expm1(10), rel=1e-6)


def test_row_39_masked_entries_never_contribute() -> None:
    log_ratio, adv = inputs((6, 2))
    mask = torch.tensor([True, False, True, True, False, True])
    expected, expected_grad, expected_metrics = loss_and_gradient(log_ratio[mask], adv[mask])
    log_ratio[~mask], adv[~mask] = NAN, float("inf")
    weight = torch.ones(6, 2)
    weight[~mask] = NAN
    loss, grad, metrics = loss_and_gradient(log_ratio, adv, mask=mask, step_weight=weight)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # another length folds in another order
    assert_same_bits(grad[mask], expected_grad)
    assert grad[~mask].tolist() == [[0.0, 0.0]] * 2
    for name in ("ratio_max_deviation", "clip_fraction_low", "clip_fraction_high", "kept"):
        assert_same_bits(metrics[name], expected_metrics[name])


@pytest.mark.parametrize("denominator", [None, 7.0, torch.tensor(0.0)])
def test_row_39_nothing_kept_gives_zero_loss_and_zero_gradient(denominator: float | Tensor | None) -> None:
    log_ratio, adv = torch.full((3, 2), NAN), torch.full((3,), NAN)
    mask = torch.zeros(3, 2, dtype=torch.bool)
    loss, grad, metrics = loss_and_gradient(log_ratio, adv, mask=mask, denominator=denominator)
    assert loss.item() == 0
    assert grad.abs().sum().item() == 0
    assert [metric.item() for metric in metrics.values()] == [0.0] * 7


def test_a_nan_that_is_kept_shows() -> None:
    loss, grad, _ = loss_and_gradient(torch.tensor([0.0, NAN]), torch.ones(2))
    assert loss.isnan()
    assert grad.isnan().tolist() == [False, True]


def test_denominator_makes_the_mean_over_all_ranks() -> None:
    log_ratio, adv = inputs((10, 2))
    _, whole, _ = loss_and_gradient(log_ratio, adv)
    parts = [
        loss_and_gradient(log_ratio[part], adv[part], denominator=count)[1]
        for part, count in ((slice(0, 3), 20), (slice(3, 10), torch.tensor(20.0)))
    ]
    assert_same_bits(torch.cat(parts), whole)


def test_shapes_of_advantages_masks_and_weights() -> None:
    log_ratio, adv = inputs((4, 3))
    full = adv[:, None].expand(4, 3)
    rows = torch.tensor([True, False, True, True])
    weight = torch.tensor([0.5, 1.0, 2.0])
    expected = loss_and_gradient(log_ratio, adv, mask=rows, step_weight=weight)
    for named in (
        {"adv": full},
        {"mask": rows[:, None].expand(4, 3)},
        {"step_weight": weight.expand(4, 3)},
    ):
        got = loss_and_gradient(log_ratio, **{"adv": adv, "mask": rows, "step_weight": weight, **named})
        assert_same_bits(got[0], expected[0])
        assert_same_bits(got[1], expected[1])
    flat = loss_and_gradient(
        log_ratio.flatten(),
        full.flatten(),
        mask=rows.repeat_interleave(3),
        step_weight=weight.repeat(4),
    )
    assert_same_bits(flat[1], expected[1].flatten())


def test_row_17_no_shape_blows_up_by_broadcasting() -> None:
    leaf = torch.zeros(3).requires_grad_(True)
    loss, metrics = policy_loss(leaf, torch.zeros(3), torch.ones(3))
    assert loss.shape == ()
    assert metrics["kept"] == 3
    with pytest.raises(ValueError, match=r"^old_log_prob: got torch.float32 \[3, 1\]"):
        policy_loss(leaf, torch.zeros(3, 1), torch.ones(3))


def test_metrics_are_what_they_say() -> None:
    log_ratio = torch.tensor([[0.3, -0.3], [0.05, -0.4], [0.0, 5.0]])
    adv = torch.tensor([1.0, -2.0, 3.0])
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    _, _, metrics = loss_and_gradient(log_ratio, adv, clip_low=0.2, clip_high=0.2, mask=mask)
    kept = log_ratio[mask].double()
    expected = {
        "ratio_mean": kept.exp().mean().item(),
        "ratio_max_deviation": math.exp(0.3) - 1,
        "clip_fraction_low": 1 / 5,  # log ratio -0.4 with A < 0
        "clip_fraction_high": 1 / 5,  # log ratio 0.3 with A > 0
        "approx_kl": (kept.exp() - 1 - kept).mean().item(),
        "advantage_mean": (1 + 1 - 2 - 2 + 3) / 5,
        "kept": 5.0,
    }
    assert list(metrics) == list(expected)
    for name, value in metrics.items():
        assert value.shape == ()
        assert value.dtype == torch.float32
        assert not value.requires_grad
        assert value.item() == pytest.approx(expected[name], rel=1e-6), name


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_empty_batch(shape: tuple[int, ...]) -> None:
    loss, grad, metrics = loss_and_gradient(torch.zeros(shape), torch.zeros(0))
    assert loss.item() == 0
    assert grad.shape == shape
    assert metrics["kept"] == 0


def test_non_contiguous_inputs_and_a_stride_0_gradient() -> None:
    log_ratio, adv = inputs((6, 4))
    expected = loss_and_gradient(log_ratio, adv)
    leaf = log_ratio.clone().requires_grad_(True)
    strided, _ = policy_loss(None, None, scrambled(adv), log_ratio=scrambled(leaf))
    strided.expand(3).sum().backward()
    assert_same_bits(strided.detach(), expected[0])
    torch.testing.assert_close(leaf.grad, 3 * expected[1])


def test_gradcheck() -> None:
    log_ratio = 0.3 * randn((4, 3), 1, torch.float64)
    adv, weight = randn((4,), 2, torch.float64), randn((3,), 3, torch.float64).abs()
    mask = torch.tensor([True, True, False, True])

    def loss(leaf: Tensor) -> Tensor:
        return policy_loss(None, None, adv, 0.2, 0.2, log_ratio=leaf, step_weight=weight, mask=mask)[0]

    assert torch.autograd.gradcheck(loss, (log_ratio.requires_grad_(True),))


def test_opcheck() -> None:
    log_ratio, adv = inputs((4, 3))
    weight, mask, total = randn((3,), 3), torch.tensor([True, False, True, True]), torch.tensor(9.0)
    log_ratio.requires_grad_(True)
    torch.library.opcheck(OP.policy_loss.default, (log_ratio, adv, weight, mask, total, 0.1, 0.2))
    torch.library.opcheck(OP.policy_loss.default, (log_ratio[:, 0], adv, None, None, None, 0.1, 0.2))
    torch.library.opcheck(OP.policy_loss_backward.default, (log_ratio.detach(), torch.tensor(2.0)))


def test_compiles_without_a_graph_break_and_repeats_bit_for_bit() -> None:
    log_prob, adv = randn((5, 3), 1).requires_grad_(True), randn((5,), 2)

    def op(log_prob: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_loss(log_prob, log_prob.detach() - 1e-5, adv, denominator=12.0)

    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    results = []
    for function in (op, op, compiled):
        log_prob.grad = None
        loss, metrics = function(log_prob)
        loss.backward()
        results.append((loss.detach(), log_prob.grad, *metrics.values()))
    for other in results[1:]:
        for left, right in zip(other, results[0], strict=True):
            assert_same_bits(left, right)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"log_prob": None}, "log_prob, old_log_prob"),
        ({"log_prob": torch.zeros(4, 3, 1), "old_log_prob": torch.zeros(4, 3, 1)}, "log_prob"),
        ({"log_prob": torch.zeros(4, 3, dtype=torch.int64)}, "log_prob"),
        ({"old_log_prob": torch.zeros(4)}, "old_log_prob"),
        ({"old_log_prob": torch.zeros(4, 3).requires_grad_(True)}, "old_log_prob"),
        ({"old_log_prob": torch.zeros(4, 3, device="meta")}, "old_log_prob"),
        ({"adv": torch.zeros(3)}, "adv"),
        ({"adv": torch.zeros(4).requires_grad_(True)}, "adv"),
        ({"adv": torch.zeros(4, dtype=torch.int64)}, "adv"),
        ({"clip_low": -1e-4}, "clip_low"),
        ({"clip_high": NAN}, "clip_high"),
        ({"step_weight": torch.zeros(4)}, "step_weight"),
        ({"mask": torch.ones(4)}, "mask"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, "mask"),
        ({"denominator": 0.0}, "denominator"),
        ({"denominator": torch.ones(1)}, "denominator"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, field: str) -> None:
    good = {"log_prob": torch.zeros(4, 3), "old_log_prob": torch.zeros(4, 3), "adv": torch.zeros(4)}
    with pytest.raises(ValueError, match=rf"^{field}: got"):
        policy_loss(**{**good, **arguments})
