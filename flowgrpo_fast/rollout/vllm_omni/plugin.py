"""Entry points of the rollout environment. vllm and vllm-omni call these in every process of theirs; nothing heavy at import."""

from __future__ import annotations

import os

CPU_SWITCH = "FLOWGRPO_VLLM_CPU"
"""Set to 1 by the server where `rollout.server.cpu` asks for it."""

PIPELINES = {
    "flux": "FlowGrpoFluxPipeline",
    "flux_kontext": "FlowGrpoFluxKontextPipeline",
    "qwen_image": "FlowGrpoQwenImagePipeline",
    "qwen_image_edit": "FlowGrpoQwenImageEditPipeline",
    "qwen_image_edit_plus": "FlowGrpoQwenImageEditPlusPipeline",
    "sd3": "FlowGrpoSD3Pipeline",
    "wan": "FlowGrpoWanPipeline",
    "z_image": "FlowGrpoZImagePipeline",
}
"""Model family -> the pipeline of families.py registered for it."""


def register() -> None:
    """Group vllm_omni.general_plugins."""
    from vllm_omni.diffusion.registry import register_diffusion_model

    for name in PIPELINES.values():
        register_diffusion_model(name, "flowgrpo_fast.rollout.vllm_omni.families", name)


def cpu_platform() -> str | None:
    """Group vllm.platform_plugins. None leaves vllm its own choice."""
    if not wants_cpu():
        return None
    from flowgrpo_fast.rollout.vllm_omni.cpu import stand_in_for_missing_ops

    stand_in_for_missing_ops()
    return "vllm.platforms.cpu.CpuPlatform"


def cpu_omni_platform() -> str | None:
    """Group vllm_omni.platform_plugins."""
    return "flowgrpo_fast.rollout.vllm_omni.cpu.platform.CpuOmniPlatform" if wants_cpu() else None


def wants_cpu() -> bool:
    """Only where it is asked for, and only where there is no accelerator to use."""
    import torch

    return os.environ.get(CPU_SWITCH) == "1" and not torch.cuda.is_available()
