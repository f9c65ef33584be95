"""The trainer's side of one rollout server: calls with deadlines, shared-memory replies, and knowing when it is gone."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import zmq
from torch import Tensor

from flowgrpo_fast.batch import RolloutBatch
from flowgrpo_fast.rollout import cuda_ipc
from flowgrpo_fast.rollout.base import NonFiniteError, RolloutRequest, SamplingParams, ServerLostError
from flowgrpo_fast.rollout.denoise import NOT_FINITE
from flowgrpo_fast.rollout.vllm_omni.process import ServerProcess
from flowgrpo_fast.rollout.weights import FlatTensors
from flowgrpo_fast.rollout.wire import (
    Message,
    RemoteError,
    Segment,
    WireError,
    decode,
    encode,
    pack_tensors,
)

POLL_MS = 200
PING_S = 2.0
SILENCE_S = 60.0


class ServerClient:
    """Thread-safe: every thread has a socket of its own."""

    def __init__(self, address: str, process: ServerProcess | None, timeout: float, device: torch.device) -> None:
        self.address, self.process, self.timeout, self.device = address, process, timeout, device
        self.running: list[str] = []  # keys of this client's generations
        self.lost: str | None = None
        self.pid: int | None = None
        self.shares_memory = self.shares_gpu = False
        self._local = threading.local()
        self._count = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def hello(self, timeout: float) -> dict[str, Any]:
        """Waits for the server to come up. Returns its identity, token ids included. Raises ServerLostError."""
        mark = os.urandom(16)
        segment = Segment.create(len(mark))
        segment.map[:] = mark
        try:
            asked = {"segment": segment.address(), "mark": mark.hex(), "gpu": cuda_ipc.device_uuid(self.device)}
            reply = self.call("hello", asked, timeout=timeout)
        finally:
            segment.close()
        self.shares_memory = bool(reply.header["shares_memory"])
        self.shares_gpu = bool(reply.header["shares_gpu"])
        self.pid = int(reply.header["pid"]) if self.shares_memory else None
        threading.Thread(target=self._heartbeat, daemon=True, name=f"heartbeat {self.address}").start()
        return {**reply.header, "input_ids": reply.buffers[0].view(torch.int64)}

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, policy_version: int, key: str
    ) -> RolloutBatch:
        """One forward batch: in GPU memory of this process, a view of shared memory, or of the frame that came. Raises ServerLostError, RemoteError, WireError, BatchError."""
        manifest, buffers = pack_tensors(
            {
                f"{i}/{name}": tensor
                for i, r in enumerate(requests)
                for name, tensor in (
                    ("ids", r.tokens.input_ids),
                    ("mask", r.tokens.mask),
                    ("images", r.tokens.images),
                    ("sample_id", r.sample_id),
                    ("window_start", r.window_start),
                    ("negative_ids", None if r.negative_tokens is None else r.negative_tokens.input_ids),
                    ("negative_mask", None if r.negative_tokens is None else r.negative_tokens.mask),
                )
            }
        )
        header = {
            "manifest": manifest,
            "group_ids": [r.group_id for r in requests],
            "sampling": asdict(sampling),
            "policy_version": policy_version,
            "key": key,
            "reply": "gpu" if self.shares_gpu else "memory" if self.shares_memory else "frame",
        }
        try:
            reply = self.call("generate", header, buffers)
        except RemoteError as error:
            if NOT_FINITE in str(error):
                raise NonFiniteError(str(error)) from error
            raise
        if reply.buffers:
            return RolloutBatch.unpack(reply.buffers[0])
        try:
            if "gpu" in reply.header:
                return RolloutBatch.unpack(cuda_ipc.fetch(reply.header["gpu"], self.device))
            segment = Segment.open(reply.header["segment"])
            assert segment.tensor is not None
            batch = RolloutBatch.unpack(segment.tensor)
            segment.close()
            return batch
        finally:
            self.call("release", {"release": reply.header["release"]})

    def push(
        self, op: str, header: dict[str, Any], flat: FlatTensors, segment: Segment | None
    ) -> tuple[dict[str, int | None], int]:
        """Weights, in `segment` where the server can map it, else as a frame. Returns the checksums of what is bound (None under tensor
        parallelism) and the number of modules that are active."""
        header = {**header, "manifest": flat.manifest, "dtype": str(flat.flat.dtype).removeprefix("torch.")}
        raw = flat.flat.view(torch.uint8)
        if segment is not None and self.shares_memory:
            reply = self.call(op, {**header, "segment": segment.address(), "bytes": raw.numel()})
        else:
            reply = self.call(op, header, (raw,))
        return reply.header["bound"], reply.header["modules"]

    def probe(self) -> Tensor:
        reply = self.call("probe")
        return reply.buffers[0].view(torch.float32).view(reply.header["shape"])

    def call(
        self,
        op: str,
        header: dict[str, Any] | None = None,
        buffers: tuple[Tensor, ...] = (),
        timeout: float | None = None,
    ) -> Message:
        """One request, one answer. Raises RemoteError for an answer that is an error; ServerLostError when none can come any more."""
        socket, request_id = self._socket(), self._next_id()
        socket.send_multipart(encode(Message({**(header or {}), "op": op, "id": request_id}, buffers)))
        deadline = time.monotonic() + (timeout or self.timeout)
        while True:
            if socket.poll(POLL_MS):
                reply = decode(socket.recv_multipart(copy=False))
                error = reply.header.get("error")
                if reply.header.get("id") not in (request_id, None):
                    # The late answer to a call that had given up. (None: the request could not even be read.)
                    continue
                if error is not None and error["kind"] == "EngineDeadError":
                    self.lost = f"the engine of {self.address} is dead: {error['message']}"
                    raise ServerLostError(self.lost)
                if error is not None:
                    raise RemoteError(error["kind"], f"{op} at {self.address}: {error['message']}")
                return reply
            self._check_alive()
            if time.monotonic() > deadline:
                self.lost = f"{self.address} did not answer {op!r} within {timeout or self.timeout:g} s"
                raise ServerLostError(self.lost + self._log_tail())

    def close(self) -> None:
        """Stops the heartbeat, and the server if this rank started it."""
        self._closing.set()
        if self.process is not None:
            if self.lost is None:
                with contextlib.suppress(ServerLostError, RemoteError, WireError):
                    self.call("shutdown", timeout=5)
            self.process.stop()

    def _check_alive(self) -> None:
        if self.lost is None and self.process is not None and self.process.exit_code() is not None:
            self.lost = f"the rollout server {self.address} exited with code {self.process.exit_code()}"
        if self.lost is None and self.pid is not None and not _exists(self.pid):
            self.lost = f"the rollout server {self.address} (pid {self.pid}) is gone"
        if self.lost is not None:
            raise ServerLostError(self.lost + self._log_tail())

    def _log_tail(self) -> str:
        return "" if self.process is None else self.process.log_tail()

    def _heartbeat(self) -> None:
        """Tells the server that its trainer lives, and learns that the server does."""
        while not self._closing.wait(PING_S) and self.lost is None:
            try:
                self.call("ping", timeout=SILENCE_S)
            except (ServerLostError, RemoteError, WireError):
                continue

    def _socket(self) -> zmq.Socket:
        socket = getattr(self._local, "socket", None)
        if socket is None:
            socket = zmq.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.address)
            self._local.socket = socket
        return socket

    def _next_id(self) -> int:
        with self._lock:
            self._count += 1
            return self._count


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's, and there
    return True
