"""Rewards by name, the manager's treatment of failures (never a silent zero), weights, and the JPEG rewards."""

from __future__ import annotations

import asyncio
import io
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from flowgrpo_fast.rewards import (
    RewardFailure,
    RewardManager,
    RewardSpec,
    TransientRewardError,
    build_reward,
    check_failures,
    combine_components,
    register_reward,
    registered_rewards,
)
from flowgrpo_fast.rewards import base as rewards_base

N = 4
IMAGES = torch.zeros(N, 3, 8, 8, dtype=torch.uint8)
PROMPTS = [f"prompt {i}" for i in range(N)]
METADATA: list[dict[str, Any]] = [{} for _ in range(N)]


# What a user would write in a module of their own; addressed as f"{__name__}:...".
def brightness(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]], scale: float = 1.0) -> Tensor:
    return images.float().mean((1, 2, 3)) * scale


class Constant:
    def __init__(self, value: float):
        self.value = value

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        return torch.full((len(images),), self.value)


NOT_A_REWARD = 3


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Forgets what a test registers; the built-in rewards register once, when their module is imported."""
    yield
    for name in rewards_base._factories.keys() - rewards_base.BUILTIN.keys():
        del rewards_base._factories[name]


@pytest.fixture
def manager() -> Iterator[Callable[..., RewardManager]]:
    """manager(reward, ...) -> a RewardManager of rewards given as plain callables, labelled r0, r1, ..."""
    made: list[RewardManager] = []

    def make(*rewards: Any, **options: Any) -> RewardManager:
        for k, reward in enumerate(rewards):
            register_reward(f"r{k}")(lambda reward=reward: reward)
        made.append(RewardManager([RewardSpec(f"r{k}") for k in range(len(rewards))], backoff_s=0.0, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def returning(value: Any) -> Callable[..., Any]:
    return lambda images, prompts, metadata: value


def raising(error: Exception) -> Callable[..., Any]:
    def reward(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        raise error

    return reward


# ---- by name


def test_unknown_name_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(ValueError, match=r"'jpeg_compresibility', did you mean 'jpeg_compressibility'\?") as caught:
        build_reward("jpeg_compresibility")
    for name in registered_rewards():
        assert name in str(caught.value)
    assert {"ocr", "jpeg_compressibility", "jpeg_incompressibility"} <= set(registered_rewards())


def test_module_function_and_class() -> None:
    images = torch.full((2, 3, 4, 4), 10, dtype=torch.uint8)
    assert build_reward(f"{__name__}:brightness") is brightness
    assert build_reward(f"{__name__}:brightness", {"scale": 0.5})(images, [], []).tolist() == [5.0, 5.0]
    assert build_reward(f"{__name__}:Constant", {"value": 2.0})(images, [], []).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("no_such_module:f", {}, "there is no module 'no_such_module'; install it or put its folder on PYTHONPATH"),
        ("os.no_such_part:f", {}, "there is no module 'os.no_such_part'"),
        (f"{__name__}:brightnes", {}, "has no 'brightnes', did you mean 'brightness'?"),
        (f"{__name__}:NOT_A_REWARD", {}, "is a int, not a function or class"),
        (f"{__name__}:brightness", {"size": 1}, "'size'; its signature is"),
        (f"{__name__}:Constant", {}, "missing a required argument: 'value'; its signature is"),
        (f"{__name__}:returning", {"value": 1}, "its signature is"),
        ("jpeg_compressibility", {"qualty": 9}, "'qualty'; its signature is jpeg_compressibility(quality: "),
        ("jpeg_compressibility", {"quality": 0}, "quality must be from 1 to 100, got 0"),
    ],
)
def test_what_cannot_be_built_says_why(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        build_reward(name, kwargs)
    assert message in str(caught.value)


def test_missing_dependency_of_a_user_module_keeps_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
        build_reward("needs_more:f")


def test_register_refuses_taken_names() -> None:
    register_reward("mine")(Constant)
    register_reward("mine")(Constant)
    assert build_reward("mine", {"value": 1.0})(IMAGES, PROMPTS, METADATA).tolist() == [1.0] * N
    with pytest.raises(ValueError, match=r"'mine' is taken by .*Constant"):
        register_reward("mine")(returning)
    with pytest.raises(ValueError, match=r"'ocr' is taken by flowgrpo_fast\.rewards\.ocr"):
        register_reward("ocr")(Constant)
    with pytest.raises(ValueError, match="colon"):
        register_reward("a:b")(Constant)


def test_import_loads_no_reward_library() -> None:
    code = (
        "import sys, flowgrpo_fast.rewards, flowgrpo_fast.data\n"
        "print({'rapidocr', 'onnxruntime', 'PIL', 'cv2', 'pyarrow', 'diffusers', 'deepspeed'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


# ---- the manager


def test_scores_metrics_and_order(manager: Callable[..., RewardManager]) -> None:
    scored = {"reward": torch.arange(N), "exact_match": torch.tensor([True, False, True, False])}
    run = manager(returning(scored), returning(torch.full((N,), 0.5, dtype=torch.float64, requires_grad=True)))
    result = run.score(IMAGES, PROMPTS, METADATA)
    assert result.components.dtype == torch.float32
    assert result.components.tolist() == [[i, 0.5] for i in range(N)]
    assert not result.components.requires_grad
    assert result.valid.tolist() == [True] * N
    assert result.errors == []
    assert {k: v.tolist() for k, v in result.metrics.items()} == {"r0/exact_match": [1.0, 0.0, 1.0, 0.0]}
    assert set(scored) == {"reward", "exact_match"}, "what the reward returned is left as it was"


def test_rewards_run_without_autograd(manager: Callable[..., RewardManager]) -> None:
    run = manager(lambda images, prompts, metadata: torch.full((N,), float(torch.is_grad_enabled())))
    assert run.score(IMAGES, PROMPTS, METADATA).components.sum() == 0


def test_no_samples(manager: Callable[..., RewardManager]) -> None:
    result = manager(returning(torch.zeros(0))).score(IMAGES[:0], [], [])
    assert result.components.shape == (0, 1)
    assert result.valid.shape == (0,)


def test_raising_reward_is_invalid_and_never_zero(manager: Callable[..., RewardManager]) -> None:
    calls: list[int] = []

    def broken(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        calls.append(1)
        raise KeyError("caption")

    result = manager(broken, returning(torch.ones(N))).score(IMAGES, PROMPTS, METADATA)
    assert len(calls) == 1, "only transient errors are retried"
    assert result.components[:, 0].isnan().all()
    assert result.components[:, 1].tolist() == [1.0] * N, "the other reward's scores are kept"
    assert not result.valid.any()
    (error,) = result.errors
    assert error.startswith("reward 'r0', all 4 samples: KeyError: 'caption' (")
    assert "test_rewards.py:" in error
    assert combine_components(result.components, torch.ones(2), result.valid).isnan().all()


@pytest.mark.parametrize("error", [TransientRewardError("busy"), ConnectionResetError("reset"), TimeoutError("late")])
def test_transient_errors_are_retried(manager: Callable[..., RewardManager], error: Exception) -> None:
    attempts: list[int] = []

    def flaky(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        attempts.append(1)
        if len(attempts) < 3:
            raise error
        return torch.ones(N)

    result = manager(flaky, max_retries=2).score(IMAGES, PROMPTS, METADATA)
    assert len(attempts) == 3
    assert result.valid.all()
    assert result.errors == []


def test_back_off_doubles_and_ends(manager: Callable[..., RewardManager], monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    run = manager(raising(ConnectionError("refused")), max_retries=3)
    run.backoff_s = 0.5
    # What it waits on, so that closing the manager ends the wait.
    monkeypatch.setattr(run._closed, "wait", slept.append)
    result = run.score(IMAGES, PROMPTS, METADATA)
    assert slept == [0.5, 1.0, 2.0]
    assert not result.valid.any()
    assert result.errors[0].endswith("refused")
    assert "gave up after 4 attempts in 0 s: ConnectionError: refused" in result.errors[0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(N - 1), "must hold 4 real values, shape [4], one for each sample; got 3 values"),
        (torch.ones(N, 1), "got 4 values, torch.float32 [4, 1]"),
        (torch.tensor(1.0), "got 1 values, torch.float32 []"),
        (torch.ones(N, dtype=torch.complex64), "got 4 values, torch.complex64 [4]"),
        ({"score": torch.ones(N)}, "returned a dict without \"reward\"; its keys are ['score']"),
        ({"reward": torch.ones(N), "extra": torch.ones(2)}, "'extra' must hold 4 real values"),
        (None, "'reward' must hold 4 real values, shape [4], one for each sample; got a NoneType"),
        ((torch.ones(N), {}), "got a tuple"),
    ],
)
def test_wrong_count_or_shape_is_invalid(manager: Callable[..., RewardManager], returned: Any, message: str) -> None:
    result = manager(returning(returned)).score(IMAGES, PROMPTS, METADATA)
    assert not result.valid.any()
    assert result.components.isnan().all()
    assert message in result.errors[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_non_finite_score_costs_that_sample_only(manager: Callable[..., RewardManager], value: float) -> None:
    scores = torch.tensor([1.0, 2.0, value, 4.0], dtype=torch.float64)
    run = manager(returning({"reward": scores, "length": torch.ones(N)}), returning(torch.ones(N)))
    result = run.score(IMAGES, PROMPTS, METADATA)
    assert result.valid.tolist() == [True, True, False, True]
    assert result.components[:, 0].isnan().tolist() == [False, False, True, False]
    assert result.metrics["r0/length"].isnan().tolist() == [False, False, True, False]
    (error,) = result.errors
    assert error.startswith("reward 'r0', sample 2 (prompt 'prompt 2'): the score is ")


def test_score_async_leaves_the_event_loop_free(manager: Callable[..., RewardManager]) -> None:
    both = threading.Barrier(2, timeout=20)

    def waits_for_the_other(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        both.wait()
        return torch.full((N,), float(len(prompts[0])))

    run = manager(waits_for_the_other, workers=2)

    async def two_groups() -> list[Any]:
        return await asyncio.gather(*(run.score_async(IMAGES, [p] * N, METADATA) for p in ("a", "bb")))

    first, second = asyncio.run(two_groups())
    assert first.components[:, 0].tolist() == [1.0] * N
    assert second.components[:, 0].tolist() == [2.0] * N


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        ([], {}, "at least one reward"),
        (
            ["jpeg_compressibility", "jpeg_compressibility"],
            {},
            "'jpeg_compressibility': give one of them another `label`",
        ),
        (["jpeg_compressibility"], {"workers": 0}, "workers at least 1"),
        (["jpeg_compressibility"], {"max_retries": -1}, "max_retries"),
    ],
)
def test_manager_misuse(specs: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardManager([RewardSpec(name) for name in specs], **options)


def test_labels_weights_and_lengths() -> None:
    specs = [
        RewardSpec(f"{__name__}:Constant", {"value": 2.0}, label="two"),
        RewardSpec(f"{__name__}:Constant", {"value": 3.0}, weight=0.5, label="three"),
    ]
    run = RewardManager(specs)
    assert run.labels == ["two", "three"]
    assert run.weights.tolist() == [1.0, 0.5]
    assert run.score(IMAGES, PROMPTS, METADATA).components.tolist() == [[2.0, 3.0]] * N
    with pytest.raises(ValueError, match="4 images, 3 prompts and 4 metadata"):
        run.score(IMAGES, PROMPTS[:3], METADATA)
    with pytest.raises(ValueError, match="weight of reward 'a' must be finite"):
        RewardManager([RewardSpec("ocr", weight=math.nan, label="a")])
    run.close()


# ---- components to one reward


def test_weighted_sum_leaves_invalid_samples_nan() -> None:
    components = torch.tensor([[1.0, 10.0], [2.0, 20.0], [math.nan, 30.0]])
    combined = combine_components(components, torch.tensor([1.0, 0.5]), torch.tensor([True, True, False]))
    assert combined.dtype == torch.float32
    assert combined[:2].tolist() == [6.0, 12.0]
    assert combined[2].isnan()


def test_normalised_components_weigh_alike_whatever_their_scale() -> None:
    base = torch.randn(64, generator=torch.Generator().manual_seed(0))
    components = torch.stack([base, 1000 * base + 5, torch.full((64,), 0.1)], 1)
    valid = torch.ones(64, dtype=torch.bool)
    valid[5] = False
    components[5] = 1e6  # must not enter mean and std
    each = [combine_components(components, w, valid, normalize=True) for w in torch.eye(3)]
    kept = base[valid].double()
    expected = (kept - kept.mean()) / (kept.std(correction=0) + 1e-4)
    torch.testing.assert_close(each[0][valid].double(), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(each[1][valid], each[0][valid], rtol=2e-4, atol=1e-5)
    assert each[2][valid].tolist() == [0.0] * 63, "a constant contributes exactly nothing"
    assert all(e[5].isnan() for e in each)
    mixed = combine_components(components, torch.tensor([2.0, -1.0, 7.0]), valid, normalize=True)
    torch.testing.assert_close(mixed[valid], 2 * each[0][valid] - each[1][valid])


def test_combine_with_nothing_valid_and_wrong_shapes() -> None:
    nothing = torch.zeros(3, dtype=torch.bool)
    assert combine_components(torch.ones(3, 1), torch.ones(1), nothing, normalize=True).isnan().all()
    with pytest.raises(ValueError, match=r"\[3, 1\], \[2\], \[3\]"):
        combine_components(torch.ones(3, 1), torch.ones(2), nothing)


def test_failure_share() -> None:
    valid = torch.tensor([True] * 9 + [False])
    check_failures(valid, ["one"], 0.1)
    check_failures(torch.arange(100) >= 29, [], 0.29)  # 0.29 * 100 < 29 in floating point
    check_failures(torch.ones(0, dtype=torch.bool), [], 0.0)
    with pytest.raises(RewardFailure) as caught:
        check_failures(valid, [f"error {i}" for i in range(9)], 0.05)
    message = str(caught.value)
    assert "1 of 10 samples have no valid reward, more than the share of 0.05 allowed" in message
    assert "First of 9 errors:\n  error 0\n" in message
    assert "error 4" in message
    assert "error 5" not in message
    with pytest.raises(RewardFailure, match="none on this rank"):
        check_failures(valid, [], 0.0)


# ---- JPEG


def test_jpeg_size_is_that_of_the_file() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (3, 32, 48), dtype=torch.uint8, generator=generator)
    images = torch.stack([noise, torch.full_like(noise, 100)])
    for quality in (95, 30):
        buffer = io.BytesIO()
        Image.fromarray(noise.permute(1, 2, 0).numpy()).save(buffer, format="JPEG", quality=quality)
        large = build_reward("jpeg_incompressibility", {"quality": quality})(images, ["", ""], [{}, {}])
        small = build_reward("jpeg_compressibility", {"quality": quality})(images, ["", ""], [{}, {}])
        assert isinstance(large, Tensor)
        assert large.dtype == torch.float32
        assert large[0].item() == pytest.approx(len(buffer.getvalue()) / 1000)
        assert large[0] > large[1] > 0
        assert torch.equal(small, -large)


@pytest.mark.parametrize("images", [torch.zeros(1, 2, 3, 8, 8, dtype=torch.uint8), torch.zeros(1, 3, 8, 8)])
def test_jpeg_takes_uint8_images_only(images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"uint8 \[N, 3, H, W\]; got torch"):
        build_reward("jpeg_compressibility")(images, [""], [{}])


def test_a_service_that_comes_back_within_patience_costs_no_sample(manager: Callable[..., RewardManager]) -> None:
    """More failures than max_retries, within patience_s."""
    calls: list[int] = []

    def back_after_five(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        calls.append(1)
        if len(calls) <= 5:
            raise ConnectionError("refused")
        return torch.ones(len(images))

    run = manager(back_after_five, max_retries=1)
    run.backoff_s, run.patience_s = 0.001, 60.0
    assert run.score(IMAGES, PROMPTS, METADATA).valid.all()
    assert len(calls) == 6


def test_a_held_out_reward_is_logged_and_never_trained_on() -> None:
    """Its score is a metric; where it raises, no sample is lost."""
    run = RewardManager(
        [
            RewardSpec("jpeg_compressibility", label="trained"),
            RewardSpec("jpeg_incompressibility", label="watched", held_out=True),
            RewardSpec("tests.test_trainer_faults:raising", label="broken", held_out=True),
        ]
    )
    result = run.score(IMAGES, PROMPTS, METADATA)
    assert run.labels == ["trained"]
    assert result.components.shape == (N, 1)
    assert result.valid.all()
    assert result.metrics["held_out/watched"].isfinite().all()
    assert "held_out/broken" not in result.metrics
    assert any("reward 'broken'" in error for error in result.errors)
    run.close()
    with pytest.raises(ValueError, match="at least one reward that is not held out"):
        RewardManager([RewardSpec("jpeg_compressibility", held_out=True)])
