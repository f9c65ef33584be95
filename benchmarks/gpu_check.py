"""One command for a machine with one GPU, under 8 minutes: builds the extension, checks the kernels, measures them, writes a summary.

    python benchmarks/gpu_check.py [--out DIR] [--budget 420] [--parts ...]

Needs torch, triton, einops, pytest and pytest-benchmark, nothing else, and no installation. Every part is a process of its own: one that
fails, hangs or breaks the device is reported, and the others still run. What does not fit into the budget is named.
Writes summary.md, log.txt and a CSV file per table. Exit code 1 if a part failed.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Bits against the CPU reference, for every op and backend: the tests that carry the marker `gpu`.
TESTS = ("test_backends",)
TABLES = ("roofline", "training_step", "advantages", "kernels")
# Share of the time that is left when the part starts; the kernel table comes last and takes the rest.
SHARE = {"roofline": 0.2, "training_step": 0.2, "advantages": 0.1, "kernels": 1.0}
# At most this long, seconds. A build of one architecture takes about a minute.
LIMIT = {"build": 150.0, "correctness": 240.0, "roofline": 60.0, "training_step": 60.0, "advantages": 20.0}
# A table stops itself at its budget, after the case at hand; this long after it, it is stopped from outside.
GRACE = 45.0
WORTH_STARTING = 15.0


@dataclass(frozen=True)
class Outcome:
    part: str
    result: str  # ok, failed, skipped or left out
    seconds: float
    detail: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("build", "correctness", *TABLES)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds after which no part is started")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the command itself without a GPU"
    )
    args = parser.parse_args(arguments)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    check = Check(args.out, args.budget, args.device)
    with (args.out / "log.txt").open("w") as check.log:
        for part in (name for name in names if name in args.parts):
            outcome = check.run(part)
            print(f"{outcome.part}: {outcome.result} in {outcome.seconds:.0f} s. {outcome.detail}", flush=True)
    text = check.summary()
    (args.out / "summary.md").write_text(text)
    print(text)
    return int(any(outcome.result == "failed" for outcome in check.outcomes))


class Check:
    def __init__(self, out: Path, budget: float, device: str) -> None:
        self.out, self.device, self.end = out, device, time.monotonic() + budget
        self.outcomes: list[Outcome] = []
        self.started: set[str] = set()
        self.log: IO[str]
        self.capability, self.lost = probe() if device == "cuda" else ("", "")

    def run(self, part: str) -> Outcome:
        start = time.monotonic()
        left = self.end - start
        if self.lost:
            result, detail = "failed", self.lost
        elif left < WORTH_STARTING:
            result, detail = "left out", "time budget"
        else:
            seconds = min(LIMIT.get(part, left), SHARE.get(part, 1.0) * left)
            self.started.add(part)
            self._csv(part).unlink(missing_ok=True)  # an earlier run's rows must not pass for this one's
            self.log.write(f"\n===== {part}, {seconds:.0f} s\n")
            self.log.flush()
            run = {"build": self._build, "correctness": self._correctness}.get(part, lambda s: self._table(part, s))
            try:
                result, detail = run(seconds)
            except Exception as error:  # the report of the other parts matters more than this one's reason
                result, detail = "failed", f"{type(error).__name__}: {error}"
        self.outcomes.append(Outcome(part, result, time.monotonic() - start, detail))
        return self.outcomes[-1]

    def _build(self, seconds: float) -> tuple[str, str]:
        import torch

        home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
        if self.device == "cuda" and not (
            torch.version.cuda and (shutil.which("nvcc") or Path(home, "bin/nvcc").exists())
        ):
            return "skipped", "no nvcc, or a torch without CUDA: the cuda backend is not there"
        command = [sys.executable, "setup.py", "build_ext", "--inplace", "--build-temp", "build/gpu_check"]
        # For the GPU that is here alone: a third of the time that three architectures take.
        result, detail = self._process(
            command, seconds, {"TORCH_CUDA_ARCH_LIST": self.capability} if self.capability else {}
        )
        # setup.py forgives a failed build, so that the package installs anywhere; here the kernels have to be there.
        loads = f"from flowgrpo_fast.ops import compiled; raise SystemExit(not compiled.is_built({self.device!r}))"
        if result == "ok" and self._process([sys.executable, "-c", loads], 60.0)[0] != "ok":
            return "failed", f"built, but it has no kernels for {self.device} that load"
        return result, detail

    def _correctness(self, seconds: float) -> tuple[str, str]:
        files = [f"tests/{name}.py" for name in TESTS if (ROOT / "tests" / f"{name}.py").exists()]
        missing = [name for name in TESTS if f"tests/{name}.py" not in files]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            # addopts= : the project's options and its strict configuration name plug-ins that are not here
            options = ["-o", "addopts=", "-p", "no:cacheprovider", "-q", "-rfE", "--junitxml", str(report), "-m", "gpu"]
            result, detail = self._process([sys.executable, "-m", "pytest", *options, *files], seconds)
            if not report.exists():
                return "failed", detail or "pytest wrote no report"
            suite = next(ElementTree.parse(report).iter("testsuite"))
        count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
        text = f"{passed} passed, {count['failures'] + count['errors']} failed, {count['skipped']} skipped"
        failed = [f"{case.get('classname')}::{case.get('name')}" for case in suite.iter("testcase") if _is_failed(case)]
        text += "".join(f"; {name}" for name in failed[:10])
        text += f"; not there: {', '.join(missing)}" if missing else ""
        if passed == 0 and self.device == "cuda":
            return "failed", f"{text}; no test ran on the GPU"
        return ("ok" if result == "ok" or passed + count["skipped"] == count["tests"] else "failed"), text

    def _table(self, part: str, seconds: float) -> tuple[str, str]:
        command = [sys.executable, "-m", f"benchmarks.{part}", "--device", self.device, "--budget", f"{seconds:.0f}"]
        command += ["--out", str(self.out)]
        if (
            part == "kernels"
        ):  # the middle batch first: it is the one to have if time is short; shorter timings than the default
            command += ["--batch", "8", "1", "32", "--seconds", "0.03"]
        if part == "training_step":
            command += ["--batch", "8", "--shapes", "Qwen-Image", "Wan 480p 81f", "--seconds", "0.05"]
        result, detail = self._process(command, seconds + GRACE)
        rows = self._rows(part)
        wrong = [row for row in rows if row["match"] == "False"]
        late = len({tuple(row[k] for k in _CASE) for row in rows if row["note"].startswith("left out")})
        parts = [detail, f"{sum(bool(row['median_ms']) for row in rows)} timed rows"]
        parts += [f"{len(wrong)} wrong or failed"] if wrong else []
        parts += [f"{late} cases left out"] if late else []
        return result, ", ".join(filter(None, parts))

    def _process(self, command: list[str], seconds: float, more: dict[str, str] | None = None) -> tuple[str, str]:
        """Runs a command in a process group of its own, into the log, and ends the whole group when its time is over."""
        environment = {**(more or {}), **os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        begin = (self.out / "log.txt").stat().st_size
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=max(1.0, min(seconds, self.end + GRACE - time.monotonic())))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        if code == 0:
            return "ok", ""
        output = (self.out / "log.txt").read_bytes()[begin:].decode(errors="replace")
        print("\n".join(output.splitlines()[-30:]), flush=True)
        return "failed", f"exit code {code}" if code is not None else "stopped: out of time"

    def _rows(self, part: str) -> list[dict[str, str]]:
        path = self._csv(part)
        if part not in self.started or not path.exists():
            return []
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    def _csv(self, part: str) -> Path:
        return self.out / f"{part}_{self.device}.csv"

    def summary(self) -> str:
        lines = ["# GPU check", ""]
        rows = [row for part in TABLES for row in self._rows(part)]
        lines += [f"{row['device']}, commit {row['commit']}, {row['versions']}" for row in rows[:1]]
        lines += ["", "| part | result | seconds | |", "|---|---|---|---|"]
        lines += [f"| {o.part} | {o.result} | {o.seconds:.0f} | {o.detail} |" for o in self.outcomes]
        wrong = [row for row in rows if row["match"] == "False"]
        if wrong:
            lines += ["", "## Wrong or failed: no time, no ratio", ""]
            lines += [f"- {' '.join(row[k] for k in _CASE)} {row['backend']}: {row['note']}" for row in wrong[:40]]
        for part in TABLES:
            timed = [row for row in self._rows(part) if row["median_ms"]]
            if timed:
                lines += ["", f"## {part}", "", "| " + " | ".join(_SHOWN) + " |", "|" + "---|" * len(_SHOWN)]
                lines += ["| " + " | ".join(row[name] for name in _SHOWN) + " |" for row in timed]
        return "\n".join(lines) + "\n"


_CASE = ("op", "variant", "shape", "batch", "dtype")
_SHOWN = (
    *_CASE, "backend", "median_ms", "gb_s", "copy_share", "times_faster", "peak_bytes", "extra_latents", "saved_beyond_inputs",
    "launches", "error",
)  # fmt: skip


def _is_failed(case: ElementTree.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


def probe() -> tuple[str, str]:
    """Compute capability of the GPU, or why there is none that works. Asked in another process: this one must not hold the device."""
    code = """
import torch
assert torch.cuda.is_available(), "torch sees no CUDA device"
torch.ones(1, device="cuda").sum().item()
print(".".join(map(str, torch.cuda.get_device_capability())))
"""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "", "the CUDA device does not answer"
    if done.returncode == 0:
        return done.stdout.strip().splitlines()[-1], ""
    return "", (done.stderr.strip().splitlines() or ["torch does not start"])[-1]


if __name__ == "__main__":
    raise SystemExit(main())
