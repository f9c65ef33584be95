"""What is run with what: test_matrix.py runs each cell, and the manual's page Support is made from these tables, so that it cannot say more."""

from __future__ import annotations

FAMILIES = {
    "qwen_image": "Qwen-Image",
    "sd3": "Stable Diffusion 3 and 3.5",
    "flux": "FLUX.1-dev",
    "z_image": "Z-Image",
    "qwen_image_edit": "Qwen-Image-Edit",
    "qwen_image_edit_plus": "Qwen-Image-Edit-Plus",
    "flux_kontext": "FLUX.1 Kontext",
    "wan": "Wan 2.1",
}
# How the tiny pipeline of each is sampled: guidance as its users do.
SETTINGS: dict[str, tuple[str, ...]] = {
    "qwen_image": ("rollout.guidance_scale=4.0",),
    "sd3": ("rollout.guidance_scale=4.5",),
    "flux": ("rollout.guidance_scale=3.5",),
    "z_image": ("rollout.guidance_scale=3.0",),
    "qwen_image_edit": ("rollout.guidance_scale=4.0",),
    "qwen_image_edit_plus": ("rollout.guidance_scale=4.0",),
    "flux_kontext": ("rollout.guidance_scale=2.5",),
    "wan": ("rollout.guidance_scale=4.0", "rollout.height=32", "rollout.width=48", "rollout.frames=5"),
}
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "FlowGRPO": (),
    "Flow-GRPO-Fast, branch": ("rollout.window={size: 1, range: [1, 3], scope: group}", "rollout.initial_noise=group"),
    "Flow-CPS": ("rollout.rule=cps",),
    "DanceGRPO, best of n": ("rollout.rule=dance", "rollout.noise_level=0.3", "algorithm.train_on=2"),
    "MixGRPO": ("rollout.window={size: 1, range: [0, 2], strategy: progressive, shift_every: 1}", "rollout.ode_order=2"),
    "Dr.GRPO": ("algorithm.normalize=none",),
    "GDPO": ("algorithm.advantage=gdpo",),
    "TempFlow-GRPO's weights": ("algorithm.step_weight=noise_level",),
    "GRPO-Guard": ("algorithm.name=grpo_guard",),
    "Flow-DPPO": ("algorithm.name=flow_dppo",),
    "DiffusionNFT": ("algorithm.name=diffusion_nft", "rollout.guidance_scale=1.0", "rollout.initial_noise=sample"),
    "AWM": ("algorithm.name=awm", "rollout.initial_noise=sample"),
    "diffusion DPO": ("algorithm.name=dpo", "rollout.initial_noise=sample"),
}  # fmt: skip
# By the real vllm-omni on the CPU in test_vllm_omni_families.py: its samples and log-probs are the trainer's (Qwen-Image has test_vllm_omni.py).
ENGINE_FAMILIES = ("sd3", "flux", "z_image", "wan", "qwen_image_edit", "qwen_image_edit_plus", "flux_kontext")
# (family, algorithm) by the real vllm-omni on the CPU -> the test: a run, or that the engine samples what the algorithm needs, bit for bit.
# Nothing has been run on a GPU yet.
SAME_BITS = "test_vllm_omni.py::test_the_engine_samples_the_same_bits"
BY_ENGINE: dict[tuple[str, str], str] = {
    ("qwen_image", "FlowGRPO"): "test_vllm_omni_training.py::test_a_lora_run_agrees_with_its_engine_to_the_last_bit",
    ("qwen_image", "Flow-GRPO-Fast, branch"): f"{SAME_BITS}[shared noise]",
    ("qwen_image", "Flow-CPS"): f"{SAME_BITS}[cps]",
    ("qwen_image", "DanceGRPO, best of n"): f"{SAME_BITS}[dance]",
    ("qwen_image", "MixGRPO"): f"{SAME_BITS}[second order, old velocities]",
    ("qwen_image", "GRPO-Guard"): f"{SAME_BITS}[second order, old velocities]",
    ("qwen_image", "Flow-DPPO"): f"{SAME_BITS}[second order, old velocities]",
    ("qwen_image", "DiffusionNFT"): f"{SAME_BITS}[ode]",
    ("qwen_image", "AWM"): f"{SAME_BITS}[ode]",
    ("qwen_image", "diffusion DPO"): f"{SAME_BITS}[ode]",
    **{
        (family, "FlowGRPO"): f"test_vllm_omni_families.py::test_the_engine_samples_what_the_trainer_does[{family}]"
        for family in ENGINE_FAMILIES
    },
}
