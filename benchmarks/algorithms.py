"""Does each algorithm raise the reward? glyphs, 12 of the demo's 40 steps, the same starting weights, three seeds: `python -m benchmarks.algorithms`.

Each run is a process of its own, one after the other; a row is appended to results/algorithms_cpu.csv as a run ends, and what is there is not run
again (delete the file to start anew). About a minute a run on two cores; other work on the machine shows in `seconds`, hardly in `cpu_seconds`. `--algorithms awm,dpo --seeds 0` runs some; `--table` prints what is there.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.table import ROOT, read

RESULTS = Path(__file__).parent / "results" / "algorithms_cpu.csv"
FIELDS = (
    "algorithm",
    "seed",
    "steps",
    "reward_before",
    "reward_after",
    "exact_before",
    "exact_after",
    "seconds",
    "cpu_seconds",
)
# The ODE from one noise would make a group's samples equal.
FORWARD = ("rollout.initial_noise=sample", "algorithm.train_timesteps=3")
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "flow_grpo": (),
    "flow_grpo_fast": ("rollout.window={size: 1, range: [0, 3]}",),
    "flow_cps": ("rollout.rule=cps", "rollout.noise_level=0.8"),
    "dance_best_of_n": ("rollout.rule=dance", "rollout.noise_level=0.9", "algorithm.normalize=group_std", "algorithm.train_on=8"),
    "mix": (
        "rollout.window={size: 2, range: [0, 4], strategy: progressive, shift_every: 10}",
        "rollout.ode_order=2",
    ),
    "dr_grpo": ("algorithm.normalize=none",),
    "gdpo": ("algorithm.advantage=gdpo",),
    "tempflow_weights": ("algorithm.step_weight=noise_level",),
    "grpo_guard": ("algorithm.name=grpo_guard",),
    "flow_dppo": ("algorithm.name=flow_dppo", "algorithm.advantage_clip=null"),
    "diffusion_nft": ("algorithm.name=diffusion_nft", *FORWARD),
    "awm": ("algorithm.name=awm", *FORWARD),
    "dpo": ("algorithm.name=dpo", *FORWARD),
}  # fmt: skip


def run(algorithm: str, seed: int, steps: int, folder: Path, extra: Sequence[str]) -> dict[str, object]:
    command = [
        sys.executable, str(ROOT / "flowgrpo_fast" / "train.py"), "--config", str(ROOT / "configs" / "glyphs.yaml"), f"run_dir={folder}", f"seed={seed}",
        f"trainer.total_steps={steps}", "trainer.validate_every=0", "trainer.save_every=0", "logging.tensorboard=false", "logging.samples_every=0",
        # One rank has nothing to partition: ZeRO-3's hooks would be a third of the time and change no number.
        "engine.zero_stage=0",
        *ALGORITHMS[algorithm], *extra,
    ]  # fmt: skip
    began, cpu_before = time.monotonic(), cpu_seconds()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{algorithm}, seed {seed} failed:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "algorithm": algorithm,
        "seed": seed,
        "steps": steps,
        "reward_before": round(summary["validation/before/reward"], 4),
        "reward_after": round(summary["validation/after/reward"], 4),
        "exact_before": round(summary["validation/before/ocr/exact_match"], 4),
        "exact_after": round(summary["validation/after/ocr/exact_match"], 4),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(cpu_seconds() - cpu_before, 1),
    }


def cpu_seconds() -> float:
    """Of the runs that have ended, their reward workers' included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def found(path: Path) -> list[dict[str, str]]:
    return read(path) if path.is_file() else []


def append(path: Path, row: dict[str, object]) -> None:
    is_new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: mean over seeds, and the least and the greatest."""
    lines = [
        "| algorithm | seeds | reward | gain: mean (least to greatest) | exactly right | seconds | CPU seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        mine = [row for row in rows if row["algorithm"] == name]
        mean = {f: statistics.fmean(float(row[f]) for row in mine) for f in FIELDS[3:]}
        gains = [float(row["reward_after"]) - float(row["reward_before"]) for row in mine]
        lines.append(
            f"| {name} | {len(mine)} | {mean['reward_before']:.3f} -> {mean['reward_after']:.3f} | {statistics.fmean(gains):+.3f}"
            f" ({min(gains):+.3f} to {max(gains):+.3f}) | {mean['exact_before']:.1%} -> {mean['exact_after']:.1%} | {mean['seconds']:.0f} | {mean['cpu_seconds']:.0f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    a = parser.parse_args(argv)
    names = a.algorithms.split(",")
    if unknown := set(names) - ALGORITHMS.keys():
        parser.error(f"--algorithms: there is no {sorted(unknown)[0]!r}; choose from {', '.join(ALGORITHMS)}")
    there = {(row["algorithm"], row["seed"], row["steps"]) for row in found(a.out)}
    for seed in [] if a.table else a.seeds.split(","):
        for name in names:
            if (name, seed, str(a.steps)) in there:
                continue
            with tempfile.TemporaryDirectory() as folder:
                row = run(name, int(seed), a.steps, Path(folder), a.overrides)
            print(row, flush=True)
            append(a.out, row)
    print(table(found(a.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
