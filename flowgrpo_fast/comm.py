"""The few collectives that the trainer needs. Every rank calls each of them, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def initialize(timeout: timedelta = timedelta(minutes=30)) -> None:
    """Joins the ranks that the launcher's variables describe.

    On CPUs DeepSpeed would first compile an all-reduce through shared memory (80 s of CPU), of which it makes use in inference only and
    whose 69 MB stay in /dev/shm after a normal exit.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # Elsewhere nothing asks for the table of ops, whose first reading probes them all.
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False, timeout=timeout)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_rows(local: Tensor) -> Tensor:
    """[N, ...] of each rank -> [world * N, ...] in rank order, on local's device. N must be the same on all ranks."""
    if world_size() == 1:
        return local
    # gloo has no bool; NCCL reads device memory only.
    wire = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else local.device
    sent = local.to(wire, torch.uint8 if local.dtype == torch.bool else local.dtype).contiguous()
    parts = [torch.empty_like(sent) for _ in range(world_size())]
    dist.all_gather(parts, sent)
    return torch.cat(parts).to(local.device, local.dtype)


def gather_bytes(local: Tensor) -> list[Tensor]:
    """uint8 [n] of each rank, in rank order; n may differ. On local's device."""
    sizes = gather_rows(torch.tensor([local.numel()], device=local.device))
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=local.device)
    padded[: local.numel()] = local
    rows = gather_rows(padded[None])
    return [row[: int(size)] for row, size in zip(rows, sizes, strict=True)]


def gather_objects(local: T) -> list[T]:
    """A small Python object of each rank, in rank order."""
    if world_size() == 1:
        return [local]
    gathered: list[T] = [local] * world_size()
    dist.all_gather_object(gathered, local)
    return gathered


def all_ok(ok: bool, device: torch.device) -> bool:
    """True where every rank is well: all ranks take the same branch."""
    if world_size() == 1:
        return ok
    flag = torch.tensor([1 if ok else 0], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def agree(error: Exception | None, device: torch.device, shared: type[Exception] | None = None) -> None:
    """Raises on every rank where any rank has an error: nobody is left waiting in a collective.

    shared: where all errors are of this type, every rank raises it, and all can handle it alike.
    """
    if all_ok(error is None, device):
        return
    if shared is not None and all_ok(error is None or isinstance(error, shared), device):
        raise error or shared("on another rank")
    if error is not None:
        raise error
    raise RuntimeError("another rank failed; its own message says why")


def together(work: Callable[[], T], device: torch.device, shared: type[Exception] | None = None) -> T:
    """What `work` returns on this rank, once it is done on all; an error on one is raised on every rank, as `agree` says.

    work: this rank's own. A collective in it would hang where another rank failed before.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    agree(failure, device, shared)
    return result


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()
