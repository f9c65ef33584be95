"""Losses and advantage estimators by name, over the ops. A user's own: `module:Class`, `module:function`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flowgrpo_fast.algorithms.advantages import Rewards
from flowgrpo_fast.algorithms.base import Algorithm, ForwardInputs, LossInputs, best_and_worst
from flowgrpo_fast.config import AlgorithmConfig
from flowgrpo_fast.registry import load_named

__all__ = [
    "ADVANTAGES",
    "ALGORITHMS",
    "Algorithm",
    "ForwardInputs",
    "LossInputs",
    "Rewards",
    "best_and_worst",
    "build_advantage",
    "build_algorithm",
    "uses_reference",
]

ALGORITHMS = {
    "awm": "flowgrpo_fast.algorithms.awm:AdvantageWeightedMatching",
    "diffusion_nft": "flowgrpo_fast.algorithms.diffusion_nft:DiffusionNFT",
    "dpo": "flowgrpo_fast.algorithms.dpo:DiffusionDPO",
    "flow_dppo": "flowgrpo_fast.algorithms.flow_dppo:FlowDPPO",
    "flow_grpo": "flowgrpo_fast.algorithms.flow_grpo:FlowGRPO",
    "grpo_guard": "flowgrpo_fast.algorithms.grpo_guard:GRPOGuard",
}
ADVANTAGES = {
    "gdpo": "flowgrpo_fast.algorithms.advantages:gdpo",
    "group": "flowgrpo_fast.algorithms.advantages:group",
}
Estimator = Callable[[Rewards, AlgorithmConfig], Tensor]


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Raises ConfigError for a name that is neither registered nor importable."""
    algorithm: Algorithm = load_named("algorithm.name", config.name, ALGORITHMS)(config)
    return algorithm


def uses_reference(config: AlgorithmConfig) -> bool:
    """Does a run need the network as it was before training?"""
    return build_algorithm(config).uses_reference


def build_advantage(config: AlgorithmConfig) -> Estimator:
    """Raises ConfigError for a name that is neither registered nor importable."""
    estimator: Estimator = load_named("algorithm.advantage", config.advantage, ADVANTAGES)
    return estimator
