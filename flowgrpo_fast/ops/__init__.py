"""The kernels: small differentiable ops for RL on flow-matching models. Needs torch alone.

| op | does |
|---|---|
| `sde_step` | one sampler step and its log-prob, noise given or by Philox |
| `sde_log_prob` | log-prob of a given step, KL to a reference, direct log-ratio; differentiable in v |
| `group_advantage` | group-relative advantages by integer group id |
| `policy_loss` | clipped policy loss, metrics and gradient in one pass |
| `cfg_combine` | classifier-free guidance, optionally with the norm rescale |
| `flow_grpo_loss` | all of it for a training step: from the model's output to loss, metrics and gradient |

Coefficients come from `flowgrpo_fast.schedule.sde_coefficients`. `use_backend` and FLOWGRPO_BACKEND choose the implementation.
"""

from flowgrpo_fast.ops._philox import (
    STREAM_FORWARD_NOISE,
    STREAM_FORWARD_SIGMA,
    STREAM_INITIAL,
    STREAM_SDE,
    STREAM_SIZE,
    STREAM_WINDOW,
    NoiseKey,
    philox_normal,
    philox_words,
)
from flowgrpo_fast.ops._registry import BackendFallbackWarning, use_backend
from flowgrpo_fast.ops.cfg_combine import cfg_combine
from flowgrpo_fast.ops.coefficients import StepCoefficients
from flowgrpo_fast.ops.flow_grpo_loss import flow_grpo_loss
from flowgrpo_fast.ops.group_advantage import group_advantage
from flowgrpo_fast.ops.policy_loss import policy_loss
from flowgrpo_fast.ops.sde_log_prob import SdeLogProb, sde_log_prob
from flowgrpo_fast.ops.sde_step import sde_step

__all__ = [
    "STREAM_FORWARD_NOISE",
    "STREAM_FORWARD_SIGMA",
    "STREAM_INITIAL",
    "STREAM_SDE",
    "STREAM_SIZE",
    "STREAM_WINDOW",
    "BackendFallbackWarning",
    "NoiseKey",
    "SdeLogProb",
    "StepCoefficients",
    "cfg_combine",
    "flow_grpo_loss",
    "group_advantage",
    "philox_normal",
    "philox_words",
    "policy_loss",
    "sde_log_prob",
    "sde_step",
    "use_backend",
]
