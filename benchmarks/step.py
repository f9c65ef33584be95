"""A whole training step against the peers' loop: `python -m benchmarks.step` -> benchmarks/results/step_cpu.csv.

Two ZeRO-3 ranks of one thread each, full fine-tuning in fp32, a cheap reward, CFG 4, window 2 of 10 steps. Ours is `Trainer._step`, as runs call
it; the rival is `benchmarks.peer_loop`, whose docstring says which peer does what. In one process they take turns, step by step, over the same
engine, weights, prompts and noise: step k has the same samples for all. The learning rate of 1e-30 makes real optimizer steps that
leave the weights as they were, so gradient norms and log-probs can be compared. Windows start at 0, 1, 2, 3 in turns, where
flow_grpo and verl-omni draw them for Qwen-Image. Samples of a group start from the same noise (DanceGRPO; `--initial-noise sample` for
noise of their own): ours samples the steps before the window once a group, the peer once a sample.

How much of a ratio is batch size: against a peer whose micro-batch is as large as ours, training saves the old log-probs (4 of 16 forward
units), two of three gathers and half of the launches; against a smaller one, gathers, reductions and launches in proportion, and ours keeps more
activations for it. On a CPU, at 64 x 64 pixels, all of these weigh more than for 20 B parameters on GPUs. The rows of spans say how much.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel

from benchmarks import rivals
from benchmarks.measure import Neighbours, warn_if_busy
from benchmarks.peer_loop import Job, Outcome, PeerLoop
from benchmarks.table import RESULTS, ROOT, Table, device_name
from flowgrpo_fast import comm, profile
from flowgrpo_fast.config import Config
from flowgrpo_fast.config_file import parse_config
from flowgrpo_fast.engine import Engine, local_device
from flowgrpo_fast.inputs import Inputs
from flowgrpo_fast.models.glyphs import TEXT_WIDTH, build_pipeline
from flowgrpo_fast.rollout.agent_loop import RolloutResult
from flowgrpo_fast.rollout.wire import free_port
from flowgrpo_fast.train import settle_environment
from flowgrpo_fast.trainer import Trainer

RANKS = 2
WINDOW = 2
STARTS = 4  # of the window
TOLERANCE = 1e-4  # of gradient norms, relative, and of log-probs
MOVED = 1e-20  # what a weight of 0 may become
OURS = "ours"
SPANS = ("encode", "decode", "forward", "backward", "gather", "optimizer")
COLUMNS = {
    "device": "CPU model and threads of a rank",
    "commit": "of this repository; +dirty: with local changes",
    "versions": "Python, torch, triton, flowgrpo_fast",
    "model": "glyphs, or a random Qwen-Image",
    "parameters": "of the transformer, all trained",
    "ranks": "ZeRO-3",
    "samples": "a step, over all ranks",
    "our_batch": "samples in a rollout's forward of ours; with CFG twice as many rows",
    "our_micro_batch": "(sample, step) pairs in a training forward of ours; with CFG twice as many rows",
    "peer_batch": "samples in a forward of the peer, in either phase",
    "initial_noise": "whose: a group's or a sample's",
    "phase": "step = rollout (with gathering, rewards, advantages) + training (with old log-probs); `span`: part of them, one more step alone",
    "ours_s": "seconds, median",
    "peer_s": "seconds, median",
    "ratio": "peer / ours, median over the pairs of equal steps",
    "ratio_p20": "20th percentile",
    "ratio_p80": "80th percentile",
    "pairs": "timed steps of each",
    "grad_norm_ours": "of the last step, before clipping",
    "grad_norm_peer": "of the last step, before clipping",
    "grad_norm_difference": "largest relative one of all steps",
    "log_prob_difference": "largest of all samples and steps, the peer's three log-probs against ours",
    "match": f"both differences <= {TOLERANCE:g}, and no weight moved",
    "idle": "no: other processes ran",
    "others": "cores that other processes kept busy meanwhile",
}
PRINTED = {
    "model": 8, "samples": 7, "our_micro_batch": 15, "peer_batch": 10, "phase": 14, "ours_s": 8, "peer_s": 8, "ratio": 6, "ratio_p20": 9, "ratio_p80": 9,
    "grad_norm_ours": 14, "grad_norm_peer": 14, "grad_norm_difference": 20, "log_prob_difference": 19, "match": 5, "idle": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One model and its batches, of a rank."""

    model: str
    path: str
    groups: int
    group_size: int
    micro_batch: int
    peer_batches: list[int]
    alternations: int
    initial_noise: str


def main(arguments: Sequence[str] | None = None, start: Callable[[Path], None] | None = None) -> int:
    """start: runs the ranks of a folder to their end; processes of their own if None."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("glyphs", "50M", "tiny"), default=["glyphs", "50M"])
    parser.add_argument("--peer-batch", nargs="+", type=int, default=[4, 16], help="4: flow_grpo, 16: verl-omni")
    parser.add_argument(
        "--micro-batch",
        choices=("slot", "all"),
        default="slot",
        help="pairs in a training forward of ours: a window slot, in the rollout's shape (the default of runs), or all",
    )
    parser.add_argument("--alternations", type=int, default=2 * STARTS, help="timed steps of each contender")
    parser.add_argument("--initial-noise", choices=("group", "sample"), default="group")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one step: does everything agree?")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.rank_of is not None:
        return rank(args.rank_of)
    if args.quick:
        args.models, args.peer_batch, args.alternations = ["tiny"], [3], 1
    warn_if_busy("before the measurement")
    right = True
    with Table(args.out / "step_cpu.csv", "cpu", COLUMNS, PRINTED) as table:
        for model in args.models:
            with tempfile.TemporaryDirectory() as folder:
                right &= compare(table, case_of(args, model, Path(folder)), Path(folder), start or run_ranks)
    warn_if_busy("after the measurement")
    return 0 if right else 1


def case_of(args: argparse.Namespace, model: str, folder: Path) -> Case:
    groups, group_size = {"glyphs": (2, 8), "50M": (1, 8), "tiny": (2, 2)}[model]
    samples = groups * group_size
    # A batch beyond all samples of a rank is all of them.
    batches = list(dict.fromkeys(min(batch, samples) for batch in args.peer_batch))
    path = "builtin:glyphs" if model == "glyphs" else str(folder / "pipeline")
    if model != "glyphs":
        save_random_pipeline(model, folder / "pipeline")
    micro_batch = samples * (WINDOW if args.micro_batch == "all" else 1)
    return Case(model, path, groups, group_size, micro_batch, batches, args.alternations, args.initial_noise)


def save_random_pipeline(model: str, folder: Path) -> None:
    """Tiny VAE and text encoder; a transformer of 48.4 M parameters in Qwen-Image's proportions (head dim 64, MLP 4 x width), or a tiny one."""
    pipeline = build_pipeline("tiny")
    if model == "50M":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            pipeline.transformer = QwenImageTransformer2DModel(
                patch_size=2, in_channels=64, out_channels=16, joint_attention_dim=TEXT_WIDTH,
                num_layers=9, attention_head_dim=64, num_attention_heads=6, axes_dims_rope=(16, 24, 24),
            )  # fmt: skip
    pipeline.save_pretrained(folder)


def compare(table: Table, case: Case, folder: Path, run: Callable[[Path], None]) -> bool:
    """Runs a case on its ranks and writes its rows. run: starts the ranks of a folder and returns when they are done."""
    (folder / "case.json").write_text(json.dumps(asdict(case)))
    run(folder)
    result = json.loads((folder / "result.json").read_text())
    about: dict[str, Any] = dict(
        model=case.model, parameters=result["parameters"], ranks=RANKS, samples=RANKS * case.groups * case.group_size,
        our_batch=case.groups * case.group_size, our_micro_batch=case.micro_batch, initial_noise=case.initial_noise, device=result["device"], idle=result["idle"], others=result["others"],
    )  # fmt: skip
    right = True
    for batch in case.peer_batches:
        peer, ours = result["contenders"][str(batch)], result["contenders"][OURS]
        # torch's max keeps NaN, Python's may not.
        norms, log_probs = (
            float(torch.tensor(peer[name]).max()) for name in ("grad_norm_differences", "log_prob_differences")
        )
        match = result["unchanged"] and norms <= TOLERANCE and log_probs <= TOLERANCE
        right &= match
        compared = dict(
            peer_batch=batch, match=match, grad_norm_ours=ours["grad_norms"][-1], grad_norm_peer=peer["grad_norms"][-1],
            grad_norm_difference=norms, log_prob_difference=log_probs,
        )  # fmt: skip
        for phase in ("rollout", "training", "step"):
            pairs = [theirs / mine for theirs, mine in zip(peer[phase], ours[phase], strict=True)]
            times: dict[str, Any] = dict(pairs=len(pairs))
            if match:
                p20, p80 = percentiles(pairs)
                times |= dict(
                    ours_s=statistics.median(ours[phase]), peer_s=statistics.median(peer[phase]),
                    ratio=statistics.median(pairs), ratio_p20=p20, ratio_p80=p80,
                )  # fmt: skip
            table.add(**about, **compared, phase=phase, **times)
        for span in SPANS:
            mine, theirs = ours["spans"].get(span), peer["spans"].get(span)
            table.add(**about, peer_batch=batch, match=match, phase=f"span {span}", ours_s=mine, peer_s=theirs, pairs=1)
    return right


def percentiles(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[1], tenths[7]


def run_ranks(folder: Path) -> None:
    """The ranks of a case as processes of their own. Raises RuntimeError with their output where one fails."""
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.step", "--rank-of", str(folder)]
    logs = [folder / f"rank{r}.log" for r in range(RANKS)]
    processes = []
    for r, log in enumerate(logs):
        with log.open("w") as output:
            environment = os.environ | shared | {"RANK": str(r), "LOCAL_RANK": str(r)}
            processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT))
    try:
        # One that fails leaves the other waiting in a collective.
        while any(p.poll() is None for p in processes) and not any(p.returncode for p in processes):
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in logs))


def rank(folder: Path) -> int:
    """One rank of a case. Rank 0 writes result.json."""
    case = Case(**json.loads((folder / "case.json").read_text()))
    config = config_of(case, folder / "run")
    settle_environment(config, None)
    comm.initialize()
    try:
        inputs, device = Inputs(config, comm.world_size()), local_device()
        trainer = OurLoop(config, inputs, device)
        before = trainer.engine.trained_state()
        with Neighbours(ours=[pid for pid in comm.gather_objects(os.getpid()) if pid != os.getpid()]) as neighbours:
            records = take_turns(trainer, case)
        after = trainer.engine.trained_state()
        result = dict(
            contenders={name: asdict(record) for name, record in records.items()},
            unchanged=all((tensor - before[name]).abs().max() <= MOVED for name, tensor in after.items()),
            parameters=trainer.engine.trainable_parameters, device=device_name("cpu"), idle=neighbours.idle, others=neighbours.others,
        )  # fmt: skip
        if comm.rank() == 0:
            (folder / "result.json").write_text(json.dumps(result))
        trainer.inputs.rewards.close()
        trainer.recorder.close()
        trainer.stop.close()
    finally:
        torch.distributed.destroy_process_group()
    return 0


def config_of(case: Case, run_dir: Path) -> Config:
    """As a user would write it for this model; what `rivals` fixes is fixed here."""
    return parse_config(
        {
            "run_dir": str(run_dir),
            "model": {"path": case.path, "train": "full"},
            "data": {"train": "builtin:glyphs", "negative_prompt": " "},
            "rollout": {
                "height": 64,
                "width": 64,
                "num_steps": 10,
                "guidance_scale": rivals.GUIDANCE,
                "noise_level": rivals.NOISE_LEVEL,
                "window": {"size": WINDOW, "range": [0, STARTS + WINDOW - 1], "scope": "batch", "strategy": "progressive", "shift_every": 1},
                "initial_noise": case.initial_noise,
                "groups_per_batch": case.groups,
            },
            "algorithm": {
                "group_size": case.group_size,
                "groups_per_step": RANKS * case.groups,
                "normalize": "group_std",
                "advantage_eps": rivals.EPS,
                "clip_low": rivals.CLIP,
                "clip_high": rivals.CLIP,
            },
            "rewards": [{"name": "benchmarks.peer_loop:brightness"}],
            "optimizer": {"learning_rate": 1e-30},
            "engine": {"threads": 1, "micro_batch_size": case.micro_batch},
            "trainer": {"total_steps": 1_000_000},
            "logging": {"tensorboard": False},
        }
    )  # fmt: skip


class OurLoop(Trainer):
    """The trainer, whose last rollout can be looked at."""

    def _training_rollout(self, step: int) -> RolloutResult:
        self.result = super()._training_rollout(step)
        return self.result

    def one(self, step: int) -> Outcome:
        metrics = self._step(step)
        # The update's are the rollout's, but for what the trainer says: nothing, where it has the rollout's shape.
        log_probs = self.result.batch.log_probs
        return Outcome(
            metrics["optimizer/grad_norm"],
            {"rollout": log_probs, "update": log_probs + metrics["rollout/log_ratio_max"]},
        )


@dataclass
class Record:
    """Of one contender: seconds of each timed step, and how it compares with ours over all steps."""

    rollout: list[float] = field(default_factory=list)
    training: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    spans: dict[str, float] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    grad_norm_differences: list[float] = field(default_factory=list)
    log_prob_differences: list[float] = field(default_factory=list)


def theirs(peer: PeerLoop, step: int, job: Job) -> Outcome:
    return peer.step(job)


def take_turns(trainer: OurLoop, case: Case) -> dict[str, Record]:
    """The first step of each is not timed, the last is for the spans."""
    peers = {str(batch): PeerLoop(trainer, batch) for batch in case.peer_batches}
    runs: dict[str, Callable[[int, Job], Outcome]] = {OURS: lambda step, job: trainer.one(step)}
    for name, peer in peers.items():
        runs[name] = partial(theirs, peer)
    records = {name: Record() for name in runs}
    names = list(runs)
    for step in range(case.alternations + 2):
        job = next(iter(peers.values())).job(step)
        outcomes = {}
        for name in names[step % len(names) :] + names[: step % len(names)]:
            trainer.timer.pop()
            comm.barrier()
            if step <= case.alternations:
                began = time.perf_counter()
                outcomes[name] = runs[name](step, job)
                seconds, training = time.perf_counter() - began, trainer.timer.pop()["timing/update_s"]
            else:
                with spans(trainer.engine) as measured:
                    outcomes[name] = runs[name](step, job)
                records[name].spans = measured
            if 0 < step <= case.alternations:
                records[name].step.append(seconds)
                records[name].training.append(training)
                records[name].rollout.append(seconds - training)
        for name, record in records.items():
            compare_outcomes(record, outcomes[name], outcomes[OURS])
    return records


def compare_outcomes(record: Record, outcome: Outcome, ours: Outcome) -> None:
    record.grad_norms.append(outcome.grad_norm)
    record.grad_norm_differences.append(abs(outcome.grad_norm - ours.grad_norm) / ours.grad_norm)
    differences = [
        (values - mine).abs().max() for values in outcome.log_probs.values() for mine in ours.log_probs.values()
    ]
    record.log_prob_differences.append(float(comm.gather_rows(torch.stack(differences)).max()))


@contextmanager
def spans(engine: Engine) -> Iterator[dict[str, float]]:
    """Seconds by span, filled at the end. Without torch's profiler, which `profiled_step` runs beside it."""
    measured: dict[str, float] = {}
    profile._active = active = profile.StepProfile()
    try:
        with engine.marked_gathers():
            yield measured
    finally:
        profile._active = None
    measured |= active.seconds


if __name__ == "__main__":
    raise SystemExit(main())
