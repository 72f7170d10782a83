"""What a module refuses on one rank, the others hear of: they would wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.distributed.agreement import withdraw, withdraw_later

Forward = TypeVar("Forward", bound=Callable[..., Any])

MARK = "_flexdilated_ranks_know"  # of errors that all ranks of a call have, or will have


def known(error: BaseException) -> None:
    """Say that the other ranks know of an error."""
    setattr(error, MARK, True)


def all_know(call: Forward) -> Forward:
    """A call that all ranks make, and whose errors they all have."""

    @wraps(call)
    def made(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            known(error)
            raise

    return made  # type: ignore[return-value]


def tell(mesh: DeviceMesh, error: Exception) -> None:
    """Tell the other ranks of a mesh that this one takes no part in the call that they make now or next, unless they know."""
    if mesh.size() > 1 and not hasattr(error, MARK):
        withdraw(mesh.get_group(), str(error) or type(error).__name__)
        known(error)


def is_one_graph() -> bool:
    """Whether a compiler traces that must take all or fail, as under fullgraph=True; runs while it traces."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # slow to import, and here already

    try:
        tracer = InstructionTranslator.current_tx()
    except AttributeError:  # another tracer
        return False
    return bool(tracer.one_graph or tracer.error_on_graph_break)


def refuse_in_trace(group_name: str) -> None:
    """What `tell` is while a compiler traces, which runs this at once: under fullgraph=True a refusal is an error of the compiler.

    Else the call is made once more uncompiled, and refused there.
    """
    if is_one_graph():
        withdraw_later(distributed_c10d._resolve_process_group(group_name))  # type: ignore[attr-defined, arg-type, unused-ignore]


for _at_once in (is_one_graph, refuse_in_trace):  # as `torch.compiler.assume_constant_result` does, which loads dynamo
    vars(_at_once)["_dynamo_marked_constant"] = True


@contextmanager
def telling(mesh: DeviceMesh | None) -> Iterator[None]:
    """What this rank refuses inside, the ranks of a mesh hear of, who would wait for it; none where there is no mesh."""
    try:
        yield
    except Exception as error:
        if mesh is not None:
            tell(mesh, error)
        raise


def tells_others(forward: Forward) -> Forward:
    """A module's forward whose errors before an attention reach the ranks of its `mesh`, or of its attention's, at once.

    Ranks that have agreed on the plan of that attention before, and wait for rows of this one, end by the timeout of their group.
    Decoding, by a cache or caches, is each rank's own, or that of the ranks of the cache.
    """

    @wraps(forward)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (mesh := _mesh_of(self, kwargs)) is None:
            return forward(self, *args, **kwargs)
        with telling(mesh):
            return forward(self, *args, **kwargs)

    return told  # type: ignore[return-value]


def _mesh_of(module: Any, options: dict[str, Any]) -> DeviceMesh | None:
    """Of the ranks that may wait for this one in a call."""
    for decoding in (options.get("cache"), options.get("caches")):
        if decoding is not None:
            cache = decoding[0] if isinstance(decoding, Sequence) and decoding else decoding
            return getattr(cache, "mesh", None)
    # an attention that a user has put in place of ours may know of no mesh
    mesh: DeviceMesh | None = module.mesh if hasattr(module, "mesh") else getattr(module.attention, "mesh", None)
    return mesh
