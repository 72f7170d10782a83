"""What a module refuses on one rank, the others hear of: they would wait for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch._guards import CompileContext
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.distributed.agreement import withdraw

Forward = TypeVar("Forward", bound=Callable[..., Any])

MARK = "_flexdilated_ranks_know"  # of errors that all ranks of a call have, or will have


class _Trace(NamedTuple):
    """Calls of a group that a compiler traces."""

    group_name: str
    handled: BaseException | None  # meanwhile: a fallback is compiled while the error that it is for is handled
    is_whole: bool  # whether all errors reach the user; else some frames are skipped, and run uncompiled


# By the compiler's number of what it traces, the last one alone: some compilations end without a word.
_traced: dict[str, list[_Trace]] = {}


def known(error: BaseException) -> None:
    """Say that the other ranks know of an error."""
    setattr(error, MARK, True)


def _is_known(error: BaseException | None, handled: BaseException | None) -> bool:
    """Whether the other ranks know of an error, or of one that it came from, since another was handled."""
    while error is not None and error is not handled and not hasattr(error, MARK):
        error = error.__cause__ or error.__context__
    return error is not None and error is not handled


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


def _tracer() -> Any:
    """Dynamo's, while it traces; else None."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # slow to import, and here already

    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # another tracer
        return None


def is_one_graph() -> bool:
    """Whether a compiler traces that must take all or fail, as under fullgraph=True; runs while it traces."""
    tracer = _tracer()
    return tracer is not None and bool(tracer.one_graph or tracer.error_on_graph_break)


def traces_call(group_name: str) -> None:
    """Say that what a compiler traces calls ranks of a group: if it fails they hear of it. Runs while it traces.

    Under fullgraph=True alone: else the call is made once more uncompiled, and tells for itself.
    """
    if is_one_graph() and not torch.compiler.is_exporting():
        from torch._dynamo.callback import callback_handler  # here already

        number, trace = str(CompileContext.current_compile_id()), _Trace(group_name, sys.exc_info()[1], bool(_tracer().one_graph))
        traces = _traced.get(number, [])
        _traced.clear()
        _traced[number] = [*(each for each in traces if each.group_name != group_name), trace]
        if _after_trace not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(_after_trace)


def _after_trace(args: Any) -> None:
    """Tell of the calls that were traced, if the compiler has failed."""
    error = sys.exc_info()[1]
    for group_name, handled, is_whole in _traced.pop(args.compile_id, []):
        while handled is not None and handled is not error:
            handled = handled.__context__
        is_skipped = not is_whole and (torch._dynamo.config.suppress_errors or getattr(error, "skip_frame", False))
        if error is not None and error is not handled and not is_skipped:
            with suppress(Exception):  # an error of a callback breaks the compiler for good
                group = distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined, arg-type, unused-ignore]
                withdraw(group, f"torch.compile failed: {_reason(error)}")
            known(error)


def _reason(error: BaseException) -> str:
    """What a compiler's error says first, and what it met."""
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines()]
    met = [line.partition(": ")[2] for line in lines if line.startswith(("Explanation: ", "Developer debug context: "))]
    return ": ".join([lines[0], *met[-1:]])


for _at_once in (is_one_graph, traces_call):  # as `torch.compiler.assume_constant_result` does, which loads dynamo
    vars(_at_once)["_dynamo_marked_constant"] = True


@contextmanager
def telling(mesh: DeviceMesh | None) -> Iterator[None]:
    """What this rank refuses inside, the ranks of a mesh hear of, who would wait for it; none where there is no mesh."""
    handled = sys.exc_info()[1]
    try:
        yield
    except Exception as error:
        if mesh is not None and not _is_known(error, handled):
            tell(mesh, error)
        raise


def tells_others(forward: Forward) -> Forward:
    """A module's forward whose errors before an attention reach the ranks of its `mesh`, or of its attention's, at once.

    Ranks that have agreed on the plan of that attention before, and wait for rows of this one, end by the timeout of their group.
    Decoding, by a cache or caches, is each rank's own, or that of the ranks of the cache.
    """

    @wraps(forward)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        mesh = _mesh_of(self, kwargs)
        if mesh is None:
            return forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            if mesh.ndim == 1:  # else it is refused
                traces_call(mesh.get_group().group_name)
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
