"""What a run allocates, what autograd keeps, and how many launches it takes: counted on one real run, never derived.

Memory events come from the profiler, below every operator: what a compiled graph or an extension takes from PyTorch's
allocator is seen as well, whoever asked for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Memory:
    peak_bytes: int  # most bytes alive at once that were not alive before; results and gradients included
    temporaries: tuple[int, ...]  # bytes of each allocation that is not a result's
    kernels: int | None  # launches seen on the device; None on the CPU, or where the profiler sees no device


def memory(run: Callable[[], tuple[Tensor, ...]], device: str) -> Memory:
    """Profiles one run; its results live until the run is over, as a caller would hold them.

    A result whose memory did not come from PyTorch's allocator (large gradients of the cpp backend: csrc/pool.h) is added to the peak.
    """
    cuda = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    before = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with profile(activities=activities, profile_memory=True) as profiler:
        results = run()
        if cuda:
            torch.cuda.synchronize()
    result_bytes = {(s := result.untyped_storage()).data_ptr(): s.nbytes() for result in results}
    recorded = profiler.profiler.kineto_results
    changes = [(pointer, size) for _, pointer, size in sorted(_memory_events(recorded, device))]
    allocated = [(pointer, size) for pointer, size in changes if size > 0]
    # Of an address that was used again, the last owner is the result.
    last = {pointer: i for i, (pointer, _) in enumerate(allocated)}
    temporaries = tuple(n for i, (p, n) in enumerate(allocated) if p not in result_bytes or last[p] != i)
    if cuda:
        on_device = [event.name() for event in recorded.events() if event.device_type() == DeviceType.CUDA]
        kernels = sum(name != "[memory]" for name in on_device)
        return Memory(torch.cuda.max_memory_allocated() - before, temporaries, kernels or None)
    unseen = sum(size for pointer, size in result_bytes.items() if pointer not in last)
    peak = max(itertools.accumulate((size for _, size in changes), initial=0))
    return Memory(peak + unseen, temporaries, None)


def _memory_events(recorded: Any, device: str) -> Iterator[tuple[int, int, int]]:
    """Time, address and size (negative: freed) of each change on the device."""
    nodes = list(recorded.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        kind, fields = node.typed
        if kind == _EventType.Allocation and fields.device.type == device:
            yield node.start_time_ns, fields.ptr, fields.alloc_size


def dispatched(run: Callable[[], Any]) -> int:
    """Operators that a run dispatches, without views and plain allocations: the CPU's launches. One of our ops is one."""
    with _Operators() as mode:
        run()
    return mode.count


class _Operators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        allocates = func._schema.name.split("::")[1] in ("empty", "empty_like", "empty_strided", "new_empty")
        self.count += not (func.is_view or allocates)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Saved:
    total: int  # bytes of all distinct storages that the graph holds
    beyond_inputs: int  # of these, storages that the caller's inputs do not hold anyway


def saved(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Saved:
    """What the autograd graph behind `outputs` keeps for backward.

    Read off the graph's nodes: a pack hook would do for eager code, but a hook is a guard of `torch.compile` and recompiles.
    """
    mine = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    storages: dict[int, int] = {}
    nodes, seen = [output.grad_fn for output in outputs if output.grad_fn is not None], set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes += [child for child, _ in node.next_functions if child is not None]
        for tensor in _saved_by(node):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    beyond = sum(size for pointer, size in storages.items() if pointer not in mine)
    return Saved(sum(storages.values()), beyond)


def _saved_by(node: Any) -> list[Tensor]:
    """Python functions list what they save; each C++ node has an attribute `_saved_<name>` per tensor."""
    values = list(getattr(node, "saved_tensors", ()))
    for name in dir(node):
        if name.startswith("_saved_"):
            value = getattr(node, name)
            values += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in values if isinstance(value, Tensor)]
