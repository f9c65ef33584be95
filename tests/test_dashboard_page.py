"""The live page in a real browser: it draws the run, and a row written meanwhile appears; and the command line."""

from __future__ import annotations

import http.client
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flowgrpo_fast.dashboard import Dashboard, main
from flowgrpo_fast.metrics import MetricsWriter
from tests.browser import dom
from tests.dashboard_run import live, run_dir, step_metrics

__all__ = ["live", "run_dir"]  # fixtures, used by name


def test_chromium_draws_the_run_and_a_row_written_meanwhile_appears(
    live: Dashboard, run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "flowgrpo_fast.dashboard")
    writer = MetricsWriter(run_dir, tensorboard=False, resume_step=3)

    def write_once_the_page_has_polled() -> None:
        deadline = time.monotonic() + 30
        while not any("from=0" in message for message in caplog.messages) and time.monotonic() < deadline:
            time.sleep(0.005)
        writer.log(4, step_metrics(4) | {"validation/reward": 0.875, "held_out/<i>": 1.0})

    thread = threading.Thread(target=write_once_the_page_has_polled)
    thread.start()
    # A minute of the page's time: 30 polls, which take about a second.
    page, _, _ = dom(live.url, tmp_path / "profile", milliseconds=60_000).partition("<script>")
    thread.join()
    writer.close()
    polls = [re.search(r"from=(\d+)", message)[1] for message in caplog.messages if "/metrics?" in message]
    assert polls[0] == "0"
    assert polls.count("0") == 1, "later polls ask for what is new"
    assert len(polls) > 10
    assert polls[-1] == str((run_dir / "metrics.jsonl").stat().st_size)

    state = re.search(r'<p id="state">(.*?)</p>', page)[1]
    assert state.startswith("<b>step 4 of 40</b>")
    assert 'aria-valuenow="10"' in page
    assert re.search(r"Validation reward</dt><dd><b>0\.875", page)
    titles = re.findall(r"<figcaption><b>([^<]*)</b>", page)
    assert titles == [
        *("Reward", "Held out &lt;i&gt;", "Max |ratio − 1|", "Gradient norm", "Images per second", "Seconds a step")
    ]
    norm = next(figure for figure in page.split("<figure>") if "<b>Gradient norm</b>" in figure)
    (path,) = re.findall(r'<path class="s0" d="([^"]*)"', norm)
    assert path.count("M") == 2, "NaN at step 2 is a gap"
    assert "norm not finite" in norm
    stacked = next(figure for figure in page.split("<figure>") if "<b>Seconds a step</b>" in figure)
    assert stacked.count('class="stack"') == 4 * 2
    assert re.findall(r"<h3>(.*?)</h3>", page) == ["a &lt;b&gt;fox&lt;/b&gt;", "a dog"]
    pictures = re.findall(r'<img src="([^"?]*)[^>]*>', page)
    assert pictures[:2] == ["samples/step_000002.png", "samples/before.png"]
    assert len(pictures) == 6
    assert page.count('class="small"') == 4, "the pictures have loaded"
    assert re.search(r'<p id="notice" role="status"></p>', page), "no complaint"


def test_command_line_serves_until_interrupted(run_dir: Path) -> None:
    command = [sys.executable, "-m", "flowgrpo_fast.dashboard", str(run_dir), "--port", "0"]
    # A shell without job control starts its background jobs, this test run perhaps, with Ctrl-C ignored.
    default = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1], **default
    ) as process:
        url = process.stdout.readline().strip()
        connection = http.client.HTTPConnection(url.removeprefix("http://").rstrip("/"), timeout=10)
        connection.request("GET", "/samples/before.png")
        assert connection.getresponse().read() == (run_dir / "samples/before.png").read_bytes()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a folder; give the run_dir of a run"),
        ([".", "--port", "-1"], "port -1 does not exist"),
    ],
)
def test_command_line_names_what_is_wrong(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
