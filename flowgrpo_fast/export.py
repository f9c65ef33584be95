"""Trained weights in the formats that others read: a diffusers/PEFT LoRA (the adapter's bytes and no more), or a whole diffusers folder.

    python -m flowgrpo_fast.export RUN_DIR [--step 40] [--out DIR] [--average]

exports from a checkpoint, in one process without DeepSpeed's launcher; the trainer does the same from its partitions, at trainer.export_every
and at the end. A LoRA loads with `pipe.load_lora_weights(DIR)`, a folder with `DiffusionPipeline.from_pretrained(DIR)`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flowgrpo_fast.buckets import buckets
from flowgrpo_fast.models.base import ModelAdapter

SHARD_BYTES = 2 * 2**30
STEM = "diffusion_pytorch_model"


def save_lora(adapter: ModelAdapter, peft_config: Mapping[str, Any], trained: Mapping[str, Tensor], out: Path) -> None:
    """trained: PEFT parameter names (`...lora_A.policy.weight`) -> fp32. Writes out/pytorch_lora_weights.safetensors."""
    layers = {_without_adapter_name(name): tensor.contiguous() for name, tensor in trained.items()}
    with _replacing(out) as temporary:
        adapter.pipeline_class.save_lora_weights(
            temporary, transformer_lora_layers=layers, transformer_lora_adapter_metadata=dict(peft_config)
        )


def save_pipeline(
    adapter: ModelAdapter,
    sizes: Mapping[str, int],
    gather: Callable[[list[str]], dict[str, Tensor] | None],
    out: Path,
    shard_bytes: int = SHARD_BYTES,
    is_writer: bool = True,
) -> None:
    """A diffusers folder: the transformer from `gather`, everything else as it was (hard links where the disk allows).

    sizes: parameter name -> bytes. gather: some names -> their tensors on the CPU, or None on a rank that does not write; called in the same
    order on all ranks, a shard at a time, so that memory stays at one shard. What writing raises is raised after the last of these collectives:
    a rank that left early would leave the others waiting.
    """
    shards = list(buckets(sizes, shard_bytes))
    if not is_writer:
        for shard in shards:
            gather(shard)
        return
    names = [f"{STEM}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [f"{STEM}.safetensors"]
    failure: Exception | None = None
    with _replacing(out) as temporary:
        folder = temporary / adapter.transformer_folder.name
        for i, shard in enumerate(shards):
            tensors = gather(shard)
            assert tensors is not None
            try:
                if i == 0:
                    _copy_all_but(adapter.transformer_folder, adapter.path, temporary)
                if failure is None:
                    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / names[i], {"format": "pt"})
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
            }
            (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy_all_but(transformer: Path, source: Path, target: Path) -> None:
    """The pipeline without the transformer's weights."""
    skipped = lambda at, _: [transformer.name] if Path(at) == source else []  # noqa: E731
    shutil.copytree(source, target, dirs_exist_ok=True, copy_function=_link, ignore=skipped)
    (target / transformer.name).mkdir()
    _link(transformer / "config.json", target / transformer.name / "config.json")


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """A folder written beside `out` and renamed over it; on an error nothing is left and `out` is as before."""
    temporary = out.with_name(f".{out.name}.tmp.{os.getpid()}")
    try:
        yield temporary
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _link(source: Any, target: Any) -> Any:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _without_adapter_name(name: str) -> str:
    """x.lora_A.policy.weight -> x.lora_A.weight"""
    head, _, tail = name.rpartition(".")
    return f"{head.rpartition('.')[0]}.{tail}"


def export_checkpoint(run_dir: Path, step: int | None, out: Path | None, average: bool) -> Path:
    """Exports a checkpoint of run_dir: its newest, or that of `step`. Raises ConfigError where there is none, or no average in it."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from flowgrpo_fast.checkpoint import checkpoints
    from flowgrpo_fast.config import ConfigError
    from flowgrpo_fast.config_file import load_config
    from flowgrpo_fast.engine import DTYPES, peft_config
    from flowgrpo_fast.engine.ema import read_average
    from flowgrpo_fast.models import build_adapter

    found = {int(path.name.removeprefix("step-")): path for path in checkpoints(run_dir)}
    if not found or (step is not None and step not in found):
        raise ConfigError(
            f"{run_dir} has no checkpoint{'' if step is None else f' of step {step}'}; there are: {sorted(found) or 'none'}"
        )
    folder = found[max(found) if step is None else step]
    config = load_config(folder / "config.yaml")
    adapter = build_adapter(config.model.family, config.model.path, torch.device("cpu"), DTYPES[config.model.dtype])
    trained = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="state", exclude_frozen_parameters=True)
    if average:
        trained = read_average(folder / "ema", {name: t.shape for name, t in trained.items()})
    out = out or run_dir / "export" / folder.name
    if config.model.train == "lora":
        save_lora(adapter, peft_config(config, adapter).to_dict(), trained, out)
    else:
        trained = {name: t.to(adapter.dtype) for name, t in trained.items()}
        sizes = {name: t.numel() * t.itemsize for name, t in trained.items()}
        save_pipeline(adapter, sizes, lambda names: {name: trained[name] for name in names}, out)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flowgrpo_fast.export", description="A LoRA or a diffusers folder from a checkpoint."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--step", type=int, help="default: the newest checkpoint")
    parser.add_argument("--out", type=Path, help="default: RUN_DIR/export/step-000040")
    parser.add_argument("--average", action="store_true", help="the exponential moving average instead of the weights")
    arguments = parser.parse_args(argv)
    from flowgrpo_fast.config import ConfigError

    try:
        print(export_checkpoint(arguments.run_dir, arguments.step, arguments.out, arguments.average))
    except (ConfigError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
