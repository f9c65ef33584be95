"""The diffusers scheduler in a sampling loop: step against Euler's and against sample_previous_step, timesteps, saving, errors, imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from test_integrations import (
    MIXED,
    NOISE_LEVELS,
    EntryPoint,
    both_entry_points,
    build,
    by_flow_grpo,
    by_scheduler,
    every_type,
)
from util import SIGMAS, assert_same_bits, randn

import flowgrpo_fast
from flowgrpo_fast.integrations.diffusers_scheduler import FlowMatchSDEDiscreteScheduler
from flowgrpo_fast.integrations.flow_grpo import sde_step_with_logprob


@every_type
def test_without_noise_a_loop_is_eulers_bit_for_bit(sde_type: str) -> None:
    ours, euler = build(), FlowMatchEulerDiscreteScheduler(shift=3.0)
    euler.set_timesteps(sigmas=np.linspace(1.0, 0.1, 10))
    left = right = randn((2, 4, 6, 6), 1)
    for i, t in enumerate(euler.timesteps):
        v = randn((2, 4, 6, 6), 10 + i)
        left = ours.step(v, t, left, noise_level=0.0, sde_type=sde_type, return_dict=False)[0]
        right = euler.step(v, t, right, return_dict=False)[0]
        assert_same_bits(left, right)
        assert ours.step_index == euler.step_index == i + 1


def test_without_noise_a_bf16_step_is_closer_to_the_truth_than_eulers() -> None:
    ours, euler = build(), FlowMatchEulerDiscreteScheduler(shift=3.0)
    euler.set_timesteps(sigmas=np.linspace(1.0, 0.1, 10))
    x, v = randn((2, 500), 1, torch.bfloat16), randn((2, 500), 2, torch.bfloat16)
    left = ours.step(v, SIGMAS[4] * 1000, x, noise_level=0.0).prev_sample
    right = euler.step(v, SIGMAS[4] * 1000, x).prev_sample
    truth = x.double() + (SIGMAS[5] - SIGMAS[4]).double() * v.double()
    left_error, right_error = ((value.double() - truth).abs().mean().item() for value in (left, right))
    assert left_error < right_error  # 0.001163 and 0.001193


@every_type
def test_step_is_sample_previous_step_at_step_index(sde_type: str) -> None:
    scheduler, named = build(), dict(noise_level=NOISE_LEVELS[sde_type], sde_type=sde_type)
    x = randn((2, 5, 3), 1)
    for i in (4, 5):  # the first timestep is looked up, the rest is counted
        v, generators = randn((2, 5, 3), i), [torch.Generator().manual_seed(i) for _ in range(2)]
        one = scheduler.step(
            v, SIGMAS[i] * 1000, x, generator=generators[0], return_sqrt_dt=True, return_dict=False, **named
        )
        assert scheduler.step_index == i + 1
        other = by_scheduler(x, v, torch.tensor([i]), sde_type, generator=generators[1])
        assert one[3].shape == ()
        assert one[4].shape == (2,)
        for left, right in zip(one, other, strict=True):
            assert_same_bits(left, right.reshape(left.shape))
        x = one[0]


def test_step_begins_where_it_is_told_and_anew_after_set_timesteps() -> None:
    scheduler, x = build(), randn((2, 5), 1)
    scheduler.set_begin_index(3)
    out = scheduler.step(x, torch.tensor(123.0), x, prev_sample=x)  # not looked up: not even in the schedule
    assert scheduler.step_index == 4
    assert_same_bits(out.log_prob, by_scheduler(x, x, torch.tensor([3]), "sde", prev_sample=x).log_prob)
    assert_same_bits(
        scheduler.sample_previous_step(x, x, prev_sample=x)[1],
        by_scheduler(x, x, torch.tensor([4]), "sde", prev_sample=x).log_prob,
    )
    assert scheduler.step_index == 4
    scheduler.set_timesteps(4)
    assert scheduler.step_index is None
    with pytest.raises(ValueError, match=r"^timestep: got None"):
        scheduler.sample_previous_step(x, x)


def test_step_rounds_to_the_models_dtype_before_it_scores() -> None:
    x, v = randn((2, 500), 1, torch.bfloat16), randn((2, 500), 2, torch.bfloat16)
    out = build().step(v, SIGMAS[4] * 1000, x, generator=torch.Generator().manual_seed(7))
    assert out.prev_sample.dtype == torch.bfloat16
    assert out.prev_sample_mean.dtype == out.log_prob.dtype == torch.float32
    replay = by_scheduler(x, v, torch.tensor([4]), "sde", noise_level=0.7, prev_sample=out.prev_sample)
    assert_same_bits(replay.log_prob, out.log_prob)


def test_step_returns_what_was_asked_for() -> None:
    x = randn((2, 5), 1)
    plain = build().step(x, SIGMAS[0] * 1000, x)
    assert list(plain.keys()) == ["prev_sample", "log_prob", "prev_sample_mean", "std_dev_t"]
    silent = build().step(x, SIGMAS[0] * 1000, x, return_logprobs=False, return_sqrt_dt=True)
    assert list(silent.keys()) == ["prev_sample", "prev_sample_mean", "std_dev_t", "sqrt_dt"]
    assert silent.log_prob is None
    assert len(build().step(x, SIGMAS[0] * 1000, x, return_dict=False)) == 4


def test_timesteps_are_looked_up_in_one_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = build()
    expected = [scheduler.index_for_timestep(t) for t in scheduler.timesteps]
    x = randn((10, 3), 1)
    by_index = by_scheduler(x, x, torch.tensor(expected), "sde", prev_sample=x)

    def loop(*_: object) -> int:
        raise AssertionError("a host sync for each sample")

    monkeypatch.setattr(FlowMatchSDEDiscreteScheduler, "index_for_timestep", loop)
    for step in (by_scheduler, by_flow_grpo):
        assert_same_bits(step(x, x, torch.arange(10), "sde", prev_sample=x).std_dev_t, by_index.std_dev_t)
    one = sde_step_with_logprob(scheduler, x, scheduler.timesteps[4].item(), x, prev_sample=x)
    assert_same_bits(one[3].flatten(), by_index.std_dev_t[4])


def test_a_timestep_that_occurs_twice_is_taken_at_its_second_place_as_in_diffusers() -> None:
    scheduler, x = build(), randn((2, 3), 1)
    scheduler.timesteps = scheduler.timesteps.clone()
    scheduler.timesteps[3] = scheduler.timesteps[2]
    wanted = scheduler.timesteps[[2, 5]]
    assert [scheduler.index_for_timestep(t) for t in wanted] == [3, 5]
    got = scheduler.sample_previous_step(x, x, wanted, prev_sample=x)
    assert_same_bits(got[3], by_scheduler(x, x, torch.tensor([3, 5]), "sde", noise_level=0.7, prev_sample=x).std_dev_t)


def test_config_survives_saving_and_conversion(tmp_path: Path) -> None:
    euler = FlowMatchEulerDiscreteScheduler(shift=2.5, use_dynamic_shifting=True, shift_terminal=0.02)
    ours = FlowMatchSDEDiscreteScheduler.from_config(euler.config)
    ours.save_pretrained(tmp_path)
    back = FlowMatchSDEDiscreteScheduler.from_pretrained(tmp_path)
    public = {name: value for name, value in euler.config.items() if not name.startswith("_")}
    for scheduler in (ours, back):
        assert {name: scheduler.config[name] for name in public} == public
        scheduler.set_timesteps(10, mu=0.8)
    euler.set_timesteps(10, mu=0.8)
    assert_same_bits(back.sigmas, euler.sigmas)
    assert isinstance(FlowMatchEulerDiscreteScheduler.from_config(back.config), FlowMatchEulerDiscreteScheduler)


@both_entry_points
@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"prev_sample": torch.zeros(4, 5), "generator": torch.Generator()}, r"^prev_sample, generator: got both"),
        ({"sde_type": "ode"}, r"^sde_type: got 'ode'"),
        ({"noise_level": -1.0}, r"^noise_level: got -1"),
        ({"noise_level": torch.ones(3)}, r"^noise_level: got"),
        ({"noise_level": 1.2, "sde_type": "cps"}, r"^noise_level: got 1\.2"),
        ({"model_output": torch.zeros(4, 6)}, r"^model_output: got"),
        ({"prev_sample": torch.zeros(1, 5)}, r"^prev_sample: got"),
        ({"prev_sample": torch.zeros(4, 5, dtype=torch.int64)}, r"^prev_sample: got"),
        ({"sample": torch.zeros(4, 5).requires_grad_(True)}, r"^sample: got .*sample\.detach\(\)"),
        ({"index": torch.tensor([0, 1])}, r"^timestep: got"),
        ({"sigmas": SIGMAS.flip(0)}, r"^sigmas: got"),
    ],
)
def test_bad_arguments_are_named(entry: EntryPoint, named: dict[str, Any], message: str) -> None:
    zeros = torch.zeros(4, 5)
    with pytest.raises(ValueError, match=message):
        entry(**{"sample": zeros, "model_output": zeros, "index": MIXED, "sde_type": "sde", **named})


def test_bad_arguments_of_the_scheduler_are_named() -> None:
    scheduler, x = build(), torch.zeros(4, 5)
    for timestep in (3, torch.tensor(3)):
        with pytest.raises(ValueError, match=r"^timestep: got .*not its position"):
            scheduler.step(x, timestep, x)
    for timesteps in (torch.tensor([123.0]), scheduler.timesteps[MIXED].bfloat16()):
        with pytest.raises(ValueError, match=r"^timestep: got .*unrounded"):
            scheduler.sample_previous_step(x, x, timesteps)
    with pytest.raises(ValueError, match=r"^per_token_timesteps: got"):
        scheduler.sample_previous_step(x, x, scheduler.timesteps[MIXED], per_token_timesteps=x)
    inverted = FlowMatchSDEDiscreteScheduler(invert_sigmas=True)
    inverted.set_timesteps(4)
    with pytest.raises(ValueError, match=r"^sigmas: got"):
        inverted.step(x, inverted.timesteps[0], x)


def test_flow_grpo_and_verl_omni_need_torch_alone() -> None:
    code = """
import sys
import torch
import flowgrpo_fast.integrations
alone = [name for name in sys.modules if name.startswith("flowgrpo_fast.") and "integrations" not in name and "version" not in name]
import flowgrpo_fast.integrations.flow_grpo, flowgrpo_fast.integrations.verl_omni
heavy = ("triton", "deepspeed", "diffusers", "transformers", "peft", "omegaconf", "pydantic", "verl_omni")
print(alone, [name for name in heavy if name in sys.modules])
"""
    root = str(Path(flowgrpo_fast.__file__).parents[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "[] []", result.stdout + result.stderr
