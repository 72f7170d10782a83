"""What a module refuses on one rank, the others hear of: they would wait for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch._guards import CompileContext
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.core.hardware import answers_while_traced
from flexdilated.distributed import agreement
from flexdilated.distributed.agreement import inform, withdraw
from flexdilated.distributed.ledger import HEARD, IN_VAIN, LostError
from flexdilated.distributed.meshes import group_of

Result = TypeVar("Result")
Forward = TypeVar("Forward", bound=Callable[..., Any])

# What ends a block in which nothing has failed: a generator that is closed, a recomputation that has all that it needs.
RECOMPUTED: type[BaseException] | tuple[()] = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())
ENDS = (GeneratorExit, RECOMPUTED) if RECOMPUTED else (GeneratorExit,)
# What `torch.compile` raises without fullgraph too, instead of running what it cannot compile.
RAISED = ("BackendCompilerFailed", "InductorError", "TorchRuntimeError")


class _Trace(NamedTuple):
    """Calls of a group that a compiler traces."""

    group_name: str
    handled: BaseException | None  # meanwhile: a fallback is compiled while the error that it is for is handled
    takes: str  # "all" or nothing; "some": frames with an error may be skipped and run uncompiled; "any"


# By the compiler's number of what it traces, the last one alone: some compilations end without a word.
_traced: dict[str, list[_Trace]] = {}


def reason_of(error: BaseException) -> str:
    """What an error says, and what it is unless that says it: the text of a KeyError is a key."""
    if isinstance(error, GeneratorExit):
        return "a generator was closed inside of a step of shared_failures"
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # its own
        return name
    if HEARD.match(text):
        return text
    if isinstance(error, (TimeoutError, LostError)):
        return f"{IN_VAIN}: {text}"
    if text and type(error) in (TypeError, ValueError, RuntimeError, NotImplementedError):
        return text
    return f"{name}: {text}" if text else name


def tell(mesh: DeviceMesh, error: BaseException) -> None:
    """Tell the other ranks of a mesh that this one takes no part in the call that they make now or next."""
    if mesh.size() > 1:
        withdraw(mesh.get_group(), reason_of(error))


def _tracer() -> Any:
    """Dynamo's, while it traces; else None."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # slow to import, and here already

    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # another tracer
        return None


@answers_while_traced
def is_one_graph() -> bool:
    """Whether a compiler traces that must take all or fail, as under fullgraph=True; runs while it traces."""
    tracer = _tracer()
    return tracer is not None and bool(tracer.one_graph or tracer.error_on_graph_break)


def refuse_regions() -> None:
    """Refuse calls over ranks inside of `torch.compiler.nested_compile_region`, while a compiler traces.

    Inductor knows of no order between what a region calls and what stands around it, and leaves out a region that gives nothing.

    Raises:
        NotImplementedError: If a region is traced.
    """
    if _is_in_region():
        raise NotImplementedError(
            "torch.compiler.nested_compile_region must hold no call over several ranks, got one: inductor does not keep the order "
            "of its calls; compile the layers one by one instead, or the whole model without regions"
        )


@answers_while_traced
def _is_in_region() -> bool:
    """Whether a compiler traces a region; runs while it traces."""
    tracer = _tracer()
    scope = None if tracer is None else tracer.output.current_tracer
    while scope is not None:
        if str(getattr(scope, "source_target", None)) == "invoke_subgraph":
            return True
        scope = scope.parent
    return False


@answers_while_traced
def traces_call(group_name: str) -> None:
    """Say that what a compiler traces calls ranks of a group: if it fails they hear of it. Runs while it traces.

    Not where the frame is then run uncompiled, which tells for itself.
    """
    tracer = _tracer()
    if tracer is not None and not torch.compiler.is_exporting():
        from torch._dynamo.callback import callback_handler  # here already

        takes = "all" if tracer.one_graph else "some" if tracer.error_on_graph_break else "any"
        number, trace = str(CompileContext.current_compile_id()), _Trace(group_name, sys.exc_info()[1], takes)
        traces = {each.group_name: each for each in _traced.get(number, [])}
        _traced.clear()
        _traced[number] = list({**traces, group_name: trace}.values())  # in the order of their first calls
        if _after_trace not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(_after_trace)


def _after_trace(args: Any) -> None:
    """Tell of the calls that were traced, if the compiler has failed. Ranks that hear of one leave the others out, as this one."""
    error = sys.exc_info()[1]
    heard: set[int] = set()
    for group_name, handled, takes in _traced.pop(args.compile_id, []):
        while handled is not None and handled is not error:
            handled = handled.__context__
        if error is not None and error is not handled and (takes == "all" or _is_raised(error, takes)):
            with suppress(Exception):  # an error of a callback breaks the compiler for good
                group = distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined, arg-type, unused-ignore]
                ranks, reason = set(dist.get_process_group_ranks(group)), f"torch.compile failed: {_reason(error)}"
                (inform if ranks <= heard else withdraw)(group, reason)
                heard |= ranks if len(ranks) > 1 else set()


def _is_raised(error: BaseException, takes: str) -> bool:
    """Whether an error of a compiler that need not take all reaches the user."""
    if torch._dynamo.config.suppress_errors or getattr(error, "skip_frame", False):
        return False
    return takes == "some" or any(each.__name__ in RAISED for each in type(error).__mro__)


def _reason(error: BaseException) -> str:
    """What a compiler's error says first, and what it met."""
    lines = [line.strip() for line in f"{type(error).__name__}: {reason_of(error)}".splitlines()]
    met = [line.partition(": ")[2] for line in lines if line.startswith(("Explanation: ", "Developer debug context: "))]
    # What a backend raised stands in the next line.
    return ": ".join([lines[0].removesuffix(":"), *(lines[1:2] if lines[0].endswith(":") else met[-1:])])


@contextmanager
def shared_failures(mesh: DeviceMesh) -> Iterator[None]:
    """A step that all ranks of a mesh leave together, by an error or none; from an error that is caught all go on in the next step.

    The functions and modules of this library tell other ranks of their own errors. What else a step holds does not: a loss, a hook,
    a batch that cannot be read, a compiled model that fails while it runs. Put this around each step, on all ranks, in the thread
    that makes the calls, and around what `torch.compile` compiles: inside it breaks the graph, and is an error under
    `fullgraph=True`.

    The error goes on, and the other ranks raise it as a `ValueError` where they next compare a plan, at the latest at the end of
    the step, where all wait for each other. On CPUs a rank that waits for rows hears of it at once, over NCCL when the timeout of
    the group is over; one that waits in another library's collective does not. The next step begins when all have left this one.
    A rank that is interrupted when all have come to the end is behind it, and alone with its error.
    Inside of another step over the same mesh it is a part of that.

    Args:
        mesh: One axis, the ranks that share a sequence.

    Raises:
        TypeError: If it is no `DeviceMesh`.
        ValueError: If it has several axes or lacks this rank; at the end, if another rank raised in this step.
        TimeoutError: If a rank has not come to the end within the timeout of the group; if another rank has lost one or met another
            `TimeoutError` inside.
        RuntimeError: If another thread is inside one over this mesh, or a compiler traces it.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("shared_failures must stand around what torch.compile compiles, not inside of it")
    _, _, num_ranks = group_of(mesh)
    if num_ranks == 1:
        yield
        return
    group = mesh.get_group()
    # A generator that is closed inside of a step may be so by an error of whoever reads it, or by none: the others need not wait.
    with telling_call(group) if agreement.is_inside(group) else agreement.step(group, reason_of, RECOMPUTED):
        yield


@contextmanager
def telling(mesh: DeviceMesh | None) -> Iterator[None]:
    """What this rank refuses inside, the ranks of a mesh hear of, who would wait for it; none where there is no mesh."""
    if mesh is None or mesh.size() == 1 or getattr(mesh, "ndim", 1) != 1:  # the modules refuse several axes
        yield
        return
    with telling_call(mesh.get_group()):
        yield


@contextmanager
def telling_call(group: dist.ProcessGroup, *, is_backward: bool = False) -> Iterator[None]:
    """The same of one call itself, or of its backward, which refuses no call."""
    if group.size() == 1:
        yield
        return
    before = agreement.events_of(group)
    try:
        yield
    except ENDS:
        raise
    except BaseException as error:
        agreement.tell(group, before, reason_of(error), is_backward=is_backward)
        raise


def told(mesh: DeviceMesh, call: Callable[..., Result], *args: Any) -> Result:
    """What a call over a mesh of one axis gives, of whose errors its ranks hear, those of a compiler that traces it too."""
    group_name, _, _ = group_of(mesh)
    if torch.compiler.is_compiling():
        traces_call(group_name)
        refuse_regions()
        return call(*args)
    with telling(mesh):
        return call(*args)


def tells_others(forward: Forward) -> Forward:
    """A module's forward whose errors reach the ranks of its `mesh`, or of its attention's, at once.

    Ranks that have agreed on the plan of their next attention before, and wait for rows of this one, end by the timeout of their
    group. An error behind the last attention of the module refuses a call too: a model that the module is a part of may have more.
    Decoding, by a cache or caches, is each rank's own, or that of the ranks of the cache.
    """

    @wraps(forward)
    def telling_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mesh = _mesh_of(self, kwargs)
        if mesh is None:
            return forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            if mesh.ndim == 1:  # else it is refused
                traces_call(mesh.get_group().group_name)
            return forward(self, *args, **kwargs)
        with telling(mesh):
            return forward(self, *args, **kwargs)

    return telling_forward  # type: ignore[return-value]


def _mesh_of(module: Any, options: dict[str, Any]) -> DeviceMesh | None:
    """Of the ranks that may wait for this one in a call."""
    for decoding in (options.get("cache"), options.get("caches")):
        if decoding is not None:
            cache = decoding[0] if isinstance(decoding, Sequence) and decoding else decoding
            return getattr(cache, "mesh", None)
    # an attention that a user has put in place of ours may know of no mesh
    mesh: DeviceMesh | None = module.mesh if hasattr(module, "mesh") else getattr(module.attention, "mesh", None)
    return mesh
