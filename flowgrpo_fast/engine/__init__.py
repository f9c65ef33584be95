"""DeepSpeed, and nothing else does: `Engine`, and what others need to know of it."""

from flowgrpo_fast.engine.engine import Engine, local_device
from flowgrpo_fast.engine.loading import LORA, peft_config
from flowgrpo_fast.engine.settings import DTYPES, deepspeed_config, learning_rate, stage

__all__ = [
    "DTYPES",
    "LORA",
    "Engine",
    "deepspeed_config",
    "learning_rate",
    "local_device",
    "peft_config",
    "stage",
]
