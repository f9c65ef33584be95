"""Rewards: what turns images into scores. Importing this package imports torch only; each reward's libraries load with it."""

from flowgrpo_fast.rewards.base import Reward, TransientRewardError, build_reward, register_reward, registered_rewards
from flowgrpo_fast.rewards.manager import (
    RewardFailure,
    RewardManager,
    RewardResult,
    RewardSpec,
    check_failures,
    combine_components,
)

__all__ = [
    "Reward",
    "RewardFailure",
    "RewardManager",
    "RewardResult",
    "RewardSpec",
    "TransientRewardError",
    "build_reward",
    "check_failures",
    "combine_components",
    "register_reward",
    "registered_rewards",
]
