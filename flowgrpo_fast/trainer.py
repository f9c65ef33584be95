"""The loop: rollout -> reward -> advantage -> update -> validate, save, log. Read `Trainer.run` first, then `_step`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from flowgrpo_fast import comm
from flowgrpo_fast.agreement import AgreementGate
from flowgrpo_fast.batch import RolloutBatch
from flowgrpo_fast.checkpoint import (
    TrainerState,
    check_resumable,
    checkpoints,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from flowgrpo_fast.config import Config, ConfigError
from flowgrpo_fast.data.sampler import GroupSampler, rank_slice
from flowgrpo_fast.engine import DTYPES, Engine
from flowgrpo_fast.forward import ForwardTraining
from flowgrpo_fast.inputs import Inputs, sampling_params, step_size, validation_params, window_config
from flowgrpo_fast.lifetime import Stopped, StopRequest, alive, end_watch, watch_progress
from flowgrpo_fast.metrics import PhaseTimer, Progress
from flowgrpo_fast.models import build_adapter
from flowgrpo_fast.pairs import PairTraining, share_batch
from flowgrpo_fast.profile import profiled_step, span
from flowgrpo_fast.recorder import Recorder
from flowgrpo_fast.replay import Replay
from flowgrpo_fast.rewards import RewardFailure
from flowgrpo_fast.rollout.agent_loop import GroupTask, RolloutResult, make_tasks, run_agent_loops
from flowgrpo_fast.rollout.base import SamplingParams, ServerLostError
from flowgrpo_fast.rollout.build import build_rollout
from flowgrpo_fast.schedule import draw_window_starts
from flowgrpo_fast.scoring import clipped, component_means, require_enough, score_samples, weighted_sums
from flowgrpo_fast.throughput import Throughput


class Trainer:
    """Builds everything, then `run()`. All ranks construct and run it alike; rank 0 writes."""

    def __init__(self, config: Config, inputs: Inputs, device: torch.device) -> None:
        began = time.perf_counter()
        self.config, self.inputs, self.device = config, inputs, device
        self.is_main = comm.rank() == 0
        self.run_dir = Path(config.run_dir).expanduser()
        self.stop = StopRequest()
        # Before any weight is loaded: a run that cannot be resumed stops here.
        self.checkpoint = find_checkpoint(config.trainer.resume, self.run_dir)
        resumed = check_resumable(self.checkpoint, config, inputs.world_size) if self.checkpoint else None
        self.state = resumed or TrainerState(0, 0, inputs.world_size, {})
        # Of run_dir's newest checkpoint: what is saved is not written again, since a kill between two renames would lose it.
        self.saved_step = self.state.step if self.checkpoint in checkpoints(self.run_dir) else None

        self.adapter = build_adapter(config.model.family, config.model.path, device, DTYPES[config.model.dtype])
        self.plan, self.sigmas = inputs.plan(config, self.adapter)
        self.recorder = Recorder(config, self.run_dir, resumed.step if resumed else None, device)
        resharded = resumed is not None and resumed.world_size != inputs.world_size
        self.engine = Engine(config, self.plan, self.adapter, config.trainer.total_steps * self.plan.updates, resharded)
        if self.checkpoint is not None:
            load_checkpoint(self.engine, self.checkpoint, self.state, device)
        self.rollout = build_rollout(config, self.adapter, self.engine, self.run_dir, device)
        self.stop.on_request(self.rollout.cancel)
        self.sampler = GroupSampler(
            len(inputs.train_records), config.algorithm.groups_per_step, config.seed, config.data.shuffle
        )
        self.gate = AgreementGate(config, self.plan)
        self.throughput = Throughput(config, self.plan, device)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="overlap")
        self._next_rollout: Future[RolloutResult] | None = None
        self.timer = PhaseTimer()
        self.setup_seconds = time.perf_counter() - began

    def run(self) -> dict[str, float]:
        """Trains to trainer.total_steps. Returns the last validation's metrics; summary.json and report.html are written by rank 0.

        Asked to stop (SIGTERM, Ctrl-C, the launcher is gone), it saves on all ranks and returns what it has.
        """
        watch_progress(self.config.engine.timeout_s)
        try:
            return self._run()
        finally:
            self.rollout.cancel()
            self._background.shutdown()
            self.inputs.rewards.close()
            self.rollout.close()
            self.recorder.close()
            self.stop.close()
            end_watch()

    def _run(self) -> dict[str, float]:
        t, began = self.config.trainer, time.perf_counter()
        # Rank 0's answer: on disks that are not shared it alone has written a summary.
        has_summary = comm.gather_objects((self.run_dir / "summary.json").is_file())[0]
        if self.state.step >= t.total_steps and has_summary:
            if self.is_main:
                print(
                    f"{self.run_dir} is already trained to step {self.state.step}; raise trainer.total_steps to go on"
                )
            return self.state.validation_before
        first_ratio: float | None = None
        after: dict[str, float] | None = None
        stopped: Exception | None = None
        with Progress(t.total_steps, enabled=self.is_main) as progress:
            if self.checkpoint is not None:
                progress.message(f"resumed at step {self.state.step} from {self.checkpoint}")
            try:
                before = self.state.validation_before
                if not before:
                    before = self._validate(self.state.step, "before")
                self._require_best_metric(before)
                self.state = self._advanced(self.state.step, before)
                self.timer.pop()
                for step in range(self.state.step, t.total_steps):
                    step_began, done, last = time.perf_counter(), step + 1, step + 1 == t.total_steps
                    saves = last or (t.save_every > 0 and done % t.save_every == 0)
                    with self._profiled(done):
                        metrics = self._step(step)
                    step_seconds = time.perf_counter() - step_began
                    if first_ratio is None and "policy/first_ratio_max_deviation" in metrics:
                        first_ratio = metrics["policy/first_ratio_max_deviation"]
                        agreement = ""
                        if "rollout/log_ratio_max" in metrics:
                            agreement = f"; rollout/trainer |log ratio| mean {metrics['rollout/log_ratio_mean']:.3g}, max {metrics['rollout/log_ratio_max']:.3g}"
                        progress.message(f"first update: max |ratio - 1| = {first_ratio!r}{agreement}")
                    self.state = self._advanced(done, before)
                    if last or (t.validate_every and done % t.validate_every == 0):
                        try:
                            after = self._validate(done, "after" if last else f"step_{done:06d}")
                            metrics |= {f"validation/{name}": value for name, value in after.items()}
                            if saves and after:
                                self.state = self.state.with_best(done, t.best_metric, after[t.best_metric])
                        except (Stopped, RewardFailure) as reason:
                            # The step itself is done: its row is written and its weights are saved below.
                            stopped = reason
                    timings = self.timer.pop()
                    metrics |= timings | self.throughput.metrics(step_seconds, timings)
                    progress.update(done, metrics)
                    # Before the checkpoint: a kill in between repeats the step, and its row; the other way round the row would be lost.
                    self.recorder.metrics(done, metrics)
                    if stopped is not None:
                        raise stopped
                    if saves:
                        self._save()
                    if t.export_every and done % t.export_every == 0 and not last:
                        self.recorder.export(f"step-{done:06d}", self.engine, self.adapter)
                if after is None:
                    # Killed between the last checkpoint and the summary.
                    after = self._validate(self.state.step, "after")
            except (Stopped, RewardFailure) as reason:
                # Both are raised on all ranks alike, and weights and state are those of the last whole step.
                if self.state.step > 0:
                    self._save()
                if isinstance(reason, RewardFailure):
                    raise
                progress.message(f"stopped at step {self.state.step}: {reason}; the same command resumes")
                return after or {}
        self.recorder.export("final", self.engine, self.adapter)
        train = time.perf_counter() - began
        seconds = {
            "timing/setup_s": self.setup_seconds,
            "timing/train_s": train,
            "timing/total_s": self.setup_seconds + train,
        }
        self.recorder.summary(before, after, self.engine, first_ratio, seconds)
        return after

    def _require_best_metric(self, validation: dict[str, float]) -> None:
        """On every rank alike: they have the same metrics."""
        name = self.config.trainer.best_metric
        if validation and name not in validation:
            raise ConfigError(
                f"trainer.best_metric = {name!r} is not measured by validation, which has {', '.join(sorted(validation))}"
            )

    def _save(self) -> None:
        if self.state.step == self.saved_step:
            return
        alive()
        with self._phase("save"):
            save_checkpoint(self.engine, self.run_dir, self.config, self.state, self.device)
        self.saved_step = self.state.step
        alive()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """A part of a step, for its metrics and for its profile."""
        with span(name), self.timer(name):
            yield

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        if step not in self.config.trainer.profile_steps:
            yield
            return
        with profiled_step(self.run_dir, step, comm.rank(), self.engine.marked_gathers):
            yield

    def _check_stop(self) -> None:
        """Raises Stopped on all ranks where any of them is asked to."""
        if comm.all_ok(self.stop.reason is None, self.device):
            return
        reasons = [reason for reason in comm.gather_objects(self.stop.reason) if reason is not None]
        raise Stopped(reasons[0])

    def _step(self, step: int) -> dict[str, float]:
        """One rollout and its updates. Metrics are over all ranks. Raises Stopped before the weights change, never later."""
        self._check_stop()
        result = self._training_rollout(step)
        self.timer.add("rollout", result.generation_seconds)
        # Rewards overlap with generation; this is what was left to wait for after the last image.
        self.timer.add("reward", result.reward_wait_seconds)
        with self._phase("advantage"):
            rewards, advantages, valid, metrics = score_samples(result, self.inputs, self.config, self.device)
        every = self.config.logging.samples_every
        if every and (step + 1) % every == 0:
            self.recorder.grid(step + 1, f"training_{step + 1:06d}", result, [float(r) for r in rewards])
        if self.config.rollout.overlap and step + 1 < self.config.trainer.total_steps:
            self._start_next_rollout(step + 1)
        with self._phase("update"):
            batch, advantages, valid = share_batch(result.batch.without_media(), advantages, valid, self.plan)
            chosen, valid = self.inputs.algorithm.choose(advantages, batch.group_id, valid)
            advantages, batch = clipped(advantages[chosen], self.config.algorithm.advantage_clip), batch.select(chosen)
            training = self._training(batch)
            with self.engine.sharing_forwards():
                self.throughput.measure(training)
                staleness = self.state.policy_version - batch.policy_version
                if isinstance(training, Replay) and self.gate.is_due(step, staleness):
                    metrics |= self.gate.measure(training)
                training.begin(self.gate.trusts_rollout())
                updates = [training.update(u, advantages, valid) for u in range(self.plan.updates)]
            if self.engine.old_policy is not None:
                self.engine.old_policy.update()
        # What rollout and trainer disagree on is measured where both have the same weights: in the first update.
        first, last = updates[0], updates[-1]
        metrics |= {metric_name(name): value for name, value in last.items() if not name.startswith("rollout_")}
        metrics |= {metric_name(name): value for name, value in first.items() if name.startswith("rollout_")}
        metrics["optimizer/skipped"] = sum(update["skipped"] for update in updates)
        metrics["policy/version"] = float(result.batch.policy_version)
        metrics["policy/staleness"] = float(self.state.policy_version - result.batch.policy_version)
        metrics |= {f"rollout/{name}": value for name, value in self.rollout.metrics().items()}
        if "ratio_max_deviation" in first:
            metrics["policy/first_ratio_max_deviation"] = first["ratio_max_deviation"]
        return metrics

    def _training(self, batch: RolloutBatch) -> PairTraining:
        algorithm = self.inputs.algorithm
        kind = Replay if algorithm.process == "reverse" else ForwardTraining
        return kind(self.config, self.plan.shared(), self.adapter, self.engine, algorithm, batch)

    def _tasks(self, step: int) -> list[GroupTask]:
        """This rank's groups of a step, with ids and windows that depend on the step alone, not on the number of ranks."""
        config, turns = self.config, self.inputs.agent_loop.turns
        K, G = config.algorithm.groups_per_step, config.algorithm.group_size
        records = [
            self.inputs.train_records[i] for i in rank_slice(self.sampler.indices(step), comm.rank(), comm.world_size())
        ]
        first = step * K + comm.rank() * len(records)
        # The ids that make_tasks gives out.
        group_id = (first * turns + torch.arange(len(records) * turns)).repeat_interleave(G)
        sample_id = first * turns * G + torch.arange(len(group_id))
        r, start, size = config.rollout, torch.zeros_like(sample_id), step_size(config, step)
        if self.inputs.algorithm.process == "reverse":
            start = draw_window_starts(
                window_config(config),
                self.adapter.sigmas(r.num_steps, size, r.sigmas),
                r.rule,
                r.noise_level,
                seed=config.seed,
                iteration=step,
                sample_id=sample_id,
                group_id=group_id,
            )
        return make_tasks(records, first, G, turns, start)

    def _training_rollout(self, step: int) -> RolloutResult:
        """The samples of a step: those started while the step before was trained, where there are any; else sampled now."""
        pending, self._next_rollout = self._next_rollout, None
        if pending is not None:
            error: Exception | None = None
            try:
                with self._phase("rollout_wait"):
                    result = pending.result()
            except Exception as problem:
                error = problem
            self._check_stop()
            if comm.all_ok(error is None, self.device):
                return result
            # A lost server: the step is sampled now, with the weights of now.
            comm.agree(None if isinstance(error, ServerLostError) else error, self.device)
        with self.engine.old_weights():
            return self._rollout(
                self._tasks(step), self._sampling(step), self.config.rollout.groups_per_batch, self.state.policy_version
            )

    def _sampling(self, step: int) -> SamplingParams:
        algorithm, size = self.inputs.algorithm, step_size(self.config, step)
        if algorithm.process == "forward":
            return sampling_params(self.config, 0, size=size)
        keeps_old_v = algorithm.needs_old_v and self.gate.may_trust_rollout()
        return sampling_params(self.config, self.plan.slots, keeps_old_v, size)

    def _start_next_rollout(self, step: int) -> None:
        """In the background, with the weights as they are before this step's update: one step off-policy, and the batch says so."""
        with self.engine.old_weights(), self.rollout.phase(self.state.policy_version):
            arguments = (self._tasks(step), self._sampling(step), self.config.rollout.groups_per_batch)
            self._next_rollout = self._background.submit(self._sample, *arguments, self.state.policy_version)

    def _rollout(
        self, tasks: list[GroupTask], sampling: SamplingParams, groups_per_batch: int, policy_version: int
    ) -> RolloutResult:
        """All groups of a phase on this rank. An error on one rank is raised on all of them; a lost server costs the phase only."""
        if self._next_rollout is not None:
            # New weights under a running rollout would make it stale.
            wait([self._next_rollout])
        while True:
            error: Exception | None = None
            result: RolloutResult | None = None
            with ExitStack() as stack:
                with self._phase("sync"):
                    stack.enter_context(self.rollout.phase(policy_version))
                alive()
                try:
                    result = self._sample(tasks, sampling, groups_per_batch, policy_version)
                except Exception as problem:
                    error = problem
            # A rollout that was cut short ends in an error of its own; a stop matters more.
            self._check_stop()
            if comm.all_ok(not isinstance(error, ServerLostError), self.device):
                break
        comm.agree(error, self.device)
        assert result is not None
        return result

    def _sample(
        self, tasks: list[GroupTask], sampling: SamplingParams, groups_per_batch: int, policy_version: int
    ) -> RolloutResult:
        return run_agent_loops(
            self.inputs.agent_loop,
            tasks,
            adapter=self.adapter,
            rollout=self.rollout,
            rewards=self.inputs.rewards,
            sampling=sampling,
            policy_version=policy_version,
            groups_per_batch=groups_per_batch,
            max_sequence_length=self.config.rollout.max_sequence_length,
            negative_prompt=self.config.data.negative_prompt,
            sigmas=self.config.rollout.sigmas,
        )

    def _validate(self, step: int, name: str) -> dict[str, float]:
        """Held-out prompts, ODE, fixed seeds: {"reward": mean, "ocr/exact_match": mean, ...}; a grid in samples/<name>.png."""
        records = self.inputs.validation_records
        if not records:
            return {}
        with self._phase("validation"):
            n, world = len(records), comm.world_size()
            lo, hi = comm.rank() * n // world, (comm.rank() + 1) * n // world
            tasks = make_tasks(records[lo:hi], lo, 1, self.inputs.agent_loop.turns)
            # Another policy than the one that samples the steps: its version is one that no step has.
            is_other = (self.engine.ema is not None and self.config.ema.sample) or self.engine.old_policy is not None
            version = -1 - self.state.policy_version if is_other else self.state.policy_version
            with self.engine.sampling_weights():
                result = self._rollout(
                    tasks, validation_params(self.config), self.config.validation.batch_size, version
                )
            weighted = weighted_sums(result.reward, self.inputs.rewards)
            self.recorder.grid(step, name, result, weighted)
            comm.together(
                lambda: self.recorder.prompts(name, lo, self.inputs.agent_loop.turns, result, weighted), self.device
            )
        rewards = torch.tensor([value for values in comm.gather_objects(weighted) for value in values])
        require_enough(rewards.isfinite(), result.reward, self.config)
        means = component_means(result.reward, self.inputs.rewards)
        return {
            "reward": float(rewards.nanmean()),
            "invalid_ratio": float((~rewards.isfinite()).float().mean()),
            **{name.removeprefix("reward/"): value for name, value in means.items()},
        }

    def _advanced(self, step: int, before: dict[str, float]) -> TrainerState:
        return replace(
            self.state,
            step=step,
            policy_version=step * self.plan.updates,
            world_size=self.inputs.world_size,
            validation_before=before,
        )


def metric_name(name: str) -> str:
    """A metric of an update as it is logged."""
    if name in ("grad_norm", "lr", "skipped"):
        return f"optimizer/{name}"
    return f"rollout/{name.removeprefix('rollout_')}" if name.startswith("rollout_") else f"policy/{name}"
