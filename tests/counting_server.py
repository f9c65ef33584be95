"""A rollout server that counts pickles and tensor-to-list conversions; started by test_vllm_omni.py instead of `rollout.serve`.

SIGUSR1 writes the counts so far to the file named by the environment variable COUNTS.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy
import torch

counts: collections.Counter[str] = collections.Counter()
callers: dict[str, str] = {}


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        callers[name] = "".join(traceback.format_stack(limit=6)[:-1])
        return function(*args, **kwargs)

    return wrapper


def report(*_: Any) -> None:
    path = os.environ["COUNTS"]
    with open(path + ".tmp", "w") as file:
        json.dump({"counts": counts, "callers": callers}, file)
    os.replace(path + ".tmp", path)


def install() -> None:
    for name in ("dumps", "loads", "dump", "load"):
        setattr(pickle, name, counted(f"pickle.{name}", getattr(pickle, name)))
    for cls in ("Pickler", "Unpickler"):
        original = getattr(pickle, cls)
        method = "dump" if cls == "Pickler" else "load"
        setattr(pickle, cls, type(cls, (original,), {method: counted(f"pickle.{cls}", getattr(original, method))}))
    for name in ("dumps", "loads"):  # of queues and pipes between processes
        setattr(ForkingPickler, name, staticmethod(counted(f"ForkingPickler.{name}", getattr(ForkingPickler, name))))
    # Of data alone: the row numbers of the denoising loop are integers on the CPU, and no exchange.
    plain, iterated = torch.Tensor.__iter__, counted("Tensor.__iter__", torch.Tensor.__iter__)
    torch.Tensor.__iter__ = lambda tensor: (iterated if tensor.is_floating_point() else plain)(tensor)
    torch.Tensor.tolist = counted("Tensor.tolist", torch.Tensor.tolist)
    torch.Tensor.__reduce_ex__ = counted("Tensor.__reduce_ex__", torch.Tensor.__reduce_ex__)
    # ndarray.tolist cannot be patched; a tensor gets there through numpy() only.
    assert numpy.ndarray.tolist
    signal.signal(signal.SIGUSR1, report)
    # One of each on purpose: the test sees that they are counted.
    pickle.loads(pickle.dumps(torch.ones(1).tolist()))
    ForkingPickler.loads(ForkingPickler.dumps([float(x) for x in torch.ones(1)]))


if __name__ == "__main__":
    install()
    from flowgrpo_fast.rollout.serve import main

    sys.exit(main())
