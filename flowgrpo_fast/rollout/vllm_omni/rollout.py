"""`backend: vllm_omni`: prompt groups to the least-loaded server, retries by key, lost servers replaced between phases.

Each rank holds a client for every server that it can reach. The first rank of a node starts the node's servers and owns them: it sends
weights and starts new ones. Noise is keyed by (seed, step, sample), so a retry on any server gives the same bits.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowgrpo_fast import comm
from flowgrpo_fast.batch import BatchError, RolloutBatch
from flowgrpo_fast.config import Config, ConfigError
from flowgrpo_fast.engine import Engine
from flowgrpo_fast.metrics import write_atomic
from flowgrpo_fast.models.base import ModelAdapter
from flowgrpo_fast.profile import span
from flowgrpo_fast.rollout.base import RolloutRequest, SamplingParams, ServerLostError
from flowgrpo_fast.rollout.vllm_omni.client import ServerClient
from flowgrpo_fast.rollout.vllm_omni.process import ServerProcess
from flowgrpo_fast.rollout.vllm_omni.sync import WeightSync
from flowgrpo_fast.rollout.wire import HANDSHAKE_PROMPT, VLLM_OMNI, RemoteError, WireError, text_encoder_digest
from flowgrpo_fast.version import __version__

REQUEST_RETRIES = 2
T = TypeVar("T")


class VllmOmniRollout:
    """Collective: all ranks construct it, enter `phase` together. `generate` is each rank's own and thread-safe."""

    def __init__(
        self, config: Config, adapter: ModelAdapter, engine: Engine, run_dir: Path, device: torch.device
    ) -> None:
        self.config, self.adapter, self.engine, self.run_dir, self.device = config, adapter, engine, run_dir, device
        self.settings = config.rollout.server
        self.failures = 0
        self.version: int | None = None
        self._asleep = False
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._finished: dict[str, RolloutBatch] = {}
        self._embedding: int | None = None
        self.owned: list[ServerClient] = []
        self.clients: list[ServerClient] = []
        self.starts = 0
        self.sync = WeightSync(config, adapter, engine, device)
        self._start_servers()

    @property
    def concurrency(self) -> int:
        """Generations worth having in flight: one running and one waiting at each server."""
        return 2 * len(self.clients)

    @contextmanager
    def phase(self, policy_version: int) -> Iterator[None]:
        """Servers awake, holding the weights of `policy_version`, proven by checksums and probe. Lost ones are replaced first."""
        self._cancelled.clear()
        while True:
            try:
                self._prepare(policy_version)
                break
            except ServerLostError:
                # One that is known by now is counted when it is replaced.
                self.failures += all(c.lost is None for c in self.clients)
        yield
        # Nobody may put an engine to sleep that another rank still samples from.
        complete = comm.all_ok(all(c.lost is None for c in self.clients), self.device)
        if complete:
            self._finished.clear()
        if self.config.rollout.colocated:
            self._asleep = True
            with suppress(ServerLostError):  # replaced at the next phase
                self._collectively(lambda: [c.call("sleep") for c in self.owned if c.lost is None])

    def _prepare(self, policy_version: int) -> None:
        """ServerLostError, on all ranks, when a server goes down on the way."""
        if self._asleep:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # the engine's weights need the room that this process only keeps
            self._collectively(lambda: [c.call("wake") for c in self.owned if c.lost is None])
            self._asleep = False
        if not comm.all_ok(all(c.lost is None for c in self.clients), self.device):
            self._replace_lost()
        if self.version != policy_version:
            self.sync.push(self.owned, policy_version)
            self.version = policy_version

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, policy_version: int
    ) -> RolloutBatch:
        """One forward batch on the least-loaded server. A failed request is tried again; ServerLostError when no server is left.
        What was finished before a server was lost is not sampled twice."""
        key = request_key(requests, sampling, policy_version)
        done = self._finished.get(key)
        if done is not None:
            return done
        failed = 0
        while True:
            client = self._reserve(key)
            try:
                with span("rollout"):
                    batch = client.generate(requests, sampling, policy_version, key)
                check_reply(batch, requests, policy_version)
                break
            except ServerLostError:
                continue
            except (RemoteError, WireError, BatchError) as error:
                failed += 1
                if failed > REQUEST_RETRIES or self._cancelled.is_set():
                    raise
                self._count_failure(error)
            finally:
                self._release(client, key)
        # Images stay in shared memory, where the rewards read them; those that came by the GPU go to the host.
        images, videos = (None if media is None else media.cpu() for media in (batch.images, batch.videos))
        batch = replace(batch.to(self.device), images=images, videos=videos)
        self._finished[key] = batch
        return batch

    def cancel(self) -> None:
        """Ends this rank's generations: their callers get an error, and the servers are free for others."""
        self._cancelled.set()
        with self._lock:
            running = [(c, key) for c in self.clients for key in c.running]
        for client, key in running:
            with suppress(ServerLostError, RemoteError, WireError):
                client.call("cancel", {"key": key}, timeout=10)

    def _replace_lost(self) -> None:
        """Starts what is missing. New servers hold the checkpoint's weights: the phase sends them anew. Raises RuntimeError, on all ranks, after
        rollout.max_failures."""
        found = comm.gather_objects((self.failures, {c.address: c.lost for c in self.clients if c.lost is not None}))
        lost = {address: reason for _, addresses in found for address, reason in addresses.items()}
        self.failures = max(failures for failures, _ in found) + len(lost)
        # What one rank has lost is lost for all, or its owner would not replace it.
        for client in self.clients:
            client.lost = client.lost or lost.get(client.address)
        if self.failures > self.config.rollout.max_failures:
            raise RuntimeError(self._too_many("; ".join(lost.values())))
        if comm.rank() == 0:
            print(f"starting another rollout server: {'; '.join(lost.values())}", flush=True)
        self._start_servers()
        self.version = None

    def _too_many(self, last: str) -> str:
        return f"{self.failures} failures of rollout servers, more than rollout.max_failures {self.config.rollout.max_failures}: {last}"

    def metrics(self) -> dict[str, float]:
        return {
            "server_failures": float(self.failures),
            "bound_modules": float(self.sync.bound_modules),
            "probe_difference": self.sync.last_difference,
        }

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def _start_servers(self) -> None:
        """Owners start what is missing; then every rank connects to all and shakes hands."""
        for client in self.owned:
            if client.lost is not None and client.process is not None:
                client.process.kill()
        alive = [c for c in self.owned if c.lost is None]
        processes = self._collectively(lambda: self._spawn({c.process.replica for c in alive if c.process is not None}))
        by_hand = self.settings.addresses if comm.rank() == 0 else []
        started = {p.address: p for p in processes}
        mine = [*started, *(a for a in by_hand if a not in {c.address for c in alive})]
        here = comm.gather_objects((os.uname().nodename, mine))
        new = [
            a
            for node, addresses in here
            for a in addresses
            if node == os.uname().nodename or a in self.settings.addresses
        ]
        fresh = [ServerClient(a, started.get(a), self.settings.request_timeout_s, self.device) for a in new]
        self.clients = [c for c in self.clients if c.lost is None] + fresh
        self.owned = [c for c in self.clients if c in alive or c.address in mine]
        # Owners first: they see a server that died while starting at once; the other ranks would wait for its time-out.
        self._collectively(lambda: self._shake_hands([c for c in fresh if c in self.owned]))
        self._collectively(lambda: self._shake_hands([c for c in fresh if c not in self.owned]))
        self._collectively(lambda: [c.call("wake") for c in fresh if c in self.owned])

    def _spawn(self, running: set[int]) -> list[ServerProcess]:
        """The replicas of this node that do not run. Only its first rank has any."""
        s = self.settings
        if int(os.environ.get("LOCAL_RANK", "0")) != 0 or not s.replicas:
            return []
        node = os.uname().nodename
        config_path = self.run_dir / "servers" / f"{node}.yaml"
        config_path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(config_path, self.config.to_yaml().encode())
        threads = s.threads or max(1, len(os.sched_getaffinity(0)) // s.replicas)
        processes = []
        for replica in sorted(set(range(s.replicas)) - running):
            devices = None
            if not s.cpu:
                first = replica * s.tensor_parallel_size
                devices = visible_devices(s.devices)[first : first + s.tensor_parallel_size]
            self.starts += 1
            log = config_path.parent / f"server-{node}-{replica}-{self.starts}.log"
            processes.append(ServerProcess(self.config.rollout.python, config_path, log, replica, devices, threads))
        return processes

    def _shake_hands(self, clients: list[ServerClient]) -> None:
        mine = self.adapter.tokenize([HANDSHAKE_PROMPT], 512).input_ids.reshape(-1)
        digest = text_encoder_digest(self.adapter.path)
        for client in clients:
            identity = client.hello(self.settings.start_timeout_s)
            check_identity(identity, client.address, mine, digest, self._embedding)
            self._embedding = identity["embedding"]

    def _reserve(self, key: str) -> ServerClient:
        """The server with the fewest of this rank's requests; among equals each rank begins with another."""
        with self._lock:
            alive = [c for c in self.clients if c.lost is None]
            if not alive:
                raise ServerLostError(f"no rollout server is left: {self.clients[-1].lost}")
            first = comm.rank() % len(alive)
            client = min(alive[first:] + alive[:first], key=lambda c: len(c.running))
            client.running.append(key)
            return client

    def _release(self, client: ServerClient, key: str) -> None:
        with self._lock:
            client.running.remove(key)

    def _count_failure(self, error: Exception) -> None:
        with self._lock:
            self.failures += 1
        if self.failures > self.config.rollout.max_failures:
            raise RuntimeError(self._too_many(str(error))) from error

    def _collectively(self, work: Callable[[], T]) -> T:
        return comm.together(work, self.device, ServerLostError)


def visible_devices(chosen: list[int] | None) -> list[str]:
    """GPUs for the servers of this node, as CUDA_VISIBLE_DEVICES names them: those chosen, else all that this process may see."""
    if chosen is not None:
        return [str(device) for device in chosen]
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    return mine.split(",") if mine else [str(i) for i in range(torch.cuda.device_count())]


def check_identity(
    identity: dict[str, Any], address: str, input_ids: Tensor, text_encoder: str, embedding: int | None
) -> None:
    """The handshake: versions, the same token ids for the same prompt (int64 [L]), the trainer's text encoder, the same embedding on every
    server. ConfigError."""
    versions = identity["versions"]
    if versions.get("flowgrpo_fast") != __version__:
        raise ConfigError(
            f"{address} runs flowgrpo_fast {versions.get('flowgrpo_fast')}, the trainer {__version__}: install one version in both"
        )
    if not versions.get("vllm-omni", "").startswith(f"{VLLM_OMNI}."):
        raise ConfigError(f"{address} runs vllm-omni {versions.get('vllm-omni')}; {VLLM_OMNI}.x is needed")
    if not torch.equal(input_ids, identity["input_ids"]):
        raise ConfigError(
            f"{address} tokenizes a prompt to other ids than the trainer: its checkpoint or its transformers {versions.get('transformers')} differs"
        )
    if text_encoder != identity["text_encoder"]:
        raise ConfigError(f"{address} has another text encoder than the trainer's model.path: another checkpoint?")
    if embedding not in (None, identity["embedding"]):
        raise ConfigError(f"{address} encodes a prompt differently from the other servers: another checkpoint?")


def check_reply(batch: RolloutBatch, requests: Sequence[RolloutRequest], policy_version: int) -> None:
    """Raises BatchError for a reply that is broken, stale, or another one's."""
    batch.validate()
    if batch.policy_version != policy_version:
        raise BatchError(
            f"policy_version: the reply was made by {batch.policy_version}, asked for was {policy_version}"
        )
    if not torch.equal(batch.sample_id, torch.cat([r.sample_id for r in requests])):
        raise BatchError("sample_id: the reply holds other samples than were asked for")


def request_key(requests: Sequence[RolloutRequest], sampling: SamplingParams, policy_version: int) -> str:
    """Names a forward batch by everything that decides its bits: prompts, noise keys, sampling, weights."""
    digest = hashlib.sha256(repr((sampling, policy_version)).encode())
    for r in requests:
        for tensor in (r.tokens.input_ids, r.sample_id, r.window_start):
            digest.update(tensor.contiguous().numpy().data)
        if r.tokens.images is not None:
            digest.update(r.tokens.images.contiguous().numpy().data)
        if r.negative_tokens is not None:
            digest.update(r.negative_tokens.input_ids.contiguous().numpy().data)
        digest.update(str(r.group_id).encode())
    return digest.hexdigest()[:32]
