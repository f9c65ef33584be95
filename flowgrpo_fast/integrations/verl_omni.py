"""verl-omni's advantage estimator and policy losses, on the ops: its arguments, its values, its metrics. Needs torch alone.

    from verl_omni.trainer.diffusion import diffusion_algos as algos
    from flowgrpo_fast.integrations import verl_omni as fast

    algos.DIFFUSION_ADV_ESTIMATOR_REGISTRY["flow_grpo"] = fast.compute_flow_grpo_outcome_advantage  # and "dance_grpo"
    algos.FlowGRPOLoss.compute_loss = staticmethod(fast.flow_grpo_loss)  # loss modes flow_grpo and dance_grpo, MixGRPO too
    algos.FlowDPPOLoss.compute_loss = staticmethod(fast.flow_dppo_loss)
    algos.GRPOGuardLoss.compute_loss = staticmethod(fast.grpo_guard_loss)
    algos.KLLoss.compute_loss = staticmethod(fast.kl_loss)

Each line stands alone. Run them where driver and workers import them, for example in the module that
`actor_rollout_ref.model.external_lib` names. They replace entries instead of adding names because verl-omni takes loss modes from a
closed list, and hands norm_adv_by_std_in_grpo and global_std to the estimator called "flow_grpo" only.

More exact than the originals, on purpose:
- the clip and the metrics work on ratio - 1 = expm1(log ratio), which has its digits where an fp32 ratio near 1 has lost them;
- a log ratio beyond +-10 is held there and gets no gradient, where the original overflows;
- Flow-DPPO asks for the sign of the log ratio, where the original compares an fp32 ratio with 1;
- advantages: statistics in fp64; a reward that is not finite gets 0 and enters no statistic, where the original makes all of them NaN;
- no NaN where nothing varies: ratio_std of one entry is 0, and a std_dev_t of 0 (an ODE step) has divergence 0;
- metrics come from the device in one copy instead of one each.
Losses have a gradient in log_prob and prev_sample_mean; everything else is taken as constant.
Source: verl_omni/trainer/diffusion/diffusion_algos.py at a1139baf; formulas in verl_omni.md sections 1.1 and 1.2.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.ops import StepCoefficients, group_advantage, policy_loss, sde_log_prob
from flowgrpo_fast.ops._checks import require, require_float, require_shape
from flowgrpo_fast.ops.coefficients import precision

__all__ = [
    "compute_flow_grpo_outcome_advantage",
    "flow_dppo_loss",
    "flow_grpo_loss",
    "grpo_guard_loss",
    "kl_loss",
]

# policy_loss wants finite clip ranges; it bounds ratios by e^10 = 22,026, so this one never acts.
_NO_CLIP = 1e6

Loss = tuple[Tensor, dict[str, float]]


def compute_flow_grpo_outcome_advantage(
    sample_level_rewards: Tensor,
    index: Iterable[Hashable] | Tensor,
    epsilon: float = 1e-4,
    norm_adv_by_std_in_grpo: bool = True,
    global_std: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantages: (r - mean of the group) / (std + epsilon), twice the same tensor (as advantages and as returns).

    sample_level_rewards: [B, W], floating: a sample's reward, repeated for its W steps. index: B group ids (an array of strings, say).
    std is the sample's (n - 1), over all B * W entries with global_std, else over the entries of the group; without
    norm_adv_by_std_in_grpo nothing is divided (Dr.GRPO). A group of one sample gets 0. config is not read. Not clipped: the losses do.
    Returns tensors [B, W] in the dtype of the rewards, without gradient. Raises ValueError for wrong shapes or dtypes.
    """
    require_float(sample_level_rewards, "sample_level_rewards")
    require(sample_level_rewards.dim() == 2, "sample_level_rewards", sample_level_rewards, "pass [B, W]")
    batch, steps = sample_level_rewards.shape
    group = _dense_ids(index).to(sample_level_rewards.device)
    require_shape(group, "index", (batch,))
    rewards, entry_group = sample_level_rewards.flatten(), group.repeat_interleave(steps)
    if not norm_adv_by_std_in_grpo:
        advantages = group_advantage(rewards, entry_group, "none", clip=None)
    elif global_std:
        advantages = _with_sample_std(rewards, entry_group, "global_std", int(rewards.isfinite().sum()), epsilon)
    else:
        # One pass for each group size, not for each group: the correction of the std depends on the size only.
        size = torch.bincount(entry_group, rewards.isfinite().double())[entry_group]
        advantages = torch.zeros_like(rewards, dtype=torch.float32)
        for count in size.unique().tolist():
            scaled = _with_sample_std(rewards, entry_group, "group_std", int(count), epsilon)
            advantages = torch.where(size == count, scaled, advantages)
    alone = torch.bincount(group)[group] == 1
    advantages = advantages.reshape(batch, steps).masked_fill(alone[:, None], 0.0).to(sample_level_rewards.dtype)
    return advantages, advantages


def flow_grpo_loss(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    config: Any,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """mean(max(-A r, -A clip(r, 1 - c, 1 + c)) w), r = exp(log_prob - old_log_prob), A clamped to +-adv_clip_max.

    All tensors [B] or [B, W]; rollout_is_weights is w, 1 if None. config.diffusion_loss: clip_ratio (c) and adv_clip_max.
    Returns the loss, 0-d, and floats under actor/: ppo_kl, pg_clipfrac, pg_clipfrac_higher, pg_clipfrac_lower, ratio_mean, ratio_std.
    Raises ValueError for wrong shapes, dtypes or devices.
    """
    c = _loss_config(config)
    advantages = _advantages(advantages, log_prob).clamp(-c.adv_clip_max, c.adv_clip_max)
    weights = _weights(rollout_is_weights, log_prob)
    loss, _ = policy_loss(log_prob, old_log_prob, advantages, c.clip_ratio, c.clip_ratio, step_weight=weights)
    log_ratio = log_prob.detach() - old_log_prob
    return loss, _clip_metrics(log_ratio, log_ratio, c.clip_ratio)


def grpo_guard_loss(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    config: Any,
    old_prev_sample_mean: Tensor,
    prev_sample_mean: Tensor,
    std_dev_t: Tensor,
    sqrt_dt: Tensor,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """flow_grpo_loss with r = exp((log_prob - old_log_prob + bias) s), divided by mean(sqrt_dt)^2.

    bias = mean((prev_sample_mean - old_prev_sample_mean)^2) / (2 s^2) of each sample, and s = mean(sqrt_dt) mean(std_dev_t).
    As in the original both means go over the batch, which is right where all samples take the same step of sde_type "sde".
    Log-probs, advantages and rollout_is_weights: [B]; means [B, ...]; std_dev_t, sqrt_dt: any shape. The rest: flow_grpo_loss.
    """
    c = _loss_config(config)
    advantages = _advantages(advantages, log_prob).clamp(-c.adv_clip_max, c.adv_clip_max)
    root = sqrt_dt.detach().mean()
    s = root * std_dev_t.detach().mean()
    bias = _mean_square(prev_sample_mean, old_prev_sample_mean) / (2 * s.square())
    require_shape(log_prob, "log_prob", tuple(bias.shape))
    log_ratio = log_prob - old_log_prob
    guarded = (log_ratio + bias) * s
    weights = _weights(rollout_is_weights, log_prob)
    loss, _ = policy_loss(None, None, advantages, c.clip_ratio, c.clip_ratio, log_ratio=guarded, step_weight=weights)
    return loss / root.square(), _clip_metrics(log_ratio.detach(), guarded.detach(), c.clip_ratio)


def flow_dppo_loss(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    config: Any,
    old_prev_sample_mean: Tensor,
    prev_sample_mean: Tensor,
    std_dev_t: Tensor,
    sqrt_dt: Tensor,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """mean(keep (-A r) w): no clip, but samples are dropped that are far from the old policy and on their way further.

    far: D >= kl_mask_threshold, D = mean((prev_sample_mean - old_prev_sample_mean)^2) / (2 (std_dev_t sqrt_dt)^2), of each sample;
    the denominator is 2 if config.diffusion_loss.add_kl_coefficient is False. On their way further: r > 1 where A > 0, r < 1 where
    A < 0. Dropped samples count in the mean. A is not clamped. std_dev_t sqrt_dt is the noise of the step for sde_type "sde".
    Log-probs, advantages and rollout_is_weights: [B]; means [B, ...]; std_dev_t, sqrt_dt: one value, or B in any shape.
    Returns the loss, 0-d, and 13 floats under actor/. Raises ValueError for wrong shapes, dtypes or devices.
    """
    c = _loss_config(config)
    advantages = _advantages(advantages, log_prob)
    divergence = _mean_square(prev_sample_mean, old_prev_sample_mean).detach()
    require_shape(log_prob, "log_prob", tuple(divergence.shape))
    s = std_dev_t.detach().reshape(-1) * sqrt_dt.detach().reshape(-1)
    divergence = divergence * (precision(s) if getattr(c, "add_kl_coefficient", True) else 0.5)

    log_ratio = log_prob.detach() - old_log_prob
    far = divergence >= c.kl_mask_threshold
    rising = far & (log_ratio > 0) & (advantages > 0)
    falling = far & (log_ratio < 0) & (advantages < 0)
    keep = ~(rising | falling)
    weights = _weights(rollout_is_weights, log_prob)
    loss, _ = policy_loss(
        log_prob,
        old_log_prob,
        advantages,
        _NO_CLIP,
        _NO_CLIP,
        mask=keep,
        step_weight=weights,
        denominator=float(max(keep.numel(), 1)),
    )
    r1 = torch.expm1(log_ratio.double())
    return loss, _fetch(
        ppo_kl=-log_ratio.mean(),
        approx_kl=0.5 * log_ratio.square().mean(),
        ratio_mean=1 + r1.mean(),
        ratio_std=r1.std(correction=0),
        ratio_min=1 + r1.min(),
        ratio_max=1 + r1.max(),
        kl_new_old_mean=divergence.mean(),
        kl_new_old_max=divergence.max(),
        kl_mask_fraction=far.double().mean(),
        pos_rm_fraction=rising.double().mean(),
        neg_rm_fraction=falling.double().mean(),
        masked_fraction=(~keep).double().mean(),
        unmasked_fraction=keep.double().mean(),
    )


def kl_loss(*, prev_sample_mean: Tensor, ref_prev_sample_mean: Tensor, std_dev_t: Tensor) -> Loss:
    """mean over the batch of mean((prev_sample_mean - ref_prev_sample_mean)^2) / (2 std_dev_t^2); metric actor/kl_loss.

    Means: [B, ...] of any rank (the original: [B, S, C]). std_dev_t: one value, or B in any shape. As in the original the divisor is
    std_dev_t and not the noise of the step: for sde_type "sde" this is the KL times -dt. `sde_log_prob(v_ref=...)` gives the KL.
    """
    divergence = _mean_square(prev_sample_mean, ref_prev_sample_mean)
    loss = (divergence * precision(std_dev_t.detach().reshape(-1))).mean().to(divergence.dtype)
    return loss, _fetch(kl_loss=loss)


def _dense_ids(index: Iterable[Hashable] | Tensor) -> Tensor:
    """Group ids of any kind -> int64 0 .. n-1, in the order of their first appearance."""
    number: dict[Hashable, int] = {}
    values = index.tolist() if isinstance(index, Tensor) else index
    return torch.tensor([number.setdefault(value, len(number)) for value in values], dtype=torch.int64)


def _with_sample_std(rewards: Tensor, group: Tensor, normalize: str, count: int, epsilon: float) -> Tensor:
    """d / (std + epsilon) with the sample's std over count entries, from the op that divides by the population's.

    std = c std_population with c = sqrt(count / (count - 1)), so it is d / (std_population + epsilon / c) / c.
    """
    if count < 2:
        return torch.zeros_like(rewards, dtype=torch.float32)
    c = math.sqrt(count / (count - 1))
    return group_advantage(rewards, group, normalize, eps=epsilon / c, clip=None) / c


def _mean_square(mean: Tensor, other: Tensor) -> Tensor:
    """mean((mean - other)^2) of each sample, [B], with a gradient in mean.

    It is minus the log-prob, in flow_grpo's form, of a step to `other` under velocity `mean` with a = 0, b = 1, s = 1.
    """
    require_shape(other, "old or reference mean", tuple(mean.shape))
    mean, other = (value.reshape(len(value), -1) for value in (mean, other.detach()))
    one = torch.ones(1, device=mean.device)
    return -sde_log_prob(other, mean, other, StepCoefficients(0 * one, one, one), form="flow_grpo").log_prob


def _loss_config(config: Any) -> Any:
    found = getattr(config, "diffusion_loss", None)
    require(
        found is not None, "config", config, "pass the actor's config, with clip_ratio and others in diffusion_loss"
    )
    return found


def _advantages(advantages: Tensor, log_prob: Tensor) -> Tensor:
    require_shape(advantages, "advantages", tuple(log_prob.shape))
    return advantages.detach()


def _weights(weights: Tensor | None, log_prob: Tensor) -> Tensor | None:
    if weights is None:
        return None
    require_shape(weights, "rollout_is_weights", tuple(log_prob.shape))
    return weights.detach().to(log_prob.dtype)


def _clip_metrics(log_ratio: Tensor, used: Tensor, clip: float) -> dict[str, float]:
    """log_ratio: of the log-probs. used: what the loss takes for it."""
    r1 = torch.expm1(used.double())
    return _fetch(
        ppo_kl=-log_ratio.mean(),
        pg_clipfrac=(r1.abs() > clip).double().mean(),
        pg_clipfrac_higher=(r1 > clip).double().mean(),
        pg_clipfrac_lower=(-r1 > clip).double().mean(),
        ratio_mean=1 + r1.mean(),
        ratio_std=r1.std(correction=min(1, r1.numel() - 1)),
    )


def _fetch(**metrics: Tensor) -> dict[str, float]:
    """Under verl-omni's keys, as floats: one copy from the device for all of them."""
    values = torch.stack([value.detach().double() for value in metrics.values()]).tolist()
    return {f"actor/{name}": value for name, value in zip(metrics, values, strict=True)}
