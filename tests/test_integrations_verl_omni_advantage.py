"""verl-omni's advantage estimator: the original's formula in fp64, group ids of any kind, and what is more robust."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from util import assert_same_bits, randn

from flowgrpo_fast.integrations.verl_omni import compute_flow_grpo_outcome_advantage


def original_advantage(
    rewards: Tensor, index: np.ndarray, epsilon: float, norm_adv_by_std_in_grpo: bool, global_std: bool
) -> Tensor:
    """verl_omni.md, section 1.1."""
    advantages = torch.empty_like(rewards)
    for name in set(index.tolist()):
        rows = torch.from_numpy(index == name)
        group = rewards[rows]
        alone = len(group) == 1
        centered = group - (group[0] if alone else group.mean())
        std = rewards.std() if global_std else torch.ones(()) if alone else group.std()
        advantages[rows] = centered / (std + epsilon) if norm_adv_by_std_in_grpo else centered
    return advantages


NAMES = {
    "equal groups": ["a", "b", "c", "d"] * 4,
    "unequal groups, one of one": ["a"] * 5 + ["b"] * 2 + ["alone"] + ["c"] * 8,
    "scattered": ["b", "a", "c", "a", "b", "c", "c", "c"] * 2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("global_std", [True, False])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("names", list(NAMES))
def test_advantages_are_the_originals(
    names: str, normalized: bool, global_std: bool, steps: int, dtype: torch.dtype
) -> None:
    index = np.array(NAMES[names], dtype=object)
    for rewards in (
        randn((16, 1), 1, dtype).expand(16, steps),
        randn((16, steps), 2, dtype),
    ):  # as verl-omni makes them; any
        named = dict(epsilon=1e-2, norm_adv_by_std_in_grpo=normalized, global_std=global_std)
        got, returns = compute_flow_grpo_outcome_advantage(rewards, index, **named)
        expected = original_advantage(rewards.double(), index, **named)
        assert got.dtype == dtype
        assert got is returns
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


def test_group_ids_may_be_integers_or_a_tensor() -> None:
    rewards, ids = randn((6, 2), 1), [7, -3, 7, 7, -3, 2**40]
    results = [
        compute_flow_grpo_outcome_advantage(rewards, index, global_std=False)[0]
        for index in (ids, np.array(ids), torch.tensor(ids), [str(i) for i in ids])
    ]
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("global_std", [True, False])
def test_a_reward_that_is_not_finite_costs_its_sample_only(global_std: bool) -> None:
    rewards, index = randn((8, 1), 1).expand(8, 2).clone(), ["a"] * 4 + ["b"] * 4
    rewards[2] = float("nan")
    got, _ = compute_flow_grpo_outcome_advantage(rewards, index, global_std=global_std)
    assert got[2].tolist() == [0.0, 0.0]
    rest = [i for i in range(8) if i != 2]
    expected, _ = compute_flow_grpo_outcome_advantage(rewards[rest], [index[i] for i in rest], global_std=global_std)
    assert_same_bits(got[rest], expected)


def test_equal_rewards_and_a_batch_of_one_give_zeros() -> None:
    for rewards, index in ((torch.full((4, 2), 0.1), list("aabb")), (torch.ones(1, 1), ["a"])):
        for global_std in (True, False):
            got, _ = compute_flow_grpo_outcome_advantage(rewards, index, global_std=global_std)
            assert not got.any()


def test_bad_rewards_are_named() -> None:
    for rewards, index, field in (
        (torch.zeros(4), list("aabb"), "sample_level_rewards"),
        (torch.zeros(4, 2), list("aab"), "index"),
        (torch.zeros(4, 2, dtype=torch.int64), list("aabb"), "sample_level_rewards"),
    ):
        with pytest.raises(ValueError, match=rf"^{field}: got"):
            compute_flow_grpo_outcome_advantage(rewards, index)
