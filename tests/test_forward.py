"""Algorithms over the forward process: each loss against a float64 transcription; noise and levels by key; runs, the old policy's too."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from flowgrpo_fast import engine as engine_package
from flowgrpo_fast.algorithms import ForwardInputs, build_algorithm
from flowgrpo_fast.batch import MediaSize
from flowgrpo_fast.config import AlgorithmConfig, ConfigError
from flowgrpo_fast.data.images import load_image
from flowgrpo_fast.engine.ema import OLD_POLICY_DECAY
from flowgrpo_fast.forward import noise_levels
from flowgrpo_fast.inputs import Inputs
from flowgrpo_fast.metrics import read_metrics
from flowgrpo_fast.models.qwen_image import QwenImageAdapter
from flowgrpo_fast.schedule import make_sigmas
from flowgrpo_fast.train import settle_environment
from flowgrpo_fast.trainer import Trainer
from tests.matrix import FAMILIES
from tests.pipelines import pipeline_folder
from tests.tiny import CPU, exported, tiny_adapter, tiny_config

N, SHAPE = 12, (6, 8)


def inputs(moved: float = 0.1, **changes: Any) -> ForwardInputs:
    """Neighbours are a pair: worse, better."""
    g = torch.Generator().manual_seed(0)
    x0, noise, old_v, shift, to_ref = (torch.randn(N, *SHAPE, generator=g) for _ in range(5))
    values: dict[str, Any] = dict(
        x0=x0, noise=noise, sigma=torch.rand(N, generator=g) * 0.9 + 0.05, v=(old_v + moved * shift).requires_grad_(), old_v=old_v,
        v_ref=old_v + 0.01 * to_ref, advantage=3 * torch.randn(N, generator=g), mask=torch.arange(N) // 2 != 3,
        denominator=torch.tensor(float(N - 2)),
    )  # fmt: skip
    return ForwardInputs(**(values | changes))


def config(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**({"clip_low": 1e-2, "clip_high": 2e-2, "beta": None, "kl_form": "velocity_mse"} | changes))


def each(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)


def mean(entries: Tensor, i: ForwardInputs) -> Tensor:
    return torch.where(i.mask, entries, 0.0).sum() / i.denominator.double()


def diffusion_nft(i: ForwardInputs, v: Tensor, c: AlgorithmConfig) -> Tensor:
    beta, clip = c.beta or 0.1, c.advantage_clip or math.nan
    x0, noise, old, sigma = (t.double() for t in (i.x0, i.noise, i.old_v, i.sigma.view(N, 1, 1)))
    x = (1 - sigma) * x0 + sigma * noise
    r = (i.advantage.double() / clip).clamp(-1, 1) / 2 + 0.5
    parts = []
    for velocity in (beta * v + (1 - beta) * old, (1 + beta) * old - beta * v):
        guess = x - sigma * velocity
        parts.append(each((guess - x0) ** 2) / each((guess - x0).abs()).detach())
    return mean(clip * (r * parts[0] + (1 - r) * parts[1]) / beta, i)


def awm(i: ForwardInputs, v: Tensor, c: AlgorithmConfig) -> Tensor:
    target, A, sigma = (i.noise - i.x0).double(), i.advantage.double(), i.sigma.double()
    forms = {
        "uniform": lambda e: e,
        "sigma": lambda e: sigma * e,
        "ghuber": lambda e: sigma * 4 * ((e + 1e-10) ** 0.25 - 1e-10**0.25),
    }
    old, new = (forms[c.matching](each((u - target) ** 2)) for u in (i.old_v.double(), v))
    r = (old - new).exp()
    return mean(torch.maximum(-A * r, -A * r.clamp(1 - c.clip_low, 1 + c.clip_high)), i)


def dpo(i: ForwardInputs, v: Tensor, c: AlgorithmConfig) -> Tensor:
    target, total = (i.noise - i.x0).double(), torch.zeros((), dtype=torch.float64)
    gain = each((v - target) ** 2) - each((i.v_ref.double() - target) ** 2)
    pairs = [k for k in range(0, N, 2) if i.mask[k]]
    for k in pairs:
        total = total - torch.sigmoid(-(c.beta or 2000.0) / 2 * (gain[k + 1] - gain[k])).log()
    return total / len(pairs)


# Name, settings.
CASES = [
    ("awm", {}),
    ("awm", {"matching": "sigma"}),
    ("awm", {"matching": "ghuber"}),
    ("diffusion_nft", {}),
    ("dpo", {"beta": 3.0}),
]
FORMULAS: dict[str, Callable[[ForwardInputs, Tensor, AlgorithmConfig], Tensor]] = {
    "awm": awm,
    "diffusion_nft": diffusion_nft,
    "dpo": dpo,
}


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("moved", [0.001, 0.1])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_loss_and_gradient_are_the_formulas(name: str, settings: dict[str, Any], moved: float, kl: float) -> None:
    c = config(name=name, kl_coef=kl, **settings)
    i = inputs(moved)
    loss, values, metrics = build_algorithm(c).loss(i)
    loss.backward()
    v = i.v.detach().double().requires_grad_()
    assert i.v_ref is not None
    expected = FORMULAS[name](i, v, c) + kl * mean(each((v - i.v_ref.double()) ** 2), i)
    expected.backward()
    assert v.grad is not None
    assert i.v.grad is not None
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-6)
    assert float((i.v.grad - v.grad).abs().max()) < 1e-6 * max(1.0, float(v.grad.abs().max()))
    assert values.shape == (N,)
    assert not values.requires_grad
    assert int(metrics["kept"]) == N - 2
    assert ("kl" in metrics) == (kl > 0)


def test_on_policy_awm_is_the_advantage_times_the_matching_loss() -> None:
    i = inputs(old_v=None)
    loss, _, metrics = build_algorithm(config(name="awm")).loss(i)
    loss.backward()
    v = i.v.detach().double().requires_grad_()
    mean(i.advantage.double() * each((v - (i.noise - i.x0).double()) ** 2), i).backward()
    assert v.grad is not None
    assert i.v.grad is not None
    torch.testing.assert_close(i.v.grad.double(), v.grad, rtol=0, atol=1e-7)
    assert float(metrics["ratio_max_deviation"]) == 0.0


def test_nft_on_policy_moves_towards_good_samples_and_away_from_bad_ones() -> None:
    for advantage, sign in ((5.0, -1), (-5.0, 1), (0.0, 0)):
        i = inputs(old_v=None, advantage=torch.full((N,), advantage))
        loss, _, _ = build_algorithm(config(name="diffusion_nft")).loss(i)
        loss.backward()
        assert i.v.grad is not None
        along = (i.v.grad * (i.v.detach() - (i.noise - i.x0))).flatten(1).sum(1)[i.mask]
        assert torch.equal(along.sign(), torch.full_like(along, -sign)) or (
            sign == 0 and float(along.abs().max()) < 1e-6
        )


def test_dpo_takes_the_best_and_the_worst_and_no_pair_without_two_rewards() -> None:
    """Row 42: where all rewards of a group are equal, which sample would be the better one is arbitrary."""
    value = torch.tensor([3.0, 1, 2, 5, 7, 7, 7, 7, 1, 0, 0, 0])
    group, valid = torch.arange(3).repeat_interleave(4), torch.tensor([True] * 9 + [False] * 3)
    algorithm = build_algorithm(config(name="dpo", group_size=4))
    index, kept = algorithm.choose(value, group, valid)
    assert index.view(-1, 2)[:1].tolist() == [[1, 3]]
    assert kept.view(-1, 2).tolist() == [[True, True], [False, False], [False, False]]
    index, kept = algorithm.choose(
        torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    )
    assert index.tolist() == [1, 0]
    assert kept.all()


@pytest.mark.parametrize("timesteps", ["uniform", "logit_normal", "schedule"])
def test_noise_levels_are_keyed_by_sample(timesteps: str) -> None:
    sigmas, ids = make_sigmas(10), torch.arange(4000)
    levels = noise_levels(ids, 7, 4, timesteps, sigmas)
    assert levels.shape == (4000, 4)
    assert bool(((levels > 0) & (levels <= 1)).all())
    assert torch.equal(noise_levels(ids[[9, 3]], 7, 4, timesteps, sigmas), levels[[9, 3]])
    assert not torch.equal(noise_levels(ids, 8, 4, timesteps, sigmas), levels)
    if timesteps == "logit_normal":
        assert float(levels.logit().std()) == pytest.approx(1, abs=0.05)
    else:
        falls = timesteps == "schedule"
        assert bool((levels.diff() <= 0).all() if falls else (levels.diff() > 0).all())
        if not falls:  # one level in each quarter
            assert torch.equal((levels * 4).floor().clamp(max=3), torch.arange(4.0).expand(4000, 4))
        assert float(levels.mean()) == pytest.approx(
            float(sigmas[:-1].mean()) if timesteps == "schedule" else 0.5, abs=0.01
        )
    if timesteps == "schedule":
        assert bool(torch.isin(levels, sigmas[:-1]).all())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": "diffusion_nft", "advantage_clip": None}, "advantage_clip = null: diffusion_nft maps"),
        ({"name": "dpo", "train_on": 4}, "train_on = 4: dpo trains on two samples"),
        ({"name": "dpo", "old_policy": "linear_to_0_5"}, "old_policy = 'linear_to_0_5': dpo compares with the policy"),
        (
            {"name": "grpo_guard", "kl_form": "gaussian", "old_policy": "linear_to_0_5"},
            "grpo_guard compares with the policy",
        ),
        ({"name": "awm", "beta": 1.0}, "beta = 1.0: awm has no beta"),
        ({"name": "dpo", "matching": "ghuber"}, "matching = 'ghuber': dpo weighs no errors; set uniform"),
        ({"name": "awm", "kl_coef": 0.1, "kl_form": "gaussian"}, "kl_form = 'gaussian': awm takes no steps"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_algorithm(config(**settings))


def test_an_odd_micro_batch_would_cut_a_pair(tmp_path: Path) -> None:
    run = tiny_config(tmp_path, "algorithm.name=dpo", "rollout.initial_noise=sample", "engine.micro_batch_size=1")
    trainer_inputs = Inputs(run, 1)
    with pytest.raises(
        ConfigError, match="micro_batch_size 1: dpo compares the 2 samples of a group; set a multiple of 2"
    ):
        trainer_inputs.plan(run, tiny_adapter())


def test_the_old_policys_decay() -> None:
    linear, delayed = OLD_POLICY_DECAY["linear_to_0_5"], OLD_POLICY_DECAY["delayed_linear_to_0_999"]
    assert [linear(n) for n in (0, 100, 900)] == pytest.approx([0, 0.1, 0.5])
    assert [delayed(n) for n in (0, 75, 95, 900)] == pytest.approx([0, 0, 0.15, 0.999])


def test_one_noise_for_a_group_would_make_its_samples_equal(tmp_path: Path) -> None:
    run = tiny_config(tmp_path, "algorithm.name=awm", "rollout.initial_noise=group")
    with pytest.raises(ConfigError, match="rollout.initial_noise = 'group': awm samples by the ODE.*set sample"):
        Inputs(run, 1)


@pytest.fixture(scope="module")
def one_rank(process_group: None) -> None:
    settle_environment(tiny_config(Path("unused"), "engine.threads=1"), None)


QUICK = ("data.validation=null", "engine.threads=1", "algorithm.train_timesteps=2", "rollout.initial_noise=sample")
TRAINED: dict[str, tuple[str, ...]] = {
    "nft": ("algorithm.name=diffusion_nft", "engine.zero_stage=0"),
    "nft, averaged old policy, LoRA": ("algorithm.name=diffusion_nft", "algorithm.old_policy=linear_to_0_5", "model.train=lora"),
    "awm": ("algorithm.name=awm", "engine.zero_stage=0", "algorithm.timesteps=schedule", "algorithm.kl_coef=0.1", "algorithm.kl_form=velocity_mse"),
    "awm, several updates": ("algorithm.name=awm", "algorithm.updates_per_rollout=2", "rollout.groups_per_batch=1"),
    "dpo": ("algorithm.name=dpo", "engine.zero_stage=0", "algorithm.timesteps=logit_normal"),
    "dpo, LoRA, guidance": ("algorithm.name=dpo", "model.train=lora", "rollout.guidance_scale=3.0", "data.negative_prompt=blurry"),
}  # fmt: skip


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", FAMILIES)
def test_offline_pairs(family: str, tmp_path: Path) -> None:
    """Given images, encoded as diffusers' VAE does, the better one first; validation is sampled and scored."""
    rows = []
    for i, word in enumerate(("one", "two")):
        files = {key: str(tmp_path / f"{i}_{key}.png") for key in ("chosen", "rejected")}
        for j, file in enumerate(files.values()):
            Image.effect_noise((80 + 16 * j, 70), 40 + 40 * i).convert("RGB").save(file)
        rows.append(json.dumps({"prompt": word, "image": files["rejected"], **files}) + "\n")
    (tmp_path / "pairs.jsonl").write_text("".join(rows))
    # Validation has pairs too, which are of no use there.
    (tmp_path / "validation.jsonl").write_text(rows[0])
    config_ = tiny_config(
        tmp_path / "run", f"model.family={family}", f"model.path={pipeline_folder(family)}", "algorithm.name=dpo", "algorithm.group_size=2", "algorithm.groups_per_step=2",
        "rollout.agent_loop=preferences", "rollout.groups_per_batch=1", "rollout.max_sequence_length=64", f"data.train={tmp_path / 'pairs.jsonl'}",
        f"data.validation={tmp_path / 'validation.jsonl'}", "trainer.total_steps=3", "algorithm.train_timesteps=2", "engine.threads=1", "engine.zero_stage=0",
    )  # fmt: skip
    trainer = run(config_)
    rows_ = read_metrics(tmp_path / "run")
    assert rows_[0]["policy/loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert rows_[2]["policy/preference_margin"] != 0.0
    assert all(row["reward/mean"] == 0.5 and row["policy/kept"] == 8 for row in rows_)
    assert rows_[2]["validation/reward"] > 0
    adapter, size = trainer.adapter, MediaSize(64, 64)
    picture = load_image(json.loads(rows[0])["chosen"], size)[None]
    latents = adapter.encode_images(picture, size)
    # What the VAE makes of its own mode, against encode and decode of ours.
    pixels = picture.float() / 127.5 - 1
    vae: Any = adapter.vae  # type: ignore[attr-defined]
    mode = vae.encode(
        pixels if pixels.dim() == len(vae.encoder.conv_in.weight.shape) else pixels[:, :, None]
    ).latent_dist.mode()
    expected = vae.decode(mode)[0].detach()
    expected = ((expected[:, :, 0] if expected.dim() == 5 else expected) / 2 + 0.5).clamp(0, 1) * 255
    decoded = adapter.decode(latents, size)
    decoded = decoded[:, 0] if decoded.dim() == 5 else decoded
    assert float((decoded.float() - expected).abs().max()) <= 0.51


@pytest.mark.usefixtures("one_rank")
def test_offline_pairs_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps({"prompt": "a", "chosen": "/nowhere.png", "rejected": "/nowhere.png"}) + "\n"
    )
    common = ("algorithm.name=dpo", "rollout.agent_loop=preferences", f"data.train={tmp_path / 'pairs.jsonl'}", *QUICK)
    common = (*common, "rollout.groups_per_batch=1", "algorithm.groups_per_step=1")
    with pytest.raises(ConfigError, match="needs algorithm.name dpo .* and group_size 2, got dpo and 4"):
        Inputs(tiny_config(tmp_path / "four", *common), 1)
    with pytest.raises(ConfigError, match="needs algorithm.name dpo .* and group_size 2, got flow_grpo and 2"):
        Inputs(tiny_config(tmp_path / "grpo", *common, "algorithm.group_size=2", "algorithm.name=flow_grpo"), 1)
    with pytest.raises(ConfigError, match="prompt 0 .'a'. has chosen '/nowhere.png', which is no file"):
        Inputs(tiny_config(tmp_path / "two", *common, "algorithm.group_size=2"), 1)
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(ValueError, match="text.png is not an image that can be read"):
        load_image(str(tmp_path / "text.png"), MediaSize(16, 16))


def run(config_: Any) -> Trainer:
    trainer = Trainer(config_, Inputs(config_, 1), CPU)
    trainer.run()
    trainer.engine.close()
    return trainer


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", TRAINED)
def test_trained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_trained, predict = [], QwenImageAdapter.predict

    def counting(adapter: QwenImageAdapter, network: Any, inputs: dict[str, Any]) -> Tensor:
        if torch.is_grad_enabled():
            rows_trained.append(len(inputs["hidden_states"]))
        return predict(adapter, network, inputs)

    monkeypatch.setattr(QwenImageAdapter, "predict", counting)
    trainer = run(tiny_config(tmp_path, *TRAINED[name], *QUICK, "trainer.total_steps=2"))
    rows = read_metrics(tmp_path)
    per_sample = 2 if "dpo" in name else 4
    assert len(rows) == 2
    for row in rows:
        assert math.isfinite(row["policy/loss"])
        assert row["optimizer/grad_norm"] > 0
        assert row["policy/kept"] == 4 * per_sample * 2 / trainer.plan.updates
    if name == "dpo":
        # Before the first update policy and reference are one.
        assert rows[0]["policy/loss"] == pytest.approx(math.log(2), rel=1e-5)
    if name.startswith("awm"):
        assert rows[0]["policy/first_ratio_max_deviation"] == 0.0
    # Samples may be guided; training forwards have the prompt's branch alone.
    assert set(rows_trained) == {trainer.plan.micro_batch_size}
    if "several" in name:
        assert rows[0]["policy/ratio_max_deviation"] > 0


@pytest.mark.usefixtures("one_rank")
def test_the_old_policy_samples_and_survives_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow average that never moves: every rollout is the first policy's, that of a run which learns nothing. Resumed, the run is the same bits."""
    monkeypatch.setitem(engine_package.engine.OLD_POLICY_DECAY, "linear_to_0_5", lambda n: 1.0)
    settings = (*QUICK, "algorithm.name=diffusion_nft", "algorithm.old_policy=linear_to_0_5", "trainer.save_every=1")
    settings = (*settings, "data.shuffle=false", "optimizer.learning_rate=1e-2")
    run(tiny_config(tmp_path / "whole", *settings, "trainer.total_steps=3"))
    run(tiny_config(tmp_path / "parts", *settings, "trainer.total_steps=1"))
    run(tiny_config(tmp_path / "parts", *settings, "trainer.total_steps=3"))
    whole, parts = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "parts")
    assert [row["policy/old_velocity_distance"] for row in whole] == [
        row["policy/old_velocity_distance"] for row in parts
    ]
    still = tmp_path / "still"
    run(tiny_config(still, *settings, "trainer.total_steps=3", "optimizer.learning_rate=1e-30"))
    assert [row["reward/mean"] for row in whole] == [row["reward/mean"] for row in read_metrics(still)]
    assert whole[0]["policy/old_velocity_distance"] == 0.0
    assert whole[2]["policy/old_velocity_distance"] > 0.0
    mine, theirs = exported(tmp_path / "parts"), exported(tmp_path / "whole")
    assert all(torch.equal(t, theirs[name]) for name, t in mine.items())
