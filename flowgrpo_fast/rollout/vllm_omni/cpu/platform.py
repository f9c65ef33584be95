"""The CPU as a platform of vllm-omni 0.30, which has none: the hooks that its diffusion engine asks for."""

from __future__ import annotations

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform

from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    _omni_enum = getattr(OmniPlatformEnum, "OOT", OmniPlatformEnum.UNSPECIFIED)

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *_: object, **__: object) -> str:
        return (
            "flowgrpo_fast.rollout.vllm_omni.cpu.attention.CpuSDPABackend"  # imports the platform: a module of its own
        )

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def synchronize(cls) -> None:
        pass

    @classmethod
    def empty_cache(cls) -> None:
        pass

    @classmethod
    def reset_peak_memory_stats(cls, device: object = None) -> None:
        pass

    @classmethod
    def memory_allocated(cls, device: object = None) -> int:
        return psutil.Process().memory_info().rss

    max_memory_allocated = max_memory_reserved = memory_allocated

    @classmethod
    def get_free_memory(cls, device: object = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(cls, device: object = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total
