"""Memory of a rank by arithmetic, before a weight is loaded: what `--dry-run` prints. Activations, text encoder and VAE are not in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers.models.modeling_utils import no_init_weights

from flowgrpo_fast.algorithms import uses_reference
from flowgrpo_fast.config import Config
from flowgrpo_fast.engine.loading import add_lora
from flowgrpo_fast.engine.settings import BUCKET, DTYPES, coalesces, has_half_master, stage
from flowgrpo_fast.models.base import ModelAdapter

MASTER, MOMENTS, WEIGHTS = "fp32 master weights", "Adam's moments", "weights"


@dataclass(frozen=True)
class Parameters:
    total: int
    trained: int


def count_parameters(config: Config, adapter: ModelAdapter) -> Parameters:
    """On the meta device, where a network of any size takes no memory. Raises ConfigError for LoRA target modules that match nothing."""
    with no_init_weights(), torch.device("meta"):
        network = adapter.build_transformer()
        if config.model.train == "lora":
            add_lora(network, config, adapter)
    sizes = [(p.numel(), p.requires_grad) for p in network.parameters()]
    return Parameters(sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained))


def memory_per_rank(config: Config, parameters: Parameters, ranks: int) -> dict[str, int]:
    """Bytes by what they are for, the largest that they become; `while sampling` lasts for a rollout phase only."""
    zero, T = stage(config), parameters.trained
    size = DTYPES[config.model.dtype].itemsize
    frozen = parameters.total - T if config.model.train == "lora" else 0
    # LoRA adapters are fp32 over a base of any dtype.
    trained_size = 4 if config.model.train == "lora" else size
    weights = frozen * size + T * trained_size
    over = {least: ranks if zero >= least else 1 for least in (1, 2, 3)}
    # Stage 0 in fp32 is a plain torch optimizer on the parameters themselves.
    master = 4 * T if zero > 0 or has_half_master(config) else 0
    parts = {
        WEIGHTS: weights // over[3],
        MASTER: master // over[1],
        MOMENTS: 8 * T // over[1],
        "gradients": 4 * T // over[2],
        # Small networks: a bucket of all that is trained.
        "reduction bucket": min(T, BUCKET) * trained_size if zero > 0 else 0,
    }
    if coalesces(config):
        parts["gradients of an update, added up"] = 4 * T
    if config.ema.decay is not None:
        parts["average"] = 4 * T // over[1]
    if config.algorithm.old_policy != "copy":
        parts["old policy"] = 4 * T // over[1]
    if config.model.train == "full" and uses_reference(config.algorithm):
        parts["reference"] = parameters.total * size // over[3]
    if zero == 3 and config.rollout.backend == "in_process":
        parts["the whole network, while sampling"] = weights - weights // ranks
    return parts


def memory_lines(config: Config, parameters: Parameters, ranks: int) -> list[str]:
    """A table for a person: one column, or for LoRA one for each way to hold the frozen base."""
    e = config.engine
    columns = {"": config}
    if config.model.train == "lora" and e.zero_stage == 3 and e.offload_parameters == "none":
        choices = ("partitioned", "replicated")
        engines = [e.model_copy(update={"frozen_base": choice}) for choice in choices]
        columns = {
            f"frozen_base {choice}": config.model_copy(update={"engine": engine})
            for choice, engine in zip(choices, engines, strict=True)
        }
    found = [memory_per_rank(column, parameters, ranks) for column in columns.values()]
    where = {WEIGHTS: e.offload_parameters, "reference": e.offload_parameters}
    where |= dict.fromkeys((MASTER, MOMENTS), e.offload_optimizer)
    # They follow the master weights, but never to a disk.
    where |= dict.fromkeys(("gradients", "average", "old policy"), "none" if e.offload_optimizer == "none" else "cpu")
    names = list(dict.fromkeys(name for parts in found for name in parts))
    lines = [
        f"memory of each of {ranks} rank(s) in GiB, without activations, text encoder and VAE"
        f" ({parameters.total / 1e9:.4g} B parameters, {parameters.trained / 1e9:.4g} B trained):",
    ]
    if len(columns) > 1:
        lines.append(" " * 36 + "".join(f"{title:>24}" for title in columns))
    for name in names:
        place = "" if where.get(name, "none") == "none" else f" (on {where[name]})"
        lines.append(f"  {name + place:<34}" + "".join(f"{parts.get(name, 0) / 2**30:24.2f}" for parts in found))
    on_device = [sum(n for name, n in parts.items() if where.get(name, "none") == "none") / 2**30 for parts in found]
    return [*lines, f"  {'on the device':<34}" + "".join(f"{total:24.2f}" for total in on_device)]
