"""Philox-4x32-10: published vectors, a plain-integer implementation, and independence of everything but the key."""

from __future__ import annotations

import math

import pytest
import torch
from util import assert_batch_invariant, assert_same_bits, threads

from flowgrpo_fast.ops import STREAM_INITIAL, STREAM_SDE, STREAM_WINDOW, NoiseKey, philox_normal, philox_words
from flowgrpo_fast.ops._philox import _cos_sin_uniform, _log_uniform, philox_4x32, split_words

MASK = 0xFFFFFFFF


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The algorithm in Python integers, written from the paper."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        hi0, lo0 = divmod(0xD2511F53 * c0, 1 << 32)
        hi1, lo1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    words, keys, answer = ([int(word, 16) for word in text.split()] for text in (counter, key, expected))
    assert plain_philox(words, keys) == answer
    lanes = philox_4x32([torch.tensor([word]) for word in words], (keys[0], keys[1]))
    assert [int(lane) for lane in lanes] == answer


def test_words_match_the_plain_implementation_word_for_word() -> None:
    seed, stream = 0x7123456789ABCDEF, 65535
    steps = torch.tensor([0, 9, 65535, 3])
    ids = torch.tensor([0, 1 << 40 | 77, -1, 2**63 - 1])
    words = philox_words(NoiseKey(seed, steps, ids, stream), 23)
    assert words.dtype == torch.int64
    assert words.shape == (4, 23)
    for row, (step, sample) in enumerate(zip(steps.tolist(), ids.tolist(), strict=True)):
        for i in range(23):
            counter = [i // 4, step | stream << 16, sample & MASK, sample >> 32 & MASK]
            assert int(words[row, i]) == plain_philox(counter, list(split_words(seed)))[i % 4]


def test_normals_are_box_muller_on_lane_pairs() -> None:
    key = NoiseKey(11, 4, torch.arange(5))
    words, normals = philox_words(key, 40), philox_normal(key, (40,))
    assert normals.dtype == torch.float32
    for row in range(5):
        for i in range(0, 40, 2):
            u0, u1 = (((int(words[row, i + j]) >> 8) + 0.5) * 2.0**-24 for j in (0, 1))
            radius = math.sqrt(-2 * math.log(u0))
            expected = torch.tensor([radius * math.cos(2 * math.pi * u1), radius * math.sin(2 * math.pi * u1)])
            assert_same_bits(normals[row, i : i + 2], expected)


def test_the_series_are_accurate_at_the_ends_and_between() -> None:
    """Every power of two and its neighbours, and a million others, against torch's own functions."""
    edges = torch.cat([2**k + torch.arange(-2, 3) for k in range(25)]).clamp(0, 2**24 - 1)
    bits = torch.cat((edges, philox_words(NoiseKey(0, 0, torch.arange(1)), 1 << 20)[0] >> 8))
    u = (bits.double() + 0.5) * 2.0**-24
    torch.testing.assert_close(_log_uniform(bits), u.log(), rtol=2e-12, atol=0)
    for got, true in zip(_cos_sin_uniform(bits), ((2 * math.pi * u).cos(), (2 * math.pi * u).sin()), strict=True):
        torch.testing.assert_close(got, true, rtol=0, atol=2e-12)


def test_normals_are_normal() -> None:
    z = philox_normal(NoiseKey(1, 0, torch.arange(64)), (16384,)).double()
    count = z.numel()
    assert abs(z.mean().item()) < 4 / math.sqrt(count)
    assert abs(z.var().item() - 1) < 4 * math.sqrt(2 / count)
    assert abs((z**4).mean().item() - 3) < 4 * math.sqrt(96 / count)
    assert z.abs().max().item() < 5.89
    for lag in (1, 2, 3, 4):  # lanes of one counter, and neighbouring counters
        assert abs((z[:, lag:] * z[:, :-lag]).mean().item()) < 5 / math.sqrt(count)
    correlation = (z @ z.T / z.shape[1]).fill_diagonal_(0)
    assert correlation.abs().max().item() < 6 / math.sqrt(z.shape[1])


@pytest.mark.parametrize("length", [1, 3, 33, 65536])
def test_row_34_noise_depends_on_the_key_and_not_on_the_batch(length: int) -> None:
    assert_batch_invariant(lambda ids: (philox_normal(NoiseKey(3, ids % 7, ids * 1000003), (length,)),))


def test_noise_of_a_sample_is_a_prefix_of_its_longer_noise() -> None:
    key = NoiseKey(3, 1, torch.arange(4))
    long = philox_normal(key, (1000,))
    for length in (1, 2, 5, 127, 999):
        assert_same_bits(philox_normal(key, (length,)), long[:, :length])
    assert_same_bits(philox_normal(key, (5, 4, 50)).flatten(1), long)


def test_row_34_all_samples_steps_streams_and_seeds_differ() -> None:
    ids = torch.tensor([0, 1, 2, 1 << 32, -1])
    draws = [
        philox_words(NoiseKey(seed, step, ids, stream), 8)
        for seed in (0, 1, 1 << 32)
        for step in (0, 1, 65535)
        for stream in (0, 1, 2)
    ]
    rows = [tuple(row) for draw in draws for row in draw.tolist()]
    assert len(set(rows)) == len(rows) == 135


def test_row_33_a_group_shares_its_initial_noise_by_its_id() -> None:
    group = torch.tensor([4, 4, 9])
    initial = philox_normal(NoiseKey(0, 0, group, STREAM_INITIAL), (16,))
    assert_same_bits(initial[0], initial[1])
    assert not torch.equal(initial[0], initial[2])


def test_default_stream_of_a_key_is_the_sde_and_not_the_initial_noise() -> None:
    ids = torch.arange(3)
    assert NoiseKey(0, 0, ids).stream == STREAM_SDE
    assert len({STREAM_SDE, STREAM_INITIAL, STREAM_WINDOW}) == 3
    assert not torch.equal(
        philox_normal(NoiseKey(0, 0, ids), (8,)), philox_normal(NoiseKey(0, 0, ids, STREAM_INITIAL), (8,))
    )


def test_an_int_step_is_the_same_step_for_every_sample() -> None:
    ids = torch.arange(3)
    assert_same_bits(philox_words(NoiseKey(9, 6, ids), 9), philox_words(NoiseKey(9, torch.full((3,), 6), ids), 9))


def test_empty_batches_and_empty_shapes() -> None:
    assert philox_normal(NoiseKey(0, 0, torch.zeros(0, dtype=torch.int64)), (3, 5)).shape == (0, 3, 5)
    assert philox_normal(NoiseKey(0, 0, torch.arange(2)), (0,)).shape == (2, 0)


def test_noise_repeats_bit_for_bit_on_any_number_of_threads() -> None:
    key = NoiseKey(2, 2, torch.arange(16))
    with threads(1):
        first = philox_normal(key, (16385,))
    with threads(2):
        assert_same_bits(philox_normal(key, (16385,)), first)


def test_noise_compiles_without_a_graph_break() -> None:
    def draw(ids: torch.Tensor) -> torch.Tensor:
        return philox_normal(NoiseKey(7, 3, ids), (5, 2), device="cpu")

    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(torch.arange(3)), draw(torch.arange(3)))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"step": 65536}, "step"),
        ({"step": -1}, "step"),
        ({"step": torch.tensor([0, 65536])}, "step"),
        ({"step": torch.tensor([0])}, "step"),
        ({"step": torch.tensor([0.0, 1.0])}, "step"),
        ({"stream": 65536}, "stream"),
        ({"sample_id": torch.tensor([0, 1], dtype=torch.int32)}, "sample_id"),
        ({"sample_id": torch.tensor(0)}, "sample_id"),
        ({"sample_id": [0, 1]}, "sample_id"),
    ],
)
def test_bad_keys_are_named(arguments: dict, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: got"):
        NoiseKey(**{"seed": 0, "step": 0, "sample_id": torch.tensor([0, 1]), **arguments})
