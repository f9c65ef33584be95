"""Which prompts an iteration trains on, the same on every rank and after every restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class GroupSampler:
    """Cuts an endless stream of epochs, each a fresh permutation of the prompts, into iterations of equal length.

        epoch:      2 0 1 | 1 2 0 | 0 1 2 | ...         3 prompts
        iteration:  2 0 1   1 2 | 0   0 1 2 ...         5 groups each

    So each prompt comes equally often in any whole number of epochs, whatever the two lengths. An iteration that
    spans an epoch's end may hold a prompt twice: two groups, with ids and noise of their own.

    `indices` is a pure function of (seed, iteration): nothing to save, nothing to replay, no state that a data
    loader could run ahead of. Epoch e sorts the words of Philox(key=[seed, e]), which no numpy release changes.
    """

    def __init__(self, num_prompts: int, groups_per_iteration: int, seed: int, shuffle: bool = True):
        if num_prompts < 1 or groups_per_iteration < 1:
            raise ValueError(
                f"num_prompts and groups_per_iteration must be at least 1, got {num_prompts} and {groups_per_iteration}"
            )
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, got {seed}")
        self.num_prompts = num_prompts
        self.groups_per_iteration = groups_per_iteration
        self.seed = seed
        self.shuffle = shuffle
        self._last_epoch = (-1, [0])

    def indices(self, iteration: int) -> list[int]:
        """The prompt of each group of an iteration (from 0), over all ranks: `groups_per_iteration` indices."""
        if iteration < 0:
            raise ValueError(f"iteration must not be negative, got {iteration}")
        start = iteration * self.groups_per_iteration
        end = start + self.groups_per_iteration
        chosen: list[int] = []
        while start < end:
            epoch, offset = divmod(start, self.num_prompts)
            chosen += self._epoch(epoch)[offset : offset + end - start]
            start = min(end, (epoch + 1) * self.num_prompts)
        return chosen

    def _epoch(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_prompts))
        cached, order = self._last_epoch
        if cached != epoch:
            words = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(self.num_prompts)
            order = np.argsort(words, kind="stable").tolist()
            self._last_epoch = (epoch, order)
        return order


def rank_slice(values: Sequence[T], rank: int, world_size: int) -> Sequence[T]:
    """The contiguous share of `rank`. Raises ValueError where the values do not divide among the ranks."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1}, got {rank}")
    share, left = divmod(len(values), world_size)
    if left:
        nearest = f"{share * world_size} or {(share + 1) * world_size}" if share else str(world_size)
        raise ValueError(
            f"{len(values)} groups per iteration do not divide among {world_size} ranks: choose a multiple, such as {nearest}"
        )
    return values[rank * share : (rank + 1) * share]
