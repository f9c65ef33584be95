"""Agent loops: what happens to one prompt group, from text to reward. asyncio; one task per group.

Tokenising happens in the event-loop thread (a shared fast tokenizer in several threads raises "Already borrowed").
Requests go to a queue that forms forward batches; each group's rewards start when its images land, while the next
batch is still being generated. `SingleTurnAgentLoop` is the default; `MultiTurnAgentLoop` generates several times per
group, each turn with a prompt and a reward of its own.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowgrpo_fast.batch import RolloutBatch
from flowgrpo_fast.config import ConfigError, SigmasConfig
from flowgrpo_fast.data.images import SOURCE_IMAGES, load_image
from flowgrpo_fast.data.prompts import PromptRecord
from flowgrpo_fast.models.base import ModelAdapter, PromptTokens
from flowgrpo_fast.registry import load_named
from flowgrpo_fast.rewards import RewardManager, RewardResult
from flowgrpo_fast.rollout.base import Rollout, RolloutRequest, SamplingParams


@dataclass(frozen=True)
class GroupTask:
    """One prompt group to generate. `sample_id` int64 [turns, G] and `group_id` [turns] are run-unique; `window_start` int64 [turns, G]."""

    record: PromptRecord
    group_id: Tensor
    sample_id: Tensor
    window_start: Tensor


@dataclass(frozen=True)
class Turn:
    """One generation of a group with its reward."""

    prompt: str
    batch: RolloutBatch
    reward: RewardResult


class GenerationQueue:
    """Collects requests into forward batches of `groups_per_batch`, in order of arrival.

    A batch leaves when it is full, or when every live group waits here; with several turns only when all wait, sorted by
    group. So its composition never depends on how long a reward took, and a resumed run sees the same batches.
    """

    def __init__(
        self,
        rollout: Rollout,
        sampling: SamplingParams,
        policy_version: int,
        groups_per_batch: int,
        live: int,
        turns: int = 1,
    ) -> None:
        self.rollout, self.sampling, self.policy_version = rollout, sampling, policy_version
        self.groups_per_batch, self.live, self.turns, self.running = groups_per_batch, live, turns, 0
        self.waiting: list[tuple[RolloutRequest, asyncio.Future[RolloutBatch]]] = []
        self.executor = ThreadPoolExecutor(rollout.concurrency, thread_name_prefix="rollout")
        self.batches: set[asyncio.Task[None]] = set()
        self.last_image = time.perf_counter()

    async def submit(self, request: RolloutRequest) -> RolloutBatch:
        future: asyncio.Future[RolloutBatch] = asyncio.get_running_loop().create_future()
        self.waiting.append((request, future))
        self._release()
        return await future

    def group_done(self) -> None:
        self.live -= 1
        self._release()

    def _release(self) -> None:
        while self.waiting:
            all_wait = len(self.waiting) == self.live - self.running
            if not all_wait and (self.turns > 1 or len(self.waiting) < self.groups_per_batch):
                return
            if self.turns > 1:
                self.waiting.sort(key=lambda entry: entry[0].group_id)
            chosen, self.waiting = self.waiting[: self.groups_per_batch], self.waiting[self.groups_per_batch :]
            self.running += len(chosen)
            task = asyncio.create_task(self._run(chosen))
            self.batches.add(task)
            task.add_done_callback(self.batches.discard)

    async def _run(self, chosen: list[tuple[RolloutRequest, asyncio.Future[RolloutBatch]]]) -> None:
        requests = [request for request, _ in chosen]
        loop = asyncio.get_running_loop()
        try:
            batch = await loop.run_in_executor(
                self.executor, self.rollout.generate, requests, self.sampling, self.policy_version
            )
            parts = batch.split_prompts()
        except BaseException as error:
            for _, future in chosen:
                if not future.done():
                    future.set_exception(error)
            return
        finally:
            self.running -= len(chosen)
            self.last_image = time.perf_counter()
        for (_, future), part in zip(chosen, parts, strict=True):
            if not future.done():
                future.set_result(part)

    def close(self) -> None:
        self.executor.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class AgentContext:
    """What a loop may use."""

    adapter: ModelAdapter
    queue: GenerationQueue
    rewards: RewardManager
    max_sequence_length: int
    negative_prompt: str | None
    sigmas: SigmasConfig

    def tokenize(self, prompt: str, images: Tensor | None = None) -> PromptTokens:
        """images: `source_images` of the prompt. ValueError for a family that edits without any."""
        if self.adapter.max_source_images and images is None:
            raise ValueError(f"{self.adapter.family} edits images: tokenize(prompt, context.source_images(record))")
        return replace(self.adapter.tokenize([prompt], self.max_sequence_length), images=images)

    def source_images(self, record: PromptRecord) -> Tensor | None:
        """uint8 [1, M, 3, H, W] at the size of the samples, for families that edit."""
        if not self.adapter.max_source_images or not record.images:
            return None
        return torch.stack([load_image(image, self.queue.sampling.media_size) for image in record.images])[None]


class AgentLoop(ABC):
    """Subclass, register or name as `module:Class` in rollout.agent_loop. `turns`: generations per group, the same for every group."""

    turns = 1

    def __init__(self, context: AgentContext) -> None:
        self.context = context

    @abstractmethod
    async def run(self, task: GroupTask) -> list[Turn]:
        """All turns of one group, in order."""

    async def generate_and_score(self, task: GroupTask, turn: int, prompt: str) -> Turn:
        """One generation of the whole group and its reward."""
        c = self.context
        negative = c.negative_prompt if task.record.negative_prompt is None else task.record.negative_prompt
        guided = c.adapter.needs_negative(c.queue.sampling.guidance_scale) and negative is not None
        images, metadata = c.source_images(task.record), task.record.metadata
        if images is not None:
            metadata = metadata | {SOURCE_IMAGES: list(task.record.images)}
        request = RolloutRequest(
            group_id=int(task.group_id[turn]),
            tokens=c.tokenize(prompt, images),
            negative_tokens=c.tokenize(negative, images) if guided and negative is not None else None,
            sample_id=task.sample_id[turn],
            window_start=task.window_start[turn],
        )
        batch = await c.queue.submit(request)
        if batch.media is None:
            raise RuntimeError(f"the rollout returned no images for group {request.group_id}; nothing can be scored")
        reward = await c.rewards.score_async(batch.media, [prompt] * batch.size, [metadata] * batch.size)
        return Turn(prompt, batch, reward)


class SingleTurnAgentLoop(AgentLoop):
    """Prompt -> images -> reward."""

    async def run(self, task: GroupTask) -> list[Turn]:
        return [await self.generate_and_score(task, 0, task.record.prompt)]


class MultiTurnAgentLoop(AgentLoop):
    """Several generations per group; `next_prompt` decides what to ask for after seeing the turns so far."""

    turns = 2

    @abstractmethod
    async def next_prompt(self, task: GroupTask, history: Sequence[Turn]) -> str: ...

    async def run(self, task: GroupTask) -> list[Turn]:
        history: list[Turn] = []
        for turn in range(self.turns):
            prompt = await self.next_prompt(task, history)
            history.append(await self.generate_and_score(task, turn, prompt))
        return history


AGENT_LOOPS = {
    "preferences": "flowgrpo_fast.rollout.preferences:PreferenceLoop",
    "single_turn": "flowgrpo_fast.rollout.agent_loop:SingleTurnAgentLoop",
}


def agent_loop_class(name: str) -> type[AgentLoop]:
    """A registered loop or the user's `module:Class`. Raises ConfigError."""
    loop = load_named("rollout.agent_loop", name, AGENT_LOOPS)
    if not (isinstance(loop, type) and issubclass(loop, AgentLoop)):
        raise ConfigError(f"rollout.agent_loop = {name!r} is not a subclass of AgentLoop")
    return loop


@dataclass(frozen=True)
class RolloutResult:
    """All groups of a phase on this rank, in task order (turn by turn inside a group)."""

    batch: RolloutBatch
    reward: RewardResult
    prompts: list[str]  # [B]
    generation_seconds: float
    reward_wait_seconds: float  # from the last image to the last reward


def run_agent_loops(
    loop_class: type[AgentLoop],
    tasks: Sequence[GroupTask],
    *,
    adapter: ModelAdapter,
    rollout: Rollout,
    rewards: RewardManager,
    sampling: SamplingParams,
    policy_version: int,
    groups_per_batch: int,
    max_sequence_length: int,
    negative_prompt: str | None,
    sigmas: SigmasConfig | None = None,
) -> RolloutResult:
    """Runs every group concurrently and joins the results. The first error cancels the rest and is raised."""

    began = time.perf_counter()

    async def main() -> tuple[list[list[Turn]], float]:
        queue = GenerationQueue(rollout, sampling, policy_version, groups_per_batch, len(tasks), loop_class.turns)
        context = AgentContext(adapter, queue, rewards, max_sequence_length, negative_prompt, sigmas or SigmasConfig())

        async def one(task: GroupTask) -> list[Turn]:
            try:
                return await loop_class(context).run(task)
            finally:
                queue.group_done()

        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(one(task)) for task in tasks]
            return [task.result() for task in running], queue.last_image
        except ExceptionGroup as errors:
            # A thread cannot be interrupted, and closing the queue waits for it.
            await asyncio.to_thread(rollout.cancel)
            raise errors.exceptions[0] from None
        finally:
            queue.close()

    groups, last_image = asyncio.run(main())
    for task, group in zip(tasks, groups, strict=True):
        if len(group) != loop_class.turns:
            raise ValueError(
                f"{loop_class.__name__} returned {len(group)} turn(s) for prompt {task.record.index}, its `turns` is {loop_class.turns}"
            )
    turns = [turn for group in groups for turn in group]
    return RolloutResult(
        batch=RolloutBatch.concat([turn.batch for turn in turns]),
        reward=RewardResult.concat([turn.reward for turn in turns]),
        prompts=[turn.prompt for turn in turns for _ in range(turn.batch.size)],
        generation_seconds=last_image - began,
        reward_wait_seconds=time.perf_counter() - last_image,
    )


def make_tasks(
    records: Sequence[PromptRecord], first_group: int, group_size: int, turns: int, window_start: Tensor | None = None
) -> list[GroupTask]:
    """Tasks with run-unique ids: group g, turn t has id g * turns + t; its samples follow one another.

    window_start: int64 [len(records) * turns * group_size] in that order, or None (ODE).
    """
    tasks = []
    for i, record in enumerate(records):
        group = (first_group + i) * turns + torch.arange(turns)
        sample = group[:, None] * group_size + torch.arange(group_size)
        start = (
            torch.zeros_like(sample) if window_start is None else window_start.view(len(records), turns, group_size)[i]
        )
        tasks.append(GroupTask(record, group, sample, start))
    return tasks
