"""What a reward is, and how a name in the config becomes one.

rewards:
  - {name: ocr, kwargs: {rec_image_shape: [3, 48, 64]}}     # registered, built in or by @register_reward
  - {name: "my_rewards:brightness", weight: 0.1}            # yours: any importable function or class
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

# Where the built-in rewards register themselves; imported on first use, so that nobody pays for libraries of others.
BUILTIN = {
    "aesthetic": "flowgrpo_fast.rewards.clip",
    "clip_score": "flowgrpo_fast.rewards.clip",
    "hpsv2": "flowgrpo_fast.rewards.clip",
    "hpsv3": "flowgrpo_fast.rewards.hpsv3",
    "frames": "flowgrpo_fast.rewards.frames",
    "http": "flowgrpo_fast.rewards.http",
    "jpeg_compressibility": "flowgrpo_fast.rewards.jpeg",
    "jpeg_incompressibility": "flowgrpo_fast.rewards.jpeg",
    "ocr": "flowgrpo_fast.rewards.ocr",
    "pickscore": "flowgrpo_fast.rewards.clip",
    "vlm_judge": "flowgrpo_fast.rewards.judge",
}


class Reward(Protocol):
    """Scores samples. Must not depend on which samples share a call: groups are scored as they arrive.

    Args: `images` uint8 [N, 3, H, W] on the CPU (videos [N, F, 3, H, W], for rewards that take them), `prompts` and
    `metadata` of length N. Returns real [N], higher is better, or a dict with "reward" [N] and further [N] that are
    only logged. May raise: TransientRewardError, ConnectionError and TimeoutError are retried, all else is final
    (most HTTP libraries' errors are not Python's own ConnectionError: turn them into TransientRewardError).
    """

    def __call__(
        self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]
    ) -> Tensor | dict[str, Tensor]: ...


class TransientRewardError(RuntimeError):
    """For rewards to raise when trying again may help (a server that restarts, a rate limit)."""


Factory = Callable[..., Reward]
F = TypeVar("F", bound=Factory)
_factories: dict[str, Factory] = {}


def register_reward(name: str) -> Callable[[F], F]:
    """Decorator: makes a class or function known as `name`; called with the config's kwargs, it returns the reward.

    Raises ValueError for a name that another factory holds, or one with a colon (those are import paths).
    """

    def register(factory: F) -> F:
        owner = BUILTIN.get(name, factory.__module__)
        held = _factories.get(name)
        if owner != factory.__module__ or (held and _address(held) != _address(factory)):
            raise ValueError(
                f"the reward name {name!r} is taken by {_address(held) if held else owner}: choose another"
            )
        if ":" in name:
            raise ValueError(f"the reward name {name!r} has a colon, which is kept for 'module:function'")
        _factories[name] = factory
        return factory

    return register


def registered_rewards() -> list[str]:
    """All names that `build_reward` knows, sorted."""
    return sorted({*BUILTIN, *_factories})


def build_reward(name: str, kwargs: dict[str, Any] | None = None) -> Reward:
    """The reward called `name`: a registered one, or "module:function" / "module:Class" to import.

    A registered factory or a class is called with `kwargs`; an imported function is the reward itself and gets them
    at every call. Raises ValueError for an unknown name, module or attribute, and for kwargs that do not fit.
    """
    kwargs = kwargs or {}
    if ":" in name:
        target = _imported(name)
        if not inspect.isclass(target):
            _check_arguments(name, target, (None, None, None), kwargs)
            return functools.partial(target, **kwargs) if kwargs else target
    else:
        if name in BUILTIN:
            importlib.import_module(BUILTIN[name])
        if name not in _factories:
            raise ValueError(
                f"unknown reward {name!r}{_nearest(name, registered_rewards())}; registered: "
                f"{', '.join(registered_rewards())}; for one of your own write 'module:function'"
            )
        target = _factories[name]
    _check_arguments(name, target, (), kwargs)
    reward = target(**kwargs)
    if not callable(reward):
        raise ValueError(  # noqa: TRY004 - the config's fault
            f"reward {name!r}: {_address(target)} returned {type(reward).__name__}, which cannot be called"
        )
    return reward


def require_images(images: Tensor, reward: str) -> None:
    """Raises ValueError unless `images` is uint8 [N, 3, H, W]."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"{reward} takes images, uint8 [N, 3, H, W]; got {images.dtype} {list(images.shape)}")


def _imported(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists but lacks a dependency of its own keeps its own error.
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"reward {path!r}: there is no module {error.name!r}; install it or put its folder on PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(
            f"reward {path!r}: {module.__file__ or module_name} has no {attribute!r}{_nearest(attribute, vars(module))}"
        )
    target = getattr(module, attribute)
    if not callable(target):
        raise ValueError(f"reward {path!r}: {attribute!r} is a {type(target).__name__}, not a function or class")  # noqa: TRY004
    return target


def _check_arguments(
    name: str, target: Callable[..., Any], positional: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    signature = inspect.signature(target)
    try:
        signature.bind(*positional, **kwargs)
    except TypeError as error:
        raise ValueError(f"reward {name!r}: {error}; its signature is {name}{signature}") from error


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _address(factory: Callable[..., Any]) -> str:
    return f"{factory.__module__}.{getattr(factory, '__qualname__', type(factory).__qualname__)}"
