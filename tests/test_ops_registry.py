"""What an import costs, how a backend is chosen, and what the registration promises."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from util import coefficients, randn

from flowgrpo_fast import ops
from flowgrpo_fast.ops import BackendFallbackWarning, _registry, cfg_combine, use_backend

NAMES = (
    "cfg_combine",
    "cfg_combine_backward",
    "flow_grpo_loss",
    "flow_grpo_loss_backward",
    "group_advantage",
    "policy_loss",
    "policy_loss_backward",
    "sde_log_prob",
    "sde_log_prob_backward",
    "sde_step",
    "sde_step_backward",
)


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend but the reference unless a test registers one; tables, announcements and the current backend are put back."""
    monkeypatch.setattr(_registry, "_backends", {name: {} for name in _registry._backends})
    monkeypatch.setattr(_registry, "_import", lambda *_: None)
    monkeypatch.setattr(_registry, "_announced", set())
    monkeypatch.setattr(_registry, "_current", "auto")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(ops.__file__).parents[2])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


def test_import_needs_torch_alone_takes_under_half_a_second_and_reads_the_backend_once() -> None:
    code = """
import os, sys, time
import torch
before, start = set(sys.modules), time.process_time()
import flowgrpo_fast.ops
seconds = time.process_time() - start
new = {name for name in set(sys.modules) - before if not name.startswith(("flowgrpo_fast", "torch"))}
heavy = [m for m in ("triton", "deepspeed", "diffusers", "transformers", "peft", "scipy", "pandas") if m in new]
ours = sorted(name for name in sys.modules if name.startswith("flowgrpo_fast") and ".ops" not in name)
os.environ["FLOWGRPO_BACKEND"] = "cuda"
print(seconds < 0.5, flowgrpo_fast.ops._registry._current, heavy, ours)
print(sorted(name for name in new if "." not in name and name not in sys.stdlib_module_names))
"""
    result = python(code, FLOWGRPO_BACKEND="reference")
    expected = ["True reference [] ['flowgrpo_fast', 'flowgrpo_fast.version']", "[]"]
    assert result.stdout.splitlines() == expected, result.stdout + result.stderr


def run(pos: Tensor, neg: Tensor) -> Tensor:
    return cfg_combine(pos, neg, 2.0)


def marked(v_pos: Tensor, v_neg: Tensor, scale: Tensor, rescale: bool) -> Tensor:
    return torch.full_like(v_pos, 42.0)


@pytest.mark.parametrize("name", ["triton", "cuda", "cpp"])
def test_a_missing_backend_falls_back_and_says_so_once(name: str) -> None:
    pos, neg = randn((2, 3), 1), randn((2, 3), 2)
    expected = run(pos, neg)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with use_backend(name):
                assert torch.equal(run(pos, neg), expected)
    assert [warning.category for warning in caught] == [BackendFallbackWarning]
    text = str(caught[0].message)
    assert "cfg_combine" in text
    assert repr(name) in text
    assert "cpu" in text


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_backends_that_always_exist_say_nothing(name: str) -> None:
    with warnings.catch_warnings(), use_backend(name):
        warnings.simplefilter("error")
        run(randn((2, 3), 1), randn((2, 3), 2))


def test_a_registered_backend_is_used_where_asked_for_and_under_auto() -> None:
    pos, neg = randn((2, 3), 1), randn((2, 3), 2)
    expected = run(pos, neg)
    _registry.register_backend("cfg_combine", "cpp", "cpu", marked)
    assert run(pos, neg).eq(42).all()
    with use_backend("cpp"):
        assert run(pos, neg).eq(42).all()
        with use_backend("reference"):
            assert torch.equal(run(pos, neg), expected)
        assert run(pos, neg).eq(42).all()


def test_auto_ignores_backends_of_other_devices() -> None:
    _registry.register_backend("cfg_combine", "triton", "cuda", marked)
    assert not run(randn((2, 3), 1), randn((2, 3), 2)).eq(42).any()


def test_the_backend_holds_for_backward_passes_too() -> None:
    def marked_backward(grad: Tensor, pos: Tensor, neg: Tensor, scale: Tensor, rescale: bool) -> tuple[Tensor, Tensor]:
        return torch.full_like(grad, 7.0), torch.full_like(grad, 8.0)

    _registry.register_backend("cfg_combine_backward", "cpp", "cpu", marked_backward)
    pos, neg = (randn((2, 3), seed).requires_grad_(True) for seed in (1, 2))
    with use_backend("reference"):
        run(pos, neg).sum().backward()
    assert pos.grad.eq(2).all()
    run(pos, neg).sum().backward()
    assert pos.grad.eq(2 + 7).all()


def test_the_choice_is_undone_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside"), use_backend("reference"):
        raise RuntimeError("inside")
    assert _registry._current == "auto"


def test_unknown_backends_are_errors() -> None:
    with pytest.raises(ValueError, match=r"^use_backend: got 'tritn'; choose one of 'auto'"), use_backend("tritn"):
        pass
    with pytest.raises(ValueError, match=r"^backend: got 'rocm'"):
        _registry.register_backend("cfg_combine", "rocm", "cpu", marked)


def test_an_unknown_backend_in_the_environment_is_an_error() -> None:
    broken = python("import flowgrpo_fast.ops", FLOWGRPO_BACKEND="fast")
    assert broken.returncode != 0
    assert "ValueError: FLOWGRPO_BACKEND: got 'fast'" in broken.stderr


def test_every_op_is_registered_with_its_backward() -> None:
    assert tuple(sorted(_registry._backends)) == NAMES
    for name in NAMES:
        schema = getattr(torch.ops.flowgrpo_fast, name).default._schema
        assert not schema.is_mutable
        assert all(argument.default_value is None for argument in schema.arguments)


def test_a_second_derivative_is_an_error_and_not_a_zero() -> None:
    x, v = randn((2, 3), 1), randn((2, 3), 2).requires_grad_(True)
    out = ops.sde_log_prob(x, v, randn((2, 3), 3), coefficients(2))
    (grad,) = torch.autograd.grad(out.log_prob.sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        grad.sum().backward()


def test_gradients_arrive_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    strides = []

    def spy(grad: Tensor, coefficient: Tensor, dtype: torch.dtype) -> Tensor:
        strides.append(grad.stride())
        return torch.zeros_like(grad)

    _registry.register_backend("sde_step_backward", "cpp", "cpu", spy)
    v = randn((2, 3), 2).requires_grad_(True)
    prev, _ = ops.sde_step(randn((2, 3), 1), v, coefficients(2), noise=randn((2, 3), 3))
    prev.sum().backward()
    assert strides == [(3, 1)]


def test_compiled_code_asks_for_its_backend_at_run_time() -> None:
    pos, neg = randn((2, 3), 1), randn((2, 3), 2)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected = compiled(pos, neg)
    _registry.register_backend("cfg_combine", "cpp", "cpu", marked)
    assert compiled(pos, neg).eq(42).all()
    with use_backend("reference"):
        assert torch.equal(compiled(pos, neg), expected)


def test_one_compiled_graph_serves_every_batch_size() -> None:
    def op(x: Tensor, v: Tensor, old: Tensor, coef: ops.StepCoefficients) -> Tensor:
        prev, _ = ops.sde_step(x, v, coef, noise=x, out_dtype=torch.bfloat16)
        log_prob = ops.sde_log_prob(x, v, prev.detach(), coef, v_ref=x).log_prob
        return ops.policy_loss(log_prob, old, old)[0]

    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, fullgraph=True, backend=graphs)
    for batch in (3, 5, 8):
        x, v, old, coef = randn((batch, 4, 6), 1), randn((batch, 4, 6), 2), randn((batch,), 3), coefficients(batch)
        for tensor in (x, v, old, coef.a, coef.b, coef.s):
            torch._dynamo.mark_dynamic(tensor, 0)
        assert torch.equal(compiled(x, v, old, coef), op(x, v, old, coef))
    assert graphs.frame_count == 1
