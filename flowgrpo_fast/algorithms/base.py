"""What the trainer asks of an algorithm, and what several of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flowgrpo_fast.config import AlgorithmConfig, ConfigError
from flowgrpo_fast.ops import sde_log_prob
from flowgrpo_fast.schedule import StepCoefficients


@dataclass(frozen=True)
class LossInputs:
    """Of an algorithm over the reverse process: N (sample, step) pairs of a rollout, one forward."""

    x: Tensor  # [N, ...] fp32, the state that the step started from
    v: Tensor  # [N, ...] velocity of the current policy, with gradient
    prev: Tensor  # [N, ...] fp32, the step's stored result
    coef: StepCoefficients  # [N]
    minus_dt: Tensor  # fp32 [N]; sigma - sigma' of the step, > 0
    std_dev: (
        Tensor  # fp32 [N]; the field's std_dev_t: coef.s without sqrt(-dt) under rule `sde`, coef.s under the others
    )
    old_log_prob: Tensor | None  # fp32 [N]; None: on-policy, take the current one, detached
    old_v: Tensor | None  # [N, ...] velocity of the policy that made the step, for algorithms that want it
    advantage: Tensor  # fp32 [N]
    mask: Tensor  # bool [N]; False: a sample without a valid reward
    step_weight: Tensor | None  # fp32 [N], of the step's loss
    denominator: Tensor  # 0-d; kept pairs of all ranks / number of ranks (DeepSpeed averages gradients over ranks)
    v_ref: Tensor | None  # [N, ...] velocity of the reference policy


@dataclass(frozen=True)
class ForwardInputs:
    """Of an algorithm over the forward process: N (sample, noise level) pairs. The network sees x = (1 - sigma) x0 + sigma noise."""

    x0: Tensor  # [N, ...] fp32, the finished sample
    noise: Tensor  # [N, ...] fp32
    sigma: Tensor  # fp32 [N], in (0, 1]
    v: Tensor  # [N, ...] velocity of the current policy at x, with gradient
    old_v: Tensor | None  # [N, ...] of the old policy; None: on-policy, take the current one, detached
    v_ref: Tensor | None  # [N, ...] of the reference policy
    advantage: Tensor  # fp32 [N]
    mask: Tensor  # bool [N]
    denominator: Tensor  # 0-d, as above

    def error(self, v: Tensor) -> Tensor:
        """mean((v - (noise - x0))^2) of each pair, fp32 [N]: how far a velocity is from the straight path to this sample."""
        return (v.float() - (self.noise - self.x0)).square().flatten(1).mean(1)

    def mean(self, entries: Tensor) -> Tensor:
        """Over the kept pairs. `where`, not a product: a masked sample's NaN must not reach the sum."""
        return torch.where(self.mask, entries, 0.0).sum() / self.denominator

    def kept_mean(self, entries: Tensor) -> Tensor:
        """For metrics: over the kept pairs of this forward."""
        return torch.where(self.mask, entries, 0.0).sum() / self.mask.sum().clamp(min=1)


class Algorithm(ABC):
    """One file each. The class says what it needs of a rollout, and only that is kept."""

    process: ClassVar[Literal["reverse", "forward"]] = "reverse"
    """reverse: (sample, step) pairs of an SDE rollout, by log-prob: `loss` gets LossInputs. forward: finished samples, noised anew: ForwardInputs."""
    clips_log_prob_ratio: ClassVar[bool] = True
    """reverse: what is clipped is exp(log p - log p_old), so that it can be shown by denoising step."""
    needs_old_v: ClassVar[bool] = False
    """The velocity of the old policy for each pair."""
    needs_reference: ClassVar[bool] = False
    """v_ref even without a KL."""
    shares_noise: ClassVar[bool] = False
    """forward: all samples of a group get the same noise and noise levels."""
    has_matching: ClassVar[bool] = False
    """Reads algorithm.matching."""
    beta: ClassVar[float | None] = None
    """What algorithm.beta null stands for; None: the algorithm has no such number."""

    def __init__(self, config: AlgorithmConfig) -> None:
        """Raises ConfigError for a setting that it cannot go with."""
        self.config = config
        if config.beta is not None and self.beta is None:
            raise ConfigError(f"algorithm.beta = {config.beta}: {config.name} has no beta; remove it")
        if config.matching != "uniform" and not self.has_matching:
            raise ConfigError(f"algorithm.matching = {config.matching!r}: {config.name} weighs no errors; set uniform")
        if config.old_policy != "copy" and not (self.process == "forward" and self.needs_old_v):
            raise ConfigError(
                f"algorithm.old_policy = {config.old_policy!r}: {config.name} compares with the policy that the rollout found; set copy"
            )
        if self.process == "forward" and config.kl_coef > 0 and config.kl_form != "velocity_mse":
            raise ConfigError(
                f"algorithm.kl_form = {config.kl_form!r}: {config.name} takes no steps, whose Gaussians it could compare; set velocity_mse"
            )

    @property
    def uses_reference(self) -> bool:
        """Does a run need the network as it was before training?"""
        return self.config.kl_coef > 0 or self.needs_reference

    @property
    def strength(self) -> float:
        """algorithm.beta, or this algorithm's own."""
        chosen = self.beta if self.config.beta is None else self.config.beta
        assert chosen is not None
        return chosen

    def trained_per_group(self) -> int:
        """Samples of a group that are trained on."""
        return min(self.config.train_on or self.config.group_size, self.config.group_size)

    def choose(self, advantages: Tensor, group_id: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages fp32, group ids int64, valid bool, each [B] of whole groups -> rows int64 [groups * trained_per_group], valid bool alike."""
        index = best_and_worst(advantages, group_id, valid, self.trained_per_group())
        return index, valid[index]

    @abstractmethod
    def loss(self, inputs: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """LossInputs or ForwardInputs -> (loss with gradient; detached fp32 [N]: log-probs, or errors; metrics as 0-d device tensors,
        `kept` among them)."""


def best_and_worst(advantages: Tensor, group_id: Tensor, valid: Tensor, count: int) -> Tensor:
    """Rows int64 [groups * count]: of each group, in order of appearance, the worst count // 2 and then the best rest (DanceGRPO's best-of-n), each
    from low to high, ties by order. Where too few are valid, invalid ones fill up."""
    chosen = []
    for id_ in dict.fromkeys(group_id.tolist()):
        members = (group_id == id_).nonzero()[:, 0]
        if count == len(members):
            chosen.append(members)
            continue
        good = members[valid[members]]
        order = good[advantages[good].argsort(stable=True)]
        if len(order) >= count:
            chosen += [order[: count // 2], order[len(order) - (count - count // 2) :]]
        else:
            chosen += [order, members[~valid[members]][: count - len(order)]]
    return torch.cat(chosen)


def old_velocity(inputs: LossInputs | ForwardInputs) -> Tensor:
    """Without gradient. On-policy it is the current one."""
    return inputs.v.detach() if inputs.old_v is None else inputs.old_v


def with_reference_kl(
    loss: Tensor, metrics: dict[str, Tensor], inputs: LossInputs, config: AlgorithmConfig, kl: Tensor | None = None
) -> Tensor:
    """loss + kl_coef * mean KL to the reference, with gradient. kl fp32 [N]: the Gaussian one, from `sde_log_prob(v_ref=...)`, where it is there already.

    gaussian       mean((mu - mu_ref)^2) / (2 s^2), the KL of the step
    flow_grpo      mean((mu - mu_ref)^2) / (2 std_dev_t^2): under rule `sde` the KL times -dt (flow_grpo, verl-omni)
    velocity_mse   mean((v - v_ref)^2) (Flow-Factory's v-based form)
    """
    i = inputs
    if i.v_ref is None or config.kl_coef == 0:
        return loss
    if config.kl_form == "velocity_mse":
        kl = squared_distance(i.v, i.v_ref)
    else:
        if kl is None:
            kl = sde_log_prob(i.x, i.v, i.prev, i.coef, v_ref=i.v_ref, reduction=config.log_prob_reduction).kl
        assert kl is not None
        kl = per_element(kl, i, config)
        if config.kl_form == "flow_grpo":
            kl = kl * (i.coef.s / i.std_dev).square()
    # `where`, not a product: a masked sample's NaN must not reach the sum.
    mean = torch.where(i.mask, kl, 0.0).sum() / i.denominator
    metrics["kl"] = mean.detach()
    return loss + config.kl_coef * mean


def per_element(kl: Tensor, inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """The mean over latent elements, whatever algorithm.log_prob_reduction adds up."""
    return kl / inputs.x[0].numel() if config.log_prob_reduction == "sum" else kl


def with_velocity_kl(
    loss: Tensor, metrics: dict[str, Tensor], inputs: ForwardInputs, config: AlgorithmConfig
) -> Tensor:
    """loss + kl_coef * mean((v - v_ref)^2), with gradient."""
    if inputs.v_ref is None or config.kl_coef == 0:
        return loss
    mean = inputs.mean(squared_distance(inputs.v, inputs.v_ref))
    metrics["kl"] = mean.detach()
    return loss + config.kl_coef * mean


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """mean((a - b)^2) of each row, fp32 [N]."""
    return (a.float() - b.float()).square().flatten(1).mean(1)
