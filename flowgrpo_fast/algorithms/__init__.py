"""Algorithms by name: each is one file of advantage and loss over the ops. A user's own: `module:Class`."""

from __future__ import annotations

import difflib
from importlib import import_module

from flowgrpo_fast.algorithms.base import Algorithm, LossInputs
from flowgrpo_fast.config import AlgorithmConfig, ConfigError

__all__ = ["ALGORITHMS", "Algorithm", "LossInputs", "build_algorithm"]

ALGORITHMS = {"flow_grpo": "flowgrpo_fast.algorithms.flow_grpo:FlowGRPO"}


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Raises ConfigError for a name that is neither registered nor importable."""
    target = ALGORITHMS.get(config.name, config.name)
    module, _, attribute = target.partition(":")
    if not attribute:
        near = difflib.get_close_matches(config.name, ALGORITHMS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"algorithm.name = {config.name!r} is not known; did you mean {near!r}? (or give module:Class)"
        )
    try:
        algorithm: Algorithm = getattr(import_module(module), attribute)(config)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"algorithm.name = {config.name!r}: cannot import it: {error}") from error
    return algorithm
