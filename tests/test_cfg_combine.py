"""cfg_combine: against diffusers' formula, forward and backward, with and without the norm rescale."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from util import DTYPES, assert_as_accurate, assert_batch_invariant, assert_same_bits, column, randn, scrambled

from flowgrpo_fast.ops import cfg_combine, use_backend

OP = torch.ops.flowgrpo_fast
SHAPES = ((3, 1), (2, 5), (2, 6, 3), (3, 4, 64), (2, 3, 4, 5), (1, 33, 7))


def diffusers_formula(pos: Tensor, neg: Tensor, scale: Tensor, rescale: bool) -> Tensor:
    """QwenImagePipeline.__call__, line for line."""
    combined = neg + scale * (pos - neg)
    if rescale:
        cond_norm = torch.norm(pos, dim=-1, keepdim=True)
        noise_norm = torch.norm(combined, dim=-1, keepdim=True)
        combined = combined * (cond_norm / noise_norm)
    return combined


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward_are_as_accurate_as_eager(
    shape: tuple[int, ...], dtype: torch.dtype, rescale: bool
) -> None:
    pos, neg = randn(shape, 1, dtype), randn(shape, 2, dtype)
    scale, upstream = 1.0 + randn(shape[:1], 3).abs() * 3, randn(shape, 4, dtype)

    def run(function, leaf_dtype: torch.dtype, scale: Tensor) -> tuple[Tensor, ...]:
        leaves = [value.detach().to(leaf_dtype).requires_grad_(True) for value in (pos, neg)]
        out = function(*leaves, scale, rescale)
        out.backward(upstream.to(out.dtype))
        return out.detach(), *(leaf.grad for leaf in leaves)

    got = run(cfg_combine, dtype, scale)
    truth = run(diffusers_formula, torch.float64, column(scale, pos))
    eager = run(diffusers_formula, torch.float32, column(scale, pos).float())
    for value, true_value, eager_value in zip(got, truth, eager, strict=True):
        assert value.shape == shape
        assert_as_accurate(value, true_value, eager_value.to(dtype))


def test_a_number_is_the_same_scale_for_every_sample() -> None:
    pos, neg = randn((3, 4, 5), 1), randn((3, 4, 5), 2)
    assert_same_bits(cfg_combine(pos, neg, 4.5), cfg_combine(pos, neg, torch.full((3,), 4.5)))
    assert_same_bits(cfg_combine(pos, neg, torch.tensor([4.5, 1.0, 0.0]))[0], cfg_combine(pos, neg, 4.5)[0])


def test_scale_0_is_the_negative_prompt_and_equal_inputs_are_kept() -> None:
    pos, neg = randn((3, 4, 5), 1), randn((3, 4, 5), 2)
    assert_same_bits(cfg_combine(pos, neg, 0.0), neg)
    assert_same_bits(cfg_combine(pos, pos.clone(), 7.0), pos)


def test_rescale_restores_the_norm_of_each_token() -> None:
    pos, neg = randn((2, 6, 16), 1), randn((2, 6, 16), 2)
    out = cfg_combine(pos, neg, 4.0, rescale=True)
    torch.testing.assert_close(out.norm(dim=-1), pos.norm(dim=-1))


def test_a_combined_token_of_zeros_stays_zero_with_zero_gradient() -> None:
    pos, neg = randn((1, 3, 4), 1), randn((1, 3, 4), 2)
    neg[0, 1] = pos[0, 1] * 2  # scale 2: neg + 2 (pos - neg) = 0
    pos.requires_grad_(True)
    neg.requires_grad_(True)
    out = cfg_combine(pos, neg, 2.0, rescale=True)
    assert out[0, 1].tolist() == [0.0] * 4
    out.sum().backward()
    for leaf in (pos, neg):
        assert bool(leaf.grad.isfinite().all())
        assert leaf.grad[0, 1].tolist() == [0.0] * 4
        assert leaf.grad[0, 0].abs().min().item() > 0


def test_a_positive_token_of_zeros_has_a_finite_gradient() -> None:
    pos, neg = torch.zeros(1, 2, 4).requires_grad_(True), randn((1, 2, 4), 2).requires_grad_(True)
    out = cfg_combine(pos, neg, 3.0, rescale=True)
    assert out.abs().max().item() == 0
    out.sum().backward()
    assert bool(pos.grad.isfinite().all())
    assert bool(neg.grad.isfinite().all())


def test_row_6_half_precision_norms_do_not_overflow() -> None:
    pos, neg = torch.full((1, 2, 64), 3e4, dtype=torch.float16), torch.full((1, 2, 64), 2e4, dtype=torch.float16)
    assert_same_bits(cfg_combine(pos, neg, 1.5, rescale=True), pos)


@pytest.mark.parametrize(("tokens", "length"), [(3, 1), (3, 37), (1, 1024)])
def test_batch_invariance_forward_and_backward(tokens: int, length: int) -> None:
    pos, neg = randn((33, tokens, length), 1), randn((33, tokens, length), 2)
    scale = 1.0 + torch.arange(33) / 8

    def op(index: Tensor) -> tuple[Tensor, ...]:
        leaves = [value[index].requires_grad_(True) for value in (pos, neg)]
        out = cfg_combine(*leaves, scale[index], rescale=True)
        out.backward(out.detach() + 1)
        return out.detach(), *(leaf.grad for leaf in leaves)

    assert_batch_invariant(op)


def test_wider_tokens_than_the_kernels_hold_are_said_once(op_backend: str) -> None:
    """The reference rescales them: as exact, and announced."""
    pos, neg = randn((2, 3, 1025), 1), randn((2, 3, 1025), 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [cfg_combine(pos, neg, 2.0, rescale=True) for _ in range(2)]
    with use_backend("reference"):
        expected = cfg_combine(pos, neg, 2.0, rescale=True)
    assert all(torch.equal(result, expected) for result in results)
    texts = [str(warning.message) for warning in caught]
    assert [("more than 1024 channels" in text) for text in texts] == ([] if op_backend == "reference" else [True])


@pytest.mark.parametrize("rescale", [False, True])
def test_non_contiguous_inputs_and_a_stride_0_gradient(rescale: bool) -> None:
    pos, neg = randn((3, 4, 5), 1), randn((3, 4, 5), 2)
    results = []
    for view in (lambda tensor: tensor, scrambled):
        leaves = [value.clone().requires_grad_(True) for value in (pos, neg)]
        out = cfg_combine(*(view(leaf) for leaf in leaves), 3.0, rescale)
        assert out.is_contiguous()
        out.sum().backward()
        results.append((out.detach(), *(leaf.grad for leaf in leaves)))
    for left, right in zip(*results, strict=True):
        assert_same_bits(left, right)


def test_without_rescale_the_backward_keeps_no_latents() -> None:
    pos, neg = (randn((2, 40), seed).requires_grad_(True) for seed in (1, 2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        cfg_combine(pos, neg, 3.0)
    assert [tensor.numel() for tensor in kept] == [2]


@pytest.mark.parametrize("rescale", [False, True])
def test_empty_batch(rescale: bool) -> None:
    pos = torch.zeros(0, 4, 3).requires_grad_(True)
    out = cfg_combine(pos, torch.zeros(0, 4, 3), 3.0, rescale)
    assert out.shape == (0, 4, 3)
    out.sum().backward()
    assert pos.grad.shape == (0, 4, 3)


@pytest.mark.parametrize("rescale", [False, True])
def test_gradcheck(rescale: bool) -> None:
    leaves = [randn((2, 3, 4), seed, torch.float64).requires_grad_(True) for seed in (1, 2)]
    scale = torch.tensor([4.0, 0.5])
    assert torch.autograd.gradcheck(lambda pos, neg: cfg_combine(pos, neg, scale, rescale), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rescale", [False, True])
def test_opcheck(rescale: bool, dtype: torch.dtype) -> None:
    pos, neg = (randn((2, 3, 4), seed, dtype).requires_grad_(True) for seed in (1, 2))
    scale = torch.tensor([4.0, 0.5])
    torch.library.opcheck(OP.cfg_combine.default, (pos, neg, scale, rescale))
    kept = (pos.detach(), neg.detach()) if rescale else (None, None)
    torch.library.opcheck(OP.cfg_combine_backward.default, (randn((2, 3, 4), 3, dtype), *kept, scale, rescale))


def test_compiles_without_a_graph_break_and_repeats_bit_for_bit() -> None:
    pos, neg = (randn((2, 3, 4), seed).requires_grad_(True) for seed in (1, 2))

    def op(pos: Tensor, neg: Tensor) -> Tensor:
        return cfg_combine(pos, neg, 4.0, rescale=True)

    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    results = []
    for function in (op, op, compiled):
        pos.grad = neg.grad = None
        out = function(pos, neg)
        out.sum().backward()
        results.append((out.detach(), pos.grad, neg.grad))
    for other in results[1:]:
        for left, right in zip(other, results[0], strict=True):
            assert_same_bits(left, right)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"v_pos": torch.zeros(3)}, "v_pos"),
        ({"v_pos": torch.zeros(3, 4, dtype=torch.int64)}, "v_pos"),
        ({"v_neg": torch.zeros(3, 5)}, "v_neg"),
        ({"v_neg": torch.zeros(3, 4, dtype=torch.bfloat16)}, "v_neg"),
        ({"v_neg": torch.zeros(3, 4, device="meta")}, "v_neg"),
        ({"scale": torch.zeros(2)}, "scale"),
        ({"scale": torch.zeros(3, dtype=torch.int64)}, "scale"),
        ({"scale": torch.zeros(3).requires_grad_(True)}, "scale"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: got"):
        cfg_combine(**{"v_pos": torch.zeros(3, 4), "v_neg": torch.zeros(3, 4), "scale": 4.0, **arguments})
