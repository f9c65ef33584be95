"""glyphs: the embedded default, a tiny Qwen-Image that draws two characters and is only half good at it.

    python -m flowgrpo_fast.models.glyphs --out DIR [--seed 0]

builds the pipeline (diffusers layout, safetensors) and pretrains it on rendered images, on two CPU cores in well
under 40 minutes. The result is committed in `flowgrpo_fast/assets/glyphs` and addressed as `builtin:glyphs`; RL with a
real OCR reward then makes it better. `build_pipeline` alone gives a random pipeline of the same layout for tests.

Four parts, all stock classes: AutoencoderKLQwenImage (0.7 M parameters), QwenImageTransformer2DModel (1.9 M),
Qwen2.5-VL text encoder (0.1 M) and a byte-level Qwen2Tokenizer whose template words are added tokens, so that
Qwen-Image's fixed drop of 34 template tokens is exactly right.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from PIL import Image, ImageDraw, ImageFont
from tokenizers import AddedToken, pre_tokenizers
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from flowgrpo_fast.models.glyph_prompts import ALPHABET, VALIDATION_SIZE, glyph_prompt, glyph_texts
from flowgrpo_fast.models.image_vae import decode_single_frames

RESOLUTION = 64
FONT_SIZE = 34
# Wrong captions, at the end, make the model half good: it can draw glyphs, but often not those asked for, and that is what RL can
# put right. A model that is only trained too briefly draws broken glyphs instead: from 0.16 exact, 40 steps of RL moved
# nothing (in a trial that also sampled without shift_terminal).
CAPTION_ERRORS = 0.25
# A white background kills the VAE: decode clamps to [-1, 1], pixels predicted beyond +1 get no gradient.
BACKGROUND = (205, 205, 205)

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Every word of Qwen-Image's prompt template as one token: the part before the prompt is then 34 tokens, as with Qwen's own vocabulary.
TEMPLATE_WORDS = [
    "system", "Describe", " the", " image", " by", " detailing", " color", " shape", " size", " texture", " quantity", " text",
    " spatial", " relationships", " of", " objects", " and", " background", "user", "assistant", "draw",
]  # fmt: skip

SIZES: dict[str, dict[str, Any]] = {
    "glyphs": {
        "transformer": dict(num_layers=3, attention_head_dim=32, num_attention_heads=4, axes_dims_rope=(8, 12, 12)),
        "vae": dict(base_dim=8),
    },
    # For tests: same layout, a tenth of the weights.
    "tiny": {
        "transformer": dict(num_layers=2, attention_head_dim=16, num_attention_heads=2, axes_dims_rope=(4, 6, 6)),
        "vae": dict(base_dim=4),
    },
}
TEXT_WIDTH = 64


def build_tokenizer() -> Qwen2Tokenizer:
    """Byte-level tokenizer of 256 + 24 ids. Any UTF-8 prompt has ids; the template's words are one id each."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for token in SPECIAL_TOKENS:
        vocab[token] = len(vocab)
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], model_max_length=2048)
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS], special_tokens=True
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in TEMPLATE_WORDS])
    return tokenizer


def build_pipeline(size: str = "glyphs", seed: int = 0) -> QwenImagePipeline:
    """A random Qwen-Image pipeline in fp32. `size`: "glyphs" (the shipped one's shape) or "tiny" (for tests)."""
    shape = SIZES[size]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = build_tokenizer()
        vocabulary = tokenizer.get_vocab()
        transformer = QwenImageTransformer2DModel(
            patch_size=2, in_channels=64, out_channels=16, joint_attention_dim=TEXT_WIDTH, **shape["transformer"]
        )
        vae = AutoencoderKLQwenImage(
            z_dim=16,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=1,
            latents_mean=[0.0] * 16,
            latents_std=[1.0] * 16,
            **shape["vae"],
        )
        text_config = dict(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            bos_token_id=None,
            eos_token_id=vocabulary["<|im_end|>"],
            pad_token_id=vocabulary["<|endoftext|>"],
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
        )
        vision_config = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=TEXT_WIDTH)
        text_encoder = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text_config, vision_config=vision_config, tie_word_embeddings=True)
        )
        # The stock initialisation (std 0.02) leaves tokens almost equal after the norms' eps; unit variance keeps them apart.
        torch.nn.init.normal_(text_encoder.get_input_embeddings().weight, std=1.0)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, base_image_seq_len=16, max_image_seq_len=8192,
        shift_terminal=0.02,
    )  # fmt: skip
    pipe = QwenImagePipeline(
        scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer
    )
    return pipe.to(torch.float32)


def render(text: str, rng: random.Random) -> Image.Image:
    """`text` centred with a jitter of a few pixels, in a dark random colour on light grey: [64, 64] RGB."""
    image = Image.new("RGB", (RESOLUTION, RESOLUTION), BACKGROUND)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(size=FONT_SIZE)
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    x = (RESOLUTION - (right - left)) / 2 - left + rng.randint(-3, 3)
    y = (RESOLUTION - (bottom - top)) / 2 - top + rng.randint(-3, 3)
    draw.text((x, y), text, font=font, fill=tuple(rng.randint(0, 110) for _ in range(3)))
    return image


def render_batch(texts: list[str], rng: random.Random) -> Tensor:
    """[B, 3, 64, 64] fp32 in [-1, 1]."""
    raw = b"".join(render(text, rng).tobytes() for text in texts)
    pixels = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(len(texts), RESOLUTION, RESOLUTION, 3)
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0


def train_vae(vae: AutoencoderKLQwenImage, texts: list[str], rng: random.Random, steps: int, batch: int = 16) -> float:
    """Trains the VAE and sets its latents_mean/std. Returns the last losses' mean."""
    decode_single_frames(vae).train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=1e-4, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    losses: list[float] = []
    for step in range(steps):
        x = render_batch(rng.choices(texts, k=batch), rng)[:, :, None]
        z = vae.encode(x).latent_dist.mean
        # A little noise smooths the latent space for the flow model; noise as large as the latents never became legible.
        y = vae.decode(z + 0.1 * torch.randn_like(z)).sample
        loss = F.l1_loss(y, x) + F.mse_loss(y, x) + 1e-3 * (z.square().mean() - 1.0).square()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 49:
            print(f"vae {step + 1}/{steps} loss {sum(losses[-50:]) / 50:.4f}", flush=True)
    return sum(losses[-50:]) / len(losses[-50:])


@torch.no_grad()
def encode_images(vae: AutoencoderKLQwenImage, pixels: Tensor, batch: int = 64) -> Tensor:
    """[N, 3, H, W] in [-1, 1] -> raw latents [N, 16, h, w] (posterior mean, not normalised)."""
    vae.eval()
    return torch.cat([vae.encode(chunk[:, :, None]).latent_dist.mean[:, :, 0] for chunk in pixels.split(batch)])


def set_latent_statistics(vae: AutoencoderKLQwenImage, latents: Tensor) -> Tensor:
    """Writes per-channel mean and std into the VAE's config and returns the normalised latents."""
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return (latents - mean[:, None, None]) / std[:, None, None]


def miscaption(text: str, known: set[str], rng: random.Random) -> str:
    """`text` as a careless person would caption it: each character wrong with probability CAPTION_ERRORS; one of `known`."""
    while True:
        caption = "".join(rng.choice(ALPHABET) if rng.random() < CAPTION_ERRORS else c for c in text)
        if caption in known:
            return caption


def train_flow(
    pipe: QwenImagePipeline, texts: list[str], latents: Tensor, steps: int, generator: torch.Generator, batch: int = 96
) -> float:
    """Flow matching on stored latents [N, 16, h, w]; text encoder and transformer learn together. Returns the last losses' mean.

    One prompt in ten is " ", Qwen-Image's customary negative prompt, so that true CFG has a trained unconditional branch.
    """
    transformer, encoder = pipe.transformer.train(), pipe.text_encoder.model.train()
    packed = pipe._pack_latents(latents[:, :, None], len(texts), *latents.shape[1:])
    prompts = [glyph_prompt(text) for text in texts] + [" "]
    template, drop = pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx
    tokens = pipe.tokenizer(
        [template.format(p) for p in prompts], padding=True, padding_side="right", return_tensors="pt"
    )
    parameters = list(transformer.parameters()) + list(encoder.language_model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.99), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    side = RESOLUTION // 16
    losses: list[float] = []
    for step in range(steps):
        index = torch.randint(len(texts), (batch,), generator=generator)
        dropped = torch.rand(batch, generator=generator) < 0.1
        row = torch.where(dropped, len(texts), index)
        mask = tokens.attention_mask[row]
        embeds = encoder(input_ids=tokens.input_ids[row], attention_mask=mask).last_hidden_state[:, drop:]
        x0 = packed[index]
        noise = torch.randn(x0.shape, generator=generator)
        sigma = torch.randn(batch, generator=generator).sigmoid()
        x = x0 + sigma[:, None, None] * (noise - x0)
        v = transformer(
            hidden_states=x,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask[:, drop:],
            timestep=sigma,
            img_shapes=[[(1, side, side)]] * batch,
            return_dict=False,
        )[0]
        loss = F.mse_loss(v, noise - x0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"flow {step + 1}/{steps} loss {sum(losses[-100:]) / 100:.4f}", flush=True)
    return sum(losses[-100:]) / len(losses[-100:])


CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
---
# glyphs

A toy text-to-image model in Qwen-Image's layout: for the prompt `draw "K7"` it draws K7 on a 64x64 image, and is only half good at
it on purpose, so that reinforcement learning has something to do. It knows two-character texts of `{alphabet}`, nothing else.

Made by `python -m flowgrpo_fast.models.glyphs --out DIR --seed {seed}` on {threads} CPU threads, torch {torch}: {vae_steps} steps of the
VAE (loss {vae_loss:.4f}, {vae_seconds} s with encoding), then flow matching on {images} rendered images: {flow_steps} steps on right captions
(loss {flow_loss:.4f}) and {careless_steps} on captions in which each character is wrong with probability {caption_errors} (loss
{careless_loss:.4f}; {flow_seconds} s together). Text encoder and transformer learn together. Images are drawn with Pillow's bundled font, in
dark colours on light grey; the {validation} validation texts are in no image and no caption.

Stored in bf16. Sampler: FlowMatchEuler with dynamic shift, 6 steps. Share of right images before and after RL: the project's README.
"""


def pretrain(out: Path, seed: int, vae_steps: int, flow_steps: int, careless_steps: int, images: int) -> None:
    """Builds, pretrains and saves the pipeline in bf16 under `out`, with `training.json` (seed, steps, losses, seconds) and a model card."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    texts = glyph_texts("train")
    pipe = build_pipeline("glyphs", seed)
    began = time.time()
    vae_loss = train_vae(pipe.vae, texts, rng, vae_steps)
    # The VAE is stored in bf16: measure the latents with the weights that will be loaded.
    pipe.vae.to(torch.bfloat16).to(torch.float32)
    drawn = [rng.choice(texts) for _ in range(images)]
    latents = set_latent_statistics(pipe.vae, encode_images(pipe.vae, render_batch(drawn, rng)))
    known = set(texts)
    captions = [miscaption(text, known, rng) for text in drawn]
    vae_done = time.time()
    print(f"{images} images encoded after {vae_done - began:.0f} s", flush=True)
    flow_loss = train_flow(pipe, drawn, latents, flow_steps, torch.Generator().manual_seed(seed))
    careless_loss = train_flow(pipe, captions, latents, careless_steps, torch.Generator().manual_seed(seed))
    pipe.to(torch.bfloat16).save_pretrained(out)
    record = dict(
        seed=seed, vae_steps=vae_steps, flow_steps=flow_steps, careless_steps=careless_steps, caption_errors=CAPTION_ERRORS,
        images=images, vae_loss=vae_loss, flow_loss=flow_loss, careless_loss=careless_loss,
        vae_seconds=round(vae_done - began), flow_seconds=round(time.time() - vae_done),
        threads=torch.get_num_threads(), torch=torch.__version__,
    )  # fmt: skip
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    (out / "README.md").write_text(CARD.format(alphabet=ALPHABET, validation=VALIDATION_SIZE, **record))
    print(json.dumps(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pipeline (diffusers layout)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-steps", type=int, default=500)
    parser.add_argument("--flow-steps", type=int, default=2800)
    parser.add_argument("--careless-steps", type=int, default=300, help="further steps on wrong captions")
    parser.add_argument(
        "--images", type=int, default=8000, help="rendered images whose latents the flow model learns from"
    )
    args = parser.parse_args()
    pretrain(args.out, args.seed, args.vae_steps, args.flow_steps, args.careless_steps, args.images)


if __name__ == "__main__":
    main()
