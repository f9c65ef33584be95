"""HPSv3-style rewards over a tiny random Qwen2-VL: against the scorer's own way of computing them; videos; what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from flowgrpo_fast.models.glyphs import build_tokenizer
from flowgrpo_fast.rewards import build_reward
from flowgrpo_fast.rewards.hpsv3 import CHAT

PROMPTS = ["draw a cat", "draw", "a big dog and a much longer prompt than that"]
INSTRUCTION = "Does it show {prompt}? <|Reward|>"
PIXELS = 56 * 56


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hpsv3")
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    special = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|Reward|>"]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in special], special_tokens=True)
    ids = dict(zip(special, tokenizer.convert_tokens_to_ids(special), strict=True))
    text = dict(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=None, bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    )  # fmt: skip
    config = Qwen2VLConfig(
        text_config=text, vision_config=dict(depth=1, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2), image_token_id=ids["<|image_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    model = Qwen2VLForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=1 / parameter[0].numel() ** 0.5)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    Qwen2VLImageProcessorPil().save_pretrained(path)
    save_file(
        {f"rm_head.{name}": t for name, t in head().state_dict().items()},
        path / "head.safetensors",
    )
    return path


def head() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(32, 24), nn.ReLU(), nn.Dropout(0.05), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 2)
    ).eval()


def images(n: int = 3) -> Tensor:
    coarse = torch.randint(0, 256, (n, 3, 6, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8).float()
    return nn.functional.interpolate(coarse, (48, 64), mode="bilinear").to(torch.uint8)


def score(folder: Path, media: Tensor, prompts: list[str] = PROMPTS, **kwargs: object) -> Tensor:
    given = {"path": str(folder), "instruction": INSTRUCTION, "pixels": PIXELS, "dtype": "float32", **kwargs}
    found = build_reward("hpsv3", given)(media, prompts, [{}] * len(media))
    assert isinstance(found, Tensor)
    return found


@torch.no_grad()
def theirs(folder: Path, image: Tensor, prompt: str) -> float:
    """One sample, as HPSv3's model goes about it: embeddings with the image's in their places, positions from the attention mask alone."""
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = {"shortest_edge": PIXELS, "longest_edge": PIXELS}
    seen = Qwen2VLImageProcessorPil.from_pretrained(folder, size=size)(
        images=[image.permute(1, 2, 0).numpy()], return_tensors="pt"
    )
    each = int(seen["image_grid_thw"][0].prod()) // 4
    text = CHAT.format(text=INSTRUCTION.format(prompt=prompt)).replace("<|image_pad|>", "<|image_pad|>" * each)
    ids = tokenizer(text, return_tensors="pt").input_ids
    embeds = model.get_input_embeddings()(ids)
    vision = model.model.visual(seen["pixel_values"], grid_thw=seen["image_grid_thw"])
    vision = getattr(vision, "pooler_output", vision)
    embeds = embeds.masked_scatter((ids == model.config.image_token_id)[..., None], vision.to(embeds.dtype))
    hidden = model.model(inputs_embeds=embeds, attention_mask=torch.ones_like(ids)).last_hidden_state
    at = int((ids[0] == tokenizer.convert_tokens_to_ids("<|Reward|>")).nonzero()[-1])
    return float(head()(hidden[0, at])[0])


def test_scores_are_the_scorers(folder: Path) -> None:
    """In a batch whose texts are padded, one by one, and from a file of the instruction."""
    want = [theirs(folder, image, prompt) for image, prompt in zip(images(), PROMPTS, strict=True)]
    assert len({round(w, 4) for w in want}) == 3
    file = folder / "instruction.txt"
    file.write_text(INSTRUCTION)
    for found in (score(folder, images()), score(folder, images(), batch_size=1, instruction=str(file))):
        torch.testing.assert_close(found, torch.tensor(want), rtol=1e-4, atol=1e-5)


def test_image_and_prompt_both_count(folder: Path) -> None:
    same_prompt = score(folder, images(), ["a"] * 3)
    same_image = score(folder, images(1).expand(3, -1, -1, -1), PROMPTS)
    assert all(len(set(found.tolist())) == 3 for found in (same_prompt, same_image))


def test_a_video_is_the_mean_of_its_frames(folder: Path) -> None:
    video = images(4)[None]
    frames = score(folder, video[0, [0, 3]], ["draw"] * 2)
    assert float(score(folder, video, ["draw"], frames=2)[0]) == pytest.approx(float(frames.mean()), rel=1e-5)


def test_a_prompt_may_hold_the_tokens_name(folder: Path) -> None:
    assert bool(score(folder, images(1), ["a <|Reward|> b"]).isfinite().all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "/nowhere"}, "holds no config.json"),
        ({"instruction": "no prompt <|Reward|>"}, "instruction must hold {prompt}"),
        ({"instruction": "{prompt}"}, r"instruction must hold <\|Reward\|>"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"batch_size": 0}, "must be at least 1"),
    ],
)
def test_what_is_wrong_is_said_at_once(folder: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_reward("hpsv3", {"path": str(folder), "instruction": INSTRUCTION, **changes})


def test_a_folder_without_head_or_token(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.name != "head.safetensors":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ValueError, match=r"holds no rm_head.0.weight, rm_head.3.weight, rm_head.5.weight"):
        score(tmp_path, images())
    with pytest.raises(ValueError, match="has no <judge>; add it"):
        score(folder, images(), reward_token="<judge>", instruction="{prompt} <judge>")
