"""A live page of a run, for those who train on a remote machine: curves, time left and samples, while it trains or afterwards.

    python -m flowgrpo_fast.dashboard RUN [--host 127.0.0.1] [--port 8400]

Only this machine can open it; from another one, tunnel: `ssh -L 8400:localhost:8400 trainer`, then http://localhost:8400/.
`--host 0.0.0.0` shows it to the whole network, without a password.

The server reads metrics.jsonl from where a page left off, and what lies under samples/; it keeps the metrics' names. It writes
nothing, and nothing outside samples/ can be fetched from it. The page is assets/dashboard.html with dashboard.js and page.css.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import re
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Sequence
from html import escape as esc
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from flowgrpo_fast.charts import plan_charts
from flowgrpo_fast.metrics import METRICS_FILE
from flowgrpo_fast.report import MOMENTS, PROMPTS, asset
from flowgrpo_fast.samples import moment_order, moment_words, read_prompt_samples

log = logging.getLogger(__name__)

CHUNK = 1 << 20  # of metrics.jsonl, at most, in one answer
GRIDS = 12  # newest ones listed
MEDIA = {".png": "image/png", ".mp4": "video/mp4"}
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src 'self' data:; media-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'"
)


class Dashboard:
    """The page of `run_dir`, served by a daemon thread between start() and close(). The folder may not exist yet.

    port 0 takes any free port; `url` says which. Raises OSError with the fix where the port is in use or the host is not of
    this machine, and ValueError for a port that cannot be.
    """

    def __init__(self, run_dir: Path, host: str = "127.0.0.1", port: int = 8400) -> None:
        if not 0 <= port < 65536:
            raise ValueError(f"port {port} does not exist; give one from 1024 to 65535, or 0 for any free one")
        try:
            self._server = _Server(host, port, Path(run_dir))
        except OSError as error:
            fix = "give another port, or 0 for any free one" if error.errno == errno.EADDRINUSE else "give another host"
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error})"
            raise OSError(f"dashboard: port {port} of {host} {why}; {fix}") from error
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host!s}]" if ":" in str(host) else host
        return f"http://{name!s}:{port}/"

    def start(self) -> Dashboard:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="dashboard", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop and free the port. Calling it twice, or before start(), is harmless."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, run_dir: Path) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.run = _Run(run_dir)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks the network for the host's full name, which without a resolver takes seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a page that was closed while it was answered
            super().handle_error(request, client_address)


class _Run:
    """What is read of a run's folder, at each request anew."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.samples = run_dir / "samples"
        self._lock = threading.Lock()
        # Which metrics there are is collected over all answers since this server's start. A page of a server before it
        # has another `file`, and starts again at the first row.
        self._server = secrets.token_hex(4)
        self._file = ""
        self._names: dict[str, None] = {}
        self._config: tuple[int, int | None] = (0, None)

    def page(self) -> str:
        parts = {"style": asset("page.css"), "script": asset("dashboard.js"), "name": esc(self.run_dir.resolve().name)}
        return re.sub(r"\{\{(\w+)\}\}", lambda field: parts[field[1]], asset("dashboard.html"))

    def metrics(self, start: int, file: str) -> dict[str, Any]:
        """The whole lines of metrics.jsonl from byte `start` on, as far as one answer goes, and where the next one begins.

        `file` names the file that the page has read so far. A resume puts another in its place, with fewer rows: then, and
        where `start` is not the start of a line, the answer begins at byte 0 and says `restart`.
        """
        answer: dict[str, Any] = {"rows": [], "corrupt": [], "next": 0, "more": False}
        try:
            with open(self.run_dir / METRICS_FILE, "rb") as lines:
                now_file = f"{self._server}-{os.fstat(lines.fileno()).st_ino}"
                size = lines.seek(0, 2)
                lines.seek(max(0, start - 1))
                whole = 0 < start <= size and lines.read(1) == b"\n" and file in ("", now_file)
                begin = start if whole else 0
                lines.seek(begin)
                data = lines.read(CHUNK) + lines.readline()
        except FileNotFoundError:
            now_file, begin, size, data = "", 0, 0, b""
        at = begin
        for line in data.split(b"\n")[:-1]:  # the last piece is empty, or a line that is still being written
            try:
                row = json.loads(line, parse_constant=lambda word: None)
            except ValueError:
                row = None
            if isinstance(row, dict) and type(row.get("step")) is int:
                answer["rows"].append(row)
            else:
                answer["corrupt"].append(at)
            at += len(line) + 1
        with self._lock:
            if now_file != self._file:
                self._file, self._names = now_file, {}
            for row in answer["rows"]:
                self._names |= dict.fromkeys(row)
            plans = plan_charts(self._names)
        charts = [
            {"title": p.title, "lines": p.lines, "smooth": p.smooth, "log": p.log, "label": p.label.__name__}
            for p in plans
        ]
        return answer | {
            "file": now_file,
            "restart": begin != start or (file not in ("", now_file)),
            "next": at,
            "more": begin + len(data) < size,
            "charts": charts,
            "total_steps": self._total_steps(),
            "finished": (self.run_dir / "summary.json").exists(),
            "now": time.time(),
        }

    def _total_steps(self) -> int | None:
        import yaml

        path = self.run_dir / "config.yaml"
        try:
            changed = path.stat().st_mtime_ns
            if changed != self._config[0]:
                self._config = changed, int(yaml.safe_load(path.read_text("utf-8"))["trainer"]["total_steps"])
        except (OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError, ValueError):
            return None  # not there yet, or half written: the page shows steps without an end
        return self._config[1]

    def listing(self) -> dict[str, Any]:
        """The newest grids first; and of the first prompts each one's samples, from the earliest to the latest."""
        try:
            files = [path for path in self.samples.glob("*.png") if self.served(path.name) is not None]
            files.sort(key=lambda path: (path.stat().st_mtime_ns, moment_order(path.stem)), reverse=True)
            grids = [{"moment": moment_words(path.stem), "url": self._url(path)} for path in files[:GRIDS]]
            prompts = [
                {
                    "prompt": samples[-1].prompt or f"Prompt {index}",
                    "samples": [
                        {"moment": moment_words(s.moment), "note": s.note, "url": self._url(s.path)}
                        for s in samples
                        if self.served(str(s.path.relative_to(self.samples))) is not None
                    ],
                }
                for index, samples in read_prompt_samples(self.samples, PROMPTS, MOMENTS).items()
            ]
        except FileNotFoundError:  # a new run moved the folder aside meanwhile: the next listing is of its own
            return {"grids": [], "prompts": []}
        return {"grids": grids, "prompts": [prompt for prompt in prompts if prompt["samples"]]}

    def _url(self, path: Path) -> str:
        return f"samples/{quote(path.relative_to(self.samples).as_posix())}?v={path.stat().st_mtime_ns}"

    def served(self, name: str) -> Path | None:
        """The picture or video `name` under samples/; None for anything else, also by way of `..` or of a link to outside."""
        if "\0" in name or {"", ".", ".."} & set(name.split("/")):
            return None
        try:
            path = (self.samples / name).resolve()
            inside = path.is_relative_to(self.samples.resolve()) and path.suffix in MEDIA
            return path if inside and path.is_file() else None
        except (OSError, RuntimeError):  # too long a name; a link to itself
            return None


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "flowgrpo_fast", ""
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that an idle connection keeps its thread

    def do_GET(self) -> None:
        address, _, query = self.path.partition("?")
        run, path = self.server.run, unquote(address)
        if path == "/":
            self._send(
                HTTPStatus.OK, run.page().encode(), "text/html; charset=utf-8", {"Content-Security-Policy": POLICY}
            )
        elif path == "/metrics":
            asked = parse_qs(query)
            start = asked.get("from", ["0"])[0]
            if not re.fullmatch(r"[0-9]{1,15}", start):
                self._refuse(
                    HTTPStatus.BAD_REQUEST, f"from={start} is no byte offset; it is a number from an earlier answer"
                )
            else:
                self._send_json(run.metrics(int(start), asked.get("file", [""])[0]))
        elif path == "/samples":
            self._send_json(run.listing())
        elif path.startswith("/samples/") and (file := run.served(path.removeprefix("/samples/"))) is not None:
            self._send_file(file)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "not here")

    do_HEAD = do_GET

    def _refuse_method(self) -> None:
        self.close_connection = True  # a body that was sent is not read
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this page is read only", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse_method

    def _send_file(self, file: Path) -> None:
        """Whole, or the range asked for: Safari plays no video without."""
        data, headers = file.read_bytes(), {"Accept-Ranges": "bytes", "Cache-Control": "private, max-age=3600"}
        kind, size = MEDIA[file.suffix], len(data)
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted is None or not any(wanted.groups()):
            self._send(HTTPStatus.OK, data, kind, headers)
            return
        first = int(wanted[1]) if wanted[1] else max(0, size - int(wanted[2]))
        last = min(int(wanted[2]), size - 1) if wanted[1] and wanted[2] else size - 1
        if first > last:
            headers["Content-Range"] = f"bytes */{size}"
            self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "no such range", headers)
            return
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._send(HTTPStatus.PARTIAL_CONTENT, data[first : last + 1], kind, headers)

    def _send_json(self, answer: dict[str, Any]) -> None:
        self._send(HTTPStatus.OK, json.dumps(answer, allow_nan=False).encode(), "application/json")

    def _refuse(self, status: HTTPStatus, why: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, f"{why}\n".encode(), "text/plain; charset=utf-8", headers)

    def _send(self, status: HTTPStatus, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        common = {"Content-Type": kind, "Content-Length": str(len(body)), "X-Content-Type-Options": "nosniff"}
        for name, value in (common | {"Cache-Control": "no-store"} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Not into the terminal, where the trainer shows its progress."""
        log.debug(format, *arguments)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: serves until Ctrl-C. A folder or a port that cannot be used ends it with a message and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m flowgrpo_fast.dashboard",
        description="A live page of a run. From another machine: ssh -L 8400:localhost:8400 MACHINE.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)"
    )
    parser.add_argument("--port", type=int, default=8400, help="0 takes any free one (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if not arguments.run_dir.is_dir():
        parser.error(f"{arguments.run_dir} is not a folder; give the run_dir of a run")
    try:
        dashboard = Dashboard(arguments.run_dir, arguments.host, arguments.port).start()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(dashboard.url, flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        dashboard.close()


if __name__ == "__main__":
    main()
