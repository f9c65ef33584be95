"""`pytest benchmarks --benchmark-enable` (or `make bench`): each op beside eager PyTorch as the peers write it.

Every row checks the result first: a wrong kernel gets no time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo_fast.ops import NoiseKey, group_advantage, policy_loss, sde_log_prob, sde_step
from flowgrpo_fast.schedule import make_sigmas, sde_coefficients

# Packed Qwen-Image latents at 512^2: 1,024 tokens of 64 channels.
BATCH, TOKENS, CHANNELS = 8, 1024, 64


@pytest.fixture(scope="module")
def step() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    sigmas, index = make_sigmas(10), torch.arange(BATCH) % 8
    x, v = (torch.randn(BATCH, TOKENS, CHANNELS, generator=g) for _ in range(2))
    coef = sde_coefficients(sigmas, index, noise_level=0.7)
    prev, log_prob = sde_step(x, v, coef, key=NoiseKey(0, 1, torch.arange(BATCH)))
    return dict(x=x, v=v, prev=prev, coef=coef, log_prob=log_prob, sigmas=sigmas, index=index)


def peers_log_prob(step: dict[str, Any], v: Tensor) -> Tensor:
    """flow_grpo's formula, in eager fp32."""
    sigma = step["sigmas"][step["index"]].view(-1, 1, 1)
    dt = step["sigmas"][step["index"] + 1].view(-1, 1, 1) - sigma
    std = 0.7 * torch.sqrt(sigma / (1 - torch.where(sigma == 1, step["sigmas"][1], sigma)))
    mean = step["x"] * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
    scale = std * torch.sqrt(-dt)
    log_prob = -((step["prev"] - mean) ** 2) / (2 * scale**2) - torch.log(scale) - 0.9189385332046727
    return log_prob.mean(dim=(1, 2))


def forward_backward(log_prob: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    v = v.detach().requires_grad_()
    log_prob(v).sum().backward()
    assert v.grad is not None
    return v.grad


@pytest.mark.benchmark(group="sde_log_prob forward+backward")
@pytest.mark.parametrize("who", ["flowgrpo_fast", "peers_eager"])
def test_sde_log_prob(benchmark: Any, step: dict[str, Any], who: str) -> None:
    functions = {
        "flowgrpo_fast": lambda v: sde_log_prob(step["x"], v, step["prev"], step["coef"]).log_prob,
        "peers_eager": lambda v: peers_log_prob(step, v),
    }
    torch.testing.assert_close(functions[who](step["v"]), step["log_prob"], rtol=1e-5, atol=1e-6)
    benchmark(forward_backward, functions[who], step["v"])


@pytest.mark.benchmark(group="sde_step with noise")
def test_sde_step(benchmark: Any, step: dict[str, Any]) -> None:
    key = NoiseKey(0, 1, torch.arange(BATCH))
    assert torch.equal(sde_step(step["x"], step["v"], step["coef"], key=key)[0], step["prev"])
    benchmark(sde_step, step["x"], step["v"], step["coef"], key=key)


def peers_advantage(rewards: Tensor, group: Tensor) -> Tensor:
    """A Python loop over groups, as verl-omni has it."""
    result = torch.empty_like(rewards)
    for g in group.unique().tolist():
        rows = group == g
        result[rows] = (rewards[rows] - rewards[rows].mean()) / (rewards[rows].std(correction=0) + 1e-4)
    return result


@pytest.mark.benchmark(group="group_advantage B=4096")
@pytest.mark.parametrize("who", ["flowgrpo_fast", "peers_loop"])
def test_group_advantage(benchmark: Any, who: str) -> None:
    rewards, group = torch.rand(4096, generator=torch.Generator().manual_seed(0)), torch.arange(4096) // 16
    functions = {
        "flowgrpo_fast": lambda r, g: group_advantage(r, g, normalize="group_std"),
        "peers_loop": peers_advantage,
    }
    torch.testing.assert_close(functions[who](rewards, group), peers_advantage(rewards, group), rtol=1e-4, atol=1e-5)
    benchmark(functions[who], rewards, group)


@pytest.mark.benchmark(group="policy_loss")
def test_policy_loss(benchmark: Any) -> None:
    log_prob = torch.zeros(512, 2, requires_grad=True)
    old, adv = torch.full((512, 2), 1e-5), torch.linspace(-1, 1, 512)
    loss, _ = policy_loss(log_prob, old, adv)
    ratio = torch.exp(log_prob - old)
    expected = torch.maximum(-adv[:, None] * ratio, -adv[:, None] * ratio.clamp(1 - 1e-4, 1 + 1e-4)).mean()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    benchmark(lambda: policy_loss(log_prob, old, adv)[0].backward())
