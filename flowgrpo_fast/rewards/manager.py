"""Runs the rewards of a run: retries what may pass, marks what failed as invalid, and never invents a score."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowgrpo_fast.lifetime import alive
from flowgrpo_fast.profile import span
from flowgrpo_fast.rewards.base import Reward, TransientRewardError, build_reward

MAX_BACKOFF_S = 30.0
TRANSIENT = (TransientRewardError, ConnectionError, TimeoutError)


@dataclass(frozen=True)
class RewardSpec:
    """One reward of a run. `label` names it in metrics and errors; by default it is `name`."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    label: str | None = None
    held_out: bool = False
    """Scored and logged, never trained on; its failures cost nothing but its own values."""


@dataclass
class RewardResult:
    """Scores of N samples by K rewards."""

    components: Tensor
    """fp32 [N, K], a column for each spec that is not held out; NaN where that reward has no score for that sample."""
    valid: Tensor
    """bool [N]: every reward has a finite score."""
    metrics: dict[str, Tensor]
    """"label/name" -> fp32 [N], whatever else a reward returned, and "held_out/label"; NaN where it has no score. No key where it raised."""
    errors: list[str]
    """One for each failure; names reward, sample (index in the call) and reason."""

    @staticmethod
    def empty(rewards: int) -> RewardResult:
        """The result of no samples for K = `rewards`."""
        return RewardResult(torch.empty(0, rewards), torch.empty(0, dtype=torch.bool), {}, [])

    @staticmethod
    def concat(results: Sequence[RewardResult]) -> RewardResult:
        """Joins results of one manager, in order. A metric that one of them lacks (its reward raised) is NaN there."""
        names = dict.fromkeys(name for result in results for name in result.metrics)
        return RewardResult(
            components=torch.cat([result.components for result in results]),
            valid=torch.cat([result.valid for result in results]),
            metrics={
                name: torch.cat([r.metrics.get(name, torch.full((len(r.valid),), math.nan)) for r in results])
                for name in names
            },
            errors=[error for result in results for error in result.errors],
        )


class RewardFailure(RuntimeError):
    """Too many samples have no valid reward."""


class RewardManager:
    """Scores samples with every reward of `specs`.

    A transient error (a service that is down) is retried after backoff_s, 2 backoff_s, 4 backoff_s, ... at most MAX_BACKOFF_S apart, up to
    `max_retries` times and for `patience_s` in all, whichever is longer. `workers`
    calls of `score_async` run at a time; with more than one, rewards must be safe to call from several threads.
    Raises ValueError for a spec that cannot be built, two of the same label, or numbers out of range.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        max_retries: int = 3,
        backoff_s: float = 0.5,
        workers: int = 1,
        patience_s: float = 0.0,
    ):
        if not any(not spec.held_out for spec in specs):
            raise ValueError("at least one reward that is not held out is needed")
        if max_retries < 0 or backoff_s < 0 or workers < 1 or patience_s < 0:
            raise ValueError(
                "max_retries, backoff_s and patience_s must not be negative and workers at least 1, got"
                f" {max_retries}, {backoff_s}, {patience_s}, {workers}"
            )
        labels = [spec.label or spec.name for spec in specs]
        for i, (label, spec) in enumerate(zip(labels, specs, strict=True)):
            if label in labels[:i]:
                raise ValueError(f"two rewards are called {label!r}: give one of them another `label`")
            if not math.isfinite(spec.weight):
                raise ValueError(f"the weight of reward {label!r} must be finite, got {spec.weight}")
        self.labels = [label for label, spec in zip(labels, specs, strict=True) if not spec.held_out]
        self.weights = torch.tensor([spec.weight for spec in specs if not spec.held_out], dtype=torch.float32)
        self.max_retries, self.backoff_s, self.patience_s = max_retries, backoff_s, patience_s
        built = [build_reward(spec.name, spec.kwargs) for spec in specs]
        # In the order of `labels`, then those held out.
        self._rewards = [
            (label, reward, spec.held_out) for label, reward, spec in zip(labels, built, specs, strict=True)
        ]
        self._rewards.sort(key=lambda entry: entry[2])
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="reward")

    def score(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> RewardResult:
        """images uint8 [N, 3, H, W] (videos [N, F, 3, H, W]) on the CPU. Failures of rewards end up in the result."""
        n = len(images)
        if len(prompts) != n or len(metadata) != n:
            raise ValueError(f"{n} images, {len(prompts)} prompts and {len(metadata)} metadata do not go together")
        components = torch.full((n, len(self.labels)), math.nan)
        metrics: dict[str, Tensor] = {}
        errors: list[str] = []
        for k, (label, reward, held_out) in enumerate(self._rewards):
            try:
                with span("reward"):
                    scores = per_sample(self._call(reward, images, prompts, metadata), n)
                alive()
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                at = "" if place.filename == __file__ else f" ({place.filename}:{place.lineno})"
                errors.append(f"reward {label!r}, all {n} samples: {type(error).__name__}: {error}{at}")
                continue
            score = scores.pop("reward")
            finite = score.isfinite()
            errors += [
                f"reward {label!r}, sample {i} (prompt {prompts[i]!r}): the score is {score[i].item()}"
                for i in (~finite).nonzero()[:, 0].tolist()
            ]
            score = score.where(finite, math.nan)
            if held_out:
                metrics[f"held_out/{label}"] = score
                continue
            components[:, k] = score
            metrics |= {f"{label}/{name}": value.where(finite, math.nan) for name, value in scores.items()}
        return RewardResult(components, ~components.isnan().any(1), metrics, errors)

    async def score_async(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> RewardResult:
        """`score` in the manager's own threads, while the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.score, images, prompts, metadata)

    def close(self) -> None:
        """Ends waiting for services that are down, waits for calls under way, and ends the threads."""
        self._closed.set()
        self._pool.shutdown()

    def _call(self, reward: Reward, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
        began = time.monotonic()
        for attempt in itertools.count():
            try:
                with torch.no_grad():
                    return reward(images, prompts, metadata)
            except TRANSIENT as error:
                waited = time.monotonic() - began
                if self._closed.is_set() or (attempt >= self.max_retries and waited >= self.patience_s):
                    tried = f"gave up after {attempt + 1} attempts in {waited:.0f} s"
                    raise TransientRewardError(f"{tried}: {type(error).__name__}: {error}") from error
                if attempt == self.max_retries:
                    print(
                        f"a reward is down, waiting for it for up to {self.patience_s:.0f} s: {type(error).__name__}: {error}",
                        flush=True,
                    )
                # Someone knows that it is down: not a hang.
                alive()
                self._closed.wait(min(self.backoff_s * 2**attempt, MAX_BACKOFF_S))
        raise AssertionError("unreachable")


def per_sample(result: Any, n: int) -> dict[str, Tensor]:
    """What a reward returned as {"reward": fp32 [N], ...}. ValueError where it is not that."""
    scores = dict(result) if isinstance(result, dict) else {"reward": result}
    if "reward" not in scores:
        raise ValueError(f'returned a dict without "reward"; its keys are {list(scores)}')
    for name, value in scores.items():
        expected = f"{name!r} must hold {n} real values, shape [{n}], one for each sample"
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{expected}; got a {type(value).__name__}") from error
        if tensor.is_complex() or tensor.shape != (n,):
            raise ValueError(f"{expected}; got {tensor.numel()} values, {tensor.dtype} {list(tensor.shape)}")
        scores[name] = tensor.detach().to("cpu", torch.float32)
    return scores


def combine_components(components: Tensor, weights: Tensor, valid: Tensor, normalize: bool = False) -> Tensor:
    """reward = sum_k weights_k component_k, with `normalize` of each component's z-score over the valid samples.

    components [B, K], weights [K], valid bool [B] -> fp32 [B], NaN where invalid (so `group_advantage` leaves it out).
    B is the whole batch, over all ranks. z = (c - mean) / (std + 1e-4), population std; a constant component gives
    exactly 0. fp64 inside. Raises ValueError where the shapes do not go together.
    """
    if components.ndim != 2 or weights.shape != components.shape[1:] or valid.shape != components.shape[:1]:
        raise ValueError(
            f"components [B, K], weights [K] and valid [B] do not go together: "
            f"{list(components.shape)}, {list(weights.shape)}, {list(valid.shape)}"
        )
    kept = components[valid].double()
    if normalize and len(kept):
        # Equal fp32 values add up without rounding in fp64, so that a constant leaves no residue to divide by eps.
        kept = (kept - kept.mean(0)) / (kept.std(0, correction=0) + 1e-4)
    combined = torch.full(valid.shape, math.nan, dtype=torch.float32, device=components.device)
    combined[valid] = (kept * weights.double()).sum(1).float()
    return combined


def check_failures(valid: Tensor, errors: Sequence[str], max_failure_share: float) -> None:
    """Raises RewardFailure where more than `max_failure_share` (0 to 1) of `valid`, bool [B] of all ranks, is False."""
    failed, total = int((~valid).sum()), valid.numel()
    if total and failed / total > max_failure_share:
        shown = "\n".join(f"  {error}" for error in errors[:5]) or "  (none on this rank)"
        raise RewardFailure(
            f"{failed} of {total} samples have no valid reward, more than the share of {max_failure_share:g} allowed. "
            f"First of {len(errors)} errors:\n{shown}"
        )
