"""The loss of one micro-batch of a training step, forward and backward: launches and the bytes that autograd keeps, counted.

From the velocities of the network to their gradients: CFG, log-prob, ratio, clipped loss, KL. The peers' eager form and its
`torch.compile`, our three ops (cfg_combine, sde_log_prob, policy_loss) and flow_grpo_loss. The network itself is not in it.
`python -m benchmarks.training_step` -> benchmarks/results/training_step_<device>.csv.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.kernels import measure, parse
from benchmarks.ops import COMPOSED, OPS


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments, __doc__)
    fused = [op for op in OPS if op.name == "flow_grpo_loss" and op.variant != "v_old"]
    return measure(args, "training_step", (*COMPOSED, *fused))


if __name__ == "__main__":
    raise SystemExit(main())
