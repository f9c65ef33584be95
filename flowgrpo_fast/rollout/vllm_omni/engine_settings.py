"""How the engine must be set up for its log-probs to be the trainer's, and what a user may add."""

from __future__ import annotations

from typing import Any

from flowgrpo_fast.config import Config, ConfigError
from flowgrpo_fast.models import resolve_model_path
from flowgrpo_fast.rollout.vllm_omni.plugin import PIPELINES
from flowgrpo_fast.rollout.wire import free_port

OURS = object()  # not the user's to set, whatever the value
PINNED: dict[str, tuple[Any, str]] = {
    "cache_backend": ("none", "feature caches reuse activations of earlier steps"),
    "enforce_eager": (True, "compiled blocks round differently from the trainer's"),
    "quantization_config": (None, "other weights than the trainer's"),
    "quantization": (None, "other weights than the trainer's"),
    "diffusion_kv_cache_dtype": (None, "rounded keys and values"),
    "quality": (None, "lets the model choose approximations"),
    "lora_path": (None, "adapters come from the trainer"),
    "step_execution": (False, "the sampler runs the whole loop itself"),
    "max_num_seqs": (1, "requests batched together would change the shape of the matrix products"),
    "cfg_parallel_size": (1, "both branches of the guidance are one forward"),
    "cfg_normalize": (OURS, "the trainer's own guidance runs in the engine"),
    "output_type": (OURS, "the pipeline makes uint8 images itself"),
    "model": (OURS, "set model.path"),
    "model_class_name": (OURS, "the pipeline with log-probs is chosen by model.family"),
    "worker_extension_cls": (OURS, "weight syncs need ours"),
    "custom_pipeline_args": (OURS, "carries this library's options"),
    "dtype": (OURS, "set model.dtype"),
    "tensor_parallel_size": (OURS, "set rollout.server.tensor_parallel_size"),
    "enable_sleep_mode": (OURS, "follows rollout.colocated"),
    "master_port": (OURS, "chosen per server"),
}
"""Setting -> (the only value that is exact, why)."""


def engine_settings(config: Config) -> dict[str, Any]:
    """Keyword arguments of AsyncOmni. Raises ConfigError naming a setting of rollout.server.engine that breaks exactness."""
    server = config.rollout.server
    check_engine_overrides(server.engine)
    pipeline = PIPELINES.get(config.model.family)
    if pipeline is None:
        raise ConfigError(
            f"model.family = {config.model.family!r} has no vllm-omni pipeline with log-probs; there is {', '.join(PIPELINES)};"
            " use rollout.backend: in_process"
        )
    return {
        "model": str(resolve_model_path(config.model.path)),
        "model_class_name": pipeline,
        "dtype": config.model.dtype,
        "enforce_eager": True,
        "max_num_seqs": 1,
        "cache_backend": "none",
        "tensor_parallel_size": server.tensor_parallel_size,
        "diffusion_attention_config": {"default": {"backend": "TORCH_SDPA"}},
        "worker_extension_cls": "flowgrpo_fast.rollout.vllm_omni.worker.FlowGrpoWorkerExtension",
        "custom_pipeline_args": {"flowgrpo": {"sigmas": config.rollout.sigmas.model_dump()}},
        # On a CPU the engine does not start with it; the worker extension frees and restores the storages itself.
        "enable_sleep_mode": config.rollout.colocated and not server.cpu,
        "master_port": free_port(),
        **server.engine,
    }


def check_engine_overrides(engine: dict[str, Any]) -> None:
    for name, value in engine.items():
        exact, why = PINNED.get(name, (value, ""))
        if exact is OURS or value != exact:
            fix = "remove it" if exact is OURS else f"remove it or set {exact!r}"
            raise ConfigError(f"rollout.server.engine.{name} = {value!r} would break exactness ({why}); {fix}")
