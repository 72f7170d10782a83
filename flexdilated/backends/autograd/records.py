"""Score and mask functions recorded in the forward, so that the backward differentiates what the forward applied.

Scores are computed again in the backward. A user's function may return other values by then: a loop has changed a number that the
function reads, or a module has left its training mode. So the forward records the operations of the function, and the backward runs
the record; the function itself is called once for each pair. Numbers become constants. Tensors that the function reads become
inputs of an autograd function: autograd saves them, raises if they were modified in place, and computes their gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from flexdilated.core.call import Call
from flexdilated.core.hardware import without_autocast
from flexdilated.core.tracing import outside_graphs

# torch 2.9 notes per process whether a mode is on: two threads in modes at once could leave torch.compile off for good.
_one_thread = threading.RLock()

Attend = Callable[..., tuple[Tensor, Tensor]]  # of tensors and, at last, a call: out and lse


class _Slot(int):
    """The index of a tensor in a record."""


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator modifies."""
    values = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (x for x in tree_leaves(values.get(argument.name)) if isinstance(x, Tensor))


def _refuse_script(name: str, node: Any, start: int) -> None:
    """Raise if TorchScript differentiates a part of a function by itself, which no record can repeat.

    Args:
        name: Of the function.
        node: Where the gradient of its result begins.
        start: The number of autograd's first node that belongs to the function.
    """
    nodes, visited = [node], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited or node._sequence_nr() < start:
            continue
        visited.add(node)
        if "DifferentiableGraph" in node.name():
            raise NotImplementedError(
                f"{name} must not call TorchScript where it learns, got a function of torch.jit; call its Python"
            )
        nodes += [following for following, _ in node.next_functions]


class _Record(TorchDispatchMode):
    """The operations of one call of a function, and the tensors that they read besides the arguments."""

    def __init__(self, name: str, function: Callable[..., Tensor], *, requires_grad: bool) -> None:
        """`requires_grad`: whether the scores have a gradient."""
        super().__init__()
        self.held: dict[_Slot, Tensor] = {}  # tensors that the function reads
        self._name, self._function, self._requires_grad = name, function, requires_grad
        self._slots: Any = WeakTensorKeyDictionary()
        self._steps: list[tuple[Any, ...]] = []  # operator, arguments, keyword arguments, results, slots that nothing reads later
        self._result = _Slot(0)
        self._count = count()
        self._read_only: set[int] = set()  # storages of tensors that a replay reads again

    def __call__(self, *arguments: Tensor) -> Tensor:
        """Call the function, record its operations and return its result."""
        self._slots.update(zip(arguments, map(_Slot, self._count)))
        self._read_only |= {x.untyped_storage()._cdata for x in arguments[-4:]}  # positions; scores are computed again
        # With gradients on, __torch_dispatch__ sees where the function switches them off. The graph is not used: it keeps nothing.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x):
            if self._requires_grad and self._name == "score_mod":  # or numpy could read scores, as constants
                arguments[0][:0].sub_(torch.zeros((), requires_grad=True))  # not a leaf, which could not be modified in place
            start = torch._C._autograd._get_sequence_nr()
            with _one_thread, self:
                result = self._function(*arguments)
        if isinstance(result, Tensor):  # else the caller raises
            _refuse_script(self._name, result.grad_fn, start)
            if result not in self._slots:
                self._hold((result,))
            self._result, result = self._slots[result], result.detach()
        self._release()
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if not torch.is_grad_enabled():
            raise NotImplementedError(
                f"{self._name} must not switch gradients off, got torch.no_grad, a torch.autograd.Function or a custom operator "
                "with a gradient inside it; use detach() and torch's own operations"
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(
                f"{self._name} must not draw random numbers, got {func}; draw a table of them before the call and index it by "
                "q_idx and kv_idx"
            )
        if func is torch.ops.aten.lift_fresh.default:  # a literal, into which the function may write: each replay has its own
            self.held[self._slots.setdefault(args[0], _Slot(next(self._count)))] = args[0].clone()
        values = (args, kwargs or {})
        self._hold(tree_leaves(values))
        inputs = tree_map_only(Tensor, self._slots.__getitem__, values)
        for x in _written(func, *values) if func._schema.is_mutable else ():
            if x.untyped_storage()._cdata in self._read_only:
                raise NotImplementedError(
                    f"{self._name} must not modify tensors in place that it reads, got {func}; use an operation that returns a new "
                    "tensor, or clone() first"
                )
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._slots.setdefault(x, _Slot(next(self._count)))
        replayed = torch.ops.aten.lift_fresh_copy.default if func is torch.ops.aten.lift_fresh.default else func
        self._steps.append((replayed, *inputs, tree_map_only(Tensor, self._slots.__getitem__, result)))
        return result

    def replay(self, tensors: Sequence[Tensor], *arguments: Tensor) -> Tensor:
        """Compute the result again, differentiable in the arguments and in `tensors`, which replace the values of `self.held`."""
        values: dict[int, Tensor] = dict(enumerate(arguments)) | dict(zip(self.held, tensors))
        for func, args, kwargs, results, unused in self._steps:
            args, kwargs = tree_map_only(_Slot, values.__getitem__, (args, kwargs))
            result = func(*args, **kwargs)
            values |= {slot: x for slot, x in zip(tree_leaves(results), tree_leaves(result)) if isinstance(slot, _Slot)}
            for slot in unused:
                del values[slot]
        return values[self._result]

    def _hold(self, values: Iterable[Any]) -> None:
        """Hold the tensors among `values` that are neither arguments nor results of the function's steps."""
        for x in values:
            if isinstance(x, Tensor) and x not in self._slots:
                self._slots[x] = slot = _Slot(next(self._count))
                self.held[slot] = x.clone() if x.is_inference() else x  # autograd saves no inference tensors
                self._read_only.add(x.untyped_storage()._cdata)

    def _release(self) -> None:
        """Note after each step which slots no later step reads: the backward frees their tensors, as the function did."""
        used = {self._result}
        for number, step in reversed(list(enumerate(self._steps))):
            slots = {x for x in tree_leaves(step[1:]) if isinstance(x, _Slot)}
            self._steps[number] = (*step, slots - used)
            used |= slots
        self._slots = None


def attend_recorded(attend: Attend, tensors: Sequence[Tensor | None], call: Call) -> tuple[Tensor, Tensor]:
    """`attend(*tensors, call)`, whose backward computes it again, with the call's functions as they were in the forward.

    Raises:
        NotImplementedError: If a function draws random numbers or switches gradients off.
    """
    assert tensors[0] is not None
    device = tensors[0].device
    state = _random_state(device) if call.dropout_p > 0.0 else None
    requires_grad = any(x is not None and x.requires_grad for x in tensors[:2])
    records: dict[str, Any] = {
        name: _Record(name, function, requires_grad=requires_grad)
        for name, function in (("score_mod", call.score_mod), ("mask_mod", call.mask_mod))
        if function is not None
    }
    with torch.no_grad():
        results = attend(*tensors, call.replaced(**records))

    def recompute(tensors: Sequence[Tensor | None], held_tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        functions: dict[str, Any] = {}
        start = 0
        for name, record in records.items():
            functions[name] = partial(record.replay, held_tensors[start : start + len(record.held)])
            start += len(record.held)
        with without_autocast(device, traced_before=True), _drawing_from(state, device):
            return attend(*tensors, call.replaced(**functions))

    held_tensors = [x for record in records.values() for x in record.held.values()]
    out, lse = _Recomputed.apply(recompute, results, len(tensors), *tensors, *held_tensors)
    return out, lse


def _random_state(device: torch.device) -> Tensor:
    """The state of a device's default random generator."""
    state: Tensor = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return state


@contextmanager
def _drawing_from(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Inside, draw random numbers from a saved generator state, so that dropout repeats that of the forward; None: no change."""
    if state is None:
        yield
    elif device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            torch.get_device_module(device).set_rng_state(state, device)
            yield


class _Recomputed(torch.autograd.Function):
    """Return `results` unchanged; the backward computes them again by `recompute`, under autograd."""

    @staticmethod
    def forward(
        ctx: Any, recompute: Any, results: tuple[Tensor, Tensor], count: int, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.recompute, ctx.count = recompute, count
        ctx.save_for_backward(*tensors)
        return results

    @staticmethod
    @outside_graphs("the backward runs the record of score_mod and mask_mod")
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[3:]
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Tensors of their own: the gradient of one then leaves out others that it was computed from.
            tensors = [
                x if not need else x.view_as(x) if create_graph else x.detach().requires_grad_() for x, need in zip(tensors, needs)
            ]
            results = ctx.recompute(tensors[: ctx.count], tensors[ctx.count :])
        inputs = [x for x, need in zip(tensors, needs) if need]
        pairs = [(x, dx) for x, dx in zip(results, (dout, dlse)) if x.requires_grad]
        outputs, output_grads = zip(*pairs) if pairs else ((), ())
        input_grads = iter(torch.autograd.grad(outputs, inputs, output_grads, create_graph=create_graph, allow_unused=True))
        grads = [next(input_grads) if need else None for need in needs]
        # A score function may ignore the scores: the gradient of q and k is then 0.
        filled = [torch.zeros_like(x) if need and dx is None else dx for x, need, dx in zip(tensors[: ctx.count], needs, grads)]
        return None, None, None, *filled, *grads[ctx.count :]
