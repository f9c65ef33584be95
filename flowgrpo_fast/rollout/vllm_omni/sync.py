"""Weights to the servers, and the proof that they arrived, are bound, and are used.

LoRA: one flat tensor and a manifest; every sync is a new adapter id. Full weights: gathered from ZeRO-3 bucket by bucket, two buffers in
turn, each acknowledged before it is reused. After each sync the checksums of what the engine holds must equal the trainer's, and
so must the velocity of a fixed probe input. At the first LoRA sync the probe is repeated with noise in one target group at a time: an adapter
can bind, be counted, and still not be in the path of the forward.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from flowgrpo_fast import comm
from flowgrpo_fast.buckets import buckets
from flowgrpo_fast.config import Config
from flowgrpo_fast.engine import DTYPES, LORA, Engine
from flowgrpo_fast.models.base import ModelAdapter
from flowgrpo_fast.rollout.base import ServerLostError
from flowgrpo_fast.rollout.vllm_omni.client import ServerClient
from flowgrpo_fast.rollout.weights import (
    FlatTensors,
    WeightSyncError,
    checksum,
    lora_checksums,
    lora_modules,
    lora_tensors,
    probe,
    require_equal_probe,
)
from flowgrpo_fast.rollout.wire import Segment

TEST_SCALE = 0.05


class WeightSync:
    """All ranks call `push` together; only owners of servers send."""

    def __init__(self, config: Config, adapter: ModelAdapter, engine: Engine, device: torch.device) -> None:
        self.config, self.adapter, self.engine, self.device = config, adapter, engine, device
        self.dtype = DTYPES[config.model.dtype]
        self.last_difference = 0.0
        self.bound_modules = 0
        self._binding_tested = False

    def push(self, owned: list[ServerClient], version: int) -> None:
        """Raises, on every rank, WeightSyncError when a server does not prove that it runs these weights; ServerLostError."""
        if self.config.model.train == "lora":
            state = self._lora_state()
            if not self._binding_tested:
                self._test_binding(owned, state, version)
                self._binding_tested = True
            self._push_lora(owned, state, version)
        else:
            self._push_full(owned, version)
        self._compare_probes(owned, f"policy version {version}")

    def _lora_state(self) -> dict[str, Tensor]:
        return lora_tensors(self.engine.trained_state(), LORA)

    def _push_lora(self, owned: list[ServerClient], state: dict[str, Tensor], version: int) -> None:
        comm.together(lambda: self._send_lora(owned, state, version), self.device, ServerLostError)

    def _send_lora(self, owned: list[ServerClient], state: dict[str, Tensor], version: int) -> None:
        if not owned:
            return
        lora = self.config.model.lora
        segment = Segment.create(4 * sum(t.numel() for t in state.values()))
        try:
            flat = FlatTensors.pack(state, torch.float32, out=_typed(segment, torch.float32))
            expected = lora_checksums(flat, lora.alpha / lora.rank, self.dtype)
            for client in owned:
                header = {"version": version, "rank": lora.rank, "alpha": lora.alpha}
                bound, modules = client.push("lora", header, flat, segment)
                require_bound(expected, bound, client.address)
                self._require_modules(len(lora_modules(list(expected))), modules, client.address)
        finally:
            segment.close()

    def _push_full(self, owned: list[ServerClient], version: int) -> None:
        """Double-buffered: bucket n + 1 is gathered and copied while the servers load bucket n."""
        limit = int(self.config.rollout.server.bucket_mb * 2**20) // self.dtype.itemsize
        parameters = dict(self.engine.module.named_parameters())
        sizes = {name: self.engine.numel(p) for name, p in parameters.items()}
        cut = list(buckets(sizes, limit))
        largest = max(sum(sizes[name] for name in names) for names in cut)
        error: Exception | None = None
        segments = [Segment.create(largest * self.dtype.itemsize) for _ in range(2)] if owned else []
        sending: list[Future[None] | None] = [None, None]
        loaded: dict[str, int] = {}

        def send(flat: FlatTensors, expected: dict[str, int], segment: Segment, last: bool) -> None:
            for client in owned:
                header = {"version": version, "last": last}
                bound, modules = client.push("bucket", header, flat, segment)
                require_bound(expected, bound, client.address)
                loaded[client.address] = loaded.get(client.address, 0) + modules

        with ThreadPoolExecutor(1, thread_name_prefix="weights") as sender:
            for n, names in enumerate(cut):
                bucket = {name: parameters[name] for name in names}
                # Every rank enters every gather, whatever has gone wrong here: nobody is left waiting in it.
                with self.engine.gathered(list(bucket.values())):
                    if not owned or error is not None:
                        continue
                    try:
                        before = sending[n % 2]
                        if before is not None:
                            before.result()
                        segment = segments[n % 2]
                        flat = FlatTensors.pack(dict(bucket), self.dtype, out=_typed(segment, self.dtype))
                        expected = {name: checksum(t) for name, t in flat.items()}
                        sending[n % 2] = sender.submit(send, flat, expected, segment, n + 1 == len(cut))
                    except Exception as problem:
                        error = problem
            for future in sending:
                try:
                    if future is not None:
                        future.result()
                except Exception as problem:
                    error = error or problem
        for segment in segments:
            segment.close()

        def finish() -> None:
            if error is not None:
                raise error
            for address, count in loaded.items():
                self._require_modules(len(parameters), count, address)

        comm.together(finish, self.device, ServerLostError)

    def _require_modules(self, expected: int, counted: int, address: str) -> None:
        """The server's own count of LoRA modules that are active, or of parameters that it loaded."""
        self.bound_modules = counted
        if counted != expected:
            raise WeightSyncError(f"{address} has {counted} modules bound, {expected} were sent")

    def _compare_probes(self, owned: list[ServerClient], what: str, base: Tensor | None = None) -> None:
        """base: what the probe was before a change that both sides made; then the server's must have gone along, not only stayed near."""
        mine = probe(self.adapter, self.engine, self.device)

        def compare() -> None:
            for client in owned:
                theirs, where = client.probe(), f"{client.address}, {what}"
                difference = require_equal_probe(mine, theirs, self.dtype, where)
                if base is not None:
                    require_moved(base, mine, theirs, where)
                self.last_difference = max(difference, 0.0 if client is owned[0] else self.last_difference)

        comm.together(compare, self.device, ServerLostError)

    def _test_binding(self, owned: list[ServerClient], state: dict[str, Tensor], version: int) -> None:
        """One target group at a time: noise in its B, zero in all others, on both sides; then both probes must move away from the base's, alike."""
        names = self._full_names(state)
        try:
            zero = {name: _test_values(name, t, None) for name, t in state.items()}
            self.engine.set_trained({name: zero[short] for name, short in names.items()})
            base = probe(self.adapter, self.engine, self.device)
            for group in target_groups(list(state)):
                test = {name: _test_values(name, t, group) for name, t in state.items()}
                self.engine.set_trained({name: test[short] for name, short in names.items()})
                self._push_lora(owned, test, version)
                self._compare_probes(owned, f"LoRA target {group!r} with noise in it", base)
        finally:
            self.engine.set_trained({name: state[short] for name, short in names.items()})

    def _full_names(self, state: dict[str, Tensor]) -> dict[str, str]:
        """PEFT's parameter name -> the name in `state`."""
        return {name.removesuffix(".weight") + f".{LORA}.weight": name for name in state}


def target_groups(names: list[str]) -> list[str]:
    """Adapted modules grouped by what they are: their path without the block's number."""
    return sorted({_group(module) for module in lora_modules(names)})


def _group(module: str) -> str:
    parts = module.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return module if at is None else ".".join(parts[at + 1 :])


def _test_values(name: str, tensor: Tensor, group: str | None) -> Tensor:
    """lora_A as it is; lora_B noise in the group, zero elsewhere. The same on every rank."""
    if ".lora_A." in name:
        return tensor
    if _group(name.rpartition(".lora_")[0]) != group:
        return torch.zeros_like(tensor)
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(tensor.shape, generator=generator) * TEST_SCALE


def _typed(segment: Segment, dtype: torch.dtype) -> Tensor:
    assert segment.tensor is not None
    return segment.tensor.view(dtype)


def require_moved(base: Tensor, mine: Tensor, theirs: Tensor, what: str) -> None:
    """Raises WeightSyncError where the server's probe stayed at the base's: a layer that is bound and not in the path of the forward."""
    moved, apart = float((mine - base).abs().max()), float((mine - theirs).abs().max())
    if not apart < 0.5 * moved:
        raise WeightSyncError(
            f"{what}: the trainer's probe moved by {moved:.3g}, the server's is {apart:.3g} away from it: it does not use these layers"
        )


def require_bound(expected: dict[str, int], bound: dict[str, int | None], address: str) -> None:
    """Every name acknowledged, every checksum equal (None: under tensor parallelism there is none)."""
    missing = sorted(expected.keys() - bound.keys())
    if missing:
        raise WeightSyncError(
            f"{address} did not acknowledge {len(missing)} of {len(expected)} tensors, {missing[0]} among them"
        )
    wrong = [name for name, value in expected.items() if bound[name] not in (None, value)]
    if wrong:
        raise WeightSyncError(
            f"{address} holds other bits than were sent in {len(wrong)} of {len(expected)} tensors, {wrong[0]} among them"
        )
