"""Tiny random pipelines of each family, built offline: tokenizers made in code, a few thousand parameters."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers import AddedToken, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from flowgrpo_fast.models.glyphs import build_pipeline, build_tokenizer
from tests.tiny import tiny_pipeline

WIDTH = 32  # of every text encoder
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789,.'\"-"


def clip_tokenizer() -> CLIPTokenizer:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|startoftext|>", "<|endoftext|>", *symbols, *(s + "</w>" for s in symbols)]
    return CLIPTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[], model_max_length=77)


def t5_tokenizer() -> T5Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    return T5Tokenizer(vocab=pieces, extra_ids=0)


def clip_encoder(encoder_class: Any, tokenizer: CLIPTokenizer) -> Any:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, projection_dim=WIDTH,
        max_position_embeddings=77, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return encoder_class(config)


def t5_encoder(config_class: Any = T5Config, encoder_class: Any = T5EncoderModel) -> Any:
    config = config_class(
        vocab_size=len(LETTERS) + 4, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=4, is_encoder_decoder=False
    )
    return encoder_class(config)


def image_vae(shift: float, scale: float) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(4, 4, 4, 4), down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1, latent_channels=16, norm_num_groups=2, use_quant_conv=False, use_post_quant_conv=False,
        shift_factor=shift, scaling_factor=scale,
    )  # fmt: skip


def sd3() -> StableDiffusion3Pipeline:
    """Medium 3.5's parts: RMS norms of queries and keys, a second attention in the first block."""
    transformer = SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=16, num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=2 * WIDTH,
        caption_projection_dim=32, pooled_projection_dim=2 * WIDTH, out_channels=16, pos_embed_max_size=96, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    t5_wide = T5EncoderModel(
        T5Config(vocab_size=len(LETTERS) + 4, d_model=2 * WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )
    return StableDiffusion3Pipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=image_vae(0.0609, 1.5305),
        text_encoder=clip_encoder(CLIPTextModelWithProjection, clip), tokenizer=clip,
        text_encoder_2=clip_encoder(CLIPTextModelWithProjection, clip), tokenizer_2=clip, text_encoder_3=t5_wide, tokenizer_3=t5,
    )  # fmt: skip


def flux() -> FluxPipeline:
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH, axes_dims_rope=(4, 6, 6), guidance_embeds=True,
    )  # fmt: skip
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096)  # fmt: skip
    return FluxPipeline(
        transformer=transformer, scheduler=scheduler, vae=image_vae(0.1159, 0.3611), text_encoder=clip_encoder(CLIPTextModel, clip), tokenizer=clip,
        text_encoder_2=t5_encoder(), tokenizer_2=t5,
    )  # fmt: skip


def wan(expand_timesteps: bool = False) -> WanPipeline:
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16, text_dim=WIDTH, freq_dim=32, ffn_dim=48,
        num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return WanPipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=vae,
        text_encoder=t5_encoder(UMT5Config, UMT5EncoderModel), tokenizer=t5_tokenizer(), expand_timesteps=expand_timesteps,
    )  # fmt: skip


def z_image() -> ZImagePipeline:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    encoder = Qwen3Model(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            max_position_embeddings=256,
        )
    )  # fmt: skip
    transformer = ZImageTransformer2DModel(
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 64, 64],
    )
    return ZImagePipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=image_vae(0.1159, 0.3611), text_encoder=encoder, tokenizer=tokenizer
    )  # fmt: skip


def flux_kontext() -> FluxKontextPipeline:
    return FluxKontextPipeline(**{k: v for k, v in flux().components.items() if v is not None})


# Qwen's own cut of the editing template: 64 tokens before the image.
EDIT_WORDS = [
    " key", " features", " input", " (", "color", " objects", " background", "),", " then", " explain", " how", " user", "'s", " instruction", " should",
    " alter", " or", " modify", " Generate", " a", " new", " that", " meets", " requirements", " while", " maintaining", " consistency", " with", " original",
    " where", " appropriate",
]  # fmt: skip


def qwen_image_edit() -> QwenImagePipeline:
    """Without the processor, which wants torchvision; `pipeline_folder` adds its image half."""
    pipe = build_pipeline("tiny")
    tokenizer = pipe.tokenizer
    special = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in special], special_tokens=True)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in EDIT_WORDS])
    config = copy.deepcopy(pipe.text_encoder.config)
    config.text_config.vocab_size = len(tokenizer)
    config.vision_start_token_id, config.image_token_id, config.vision_end_token_id = tokenizer.convert_tokens_to_ids(
        special
    )
    pipe.text_encoder = Qwen2_5_VLForConditionalGeneration(config)
    return pipe


BUILDERS: dict[str, Callable[[], Any]] = {
    "sd3": sd3,
    "flux": flux,
    "flux_kontext": flux_kontext,
    "qwen_image_edit": qwen_image_edit,
    "wan": wan,
    "z_image": z_image,
    "wan-2.2-ti2v": functools.partial(wan, expand_timesteps=True),
}


@functools.cache
def pipeline_folder(name: str) -> Path:
    """Built once per test process."""
    if name == "qwen_image":
        return tiny_pipeline()
    if name == "qwen_image_edit_plus":
        return pipeline_folder("qwen_image_edit")
    folder = Path(tempfile.mkdtemp(prefix=f"flowgrpo_fast_{name}_"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipeline = BUILDERS[name]()
        # The stock initialisation leaves a tiny network's answer near zero, whatever the prompt.
        for component in pipeline.components.values():
            if isinstance(component, torch.nn.Module):
                for parameter in component.parameters():
                    if parameter.dim() > 1:
                        torch.nn.init.normal_(parameter, std=0.8 / parameter[0].numel() ** 0.5)
    pipeline.save_pretrained(folder)
    if name == "qwen_image_edit":
        Qwen2VLImageProcessorPil().save_pretrained(folder / "processor")
    return folder
