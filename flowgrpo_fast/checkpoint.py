"""Checkpoints that are whole or absent: written beside, synced, renamed. The previous one survives a full disk and a kill.

run_dir/checkpoints/step-000040/   config.yaml, trainer.json, state/ (DeepSpeed: trained parameters, optimizer), ema/, old_policy/
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flowgrpo_fast import comm
from flowgrpo_fast.config import Config, ConfigError
from flowgrpo_fast.config_file import load_config
from flowgrpo_fast.engine import Engine, stage

# May change on resume: they decide how long and how chatty a run is, where it runs, not what it computes.
FREE_TO_CHANGE = (
    "run_dir", "trainer", "logging", "rewarding.patience_s", "rewarding.workers", "validation.grid_images", "engine.threads", "engine.timeout_s",
    "engine.nvme_path", "rollout.python", "rollout.max_failures", "rollout.server",
)  # fmt: skip


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message says what is still intact."""


@dataclass(frozen=True)
class TrainerState:
    """What the trainer needs besides the engine's state. Samplers, windows, noise and schedules are functions of the step."""

    step: int
    policy_version: int
    world_size: int
    validation_before: dict[str, float]
    best_step: int | None = None
    """Of the saved checkpoints that were validated, the one with the highest trainer.best_metric: it is kept."""
    best_metric: str | None = None
    best_value: float | None = None
    base_fingerprint: int = 0
    """Of the frozen parameters, which are not in the checkpoint."""

    def with_best(self, step: int, metric: str, value: float) -> TrainerState:
        """After a validation of `step`, which will be saved."""
        before = self.best_value if self.best_metric == metric else None
        if not math.isfinite(value) or (before is not None and value <= before):
            return self
        return replace(self, best_step=step, best_metric=metric, best_value=value)


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in (run_dir / "checkpoints").glob("step-*") if (p / "trainer.json").is_file())


def find_checkpoint(resume: str, run_dir: Path) -> Path | None:
    """`auto`: the newest of run_dir that every rank sees, if any; `never`: none; else that folder. A collective.

    Raises ConfigError where it is no checkpoint. On rank-local disks a kill may have left a node without the newest.
    """
    if resume == "never":
        return None
    if resume == "auto":
        names = comm.gather_objects([path.name for path in checkpoints(run_dir)])
        common = set(names[0]).intersection(*names[1:])
        return run_dir / "checkpoints" / max(common) if common else None
    folder = Path(resume).expanduser()
    if not (folder / "trainer.json").is_file():
        raise ConfigError(
            f"trainer.resume = {resume!r}: no checkpoint there (no trainer.json); give a step-* folder, `auto` or `never`"
        )
    return folder


def check_resumable(folder: Path, config: Config, world_size: int) -> TrainerState:
    """Reads the state and compares configs. Raises ConfigError that lists every key that differs, old and new value."""
    try:
        state = TrainerState(**json.loads((folder / "trainer.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{folder / 'trainer.json'} is not readable: {error}; resume from an older step-* folder"
        ) from error
    saved = _flat(load_config(folder / "config.yaml").model_dump())
    current = _flat(config.model_dump())
    free = FREE_TO_CHANGE
    differing = [
        f"{key}: {saved.get(key)!r} -> {current.get(key)!r}"
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key) != current.get(key) and not any(key == f or key.startswith(f + ".") for f in free)
    ]
    if config.optimizer.schedule != "constant" and saved["trainer.total_steps"] != config.trainer.total_steps:
        differing.append(
            f"trainer.total_steps: {saved['trainer.total_steps']} -> {config.trainer.total_steps} (it shapes optimizer.schedule)"
        )
    if state.world_size != world_size and (stage(config) < 3 or config.trainer.checkpoint_storage == "local"):
        differing.append(
            f"number of ranks: {state.world_size} -> {world_size} (which ZeRO stage 3 on shared storage alone can change)"
        )
    if differing:
        raise ConfigError(
            f"{folder} was written by another run; differing: {'; '.join(differing)}. Restore these, or start anew with another"
            " run_dir or trainer.resume=never"
        )
    return state


def load_checkpoint(engine: Engine, folder: Path, state: TrainerState, device: torch.device) -> None:
    """Every rank calls this. Raises ConfigError where the base model is another one; CheckpointError where the files are not whole.

    On another number of ranks the state goes through DeepSpeed's universal format, which knows trained parameters only.
    """
    fingerprint = engine.base_fingerprint
    if state.base_fingerprint != fingerprint:
        raise ConfigError(
            f"{folder} was trained on another base model (fingerprint {state.base_fingerprint}, model.path has {fingerprint}): its adapters"
            " would sit on weights that they were not made for. Restore model.path, or start anew with trainer.resume=never"
        )
    if state.world_size == comm.world_size():
        engine.load(folder)
        return
    universal = folder.with_name(f".{folder.name}.universal")

    def convert() -> None:
        if comm.rank() != 0:
            return
        shutil.rmtree(universal, ignore_errors=True)
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *workers]
        paths = ["--input_folder", str(folder / "state"), "--output_folder", str(universal / "state")]
        done = subprocess.run([*command, *paths], capture_output=True, text=True)
        if done.returncode:
            raise CheckpointError(
                f"{folder} could not be converted for {comm.world_size()} ranks: {done.stderr[-500:]}"
            )

    try:
        comm.together(convert, device)
        engine.load(folder, universal)
        comm.barrier()
    finally:
        if comm.rank() == 0:
            shutil.rmtree(universal, ignore_errors=True)


def save_checkpoint(engine: Engine, run_dir: Path, config: Config, state: TrainerState, device: torch.device) -> Path:
    """Every rank calls this. Raises CheckpointError alike on all ranks; the previous checkpoints are untouched then.

    On rank-local disks the first rank of each node writes what rank 0 writes on a shared one.
    """
    final = run_dir / "checkpoints" / f"step-{state.step:06d}"
    temporary = final.with_name(f".{final.name}.tmp")
    local = config.trainer.checkpoint_storage == "local"
    is_writer = comm.rank() == 0 or (local and int(os.environ.get("LOCAL_RANK", "0")) == 0)
    state = replace(state, base_fingerprint=engine.base_fingerprint)

    def as_writer(work: Callable[[], None]) -> Callable[[], None]:
        return work if is_writer else lambda: None

    def prepare() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _require_space(temporary, engine, local)

    def write() -> None:
        # Its collectives are all done when it raises.
        engine.save(temporary)
        if is_writer:
            (temporary / "config.yaml").write_text(config.to_yaml())
            (temporary / "trainer.json").write_text(json.dumps(asdict(state), indent=2) + "\n")

    def put_in_place() -> None:
        _sync_tree(temporary)
        replaced = final.with_name(f".{final.name}.replaced")
        if final.exists():
            os.replace(final, replaced)
        os.replace(temporary, final)
        _sync(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    # The old ones go when the new one is in place on every node: all nodes have one in common at any time.
    prune = lambda: _prune(run_dir, final, config, state)  # noqa: E731
    for work in (as_writer(prepare), write, as_writer(put_in_place), as_writer(prune)):
        try:
            comm.together(work, device)
        except Exception as failure:
            if is_writer:
                shutil.rmtree(temporary, ignore_errors=True)
            raise _not_written(final, failure) from failure
    return final


def _prune(run_dir: Path, newest: Path, config: Config, state: TrainerState) -> None:
    """Removes what is older than the last n and not the best, and what is later than `newest`: a run resumed from an earlier step has left those behind."""
    found = checkpoints(run_dir)
    later = [p for p in found if p.name > newest.name]
    older = [p for p in found if p not in later][: -config.trainer.keep_checkpoints]
    for old in later + [p for p in older if p.name != f"step-{state.best_step or 0:06d}"]:
        shutil.rmtree(old)


def _not_written(final: Path, failure: Exception) -> CheckpointError:
    previous = checkpoints(final.parent.parent)
    kept = f"the previous checkpoint {previous[-1].name} is intact" if previous else "there is no earlier checkpoint"
    return CheckpointError(f"could not write {final}: {type(failure).__name__}: {failure}; {kept}")


def _require_space(folder: Path, engine: Engine, is_local: bool) -> None:
    """fp32 parameter, two Adam moments, a half-precision copy, and 4 for each average: from 14 bytes a trained parameter on, and a tenth for the rest.

    A node's own disk takes the share of its ranks.
    """
    share = 1.0
    if is_local:
        ranks_here = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or comm.world_size()
        share = int(ranks_here) / comm.world_size()
    needed = int(engine.trainable_parameters * (14 + 4 * len(engine.averages())) * 1.1 * share)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"needs about {needed / 2**20:.0f} MiB in {folder.parent}, {free / 2**20:.0f} MiB are free")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
