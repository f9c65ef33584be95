"""verl-omni's losses: the originals' formulas in fp64, their registry's way of calling, and what is more exact."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from util import assert_same_bits, column, randn

from flowgrpo_fast.integrations import verl_omni as fast

CONFIG = SimpleNamespace(
    diffusion_loss=SimpleNamespace(clip_ratio=0.1, adv_clip_max=1.5, kl_mask_threshold=2e-3, add_kl_coefficient=True)
)
CLIP_METRICS = ("ppo_kl", "pg_clipfrac", "pg_clipfrac_higher", "pg_clipfrac_lower", "ratio_mean", "ratio_std")
B = 24


def config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(diffusion_loss=SimpleNamespace(**{**vars(CONFIG.diffusion_loss), **changes}))


# The originals' formulas (verl_omni.md, section 1.2), in the dtype of their inputs.


def original_clipped(
    log_ratio: Tensor, used: Tensor, adv: Tensor, c: SimpleNamespace, weights: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    adv, ratio = adv.clamp(-c.adv_clip_max, c.adv_clip_max), used.exp()
    entry = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - c.clip_ratio, 1 + c.clip_ratio))
    off = ratio - 1
    counts = [(values > c.clip_ratio).double().mean() for values in (off.abs(), off, -off)]
    metrics = (-log_ratio.mean(), *counts, ratio.mean(), ratio.std())
    return (entry if weights is None else entry * weights).mean(), dict(zip(CLIP_METRICS, metrics, strict=True))


def original_loss(name: str, given: dict[str, Tensor], c: SimpleNamespace) -> tuple[Tensor, dict[str, Tensor]]:
    lp, old, adv, weights = (given.get(key) for key in ("log_prob", "old_log_prob", "advantages", "rollout_is_weights"))
    log_ratio = lp - old
    if name == "flow_grpo_loss":
        return original_clipped(log_ratio, log_ratio, adv, c, weights)
    square = (given["prev_sample_mean"] - given["old_prev_sample_mean"]).square().flatten(1).mean(1)
    if name == "grpo_guard_loss":
        root = given["sqrt_dt"].mean()
        s = root * given["std_dev_t"].mean()
        loss, metrics = original_clipped(log_ratio, (log_ratio + square / (2 * s**2)) * s, adv, c, weights)
        return loss / root**2, metrics
    s = given["std_dev_t"].flatten() * given["sqrt_dt"]
    divergence = square / (2 * s**2 if c.add_kl_coefficient else 2)
    ratio, far = log_ratio.exp(), divergence >= c.kl_mask_threshold
    up, down = far & (ratio > 1) & (adv > 0), far & (ratio < 1) & (adv < 0)
    entry = torch.where(up | down, 0.0, -adv * ratio)
    metrics = {
        "ppo_kl": -log_ratio.mean(),
        "approx_kl": log_ratio.square().mean() / 2,
        "ratio_mean": ratio.mean(),
        "ratio_std": ratio.std(correction=0),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "kl_new_old_mean": divergence.mean(),
        "kl_new_old_max": divergence.max(),
        "kl_mask_fraction": far.double().mean(),
        "pos_rm_fraction": up.double().mean(),
        "neg_rm_fraction": down.double().mean(),
        "masked_fraction": (up | down).double().mean(),
        "unmasked_fraction": 1 - (up | down).double().mean(),
    }
    return (entry if weights is None else entry * weights).mean(), metrics


def loss_inputs(name: str, dtype: torch.dtype, weighted: bool = False) -> dict[str, Tensor]:
    old = randn((B,), 1, dtype) - 1
    given = {"old_log_prob": old, "log_prob": old + 0.15 * randn((B,), 2, dtype), "advantages": randn((B,), 3, dtype)}
    if name != "flow_grpo_loss":
        mean = randn((B, 6, 5), 4, dtype)
        given["old_prev_sample_mean"] = mean
        given["prev_sample_mean"] = mean + 0.03 * randn((B, 1, 1), 6, dtype) * randn((B, 6, 5), 5, dtype)
        given["std_dev_t"] = column(0.5 + randn((B,), 7).abs(), mean).to(dtype)
        given["sqrt_dt"] = (0.2 + 0.1 * randn((B,), 8).abs()).to(dtype)
    if weighted:
        given["rollout_is_weights"] = (randn((B,), 9).abs() * (torch.arange(B) % 3 > 0)).to(dtype)
    return given


def with_gradients(function: Any, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any], list[Tensor | None]]:
    leaves = {
        name: given[name].clone().requires_grad_(True) for name in ("log_prob", "prev_sample_mean") if name in given
    }
    loss, metrics = function({**given, **leaves})
    loss.backward()
    return loss.detach(), metrics, [leaf.grad for leaf in leaves.values()]


LOSSES = ("flow_grpo_loss", "grpo_guard_loss", "flow_dppo_loss")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_metrics_and_gradients_are_the_originals(
    name: str, dtype: torch.dtype, tolerance: float, weighted: bool
) -> None:
    given = loss_inputs(name, dtype, weighted)
    used = (
        config(clip_ratio=0.02) if name == "grpo_guard_loss" else CONFIG
    )  # Guard's log ratios are smaller by its scale
    loss, metrics, grads = with_gradients(lambda g: getattr(fast, name)(config=used, **g), given)
    wide = {key: value.double() for key, value in given.items()}
    true_loss, true_metrics, true_grads = with_gradients(lambda g: original_loss(name, g, used.diffusion_loss), wide)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss.double(), true_loss, rtol=tolerance, atol=tolerance)
    assert set(metrics) == {f"actor/{key}" for key in true_metrics}
    for key, value in true_metrics.items():
        assert isinstance(metrics[f"actor/{key}"], float)
        assert metrics[f"actor/{key}"] == pytest.approx(value.item(), rel=tolerance, abs=tolerance), key
    for grad, true_grad in zip(grads, true_grads, strict=True):
        assert (grad is None) == (true_grad is None)  # Flow-DPPO's mask passes no gradient to the mean
        if grad is not None:
            torch.testing.assert_close(grad.double(), true_grad, rtol=10 * tolerance, atol=tolerance)
    if name == "flow_dppo_loss":
        assert 0 < true_metrics["pos_rm_fraction"] < true_metrics["kl_mask_fraction"] < 1
        assert true_metrics["neg_rm_fraction"] > 0
    else:
        assert 0 < true_metrics["pg_clipfrac_lower"] < true_metrics["pg_clipfrac"] < 1


def test_flow_dppo_without_the_coefficient_measures_the_plain_distance() -> None:
    given, changed = (
        loss_inputs("flow_dppo_loss", torch.float32),
        config(add_kl_coefficient=False, kl_mask_threshold=1e-4),
    )
    loss, metrics = fast.flow_dppo_loss(config=changed, **given)
    wide = {key: value.double() for key, value in given.items()}
    true_loss, true_metrics = original_loss("flow_dppo_loss", wide, changed.diffusion_loss)
    torch.testing.assert_close(loss.double(), true_loss, rtol=1e-5, atol=1e-6)
    assert metrics["actor/masked_fraction"] == true_metrics["masked_fraction"] > 0


def test_flow_grpo_loss_takes_steps_as_columns() -> None:
    given = {key: value.reshape(6, 4) for key, value in loss_inputs("flow_grpo_loss", torch.float32, True).items()}
    flat = {key: value.flatten() for key, value in given.items()}
    shaped, plain = (fast.flow_grpo_loss(config=CONFIG, **each) for each in (given, flat))
    assert_same_bits(shaped[0], plain[0])
    assert shaped[1] == pytest.approx(plain[1])


def test_on_policy_every_ratio_is_one_and_nothing_is_clipped() -> None:
    for name in LOSSES:
        given = loss_inputs(name, torch.float32)
        given["log_prob"] = given["old_log_prob"].clone()
        if "prev_sample_mean" in given:
            given["prev_sample_mean"] = given["old_prev_sample_mean"].clone()
        _, metrics = getattr(fast, name)(config=config(clip_ratio=1e-6), **given)
        ones = {"actor/ratio_mean", "actor/ratio_min", "actor/ratio_max", "actor/unmasked_fraction"}
        assert metrics == {key: float(key in ones) for key in metrics}


def test_the_clip_keeps_its_digits_where_an_fp32_ratio_has_lost_them() -> None:
    clip = 2e-6
    log_ratio = torch.log1p(torch.tensor([0.99, 1.01, -0.99, -1.01], dtype=torch.float64) * clip).float()
    given = {"old_log_prob": torch.zeros(4), "log_prob": log_ratio, "advantages": torch.ones(4)}
    _, metrics = fast.flow_grpo_loss(config=config(clip_ratio=clip), **given)
    assert [metrics[f"actor/pg_clipfrac{side}"] for side in ("", "_higher", "_lower")] == [0.5, 0.25, 0.25]
    _, rounded = original_clipped(log_ratio, log_ratio, torch.ones(4), config(clip_ratio=clip).diffusion_loss, None)
    assert rounded["pg_clipfrac"] != 0.5


def test_one_entry_and_a_step_without_noise_give_no_nan() -> None:
    given = {key: value[:1] for key, value in loss_inputs("flow_dppo_loss", torch.float32).items()}
    given["std_dev_t"] = torch.zeros(1, 1, 1)
    plain = {key: given[key] for key in ("old_log_prob", "log_prob", "advantages")}
    for loss, metrics in (fast.flow_grpo_loss(config=CONFIG, **plain), fast.flow_dppo_loss(config=CONFIG, **given)):
        assert math.isfinite(loss.item())
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["actor/ratio_std"] == 0


@pytest.mark.parametrize("shape", [(B, 6, 5), (B, 2, 3, 5), (B, 2, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["a std for each sample", "one std"])
def test_kl_is_the_originals_for_every_layout(shape: tuple[int, ...], shared: bool) -> None:
    mean, ref = randn(shape, 1), randn(shape, 2)
    std_dev_t = torch.tensor(0.7) if shared else column(0.5 + randn((B,), 3).abs(), mean).float()

    def original(given: dict[str, Tensor]) -> tuple[Tensor, dict]:
        distance = (given["prev_sample_mean"] - ref.double()).square()
        return (distance / (2 * std_dev_t.double() ** 2)).mean(), {}

    loss, metrics, (grad,) = with_gradients(
        lambda g: fast.kl_loss(**g, ref_prev_sample_mean=ref, std_dev_t=std_dev_t), {"prev_sample_mean": mean}
    )
    true_loss, _, (true_grad,) = with_gradients(original, {"prev_sample_mean": mean.double()})
    torch.testing.assert_close(loss.double(), true_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), true_grad, rtol=1e-5, atol=1e-9)
    assert metrics == {"actor/kl_loss": loss.item()}


def test_registration_in_one_line_each() -> None:
    """The shape of verl-omni's registry: classes whose __call__ hands batch entries to self.compute_loss by name."""

    class FlowGRPOLoss:
        @classmethod
        def compute_loss(cls, **_: Any) -> None:
            raise AssertionError("not replaced")

        def __call__(self, *, config: Any, model_output: dict, data: dict) -> tuple:
            return self.compute_loss(
                old_log_prob=data["old_log_probs"],
                log_prob=model_output["log_probs"],
                advantages=data["advantages"],
                config=config,
                rollout_is_weights=data.get("rollout_is_weights"),
            )

    registered = FlowGRPOLoss()
    FlowGRPOLoss.compute_loss = staticmethod(fast.flow_grpo_loss)
    given = loss_inputs("flow_grpo_loss", torch.float32)
    data = {"old_log_probs": given["old_log_prob"], "advantages": given["advantages"]}
    loss, metrics = registered(config=CONFIG, model_output={"log_probs": given["log_prob"]}, data=data)
    expected, expected_metrics = fast.flow_grpo_loss(config=CONFIG, **given)
    assert_same_bits(loss, expected)
    assert metrics == expected_metrics


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"advantages": torch.zeros(3)}, "advantages"),
        ({"rollout_is_weights": torch.zeros(B, 1)}, "rollout_is_weights"),
        ({"old_log_prob": torch.zeros(3)}, "old_log_prob"),
        ({"config": None}, "config"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], field: str) -> None:
    given = {**loss_inputs("flow_grpo_loss", torch.float32), "config": CONFIG, **changes}
    with pytest.raises(ValueError, match=rf"^{field}: got"):
        fast.flow_grpo_loss(**given)
