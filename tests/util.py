"""Helpers that the tests of the ops share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flowgrpo_fast.ops import StepCoefficients
from flowgrpo_fast.schedule import make_sigmas, sde_coefficients

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((3, 1), (3, 7), (2, 5, 3), (2, 3, 4, 4), (2, 2, 3, 4, 5), (1, 33))
SIGMAS = make_sigmas(10)


def randn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def steps(batch: int) -> Tensor:
    """Step indices that mix timesteps in one batch, without the last step."""
    return torch.arange(batch) * 4 % 9


def coefficients(batch: int, rule: str = "sde", noise_level: float | Tensor = 0.7) -> StepCoefficients:
    return sde_coefficients(SIGMAS, steps(batch), rule=rule, noise_level=noise_level)


def column(scalars: Tensor, like: Tensor) -> Tensor:
    """[B] -> fp64 [B, 1, ...], to broadcast against latents."""
    return scalars.double().reshape(-1, *(1,) * (like.dim() - 1))


def largest(values: Tensor) -> Tensor:
    """Largest magnitude of each sample of [B, ...], of all numbers of [B]. Gradients go with 1 / s^2: one bound for a batch would be that of
    the sample with the least noise, and say nothing of the others."""
    return values.abs().flatten(1).amax(1) if values.dim() > 1 else values.abs().amax()[None]


def assert_as_accurate(got: Tensor, truth: Tensor, eager: Tensor) -> None:
    """Error against fp64 at most twice that of eager torch in the same dtype, plus one rounding of the result; sample by sample."""
    assert got.dtype == eager.dtype
    error, eager_error = (largest(value.double() - truth) for value in (got, eager))
    rounding = torch.finfo(got.dtype).eps * largest(truth)
    assert bool((error <= 2.0 * eager_error + rounding).all()), (
        f"errors {error.tolist()}, eager {eager_error.tolist()}, roundings {rounding.tolist()}"
    )


def assert_same_bits(left: Tensor, right: Tensor) -> None:
    assert left.dtype == right.dtype
    assert torch.equal(left, right), f"largest difference {(left.double() - right.double()).abs().max().item():.3e}"
    if left.is_floating_point():
        assert torch.equal(left.signbit(), right.signbit()), "0.0 and -0.0"


def assert_batch_invariant(op: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    """op maps sample numbers out of range(33) to per-sample results; each must have the same bits in every batch and position."""
    with threads(1):
        whole = op(torch.arange(33))
    batches = ([0], [17], [32], [4, 30, 11], list(range(8, 16)), list(range(32, -1, -1)))
    for count in (1, 2):
        with threads(count):  # a batch of one is where torch's own reductions split the sum among threads
            for batch in batches:
                index = torch.tensor(batch)
                for got, expected in zip(op(index), whole, strict=True):
                    assert_same_bits(got, expected[index])


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def scrambled(tensor: Tensor) -> Tensor:
    """Equal values, but not contiguous: every second column of a wider buffer, in reversed dimension order."""
    order = tuple(reversed(range(tensor.dim())))
    wide = torch.full((*(tensor.shape[i] for i in order), 2), float("nan"), dtype=tensor.dtype)
    wide[..., 0] = tensor.permute(order)
    view = wide[..., 0].permute(order)
    assert tensor.numel() <= 1 or not view.is_contiguous()
    return view
