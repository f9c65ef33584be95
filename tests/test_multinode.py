"""Two hosts: the launch of docs/multinode.md with a rank on each, and a rollout server reached by its address. Both give the bits of one host."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from flowgrpo_fast.checkpoint import checkpoints
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.rollout.wire import Segment
from tests import launching
from tests.hosts import HOST, INTERFACE, Host, Process, train_there, two_hosts
from tests.launching import ROOT, environment, start_ranks
from tests.ranks import Rank, preload
from tests.tiny import exported

ROLLOUT_PYTHON = os.environ.get("FLOWGRPO_ROLLOUT_PYTHON", str(ROOT / ".venv-rollout" / "bin" / "python"))
# Free on a host that nobody else is on.
PORT = 29500
STEPS = "trainer.total_steps=2"
CLOCK = ("time", "timing/", "throughput/", "memory/")


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    preload()


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as pair:
        yield pair


def arguments(run_dir: Path, *overrides: str) -> list[str]:
    """Of train.py, itself first."""
    return launching.arguments(run_dir, "engine.threads=1", STEPS, *overrides)


def finish(processes: Sequence[Process | Rank], timeout: float = 200) -> None:
    """All of them end well. Else, at once, what each has said."""
    deadline = time.monotonic() + timeout
    found: list[int | None] = [None]
    while not any(found) and None in found and time.monotonic() < deadline:
        time.sleep(0.1)
        found = [process.exit_code() for process in processes]
    said = "\n".join(f"{p.output}: {p.output.read_text()[-4000:]}" for p in processes)
    for process in processes:
        if isinstance(process, Rank) and process.is_running():
            process.process.kill()
    assert found == [0] * len(found), said


def assert_same_run(a: Path, b: Path) -> None:
    """Every metric that both have, and the trained weights, to the last bit."""
    for mine, theirs in zip(read_metrics(a), read_metrics(b), strict=True):
        common = {name for name in mine.keys() & theirs.keys() if not name.startswith(CLOCK)}
        assert {"reward/mean", "optimizer/grad_norm", "policy/loss"} <= common
        for name in common:
            assert mine[name] == theirs[name], name
    mine, theirs = exported(a), exported(b)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(t, theirs[name]) for name, t in mine.items())


def test_two_hosts_equal_one_host_bitwise(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """`deepspeed --no_ssh` on each of two hosts, one rank there: ZeRO-3, two steps, validation, a checkpoint on the shared disk.
    The hosts have no name service, so gloo is told its interface."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{host.name} slots=1\n" for host in hosts))
    launch = [str(Path(sys.executable).parent / "deepspeed"), "--no_ssh", f"--hostfile={hostfile}"]
    launch += [f"--master_addr={hosts[0].address}", f"--master_port={PORT}"]
    processes = [
        host.start(
            [*launch, f"--node_rank={i}", *arguments(tmp_path / "run")],
            environment(GLOO_SOCKET_IFNAME=INTERFACE),
            tmp_path / f"{host.name}.log",
        )
        for i, host in enumerate(hosts)
    ]
    finish([*processes, *start_ranks(2, tmp_path / "here", STEPS)])
    assert "first update: max |ratio - 1| = 0.0;" in processes[0].output.read_text()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2
    assert_same_run(tmp_path / "run", tmp_path / "here")
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    assert len(list(saved.rglob("*zero_pp_rank_*_optim_states.pt"))) == 2, "a rank's part is missing"


def test_hosts_with_disks_of_their_own_resume_from_what_both_have(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """run_dir is another disk on each host; Slurm's way to start, without the launcher. A kill has left one host without the newest checkpoint."""
    run_dir, disks = tmp_path / "run", [tmp_path / host.name for host in hosts]
    for folder in (run_dir, *disks):
        folder.mkdir()
    for host, disk in zip(hosts, disks, strict=True):
        finish([host.start(["mount", "--bind", str(disk), str(run_dir)], environment(), tmp_path / "mount.log")])
    settings = ("trainer.checkpoint_storage=local", "trainer.save_every=1", "trainer.keep_checkpoints=9")
    whole = start_ranks(2, tmp_path / "here", "trainer.total_steps=3")
    for total in (2, 3):
        command = arguments(run_dir, *settings, f"trainer.total_steps={total}")[1:]
        job = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}
        ranks = [
            Rank(
                command,
                {**job, "RANK": str(i), "GLOO_SOCKET_IFNAME": INTERFACE, HOST: str(host.first_pid)},
                tmp_path / f"{i}-{total}.log",
                train_there,
            )
            for i, host in enumerate(hosts)
        ]
        finish([*whole, *ranks])
        if total == 2:
            shutil.rmtree(disks[1] / "checkpoints" / "step-000002")
    assert_same_run(disks[0], tmp_path / "here")
    for rank, disk in enumerate(disks):
        assert [p.name for p in checkpoints(disk)] == ["step-000001", "step-000002", "step-000003"]
        states = [p.name for p in (disk / "checkpoints" / "step-000003").rglob("*_optim_states.pt")]
        assert states == [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"]


def test_a_rollout_server_on_another_host(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The real vllm-omni on one host, the trainer on the other, no memory to share: full weights and images through a socket."""
    there, here = hosts
    serve = [ROLLOUT_PYTHON, "-m", "flowgrpo_fast.rollout.serve", f"--address=tcp://0.0.0.0:{PORT}"]
    serve += [*arguments(tmp_path / "run", "rollout.backend=vllm_omni", "rollout.server.cpu=true")[1:]]
    server = there.start(serve, environment(OMP_NUM_THREADS="1"), tmp_path / "server.log")
    overrides = ["rollout.backend=vllm_omni", "rollout.server.replicas=0", "rollout.server.bucket_mb=0.1"]
    overrides.append(f"rollout.server.addresses=[tcp://{there.address}:{PORT}]")
    command, me = arguments(tmp_path / "run", *overrides)[1:], {HOST: str(here.first_pid)}
    trainer = Rank(command, me, tmp_path / "trainer.log", train_there)
    finish([trainer, *start_ranks(1, tmp_path / "here", STEPS)])
    assert_same_run(tmp_path / "run", tmp_path / "here")
    assert [row["rollout/server_failures"] for row in read_metrics(tmp_path / "run")] == [0.0, 0.0]
    assert server.exit_code() is None, "a server by hand waits for the next trainer, as long as its heartbeat says"
    server.terminate()
    finish([server])


def test_memory_of_another_host_is_not_taken_for_shared() -> None:
    """Containers give the same process ids and descriptors to the same programs: something of the right size may lie under the same address."""
    segment = Segment.create(16)
    segment.map[:] = b"what the trainer"
    assert Segment.is_here(segment.address(), b"what the trainer")
    assert not Segment.is_here(segment.address(), b"and what another")
    assert not Segment.is_here({**segment.address(), "size": 8}, b"what the")
    segment.close()
    assert not Segment.is_here(segment.address(), b"what the trainer")
