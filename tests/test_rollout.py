"""The denoising loop, the in-process rollout and the agent loops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flowgrpo_fast.config import ConfigError
from flowgrpo_fast.data.prompts import PromptRecord
from flowgrpo_fast.ops import STREAM_INITIAL, NoiseKey, philox_normal, sde_log_prob
from flowgrpo_fast.rewards import RewardManager, RewardSpec
from flowgrpo_fast.rollout.agent_loop import (
    GenerationQueue,
    GroupTask,
    RolloutResult,
    SingleTurnAgentLoop,
    Turn,
    agent_loop_class,
    make_tasks,
    run_agent_loops,
)
from flowgrpo_fast.rollout.base import NonFiniteError
from flowgrpo_fast.rollout.denoise import denoise
from flowgrpo_fast.schedule import sde_coefficients
from tests.tiny import Refine, record, request, sampling, tiny_adapter, tiny_rollout

SIGMAS = torch.tensor([1.0, 0.9, 0.75, 0.5, 0.25, 0.0])


def linear_velocity(x: Tensor, sigma: Tensor, rows: list[int]) -> Tensor:
    return 0.3 * x + sigma[:, None, None]


def run_denoise(
    window_start: list[int], window: int, start: list[int] | None = None, velocity=linear_velocity, seed: int = 5
):
    ids = torch.arange(len(window_start))
    x = philox_normal(NoiseKey(seed, 0, ids, STREAM_INITIAL), (3, 4))
    begin = torch.zeros_like(ids) if start is None else torch.tensor(start)
    params = sampling(window_size=window, seed=seed)
    stop, starts = torch.full_like(ids, 5), torch.tensor(window_start)
    return x, denoise(velocity, x, SIGMAS, params, start=begin, stop=stop, window_start=starts, sample_id=ids)


def test_window_states_replay_to_their_log_probs_bitwise() -> None:
    """Mixed windows in one batch: each stored pair gives its log-prob again, to the last bit (peers.md rows 13, 14, 63)."""
    starts = [0, 2, 1, 2]
    _, trajectory = run_denoise(starts, 2)
    for w in range(2):
        at = torch.tensor(starts) + w
        x, prev = trajectory.latents[:, w], trajectory.latents[:, w + 1]
        out = sde_log_prob(x, linear_velocity(x, SIGMAS[at], []), prev, sde_coefficients(SIGMAS, at, noise_level=0.7))
        assert torch.equal(out.log_prob, trajectory.log_probs[:, w])


def test_outside_the_window_is_the_ode() -> None:
    x, trajectory = run_denoise([5], 0)
    for i in range(5):
        x = x + linear_velocity(x, SIGMAS[i : i + 1], []) * (SIGMAS[i + 1] - SIGMAS[i])
    torch.testing.assert_close(trajectory.final, x, rtol=0, atol=1e-6)
    assert torch.equal(trajectory.latents[:, 0], trajectory.final)
    assert trajectory.log_probs.shape == (1, 0)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    _, whole = run_denoise([0, 2, 1, 2], 2)
    _, first = run_denoise([0], 2)
    assert torch.equal(whole.final[:1], first.final)
    assert torch.equal(whole.latents[:1], first.latents)
    assert torch.equal(whole.log_probs[:1], first.log_probs)


def test_late_starters_skip_their_prefix() -> None:
    _, trajectory = run_denoise([0, 3], 1, start=[0, 3])
    x = philox_normal(NoiseKey(5, 0, torch.arange(2), STREAM_INITIAL), (3, 4))
    assert torch.equal(trajectory.latents[1, 0], x[1])


def test_non_finite_velocity_names_step_and_sample() -> None:
    def broken(x: Tensor, sigma: Tensor, rows: list[int]) -> Tensor:
        v = linear_velocity(x, sigma, rows)
        v[(sigma < 0.8) & (torch.tensor(rows) == 1)] = float("nan")
        return v

    with pytest.raises(NonFiniteError, match=r"denoising step 2, sample 1 \(1 of 3"):
        run_denoise([0, 0, 0], 1, velocity=broken)


@pytest.mark.parametrize("noise", ["sample", "group"])
def test_generate_fills_a_valid_batch(noise: str) -> None:
    batch = tiny_rollout().generate(
        [request("draw K7", 4, [0, 1]), request("x", 5, [2, 2])], sampling(initial_noise=noise), 9
    )
    assert batch.latents.shape == (4, 3, 16, 64)
    assert batch.step_index.tolist() == [[0, 1], [1, 2], [2, 3], [2, 3]]
    assert batch.group_id.tolist() == [4, 4, 5, 5]
    assert (batch.policy_version, batch.prompt_embeds.shape[0]) == (9, 2)
    assert batch.images is not None
    assert batch.images.shape == (4, 3, 64, 64)


def test_group_shares_initial_noise_and_nothing_else() -> None:
    """peers.md rows 33, 34: equal x_T in a group, different SDE noise; other groups differ."""
    batch = tiny_rollout().generate(
        [request("x", 0, [0, 0]), request("x", 1, [0, 0])], sampling(initial_noise="group"), 0
    )
    first, second = batch.latents[:, 0], batch.latents[:, 1]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    assert not torch.equal(second[0], second[1])


def test_shared_prefix_is_the_trajectory_of_each_sample() -> None:
    """The prefix computed once per group equals the ODE steps that every sample would have made alone."""
    calls: list[int] = []
    rollout, adapter = tiny_rollout(), tiny_adapter()
    original = adapter.velocity

    def counting(transformer, x, *rest):
        calls.append(x.shape[0])
        return original(transformer, x, *rest)

    adapter.velocity = counting  # type: ignore[method-assign]
    try:
        shared = rollout.generate([request("draw K7", 0, [2, 2, 2, 2])], sampling(initial_noise="group"), 0)
    finally:
        del adapter.velocity
    assert calls == [1, 1, 4, 4, 4]
    x = rollout._initial_noise(3, torch.tensor([0]), (16, 64))
    text = adapter.encode(adapter.tokenize(["draw K7"], 64))
    with torch.no_grad():
        for i in range(2):
            sigma = shared.sigmas[i : i + 1]
            x = x + original(rollout.transformer, x, sigma, text, None, 1.0, shared.media_size) * (
                shared.sigmas[i + 1] - shared.sigmas[i]
            )
    torch.testing.assert_close(shared.latents[:, 0], x.expand(4, -1, -1), rtol=0, atol=1e-6)


def test_same_noise_whatever_the_batching() -> None:
    rollout, params = tiny_rollout(), sampling()
    both = rollout.generate([request("draw K7", 0, [0, 0]), request("draw B2", 1, [1, 1])], params, 0)
    alone = rollout.generate([request("draw B2", 1, [1, 1])], params, 0)
    torch.testing.assert_close(both.latents[2:], alone.latents, rtol=0, atol=2e-5)
    again = rollout.generate([request("draw B2", 1, [1, 1])], params, 0)
    assert torch.equal(alone.latents, again.latents)


class FakeClock:
    """A reward that records when it ran and can wait for an event."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        self.began.append(time.perf_counter())
        return images.float().mean((1, 2, 3))


def run_loops(
    loop_class, tasks: Sequence[GroupTask], rollout=None, groups_per_batch: int = 2, rewards=None, **changes
) -> RolloutResult:
    manager = rewards or RewardManager([RewardSpec("tests.tiny:brightness")])
    return run_agent_loops(
        loop_class, tasks, adapter=tiny_adapter(), rollout=rollout or tiny_rollout(), rewards=manager, sampling=sampling(**changes),
        policy_version=0, groups_per_batch=groups_per_batch, max_sequence_length=64, negative_prompt=None,
    )  # fmt: skip


def test_single_turn_keeps_task_order_and_scores_everything() -> None:
    tasks = make_tasks([record(f"draw {t}", i) for i, t in enumerate(("A1", "B2", "C3"))], 10, 2, 1)
    result = run_loops(SingleTurnAgentLoop, tasks)
    assert result.batch.group_id.tolist() == [10, 10, 11, 11, 12, 12]
    assert result.batch.sample_id.tolist() == [20, 21, 22, 23, 24, 25]
    assert result.prompts[::2] == ["draw A1", "draw B2", "draw C3"]
    assert result.reward.valid.all()
    assert result.reward.components.shape == (6, 1)


def test_rewards_overlap_with_generation() -> None:
    """The first group's reward begins before the last batch is generated."""
    finished: list[float] = []
    inner = tiny_rollout()

    class Recording:
        concurrency = 1
        cancel = staticmethod(lambda: None)

        def generate(self, requests, params, version):
            batch = inner.generate(requests, params, version)
            finished.append(time.perf_counter())
            return batch

        def close(self) -> None: ...

    clock = FakeClock()
    manager = RewardManager([RewardSpec("tests.tiny:brightness")])
    manager._rewards = [("clock", clock, False)]
    run_loops(SingleTurnAgentLoop, make_tasks([record("x", i) for i in range(3)], 0, 2, 1), Recording(), 1, manager)
    assert clock.began[0] < finished[-1]


def test_tokenising_stays_in_one_thread() -> None:
    threads: set[int] = set()
    adapter = tiny_adapter()
    original = adapter.tokenize

    def recording(prompts: list[str], max_length: int):
        threads.add(threading.get_ident())
        return original(prompts, max_length)

    adapter.tokenize = recording  # type: ignore[method-assign]
    try:
        run_loops(SingleTurnAgentLoop, make_tasks([record("x", i) for i in range(4)], 0, 2, 1))
    finally:
        del adapter.tokenize
    assert threads == {threading.get_ident()}


def test_two_turns_with_a_reward_each() -> None:
    tasks = make_tasks([record("draw A1", 0), record("draw B2", 1)], 0, 2, 2)
    result = run_loops(Refine, tasks)
    assert result.batch.group_id.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(result.batch.sample_id.unique()) == 8
    assert result.prompts[0] == "draw A1"
    assert result.prompts[2].startswith("draw A1 ")
    assert result.reward.components.shape == (8, 1)


def test_second_turns_are_batched_by_group_whatever_the_rewards_took() -> None:
    """Three groups whose rewards finish in reverse order: the second turn's batches are those of the first."""
    seen: list[list[int]] = []
    inner = tiny_rollout()

    class Recording:
        concurrency = 1
        cancel = staticmethod(lambda: None)

        def generate(self, requests, params, version):
            seen.append([r.group_id for r in requests])
            return inner.generate(requests, params, version)

        def close(self) -> None: ...

    class Slow:
        def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
            time.sleep(0.05 * (3 - metadata[0]["order"]))
            return images.float().mean((1, 2, 3))

    manager = RewardManager([RewardSpec("tests.tiny:brightness")], workers=3)
    manager._rewards = [("slow", Slow(), False)]
    records = [PromptRecord(i, f"draw {i}", None, {"order": i}) for i in range(3)]
    run_loops(Refine, make_tasks(records, 0, 2, 2), Recording(), 2, manager)
    assert seen == [[0, 2], [4], [1, 3], [5]]


def test_a_loop_that_drops_a_turn_is_found_out() -> None:
    class Short(Refine):
        async def run(self, task: GroupTask) -> list[Turn]:
            return (await super().run(task))[:1]

    with pytest.raises(ValueError, match=r"Short returned 1 turn\(s\) for prompt 0, its `turns` is 2"):
        run_loops(Short, make_tasks([record("x")], 0, 2, 2))


def test_negative_prompts_may_differ_between_groups() -> None:
    """Each group gets the velocity that it would get alone with its own negative prompt."""
    rollout, params = tiny_rollout(), sampling(guidance_scale=3.0)
    requests = [request("draw K7", 0, [0, 0], "draw A1"), request("draw B2", 1, [1, 1], "draw C3")]
    both = rollout.generate(requests, params, 0)
    assert both.negative_prompt_embeds is not None
    assert both.negative_prompt_embeds.shape[0] == 2
    for i, part in enumerate(both.split_prompts()):
        alone = rollout.generate([requests[i]], params, 0)
        torch.testing.assert_close(part.latents, alone.latents, rtol=0, atol=1e-4)


def test_an_error_in_generation_reaches_the_caller() -> None:
    class Broken:
        concurrency = 1
        cancel = staticmethod(lambda: None)

        def generate(self, requests, params, version):
            raise NonFiniteError("sample 3")

        def close(self) -> None: ...

    with pytest.raises(NonFiniteError, match="sample 3"):
        run_loops(SingleTurnAgentLoop, make_tasks([record("x", i) for i in range(3)], 0, 2, 1), Broken())


def test_queue_batches_do_not_depend_on_reward_times() -> None:
    """Five groups in batches of two: 2, 2, 1, in order of arrival, whatever happens in between."""
    sizes: list[list[int]] = []
    inner = tiny_rollout()

    class Recording:
        concurrency = 1
        cancel = staticmethod(lambda: None)

        def generate(self, requests, params, version):
            sizes.append([r.group_id for r in requests])
            return inner.generate(requests, params, version)

        def close(self) -> None: ...

    async def main() -> None:
        queue = GenerationQueue(Recording(), sampling(), 0, 2, live=5)

        async def one(i: int) -> None:
            await queue.submit(request("x", i, [0, 0]))
            await asyncio.sleep(0.02 * (5 - i))
            queue.group_done()

        await asyncio.gather(*(one(i) for i in range(5)))
        queue.close()

    asyncio.run(main())
    assert sizes == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("single_turm", "did you mean 'single_turn'"),
        ("tests.tiny:record", "not a subclass of AgentLoop"),
        ("nowhere:X", "cannot import"),
    ],
)
def test_unknown_agent_loops(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agent_loop_class(name)
