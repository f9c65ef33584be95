"""The pipeline that runs inside vllm-omni: the engine's transformer under the trainer's own sampler, so both sides share every formula.

Only the network is the engine's. Template, schedule, denoising loop, SDE step, log-probs, guidance and decoding are the code that the
in-process rollout runs (`InProcessRollout.sample`), which is why log-probs agree with the trainer's. One engine request is one forward batch
of prompt groups; each prompt is encoded once, a shared negative prompt once per server.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.utils import AutoWeightsLoader

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.config import SigmasConfig
from flowgrpo_fast.models.base import PromptEmbeds
from flowgrpo_fast.models.qwen_image import QwenImageAdapter
from flowgrpo_fast.rollout.base import RolloutRequest, SamplingParams
from flowgrpo_fast.rollout.in_process import InProcessRollout
from vllm_omni.diffusion.cancellation import check_request_cancellation
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader
from vllm_omni.diffusion.models.qwen_image import qwen_image_transformer
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

JOB = "flowgrpo"


@dataclass(frozen=True)
class Job:
    """What a request carries under prompt[JOB]; handed over by reference on a one-GPU engine."""

    requests: list[RolloutRequest]
    sampling: SamplingParams
    policy_version: int


class EngineQwenImageAdapter(QwenImageAdapter):
    """QwenImageAdapter for the engine's transformer, which wants the text lengths beside the embeddings."""

    def network_inputs(
        self, x: Tensor, sigma: Tensor, prompt: PromptEmbeds, guidance_scale: float, size: MediaSize
    ) -> dict[str, Any]:
        inputs = super().network_inputs(x, sigma, prompt, guidance_scale, size)
        return {**inputs, "txt_seq_lens": [prompt.embeds.shape[1]] * x.shape[0]}


def qk_norm_rope(
    q: Tensor, k: Tensor, norm_q: nn.Module, norm_k: nn.Module, freqs: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """RoPE as diffusers computes it: fp32 complex products, rounded once. The engine's own rounds cos and sin to bf16 first."""

    def rotated(t: Tensor) -> Tensor:
        pairs = torch.view_as_complex(t.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * freqs[:, None]).flatten(3).to(t.dtype)

    return rotated(norm_q(q)), rotated(norm_k(k))


class FlowGrpoQwenImagePipeline(QwenImagePipeline):
    """Qwen-Image for rollouts. Registered with vllm-omni by `plugin.register`, chosen by `model_class_name`."""

    supports_request_batch = False
    supports_step_execution = False
    supports_request_cancellation = True

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        # Not QwenImagePipeline's own: that loads text encoder and VAE in the checkpoint's dtype, and the dummy run of an fp32
        # checkpoint in a bf16 engine dies of it. The adapter loads both in the engine's.
        nn.Module.__init__(self)
        qwen_image_transformer._qwen_image_qk_norm_rope = qk_norm_rope
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
        self.adapter = EngineQwenImageAdapter(Path(od_config.model), self.device, od_config.dtype)
        self.tokenizer, self.text_encoder, self.vae = (
            self.adapter.tokenizer,
            self.adapter.text_encoder,
            self.adapter.vae,
        )
        self.transformer = qwen_image_transformer.QwenImageTransformer2DModel(
            od_config=od_config,
            quant_config=od_config.quantization_config,
            **get_transformer_config_kwargs(
                od_config.tf_model_config, qwen_image_transformer.QwenImageTransformer2DModel
            ),
        )
        self.staged_lora: Any = None
        self.lora_rank = 0
        sigmas = SigmasConfig(**options.get("sigmas", {}))
        self.sampler = InProcessRollout(self.adapter, self.transformer, sigmas, self.device)
        self.setup_diffusion_pipeline_profiler(
            enable_diffusion_pipeline_profiler=od_config.enable_diffusion_pipeline_profiler
        )

    def forward(self, req: DiffusionRequestBatch) -> list[DiffusionOutput]:
        prompt = req.prompts[0]
        job = prompt.get(JOB) if isinstance(prompt, dict) else None
        if job is None:
            job = self._warm_up_job(req)
        batch = self.sampler.sample(job.requests, job.sampling, job.policy_version, check_request_cancellation)
        return [DiffusionOutput(output={"payload": {"image": batch.images}, "metadata": {JOB: batch}})]

    def load_weights(self, weights: Any) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights)

    @staticmethod
    def engine_name(name: str) -> str:
        """A diffusers transformer's module or tensor name -> the engine's."""
        return f"transformer.{name}".replace(".to_out.0.", ".to_out.")

    def _load_diffusion_lora_adapter(self, **_: Any) -> Any:
        """vllm-omni's hook for adapters that do not lie on disk: the worker extension has staged this one."""
        if self.staged_lora is None:
            raise ValueError("no LoRA is staged: weights come through the worker extension only")
        model, helper = self.staged_lora
        self.lora_rank = helper.r
        return model, helper

    def relink_lora_layers(self) -> None:
        """`image_rope_prepare` keeps a second reference to `img_in`, the bare layer: a LoRA there would bind, be counted and change nothing."""
        self.transformer.image_rope_prepare.img_in = self.transformer.img_in

    def _warm_up_job(self, req: DiffusionRequestBatch) -> Job:
        """The engine's dummy request before the first real one, and anything that is not ours: one ODE sample of an empty prompt."""
        wanted = req.sampling_params
        unit = self.adapter.vae_scale * 2
        sampling = SamplingParams(
            height=(wanted.height or 512) // unit * unit,
            width=(wanted.width or 512) // unit * unit,
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
