"""Starting a rollout server as a child of the trainer: a clean environment, an address that nobody else has, a log file."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# What launchers set for their ranks: the engine would take it for its own world. And what would break its sleep (expandable segments).
LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR",
    "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME", "TRITON_INTERPRET",
)  # fmt: skip
LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "MPI_", "SLURM_")
STOP_TIMEOUT_S = 10
LOG_TAIL = 2000


def server_environment(parent: Mapping[str, str], devices: list[str] | None, threads: int) -> dict[str, str]:
    env = {
        name: value
        for name, value in parent.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
    }
    env |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return env


_numbers = itertools.count()


class ServerProcess:
    """Start it from the main thread: the kernel's parent-death signal is bound to the thread that started the child."""

    def __init__(
        self,
        python: str | None,
        config_path: Path,
        log: Path,
        replica: int,
        devices: list[str] | None,
        threads: int,
        entry: Sequence[str] = ("-m", "flowgrpo_fast.rollout.serve"),
    ) -> None:
        self.python, self.replica = python or sys.executable, replica
        # An abstract socket: no file and no port, unique by this process's id, a number that it never uses again, and the node (containers
        # give the same ids).
        self.address = f"ipc://@flowgrpo_fast-{os.uname().nodename}-{os.getpid()}-{next(_numbers)}"
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    self.python, *entry, "--config", str(config_path), "--address", self.address,
                    "--parent", str(os.getpid()),
                ],
                env=server_environment(os.environ, devices, threads),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )  # fmt: skip

    def exit_code(self) -> int | None:
        return self.process.poll()

    def log_tail(self) -> str:
        text = self.log.read_text(errors="replace")[-LOG_TAIL:]
        return f"; its log {self.log} ends:\n{text}" if text else f"; its log {self.log} is empty"

    def stop(self) -> None:
        """Waits for the server to end by itself, then ends it."""
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
