"""Training ranks as processes of their own without the launcher, forked from a server that has imported everything once (9 s each otherwise)."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

_context = multiprocessing.get_context("forkserver")


def preload() -> None:
    """Before the first rank. The server inherits the environment of now: one thread, DeepSpeed on the CPU."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    _context.set_forkserver_preload(["tests.preloaded"])


class Rank:
    """A process that runs train.py's `main`, or another one; what it prints goes to a file."""

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str],
        output: Path,
        main: Callable[[Sequence[str]], int] | None = None,
    ) -> None:
        self.output = output
        self.process: BaseProcess = _context.Process(target=_main, args=(arguments, environment, str(output), main))
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait(self, timeout: float) -> tuple[int, str]:
        """Exit code (negative: the signal) and output. Kills it after the time-out, and says so."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"still running after {timeout:g} s: {self.output.read_text()[-3000:]}")
        assert self.process.exitcode is not None
        return self.process.exitcode, self.output.read_text()

    def exit_code(self) -> int | None:
        return self.process.exitcode

    def is_running(self) -> bool:
        return self.process.is_alive()


def _main(
    arguments: list[str], environment: dict[str, str], output: str, main: Callable[[Sequence[str]], int] | None
) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), write_through=True)
    os.environ |= environment
    if main is None:
        from flowgrpo_fast.train import main
    sys.exit(main(arguments))


def wait_for(condition: object, timeout: float, what: str) -> None:
    """Polls a callable until it is true."""
    deadline = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {timeout:g} s")
        time.sleep(0.002)
