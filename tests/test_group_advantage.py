"""group_advantage: against the formula in Python floats, and everything that rewards do in practice."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor
from util import assert_same_bits, randn, scrambled

from flowgrpo_fast.ops import group_advantage

OP = torch.ops.flowgrpo_fast.group_advantage.default
NAN, INF = float("nan"), float("inf")
NORMALIZE = ("global_std", "group_std", "none")


def plain(rewards: list[float], group: list[int], normalize: str, eps: float, clip: float | None) -> list[float]:
    """The definition, sample by sample, with the standard library."""
    used = [i for i, reward in enumerate(rewards) if math.isfinite(reward)]
    result = []
    for i, reward in enumerate(rewards):
        members = [rewards[j] for j in used if group[j] == group[i]]
        if i not in used:
            result.append(0.0)
            continue
        std = {
            "none": lambda: 1.0 - eps,
            "group_std": lambda members=members: statistics.pstdev(members),
            "global_std": lambda: statistics.pstdev([rewards[j] for j in used]),
        }[normalize]()
        value = (reward - statistics.fmean(members)) / (std + eps)
        result.append(value if clip is None else max(-clip, min(clip, value)))
    return result


def advantage(rewards: list[float], group: list[int], *arguments, dtype: torch.dtype = torch.float32, **named) -> list:
    return group_advantage(torch.tensor(rewards, dtype=dtype), torch.tensor(group), *arguments, **named).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("batch", [1, 2, 7, 64, 257])
def test_forward_is_the_definition_rounded_once(batch: int, normalize: str, dtype: torch.dtype) -> None:
    rewards = randn((batch,), batch, dtype)
    group = torch.randint(-3, 5, (batch,), generator=torch.Generator().manual_seed(batch)) * 10**12
    got = group_advantage(rewards, group, normalize=normalize, clip=1.0)
    assert got.dtype == torch.float32
    truth = torch.tensor(plain(rewards.tolist(), group.tolist(), normalize, 1e-4, 1.0), dtype=torch.float64)
    assert bool(((got.double() - truth).abs() <= 2**-24 * truth.abs() + 1e-12).all())


def test_row_37_non_finite_rewards_are_excluded_and_get_zero() -> None:
    assert advantage([1, NAN, 3], [0, 0, 0], "group_std") == pytest.approx([-1, 0, 1], abs=2e-4)
    assert advantage([1, INF, 3, -INF], [0] * 4, "group_std", eps=0.0) == [-1, 0, 1, 0]
    assert advantage([1], [7], "group_std") == [0]
    assert advantage([NAN, NAN], [0, 0]) == [0, 0]
    assert advantage([NAN], [0], eps=0.0) == [0]


def test_row_37_one_bad_sample_changes_only_its_own_statistics() -> None:
    clean = advantage([1, 3, 5, 9], [0, 0, 1, 1], "group_std")
    broken = advantage([1, 3, NAN, 5, 9], [0, 0, 1, 1, 1], "group_std")
    assert broken[:2] + broken[3:] == clean


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_valid_excludes_like_nan(normalize: str) -> None:
    group = torch.tensor([0, 0, 1, 1, 0])
    valid = torch.tensor([True, True, True, False, True])
    rewards = torch.tensor([1.0, 2.0, 5.0, 400.0, 9.0])
    marked = group_advantage(rewards, group, normalize, valid=valid)
    assert_same_bits(marked, group_advantage(torch.where(valid, rewards, NAN), group, normalize))
    assert marked[3] == 0
    assert marked[2] == 0  # alone in its group
    assert group_advantage(rewards, group, normalize, valid=torch.zeros(5, dtype=torch.bool)).tolist() == [0.0] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_equal_rewards_are_exactly_zero(normalize: str, eps: float, dtype: torch.dtype) -> None:
    """0.1 added up in fp64 and divided is not 0.1; with eps = 0 that residue would become an advantage of 1."""
    for count in (1, 2, 3, 7, 10, 100):
        assert advantage([0.1] * count, [4] * count, normalize, eps=eps, dtype=dtype) == [0.0] * count
    mixed = advantage([0.1, 0.1, 0.1, 0.2, 0.4], [0, 0, 0, 1, 1], normalize, eps=eps, dtype=dtype)
    assert mixed[:3] == [0.0] * 3
    assert mixed[3] == -mixed[4] != 0


def test_global_std_is_about_the_common_mean_and_the_population() -> None:
    """Groups {0, 2} and {10, 12}: every deviation is 1, the std of all is sqrt(26)."""
    assert advantage([0, 2, 10, 12], [0, 0, 1, 1], "global_std", eps=0.0) == pytest.approx(
        [-1 / 26**0.5, 1 / 26**0.5] * 2, rel=1e-6
    )
    assert advantage([0, 2, 10, 12], [0, 0, 1, 1], "group_std", eps=0.0) == [-1, 1, -1, 1]
    assert advantage([0, 2, 10, 14], [0, 0, 1, 1], "none") == [-1, 1, -2, 2]


def test_clip_bounds_both_sides_and_none_does_not() -> None:
    rewards = [0.0] * 99 + [1.0]
    assert max(advantage(rewards, [0] * 100, "group_std", clip=5.0)) == 5.0
    assert min(advantage([-r for r in rewards], [0] * 100, "group_std", clip=5.0)) == -5.0
    assert max(advantage(rewards, [0] * 100, "group_std", clip=None)) == pytest.approx(99**0.5, rel=2e-3)


def test_row_41_group_ids_are_only_names_and_order_does_not_matter() -> None:
    rewards, group = randn((48,), 1), torch.arange(48) % 6
    expected = group_advantage(rewards, group)
    names = torch.tensor([2**63 - 1, -(2**63), 0, -1, 17, 10**15])
    assert_same_bits(group_advantage(rewards, names[group]), expected)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(group_advantage(rewards[order], group[order]), expected[order], rtol=2e-7, atol=0)


def test_row_41_group_std_does_not_depend_on_what_else_is_in_the_batch() -> None:
    rewards, group = randn((48,), 1), torch.arange(48) // 8
    whole = group_advantage(rewards, group, "group_std")
    for start in range(0, 48, 16):
        part = slice(start, start + 16)
        assert_same_bits(group_advantage(rewards[part], group[part], "group_std"), whole[part])


def test_large_offsets_do_not_cancel() -> None:
    offset = 2.0**23
    assert advantage([offset + 1, offset + 3], [0, 0], "group_std", eps=0.0) == [-1, 1]


def test_empty_batch_and_non_contiguous_input() -> None:
    empty = group_advantage(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert empty.shape == (0,)
    rewards, group = randn((9,), 3), torch.arange(9) % 2
    valid = torch.arange(9) != 4
    strided = torch.stack((group, group + 50), 1)[:, 0], torch.stack((valid, ~valid), 1)[:, 0]
    assert not any(view.is_contiguous() for view in strided)
    expected = group_advantage(rewards, group, valid=valid)
    assert_same_bits(group_advantage(scrambled(rewards), strided[0], valid=strided[1]), expected)


def test_there_is_no_gradient() -> None:
    rewards = randn((4,), 1).requires_grad_(True)
    assert not group_advantage(rewards, torch.zeros(4, dtype=torch.int64)).requires_grad


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_opcheck(normalize: str) -> None:
    rewards, group = torch.tensor([1.0, NAN, 3.0, 2.0]), torch.tensor([5, 5, -1, 5])
    valid = torch.tensor([True, True, True, False])
    torch.library.opcheck(OP, (rewards, group, valid, normalize, 1e-4, 5.0))
    torch.library.opcheck(OP, (rewards.bfloat16(), group, None, normalize, 1e-4, INF))


def test_compiles_without_a_graph_break_and_repeats_bit_for_bit() -> None:
    rewards, group = randn((33,), 1), torch.arange(33) % 5

    def op(rewards: Tensor) -> Tensor:
        return group_advantage(rewards, group)

    first = op(rewards)
    assert_same_bits(torch.compile(op, fullgraph=True, backend="aot_eager")(rewards), first)
    for _ in range(3):
        assert_same_bits(op(rewards), first)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"rewards": torch.tensor([1, 2])}, "rewards"),
        ({"rewards": torch.zeros(2, 1)}, "rewards"),
        ({"group": torch.zeros(2)}, "group"),
        ({"group": torch.zeros(3, dtype=torch.int64)}, "group"),
        ({"group": torch.zeros(2, dtype=torch.int64, device="meta")}, "group"),
        ({"normalize": "batch"}, "normalize"),
        ({"eps": -1.0}, "eps"),
        ({"clip": 0.0}, "clip"),
        ({"valid": torch.ones(2)}, "valid"),
        ({"valid": torch.ones(3, dtype=torch.bool)}, "valid"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, field: str) -> None:
    good = {"rewards": torch.zeros(2), "group": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=rf"^{field}: got"):
        group_advantage(**{**good, **arguments})
