"""Two hosts on one machine, for tests: each has its own network, host name, process ids, mounts and /dev/shm; a virtual cable joins them, and the
disk is shared storage. Nothing has a name that another test could meet. A host ends with the pipe to its first process, whatever closes it, kill -9
of the tests too: the kernel then ends all its processes and removes its end of the cable."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

NEEDED = "two hosts on one machine need Linux namespaces: CAP_SYS_ADMIN and CAP_NET_ADMIN (root, or a container started with --privileged), unshare, nsenter and ip"
INTERFACE = "eth0"
HOST = "FLOWGRPO_TESTS_HOST"  # environment variable: the process id of a host's first process


def train_there(arguments: Sequence[str]) -> int:
    """train.py's main on the host that $FLOWGRPO_TESTS_HOST names: for ranks that are forked here (tests/ranks.py), without the 9 s of imports that each
    process started there has. Killed, the rank leaves its child to the end of the host."""
    from flowgrpo_fast.train import main

    folder, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    # The mounts last: with them the other files have other names.
    for space in ("net", "uts", "ipc", "pid", "mnt"):
        descriptor = os.open(f"/proc/{os.environ[HOST]}/ns/{space}", os.O_RDONLY)
        if libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns {space}")
        os.close(descriptor)
    os.chdir(folder)
    # Process ids are those of the host for children only.
    child = os.fork()
    return main(list(arguments)) if child == 0 else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Process:
    """A process of a host. `nsenter` waits for it here, and passes its exit code on but no signal."""

    def __init__(self, entered: subprocess.Popen[bytes], output: Path) -> None:
        self._entered, self.output = entered, output

    def exit_code(self) -> int | None:
        return self._entered.poll()

    def terminate(self) -> None:
        os.kill(_child(self._entered.pid), signal.SIGTERM)


class Host:
    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        # `cat` is process 1 of the host, and ends when its input does.
        script = f"hostname {name} && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && echo up && exec cat"
        spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self.holder = subprocess.Popen(
            ["unshare", *spaces, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.holder.stdout is not None
        said = self.holder.stdout.readline()
        if said != "up\n":
            raise RuntimeError(f"{NEEDED}. {said}{self.holder.stdout.read()}")
        self.first_pid = _child(self.holder.pid)

    def start(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> Process:
        """In the folder of its output."""
        enter = ["nsenter", f"--target={self.first_pid}", "--all", f"--wdns={output.parent}"]
        with output.open("w") as file:
            entered = subprocess.Popen(
                [*enter, *command], env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        return Process(entered, output)

    def connect(self) -> None:
        inside = ["nsenter", f"--target={self.first_pid}", "--net", "ip"]
        _run([*inside, "addr", "add", f"{self.address}/24", "dev", INTERFACE])
        _run([*inside, "link", "set", INTERFACE, "up"])

    def close(self) -> None:
        self.holder.communicate()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    with ExitStack() as stack:
        hosts = []
        for name, address in (("node0", "10.77.0.1"), ("node1", "10.77.0.2")):
            hosts.append(Host(name, address))
            stack.callback(hosts[-1].close)
        a, b = hosts
        ends = [f"netns {a.first_pid} type veth", f"peer name {INTERFACE} netns {b.first_pid}"]
        _run(["ip", "link", "add", INTERFACE, *" ".join(ends).split()])
        a.connect()
        b.connect()
        yield a, b


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{NEEDED}. {' '.join(command)}: {done.stderr.strip()}")
