"""Triton's interpreter, patched for tests: bfloat16 as GPUs compute it, and device functions without its cost per call.

The interpreter (3.5 to 3.9) holds bfloat16 as the integers of its bits. It multiplies and adds those, and cuts low bits where a GPU
rounds to nearest even. Here products and casts are mended; other arithmetic in bfloat16 raises: the kernels do none.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def mend(patch: pytest.MonkeyPatch) -> None:
    """Patch the interpreter until `patch` is undone."""
    _add_sums(patch)
    _mend_bfloat16(patch)
    _mend_calls(patch)


def watch(patch: pytest.MonkeyPatch, runs: bool = True) -> list[tuple[str, dict[str, Any]]]:
    """The kernel and the constants of each launch from now on, in the interpreter or on a GPU."""
    from flexdilated.backends.triton import launch

    launched: list[tuple[str, dict[str, Any]]] = []
    run = launch._launch

    def noted(kernel: Any, programs: int, arguments: Any, constants: dict[str, Any], *more: Any) -> None:
        launched.append((kernel.__name__, constants))
        if runs:
            run(kernel, programs, arguments, constants, *more)

    patch.setattr(launch, "_launch", noted)
    return launched


def _add_sums(patch: pytest.MonkeyPatch) -> None:
    """`atomic_add` of a tensor descriptor, which the interpreter lacks."""
    from triton.runtime.interpreter import InterpreterBuilder, _ir

    def create_descriptor_reduce(self: Any, kind: Any, descriptor: Any, value: Any, indices: Any) -> Any:
        assert kind.name == "ADD"
        pointers, mask = descriptor.materialize_pointers(indices)
        # Atomic operations have the same arguments in all versions; loads and stores do not.
        return self.create_atomic_rmw(_ir.ATOMIC_OP.FADD, pointers, value, mask, _ir.MEM_SEMANTIC.RELAXED, None)

    patch.setattr(InterpreterBuilder, "create_descriptor_reduce", create_descriptor_reduce, raising=False)


def _widen(bits: Any) -> Any:
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrow(x: Any) -> Any:
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), nearest).reshape(np.shape(x))


def _mend_bfloat16(patch: pytest.MonkeyPatch) -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def wide(handle: Any) -> Any:
        return TensorHandle(_widen(handle.data), tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return dot(self, wide(a), wide(b), *more)

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        source, target = x.dtype.scalar, to.scalar
        if source == tl.bfloat16 and target == tl.float32:
            return wide(x)
        if source == tl.float32 and target == tl.bfloat16:
            return TensorHandle(_narrow(x.data), tl.bfloat16)
        return cast(self, x, to)

    def refuse(operation: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: Any, *arguments: Any) -> Any:
            if any(isinstance(x, TensorHandle) and x.dtype == tl.bfloat16 for x in arguments):
                raise NotImplementedError("kernels must not compute in bfloat16, which the interpreter holds as integers")
            return operation(self, *arguments)

        return checked

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)
    patch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
    for name in ("unary_op", "binary_op"):
        patch.setattr(InterpreterBuilder, name, refuse(getattr(InterpreterBuilder, name)))


def _mend_calls(patch: pytest.MonkeyPatch) -> None:
    """Each call of a device function patches the whole language again, a third of all time: once per launch is enough."""
    from triton.runtime import interpreter

    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[int]] = set()

    class Nothing:
        def restore(self) -> None:
            """There is nothing to undo."""

    def patch_once(function: Any) -> Any:
        modules = (interpreter.tl, interpreter.tl.core)
        languages = frozenset(id(x) for x in function.__globals__.values() if any(x is module for module in modules))
        if languages in patched:
            return Nothing()
        patched.add(languages)
        return patch_language(function)

    def run(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        launch(self, *arguments, **options)

    patch.setattr(interpreter, "_patch_lang", patch_once)
    patch.setattr(interpreter.GridExecutor, "__call__", run)
