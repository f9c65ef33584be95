"""How a run ends before its last step: asked to (SIGTERM, Ctrl-C, a launcher that is gone), or hung.

Asked to: the step under way ends or its rollout is dropped, all ranks save, and exit 0. Hung: a rank that makes no progress for
engine.timeout_s prints the stacks of all its threads and exits, which ends the others.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

WATCH_S = 0.5
_timeout_s: float | None = None


class Stopped(Exception):
    """All ranks agreed to end here. Not an error."""


class StopRequest:
    """`reason` says why this rank wants to stop, or is None. Ranks agree at the next safe point, not here.

    The `deepspeed` launcher passes no signal on when it is killed: its ranks would train on, unseen. So they watch it.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._asked, self._closed = threading.Event(), threading.Event()
        self._on_request: Callable[[], None] = lambda: None
        self._launchers = launchers(os.getppid())
        self._watcher = threading.Thread(target=self._watch, name="stop-request", daemon=True)
        self._before = {}
        # Handlers can be set in the main thread only; elsewhere (a notebook's) the launcher is still watched.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        self._watcher.start()

    def on_request(self, interrupt: Callable[[], None]) -> None:
        """Called once, from another thread, when there is a request: to cut short what takes long."""
        self._on_request = interrupt

    def ask(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
        self._asked.set()

    def close(self) -> None:
        """Signals do again what they did before."""
        self._closed.set()
        self._asked.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._watcher.join()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C: at once
        self.ask(signal.Signals(number).name)

    def _watch(self) -> None:
        while not self._asked.wait(WATCH_S):
            gone = [pid for pid, born in self._launchers.items() if _birth(pid) != born]
            if gone:
                self.ask(f"the deepspeed launcher (process {gone[0]}) is gone")
        if not self._closed.is_set():
            self._on_request()


def launchers(pid: int) -> dict[int, int]:
    """The ancestors from `pid` upwards that belong to `deepspeed`, with their birth times (ids are reused)."""
    found = {}
    while pid > 1:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            parent = int(_stat(pid)[1])
        except (OSError, IndexError):
            break
        if any(
            part.endswith((b"deepspeed", b"deepspeed.launcher.launch", b"deepspeed/launcher/launch.py"))
            for part in command
        ):
            found[pid] = _birth(pid)
        pid = parent
    return {pid: born for pid, born in found.items() if born is not None}


def _birth(pid: int) -> int | None:
    """Start time in clock ticks since boot; None where the process is gone or a zombie."""
    try:
        fields = _stat(pid)
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _stat(pid: int) -> list[str]:
    """/proc/<pid>/stat from the state on: [state, parent, ...]."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def watch_progress(timeout_s: float) -> None:
    """From now on, `alive()` has to be called at least every timeout_s seconds, or this process prints its stacks and exits 1."""
    global _timeout_s
    _timeout_s = timeout_s
    alive()


def alive() -> None:
    """Something was finished: a batch, a reward, a phase."""
    if _timeout_s is not None:
        # A timer thread in C, which needs no GIL: it fires in a native call that never returns, too.
        faulthandler.dump_traceback_later(_timeout_s, exit=True, file=2)


def end_watch() -> None:
    global _timeout_s
    _timeout_s = None
    faulthandler.cancel_dump_traceback_later()
