"""Servers and trainers over the real vllm-omni on the CPU, shared by the tests of test_vllm_omni*.py."""

from __future__ import annotations

import atexit
import functools
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from torch import Tensor, nn

from flowgrpo_fast.config import Config
from flowgrpo_fast.engine import LORA
from flowgrpo_fast.inputs import Inputs
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.rollout.vllm_omni.client import ServerClient
from flowgrpo_fast.rollout.vllm_omni.process import ServerProcess, server_environment
from flowgrpo_fast.rollout.weights import FlatTensors, checksum, lora_modules, lora_tensors
from flowgrpo_fast.train import settle_environment
from flowgrpo_fast.trainer import Trainer
from tests import warm_python
from tests.tiny import CPU, exported, request, tiny_adapter, tiny_config

ROOT = Path(__file__).parents[1]
PYTHON = os.environ.get("FLOWGRPO_ROLLOUT_PYTHON", str(ROOT / ".venv-rollout" / "bin" / "python"))
RANK, ALPHA = 4, 8.0
TRAINED = ("reward/", "advantage/", "policy/", "optimizer/", "validation/")
VLLM = (
    "rollout.backend=vllm_omni",
    "rollout.server.cpu=true",
    f"rollout.python={warm_python.__file__}",
    "rollout.server.threads=1",
)
LORA_RUN = ("model.train=lora", f"model.lora.rank={RANK}", f"model.lora.alpha={ALPHA}")


os.environ[warm_python.REAL] = PYTHON


@functools.cache
def start_warm_python() -> None:
    """Once a test process: imports begin while the trainer's side of the first test is built."""
    warm = warm_python.start(PYTHON, server_environment(os.environ, None, 1))
    atexit.register(warm.kill)


@pytest.fixture(scope="module", autouse=True)
def warm_servers() -> None:
    start_warm_python()


@pytest.fixture(scope="module", autouse=True)
def one_thread(process_group: None) -> None:
    settle_environment(tiny_config(Path("unused"), "engine.threads=1"), None)


def run_trainer(config: Config) -> Trainer:
    return finish(Trainer(config, Inputs(config, 1), CPU))


def finish(trainer: Trainer) -> Trainer:
    try:
        trainer.run()
    finally:
        trainer.engine.close()
        trainer.rollout.close()
    return trainer


@dataclass
class Running:
    process: ServerProcess
    client: ServerClient
    identity: dict[str, Any]


@contextmanager
def running_server(folder: Path, *overrides: str, entry: tuple[str, ...] | None = None) -> Iterator[Running]:
    config_path = folder / "config.yaml"
    config_path.write_text(tiny_config(folder, *VLLM, *overrides).to_yaml())
    log = folder / "server.log"
    if entry is None:
        process = ServerProcess(warm_python.__file__, config_path, log, 0, None, 1)
    else:
        process = ServerProcess(PYTHON, config_path, log, 0, None, 1, entry)
    client = ServerClient(process.address, process, timeout=120, device=CPU)
    try:
        yield Running(process, client, client.hello(180))
    finally:
        client.close()


@pytest.fixture(scope="module")
def lora_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("lora"), *LORA_RUN) as running:
        yield running


@pytest.fixture(scope="module")
def full_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("full")) as running:
        yield running


def lora_transformer(seed: int = 0, targets: str | list[str] = "all-linear") -> nn.Module:
    """The tiny network with a LoRA whose B is not zero."""
    transformer = tiny_adapter().load_transformer().eval()
    transformer.add_adapter(PeftLoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets), adapter_name=LORA)
    generator = torch.Generator().manual_seed(seed)
    for parameter in transformer.parameters():
        if parameter.requires_grad and parameter.dim() == 2 and parameter.shape[1] == RANK:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return transformer


def lora_state(transformer: nn.Module) -> dict[str, Tensor]:
    return lora_tensors({name: p.detach() for name, p in transformer.named_parameters() if ".lora_" in name}, LORA)


def push_lora(client: ServerClient, state: dict[str, Tensor], version: int, **changes: Any) -> dict[str, int | None]:
    header = {"version": version, "rank": RANK, "alpha": ALPHA, **changes}
    bound, modules = client.push("lora", header, FlatTensors.pack(state, torch.float32), None)
    assert modules == len(lora_modules(list(state)))
    return bound


def push_full(client: ServerClient, transformer: nn.Module, version: int) -> None:
    """In two buckets; what the engine's layers then hold is what was sent."""
    state = [(name, p.detach()) for name, p in transformer.named_parameters()]
    for part, last in ((state[::2], False), (state[1::2], True)):
        bound, _ = client.push(
            "bucket", {"version": version, "last": last}, FlatTensors.pack(dict(part), torch.float32), None
        )
        assert bound == {name: checksum(tensor) for name, tensor in part}


def assert_same_training(a: Path, b: Path) -> None:
    """Every metric of rewards, advantages, updates and validation that both have, and the exported weights, to the last bit."""
    for mine, theirs in zip(read_metrics(a), read_metrics(b), strict=True):
        common = {name for name in mine.keys() & theirs.keys() if name.startswith(TRAINED)}
        assert {"reward/mean", "policy/loss", "optimizer/grad_norm"} <= common
        for name in common:
            assert mine[name] == theirs[name], name
    weights, others = exported(a), exported(b)
    assert weights.keys() == others.keys()
    assert all(torch.equal(t, others[name]) for name, t in weights.items())


def mapped(address: int) -> str:
    """What this process has mapped there: its line of /proc/self/maps."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line
    raise LookupError(hex(address))


def shared_files(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm that these processes have mapped."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # gone by now
            found |= set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
    return found


def orphans() -> set[str]:
    """Names of our files in /dev/shm that no process has mapped: tests on the other worker make some that are in use."""
    names = {path.name for path in Path("/dev/shm").iterdir() if path.stat().st_uid == os.getuid()}
    return names - shared_files(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


PROMPTS = ("two words", "a much longer prompt with many more words in it")


def groups(negative: str | None = None, starts: tuple[int, ...] = (0, 0, 1, 1), count: int = 2) -> list[Any]:
    return [request(prompt, i, list(starts), negative) for i, prompt in enumerate(PROMPTS[:count])]
