"""The rivals: the peers' formulas in eager PyTorch, operation by operation as their trainers write them.

Step and log-prob upcast to fp32 first, as they do (fp64 stays fp64: the same functions are the benchmarks' exact results). Latents
are [B, channels, elements]; sigma and after (the next sigma) are [B], sigma_1 is the schedule's second value, 0-d.
Formulas: flow_grpo's "sde" step, its clipped loss with the two metrics that it logs, and its CFG with Qwen-Image's rescale; the KL
with the step's true variance, as in its Wan script. Two deviations: advantages use the population's std everywhere, and the guided
loss upcasts before CFG (bf16 CFG is off by as much as a clip range, and would be no yardstick).
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

NOISE_LEVEL = 0.7
GUIDANCE = 4.0
CLIP = 1e-4
KL_WEIGHT = 0.04
EPS = 1e-4
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def mean_and_spread(x: Tensor, v: Tensor, sigma: Tensor, after: Tensor, sigma_1: Tensor) -> tuple[Tensor, Tensor]:
    """mu [B, ...] and the step's noise scale [B, 1, 1]."""
    x, v, t, after = wide(x), wide(v), _column(sigma), _column(after)
    dt = after - t
    std = NOISE_LEVEL * torch.sqrt(t / (1 - torch.where(t == 1, sigma_1, t)))
    mean = x * (1 + std**2 / (2 * t) * dt) + v * (1 + std**2 * (1 - t) / (2 * t)) * dt
    return mean, std * torch.sqrt(-dt)


def density(prev: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """Log-prob of a step, the mean over all but the first dimension, [B]."""
    terms = -((wide(prev).detach() - mean) ** 2) / (2 * spread**2) - torch.log(spread) - LOG_SQRT_2PI
    return terms.mean(dim=tuple(range(1, terms.ndim)))


def step(x: Tensor, v: Tensor, noise: Tensor, sigma: Tensor, after: Tensor, sigma_1: Tensor) -> tuple[Tensor, Tensor]:
    mean, spread = mean_and_spread(x, v, sigma, after, sigma_1)
    prev = mean + spread * noise
    return prev, density(prev, mean, spread)


def step_drawing(x: Tensor, v: Tensor, sigma: Tensor, after: Tensor, sigma_1: Tensor) -> tuple[Tensor, Tensor]:
    return step(x, v, torch.randn_like(x), sigma, after, sigma_1)


def log_prob(
    x: Tensor, v: Tensor, prev: Tensor, sigma: Tensor, after: Tensor, sigma_1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> log-prob [B], and what the KL needs: mu and the noise scale."""
    mean, spread = mean_and_spread(x, v, sigma, after, sigma_1)
    return density(prev, mean, spread), mean, spread


def log_prob_alone(
    x: Tensor, v: Tensor, prev: Tensor, sigma: Tensor, after: Tensor, sigma_1: Tensor
) -> tuple[Tensor, ...]:
    return log_prob(x, v, prev, sigma, after, sigma_1)[:1]


def kl(mean: Tensor, mean_ref: Tensor, spread: Tensor) -> Tensor:
    terms = (mean - mean_ref) ** 2 / (2 * spread**2)
    return terms.mean(dim=tuple(range(1, terms.ndim)))


def log_prob_kl_ratio(
    x: Tensor,
    v: Tensor,
    prev: Tensor,
    v_ref: Tensor,
    old_log_prob: Tensor,
    sigma: Tensor,
    after: Tensor,
    sigma_1: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The peers' log-ratio is the difference of two log-probs, the old one kept from the rollout."""
    value, mean, spread = log_prob(x, v, prev, sigma, after, sigma_1)
    with torch.no_grad():
        mean_ref, _ = mean_and_spread(x, v_ref, sigma, after, sigma_1)
    return value, kl(mean, mean_ref, spread), value - old_log_prob


def cfg(v: Tensor, v_neg: Tensor) -> tuple[Tensor]:
    """In the network's dtype, as pipelines do it."""
    return (v_neg + GUIDANCE * (v - v_neg),)


def cfg_rescale(v: Tensor, v_neg: Tensor) -> tuple[Tensor]:
    """Qwen-Image: each token of the combined velocity gets the norm of the conditional one."""
    (combined,) = cfg(v, v_neg)
    norm, norm_combined = (torch.norm(value, dim=-1, keepdim=True) for value in (v, combined))
    return (combined * (norm / norm_combined),)


def clipped_loss(log_prob: Tensor, old_log_prob: Tensor, adv: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """-> loss, and the metrics that flow_grpo logs: approximate KL and clip fraction."""
    ratio = torch.exp(log_prob - old_log_prob)
    entries = torch.maximum(-adv * ratio, -adv * torch.clamp(ratio, 1 - CLIP, 1 + CLIP))
    with torch.no_grad():
        approx_kl = 0.5 * ((log_prob - old_log_prob) ** 2).mean()
        metrics = torch.stack((approx_kl, ((ratio - 1).abs() > CLIP).to(ratio.dtype).mean()))
    return entries.sum() / denominator, metrics


def loss(
    x: Tensor,
    v: Tensor,
    prev: Tensor,
    old_log_prob: Tensor,
    adv: Tensor,
    denominator: Tensor,
    sigma: Tensor,
    after: Tensor,
    sigma_1: Tensor,
) -> tuple[Tensor, Tensor]:
    value, _, _ = log_prob(x, v, prev, sigma, after, sigma_1)
    return clipped_loss(value, old_log_prob, adv, denominator)


def guided_loss(
    x: Tensor,
    v: Tensor,
    v_neg: Tensor,
    v_ref: Tensor,
    prev: Tensor,
    old_log_prob: Tensor,
    adv: Tensor,
    denominator: Tensor,
    rescale: bool,
    sigma: Tensor,
    after: Tensor,
    sigma_1: Tensor,
) -> tuple[Tensor, Tensor]:
    """CFG, clipped loss and KL to the reference's (guided) velocity. The combined velocity has the network's dtype."""
    guide = cfg_rescale if rescale else cfg
    combined = guide(wide(v), wide(v_neg))[0].to(v.dtype)
    return loss_with_kl(x, combined, v_ref, prev, old_log_prob, adv, denominator, sigma, after, sigma_1)


def loss_with_kl(
    x: Tensor,
    v: Tensor,
    v_ref: Tensor,
    prev: Tensor,
    old_log_prob: Tensor,
    adv: Tensor,
    denominator: Tensor,
    sigma: Tensor,
    after: Tensor,
    sigma_1: Tensor,
) -> tuple[Tensor, Tensor]:
    value, mean, spread = log_prob(x, v, prev, sigma, after, sigma_1)
    with torch.no_grad():
        mean_ref, _ = mean_and_spread(x, v_ref, sigma, after, sigma_1)
    policy, metrics = clipped_loss(value, old_log_prob, adv, denominator)
    return policy + KL_WEIGHT * kl(mean, mean_ref, spread).sum() / denominator, metrics


def advantage_by_sample(rewards: Tensor, group: Tensor) -> tuple[Tensor]:
    """verl-omni's loop: 0-d tensors, sample by sample, collected in a dict of lists."""
    members: dict[int, list[Tensor]] = defaultdict(list)
    statistics: dict[int, tuple[Tensor, Tensor]] = {}
    result = rewards.clone()
    for i in range(rewards.shape[0]):
        members[int(group[i])].append(rewards[i])
    for key, values in members.items():
        stacked = torch.stack(values)
        statistics[key] = stacked.mean(), stacked.std(correction=0)
    for i in range(rewards.shape[0]):
        mean, std = statistics[int(group[i])]
        result[i] = (rewards[i] - mean) / (std + EPS)
    return (result,)


def advantage_by_group(rewards: Tensor, group: Tensor) -> tuple[Tensor]:
    """flow_grpo's loop: fp64, one mask over all samples per group."""
    values, result = rewards.double(), torch.empty_like(rewards)
    for key in group.unique().tolist():
        rows = group == key
        result[rows] = ((values[rows] - values[rows].mean()) / (values[rows].std(correction=0) + EPS)).to(rewards.dtype)
    return (result,)


def _column(values: Tensor) -> Tensor:
    return values[:, None, None]
