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
    trained_samples: int
    """Of `samples`, those that are trained on: trained_per_group of each group."""
    trained_batch_size: int
    """Of a rollout forward."""
    slots: int
    """Pairs of each sample: steps of its window, or noise levels."""
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
        return replace(
            self,
            samples=self.samples * n,
            trained_samples=self.trained_samples * n,
            micro_batches=self.micro_batches * n,
        )

    def lines(self) -> list[str]:
        pairs = self.micro_batch_size * self.micro_batches
        chosen = "" if self.trained_samples == self.samples else f", {self.trained_samples} of them trained on"
        same = (
            "the rollout's shape"
            if self.replays_rollout_shape
            else "not the rollout's shape: old log-probs from the trainer"
        )
        return [
            f"{self.world_size} rank(s) x {self.groups} group(s): {self.samples * self.world_size} samples per step, {self.samples} per rank{chosen}",
            f"rollout: {self.rollout_batches} batch(es) of {self.rollout_batch_size} samples per rank",
            f"update: {self.updates} per rollout, each {pairs} pairs per rank ({self.slots} a sample)"
            f" = {self.micro_batches} forward(s) of {self.micro_batch_size} ({same})",
        ]


def batch_plan(
    config: Config, world_size: int, slots: int, turns: int = 1, trained_per_group: int | None = None
) -> BatchPlan:
    """Divides the step's work among ranks, batches and updates. slots: pairs of each sample; turns: generations per group; trained_per_group: null is all.

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
    trained = trained_per_group or G
    rollout_batch, trained_batch = config.rollout.groups_per_batch * G, config.rollout.groups_per_batch * trained
    pairs = per_update * trained * slots
    micro = config.engine.micro_batch_size or trained_batch
    if pairs % micro:
        raise ConfigError(
            f"engine.micro_batch_size {micro} does not divide the {pairs} pairs of one update and rank"
            f" ({per_update} groups x {trained} trained samples x {slots} pairs of each)"
        )
    return BatchPlan(
        world_size=world_size,
        groups=groups,
        samples=groups * turns * G,
        rollout_batches=groups * turns // config.rollout.groups_per_batch,
        rollout_batch_size=rollout_batch,
        trained_samples=groups * turns * trained,
        trained_batch_size=trained_batch,
        slots=slots,
        micro_batch_size=micro,
        micro_batches=pairs // micro,
        updates=algorithm.updates_per_rollout,
        sequence_parallel=sequence_parallel,
        # Later turns are generated in other batches than the ones that they are replayed in.
        # Compiled or sequence-parallel forwards compute in other shapes than the rollout's.
        replays_rollout_shape=micro == rollout_batch == trained_batch
        and turns == 1
        and not config.engine.compile_blocks
        and sequence_parallel == 1,
    )
