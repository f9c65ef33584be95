"""From the rewards of each rank's samples to advantages of all samples, and what is logged of both. Collectives: every rank calls them."""

from __future__ import annotations

import torch
from torch import Tensor

from flowgrpo_fast import comm
from flowgrpo_fast.algorithms import Rewards
from flowgrpo_fast.config import Config
from flowgrpo_fast.inputs import Inputs
from flowgrpo_fast.rewards import RewardManager, RewardResult, check_failures, combine_components
from flowgrpo_fast.rollout.agent_loop import RolloutResult


def score_samples(
    result: RolloutResult, inputs: Inputs, config: Config, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """This rank's rewards on the host; advantages fp32 and valid flags bool of all samples on the device; metrics. Stops the run on too many
    failures."""
    components, valid = comm.gather_rows(result.reward.components), comm.gather_rows(result.reward.valid)
    require_enough(valid, result.reward, config)
    rewards = combine_components(components, inputs.rewards.weights, valid, config.rewarding.normalize)
    group = comm.gather_rows(result.batch.group_id.cpu())
    table = Rewards(components, inputs.rewards.weights, rewards, group, valid)
    advantages = inputs.advantage(table, config.algorithm)
    mine = slice(comm.rank() * result.batch.size, (comm.rank() + 1) * result.batch.size)
    metrics = reward_metrics(rewards, group, valid) | component_means(result.reward, inputs.rewards)
    kept = clipped(advantages[valid] if valid.any() else torch.zeros(1), config.algorithm.advantage_clip)
    metrics |= {
        "advantage/mean": float(kept.mean()),
        "advantage/std": float(kept.std(correction=0)),
        "advantage/abs_mean": float(kept.abs().mean()),
    }
    return rewards[mine], advantages.to(device), valid.to(device), metrics


def require_enough(valid: Tensor, mine: RewardResult, config: Config) -> None:
    """valid bool, of all samples of all ranks; mine: this rank's, for its errors. Raises RewardFailure, on all ranks alike."""
    errors = [error for rank_errors in comm.gather_objects(mine.errors[:5]) for error in rank_errors]
    check_failures(valid, errors, config.rewarding.max_failure_share)


def component_means(reward: RewardResult, rewards: RewardManager) -> dict[str, float]:
    """Mean of each reward and of what it logs besides, over the valid samples of all ranks."""
    columns = dict(zip(rewards.labels, reward.components.unbind(1), strict=True)) | reward.metrics
    local = {name: (float(c.nansum()), int(c.isfinite().sum())) for name, c in columns.items()}
    total: dict[str, tuple[float, int]] = {}
    for part in comm.gather_objects(local):
        for name, (value, count) in part.items():
            so_far = total.get(name, (0.0, 0))
            total[name] = (so_far[0] + value, so_far[1] + count)
    return {
        name if name.startswith("held_out/") else f"reward/{name}": value / count
        for name, (value, count) in total.items()
        if count
    }


def weighted_sums(reward: RewardResult, rewards: RewardManager) -> list[float]:
    """Of this rank's samples, without normalisation: comparable over time."""
    return [float(value) for value in combine_components(reward.components, rewards.weights, reward.valid)]


def clipped(advantages: Tensor, bound: float | None) -> Tensor:
    """After the choice of samples: clipped ones could not be told apart."""
    return advantages if bound is None else advantages.clamp(-bound, bound)


def reward_metrics(rewards: Tensor, group: Tensor, valid: Tensor) -> dict[str, float]:
    """Mean, std, share of invalid samples, and share of groups without any spread (they teach nothing)."""
    kept = rewards[valid]
    if not len(kept):
        return {"reward/invalid_ratio": 1.0}
    spread = [
        float(rewards[(group == g) & valid].std(correction=0)) for g in group.unique() if ((group == g) & valid).any()
    ]
    return {
        "reward/mean": float(kept.mean()),
        "reward/std": float(kept.std(correction=0)),
        "reward/zero_std_ratio": sum(s == 0 for s in spread) / len(spread),
        "reward/invalid_ratio": float((~valid).float().mean()),
    }
