"""The rollout that the config asks for. vllm-omni's side is imported only where it is wanted."""

from __future__ import annotations

from pathlib import Path

import torch

from flowgrpo_fast.config import Config
from flowgrpo_fast.engine import Engine
from flowgrpo_fast.models.base import ModelAdapter
from flowgrpo_fast.rollout.base import Rollout
from flowgrpo_fast.rollout.in_process import InProcessRollout


def build_rollout(
    config: Config, adapter: ModelAdapter, engine: Engine, run_dir: Path, device: torch.device
) -> Rollout:
    """A collective: every rank calls it. Raises ConfigError where servers cannot be started as configured."""
    if config.rollout.backend == "in_process":
        return InProcessRollout(adapter, engine.module, config.rollout.sigmas, device, engine.whole_weights)
    from flowgrpo_fast.rollout.vllm_omni.rollout import VllmOmniRollout

    return VllmOmniRollout(config, adapter, engine, run_dir, device)
