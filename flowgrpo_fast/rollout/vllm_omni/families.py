"""The families that vllm-omni samples: its transformer of each, the names it gives to their layers, and what it wants beside the trainer's inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.models.base import PromptEmbeds
from flowgrpo_fast.models.flux import FluxAdapter
from flowgrpo_fast.models.flux_kontext import FluxKontextAdapter
from flowgrpo_fast.models.qwen_image import QwenImageAdapter
from flowgrpo_fast.models.qwen_image_edit import QwenImageEditAdapter, QwenImageEditPlusAdapter
from flowgrpo_fast.models.sd3 import SD3Adapter
from flowgrpo_fast.models.wan import WanAdapter
from flowgrpo_fast.models.z_image import ZImageAdapter
from flowgrpo_fast.rollout.vllm_omni.pipeline import FlowGrpoPipeline
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.models.flux.flux_transformer import FluxTransformer2DModel
from vllm_omni.diffusion.models.qwen_image import qwen_image_transformer
from vllm_omni.diffusion.models.sd3.sd3_transformer import SD3Transformer2DModel
from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import create_transformer_from_config
from vllm_omni.diffusion.models.z_image.z_image_transformer import SEQ_MULTI_OF, ZImageTransformer2DModel
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs


class TextLengths(QwenImageAdapter):
    """The engine's transformer wants the text lengths beside the embeddings."""

    def network_inputs(
        self, x: Tensor, sigma: Tensor, prompt: PromptEmbeds, guidance_scale: float, size: MediaSize
    ) -> dict[str, Any]:
        inputs = super().network_inputs(x, sigma, prompt, guidance_scale, size)
        return {**inputs, "txt_seq_lens": [prompt.embeds.shape[1]] * x.shape[0]}


class EngineQwenImageEditAdapter(TextLengths, QwenImageEditAdapter): ...


class EngineQwenImageEditPlusAdapter(TextLengths, QwenImageEditPlusAdapter): ...


def qk_norm_rope(
    q: Tensor, k: Tensor, norm_q: nn.Module, norm_k: nn.Module, freqs: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """RoPE as diffusers computes it: fp32 complex products, rounded once. The engine's own rounds cos and sin to bf16 first."""

    def rotated(t: Tensor) -> Tensor:
        pairs = torch.view_as_complex(t.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * freqs[:, None]).flatten(3).to(t.dtype)

    return rotated(norm_q(q)), rotated(norm_k(k))


class FlowGrpoQwenImagePipeline(FlowGrpoPipeline):
    adapter_class = TextLengths
    renamed: ClassVar[Sequence[tuple[str, str]]] = [(".to_out.0", ".to_out")]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    adapter: QwenImageAdapter

    def build_transformer(self, od_config: OmniDiffusionConfig) -> nn.Module:
        qwen_image_transformer._qwen_image_qk_norm_rope = qk_norm_rope
        network = qwen_image_transformer.QwenImageTransformer2DModel
        return network(
            od_config=od_config,
            quant_config=od_config.quantization_config,
            **get_transformer_config_kwargs(od_config.tf_model_config, network),
        )

    def text_encoders(self) -> list[nn.Module]:
        return [self.adapter.text_encoder]

    def relink_lora_layers(self) -> None:
        """`image_rope_prepare` keeps a second reference to `img_in`, the bare layer: a LoRA there would bind, be counted and change nothing."""
        self.transformer.image_rope_prepare.img_in = self.transformer.img_in


class FlowGrpoQwenImageEditPipeline(FlowGrpoQwenImagePipeline):
    adapter_class = EngineQwenImageEditAdapter


class FlowGrpoQwenImageEditPlusPipeline(FlowGrpoQwenImagePipeline):
    adapter_class = EngineQwenImageEditPlusAdapter


class FlowGrpoSD3Pipeline(FlowGrpoPipeline):
    adapter_class = SD3Adapter
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "text_encoder_2", "text_encoder_3"]
    adapter: SD3Adapter

    def build_transformer(self, od_config: OmniDiffusionConfig) -> nn.Module:
        return SD3Transformer2DModel(od_config=od_config)

    def text_encoders(self) -> list[nn.Module]:
        return [*self.adapter.clip_encoders, self.adapter.t5_encoder]


class FlowGrpoFluxPipeline(FlowGrpoPipeline):
    adapter_class = FluxAdapter
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "text_encoder_2"]
    adapter: FluxAdapter

    def build_transformer(self, od_config: OmniDiffusionConfig) -> nn.Module:
        return FluxTransformer2DModel(
            od_config=od_config,
            quant_config=od_config.quantization_config,
            **get_transformer_config_kwargs(od_config.tf_model_config, FluxTransformer2DModel),
        )

    def text_encoders(self) -> list[nn.Module]:
        return [self.adapter.clip_encoder, self.adapter.t5_encoder]


class FlowGrpoFluxKontextPipeline(FlowGrpoFluxPipeline):
    adapter_class = FluxKontextAdapter


class EngineZImageAdapter(ZImageAdapter):
    def predict(self, transformer: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """A forward for each padded length of text: the engine's attention leaves out the mask, so texts of several lengths must not share one."""
        padded = [math.ceil(len(text) / SEQ_MULTI_OF) for text in inputs["cap_feats"]]
        v: list[Tensor] = [torch.empty(0)] * len(padded)
        for length in set(padded):
            rows = [i for i, n in enumerate(padded) if n == length]
            given = {name: [values[i] for i in rows] for name, values in inputs.items()}
            found = transformer(x=given["x"], t=torch.stack(given["t"]), cap_feats=given["cap_feats"])[0]
            for i, one in zip(rows, found, strict=True):
                v[i] = -one[:, 0]
        return torch.stack(v)


class FlowGrpoZImagePipeline(FlowGrpoPipeline):
    """The engine's own pipeline takes the transformer's default dimensions, not the checkpoint's; here they are read."""

    adapter_class = EngineZImageAdapter
    fused: ClassVar[dict[str, Sequence[str]]] = {
        ".to_qkv": (".to_q", ".to_k", ".to_v"),
        ".w13": (".w1", ".w3"),
    }
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    adapter: EngineZImageAdapter

    def build_transformer(self, od_config: OmniDiffusionConfig) -> nn.Module:
        return ZImageTransformer2DModel(
            quant_config=od_config.quantization_config,
            **get_transformer_config_kwargs(od_config.tf_model_config, ZImageTransformer2DModel),
        )

    def text_encoders(self) -> list[nn.Module]:
        return [self.adapter.text_encoder]


class FlowGrpoWanPipeline(FlowGrpoPipeline):
    """The engine's transformer with Euler steps: its own sampler is a UniPC with shift 5, whatever the checkpoint says."""

    adapter_class = WanAdapter
    renamed: ClassVar[Sequence[tuple[str, str]]] = [
        (".to_out.0", ".to_out"),
        (".ffn.net.0.", ".ffn.net_0."),
        (".ffn.net.2", ".ffn.net_2"),
        ("transformer.scale_shift_table", "transformer.output_scale_shift_prepare.scale_shift_table"),
    ]
    # Cross-attention keeps its three.
    fused: ClassVar[dict[str, Sequence[str]]] = {".attn1.to_qkv": (".attn1.to_q", ".attn1.to_k", ".attn1.to_v")}
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    adapter: WanAdapter

    def build_transformer(self, od_config: OmniDiffusionConfig) -> nn.Module:
        return create_transformer_from_config(self.adapter.transformer_config, od_config.quantization_config)

    def text_encoders(self) -> list[nn.Module]:
        return [self.adapter.text_encoder]
