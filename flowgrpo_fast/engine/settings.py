"""Our config -> DeepSpeed's: nothing is set twice. And the learning rate, which is a function of the update alone."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

from flowgrpo_fast.config import Config, ConfigError, OptimizerConfig
from flowgrpo_fast.plan import BatchPlan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BUCKET = 500_000_000


def stage(config: Config) -> int:
    """ZeRO stage in effect. A replicated frozen base is stage 2: whole parameters everywhere, gradients and optimizer of the adapters sharded."""
    if config.model.train == "lora" and config.engine.frozen_base == "replicated":
        return min(config.engine.zero_stage, 2)
    return config.engine.zero_stage


def has_half_master(config: Config) -> bool:
    """Trained weights in bf16 with DeepSpeed's fp32 master copy. LoRA adapters are fp32 by themselves."""
    return config.model.train == "full" and config.model.dtype == "bfloat16"


def clips_by_itself(config: Config) -> bool:
    """ZeRO stage 0 in fp32 runs a plain torch optimizer: DeepSpeed would clip, but tell nobody the norm."""
    return stage(config) == 0 and not has_half_master(config)


def coalesces(config: Config) -> bool:
    """Gradients of all micro-batches add up on the rank, and are reduced once an update: for what is small enough to stay whole.

    By default for LoRA under ZeRO 1 to 3. Not in bf16: the sum would be in bf16 too.
    """
    chosen = config.engine.coalesce_gradients
    possible = stage(config) >= 1 and not has_half_master(config)
    if chosen and not possible:
        raise ConfigError(
            "engine.coalesce_gradients needs fp32 gradients (model.dtype float32, or LoRA) and ZeRO stage 1 to 3: set it to false or null"
        )
    return possible and config.model.train == "lora" if chosen is None else chosen


def deepspeed_config(config: Config, plan: BatchPlan, trainable_parameters: int | None = None) -> dict[str, Any]:
    """The dict handed to DeepSpeed. Raises ConfigError for what it cannot do here."""
    o, e = config.optimizer, config.engine
    # fp32 adapters over a half-precision base need the section off: `bf16.enabled` would cast the adapters too.
    half_master = has_half_master(config)
    # Offloaded weights are stepped by DeepSpeed's vectorised CPU Adam, which is worth its compilation.
    vectorised_adam = e.offload_optimizer != "none"
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": 1,
        # Coalescing is DeepSpeed's own accumulation; without it, `step` is the boundary.
        "managed_gradient_accumulation": coalesces(config),
        "gradient_clipping": 0.0 if clips_by_itself(config) else o.max_grad_norm,
        "steps_per_print": 2**31,
        "zero_optimization": {
            "stage": stage(config),
            "overlap_comm": False,
            "contiguous_gradients": True,
            # A buffer of this many elements is allocated whole: DeepSpeed's default would take 2 GB for a model of any size.
            "reduce_bucket_size": min(trainable_parameters or BUCKET, BUCKET),
            "stage3_param_persistence_threshold": e.persistence_threshold,
            **_offload(config),
        },
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"use_node_local_storage": config.trainer.checkpoint_storage == "local"},
        # A non-finite gradient drops the update on all ranks; in bf16 DeepSpeed looks only if told to.
        "bf16": {"enabled": half_master, "check_grad_overflow": half_master},
        # Dozens of micro-batches added up in bf16 would lose the small ones.
        **({"data_types": {"grad_accum_dtype": "fp32"}} if half_master and stage(config) >= 2 else {}),
        "zero_allow_untested_optimizer": True,
        "optimizer": {
            "type": "AdamW",
            # torch's Adam: no compiler needed on the user's machine.
            "params": {
                "lr": o.learning_rate,
                "betas": o.betas,
                "eps": o.eps,
                "weight_decay": o.weight_decay,
                "torch_adam": not vectorised_adam,
            },
        },
    }


def _offload(config: Config) -> dict[str, Any]:
    e = config.engine
    sections: dict[str, Any] = {}
    for key, device in (("offload_param", e.offload_parameters), ("offload_optimizer", e.offload_optimizer)):
        if device == "none":
            continue
        sections[key] = {"device": device, "pin_memory": torch.cuda.is_available()}
        if device == "nvme":
            _require_nvme(e.nvme_path)
            sections[key]["nvme_path"] = e.nvme_path
    return sections


def _require_nvme(path: str | None) -> None:
    """A folder that can be written to, and what DeepSpeed compiles its asynchronous I/O with. Raises ConfigError."""
    if path is None or not os.access(path, os.W_OK | os.X_OK) or not Path(path).is_dir():
        raise ConfigError(f"engine.nvme_path = {path!r} is no folder that can be written to")
    if not AsyncIOBuilder().is_compatible():
        raise ConfigError(
            "engine.offload_* nvme needs libaio's headers, which DeepSpeed compiles against (Debian: apt-get install libaio-dev); or use cpu"
        )


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """Rate of update `update` (from 0): linear warm-up, then constant, linear to 0 or cosine to 0. A function of the step alone, so resume needs no state."""
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.learning_rate
    progress = (update - config.warmup_updates) / max(1, total_updates - config.warmup_updates)
    falling = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * max(0.0, falling)
