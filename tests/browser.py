"""A real browser for the tests of pages: headless Chromium."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def dom(url: str, profile: Path, milliseconds: int) -> str:
    """The document after `milliseconds` of the page's own time, in which timers run ahead and requests are waited for."""
    options = [f"--virtual-time-budget={milliseconds}", "--dump-dom", url]
    done = subprocess.run(_command(profile, options), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def told(html: str, profile: Path) -> str:
    """What the page says by fetching /told?<answer>. In real time: a video does not keep to the page's own."""
    answers: queue.Queue[str] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, answer = self.path.partition("?")
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode() if path == "/" else b"")
            if path == "/told":
                answers.put(answer)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        command = _command(profile, [f"http://127.0.0.1:{server.server_port}/"])
        # A session of its own, so that its helpers end with it.
        browser = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return answers.get(timeout=60)
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            server.shutdown()


def _command(profile: Path, options: list[str]) -> list[str]:
    assert CHROMIUM is not None, "chromium or google-chrome is needed: apt-get install chromium"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
    return [CHROMIUM, *flags, *options]
