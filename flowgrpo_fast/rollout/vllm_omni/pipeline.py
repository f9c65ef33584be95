"""The pipeline that runs inside vllm-omni: the engine's transformer under the trainer's own sampler, so both sides share every formula.

Only the network is the engine's. Templates, schedule, denoising loop, SDE step, log-probs, guidance and decoding are the code that the
in-process rollout runs (`InProcessRollout.sample`), which is why log-probs agree with the trainer's. One engine request is one forward batch
of prompt groups; each prompt is encoded once, a shared negative prompt once per server. What is special about a family: families.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from vllm.model_executor.models.utils import AutoWeightsLoader

from flowgrpo_fast.config import SigmasConfig
from flowgrpo_fast.models.pipeline import PipelineAdapter
from flowgrpo_fast.rollout.base import RolloutRequest, SamplingParams
from flowgrpo_fast.rollout.in_process import InProcessRollout
from vllm_omni.diffusion.cancellation import check_request_cancellation
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader
from vllm_omni.diffusion.models.interface import SupportsComponentDiscovery
from vllm_omni.diffusion.profiler.diffusion_pipeline_profiler import DiffusionPipelineProfilerMixin
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

JOB = "flowgrpo"


@dataclass(frozen=True)
class Job:
    """What a request carries under prompt[JOB]; handed over by reference on a one-GPU engine."""

    requests: list[RolloutRequest]
    sampling: SamplingParams
    policy_version: int


class FusedPart(NamedTuple):
    layer: str
    part: int
    parts: int


class FlowGrpoPipeline(nn.Module, DiffusionPipelineProfilerMixin, SupportsComponentDiscovery):
    """Registered with vllm-omni by `plugin.register`, one class a family, chosen by `model_class_name`."""

    supports_request_batch = False
    supports_step_execution = False
    supports_request_cancellation = True
    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    adapter_class: ClassVar[type[PipelineAdapter]]
    renamed: ClassVar[Sequence[tuple[str, str]]] = ()
    """What the engine calls modules of diffusers' transformer, where it differs."""
    fused: ClassVar[dict[str, Sequence[str]]] = {
        ".to_qkv": (".to_q", ".to_k", ".to_v"),
        ".add_kv_proj": (".add_q_proj", ".add_k_proj", ".add_v_proj"),
    }
    """Layers of the engine that hold several of the checkpoint's, in their order."""
    transformer: Any

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        # Not the engine's own pipelines: those load text encoder and VAE in the checkpoint's dtype, and the dummy run of an fp32
        # checkpoint in a bf16 engine dies of it. The adapter loads both in the engine's.
        nn.Module.__init__(self)
        self.od_config, self.parallel_config = od_config, od_config.parallel_config
        self.device = get_local_device()
        self.weights_sources = [
            DiffusersPipelineLoader.ComponentSource(
                model_or_path=od_config.model,
                subfolder="transformer",
                revision=None,
                prefix="transformer.",
                fall_back_to_pt=True,
            )
        ]
        options = (od_config.custom_pipeline_args or {}).get(JOB, {})
        self.adapter = self.adapter_class(Path(od_config.model), self.device, od_config.dtype)
        self.vae = self.adapter.vae
        for name, encoder in zip(self._encoder_modules, self.text_encoders(), strict=True):
            self.add_module(name, encoder)
        self.transformer = self.build_transformer(od_config)
        # The engine's LoRA manager reads its first two columns; not every transformer of the engine has it (FLUX's does not).
        self.transformer.stacked_params_mapping = [
            (layer, part, index) for layer, parts in self.fused.items() for index, part in enumerate(parts)
        ]
        self.staged_lora: Any = None
        self.lora_rank = 0
        sigmas = SigmasConfig(**options.get("sigmas", {}))
        self.sampler = InProcessRollout(self.adapter, self.transformer, sigmas, self.device)
        DiffusionPipelineProfilerMixin.setup_diffusion_pipeline_profiler(
            self, enable_diffusion_pipeline_profiler=od_config.enable_diffusion_pipeline_profiler
        )

    @abstractmethod
    def build_transformer(self, od_config: OmniDiffusionConfig) -> nn.Module:
        """The engine's network, empty."""

    @abstractmethod
    def text_encoders(self) -> list[nn.Module]:
        """The adapter's, in the order of _encoder_modules: the engine finds what it frees or offloads among its modules."""

    def forward(self, req: DiffusionRequestBatch) -> list[DiffusionOutput]:
        prompt = req.prompts[0]
        job = prompt.get(JOB) if isinstance(prompt, dict) else None
        if job is None:
            job = self._warm_up_job(req)
        batch = self.sampler.sample(job.requests, job.sampling, job.policy_version, check_request_cancellation)
        return [DiffusionOutput(output={"payload": {"image": batch.media}, "metadata": {JOB: batch}})]

    def load_weights(self, weights: Any) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights)

    def engine_name(self, name: str) -> str:
        """A diffusers transformer's module or tensor name -> the engine's, what is fused still apart."""
        name = f"transformer.{name}"
        for theirs, ours in self.renamed:
            name = name.replace(theirs, ours)
        return name

    def fused_layer(self, module: str) -> FusedPart | None:
        """`...attn.to_k` -> (`...attn.to_qkv`, 1, 3): the layer that holds a module, and which slice of how many."""
        for layer, parts in self.fused.items():
            for index, part in enumerate(parts):
                if module.endswith(part):
                    return FusedPart(module.removesuffix(part) + layer, index, len(parts))
        return None

    def _load_diffusion_lora_adapter(self, **_: Any) -> Any:
        """vllm-omni's hook for adapters that do not lie on disk: the worker extension has staged this one."""
        if self.staged_lora is None:
            raise ValueError("no LoRA is staged: weights come through the worker extension only")
        model, helper = self.staged_lora
        self.lora_rank = helper.r
        return model, helper

    def relink_lora_layers(self) -> None:
        """For families whose transformer keeps a second reference to a layer that LoRA replaces."""

    def _warm_up_job(self, req: DiffusionRequestBatch) -> Job:
        """The engine's dummy request before the first real one, and anything that is not ours: one ODE sample of an empty prompt."""
        wanted = req.sampling_params
        unit = self.adapter.smallest_size()
        sampling = SamplingParams(
            height=max(unit.height, (wanted.height or 512) // unit.height * unit.height),
            width=max(unit.width, (wanted.width or 512) // unit.width * unit.width),
            frames=1,
            num_steps=wanted.num_inference_steps or 2,
            guidance_scale=1.0,
            rule="sde",
            noise_level=1.0,
            log_prob_form="gaussian",
            log_prob_reduction="mean",
            window_size=0,
            initial_noise="sample",
            seed=0,
        )
        zero = torch.zeros(1, dtype=torch.int64)
        tokens = self.adapter.tokenize([""], 512)
        return Job([RolloutRequest(0, tokens, None, zero, zero)], sampling, policy_version=-1)
