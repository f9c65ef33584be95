"""HPSv3-style rewards: a Qwen2-VL that reads instruction and image up to a token of its own, and a small network that turns that token's state into a score.

Facts from MizzenAI/HPSv3: the head is Linear-ReLU-Dropout-Linear-ReLU-Linear in fp32 on the state at `<|Reward|>` and gives mean and log-variance, of which the mean is the
score; images are brought to 256 x 28 x 28 pixels; positions count image and text alike in one dimension (the image's grid never reaches its RoPE).
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo_fast.rewards.base import register_reward
from flowgrpo_fast.rewards.clip import DTYPES, own_device
from flowgrpo_fast.rewards.frames import spread_frames

PIXELS = 256 * 28 * 28
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
    "{text}<|im_end|>\n<|im_start|>assistant\n"
)
HEAD = (0, 3, 5)  # the linear layers of rm_head


@register_reward("hpsv3")
class HpsV3:
    """Args:
        path: folder of the scorer as transformers has it: config.json, the tokenizer with the reward token in it, preprocessor_config.json, and safetensors
            that hold the network and `rm_head.*`.
        instruction: what the network was trained to read, `{prompt}` where the prompt goes and `reward_token` where it is to judge; or a file of it.
        pixels: of an image, as far as whole patches allow.
        device, dtype, batch_size, frames: as ClipReward's.

    Checked at once; loaded with the first call. Raises ValueError for what is missing.
    """

    def __init__(
        self,
        path: str,
        instruction: str,
        reward_token: str = "<|Reward|>",
        pixels: int = PIXELS,
        device: str = "auto",
        dtype: str = "bfloat16",
        batch_size: int = 4,
        frames: int = 4,
    ):
        self.path = Path(path).expanduser()
        for name in ("config.json", "preprocessor_config.json"):
            if not (self.path / name).is_file():
                raise ValueError(f"path {path!r} holds no {name}; give the local folder of the scorer")
        file = Path(instruction).expanduser()
        self.instruction = file.read_text() if len(instruction) < 1024 and file.is_file() else instruction
        for part in ("{prompt}", reward_token):
            if part not in self.instruction:
                raise ValueError(f"instruction must hold {part}, got {self.instruction[:80]!r} (or a file that does)")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if min(pixels, batch_size, frames) < 1:
            raise ValueError("pixels, batch_size and frames must be at least 1")
        self.reward_token, self.pixels = reward_token, pixels
        self.device = own_device() if device == "auto" else torch.device(device)
        self.dtype, self.batch_size, self.frames = DTYPES[dtype], batch_size, frames
        self._lock = threading.Lock()
        self._network: Any = None

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """uint8 [N, 3, H, W] or [N, F, 3, H, W] -> fp32 [N], the mean over frames."""
        with self._lock:
            if self._network is None:
                self._load()
        frames, count = spread_frames(images, self.frames)
        texts = [prompt for prompt in prompts for _ in range(count)]
        parts = range(0, len(frames), self.batch_size)
        scores = [self._score(frames[i : i + self.batch_size], texts[i : i + self.batch_size]) for i in parts]
        return torch.cat(scores).view(-1, count).mean(1).cpu()

    def _score(self, images: Tensor, prompts: list[str]) -> Tensor:
        pictures = [image.permute(1, 2, 0).numpy() for image in images]
        seen = self._processor(images=pictures, return_tensors="pt")
        each = int(seen["image_grid_thw"][0].prod()) // self._processor.merge_size**2
        chats = [CHAT.format(text=self.instruction.replace("{prompt}", prompt)) for prompt in prompts]
        tokens = self._tokenizer(
            [chat.replace("<|image_pad|>", "<|image_pad|>" * each) for chat in chats], padding=True, return_tensors="pt"
        ).to(self.device)
        positions = (tokens.attention_mask.cumsum(1) - 1).clamp(min=0)
        hidden = self._network(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            position_ids=positions.expand(3, -1, -1),
            pixel_values=seen["pixel_values"].to(self.device, self.dtype),
            image_grid_thw=seen["image_grid_thw"].to(self.device),
        ).last_hidden_state
        at = tokens.input_ids == self._tokenizer.convert_tokens_to_ids(self.reward_token)
        # The last one: a prompt may hold the token's name.
        last = at.shape[1] - 1 - at.flip(1).int().argmax(1)
        scores: Tensor = self._head(hidden[torch.arange(len(last)), last].float())[:, 0]
        return scores

    def _load(self) -> None:
        from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self._tokenizer: Any = AutoTokenizer.from_pretrained(self.path, padding_side="right")
        if self._tokenizer.convert_tokens_to_ids(self.reward_token) in (None, self._tokenizer.unk_token_id):
            raise ValueError(
                f"the tokenizer of {self.path} has no {self.reward_token}; add it as the scorer's training did"
            )
        size = {"shortest_edge": self.pixels, "longest_edge": self.pixels}
        self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(self.path, size=size)
        self._head = self._load_head()
        model: Any = Qwen2VLForConditionalGeneration.from_pretrained(self.path, dtype=self.dtype)
        self._network = model.model.to(self.device).eval().requires_grad_(False)

    def _load_head(self) -> nn.Sequential:
        from safetensors import safe_open

        state: dict[str, Tensor] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                state |= {
                    name: opened.get_tensor(name).float()
                    for name in sorted(opened.keys())
                    if name.startswith("rm_head.")
                }
        missing = [name for i in HEAD if (name := f"rm_head.{i}.weight") not in state]
        if missing:
            raise ValueError(
                f"{self.path} holds no {', '.join(missing)}: the head of an HPSv3 lies beside its network's weights"
            )
        shapes = [state[f"rm_head.{i}.weight"].shape for i in HEAD]
        first, second, third = (nn.Linear(shape[1], shape[0]) for shape in shapes)
        head = nn.Sequential(first, nn.ReLU(), nn.Dropout(), second, nn.ReLU(), third)
        head.load_state_dict({name.removeprefix("rm_head."): t for name, t in state.items()})
        return head.to(self.device).eval().requires_grad_(False)
