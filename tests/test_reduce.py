"""The sums: accuracy, the order that the definition states, and batch invariance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from util import assert_batch_invariant, assert_same_bits, randn

from flowgrpo_fast.ops._reduce import CHUNK, LANES, lane_sum, row_sum

LENGTHS = (1, 2, 3, 7, 64, 1000, 1024, 1025, 4096, 4097, 65536, 65537)


def plain_lane_sum(values: np.ndarray) -> np.floating:
    """The order of the definition, one addition at a time."""
    lanes = np.zeros(LANES, values.dtype)
    for i, value in enumerate(values):
        lanes[i % LANES] += value
    while len(lanes) > 1:
        lanes = np.array([lanes[i] + lanes[i + 1] for i in range(0, len(lanes), 2)])
    return lanes[0]


@pytest.mark.parametrize("length", LENGTHS)
def test_row_sum_is_accurate(length: int) -> None:
    values = randn((3, length), 1)
    bound = 13 * 2**-24 * values.double().abs().sum(1)
    assert bool(((row_sum(values) - values.double().sum(1)).abs() <= bound).all())
    assert row_sum(values.bool().float()).tolist() == [length] * 3


@pytest.mark.parametrize("length", [1, 5, 1024, 1030, 4096, 9000])
def test_the_order_is_the_one_defined(length: int) -> None:
    values = randn((length,), 2).numpy()
    assert lane_sum(torch.from_numpy(values)).numpy() == plain_lane_sum(values)
    chunks = [plain_lane_sum(values[start : start + CHUNK]) for start in range(0, length, CHUNK)]
    assert row_sum(torch.from_numpy(values)).item() == plain_lane_sum(np.array(chunks, np.float64))


@pytest.mark.parametrize("function", [lane_sum, row_sum])
def test_nothing_is_zero_and_one_is_a_copy(function) -> None:
    assert function(torch.zeros(2, 0)).tolist() == [0.0, 0.0]
    assert function(torch.zeros(0, 5)).shape == (0,)
    one = randn((3, 1), 1)
    assert function(one).data_ptr() != one.data_ptr()
    assert function(one).tolist() == one[:, 0].tolist()


@pytest.mark.parametrize("length", [1, 37, 65535, 65536])
def test_batch_invariance(length: int) -> None:
    values = randn((33, length), 1)
    assert_batch_invariant(lambda index: (row_sum(values[index]), lane_sum(values[index])))


def test_a_view_of_any_strides_has_the_same_sum() -> None:
    values = randn((3, 5000), 1)
    wide: Tensor = torch.zeros(5000, 7)
    wide[:, 1:4] = values.T
    assert_same_bits(row_sum(wide[:, 1:4].T), row_sum(values))
