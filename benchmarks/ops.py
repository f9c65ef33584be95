"""The ops under test: for each one our call, the rivals' call, and the bytes that it must move.

Bytes: every input is read once in each pass that needs it and every result written once; [B] scalars are not counted. For
`sde_log_prob` that makes 7 passes over a latent: x, v, prev forward; x, v, prev and the gradient of v backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import rivals
from benchmarks.cases import Call, Inputs, Shape, exact_guided, flat
from flowgrpo_fast.ops import cfg_combine, flow_grpo_loss, group_advantage, policy_loss, sde_log_prob, sde_step

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Op:
    name: str
    variant: str
    ours: Callable[[Inputs], Call]
    rival: Callable[[Inputs], Call]
    compared: int  # how many of the results are compared; all gradients are
    reads: tuple[str, ...]  # inputs, once for each pass that reads them: forward, then backward
    writes: tuple[str, ...]  # results and gradients, each by an input of its size and dtype
    temporaries: int = 8  # fp32 latents that the hungriest contender holds at its peak: for the memory guard alone
    exact: Callable[[Inputs], Call] | None = None  # evaluated in fp64; None: the rival's call
    exact_of_rival: Callable[[Inputs, Tensors], Call] | None = None  # for results that depend on the rival's own draw
    tokens_only: bool = False  # only for packed latents [tokens, channels]
    batches: tuple[int, ...] = ()  # of an op over entries, which sees no latents
    is_loop: bool = False  # the rival is a Python loop over host values: nothing for torch.compile

    @property
    def title(self) -> str:
        return f"{self.name} {self.variant}".strip()

    def applies_to(self, shape: Shape) -> bool:
        return not self.batches and (shape.tokens or not self.tokens_only)

    def bytes(self, inputs: Inputs) -> int:
        return inputs.size(*self.reads, *self.writes)


def _step_noise(i: Inputs) -> Call:
    return Call(lambda x, v, noise: sde_step(x, v, i.coef, noise=noise), (i.x, i.v, i.noise))


def _step_key(i: Inputs) -> Call:
    return Call(lambda x, v: sde_step(x, v, i.coef, key=i.key), (i.x, i.v))


def _rival_step(i: Inputs) -> Call:
    return Call(rivals.step, (*flat(i.x, i.v, i.noise), *i.schedule))


def _rival_step_drawing(i: Inputs) -> Call:
    return Call(rivals.step_drawing, (*flat(i.x, i.v), *i.schedule))


def _exact_step_key(i: Inputs) -> Call:
    return Call(rivals.step, (*flat(i.x, i.v, i.philox_noise), *i.schedule))


def _exact_step_drawn(i: Inputs, results: Tensors) -> Call:
    return Call(_check_drawn, (*flat(i.x, i.v), results[0], *i.schedule))


def _check_drawn(x: Tensor, v: Tensor, prev: Tensor, *schedule: Tensor) -> Tensors:
    """The log-prob of a prev that the rival drew with its own noise; NaN for prev unless that noise looks standard normal.

    Mean and variance of n normals are off by 1/sqrt(n) and sqrt(2/n): six times that passes all but 1 in 10^8.
    """
    mean, spread = rivals.mean_and_spread(x, v, *schedule)
    noise = (prev - mean) / spread
    n = noise.numel()
    normal = (noise.mean().abs() < 6 / n**0.5) & ((noise.var() - 1).abs() < 6 * (2 / n) ** 0.5)
    return torch.where(normal, prev, torch.nan), rivals.density(prev, mean, spread)


def _log_prob(i: Inputs) -> Call:
    return Call(lambda x, v, prev: sde_log_prob(x, v, prev, i.coef)[:1], (i.x, i.v, i.prev), (1,), (i.weights,))


def _rival_log_prob(i: Inputs) -> Call:
    return Call(rivals.log_prob_alone, (*flat(i.x, i.v, i.prev), *i.schedule), (1,), (i.weights,))


def _log_prob_kl_ratio(i: Inputs) -> Call:
    def function(x: Tensor, v: Tensor, prev: Tensor, v_ref: Tensor, v_old: Tensor) -> Any:
        return sde_log_prob(x, v, prev, i.coef, v_ref=v_ref, v_old=v_old)

    return Call(function, (i.x, i.v, i.prev, i.v_ref, i.v_old), (1,), (i.weights,) * 3)


def _rival_kl_ratio(i: Inputs) -> Call:
    latents = flat(i.x, i.v, i.prev, i.v_ref)
    return Call(rivals.log_prob_kl_ratio, (*latents, i.old_log_prob_of_v_old, *i.schedule), (1,), (i.weights,) * 3)


def _exact_kl_ratio(i: Inputs) -> Call:
    """The log-ratio to v_old itself, not to a stored log-prob, which is rounded to fp32."""

    def function(x: Tensor, v: Tensor, prev: Tensor, v_ref: Tensor, v_old: Tensor, *schedule: Tensor) -> Tensors:
        with torch.no_grad():
            (old,) = rivals.log_prob_alone(x, v_old, prev, *schedule)
        return rivals.log_prob_kl_ratio(x, v, prev, v_ref, old, *schedule)

    return Call(function, (*flat(i.x, i.v, i.prev, i.v_ref, i.v_old), *i.schedule), (1,), (i.weights,) * 3)


def _cfg(i: Inputs) -> Call:
    return Call(lambda v, v_neg: (cfg_combine(v, v_neg, rivals.GUIDANCE),), (i.v, i.v_neg), (0, 1), (i.upstream,))


def _cfg_rescale(i: Inputs) -> Call:
    return Call(lambda v, v_neg: (cfg_combine(v, v_neg, rivals.GUIDANCE, True),), (i.v, i.v_neg), (0, 1), (i.upstream,))


def _rival_cfg(i: Inputs) -> Call:
    return Call(rivals.cfg, flat(i.v, i.v_neg), (0, 1), flat(i.upstream))


def _rival_cfg_rescale(i: Inputs) -> Call:
    return Call(rivals.cfg_rescale, flat(i.v, i.v_neg), (0, 1), flat(i.upstream))


def _fused(i: Inputs) -> Call:
    def function(x: Tensor, v: Tensor, prev: Tensor) -> Tensors:
        return flow_grpo_loss(v, x, prev, i.coef, i.adv, old_log_prob=i.old_log_prob, **_clip(i))[:1]

    return Call(function, (i.x, i.v, i.prev), (1,))


def _fused_v_old(i: Inputs) -> Call:
    def function(x: Tensor, v: Tensor, prev: Tensor, v_old: Tensor) -> Tensors:
        return flow_grpo_loss(v, x, prev, i.coef, i.adv, v_old=v_old, **_clip(i))[:1]

    return Call(function, (i.x, i.v, i.prev, i.v_old), (1,))


def _fused_guided(i: Inputs) -> Call:
    more: dict[str, Any] = dict(scale=rivals.GUIDANCE, rescale=i.shape.tokens, kl_weight=rivals.KL_WEIGHT, **_clip(i))

    def function(x: Tensor, v: Tensor, v_neg: Tensor, v_ref: Tensor, prev: Tensor) -> Tensors:
        old = i.old_log_prob_guided
        return flow_grpo_loss(v, x, prev, i.coef, i.adv, v_neg=v_neg, v_ref=v_ref, old_log_prob=old, **more)[:1]

    return Call(function, (i.x, i.v, i.v_neg, i.v_ref, i.prev), (1, 2))


def _clip(i: Inputs) -> dict[str, Any]:
    return dict(clip_low=rivals.CLIP, clip_high=rivals.CLIP, denominator=i.denominator)


def _composed(i: Inputs) -> Call:
    def function(x: Tensor, v: Tensor, prev: Tensor) -> Tensors:
        return policy_loss(sde_log_prob(x, v, prev, i.coef).log_prob, i.old_log_prob, i.adv, **_clip(i))[:1]

    return Call(function, (i.x, i.v, i.prev), (1,))


def _composed_guided(i: Inputs) -> Call:
    def function(x: Tensor, v: Tensor, v_neg: Tensor, v_ref: Tensor, prev: Tensor) -> Tensors:
        combined = cfg_combine(v, v_neg, rivals.GUIDANCE, i.shape.tokens)
        out = sde_log_prob(x, combined, prev, i.coef, v_ref=v_ref)
        assert out.kl is not None
        loss, _ = policy_loss(out.log_prob, i.old_log_prob_guided, i.adv, **_clip(i))
        return (loss + rivals.KL_WEIGHT * out.kl.sum() / i.denominator,)

    return Call(function, (i.x, i.v, i.v_neg, i.v_ref, i.prev), (1, 2))


def _rival_loss(i: Inputs) -> Call:
    return Call(rivals.loss, (*flat(i.x, i.v, i.prev), i.old_log_prob, i.adv, i.denominator, *i.schedule), (1,))


def _rival_loss_v_old(i: Inputs) -> Call:
    """The peers have no v_old: they read the old log-prob."""
    latents = flat(i.x, i.v, i.prev)
    return Call(rivals.loss, (*latents, i.old_log_prob_of_v_old, i.adv, i.denominator, *i.schedule), (1,))


def _exact_loss_v_old(i: Inputs) -> Call:
    def function(
        x: Tensor, v: Tensor, prev: Tensor, v_old: Tensor, adv: Tensor, denominator: Tensor, *schedule: Tensor
    ) -> Tensors:
        with torch.no_grad():
            (old,) = rivals.log_prob_alone(x, v_old, prev, *schedule)
        return rivals.loss(x, v, prev, old, adv, denominator, *schedule)

    return Call(function, (*flat(i.x, i.v, i.prev, i.v_old), i.adv, i.denominator, *i.schedule), (1,))


def _rival_loss_guided(i: Inputs) -> Call:
    latents = flat(i.x, i.v, i.v_neg, i.v_ref, i.prev)
    rest = (i.old_log_prob_guided, i.adv, i.denominator, i.shape.tokens, *i.schedule)
    return Call(rivals.guided_loss, (*latents, *rest), (1, 2))


def _exact_loss_guided(i: Inputs) -> Call:
    def function(x: Tensor, v: Tensor, v_neg: Tensor, v_ref: Tensor, prev: Tensor, *rest: Tensor) -> Tensors:
        return rivals.loss_with_kl(x, exact_guided(v, v_neg, i.shape.tokens, i.dtype), v_ref, prev, *rest)

    latents = flat(i.x, i.v, i.v_neg, i.v_ref, i.prev)
    return Call(function, (*latents, i.old_log_prob_guided, i.adv, i.denominator, *i.schedule), (1, 2))


def _policy_loss(i: Inputs) -> Call:
    function = lambda log_prob, old: policy_loss(log_prob, old, i.adv, **_clip(i))[:1]  # noqa: E731
    return Call(function, (i.log_prob_entries, i.old_log_prob_entries), (0,))


def _rival_policy_loss(i: Inputs) -> Call:
    return Call(rivals.clipped_loss, (i.log_prob_entries, i.old_log_prob_entries, i.adv, i.denominator), (0,))


def _advantage(i: Inputs) -> Call:
    return Call(
        lambda rewards, group: (group_advantage(rewards, group, "group_std", rivals.EPS, None),), (i.rewards, i.group)
    )


def sample_loop(i: Inputs) -> Call:
    return Call(rivals.advantage_by_sample, (i.rewards, i.group))


def group_loop(i: Inputs) -> Call:
    return Call(rivals.advantage_by_group, (i.rewards, i.group))


_STEP, _LOSS, _GUIDED = ("x", "v"), ("x", "v", "prev"), ("x", "v", "v_neg", "v_ref", "prev")
_KL_RATIO = (*_LOSS, "v_ref", "v_old", *_LOSS, "v_ref")  # the backward does not need v_old
_LOG_PROBS = ("log_prob_entries", "old_log_prob_entries")

# fmt: off
OPS = (
    Op("sde_step", "noise", _step_noise, _rival_step, 2, (*_STEP, "noise"), ("x",)),
    Op("sde_step", "key", _step_key, _rival_step_drawing, 2, _STEP, ("x",), 12, _exact_step_key, _exact_step_drawn),
    Op("sde_log_prob", "", _log_prob, _rival_log_prob, 1, _LOSS * 2, ("v",)),
    Op("sde_log_prob", "kl+ratio", _log_prob_kl_ratio, _rival_kl_ratio, 3, _KL_RATIO, ("v",), 8, _exact_kl_ratio),
    Op("cfg_combine", "", _cfg, _rival_cfg, 1, ("v", "v_neg", "upstream"), ("v", "v", "v_neg")),
    Op("cfg_combine", "rescale", _cfg_rescale, _rival_cfg_rescale, 1, ("v", "v_neg", "v", "v_neg", "upstream"),
       ("v", "v", "v_neg"), tokens_only=True),
    Op("flow_grpo_loss", "", _fused, _rival_loss, 1, _LOSS * 2, ("v",)),
    Op("flow_grpo_loss", "v_old", _fused_v_old, _rival_loss_v_old, 1, (*_LOSS, "v_old", *_LOSS), ("v",), 8, _exact_loss_v_old),
    Op("flow_grpo_loss", "cfg+kl", _fused_guided, _rival_loss_guided, 1, _GUIDED * 2, ("v", "v_neg"), 10, _exact_loss_guided),
    Op("policy_loss", "", _policy_loss, _rival_policy_loss, 1, (*_LOG_PROBS, "adv", "log_prob_entries"),
       ("log_prob_entries", "log_prob_entries"), batches=(32, 4096, 65536)),
    Op("group_advantage", "sample loop", _advantage, sample_loop, 1, ("rewards", "group"), ("rewards",), batches=(4096,),
       is_loop=True),
)

# The loss from cfg_combine, sde_log_prob and policy_loss: what a training step runs without flow_grpo_loss.
COMPOSED = (
    Op("three ops", "", _composed, _rival_loss, 1, _LOSS * 2, ("v",)),
    Op("three ops", "cfg+kl", _composed_guided, _rival_loss_guided, 1, _GUIDED * 2, ("v", "v_neg"), 10, _exact_loss_guided),
)
# fmt: on
