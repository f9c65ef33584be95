"""Rollout servers without an engine: settings, environments, messages, replies, heartbeat."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from flowgrpo_fast.batch import BatchError
from flowgrpo_fast.config import ConfigError, SigmasConfig
from flowgrpo_fast.inputs import Inputs
from flowgrpo_fast.rollout.base import ServerLostError
from flowgrpo_fast.rollout.in_process import InProcessRollout
from flowgrpo_fast.rollout.vllm_omni.client import ServerClient
from flowgrpo_fast.rollout.vllm_omni.plugin import PIPELINES
from flowgrpo_fast.rollout.vllm_omni.preflight import check_environment
from flowgrpo_fast.rollout.vllm_omni.process import server_environment
from flowgrpo_fast.rollout.vllm_omni.rollout import check_reply, visible_devices
from flowgrpo_fast.rollout.vllm_omni.server import EngineRpcError, RolloutServer, require_ok, require_success
from flowgrpo_fast.rollout.wire import RemoteError, Segment, WireError
from flowgrpo_fast.trainer import Trainer
from flowgrpo_fast.version import __version__
from tests.engines import (
    VLLM,
    groups,
    one_thread,
)
from tests.tiny import CPU, sampling, tiny_adapter, tiny_config

__all__ = ["one_thread"]  # a fixture, used by name


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        *VLLM,
        "rollout.server.replicas=0",
        "rollout.server.addresses=[tcp://127.0.0.1:9]",
        "rollout.server.start_timeout_s=1",
    )
    with pytest.raises(ServerLostError, match="tcp://127.0.0.1:9 did not answer 'hello' within 1 s"):
        Trainer(config, Inputs(config, 1), CPU)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.python=/usr/bin/python3-nowhere"], "is not an executable; `make setup-vllm`"),
        (["rollout.python=null"], "vllm-omni 0.30.x, which is not installed"),
        (["rollout.server.tensor_parallel_size=2"], "tensor_parallel_size 2 is larger than the 1 device"),
        (["rollout.server.cpu=false"], "needs 1 device\\(s\\), there are 0"),
        (
            ["rollout.server.engine={cache_backend: tea_cache}"],
            "engine.cache_backend = 'tea_cache' would break exactness",
        ),
        (["rollout.server.engine={enforce_eager: false}"], "compiled blocks round differently"),
        (["rollout.server.replicas=0"], "there is no server to sample from"),
        (["rollout.server.engine={dtype: null}"], "set model.dtype"),
        (
            ["algorithm.name=awm", "rollout.initial_noise=sample", "rollout.overlap=true"],
            "awm has no ratio that would correct",
        ),
    ],
)
def test_bad_settings_stop_before_anything_is_loaded(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Inputs(tiny_config(tmp_path, *VLLM, *overrides), 1)


def test_a_family_of_another_package_is_sampled_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PIPELINES, "qwen_image")
    with pytest.raises(
        ConfigError, match="model.family = 'qwen_image' has no vllm-omni pipeline with log-probs; there is flux"
    ):
        Inputs(tiny_config(tmp_path, *VLLM), 1)


def test_the_server_has_none_of_the_launchers_variables() -> None:
    launched = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_PORT": "1",
        "OMPI_COMM_WORLD_RANK": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "HOME": "/h",
    }
    found = server_environment(launched, ["3", "4"], threads=5)
    assert found == {
        "HOME": "/h", "OMP_NUM_THREADS": "5", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "3,4",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "vllm_omni", "message"),
    [
        (__version__, "0.28.0", "needs vllm-omni 0.30.x, which 0.28.0 is installed"),
        (__version__, "0.31.2", "needs vllm-omni 0.30.x, which 0.31.2 is installed"),
        (None, "0.30.0", "has no flowgrpo_fast, the trainer is"),
        ("0.0.1", "0.30.0", "has flowgrpo_fast 0.0.1, the trainer is"),
    ],
)
def test_another_environment_is_refused_by_name(ours: str | None, vllm_omni: str, message: str, tmp_path: Path) -> None:
    """An interpreter whose environment says that it has these versions."""
    fake = tmp_path / "python"
    found = json.dumps({"flowgrpo_fast": ours, "vllm": vllm_omni, "vllm-omni": vllm_omni})
    fake.write_text(f"#!/bin/sh\necho '{found}'\n")
    fake.chmod(0o755)
    with pytest.raises(ConfigError, match=message):
        check_environment(str(fake))


def test_a_reply_for_another_version_or_of_other_samples_is_refused() -> None:
    requests = groups()
    mine = InProcessRollout(tiny_adapter(), tiny_adapter().load_transformer().eval(), SigmasConfig(), CPU)
    batch = mine.generate(requests, sampling(), 3)
    check_reply(batch, requests, 3)
    with pytest.raises(BatchError, match="policy_version: the reply was made by 3, asked for was 4"):
        check_reply(batch, requests, 4)
    with pytest.raises(BatchError, match="holds other samples than were asked for"):
        check_reply(batch, requests[::-1], 3)


def test_a_corrupt_or_failing_answer_is_an_error_at_the_client() -> None:
    """A peer that answers nonsense: nothing of it is used, and nobody waits for the time-out."""
    address = f"ipc://@flowgrpo_fast-test-{os.getpid()}"
    peer = zmq.Context.instance().socket(zmq.ROUTER)
    peer.bind(address)
    client = ServerClient(address, None, timeout=20, device=CPU)
    answers: list[tuple[list[bytes], type[Exception], str]] = [
        ([b"{not json"], WireError, "corrupt header"),
        ([b'{"protocol":9,"sizes":[]}'], WireError, "speaks protocol 9, this one 2"),
        ([b'{"protocol":2,"sizes":[8],"id":3}', b"1234"], WireError, "a buffer of 8 bytes came with 4"),
        ([b'{"protocol":2,"sizes":[],"id":null,"error":{"kind":"WireError","message":"unreadable"}}'], RemoteError, "unreadable"),
        ([b'{"protocol":2,"sizes":[],"id":5,"error":{"kind":"EngineDeadError","message":"gone"}}'], ServerLostError, "is dead: gone"),
    ]  # fmt: skip

    def answer() -> None:
        for frames, _, _ in answers:
            identity, *_ = peer.recv_multipart()
            peer.send_multipart([identity, *frames])

    thread = threading.Thread(target=answer)
    thread.start()
    for _, kind, message in answers:
        with pytest.raises(kind, match=message):
            client.call("ping")
    thread.join(5)
    peer.close(linger=0)
    assert client.lost is not None


def test_a_server_without_a_trainer_stops_by_itself() -> None:
    """The heartbeat counts from the first message on, and replies that nobody takes are dropped."""

    async def scenario() -> tuple[bool, bool, int]:
        server = RolloutServer(tiny_config(Path("unused")), "", heartbeat=0.5)
        watcher = asyncio.create_task(server._watch())
        server.replies[1] = Segment.create(8), time.monotonic() - 3600
        await asyncio.sleep(1.5)
        before, kept = server.stopping.is_set(), len(server.replies)
        server.last_heard = time.monotonic()
        await asyncio.wait_for(server.stopping.wait(), 5)
        watcher.cancel()
        return before, server.stopping.is_set(), kept

    assert asyncio.run(scenario()) == (False, True, 0)


def test_servers_get_the_devices_that_the_trainer_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-7f")
    assert visible_devices(None) == ["4", "5", "GPU-7f"]
    assert visible_devices([1, 3]) == ["1", "3"]


def test_a_truncated_segment_is_refused() -> None:
    segment = Segment.create(64)
    with pytest.raises(Exception, match="another size than the 128 bytes announced"):
        Segment.open({**segment.address(), "size": 128})
    segment.close()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([], "flowgrpo_load: no worker answered"),
        ([[]], "flowgrpo_load: no worker answered"),
        ([[{"supported": False, "error": "no such method"}]], "flowgrpo_load: no such method"),
        ([[{"ok": True}], [{"ok": False, "error": "wrong shape"}]], "flowgrpo_load: wrong shape"),
        ([[{"ok": True}, None]], "flowgrpo_load: None"),
        ([[{"ok": 1}]], "flowgrpo_load: {'ok': 1}"),
    ],
)
def test_an_answer_that_is_no_success_is_an_error(answers: Any, message: str) -> None:
    """As vllm-omni hands them over, nested by stage and worker."""
    with pytest.raises(EngineRpcError, match=re.escape(message)):
        require_ok(answers, "flowgrpo_load")
    assert require_ok([[{"ok": True, "bound": 3}], [{"ok": True}]], "x") == [{"ok": True, "bound": 3}, {"ok": True}]


def test_a_failed_sleep_is_an_error() -> None:
    """vllm-omni says so in the status only, and the next request would hang."""
    done, failed = (
        SimpleNamespace(status=status, error_msg=why) for status, why in (("SUCCESS", None), ("ERROR", "no allocator"))
    )
    require_success([done], "sleep")
    for acknowledgements, message in (([], "sleep: []"), ([done, failed], "sleep: .*no allocator")):
        with pytest.raises(EngineRpcError, match=message.replace("[]", r"\[\]")):
            require_success(acknowledgements, "sleep")
