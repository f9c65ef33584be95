"""Starts training runs as processes of their own: of the launcher's kind, or ranks alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from flowgrpo_fast.rollout.wire import free_port
from tests.ranks import Rank
from tests.tiny import TINY_YAML, tiny_inputs

ROOT = Path(__file__).parent.parent
TRAIN = ROOT / "flowgrpo_fast" / "train.py"
# A rank with one validation prompt and one with two: unequal numbers of forwards inside the gathered phase.
COMMON = ["trainer.total_steps=5", "validation.batch_size=1"]


def arguments(run_dir: Path, *overrides: str) -> list[str]:
    return [str(TRAIN), "--config", str(TINY_YAML), *tiny_inputs(run_dir), *COMMON, *overrides]


def environment(**extra: str) -> dict[str, str]:
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    }
    return clean | {"DS_ACCELERATOR": "cpu"} | extra


def start_ranks(
    world: int,
    run_dir: Path,
    *overrides: str,
    extra: dict[str, str] | None = None,
    main: Callable[[Sequence[str]], int] | None = None,
) -> list[Rank]:
    """Ranks without the launcher, which costs 14 s. One thread each whatever their number, so that the bits can be compared.

    extra: environment. main: an importable function in the place of train.py's.
    """
    port = str(free_port())
    output = Path(tempfile.mkdtemp(prefix="flowgrpo_fast_ranks_"))
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(extra or {})}
    command = arguments(run_dir, "engine.threads=1", *overrides)[1:]
    return [
        Rank(command, {**shared, "RANK": str(r), "LOCAL_RANK": str(r)}, output / f"rank{r}.log", main)
        for r in range(world)
    ]


def finish(ranks: list[Rank], timeout: float = 300) -> tuple[list[int], str]:
    results = [rank.wait(timeout) for rank in ranks]
    return [code for code, _ in results], "\n".join(text for _, text in results)


def run_ranks(world: int, run_dir: Path, *overrides: str) -> str:
    codes, output = finish(start_ranks(world, run_dir, *overrides))
    assert codes == [0] * world, output
    return output
