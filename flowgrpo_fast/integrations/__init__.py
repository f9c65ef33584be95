"""The ops under the names that other trainers call. Each is one import; this package itself imports nothing.

| module | for | needs |
|---|---|---|
| `diffusers_scheduler` | `FlowMatchSDEDiscreteScheduler`, a diffusers scheduler that samples by SDE and returns log-probs | diffusers |
| `flow_grpo` | `sde_step_with_logprob` of flow_grpo's sampling and training loops | torch |
| `verl_omni` | advantage and policy losses with the arguments of verl-omni's registries | torch |
"""
