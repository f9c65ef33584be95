"""Rewards behind HTTP: the reference server and its client, and a judge behind an OpenAI-style server, on this machine."""

from __future__ import annotations

import base64
import io
import json
import math
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from flowgrpo_fast.rewards import RewardManager, RewardSpec, TransientRewardError, build_reward
from flowgrpo_fast.rewards.http import HttpReward
from flowgrpo_fast.rewards.judge import VlmJudge
from flowgrpo_fast.rewards.serve import RewardServer

PROMPTS = ["a", "b", "ü and 字"]
METADATA: list[dict[str, Any]] = [{"k": 1}, {}, {"text": "ja"}]


def images(count: int = 3) -> Tensor:
    return torch.randint(0, 256, (count, 3, 8, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def seen(pictures: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Depends on everything that was sent."""
    mean = pictures.flatten(1).double().mean(1)
    extra = torch.tensor([len(p.encode()) + len(json.dumps(m)) for p, m in zip(prompts, metadata, strict=True)])
    return {"reward": mean + extra, "mean": mean}


@contextmanager
def serving(reward: Any) -> Iterator[str]:
    server = RewardServer(("127.0.0.1", 0), reward)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/score"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("kind", ["safetensors", "json"])
def test_scores_are_those_of_the_reward_itself(kind: str) -> None:
    with serving(seen) as url:
        scores = HttpReward(url, format=kind, batch_size=2)(images(), PROMPTS, METADATA)
    for name, values in seen(images(), PROMPTS, METADATA).items():
        torch.testing.assert_close(scores[name], values.float())


def test_videos_go_as_safetensors() -> None:
    videos = images(6).view(3, 2, 3, 8, 6)
    with serving(seen) as url:
        scores = HttpReward(url)(videos, PROMPTS, METADATA)
        torch.testing.assert_close(scores["reward"], seen(videos, PROMPTS, METADATA)["reward"].float())
        with pytest.raises(ValueError, match="set format to safetensors"):
            HttpReward(url, format="json")(videos, PROMPTS, METADATA)


@pytest.mark.parametrize("kind", ["safetensors", "json"])
def test_a_sample_without_a_score_stays_without_one(kind: str) -> None:
    with serving(lambda pictures, *_: torch.tensor([1.0, math.nan, 2.0])) as url:
        scores = HttpReward(url, format=kind)(images(), PROMPTS, METADATA)["reward"]
    assert scores.isnan().tolist() == [False, True, False]


def failing(error: Exception) -> Callable[..., Tensor]:
    def reward(*_: Any) -> Tensor:
        raise error

    return reward


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (TransientRewardError("warming up"), TransientRewardError, "answered 503: warming up"),
        (ValueError("no such prompt"), ValueError, "answered 400: no such prompt"),
        (ConnectionResetError("its own backend"), TransientRewardError, "answered 503: its own backend"),
        (KeyError("x"), ValueError, "answered 422: KeyError: 'x'"),
    ],
)
def test_errors_say_whether_asking_again_helps(error: Exception, kind: type[Exception], message: str) -> None:
    with serving(failing(error)) as url, pytest.raises(kind, match=message):
        HttpReward(url)(images(), PROMPTS, METADATA)


def test_a_server_that_is_down_is_waited_for() -> None:
    """Through the manager: the first calls fail, then the server comes up at that address."""
    with serving(seen) as url:
        pass
    port = int(url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(TransientRewardError, match="refused"):
        HttpReward(url)(images(), PROMPTS, METADATA)
    manager = RewardManager([RewardSpec("http", {"url": url})], max_retries=50, backoff_s=0.05)
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(manager.score(images(), PROMPTS, METADATA)))
    thread.start()
    time.sleep(0.3)
    server = RewardServer(("127.0.0.1", port), seen)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    thread.join(30)
    server.shutdown()
    server.server_close()
    manager.close()
    assert result[0].valid.all()


def test_a_slow_answer_is_a_timeout() -> None:
    with serving(lambda pictures, *_: time.sleep(1) or pictures.flatten(1).float().mean(1)) as url:
        with pytest.raises(TransientRewardError, match="timed out|Timeout"):
            HttpReward(url, timeout_s=0.2)(images(), PROMPTS, METADATA)


def test_an_answer_of_another_length_is_an_error_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda *_: torch.zeros(2)) as url:
        with pytest.raises(ValueError, match="answered 400: 'reward' must hold 3 real values"):
            HttpReward(url)(images(), PROMPTS, METADATA)
        monkeypatch.setattr("flowgrpo_fast.rewards.serve.per_sample", lambda result, n: {"reward": result})
        with pytest.raises(ValueError, match=r"answered reward of shape \[2\] to 3 samples"):
            HttpReward(url)(images(), PROMPTS, METADATA)


@pytest.mark.parametrize("format_", ["safetensors", "json"])
def test_whatever_a_reward_may_return_can_be_served(format_: str) -> None:
    same = torch.tensor([1.0, 2.0, 3.0])
    for result in ([1, 2, 3], same.numpy(), {"reward": same, "raw": same}):
        with serving(lambda *_, result=result: result) as url:  # type: ignore[misc]
            assert torch.equal(HttpReward(url, format=format_)(images(), PROMPTS, METADATA)["reward"], same)


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [(b"\x80\x04N.", "application/octet-stream", 415), (b"nonsense", "application/json", 400), (b"\xff" * 20, "application/vnd.safetensors", 400)],
)  # fmt: skip
def test_what_is_no_request_is_refused(body: bytes, kind: str, status: int) -> None:
    """A pickle above all."""
    with serving(seen) as url, pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": kind}), timeout=5)
    assert caught.value.code == status


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"url": "localhost:8500"}, "must begin with http"),
        ({"url": "http://x", "format": "pickle"}, "must be one of safetensors, json"),
        ({"url": "http://x", "timeout_s": 0}, "timeout_s must be positive"),
    ],
)
def test_bad_settings(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_reward("http", kwargs)


def test_the_server_by_its_command() -> None:
    command = [sys.executable, "-m", "flowgrpo_fast.rewards.serve", "--reward", "jpeg_compressibility", "--kwargs", '{"quality": 50}', "--port", "0"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with urllib.request.urlopen(url.replace("/score", "/health"), timeout=5) as answer:
            assert answer.status == 200
        found = HttpReward(url)(images(), PROMPTS, METADATA)["reward"]
    finally:
        process.terminate()
        process.wait()
    torch.testing.assert_close(
        found, build_reward("jpeg_compressibility", {"quality": 50})(images(), PROMPTS, METADATA)
    )


class Judge(BaseHTTPRequestHandler):
    """As vllm's server answers: says how bright the pictures are, in words."""

    requests: list[dict[str, Any]]

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append({"path": self.path, **request})
        content = request["messages"][0]["content"]
        pictures = [
            base64.b64decode(c["image_url"]["url"].partition(",")[2]) for c in content if c["type"] == "image_url"
        ]
        light = [
            torch.frombuffer(bytearray(Image.open(io.BytesIO(p)).tobytes()), dtype=torch.uint8).float().mean()
            for p in pictures
        ]
        text = f"There are 3 things to see. Score: {float(sum(light)) / len(light) / 25.5:.3f}"
        if "silent" in content[-1]["text"]:
            text = "I cannot say."
        body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def judge() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    requests: list[dict[str, Any]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Judge,), {"requests": requests}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1", requests
    server.shutdown()
    server.server_close()


def test_a_judge_scores_what_it_sees(judge: tuple[str, list[dict[str, Any]]]) -> None:
    url, requests = judge
    question = "Does it show {prompt} ({style})?"
    reward = VlmJudge(url, "a-model", question=question)
    scores = reward(images(), ["a cat", "a dog", "something silent"], [{"style": "oil"}] * 3)
    light = images().flatten(1).float().mean(1) / 255
    torch.testing.assert_close(scores[:2], light[:2], rtol=0, atol=1e-3)
    assert bool(scores[2].isnan()), "no number: no score"
    assert {r["path"] for r in requests} == {"/v1/chat/completions"}
    assert {r["messages"][0]["content"][-1]["text"] for r in requests} >= {"Does it show a cat (oil)?"}
    assert all(r["temperature"] == 0.0 and r["model"] == "a-model" for r in requests)


def test_a_judge_sees_some_frames_of_a_video(judge: tuple[str, list[dict[str, Any]]]) -> None:
    url, requests = judge
    videos = images(9)[None]
    scores = VlmJudge(url, "m", frames=3)(videos, ["a"], [{}])
    shown = videos[0, [0, 4, 8]].float().mean() / 255
    assert float(scores[0]) == pytest.approx(float(shown), abs=1e-3)
    assert len(requests[0]["messages"][0]["content"]) == 4


def test_a_judge_of_an_edit_sees_both_images(judge: tuple[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    url, requests = judge
    before = torch.full((3, 8, 12), 100, dtype=torch.uint8)
    Image.fromarray(before.permute(1, 2, 0).numpy()).save(tmp_path / "before.png")
    VlmJudge(url, "m")(images(), ["make it blue"] * 3, [{"source_images": [str(tmp_path / "before.png")]}] * 3)
    *shown, text = requests[0]["messages"][0]["content"]
    first = Image.open(io.BytesIO(base64.b64decode(shown[0]["image_url"]["url"].partition(",")[2])))
    assert (len(shown), first.size, first.getpixel((0, 0))) == (2, images().shape[:-3:-1], (100, 100, 100))
    assert "edited as follows: make it blue" in text["text"]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("8", 0.8), ("8/10", 0.8), ("Score: 7.5 out of 10.", 0.75), ("**8**", 0.8), ("Three of 4 are right.\nScore: 9", 0.9), ("10 / 10", 1.0), ("0", 0.0),
        ("7 (on a scale of 0 to 10)", math.nan), ("8-9", math.nan), ("85", math.nan), ("-3", math.nan), ("none", math.nan), ("", math.nan),
    ],
)  # fmt: skip
def test_the_number_at_the_end_of_an_answer(text: str, score: float) -> None:
    """Nothing is guessed: what is not clearly a score within the range is none."""
    assert VlmJudge("http://x", "m").score_of(text) == pytest.approx(score, nan_ok=True)


def test_bad_judges() -> None:
    with pytest.raises(ValueError, match="pattern must have one group"):
        VlmJudge("http://x", "m", pattern=r"\d+")
    with pytest.raises(ValueError, match="high must be more than low"):
        VlmJudge("http://x", "m", low=1, high=1)
