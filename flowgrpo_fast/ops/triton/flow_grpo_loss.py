"""flow_grpo_loss: four launches a training step. Forward: chunk sums, [B] results, loss. Backward: the gradient of every branch."""

from flowgrpo_fast.ops._fused import fused_loss
from flowgrpo_fast.ops.triton import cfg_combine, policy_loss, sde_log_prob

flow_grpo_loss, flow_grpo_loss_backward = fused_loss(
    combine=cfg_combine.cfg_combine,
    combine_backward=cfg_combine.cfg_combine_backward,
    log_prob=sde_log_prob.log_prob,
    loss=policy_loss.loss,
    gradient=sde_log_prob.gradient,
)
