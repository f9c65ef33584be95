#!/usr/bin/env python3
"""Servers of the tests without the 10 s of CPU that vllm's imports take each time: a process of the rollout environment imports once and forks.

`rollout.python` names this file. For a server it asks the warm process (`main` below, started by `start`) for a fork, which gets this process's
arguments, environment and output and lives as long as this process does; everything else runs in the real interpreter. The server's own code
runs unchanged. Starts with the real interpreter are in test_vllm_omni.py (counting_server.py) and in the two-rank test.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ADDRESS = "FLOWGRPO_TESTS_WARM_SERVER"
REAL = "FLOWGRPO_TESTS_ROLLOUT_PYTHON"
SERVE = ["-m", "flowgrpo_fast.rollout.serve"]


def start(python: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """The warm process; ends when its standard input does."""
    os.environ[ADDRESS] = f"flowgrpo_fast-tests-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + os.environ[ADDRESS])
    listener.listen(16)
    with listener:
        return subprocess.Popen(
            [python, __file__, "--warm", str(listener.fileno())], env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=(Path(tempfile.gettempdir()) / f"warm_python-{os.getpid()}.log").open("wb"), pass_fds=[listener.fileno()],
        )  # fmt: skip


def warm(listener: socket.socket) -> None:
    """In the rollout environment."""
    import select

    from flowgrpo_fast.rollout.vllm_omni.plugin import CPU_SWITCH

    os.environ[CPU_SWITCH] = "1"
    import vllm_omni.diffusion.diffusion_engine
    import vllm_omni.entrypoints.async_omni  # noqa: F401

    import flowgrpo_fast.rollout.serve
    import flowgrpo_fast.rollout.vllm_omni.server
    import flowgrpo_fast.rollout.vllm_omni.worker  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be in the forks"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                fork(connection)


def fork(connection: socket.socket) -> None:
    """Becomes the server that was asked for; killed as soon as who asked is gone."""
    import threading

    size, ancillary, *_ = connection.recvmsg(8, socket.CMSG_SPACE(8))
    files = array.array("i", ancillary[0][2])
    data = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    arguments, environment, folder = json.loads(data)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)

    def follow() -> None:
        connection.recv(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
    code = 1
    try:
        from flowgrpo_fast.rollout.serve import main

        code = main(arguments)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(bytes([code]))
        os._exit(code)


def ask(arguments: list[str]) -> int:
    """In the place of a server: dies with its parent, as a server does, and its fork with it."""
    import ctypes

    at = arguments.index("--parent")
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(arguments[at + 1]):
        return 1
    message = json.dumps([arguments[:at] + arguments[at + 2 :], dict(os.environ), os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + os.environ[ADDRESS])
        connection.sendmsg(
            [len(message).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))]
        )
        connection.sendall(message)
        answer = connection.recv(1)
    if not answer:  # killed: so ends who stands for it
        os.kill(os.getpid(), signal.SIGKILL)
    return answer[0]


if __name__ == "__main__":
    if sys.argv[1] == "--warm":
        sys.path[0] = str(Path(__file__).parents[1])
        warm(socket.socket(fileno=int(sys.argv[2])))
    elif sys.argv[1:3] == SERVE:
        sys.exit(ask(sys.argv[3:]))
    else:
        os.execv(os.environ[REAL], [os.environ[REAL], *sys.argv[1:]])
