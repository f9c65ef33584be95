"""Rollouts, weights and messages of the real vllm-omni 0.30 on the CPU, in an environment of its own. Two engines serve the file: one takes LoRA, one full weights."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo_fast.batch import RolloutBatch
from flowgrpo_fast.config import ConfigError, SigmasConfig
from flowgrpo_fast.engine import LORA
from flowgrpo_fast.rollout.in_process import InProcessRollout
from flowgrpo_fast.rollout.vllm_omni.rollout import check_identity
from flowgrpo_fast.rollout.vllm_omni.sync import require_bound, target_groups
from flowgrpo_fast.rollout.weights import (
    FlatTensors,
    WeightSyncError,
    lora_checksums,
    lora_modules,
    probe,
    require_equal_probe,
)
from flowgrpo_fast.rollout.wire import HANDSHAKE_PROMPT, RemoteError, text_encoder_digest
from tests.engines import (
    ALPHA,
    RANK,
    ROOT,
    Running,
    groups,
    lora_server,
    lora_state,
    lora_transformer,
    mapped,
    one_thread,
    orphans,
    push_full,
    push_lora,
    running_server,
    shared_files,
    warm_servers,
)
from tests.ranks import wait_for
from tests.tiny import CPU, sampling, tiny_adapter, tiny_pipeline

__all__ = ["lora_server", "one_thread", "warm_servers"]  # fixtures, used by name


@pytest.fixture(scope="module")
def full_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("full")
    os.environ["COUNTS"] = str(folder / "counts.json")
    with running_server(folder, entry=(str(ROOT / "tests" / "counting_server.py"),)) as running:
        yield running


def assert_equal_batches(a: RolloutBatch, b: RolloutBatch) -> None:
    for name, tensor in a.tensors().items():
        assert torch.equal(tensor, b.tensors()[name]), name


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "shared noise": ({"starts": (1, 1, 1, 1)}, {"initial_noise": "group"}),
    "guided, other lengths": ({"negative": "bad"}, {"guidance_scale": 4.0}),
    "ode": ({}, {"window_size": 0}),
    "second order, old velocities": ({}, {"ode_order": 2, "keep_old_v": True, "window_size": 1}),
    "dance": ({}, {"rule": "dance", "noise_level": 0.3}),
    "cps": ({}, {"rule": "cps", "log_prob_form": "flow_grpo"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_engine_samples_the_same_bits(full_server: Running, case: str) -> None:
    """Latents, log-probs and images of the engine and of the in-process rollout, fp32, equal batch shapes."""
    requested, params = CASES[case]
    transformer = tiny_adapter().load_transformer().eval()
    push_full(full_server.client, transformer, 1)
    mine = InProcessRollout(tiny_adapter(), transformer, SigmasConfig(), CPU)
    requests, chosen = groups(**requested), sampling(**params)
    theirs = full_server.client.generate(requests, chosen, 1, case)
    assert_equal_batches(mine.generate(requests, chosen, 1), theirs)


def test_the_engine_samples_the_same_bits_with_lora_everywhere(lora_server: Running) -> None:
    """`all-linear`, image and text input layers included; another batch shape differs by rounding only."""
    transformer = lora_transformer()
    push_lora(lora_server.client, lora_state(transformer), 1)
    mine = InProcessRollout(tiny_adapter(), transformer, SigmasConfig(), CPU)
    requests, chosen = groups(negative="bad"), sampling(guidance_scale=3.0)
    together = lora_server.client.generate(requests, chosen, 1, "lora")
    assert_equal_batches(mine.generate(requests, chosen, 1), together)
    alone = [lora_server.client.generate([r], chosen, 1, f"alone-{r.group_id}") for r in requests]
    for part, whole in zip(alone, together.split_prompts(), strict=True):
        assert torch.equal(part.sample_id, whole.sample_id)
        assert float((part.latents - whole.latents).abs().max()) < 1e-5
        assert float((part.log_probs - whole.log_probs).abs().max()) < 1e-6


def test_probe_follows_every_target_group(lora_server: Running) -> None:
    """Noise in one group of layers at a time: the engine's probe is the trainer's to 10 % of what the group changes. (A LoRA on img_in once
    bound to a layer that the forward does not use.)"""
    transformer = lora_transformer()
    state = {name: t.clone() for name, t in lora_state(transformer).items()}
    base = probe(tiny_adapter(), tiny_adapter().load_transformer().eval(), CPU)
    named = dict(transformer.named_parameters())
    found = target_groups(list(state))
    assert "img_in" in found
    assert "attn.to_out.0" in found
    for version, group in enumerate(found, 100):
        for name, value in state.items():
            keep = ".lora_A." in name or name.rpartition(".lora_")[0].endswith(group)
            named[name.removesuffix(".weight") + f".{LORA}.weight"].data.copy_(
                value if keep else torch.zeros_like(value)
            )
        push_lora(lora_server.client, lora_state(transformer), version)
        mine, theirs = probe(tiny_adapter(), transformer, CPU), lora_server.client.probe()
        effect = float((mine - base).abs().max())
        assert effect > 5e-5, group
        assert float((mine - theirs).abs().max()) < 0.1 * effect, group


def test_checksums_are_of_what_is_bound(lora_server: Running) -> None:
    state = lora_state(lora_transformer(seed=3))
    bound = push_lora(lora_server.client, state, 2)
    assert bound == lora_checksums(FlatTensors.pack(state, torch.float32), ALPHA / RANK, torch.float32)
    assert len(lora_modules(list(bound))) == len(state) // 2
    other = dict(state)
    other[next(iter(other))] = next(iter(other.values())) + 1e-6
    assert lora_checksums(FlatTensors.pack(other, torch.float32), ALPHA / RANK, torch.float32) != bound


def test_only_the_version_held_is_sampled(lora_server: Running) -> None:
    push_lora(lora_server.client, lora_state(lora_transformer()), 7)
    with pytest.raises(RemoteError, match="policy version 6 was asked for, this server holds 7") as caught:
        lora_server.client.generate(groups(), sampling(), 6, "old")
    assert caught.value.kind == "StaleVersionError"
    assert lora_server.client.generate(groups(), sampling(), 7, "new").policy_version == 7


def unknown_module(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("attn.to_q", "attn.to_nothing"): t for name, t in state.items()}


def wrong_shape(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t[:, :-1] if "to_q.lora_A" in name else t for name, t in state.items()}


@pytest.mark.parametrize(
    ("change", "message"), [(unknown_module, "has no module .*to_nothing"), (wrong_shape, "to_q.lora_A.weight: shape")]
)
def test_a_lora_that_does_not_fit_is_an_error(
    lora_server: Running, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    state = lora_state(lora_transformer())
    push_lora(lora_server.client, state, 20)
    with pytest.raises(RemoteError, match=message):
        push_lora(lora_server.client, change(state), 21)
    with pytest.raises(RemoteError, match="policy version 20 was asked for"):
        lora_server.client.generate(groups(), sampling(), 20, "after a failed sync")
    push_lora(lora_server.client, state, 22)
    assert lora_server.client.generate(groups(), sampling(), 22, "after the next").policy_version == 22


def test_full_weights_after_lora_are_an_error(lora_server: Running) -> None:
    push_lora(lora_server.client, lora_state(lora_transformer()), 30)
    with pytest.raises(RemoteError, match="either LoRA or full weights"):
        push_full(lora_server.client, tiny_adapter().load_transformer(), 31)


def test_full_weights_that_do_not_fit_are_an_error(full_server: Running) -> None:
    client = full_server.client
    for name, shape, message in (
        ("transformer_blocks.0.attn.to_nothing.weight", (2, 2), "no parameter"),
        ("transformer_blocks.0.attn.to_q.weight", (3, 5), "shape \\[3, 5\\], the engine has"),
    ):
        flat = FlatTensors.pack({name: torch.zeros(shape)}, torch.float32)
        with pytest.raises(RemoteError, match=message):
            client.push("bucket", {"version": 5, "last": True}, flat, None)
    with pytest.raises(RemoteError, match="this server holds None"):
        client.generate(groups(), sampling(), 5, "half loaded")


def test_full_weights_change_the_fused_layers_too(full_server: Running) -> None:
    """Each of q, k and v, of image and text, changes the probe by 1.6e-4 to 7e-3."""
    transformer, generator = tiny_adapter().load_transformer().eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    push_full(full_server.client, transformer, 9)
    mine, theirs = probe(tiny_adapter(), transformer, CPU), full_server.client.probe()
    assert float((mine - theirs).abs().max()) < 1e-5


def test_no_pickle_and_no_list_between_engine_and_trainer(full_server: Running) -> None:
    """Counted in the server while it samples and takes weights; the client has no pickle at all."""
    transformer = tiny_adapter().load_transformer().eval()
    push_full(full_server.client, transformer, 40)
    full_server.client.generate(groups(), sampling(), 40, "first")
    before = read_counts(full_server)
    for name in ("Tensor.tolist", "Tensor.__iter__", "pickle.dumps", "ForkingPickler.dumps"):
        assert before["counts"][name] > 0, f"{name} is not counted"
    for i in range(3):
        batch = full_server.client.generate(groups(negative="bad"), sampling(guidance_scale=2.0), 40, f"counted-{i}")
        assert batch.size == 8
    push_full(full_server.client, transformer, 41)
    after = read_counts(full_server)
    assert after["counts"] == before["counts"], {
        n: after["callers"][n] for n, c in after["counts"].items() if c != before["counts"].get(n)
    }


def read_counts(running: Running) -> dict[str, Any]:
    path = Path(os.environ["COUNTS"])
    path.unlink(missing_ok=True)
    os.kill(running.process.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 20
    while not path.is_file():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return json.loads(path.read_text())


def test_replies_lie_in_shared_memory_that_nobody_has_to_remove(full_server: Running) -> None:
    push_full(full_server.client, tiny_adapter().load_transformer(), 50)
    pid = full_server.process.process.pid
    before, left = shared_files((pid, os.getpid())), orphans()
    batch = full_server.client.generate(groups(), sampling(), 50, "shared")
    assert full_server.client.shares_memory
    open_files = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    assert not [name for name in open_files if "flowgrpo_fast" in name and "memfd" in name], (
        "replies that were taken are kept"
    )
    assert shared_files((pid, os.getpid())) <= before
    wait_for(lambda: orphans() <= left, 5, "the end of every file that nobody uses")
    # All fields view one mapping, the server's: nothing was copied on this side.
    base = batch.latents.untyped_storage().data_ptr()
    assert {t.untyped_storage().data_ptr() for t in batch.tensors().values()} == {base}
    assert "memfd:flowgrpo_fast" in mapped(base)


def test_without_shared_memory_the_same_bytes_come_as_a_frame(full_server: Running) -> None:
    """What a client on another host gets."""
    push_full(full_server.client, tiny_adapter().load_transformer(), 51)
    here = full_server.client.generate(groups(), sampling(), 51, "here")
    full_server.client.shares_memory = False
    try:
        there = full_server.client.generate(groups(), sampling(), 51, "there")
    finally:
        full_server.client.shares_memory = True
    assert_equal_batches(here, there)
    assert "memfd:flowgrpo_fast" in mapped(here.latents.data_ptr())
    assert "memfd:flowgrpo_fast" not in mapped(there.latents.data_ptr())


def test_a_broken_message_is_answered_with_an_error(full_server: Running) -> None:
    socket = full_server.client._socket()
    for frames in (
        [b"{not json"],
        [b'{"protocol":2,"sizes":[100],"op":"ping","id":1}', b"short"],
        [b'{"protocol":9,"sizes":[]}'],
    ):
        socket.send_multipart(frames)
        assert socket.poll(10_000)
        header = json.loads(socket.recv_multipart()[0])
        assert header["error"]["kind"] == "WireError", header
    with pytest.raises(RemoteError, match="unknown operation"):
        full_server.client.call("nonsense")


def test_a_cancelled_request_does_not_block_the_next(full_server: Running) -> None:
    push_full(full_server.client, tiny_adapter().load_transformer(), 60)
    outcome: list[Any] = []

    def long_request() -> None:
        try:
            outcome.append(full_server.client.generate(groups(), sampling(num_steps=4000), 60, "long"))
        except RemoteError as error:
            outcome.append(error)

    thread = threading.Thread(target=long_request)
    thread.start()
    time.sleep(2)
    assert not outcome
    began = time.monotonic()
    full_server.client.call("cancel", {"key": "long"})
    assert full_server.client.generate(groups(), sampling(), 60, "next").size == 8
    assert time.monotonic() - began < 10
    thread.join(10)
    assert isinstance(outcome[0], RemoteError)


def test_sleep_sets_the_weights_aside_and_wake_brings_back_the_same_bits(full_server: Running) -> None:
    push_full(full_server.client, tiny_adapter().load_transformer(), 70)
    before = full_server.client.generate(groups(), sampling(), 70, "before")
    full_server.client.call("sleep")
    with pytest.raises(RemoteError):
        full_server.client.probe()
    full_server.client.call("wake")
    assert_equal_batches(before, full_server.client.generate(groups(), sampling(), 70, "after"))


def test_both_environments_tokenize_alike(lora_server: Running, full_server: Running) -> None:
    mine = tiny_adapter().tokenize([HANDSHAKE_PROMPT], 512).input_ids.reshape(-1)
    for running in (lora_server, full_server):
        assert torch.equal(running.identity["input_ids"], mine)
    assert lora_server.identity["embedding"] == full_server.identity["embedding"]


def test_what_is_bound_must_be_what_was_sent(lora_server: Running) -> None:
    """A server that scales the adapter differently holds other bits, and the trainer stops."""
    state = lora_state(lora_transformer())
    flat = FlatTensors.pack(state, torch.float32)
    bound = push_lora(lora_server.client, state, 80, alpha=2 * ALPHA)
    with pytest.raises(WeightSyncError, match="holds other bits than were sent in"):
        require_bound(lora_checksums(flat, ALPHA / RANK, torch.float32), bound, "the server")
    some = dict(list(bound.items())[1:])
    with pytest.raises(WeightSyncError, match=f"did not acknowledge 1 of {len(bound)} tensors"):
        require_bound(bound, some, "the server")
    mine = probe(tiny_adapter(), lora_transformer(), CPU)
    with pytest.raises(WeightSyncError, match="runs other weights than it was sent, or ignores some"):
        require_equal_probe(mine, lora_server.client.probe(), torch.float32, "the server")


def test_the_handshake_refuses_another_version_tokenizer_or_text_encoder(full_server: Running) -> None:
    identity = full_server.identity
    ids, encoder, embedding = identity["input_ids"], identity["text_encoder"], identity["embedding"]
    assert encoder == text_encoder_digest(tiny_pipeline())
    check_identity(identity, "here", ids, encoder, embedding)
    for changed, given, message in (
        (
            {"versions": {**identity["versions"], "flowgrpo_fast": "0.0.1"}},
            (ids, encoder, embedding),
            "here runs flowgrpo_fast 0.0.1",
        ),
        (
            {"versions": {**identity["versions"], "vllm-omni": "0.28.0"}},
            (ids, encoder, embedding),
            "here runs vllm-omni 0.28.0",
        ),
        ({}, (ids + 1, encoder, embedding), "tokenizes a prompt to other ids"),
        ({}, (ids, "another", embedding), "has another text encoder than the trainer's model.path"),
        ({}, (ids, encoder, embedding + 1), "encodes a prompt differently"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_identity({**identity, **changed}, "here", *given)
