"""The rollout protocol: requests of prompt groups in, one RolloutBatch of contiguous tensors out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from flowgrpo_fast.batch import MediaSize, RolloutBatch
from flowgrpo_fast.models.base import PromptTokens


@dataclass(frozen=True)
class SamplingParams:
    """What all requests of a phase share. `window_size` 0 samples the plain ODE: no noise, no log-probs."""

    height: int
    width: int
    frames: int
    num_steps: int
    guidance_scale: float
    rule: Literal["sde", "cps", "dance"]
    noise_level: float
    log_prob_form: Literal["gaussian", "flow_grpo"]
    log_prob_reduction: Literal["mean", "sum"]
    window_size: int
    initial_noise: str
    seed: int
    ode_order: Literal[1, 2] = 1
    keep_old_v: bool = False
    """The batch holds the velocity of each trained step."""

    @property
    def media_size(self) -> MediaSize:
        return MediaSize(self.height, self.width, self.frames)


@dataclass(frozen=True)
class RolloutRequest:
    """One prompt group: G samples of one prompt. Ids are run-unique and key all noise."""

    group_id: int
    tokens: PromptTokens
    negative_tokens: PromptTokens | None
    sample_id: Tensor  # [G] int64
    window_start: Tensor  # [G] int64; ignored where window_size is 0


class Rollout(Protocol):
    """Where samples come from. All ranks construct it and enter `phase` together; `generate` is each rank's own."""

    @property
    def concurrency(self) -> int:
        """How many calls of `generate` may run at once."""
        ...

    def phase(self, policy_version: int) -> AbstractContextManager[None]:
        """Around all `generate` calls of a phase: weights of this version are in place inside."""
        ...

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, policy_version: int
    ) -> RolloutBatch:
        """One forward batch: prompt row i is request i, samples in request order, `images` filled.

        Raises NonFiniteError naming sample and step where the model gives NaN or inf.
        """
        ...

    def cancel(self) -> None:
        """Ends this rank's running calls of `generate`, from another thread: they raise."""
        ...

    def metrics(self) -> dict[str, float]:
        """What there is to log about the rollout itself."""
        ...

    def close(self) -> None: ...


class ServerLostError(RuntimeError):
    """No rollout server answers any more. Nothing was lost: entering the phase again starts others, and gives the same bits."""


class NonFiniteError(RuntimeError):
    """The model produced NaN or inf. Nothing was trained on it and no checkpoint was touched."""
