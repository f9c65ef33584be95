"""Every backend gives the bits of the reference on the CPU: forward and backward, all ops, dtypes and options.

The reference's accuracy is the business of each op's own tests; equal bits carry it over. On a GPU (marker `gpu`) Triton, CUDA and the
reference itself are held to the same, from the same inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import CPU_BACKENDS
from torch import Tensor
from util import DTYPES, coefficients, randn, steps

from flowgrpo_fast.ops import (
    NoiseKey,
    StepCoefficients,
    cfg_combine,
    flow_grpo_loss,
    group_advantage,
    philox_words,
    policy_loss,
    sde_log_prob,
    sde_step,
    use_backend,
)
from flowgrpo_fast.ops._checks import rows_view
from flowgrpo_fast.ops._reduce import lane_sum
from flowgrpo_fast.ops.triton.sde_log_prob import finalize

SHAPES = ((3, 1), (2, 5, 3), (2, 9, 64), (2, 2, 3, 4, 5), (1, 4099))
TARGETS = [
    *(pytest.param(backend, "cpu") for backend in CPU_BACKENDS if backend != "reference"),
    *(pytest.param(backend, "cuda", marks=pytest.mark.gpu) for backend in ("triton", "cuda", "reference")),
]
Inputs = dict[str, Tensor]
Call = Callable[[Inputs], tuple[Tensor, ...]]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Inputs:
    latents = {name: randn(shape, seed, dtype) for seed, name in enumerate(("v", "v_neg", "v_old", "v_ref", "noise"))}
    x, coef = randn(shape, 9), coefficients(shape[0])
    prev, log_prob = sde_step(x, latents["v_old"], coef, noise=latents["noise"])
    rows = {"a": coef.a, "b": coef.b, "s": coef.s, "old_log_prob": log_prob, "adv": randn(shape[:1], 10)}
    return {
        **latents,
        "x": x,
        "prev": prev,
        **rows,
        "step": steps(shape[0]),
        "id": torch.arange(shape[0]) * 7919 + (1 << 33),
    }


def coef(given: Inputs) -> StepCoefficients:
    return StepCoefficients(given["a"], given["b"], given["s"])


def with_gradients(function: Callable[[Inputs], tuple[Tensor, ...]], *names: str) -> Call:
    """Outputs, and the gradients of the named inputs under fixed weights."""

    def call(given: Inputs) -> tuple[Tensor, ...]:
        leaves = {name: given[name].detach().requires_grad_(True) for name in names}
        outputs = function({**given, **leaves})
        sum((output.float() * (i + 1)).sum() for i, output in enumerate(outputs) if output.requires_grad).backward()
        return *(output.detach() for output in outputs), *(leaf.grad for leaf in leaves.values())

    return call


def calls() -> Iterator[tuple[str, Call]]:
    for form in ("gaussian", "flow_grpo"):
        for reduction in ("mean", "sum"):
            named = {"form": form, "reduction": reduction}

            def step(g: Inputs, named=named) -> tuple[Tensor, ...]:
                return sde_step(g["x"], g["v"], coef(g), noise=g["noise"], **named)

            def log_prob(g: Inputs, named=named) -> tuple[Tensor, ...]:
                return tuple(sde_log_prob(g["x"], g["v"], g["prev"], coef(g), g["v_ref"], g["v_old"], **named))

            yield f"sde_step {form} {reduction}", with_gradients(step, "x", "v")
            yield f"sde_log_prob {form} {reduction}", with_gradients(log_prob, "v")
    yield (
        "sde_log_prob alone",
        with_gradients(lambda g: (sde_log_prob(g["x"], g["v"], g["prev"], coef(g)).log_prob,), "v"),
    )
    yield "sde_step philox", lambda g: sde_step(g["x"], g["v"], coef(g), key=NoiseKey(5 << 40, g["step"], g["id"], 3))
    yield (
        "sde_step philox rounded",
        lambda g: sde_step(g["x"], g["v"], coef(g), key=NoiseKey(1, g["step"], g["id"]), out_dtype=g["v"].dtype),
    )
    for rescale in (False, True):
        yield (
            f"cfg_combine {rescale}",
            with_gradients(lambda g, r=rescale: (cfg_combine(g["v"], g["v_neg"], 3.5, r),), "v", "v_neg"),
        )
        for everything in (False, True):

            def loss(g: Inputs, rescale=rescale, everything=everything, **named: str) -> tuple[Tensor, ...]:
                batch = len(g["adv"])
                more = (
                    {
                        "v_old": g["v_old"], "v_ref": g["v_ref"], "kl_weight": 0.3, "step_weight": g["adv"].abs(),
                        "mask": torch.arange(batch, device=g["adv"].device) != 1, "denominator": 7.0,
                    }
                    if everything
                    else {"old_log_prob": g["old_log_prob"]}
                )  # fmt: skip
                value, metrics = flow_grpo_loss(
                    g["v"], g["x"], g["prev"], coef(g), g["adv"], v_neg=g["v_neg"], scale=3.5, rescale=rescale, clip_low=0.1,
                    clip_high=0.2, **more, **named,
                )  # fmt: skip
                return value, *metrics.values()

            yield f"flow_grpo_loss {rescale} {everything}", with_gradients(loss, "v", "v_neg")
            if rescale and everything:
                summed = functools.partial(loss, form="flow_grpo", reduction="sum")
                yield "flow_grpo_loss True True flow_grpo sum", with_gradients(summed, "v", "v_neg")


CALLS = dict(calls())


def assert_same_values(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for i, (left, right) in enumerate(zip(got, want, strict=True)):
        left = left.cpu()
        assert left.dtype == right.dtype
        same = (left == right) & (left.signbit() == right.signbit()) | (left.isnan() & right.isnan())
        assert left.shape == right.shape
        assert bool(same.all()), (
            f"output {i}: largest difference {(left.double() - right.double()).abs().max().item():.3e}"
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("backend", "device"), TARGETS)
def test_equal_bits(backend: str, device: str, call: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = inputs(shape, dtype)
    with use_backend("reference"):
        want = CALLS[call](given)
    with use_backend(backend):
        got = CALLS[call]({name: value.to(device) for name, value in given.items()})
    assert_same_values(got, want)


@pytest.mark.parametrize("clip", [5.0, None])
@pytest.mark.parametrize("normalize", ["global_std", "group_std", "none"])
@pytest.mark.parametrize(("backend", "device"), TARGETS)
def test_equal_advantages(backend: str, device: str, normalize: str, clip: float | None) -> None:
    number = torch.arange(57)
    rewards, valid = randn((57,), 1), number % 6 != 0
    # 35 used ones in the large group: of n the farthest is at most sqrt(n - 1) away, and must be more than 5.
    group = torch.where(number < 45, 3, number * 7 % 5 - 2)
    rewards[3], rewards[11], rewards[20] = float("nan"), float("inf"), 40.0
    with use_backend("reference"):
        want = group_advantage(rewards, group, normalize, clip=clip, valid=valid)
    with use_backend(backend):
        got = group_advantage(rewards.to(device), group.to(device), normalize, clip=clip, valid=valid.to(device))
    assert (want[20] > 5) == (clip is None)
    assert_same_values((got,), (want,))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("batch", "count"), [(1, 1), (7, 3), (700, 2)])
@pytest.mark.parametrize(("backend", "device"), TARGETS)
def test_equal_losses(backend: str, device: str, batch: int, count: int, weighted: bool) -> None:
    given = {"log_ratio": 0.3 * randn((batch, count), 1), "adv": randn((batch,), 2)}
    more = {"step_weight": randn((count,), 3).abs(), "mask": torch.arange(batch) % 3 != 1} if weighted else {}

    def call(g: Inputs) -> tuple[Tensor, ...]:
        loss, metrics = policy_loss(None, None, clip_low=0.2, clip_high=0.28, **g)
        return loss, *metrics.values()

    with use_backend("reference"):
        want = with_gradients(call, "log_ratio")({**given, **more})
    with use_backend(backend):
        got = with_gradients(call, "log_ratio")({name: value.to(device) for name, value in {**given, **more}.items()})
    assert_same_values(got, want)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("backend", "device"), [pytest.param("reference", "cpu"), *TARGETS])
def test_rows_of_any_stride(backend: str, device: str, call: str) -> None:
    """Every latent is the first tokens of another, longer one, so that no two have the same row stride."""
    given = inputs((2, 5, 3), torch.float32)
    with use_backend("reference"):
        want = CALLS[call](given)
    for i, name in enumerate(name for name, value in given.items() if value.dim() > 1):
        rest = torch.full((2, 1 + i, 3), float("nan"))
        given[name] = torch.cat((given[name], rest), 1).to(device)[:, :5]
        assert rows_view(given[name]).data_ptr() == given[name].data_ptr(), "copied"
    with use_backend(backend):
        got = CALLS[call]({name: value.to(device) for name, value in given.items()})
    assert_same_values(got, want)


@pytest.mark.parametrize("call", ["cfg_combine True", "sde_log_prob gaussian mean", "flow_grpo_loss True True"])
def test_large_gradients_fill_their_memory(call: str) -> None:
    """Above 1 MiB it comes from csrc/pool.h, with what a former gradient left there; from 8 MiB on it is written past the caches."""
    assert "cpp" in CPU_BACKENDS, "make extension"
    given = inputs((3, 700, 1000), torch.float32)
    with use_backend("reference"):
        want = CALLS[call](given)
    blocks = [torch.ops.flowgrpo_fast_C.pooled_empty(given["v"], torch.float32).fill_(float("nan")) for _ in range(3)]
    del blocks
    with use_backend("cpp"):
        got = CALLS[call](given)
    assert_same_values(got, want)


def test_the_interpreters_sum_of_more_than_1024_chunks() -> None:
    """Long videos: the sums of the chunks wrap around the lanes. The last kernel alone: the interpreter takes a minute for as many chunks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    partial, s = randn((1, 2, 1035), 0), torch.tensor([0.3, 0.7])
    got, _, _ = finalize(partial.to(device), s.to(device), 1, "flow_grpo", "sum", kl=False, log_ratio=False)
    assert_same_values((got,), (-lane_sum(partial[0].double()).float(),))


@pytest.mark.parametrize(("backend", "device"), [p for p in TARGETS if p.values != ("triton", "cpu")])
def test_rows_of_more_than_1024_chunks(backend: str, device: str) -> None:
    length = 1030 * 4096 + 5
    x, v, prev = (randn((1, length), seed) for seed in range(3))
    given = coefficients(1)
    with use_backend("reference"):
        want = sde_log_prob(x, v, prev, given)
    with use_backend(backend):
        got = sde_log_prob(x.to(device), v.to(device), prev.to(device), given.to(device))
    assert_same_values((got.log_prob,), (want.log_prob,))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("rescale", [None, False, True])
@pytest.mark.parametrize("bad", ["prev", "v", "v_ref"])
@pytest.mark.parametrize("width", [8, 5])  # 8: the guidance inside the kernels; 5: with the rescale beside them
@pytest.mark.parametrize(("backend", "device"), [pytest.param("reference", "cpu"), *TARGETS])
def test_row_39_a_masked_sample_hands_on_no_nan(
    backend: str, device: str, width: int, bad: str, rescale: bool | None
) -> None:
    given = inputs((3, 4, width), torch.float32)
    given[bad][1, :2], given[bad][1, 2:] = float("nan"), float("inf")
    g = {name: value.to(device) for name, value in given.items()}
    leaf, v_neg = g["v"].requires_grad_(True), g["v_neg"].requires_grad_(True)
    guidance = {} if rescale is None else {"v_neg": v_neg, "scale": 3.0, "rescale": rescale}
    mask = torch.tensor([True, False, True], device=device)
    with use_backend(backend):
        loss, _ = flow_grpo_loss(
            leaf, g["x"], g["prev"], coef(g), g["adv"], old_log_prob=g["old_log_prob"], v_ref=g["v_ref"], kl_weight=0.1,
            mask=mask, clip_low=9.0, clip_high=9e9, **guidance,
        )  # fmt: skip
        loss.backward()
    assert loss.isfinite()
    for grad in (leaf.grad,) if rescale is None else (leaf.grad, v_neg.grad):
        assert_same_values((grad[1],), (torch.zeros(4, width),))
        assert bool(grad.isfinite().all())
        assert bool((grad[[0, 2]] != 0).any())


def test_philox_words_of_cpp() -> None:
    seed, stream = 0x7123456789ABCDEF, 65535
    step, ids = torch.tensor([0, 9, 65535, 3]), torch.tensor([0, 1 << 40 | 77, -1, 2**63 - 1])
    words = torch.empty(4, 24, dtype=torch.int64)
    assert "cpp" in CPU_BACKENDS
    torch.ops.flowgrpo_fast_C.philox_words(step, ids, seed, stream, words)
    assert torch.equal(words, philox_words(NoiseKey(seed, step, ids, stream), 24))


def test_philox_words_of_triton() -> None:
    from philox_kernel import triton_words

    seed, stream = 0x7123456789ABCDEF, 65535
    step, ids = torch.tensor([0, 9, 65535, 3]), torch.tensor([0, 1 << 40 | 77, -1, 2**63 - 1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = triton_words(seed, step.to(device), stream, ids.to(device)).cpu()
    assert torch.equal(words, philox_words(NoiseKey(seed, step, ids, stream), words.shape[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_training_step_waits_for_nothing(backend: str) -> None:
    """No host sync on a GPU, from the sampler's step to the gradient."""
    given = {name: value.cuda() for name, value in inputs((2, 9, 64), torch.bfloat16).items()}
    names = ("sde_step philox", "sde_log_prob gaussian mean", "flow_grpo_loss True False")
    with use_backend(backend):
        for name in names:
            CALLS[name](given)  # compilation may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            for name in names:
                CALLS[name](given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
