"""Real launches: the `deepspeed` command with two CPU ranks, plain processes, kill -9. Slow, so few."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowgrpo_fast.checkpoint import checkpoints
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.rollout.agent_loop import GroupTask, SingleTurnAgentLoop, Turn
from flowgrpo_fast.rollout.wire import free_port
from tests.launching import ROOT, TRAIN, arguments, environment, finish, run_ranks, start_ranks
from tests.ranks import preload, wait_for
from tests.tiny import brightness, exported, tiny_pipeline

LORA_BF16 = ["model.train=lora", "model.lora.rank=4", "model.dtype=bfloat16"]


def assert_same_weights(a: Path, b: Path) -> None:
    mine, theirs = exported(a), exported(b)
    assert mine.keys() == theirs.keys()
    for name, t in mine.items():
        assert torch.equal(t, theirs[name]), name


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    preload()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one")
    run_ranks(1, run_dir)
    return run_dir


def test_deepspeed_launcher_with_two_ranks_equals_one_rank_bitwise(one_rank: Path, tmp_path: Path) -> None:
    """ZeRO-3, full fine-tuning, fp32, live rollouts: the same weights to the last bit after 5 steps, and ratio 1 on both ranks."""
    launcher, port = Path(sys.executable).parent / "deepspeed", free_port()
    command = [str(launcher), "--num_accelerators=2", f"--master_port={port}", *arguments(tmp_path, "engine.threads=1")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "first update: max |ratio - 1| = 0.0;" in done.stdout
    assert_same_weights(one_rank, tmp_path)
    for a, b in zip(read_metrics(one_rank), read_metrics(tmp_path), strict=True):
        assert b["policy/first_ratio_max_deviation"] == 0.0
        assert b["reward/mean"] == pytest.approx(a["reward/mean"], abs=1e-6)
        assert b["optimizer/grad_norm"] == pytest.approx(a["optimizer/grad_norm"], rel=1e-6)
        if "validation/reward" in a:
            assert b["validation/reward"] == pytest.approx(a["validation/reward"], abs=1e-5)
    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))


def test_lora_bf16_two_ranks_equal_one_bitwise(tmp_path: Path) -> None:
    """With a KL to the reference, whose metric is over all ranks."""
    settings = (*LORA_BF16, "algorithm.kl_coef=0.1", "optimizer.learning_rate=0.01")
    outputs = [run_ranks(world, tmp_path / str(world), *settings) for world in (1, 2)]
    assert all("first update: max |ratio - 1| = 0.0;" in output for output in outputs)
    assert_same_weights(tmp_path / "1", tmp_path / "2")
    mine, theirs = (read_metrics(tmp_path / str(world)) for world in (1, 2))
    assert mine[0]["policy/kl"] == theirs[0]["policy/kl"] == 0.0
    for a, b in zip(mine[1:], theirs[1:], strict=True):
        assert a["policy/kl"] > 0
        assert b["policy/kl"] == pytest.approx(a["policy/kl"], rel=1e-5)


def test_bf16_full_and_several_micro_batches_per_rank(tmp_path: Path) -> None:
    """Two micro-batches a rank: ZeRO-3 adds (m1 + m3) + (m2 + m4) where one rank adds ((m1 + m2) + m3) + m4, so weights agree to rounding (3 % of
    what a step moves them in bf16)."""
    settings = ["model.dtype=bfloat16", "rollout.window={size: 2, range: [0, 3]}", "trainer.total_steps=1"]
    outputs = [run_ranks(world, tmp_path / str(world), *settings) for world in (1, 2)]
    assert all("first update: max |ratio - 1| = 0.0;" in output for output in outputs)
    a, b = (read_metrics(tmp_path / str(world))[0] for world in (1, 2))
    assert b["optimizer/grad_norm"] == pytest.approx(a["optimizer/grad_norm"], rel=1e-3)
    assert b["reward/mean"] == pytest.approx(a["reward/mean"], abs=1e-6)
    mine, theirs = (exported(tmp_path / str(world)) for world in (1, 2))
    start = load_file(tiny_pipeline() / "transformer" / "diffusion_pytorch_model.safetensors")
    for name, t in mine.items():
        moved = float((t - start[name].bfloat16()).float().norm())
        assert float((theirs[name] - t).float().norm()) <= 0.1 * moved, name
    assert sum(bool((t != start[name].bfloat16()).any()) for name, t in mine.items()) > 50


def test_two_ranks_with_another_micro_batch_shape(one_rank: Path, tmp_path: Path) -> None:
    """fp32, micro-batches of 4 for 8: gradient norm of the first step to 1e-5, log-probs too."""
    run_ranks(2, tmp_path, "engine.micro_batch_size=4", "trainer.total_steps=1")
    a, b = read_metrics(one_rank)[0], read_metrics(tmp_path)[0]
    assert b["optimizer/grad_norm"] == pytest.approx(a["optimizer/grad_norm"], rel=1e-5)
    assert b["rollout/log_ratio_max"] < 1e-5
    assert b["policy/first_ratio_max_deviation"] == 0.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.agent_loop=tests.test_launch:BrokenOnRank1", "only rank 1 knows why"),
        ("rewards.0.name=tests.test_launch:disk_full_on_rank_1", "could not write"),
    ],
)
def test_a_fault_on_one_rank_ends_both(tmp_path: Path, override: str, message: str) -> None:
    """No collective is left waiting: both ranks exit 1 long before any time-out, and say what happened."""
    began = time.monotonic()
    codes, output = finish(start_ranks(2, tmp_path, override, "trainer.total_steps=1"), timeout=120)
    assert codes == [1, 1], output
    assert time.monotonic() - began < 100
    assert message in output
    assert "another rank failed" in output
    assert not checkpoints(tmp_path)


class BrokenOnRank1(SingleTurnAgentLoop):
    async def run(self, task: GroupTask) -> list[Turn]:
        if os.environ["RANK"] == "1":
            raise RuntimeError("only rank 1 knows why")
        return await super().run(task)


def disk_full_on_rank_1(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return brightness(images, prompts, metadata)


def test_an_error_on_both_ranks_ends_both(tmp_path: Path) -> None:
    codes, output = finish(start_ranks(2, tmp_path, "rewards.0.name=tests.test_trainer_faults:raising"))
    assert codes == [1, 1], output
    assert "the scorer is broken" in output


def test_bad_config_exits_2_with_one_line(tmp_path: Path) -> None:
    codes, output = finish(start_ranks(2, tmp_path, "algorithm.groups_per_step=5"))
    assert codes == [2, 2], output
    assert output.count("error: algorithm.groups_per_step 5 does not divide by 2 rank(s)") == 1
    assert "Traceback" not in output


def test_kill_while_saving_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """kill -9 as soon as a checkpoint is being written; the run then resumes from the one before and finishes."""
    (rank,) = start_ranks(1, tmp_path, "trainer.save_every=1", "trainer.keep_checkpoints=99")
    is_saving = lambda: checkpoints(tmp_path) and list((tmp_path / "checkpoints").glob(".step-*.tmp"))  # noqa: E731
    wait_for(is_saving, 200, "saving a second checkpoint")
    os.kill(rank.pid, signal.SIGKILL)
    assert rank.wait(60)[0] == -signal.SIGKILL
    saved = checkpoints(tmp_path)
    assert saved, "no checkpoint had been finished"
    assert saved[-1].name != "step-000005"
    output = run_ranks(1, tmp_path, "trainer.save_every=1", "trainer.keep_checkpoints=99")
    assert f"resumed at step {int(saved[-1].name[-6:])} from {saved[-1]}" in output
    steps = [row["step"] for row in read_metrics(tmp_path)]
    assert steps == [1, 2, 3, 4, 5]
    assert checkpoints(tmp_path)[-1].name == "step-000005"


def test_dry_run_prints_config_deepspeed_dict_and_arithmetic(tmp_path: Path) -> None:
    command = [sys.executable, *arguments(tmp_path, "--dry-run")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for part in (
        "total_steps: 5",
        '"stage": 3',
        "1 rank(s) x 4 group(s): 16 samples per step",
        "= 2 forward(s) of 8 (the rollout's shape)",
    ):
        assert part in done.stdout
    assert not any(tmp_path.iterdir()), "a dry run writes nothing"


def test_script_does_not_shadow_other_modules(tmp_path: Path) -> None:
    """Run as a script, its folder must not stay first on sys.path: `import schedule` or `config` would find ours."""
    for name in ("schedule", "config", "metrics"):
        (tmp_path / f"{name}.py").write_text("theirs = True\n")
    code = f"import runpy, sys; sys.argv = ['x', '--help']\ntry:\n    runpy.run_path({str(TRAIN)!r}, run_name='__main__')\nexcept SystemExit: pass\n"
    code += "import schedule, config, metrics; assert schedule.theirs and config.theirs and metrics.theirs"
    script = tmp_path / "probe.py"
    script.write_text(f"import sys; sys.path[0] = {str(TRAIN.parent)!r}; sys.path.append({str(tmp_path)!r})\n{code}")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_ops_need_torch_alone(tmp_path: Path) -> None:
    """In a process that can import torch and nothing else of the extras; and within 0.5 s of torch itself."""
    blocked = [
        "deepspeed",
        "diffusers",
        "transformers",
        "peft",
        "vllm",
        "triton",
        "omegaconf",
        "pydantic",
        "einops",
        "PIL",
        "rich",
    ]
    code = f"""
import sys, time
for name in {blocked!r}: sys.modules[name] = None
import torch
began = time.perf_counter()
import flowgrpo_fast.ops as ops
took = time.perf_counter() - began
from flowgrpo_fast.schedule import sde_coefficients, make_sigmas
x = torch.randn(2, 3, 4)
coef = sde_coefficients(make_sigmas(5), torch.tensor([0, 2]))
prev, log_prob = ops.sde_step(x, x, coef, key=ops.NoiseKey(0, 0, torch.arange(2)))
assert torch.equal(ops.sde_log_prob(x, x, prev, coef).log_prob, log_prob)
assert took < 0.5, took
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
