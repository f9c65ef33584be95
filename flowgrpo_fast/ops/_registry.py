"""How an op gets into PyTorch, and which backend runs it.

`register_op` defines `torch.ops.flowgrpo_fast.<name>` from a schema and a reference in pure torch. The reference is the spec:
it is the fallback everywhere, the fake (meta) function under torch.compile, and the tests' oracle. Faster implementations take the
same arguments and return the same outputs, contiguous, with the same bits. They are found by name when an op is first called:

    triton      function <op> of `flowgrpo_fast.ops.triton.<op without _backward>`; on CUDA, and on CPU under TRITON_INTERPRET=1
    cuda, cpp   function <op> of `flowgrpo_fast.ops.compiled`, where the extension of csrc/ is built for the device
    any         what `register_backend` was given

Which one runs is decided at each call: the backend asked for (`use_backend`, or FLOWGRPO_BACKEND, read once at import), else
under "auto" the first of `_PREFERENCE` that the op has for the device. What is missing falls back to the reference and says so
once per op and backend. fp64 (gradcheck) and exotic dtypes always run on the reference: the kernels know fp32, bf16 and fp16.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flowgrpo_fast.ops._checks import require_choice

NAMESPACE = "flowgrpo_fast"
BACKENDS = ("auto", "reference", "triton", "cuda", "cpp")
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_PREFERENCE = {"cuda": ("triton", "cuda"), "cpu": ("cpp",)}

Implementation = Callable[..., Any]

_library = torch.library.Library(NAMESPACE, "DEF")  # module-level: dropping it would unregister every op
_backends: dict[
    str, dict[tuple[str, str], Implementation | None]
] = {}  # op -> (backend, device type) -> function; None = there is none
_announced: set[tuple[str, str]] = set()


class BackendFallbackWarning(UserWarning):
    """The backend asked for does not exist for an op on this device; the reference ran instead."""


def _checked(name: str, field: str) -> str:
    require_choice(name, field, BACKENDS)
    return name


# One value for the process, not a context variable: autograd runs backward ops of CUDA tensors in threads of its own, which
# would not see a variable of the caller's context.
_current = _checked(os.environ.get("FLOWGRPO_BACKEND") or "auto", "FLOWGRPO_BACKEND")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the ops called inside the block with one backend: "auto", "reference", "triton", "cuda" or "cpp".

    Holds for the whole process, backward passes that run inside the block included. A backend that an op or this machine lacks
    falls back to the reference with one `BackendFallbackWarning` per op and backend. Raises ValueError for an unknown name.
    """
    global _current
    before, _current = _current, _checked(name, "use_backend")
    try:
        yield
    finally:
        _current = before


def register_op(
    schema: str,
    reference: Implementation,
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Implementation:
    """Define an op, and return it as a callable.

    schema: "name(Tensor x, ...) -> Tensor", all arguments positional and without defaults, the first one a Tensor.
    reference: the implementation in pure torch. It must not return an input or a view of one, nor read values on the host.
    setup_context(ctx, inputs, output), backward(ctx, *grads): as in `torch.library.register_autograd`; backward calls another registered
    op. It receives contiguous gradients (`.sum().backward()` hands over stride 0). Without them, differentiating through the op is an
    error, not a zero.
    """
    name = schema.split("(", 1)[0]
    qualified = f"{NAMESPACE}::{name}"
    _backends[name] = {}

    def dispatch(*args: Any) -> Any:
        return _select(name, args, reference)(*args)

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, dispatch, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, reference, lib=_library)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def below_autograd(keyset: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    derivative = op, setup_context, backward
    _library.impl(name, _autograd(below_autograd, *derivative), "Autograd", with_keyset=True)
    direct = _autograd(lambda _, *args: dispatch(*args), *derivative)

    def call(*args: Any) -> Any:
        return direct(None, *args) if _nothing_watches(args) else op(*args)

    return call


def _nothing_watches(args: tuple[Any, ...]) -> bool:
    """Plain tensors in plain eager mode: torch's dispatcher would only lead back here, for 28 us a call (2 ms are a whole op on a video).

    Whatever wants to see the op (torch.compile, a dispatch or function mode, functorch, a tracer, a profiler, a tensor subclass) gets it
    through `torch.ops`.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
    ):
        return False
    for arg in args:  # noqa: SIM110 - a generator would take twice as long
        if isinstance(arg, torch.Tensor) and (type(arg) not in _PLAIN_TYPES or arg.is_meta):
            return False
    return True


def _autograd(
    run: Callable[..., Any], op: Any, setup_context: Callable[..., None] | None, backward: Callable[..., Any] | None
) -> Callable[..., Any]:
    """What `torch.library.register_autograd` sets up, without its reading of the schema at every call: 256 -> 204 us a forward here.

    run(keyset, *args): the op below autograd.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)  # gradients nobody asked for would each be a fill
            output = run(keyset, *args)
            if setup_context is not None:
                setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if backward is None:
                raise RuntimeError(f"{op} has no derivative of its own (second derivatives are not supported)")
            if all(grad is None for grad in grads):
                return (None,) * len(ctx.needs_input_grad)
            return None, *backward(ctx, *(grad if grad is None else grad.contiguous() for grad in grads))

    Function.__name__ = Function.__qualname__ = op._opname  # what a traceback or a graph shows

    def autograd(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return Function.apply(keyset, *args)
        return run(keyset, *args)

    return autograd


def register_backend(op: str, backend: str, device_type: str, function: Implementation) -> None:
    """Add an implementation of a registered op: same arguments as its reference, same shapes, dtypes and (contiguous) strides."""
    _backends[op][_checked(backend, "backend"), device_type] = function


def _select(op: str, args: tuple[Any, ...], reference: Implementation) -> Implementation:
    if _current == "reference":
        return reference
    for arg in args:
        if isinstance(arg, torch.Tensor):
            # Scalars [] do not count: a denominator may be fp64 beside fp32 entries.
            if arg.dtype not in _KERNEL_DTYPES and arg.is_floating_point() and arg.dim() > 0:
                return reference
        elif isinstance(arg, torch.dtype) and arg not in _KERNEL_DTYPES:
            return reference
    device_type = args[0].device.type
    if _current == "auto":
        for backend in _PREFERENCE.get(device_type, ()):
            function = _find(op, backend, device_type)
            if function is not None:
                return function
        return reference
    function = _find(op, _current, device_type)
    if function is None:
        _announce(op, device_type)
        return reference
    return function


def _find(op: str, backend: str, device_type: str) -> Implementation | None:
    table, key = _backends[op], (backend, device_type)
    if key not in table:
        table[key] = _import(op, backend, device_type)
    return table[key]


def _import(op: str, backend: str, device_type: str) -> Implementation | None:
    if backend == "triton":
        if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return None
        if importlib.util.find_spec("triton") is None:
            return None
        module = importlib.import_module(f"flowgrpo_fast.ops.triton.{op.removesuffix('_backward')}")
        return getattr(module, op)
    compiled = importlib.import_module("flowgrpo_fast.ops.compiled")
    has_kernels = device_type == {"cuda": "cuda", "cpp": "cpu"}[backend] and compiled.is_built(device_type)
    return getattr(compiled, op, None) if has_kernels else None


def _announce(op: str, device_type: str) -> None:
    announce_reference(op, f"no {_current!r} backend for {device_type} tensors here")


def announce_reference(op: str, why: str) -> None:
    """Says once per op and reason that the reference runs in place of a kernel."""
    if (op, why) in _announced:
        return
    _announced.add((op, why))
    warnings.warn(
        f"{op}: {why}; the reference (pure torch) runs instead. Said once.", BackendFallbackWarning, stacklevel=3
    )
