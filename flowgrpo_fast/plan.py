"""The batch arithmetic of a training step: the one place where batch sizes are multiplied and divided."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowgrpo_fast.config import Config, ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """The numbers of one training step, per rank unless they say otherwise."""

    world_size: int
    groups: int
    """Prompts of a rollout."""
    samples: int
    rollout_batches: int
    rollout_batch_size: int
    """Samples in one rollout forward."""
    window: int
    micro_batch_size: int
    """Pairs in one training forward."""
    micro_batches: int
    """Training forwards per optimizer update."""
    updates: int
    sequence_parallel: int
    """Neighbouring ranks that share each training forward, and each other's samples for it."""
    replays_rollout_shape: bool
    """Training forwards have the shape of rollout forwards, so equal weights give bit-equal log-probs."""

    def shared(self) -> BatchPlan:
        """The same work as a sequence-parallel group sees it: all its ranks' samples, together."""
        n = self.sequence_parallel
        return replace(self, samples=self.samples * n, micro_batches=self.micro_batches * n)

    def lines(self) -> list[str]:
        pairs = self.micro_batch_size * self.micro_batches
        same = (
            "the rollout's shape"
            if self.replays_rollout_shape
            else "not the rollout's shape: old log-probs from the trainer"
        )
        return [
            f"{self.world_size} rank(s) x {self.groups} group(s): {self.samples * self.world_size} samples per step, {self.samples} per rank",
            f"rollout: {self.rollout_batches} batch(es) of {self.rollout_batch_size} samples per rank",
            f"update: {self.updates} per rollout, each {pairs} (sample, step) pairs per rank (window {self.window})"
            f" = {self.micro_batches} forward(s) of {self.micro_batch_size} ({same})",
        ]


def batch_plan(config: Config, world_size: int, window: int, turns: int = 1) -> BatchPlan:
    """Divides the step's work among ranks, batches and updates. `window`: trained steps per sample; `turns`: generations per group.

    Raises ConfigError in one sentence with the numbers when something does not divide.
    """
    algorithm, G = config.algorithm, config.algorithm.group_size
    if algorithm.groups_per_step % (world_size * algorithm.updates_per_rollout):
        raise ConfigError(
            f"algorithm.groups_per_step {algorithm.groups_per_step} does not divide by {world_size} rank(s) x"
            f" algorithm.updates_per_rollout {algorithm.updates_per_rollout} = {world_size * algorithm.updates_per_rollout}"
        )
    sequence_parallel = config.engine.sequence_parallel_size
    if world_size % sequence_parallel:
        raise ConfigError(f"engine.sequence_parallel_size {sequence_parallel} does not divide {world_size} rank(s)")
    groups = algorithm.groups_per_step // world_size
    per_update = groups * turns // algorithm.updates_per_rollout
    if per_update % config.rollout.groups_per_batch:
        raise ConfigError(
            f"rollout.groups_per_batch {config.rollout.groups_per_batch} does not divide the {per_update} group(s) of one update and rank"
            f" ({algorithm.groups_per_step} groups x {turns} turn(s) / {world_size} rank(s) / {algorithm.updates_per_rollout} update(s))"
        )
    rollout_batch = config.rollout.groups_per_batch * G
    pairs = per_update * G * window
    micro = config.engine.micro_batch_size or rollout_batch
    if pairs % micro:
        raise ConfigError(
            f"engine.micro_batch_size {micro} does not divide the {pairs} (sample, step) pairs of one update and rank"
            f" ({per_update} groups x group_size {G} x window {window})"
        )
    return BatchPlan(
        world_size=world_size,
        groups=groups,
        samples=groups * turns * G,
        rollout_batches=groups * turns // config.rollout.groups_per_batch,
        rollout_batch_size=rollout_batch,
        window=window,
        micro_batch_size=micro,
        micro_batches=pairs // micro,
        updates=algorithm.updates_per_rollout,
        sequence_parallel=sequence_parallel,
        # Later turns are generated in other batches than the ones that they are replayed in.
        # Compiled or sequence-parallel forwards compute in other shapes than the rollout's.
        replays_rollout_shape=micro == rollout_batch
        and turns == 1
        and not config.engine.compile_blocks
        and sequence_parallel == 1,
    )
