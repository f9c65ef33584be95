"""The rollout server: one process, one AsyncOmni, one ROUTER socket. Requests come in as tensors and go out as one packed RolloutBatch.

    hello     -> versions, token ids and embedding checksum of a fixed prompt, a digest of the text encoder, the policy version held
    generate  -> RolloutBatch bytes: on the GPU for a client on the same one, in shared memory on the same host, else as a frame
    release   -> drops a reply that the client has mapped or copied
    lora      -> binds an adapter under a new version; checksums of what is bound
    bucket    -> loads some full weights; checksums of what the engine holds; `last` sets the version
    probe     -> velocity of a fixed input
    sleep, wake, cancel, ping, shutdown

A request for another policy version than the one held is refused. The server dies with its trainer: by the kernel's parent-death signal
where the trainer started it, and when no client has been heard of for `heartbeat` seconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import torch
import zmq
import zmq.asyncio
from torch import Tensor

from flowgrpo_fast.batch import DTYPES, RolloutBatch
from flowgrpo_fast.config import Config
from flowgrpo_fast.models import resolve_model_path
from flowgrpo_fast.models.base import PromptTokens
from flowgrpo_fast.rollout import cuda_ipc
from flowgrpo_fast.rollout.base import RolloutRequest, SamplingParams
from flowgrpo_fast.rollout.vllm_omni.engine_settings import engine_settings
from flowgrpo_fast.rollout.weights import FlatTensors
from flowgrpo_fast.rollout.wire import (
    HANDSHAKE_PROMPT,
    Message,
    Segment,
    WireError,
    decode,
    encode,
    text_encoder_digest,
    unpack_tensors,
)
from flowgrpo_fast.version import __version__, installed_versions

# A reply that nobody has released by then belongs to a client that is gone.
REPLY_LIFETIME_S = 600.0
PACKAGES = ("torch", "vllm", "vllm-omni", "diffusers", "transformers")


class StaleVersionError(RuntimeError):
    """A request for weights that this server does not hold."""


class EngineRpcError(RuntimeError):
    """A worker did not acknowledge what it was asked to do."""


def die_with_parent(parent: int) -> None:
    """Call from the main thread. SIGKILL when the parent's main thread ends; at once if it already has."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class RolloutServer:
    def __init__(self, config: Config, address: str, heartbeat: float) -> None:
        self.config, self.address, self.heartbeat = config, address, heartbeat
        self.policy_version: int | None = None
        self.has_lora = self.asleep = False
        self.replies: dict[int, tuple[Segment | Tensor, float]] = {}  # not yet released by the client, and since when
        self.reply_count = 0
        self.last_heard: float | None = None  # counted from the first message on: other servers may take longer to load
        self.tasks: set[asyncio.Task[None]] = set()
        self.stopping = asyncio.Event()

    async def serve(self) -> None:
        """Loads the engine, then answers until `shutdown`, a signal, or silence."""
        from vllm_omni.entrypoints.async_omni import AsyncOmni

        self.engine = AsyncOmni(**engine_settings(self.config))
        self.identity = await self._identify()
        self.gpu = cuda_ipc.device_uuid(torch.device("cpu" if self.config.rollout.server.cpu else "cuda:0"))
        context = zmq.asyncio.Context()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.bind(self.address)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stopping.set)
        print(f"flowgrpo_fast rollout server ready at {self.address}", flush=True)
        receiver = asyncio.create_task(self._receive())
        watcher = asyncio.create_task(self._watch())
        try:
            await self.stopping.wait()
        finally:
            for task in (receiver, watcher, *self.tasks):
                task.cancel()
            self.engine.shutdown()
            self.socket.close()
            context.term()

    async def _receive(self) -> None:
        while True:
            identity, *frames = await self.socket.recv_multipart(copy=False)
            self.last_heard = time.monotonic()
            task = asyncio.create_task(self._answer(identity.bytes, frames))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _watch(self) -> None:
        while True:
            now = time.monotonic()
            if self.last_heard is not None and now - self.last_heard > self.heartbeat:
                print(f"no client for {self.heartbeat:g} s: the server stops", flush=True)
                self.stopping.set()
            for number in [n for n, (_, since) in self.replies.items() if now - since > REPLY_LIFETIME_S]:
                self._drop(number)
            await asyncio.sleep(1)

    async def _answer(self, identity: bytes, frames: list[Any]) -> None:
        """Every request gets exactly one answer; an error is an answer with its kind and message."""
        request_id = None
        try:
            message = decode(frames)
            request_id = message.header.get("id")
            handlers: dict[str, Callable[[Message], Coroutine[Any, Any, Message]]] = {
                "hello": self._hello, "ping": self._ping, "generate": self._generate, "release": self._release,
                "cancel": self._cancel, "lora": self._lora, "bucket": self._bucket, "probe": self._probe,
                "sleep": self._sleep, "wake": self._wake, "shutdown": self._shutdown,
            }  # fmt: skip
            handler = handlers.get(message.header.get("op", ""))
            if handler is None:
                raise WireError(f"unknown operation {message.header.get('op')!r}")
            answer = await handler(message)
        except Exception as error:
            kind = type(error).__name__
            answer = Message({"error": {"kind": kind, "message": str(error)}})
            if kind == "EngineDeadError":
                # Nothing here can bring it back; the trainer starts another server when this one is gone.
                asyncio.get_running_loop().call_later(1, self.stopping.set)
        await self.socket.send_multipart(
            [identity, *encode(Message({**answer.header, "id": request_id}, answer.buffers))], copy=False
        )

    async def _identify(self) -> dict[str, Any]:
        (check,) = await self._rpc("flowgrpo_encode_check", HANDSHAKE_PROMPT)
        return {
            "versions": {
                "python": platform.python_version(),
                "flowgrpo_fast": __version__,
                **installed_versions(PACKAGES),
            },
            "pid": os.getpid(),
            "input_ids": check["input_ids"],
            "embedding": check["embedding"],
            "text_encoder": text_encoder_digest(resolve_model_path(self.config.model.path)),
        }

    async def _hello(self, message: Message) -> Message:
        """Also finds out whether this client's shared memory can be opened: if so, both are on one host."""
        ids: Tensor = self.identity["input_ids"]
        reply = {name: value for name, value in self.identity.items() if name != "input_ids"}
        shares_memory = Segment.is_here(message.header["segment"], bytes.fromhex(message.header["mark"]))
        shares_gpu = message.header["gpu"] is not None and message.header["gpu"] == self.gpu
        reply |= {"shares_memory": shares_memory, "shares_gpu": shares_gpu, "policy_version": self.policy_version}
        return Message(reply, (ids.reshape(-1).contiguous().view(torch.uint8),))

    async def _ping(self, _: Message) -> Message:
        return Message({"policy_version": self.policy_version})

    async def _generate(self, message: Message) -> Message:
        from flowgrpo_fast.rollout.vllm_omni.pipeline import JOB, Job
        from flowgrpo_fast.rollout.vllm_omni.worker import lora_request
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        header = message.header
        wanted = header["policy_version"]
        if wanted != self.policy_version:
            raise StaleVersionError(
                f"policy version {wanted} was asked for, this server holds {self.policy_version}; sync the weights first"
            )
        sampling = SamplingParams(**header["sampling"])
        job = Job(requests_of(message), sampling, wanted)
        parameters = OmniDiffusionSamplingParams(
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_steps,
            seed=sampling.seed,
            guidance_scale=1.0,
            output_type="pt",
            lora_request=lora_request(wanted) if self.has_lora else None,
        )
        outputs = self.engine.generate({"prompt": "", JOB: job}, parameters, request_id=header["key"])
        (result,) = [output async for output in outputs]
        batch: RolloutBatch = result.multimodal_output["metadata"][JOB]
        if header["reply"] == "frame":
            return Message({}, (batch.pack().cpu(),))
        self.reply_count += 1
        if header["reply"] == "gpu":
            packed = batch.pack()
            self.replies[self.reply_count] = packed, time.monotonic()
            return Message({"gpu": cuda_ipc.share(packed), "release": self.reply_count})
        segment = Segment.create(batch.packed_size())
        batch.pack(out=segment.tensor)
        self.replies[self.reply_count] = segment, time.monotonic()
        return Message({"segment": segment.address(), "release": self.reply_count})

    async def _release(self, message: Message) -> Message:
        self._drop(message.header["release"])
        return Message({})

    def _drop(self, number: int) -> None:
        reply, _ = self.replies.pop(number, (None, 0.0))
        if isinstance(reply, Segment):
            reply.close()

    async def _cancel(self, message: Message) -> Message:
        """The loop in the pipeline polls for this between steps; without it the next request would wait for the end."""
        await self.engine.abort(message.header["key"])
        return Message({})

    async def _lora(self, message: Message) -> Message:
        header = message.header
        lora = flat_of(message)
        # Until every tensor is proven to be bound, the engine holds no version.
        self.policy_version = None
        answers = await self._rpc("flowgrpo_load_lora", header["version"], lora, header["rank"], header["alpha"])
        self.policy_version, self.has_lora = header["version"], True
        return Message({"bound": answers[0]["bound"], "modules": answers[0]["modules"]})

    async def _bucket(self, message: Message) -> Message:
        header = message.header
        # Half-loaded weights belong to no version.
        self.policy_version = None
        answers = await self._rpc("flowgrpo_load_bucket", flat_of(message))
        if header["last"]:
            self.policy_version = header["version"]
        return Message({"bound": answers[0]["bound"], "modules": len(answers[0]["bound"])})

    async def _probe(self, _: Message) -> Message:
        answers = await self._rpc("flowgrpo_probe", self.policy_version if self.has_lora else None)
        value: Tensor = answers[0]["probe"]
        return Message({"shape": [*value.shape]}, (value.contiguous().reshape(-1).view(torch.uint8),))

    async def _sleep(self, _: Message) -> Message:
        await self.engine.pause_generation(mode="keep")
        self.asleep = True
        if self.config.rollout.server.cpu:
            await self._rpc("flowgrpo_free_weights")
        else:
            require_success(await self.engine.sleep(level=1), "sleep")
        return Message({})

    async def _wake(self, _: Message) -> Message:
        """Nothing to do for an engine that is awake: a trainer that has just connected need not know."""
        if not self.asleep:
            return Message({})
        if self.config.rollout.server.cpu:
            await self._rpc("flowgrpo_restore_weights")
        else:
            # The whole engine: after tags=["weights"] it would still count as asleep and refuse requests.
            require_success(await self.engine.wake_up(), "wake_up")
        await self.engine.resume_generation()
        self.asleep = False
        return Message({})

    async def _shutdown(self, _: Message) -> Message:
        asyncio.get_running_loop().call_later(0.1, self.stopping.set)
        return Message({})

    async def _rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """The answers of all workers."""
        return require_ok(await self.engine.collective_rpc(method, args=args), method)


def require_ok(nested: Any, method: str) -> list[dict[str, Any]]:
    """Raises EngineRpcError unless each worker says {"ok": True}: an exception comes back as {"supported": False, ...}, much else as nothing."""
    answers = flattened(nested)
    for answer in answers:
        if not isinstance(answer, dict) or answer.get("ok") is not True:
            reason = answer.get("error", answer) if isinstance(answer, dict) else answer
            raise EngineRpcError(f"{method}: {reason}")
    if not answers:
        raise EngineRpcError(f"{method}: no worker answered")
    return answers


def flattened(answers: Any) -> list[Any]:
    """collective_rpc nests its answers by stage and worker."""
    return [x for answer in answers for x in flattened(answer)] if isinstance(answers, list | tuple) else [answers]


def require_success(acknowledgements: list[Any], what: str) -> None:
    """Raises EngineRpcError: vllm-omni reports a failed sleep in the status only, and the next request would hang."""
    if not acknowledgements or any(ack.status != "SUCCESS" for ack in acknowledgements):
        raise EngineRpcError(f"{what}: {[getattr(ack, 'error_msg', None) or ack for ack in acknowledgements]}")


def flat_of(message: Message) -> FlatTensors:
    """The weights of a message, from its frame or from the client's shared memory."""
    header = message.header
    if message.buffers:
        raw = message.buffers[0]
    else:
        segment = Segment.open(header["segment"])
        assert segment.tensor is not None
        raw = segment.tensor[: header["bytes"]]
        segment.close()
    return FlatTensors(raw.view(DTYPES[header["dtype"]]), header["manifest"])


def requests_of(message: Message) -> list[RolloutRequest]:
    """The prompt groups of a generate message: their tensors lie in its buffers, group after group."""
    tensors = unpack_tensors(message.header["manifest"], message.buffers)
    requests = []
    for i, group_id in enumerate(message.header["group_ids"]):
        part = {name.partition("/")[2]: t for name, t in tensors.items() if name.startswith(f"{i}/")}
        try:
            images, negative = part.get("images"), None
            tokens = PromptTokens(part["ids"], part["mask"], images)
            if "negative_ids" in part:
                negative = PromptTokens(part["negative_ids"], part["negative_mask"], images)
            requests.append(RolloutRequest(group_id, tokens, negative, part["sample_id"], part["window_start"]))
        except KeyError as error:
            raise WireError(f"group {group_id} lacks the tensor {error}") from error
    return requests
