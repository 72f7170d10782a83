"""Operators that wait for other ranks, in graphs of inductor: it neither leaves their calls out nor changes their order."""

from __future__ import annotations

from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

OVER_RANKS = (torch.Tag.cudagraph_unsafe,)  # other ranks replay CUDA graphs of their own

_unordered: list[Any] = []
_last: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # of a graph that is lowered, the kernel that waits


def unknown(device: torch.device) -> Tensor:
    """The inputs of a call over ranks as values unknown to the compiler, so that it neither runs nor merges calls while tracing."""
    return torch.empty(0, device=device)


def keep_order(declared: Any) -> None:
    """Make inductor run every call of a custom operator, used or not, in the order of the program.

    It orders kernels by the sizes of their tensors, which differ from rank to rank, and needs none whose output is empty. Not as an
    effect of torch's, which is a tensor more in each graph: recomputation, branches and caches do not know it, and inductor loses
    its order (https://github.com/pytorch/pytorch/pull/189209).
    """
    operator = declared._opoverload
    # What looks for dead code takes it for an operator that draws. Not by the tag of those: recomputation would save the state of
    # a generator for it, inside of an operator of torch's that knows no order.
    operator._nondeterministic_seeded = True
    _unordered.append(operator)


def order_kernels() -> None:
    """Register the operators with inductor. Called while a compiler traces: the import is slow."""
    while _unordered:
        from torch._inductor.lowering import register_lowering

        operator = _unordered.pop()
        register_lowering(operator, type_promotion_kind=None)(partial(_lower, operator))


def _lower(operator: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor.ir import IRNode, TensorBox

    outputs = _ordered_kernel().create(operator, *args, **kwargs)  # tensors alone
    return tree_map(lambda x: TensorBox.create(x) if isinstance(x, IRNode) else x, outputs)


@cache
def _ordered_kernel() -> Any:
    """An inductor kernel that runs after the kernel before it of this kind, whether its result is used or not."""
    from torch._inductor.dependencies import StarDep
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.virtualized import V

    class OrderedKernel(FallbackKernel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.before = _last.get(V.graph)
            _last[V.graph] = self

        def get_read_writes(self) -> Any:
            read_writes = super().get_read_writes()
            if self.before is not None:
                read_writes.reads.add(StarDep(self.before.get_name()))
            return read_writes

        def has_side_effects(self) -> bool:
            return True

    return OrderedKernel
