"""A RolloutBatch to another process, in four ways: `python -m benchmarks.exchange` -> benchmarks/results/exchange_cpu.csv.

64 samples of Qwen-Image at 512^2 with a window of 2 (3 latents each) and their prompts. Measured from the batch in one process to
the batch in the other, until its acknowledgement is back; then, outside the time, the receiver compares every field bit by bit
with the batch that it expects. The rival is what the field does: nested Python lists and pickle.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import COPY, Neighbours, copy_bytes, time_all, warn_if_busy
from benchmarks.table import RESULTS, Table
from flowgrpo_fast.batch import DTYPES, INTEGERS, RolloutBatch
from flowgrpo_fast.schedule import make_sigmas

LISTS, NEW_SEGMENT, SEGMENT, SOCKET = "nested lists", "new shared memory", "shared memory", "socket"
LENGTH = struct.Struct("<Q")


def make_batch(samples: int) -> RolloutBatch:
    """Equal in every process. 16 samples a prompt; embeddings as Qwen2.5-VL makes them, 3,584 wide."""
    g = torch.Generator().manual_seed(0)
    window, prompts, length, width = 2, max(1, samples // 16), 128, 3584
    index = torch.arange(samples)
    return RolloutBatch(
        latents=torch.randn(samples, window + 1, 1024, 64, generator=g),  # (512/16)^2 tokens of 64 channels
        log_probs=torch.randn(samples, window, generator=g),
        step_index=torch.arange(window).repeat(samples, 1),
        sigmas=make_sigmas(10),
        prompt_index=index // 16 % prompts,
        group_id=index // 16,
        sample_id=index,
        seed=torch.zeros_like(index),
        prompt_embeds=torch.randn(prompts, length, width, generator=g).bfloat16(),
        prompt_embeds_mask=torch.ones(prompts, length, dtype=torch.bool),
        negative_prompt_embeds=torch.randn(1, length, width, generator=g).bfloat16(),
        negative_prompt_embeds_mask=torch.ones(1, length, dtype=torch.bool),
        policy_version=0,
        height=512,
        width=512,
    ).validate()


def same(left: RolloutBatch, right: RolloutBatch) -> bool:
    mine, yours = left.tensors(), right.tensors()
    equal = mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)
    return equal and all(getattr(left, name) == getattr(right, name) for name in INTEGERS)


class Sender:
    """One end. `send` hands a batch over one of the ways and returns when the receiver has it."""

    def __init__(self, batch: RolloutBatch, pipe: Connection, stream: socket.socket) -> None:
        self.batch, self.pipe, self.stream = batch, pipe, stream
        self.segment = SharedMemory(create=True, size=batch.pack().numel())

    def send(self, way: str) -> None:
        if way == LISTS:
            values = {
                name: (str(t.dtype).removeprefix("torch."), t.tolist()) for name, t in self.batch.tensors().items()
            }
            content: Any = (values, {name: getattr(self.batch, name) for name in INTEGERS})
            self.pipe.send((way, None))
            self.pipe.send_bytes(pickle.dumps(content))
            self.pipe.recv()
            return
        packed = self.batch.pack()
        if way == SOCKET:
            self.pipe.send((way, None))
            self.stream.sendall(LENGTH.pack(packed.numel()))
            self.stream.sendall(packed.numpy().data)
            self.pipe.recv()
            return
        segment = self.segment if way == SEGMENT else SharedMemory(create=True, size=packed.numel())
        view_of(segment, packed.numel()).copy_(packed)
        self.pipe.send((way, (segment.name, packed.numel())))
        self.pipe.recv()
        if way == NEW_SEGMENT:
            segment.close()
            segment.unlink()

    def arrived_intact(self) -> bool:
        self.pipe.send(("compare", None))
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(("stop", None))
        self.segment.close()
        self.segment.unlink()


def view_of(segment: SharedMemory, size: int) -> Tensor:
    return torch.frombuffer(segment.buf, dtype=torch.uint8, count=size)


def receive_all(pipe: Connection, port: int, samples: int) -> None:
    """The other process: unpacks what comes, acknowledges it, keeps it until the next one."""
    expected = make_batch(samples)
    stream = socket.create_connection(("127.0.0.1", port))
    kept: SharedMemory | None = None  # the segment that is used again and again
    passing: SharedMemory | None = None  # the one that holds the present batch alone
    batch: RolloutBatch | None = None
    while True:
        way, content = pipe.recv()
        if way == "stop":
            break
        if way == "compare":
            pipe.send(batch is not None and same(batch, expected))
            continue
        batch = None  # its memory goes before the next one comes
        if passing is not None:
            passing.close()
            passing = None
        if way == LISTS:
            values, integers = pickle.loads(pipe.recv_bytes())
            tensors: dict[str, Any] = {
                name: torch.tensor(value, dtype=DTYPES[dtype]) for name, (dtype, value) in values.items()
            }
            batch = RolloutBatch(**tensors, **integers)
        elif way == SOCKET:
            batch = RolloutBatch.unpack(read_from(stream))
        elif way == SEGMENT:
            name, size = content
            kept = kept or SharedMemory(name)
            batch = RolloutBatch.unpack(view_of(kept, size))
        else:
            name, size = content
            passing = SharedMemory(name)
            batch = RolloutBatch.unpack(view_of(passing, size))
        pipe.send("received")
    stream.close()
    batch = None
    for segment in (kept, passing):
        if segment is not None:
            segment.close()


def read_from(stream: socket.socket) -> Tensor:
    def fill(view: memoryview) -> None:
        while view:
            view = view[stream.recv_into(view) :]

    length = bytearray(LENGTH.size)
    fill(memoryview(length))
    buffer = torch.empty(LENGTH.unpack(length)[0], dtype=torch.uint8)
    fill(buffer.numpy().data)
    return buffer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="timing, beside the two runs of nested lists")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    warn_if_busy("before the measurement")

    listener = socket.create_server(("127.0.0.1", 0))
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    receiver = context.Process(target=receive_all, args=(far_end, listener.getsockname()[1], args.samples), daemon=True)
    receiver.start()
    batch = make_batch(args.samples)
    stream, _ = listener.accept()
    sender = Sender(batch, pipe, stream)
    assert receiver.pid is not None
    right = compare(sender, receiver.pid, args)
    sender.close()
    receiver.join(30)
    warn_if_busy("after the measurement")
    return 0 if right else 1


def compare(sender: Sender, receiver: int, args: argparse.Namespace) -> bool:
    batch = sender.batch
    packed = batch.pack()
    target = torch.empty_like(packed)
    ways: dict[str, Callable[[], Any]] = {
        way: partial(sender.send, way) for way in (LISTS, NEW_SEGMENT, SEGMENT, SOCKET)
    }
    parts: dict[str, Callable[[], Any]] = {
        "pack": batch.pack,
        "unpack": partial(RolloutBatch.unpack, packed),
        "one copy": partial(target.copy_, packed),
    }
    match = {}
    for way, run in ways.items():
        run()
        match[way] = sender.arrived_intact()
    match |= dict.fromkeys(parts, same(RolloutBatch.unpack(batch.pack()), batch))
    runs = {name: run for name, run in (ways | parts).items() if match[name]}
    with Neighbours(ours=[receiver]) as neighbours:
        timings = time_all(runs, "cpu", args.seconds)
    copied = copy_bytes("cpu") / timings[COPY].median / 1e9
    about = dict(op="RolloutBatch", shape="Qwen-Image 512", variant="window 2", batch=batch.size, dtype="float32")
    with Table(args.out / "exchange_cpu.csv", "cpu") as table:
        for name, ok in match.items():
            row: dict[str, Any] = dict(match=ok, idle=neighbours.idle, others=neighbours.others)
            if name in timings:
                t = timings[name]
                row |= dict(median_ms=1e3 * t.median, p20_ms=1e3 * t.p20, p80_ms=1e3 * t.p80, samples=t.samples)
                row |= dict(bytes=packed.numel(), gb_s=packed.numel() / t.median / 1e9, copy_gb_s=copied)
                row["times_faster"] = timings[LISTS].median / t.median if name in ways and LISTS in timings else None
            table.add(**about, backend=name, **row)
    return all(match.values())


if __name__ == "__main__":
    raise SystemExit(main())
