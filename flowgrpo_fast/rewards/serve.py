"""A reward behind HTTP, for `rewards: [{name: http, kwargs: {url: "http://host:8500/score"}}]` on other machines.

    python -m flowgrpo_fast.rewards.serve --reward ocr --kwargs '{"rec_image_shape": [3, 48, 64]}' [--host 0.0.0.0] [--port 8500]

POST /score takes and answers what rewards/http.py describes; GET /health answers 200. There is no authentication: use it inside a private network.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from flowgrpo_fast.rewards.base import Reward, build_reward
from flowgrpo_fast.rewards.http import JSON, SAFETENSORS, decode_request, encode_scores
from flowgrpo_fast.rewards.manager import TRANSIENT, per_sample


class RewardServer(ThreadingHTTPServer):
    """One call of the reward at a time: its libraries need not be safe for threads."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], reward: Reward) -> None:
        super().__init__(address, Handler)
        self.reward, self.lock = reward, threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/health" else 404, b"ok\n" if self.path == "/health" else b"GET /health\n")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = self.headers.get_content_type()
        if self.path != "/score":
            return self.answer(404, b"POST /score\n")
        if kind not in (SAFETENSORS, JSON):
            return self.answer(415, f"Content-Type {kind}: send {SAFETENSORS} or {JSON}\n".encode())
        try:
            images, prompts, metadata = decode_request(kind, body)
            with self.server.lock, torch.no_grad():
                result = self.server.reward(images, prompts, metadata)
            self.answer(200, encode_scores(kind, per_sample(result, len(prompts))), kind)
        except TRANSIENT as error:
            self.answer(503, f"{error}\n".encode())
        except ValueError as error:
            self.answer(400, f"{error}\n".encode())
        except Exception as error:
            self.answer(422, f"{type(error).__name__}: {error}\n".encode())

    def answer(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet: a run makes thousands of requests."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flowgrpo_fast.rewards.serve", description="A reward behind HTTP.")
    parser.add_argument("--reward", required=True, help="a registered name, or module:function")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="JSON, as in a config")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8500, help="0: any free one")
    arguments = parser.parse_args(argv)
    try:
        server = RewardServer((arguments.host, arguments.port), build_reward(arguments.reward, arguments.kwargs))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"serving {arguments.reward} on http://{arguments.host}:{server.server_address[1]}/score", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
