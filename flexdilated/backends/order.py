"""Operators that wait for other ranks, in compiled graphs: compilers neither leave their calls out nor change their order."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_map

# They are no functions of their inputs alone: a compiler must not call them while it traces because inputs are constants. Other
# ranks replay CUDA graphs of their own.
OVER_RANKS = (torch.Tag.cudagraph_unsafe, torch.Tag.nondeterministic_seeded)

# Inductor orders kernels by the sizes of their tensors, which differ from rank to rank. What it is told of effects it looks up by
# another name in these versions, and so not at all: https://github.com/pytorch/pytorch/pull/189209.
LOSES_ORDER = TorchVersion("2.10") <= TorchVersion(torch.__version__) < TorchVersion("2.14")

_unordered: list[Any] = []


def keep_order(declared: Any) -> None:
    """Let compilers take each call of a custom operator as an effect, whoever needs what it gives, in the order of the program."""
    _register_effectful_op(declared._opoverload, _EffectType.ORDERED)
    if LOSES_ORDER:
        _unordered.append(declared._opoverload)


def order_kernels() -> None:
    """Tell inductor the order of these operators' kernels where it loses it. Called while a compiler traces: the import is slow."""
    while _unordered:
        from torch._inductor.lowering import register_lowering

        operator = _unordered.pop()
        register_lowering(operator, type_promotion_kind=None)(partial(_lower, operator))


def _lower(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of an operator that inductor has none for, behind that of the effect before it."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    graph = V.graph
    begun, before = len(graph.operations), graph.effectful_ops.get(_EffectType.ORDERED)
    made = ir.FallbackKernel.create(operator, *args, **kwargs)
    if before is not None:
        for each in graph.operations[begun:]:
            graph.additional_buffer_deps[each.get_operation_name()].add(before.get_name())
    return tree_map(lambda x: x.wrap_for_lowering() if isinstance(x, ir.IRNode) else x, made)
