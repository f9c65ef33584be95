"""Checkpoints that are whole or absent: written beside, synced, renamed. The previous one survives a full disk and a kill.

run_dir/checkpoints/step-000040/   config.yaml, trainer.json, state/ (DeepSpeed: trained parameters, optimizer)
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flowgrpo_fast import comm
from flowgrpo_fast.config import Config, ConfigError, load_config
from flowgrpo_fast.engine import Engine

# May change on resume: they decide how long and how chatty a run is, not what it computes.
FREE_TO_CHANGE = ("run_dir", "trainer", "logging", "engine.threads", "validation.grid_images")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message says what is still intact."""


@dataclass(frozen=True)
class TrainerState:
    """What the trainer needs besides the engine's state. Samplers, noise and schedules are functions of the step."""

    step: int
    policy_version: int
    world_size: int
    validation_before: dict[str, float]


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in (run_dir / "checkpoints").glob("step-*") if (p / "trainer.json").is_file())


def find_checkpoint(resume: str, run_dir: Path) -> Path | None:
    """`auto`: the newest of run_dir, if any; `never`: none; else that folder. Raises ConfigError where it is no checkpoint."""
    if resume == "never":
        return None
    if resume == "auto":
        found = checkpoints(run_dir)
        return found[-1] if found else None
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
    if state.world_size != world_size:
        differing.append(f"number of ranks: {state.world_size} -> {world_size}")
    if differing:
        raise ConfigError(
            f"{folder} was written by another run; differing: {'; '.join(differing)}. Restore these, or start anew with another"
            " run_dir or trainer.resume=never"
        )
    return state


def save_checkpoint(
    engine: Engine, run_dir: Path, config: Config, state: TrainerState, keep: int, device: torch.device
) -> Path:
    """Every rank calls this. Raises CheckpointError alike on all ranks; the previous checkpoints are untouched then."""
    final = run_dir / "checkpoints" / f"step-{state.step:06d}"
    temporary = final.with_name(f".{final.name}.tmp")
    failure: Exception | None = None
    try:
        if comm.rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            _require_space(temporary, engine)
    except Exception as error:
        failure = error
    _agree(failure, final, device)
    try:
        engine.save(temporary)
        if comm.rank() == 0:
            (temporary / "config.yaml").write_text(config.to_yaml())
            (temporary / "trainer.json").write_text(json.dumps(asdict(state), indent=2) + "\n")
    except Exception as error:
        failure = error
    _agree(failure, final, device, temporary)
    try:
        if comm.rank() == 0:
            _sync_tree(temporary)
            replaced = final.with_name(f".{final.name}.replaced")
            if final.exists():
                os.replace(final, replaced)
            os.replace(temporary, final)
            _sync(final.parent)
            shutil.rmtree(replaced, ignore_errors=True)
            _prune(run_dir, final, keep)
    except Exception as error:
        failure = error
    _agree(failure, final, device, temporary)
    return final


def _prune(run_dir: Path, newest: Path, keep: int) -> None:
    """Removes what is older than the last `keep`, and what is later than `newest`: a run resumed from an earlier step has left those behind."""
    found = checkpoints(run_dir)
    later = [p for p in found if p.name > newest.name]
    for old in later + [p for p in found if p not in later][:-keep]:
        shutil.rmtree(old)


def _agree(failure: Exception | None, final: Path, device: torch.device, temporary: Path | None = None) -> None:
    if comm.all_ok(failure is None, device):
        return
    if temporary is not None and comm.rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    reason = f"{type(failure).__name__}: {failure}" if failure is not None else "another rank failed"
    previous = checkpoints(final.parent.parent)
    kept = f"the previous checkpoint {previous[-1].name} is intact" if previous else "there is no earlier checkpoint"
    raise CheckpointError(f"could not write {final}: {reason}; {kept}") from failure


def _require_space(folder: Path, engine: Engine) -> None:
    """fp32 parameter, two Adam moments and a half-precision copy: 14 bytes a trained parameter, and a tenth for the rest."""
    needed = int(engine.trainable_parameters * 14 * 1.1)
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
