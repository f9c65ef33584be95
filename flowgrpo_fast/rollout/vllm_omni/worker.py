"""Worker extension: weights in, proofs out. Called inside the engine's worker by `collective_rpc`.

vllm-omni reports a failed RPC in its return value, so every method here returns {"ok": ...} itself and the server accepts nothing
else. LoRA and full weights exclude each other: once LoRA layers are in place, parameters have other names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from flowgrpo_fast.rollout.vllm_omni.pipeline import FlowGrpoPipeline
from flowgrpo_fast.rollout.weights import FlatTensors, checksum, lora_modules, probe
from vllm_omni.diffusion.forward_context import set_forward_context


def lora_request(version: int) -> LoRARequest:
    """An id of its own for every policy version, from 1 as vllm wants it (averages count down from -1); the path is never opened."""
    number = 2 * version + 1 if version >= 0 else -2 * version
    return LoRARequest(lora_name=f"policy-{version}", lora_int_id=number, lora_path="/flowgrpo_fast/in-memory")


def answered(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """An exception becomes an answer that nobody can take for success."""

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return {"ok": True, **method(*args, **kwargs)}
        except Exception as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    return wrapper


class FlowGrpoWorkerExtension:
    model_runner: Any
    lora_manager: Any
    od_config: Any
    device: torch.device
    _asleep: list[tuple[nn.Parameter, Tensor]]

    @property
    def _pipeline(self) -> FlowGrpoPipeline:
        return self.model_runner.pipeline

    @property
    def _is_sharded(self) -> bool:
        """Under tensor parallelism a worker holds parts: no checksum of a whole to compare, the probe is the proof."""
        return bool(self.od_config.parallel_config.tensor_parallel_size > 1)

    @answered
    def flowgrpo_load_lora(self, version: int, lora: FlatTensors, rank: int, alpha: float) -> dict[str, Any]:
        """Replaces the adapter. Returns the checksum of every tensor as it is bound in the layers that forward runs through."""
        manager, pipeline = self.lora_manager, self._pipeline
        tensors = {pipeline.engine_name(name): tensor for name, tensor in lora.items()}
        modules = lora_modules(list(tensors))
        known = {name for name, _ in pipeline.named_modules()}
        missing = [m for m in modules if m not in known and pipeline.fused_layer(m) is None]
        if missing:
            raise ValueError(f"this engine has no module {', '.join(missing)}")
        for old in list(manager.list_adapters()):
            manager.remove_adapter(old)
        request = lora_request(version)
        pipeline.staged_lora = _lora_model(request, tensors, modules, rank, alpha, manager.dtype)
        try:
            manager.set_active_adapter(request, 1.0)
        finally:
            pipeline.staged_lora = None
        pipeline.relink_lora_layers()
        active = (getattr(layer, "_diffusion_lora_active_slices", ()) for layer in manager._lora_modules.values())
        bound = {
            name: None if self._is_sharded else checksum(_bound(pipeline, pipeline.engine_name(name), tensor))
            for name, tensor in lora.items()
        }
        return {"bound": bound, "modules": sum(sum(slices) for slices in active)}

    @answered
    def flowgrpo_load_bucket(self, bucket: FlatTensors) -> dict[str, Any]:
        """Full weights. Returns the checksum of every parameter as the engine holds it now."""
        pipeline = self._pipeline
        if self.lora_manager is not None and self.lora_manager.list_adapters():
            raise ValueError("LoRA layers are in place; an engine takes either LoRA or full weights")
        with torch.no_grad():
            for name, tensor in bucket.items() if not self._is_sharded else ():
                target = _parameter(pipeline, pipeline.engine_name(name))
                if target.shape != tensor.shape:
                    raise ValueError(f"{name}: shape {[*tensor.shape]}, the engine has {[*target.shape]}")
            loaded = pipeline.load_weights((f"transformer.{name}", tensor) for name, tensor in bucket.items())
        lost = [name for name, _ in bucket.items() if not _names(pipeline, name) & loaded]
        if lost:
            raise ValueError(f"the engine did not load {', '.join(lost)}")
        return {
            "bound": {
                name: None if self._is_sharded else checksum(_parameter(pipeline, pipeline.engine_name(name)))
                for name, _ in bucket.items()
            }
        }

    @answered
    def flowgrpo_probe(self, version: int | None) -> dict[str, Any]:
        """The velocity of the fixed input, with the adapter of `version`, or without any."""
        if self.lora_manager is not None:
            self.lora_manager.set_active_adapter(None if version is None else lora_request(version), 1.0)
        pipeline = self._pipeline
        with (
            torch.inference_mode(),
            set_forward_context(vllm_config=self.model_runner.vllm_config, omni_diffusion_config=self.od_config),
        ):
            value = probe(pipeline.adapter, pipeline.transformer, pipeline.device)
        return {"probe": value.clone()}

    @answered
    def flowgrpo_free_weights(self) -> dict[str, Any]:
        """Sleep on a CPU, where vllm-omni's own answers ERROR and the next request hangs. There is no second memory to move weights to: they are
        set aside, and whatever would compute with them fails."""
        self._asleep = [(parameter, parameter.data) for parameter in self._pipeline.parameters()]
        for parameter, data in self._asleep:
            parameter.data = data.new_empty(0)
        return {"freed_bytes": sum(data.nbytes for _, data in self._asleep)}

    @answered
    def flowgrpo_restore_weights(self) -> dict[str, Any]:
        for parameter, data in self._asleep:
            parameter.data = data
        self._asleep = []
        return {}

    @answered
    def flowgrpo_encode_check(self, prompt: str) -> dict[str, Any]:
        """Token ids of a prompt and the checksum of its embedding: compared in the handshake."""
        pipeline = self._pipeline
        tokens = pipeline.adapter.tokenize([prompt], 512)
        with torch.inference_mode():
            embeds = pipeline.adapter.encode(tokens).embeds
        return {"input_ids": tokens.input_ids, "embedding": checksum(embeds.float())}


def _names(pipeline: FlowGrpoPipeline, name: str) -> set[str]:
    """What an engine's load_weights may call a tensor that it has loaded: as in the checkpoint, as its own, or as the layer that it is fused into."""
    engine_name = pipeline.engine_name(name)
    module, _, leaf = engine_name.rpartition(".")
    fused = pipeline.fused_layer(module)
    return {f"transformer.{name}", engine_name} | ({f"{fused.layer}.{leaf}"} if fused else set())


def _bound(pipeline: FlowGrpoPipeline, name: str, sent: Tensor) -> Tensor:
    """The LoRA tensor `<module>.lora_A.weight` as the layer that forward calls has it. vllm copies a smaller one into a corner of its buffer."""
    module, _, part = name.rpartition(".lora_")
    path, index, _ = pipeline.fused_layer(module) or (module, 0, 1)
    layer: Any = pipeline.get_submodule(path)
    active = getattr(layer, "_diffusion_lora_active_slices", ())
    if len(active) <= index or not active[index]:
        raise ValueError(f"{module}: its LoRA is not active in the engine")
    stacked = layer.lora_a_stacked if part.startswith("A") else layer.lora_b_stacked
    rank = pipeline.lora_rank
    value = stacked[index][0, 0]
    value = value[:rank] if part.startswith("A") else value[:, :rank]
    if value.shape != sent.shape:
        raise ValueError(f"{name}: shape {[*sent.shape]}, the engine's layer takes {[*value.shape]}")
    return value


def _parameter(pipeline: FlowGrpoPipeline, name: str) -> Tensor:
    """A parameter by the checkpoint's name: a slice of the fused one where the engine fuses."""
    module, _, leaf = name.rpartition(".")
    fused = pipeline.fused_layer(module)
    try:
        if fused is None:
            return pipeline.get_parameter(name)
        whole = pipeline.get_parameter(f"{fused.layer}.{leaf}")
    except AttributeError as error:
        raise ValueError(f"the engine has no parameter {name}") from error
    return whole.chunk(fused.parts)[fused.part]


def _lora_model(
    request: LoRARequest, tensors: dict[str, Tensor], modules: list[str], rank: int, alpha: float, dtype: torch.dtype
) -> tuple[LoRAModel, PEFTHelper]:
    helper = PEFTHelper.from_dict({"r": rank, "lora_alpha": alpha, "target_modules": modules, "bias": "none"})
    model = LoRAModel.from_lora_tensors(
        lora_model_id=request.lora_int_id,
        tensors={f"base_model.model.{name}": tensor.clone() for name, tensor in tensors.items()},
        peft_helper=helper,
        device="cpu",
        dtype=dtype,
    )
    return model, helper
