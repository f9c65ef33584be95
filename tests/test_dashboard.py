"""The dashboard's server: every row once, also after a resume; nothing outside samples/; read only; quiet."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowgrpo_fast import dashboard as module
from flowgrpo_fast.dashboard import Dashboard
from flowgrpo_fast.metrics import MetricsWriter
from flowgrpo_fast.samples import write_prompt_samples
from tests.dashboard_run import live, run_dir

__all__ = ["live", "run_dir"]  # fixtures, used by name


def request(
    dashboard: Dashboard, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, bytes, http.client.HTTPResponse]:
    """The path goes out as it is: neither `..` nor `//` is tidied up on the way."""
    connection = http.client.HTTPConnection("127.0.0.1", int(dashboard.url.rstrip("/").rpartition(":")[2]), timeout=10)
    connection.request(method, path, headers=headers or {})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body, response


def metrics(dashboard: Dashboard, start: int = 0, file: str = "") -> dict[str, Any]:
    status, body, _ = request(dashboard, f"/metrics?from={start}&file={file}")
    assert status == 200
    return json.loads(body)


def steps(answer: dict[str, Any]) -> list[int]:
    return [row["step"] for row in answer["rows"]]


def test_rows_come_once_from_where_the_page_left_off_and_a_half_written_line_later(
    live: Dashboard, run_dir: Path
) -> None:
    first = metrics(live)
    assert steps(first) == [1, 2, 3]
    assert (first["next"], first["restart"], first["more"]) == (
        (run_dir / "metrics.jsonl").stat().st_size,
        False,
        False,
    )
    assert (first["total_steps"], first["finished"]) == (40, False)
    assert first["rows"][1]["optimizer/grad_norm"] is None
    assert first["charts"][0] == {
        "title": "Reward",
        "lines": {"training": "reward/mean", "validation": "validation/reward"},
        "smooth": True,
        "log": False,
        "label": "number",
    }
    with open(run_dir / "metrics.jsonl", "ab", buffering=0) as file:
        file.write(b'{"step": 4, "time": 1.0, "validation/ocr/exact_match": 0.5}\n{"step": 5, "ti')
        second = metrics(live, first["next"], first["file"])
        assert (steps(second), second["restart"], second["more"]) == ([4], False, False)
        assert "OCR exact match" in [chart["title"] for chart in second["charts"]]
        assert "Gradient norm" in [chart["title"] for chart in second["charts"]], "charts are of all rows so far"
        assert steps(metrics(live, second["next"], second["file"])) == []
        file.write(b'me": 1.0}\n')
    third = metrics(live, second["next"], second["file"])
    assert (steps(third), third["restart"]) == ([5], False)


def test_a_resume_starts_the_page_again_at_the_first_row(live: Dashboard, run_dir: Path) -> None:
    before = metrics(live)
    writer = MetricsWriter(run_dir, tensorboard=False, resume_step=1)
    for step in range(2, 9):  # longer than before: the size alone would not tell
        writer.log(step, {"reward/mean": 0.5})
    writer.close()
    after = metrics(live, before["next"], before["file"])
    assert (after["restart"], steps(after)) == (True, list(range(1, 9)))


@pytest.mark.parametrize("content", [b"", b'{"step": 1}\n', b'{"step": 1}\n' * 400])
def test_a_file_that_is_cut_or_rewritten_in_place_starts_the_page_again(
    live: Dashboard, run_dir: Path, content: bytes
) -> None:
    before = metrics(live)
    (run_dir / "metrics.jsonl").write_bytes(content)  # the same inode
    after = metrics(live, before["next"], before["file"])
    assert (after["restart"], len(after["rows"]), after["next"]) == (True, content.count(b"\n"), len(content))


def test_a_new_run_in_the_folder_starts_the_page_again_and_a_folder_without_one_is_no_error(
    live: Dashboard, run_dir: Path
) -> None:
    before = metrics(live)
    (run_dir / "metrics.jsonl").rename(run_dir / "aside.jsonl")
    gone = metrics(live, before["next"], before["file"])
    assert (gone["restart"], gone["rows"], gone["next"], gone["charts"]) == (True, [], 0, [])
    assert not metrics(live, gone["next"], gone["file"])["restart"]
    (run_dir / "metrics.jsonl").write_bytes(b'{"step": 7, "reward/mean": 1.0}\n')
    assert steps(metrics(live, gone["next"], gone["file"])) == [7]


def test_a_server_started_anew_sends_a_page_of_the_old_one_back_to_the_first_row(run_dir: Path) -> None:
    answers = []
    for _ in range(2):
        dashboard = Dashboard(run_dir, port=0).start()
        previous = answers[-1] if answers else {"next": 0, "file": ""}
        answers.append(metrics(dashboard, previous["next"], previous["file"]))
        dashboard.close()
    assert answers[1]["restart"]
    assert answers[1]["charts"] == answers[0]["charts"] != []


def test_long_files_come_in_pieces_and_corrupt_lines_are_told(
    live: Dashboard, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 1000)
    lines = [json.dumps({"step": i, "time": 1.0, "note": "x" * (3000 if i == 50 else 20)}) for i in range(100)]
    lines[30] = '{"step": 3'
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    got, corrupt, answers = [], [], 0
    answer: dict[str, Any] = {"more": True, "next": 0, "file": ""}
    while answer["more"]:
        answer = metrics(live, answer["next"], answer["file"])
        got += steps(answer)
        corrupt += answer["corrupt"]
        answers += 1
    assert got == [i for i in range(100) if i != 30]
    assert corrupt == [sum(len(line) + 1 for line in lines[:30])]
    assert 5 < answers < 20


@pytest.mark.parametrize("start", ["-1", "x", "1e3", "٣", "9" * 30])
def test_an_offset_that_is_none_is_refused(live: Dashboard, start: str) -> None:
    status, body, _ = request(live, "/metrics?from=" + "".join(f"%{b:02x}" for b in start.encode()))
    assert (status, b"no byte offset" in body) == (400, True)


def test_samples_are_listed_newest_first_and_each_can_be_fetched(live: Dashboard, run_dir: Path) -> None:
    listing = json.loads(request(live, "/samples")[1])
    assert [grid["moment"] for grid in listing["grids"]] == ["step 2", "before"]
    assert [prompt["prompt"] for prompt in listing["prompts"]] == ["a <b>fox</b>", "a dog"]
    assert [(s["moment"], s["note"]) for s in listing["prompts"][0]["samples"]] == [
        ("before", "0.05"),
        ("step 2", "0.15"),
    ]
    for sample in [*listing["grids"], *(s for prompt in listing["prompts"] for s in prompt["samples"])]:
        status, body, response = request(live, "/" + sample["url"])
        assert (status, response.headers["Content-Type"]) == (200, "image/png")
        assert body == (run_dir / sample["url"].partition("?")[0]).read_bytes()


def test_a_range_of_a_video_can_be_fetched(live: Dashboard, run_dir: Path) -> None:
    videos = torch.zeros(1, 4, 3, 8, 8, dtype=torch.uint8)
    (path,) = write_prompt_samples(run_dir / "samples", "after", videos, [0])
    data = path.read_bytes()
    for asked, status, expected in (
        ("bytes=0-1", 206, data[:2]),
        ("bytes=10-", 206, data[10:]),
        ("bytes=-5", 206, data[-5:]),
        (f"bytes=0-{10 * len(data)}", 206, data),
        ("bytes=-", 200, data),
        ("lines=1-2", 200, data),
    ):
        got, body, response = request(live, "/samples/prompts/00000/after.mp4", headers={"Range": asked})
        assert (got, body, response.headers["Content-Type"]) == (status, expected, "video/mp4"), asked
        if status == 206:
            first = data.index(expected) if asked != "bytes=-5" else len(data) - 5
            assert response.headers["Content-Range"] == f"bytes {first}-{first + len(expected) - 1}/{len(data)}"
    assert request(live, "/samples/prompts/00000/after.mp4", headers={"Range": f"bytes={len(data)}-"})[0] == 416


@pytest.fixture
def traps(run_dir: Path) -> Path:
    """Files that must not be served, and links to them from inside samples/."""
    outside, samples = run_dir.parent / "outside", run_dir / "samples"
    outside.mkdir()
    for place in (outside, run_dir):
        Image.new("RGB", (2, 2)).save(place / "secret.png")
    (samples / "link.png").symlink_to(outside / "secret.png")
    (samples / "prompts/00009").symlink_to(outside)
    (outside / "before.png").write_bytes((outside / "secret.png").read_bytes())
    (samples / "text.png").symlink_to(run_dir / "config.yaml")
    (samples / "loop.png").symlink_to("loop.png")
    (samples / "folder.png").mkdir()
    (samples / "notes.txt").write_text("secret")
    (samples / ".before.png.7.tmp").write_text("half")
    return run_dir


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/samples/../secret.png",
            "/samples/%2e%2e/secret.png",
            "/samples/..%2fsecret.png",
            "/samples/x/../../secret.png",
        ),
        *("/samples/prompts/00000/../../before.png", "/samples//before.png", "/samples/./before.png"),
        *("/samples/link.png", "/samples/text.png", "/samples/loop.png", "/samples/folder.png"),
        *("/samples/prompts/00009/before.png", "/samples/prompts/00009/secret.png"),
        *("/samples/notes.txt", "/samples/prompts/00000/before.txt", "/samples/.before.png.7.tmp", "/samples/"),
        *(
            "/secret.png",
            "/metrics.jsonl",
            "/config.yaml",
            "/samples/before.png%00.png",
            "/samples/" + "a" * 5000 + ".png",
        ),
        *("/samples/{outside}/secret.png", "/samples/%2f{outside}/secret.png", "//samples/before.png/", "/nothing"),
    ],
)
def test_nothing_but_samples_is_served(traps: Path, live: Dashboard, path: str) -> None:
    outside = str(traps.parent / "outside").replace(" ", "%20").lstrip("/")
    status, body, _ = request(live, path.format(outside=outside))
    assert (status, body) == (404, b"not here\n")


def test_links_out_of_the_folder_are_not_listed_either(traps: Path, live: Dashboard) -> None:
    listing = json.loads(request(live, "/samples")[1])
    assert [grid["moment"] for grid in listing["grids"]] == ["step 2", "before"]
    assert [prompt["prompt"] for prompt in listing["prompts"]] == ["a <b>fox</b>", "a dog"]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(live: Dashboard, run_dir: Path, method: str) -> None:
    before = sorted(run_dir.rglob("*"))
    status, _, response = request(live, "/samples/before.png", method)
    assert status == (501 if method == "TRACE" else 405)
    assert method == "TRACE" or response.headers["Allow"] == "GET, HEAD"
    assert sorted(run_dir.rglob("*")) == before


def test_head_has_the_headers_alone_and_the_page_lets_nothing_in_from_elsewhere(live: Dashboard) -> None:
    status, body, response = request(live, "/", "HEAD")
    assert (status, body) == (200, b"")
    page = request(live, "/")[1].decode()
    assert int(response.headers["Content-Length"]) == len(page.encode())
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert not re.search(r"https?:|@import|url\(|<link(?! rel=\"icon\" href=\"data:,\")|<script src", page)
    assert "<h1>my &lt;run&gt;</h1>" in page
    assert "{{" not in page


def test_it_listens_on_this_machine_alone_and_a_port_in_use_is_named(run_dir: Path, live: Dashboard) -> None:
    port = int(live.url.rstrip("/").rpartition(":")[2])
    assert live.url == f"http://127.0.0.1:{port}/"
    with pytest.raises(OSError, match=f"port {port} of 127.0.0.1 is in use; give another port, or 0 for any free one"):
        Dashboard(run_dir, port=port)
    with pytest.raises(OSError, match="give another host"):
        Dashboard(run_dir, host="192.0.2.1", port=0)  # an address of no machine (RFC 5737)
    with pytest.raises(ValueError, match="port 70000 does not exist"):
        Dashboard(run_dir, port=70000)


def test_close_frees_the_port_and_may_be_called_twice_or_before_start(run_dir: Path) -> None:
    first = Dashboard(run_dir, port=0)
    port = int(first.url.rstrip("/").rpartition(":")[2])
    first.close()
    first.close()
    second = Dashboard(run_dir, port=port).start()
    threads = [thread.name for thread in threading.enumerate()]
    assert "dashboard" in threads
    assert metrics(second)["rows"]
    second.close()
    second.close()
    assert "dashboard" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_run_that_has_not_begun_is_an_empty_page(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path / "later", port=0).start()
    assert request(dashboard, "/")[0] == 200
    answer = metrics(dashboard)
    assert (answer["rows"], answer["total_steps"], answer["next"]) == ([], None, 0)
    assert json.loads(request(dashboard, "/samples")[1]) == {"grids": [], "prompts": []}
    dashboard.close()


def test_a_closed_page_and_a_refused_request_print_nothing(live: Dashboard, capfd: pytest.CaptureFixture[str]) -> None:
    address = ("127.0.0.1", int(live.url.rstrip("/").rpartition(":")[2]))
    for _ in range(3):
        with socket.create_connection(address, timeout=5) as page:
            page.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closes with a reset
            page.sendall(b"GET /metrics?from=0 HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
    request(live, "/nothing")
    time.sleep(0.2)
    assert capfd.readouterr() == ("", "")
