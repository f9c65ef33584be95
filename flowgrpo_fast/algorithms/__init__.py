"""Algorithms by name: each is one file of advantage and loss over the ops. A user's own: `module:Class`."""

from __future__ import annotations

from flowgrpo_fast.algorithms.base import Algorithm, LossInputs
from flowgrpo_fast.config import AlgorithmConfig
from flowgrpo_fast.registry import load_named

__all__ = ["ALGORITHMS", "Algorithm", "LossInputs", "build_algorithm"]

ALGORITHMS = {"flow_grpo": "flowgrpo_fast.algorithms.flow_grpo:FlowGRPO"}


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Raises ConfigError for a name that is neither registered nor importable."""
    algorithm: Algorithm = load_named("algorithm.name", config.name, ALGORITHMS)(config)
    return algorithm
