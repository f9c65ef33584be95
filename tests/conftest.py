"""Shared by all tests: fresh memory is poisoned, and the tests of the ops run on every backend that runs on a CPU."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

# The trainer tests compare bits between CPU ranks, on CUDA machines too. DeepSpeed reads this when it is imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# What tests compile is compiled quickly, the wheel included, and lies apart from what users' runs compile.
os.environ.setdefault("CXX", str(Path(__file__).parent / "quick_g++"))
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).parents[1] / "build" / "torch_extensions"))
# Without a GPU the Triton kernels run in Triton's interpreter, which has to be chosen before their import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from flowgrpo_fast.ops import BackendFallbackWarning, _registry, use_backend

OP_TESTS = ("sde_step", "sde_log_prob", "group_advantage", "policy_loss", "cfg_combine", "flow_grpo_loss")
CPU_BACKENDS = ["reference", *(b for b in ("cpp", "triton") if _registry._find("sde_step", b, "cpu"))]
# Triton's interpreter takes 10 to 1,000 times as long as the kernels of csrc/. test_backends.py compares its bits with the reference's
# for every op; so these need not run on it again:
INTERPRETED_ELSEWHERE = (
    "batch_invariance",  # of the reference, whose bits Triton's are
    "as_accurate_as_eager",  # the same
    "opcheck",  # of the registration, which the backends share
    "compiles_without",
    "equal_rewards",
    "clip_bounds",
    "test_row_19",
    # Shapes and lengths whose code paths others share.
    "(2, 2, 3, 4, 5)",
    "(3, 1)",
    "65536",
    "65537",
    "257",
)
# With a file to a worker, the longest first: a late one would keep the other worker waiting for minutes.
LONGEST_FIRST = (
    "test_trainer",
    "test_aot",  # not beside test_trainer: test_launch, which would wait for the same first compilation of a DeepSpeed op
    "test_faults",
    "test_engine",
    "test_install",
    "test_vllm_omni_faults",
    "test_vllm_omni",
    "test_vllm_omni_training",
    "test_launch",
    "test_scaling",
    "test_vllm_omni_families",
    "test_matrix",
    "test_multinode",
    "test_backends",
    "test_forward",
    "test_recipes",
    "test_sde_step",
    "test_sde_log_prob",
    "test_flow_grpo_loss",
)


@pytest.fixture(scope="session")
def process_group() -> Iterator[None]:
    """One rank in this process. Once per test process: DeepSpeed keeps groups of the first for ever, and a second would not know them."""
    from flowgrpo_fast import comm
    from flowgrpo_fast.train import settle_environment
    from tests.tiny import tiny_config

    settle_environment(tiny_config(Path("unused"), "engine.threads=1"), None)
    comm.initialize()
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def threads_stay_as_they_were() -> Iterator[None]:
    """Two workers with both cores each take up to ten times as long (OpenMP's barriers): what a run sets must not outlive its test."""
    before, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    yield
    torch.set_num_threads(before)
    os.environ.pop("OMP_NUM_THREADS", None) if variable is None else os.environ.update(OMP_NUM_THREADS=variable)


@pytest.fixture(autouse=True)
def poisoned_empty() -> Iterator[None]:
    """torch.empty & co return NaN (floating) or the dtype's maximum (integers) while deterministic mode is on."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.removeprefix("test_") in OP_TESTS:
        metafunc.parametrize("op_backend", CPU_BACKENDS, indirect=True)


@pytest.fixture(autouse=True)
def op_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str | None]:
    """The backend that the test's ops run on; falling back from it is an error, as from those that test_backends.py chooses itself."""
    name = getattr(request, "param", None)
    if name is None and request.path.stem != "test_backends":
        yield None
        return
    monkeypatch.setattr(_registry, "_announced", set())  # said once a process: only the first test would hear it
    with use_backend(name) if name else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("error", BackendFallbackWarning)
        warnings.filterwarnings("ignore", ".*rescales tokens of more than 1024 channels", BackendFallbackWarning)
        yield name


def pytest_report_header() -> list[str]:
    nvcc = shutil.which("nvcc") or "not found: the .cu gate of test_aot.py is not collected"
    hosts = (
        "can be made"
        if can_make_hosts()
        else "cannot be made (root is needed): test_multinode.py's two hosts are not collected"
    )
    return [f"op backends on the CPU: {', '.join(CPU_BACKENDS)}", f"nvcc: {nvcc}", f"network namespaces: {hosts}"]


def pytest_collection_finish() -> None:
    """What is imported by now stays: garbage collections need not look through it, of which DeepSpeed asks for one with every partitioned network."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or Triton's bindings report every one of their objects as leaked


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {item: i for i, item in enumerate(items)}
    dropped = [item for item in items if _is_dropped(item.name)]
    config.hook.pytest_deselected(items=dropped)
    rank = {name: i for i, name in enumerate(LONGEST_FIRST)}
    items[:] = sorted(set(items) - set(dropped), key=lambda item: (rank.get(item.path.stem, len(rank)), order[item]))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@functools.cache
def can_make_hosts() -> bool:
    """May this user make network, process and mount namespaces, as tests/hosts.py does?"""
    command = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "ip", "link", "set", "lo", "up"]
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _is_dropped(name: str) -> bool:
    if name.startswith("test_nvcc"):
        return shutil.which("nvcc") is None
    if name.startswith(("test_two_hosts", "test_hosts_with", "test_a_rollout_server_on_another_host")):
        return not can_make_hosts()
    # Tokens of one channel are in no other test of Triton.
    if name.startswith("test_equal_bits") and "(3, 1)-dtype0" in name:
        return False
    interpreted = "[triton" in name and not torch.cuda.is_available()
    return interpreted and any(part in name for part in INTERPRETED_ELSEWHERE)
