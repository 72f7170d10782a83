"""What compilers take: what their versions trace, marks of functions, sizes that are symbols, and what is rejected."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._subclasses.fake_tensor import is_fake
from torch.torch_version import TorchVersion

# Whether the compiler takes an operator whose output size depends on the values of its inputs.
TRACES_UNKNOWN_SIZES = TorchVersion(torch.__version__) >= "2.11"

# Whether what it makes of torch.func and of functions' defaults is right: that of 2.9 gives wrong numbers and says nothing, those
# between have not been looked at.
TRACES_FUNCTIONS = TorchVersion(torch.__version__) >= "2.13"

Answer = TypeVar("Answer", bound=Callable[..., object])


def answers_while_traced(function: Answer) -> Answer:
    """Mark a function that runs while a compiler traces, and whose answer is a constant of the graph.

    As `torch.compiler.assume_constant_result` does; that loads dynamo, in seconds.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def outside_graphs(reason: str) -> Callable[[Answer], Answer]:
    """Let a compiler break its graph at calls of a function, or fail for this reason under `fullgraph=True`.

    As `torch.compiler.disable(reason=...)` does; that loads dynamo, in seconds.
    """

    def mark(function: Answer) -> Answer:
        @wraps(function)
        def uncompiled(*args: Any, **kwargs: Any) -> object:
            return torch.compiler.disable(function)(*args, **kwargs)

        vars(uncompiled).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
        return uncompiled  # type: ignore[return-value]

    return mark


def uncached(function: Any) -> Any:
    """A cached function as the compiler may trace it: without its cache, which it warns about."""
    return function.__wrapped__ if torch.compiler.is_compiling() else function


def holds_values(x: Tensor) -> bool:
    """Whether the elements of a tensor can be read: it is neither on the meta device nor fake.

    What dynamo traces has values when it runs, and `is_fake` cannot be traced.
    """
    return not x.is_meta and (torch.compiler.is_dynamo_compiling() or not is_fake(x))


def reads_freely(x: Tensor) -> bool:
    """Whether the elements of a plain tensor can be read without waiting: on a CPU, and no compiler, mode or torch.func traces."""
    is_plain = not torch.compiler.is_compiling() and type(x) is Tensor and x.is_cpu
    return is_plain and not torch._is_functional_tensor(x) and not torch._C._len_torch_dispatch_stack()


def is_symbolic(size: int) -> bool:
    """Whether a size is a symbol, in compiled or exported code that is to hold for several.

    Ask after `torch.compiler.is_compiling()`, in the function that acts on the answer: where the compiler leaves that function out,
    it still compiles this one, and every number that changes is a symbol to it.
    """
    from torch.fx.experimental.symbolic_shapes import has_static_value  # not loaded with the package

    return not has_static_value(size)


@answers_while_traced  # dynamo of torch 2.11 and older takes the answer for True
def is_exporting() -> bool:
    """Whether `torch.export` traces."""
    return torch.compiler.is_exporting()


def writes_onnx() -> bool:
    """Whether code is traced by the ONNX exporter, which knows none of this library's operators.

    Raises NotImplementedError in torch's TorchScript exporter, which fixes traced numbers as constants.
    """
    if torch.jit.is_tracing() and _in_onnx_export():  # type: ignore[attr-defined]
        raise NotImplementedError(
            "torch.onnx.export must be called with dynamo=True for dilated attention, got dynamo=False, which traces TorchScript"
        )
    return torch.compiler.is_compiling() and _in_onnx_export()


@answers_while_traced  # dynamo would take the answer for False; the exporter tries dynamo after a refusal
def _in_onnx_export() -> bool:
    return torch.onnx.is_in_onnx_export()


def refuse_traced_derivatives(*, of_operators: bool = True) -> None:
    """Raise NotImplementedError under torch.func, except one `vmap`, while a compiler traces: derivatives would be wrong.

    Without fullgraph, the compiler then leaves this code uncompiled. `of_operators`: whether the call is an opaque operator, which
    the compiler cannot differentiate, or consists of plain operations.
    """
    if not (torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()):
        return
    if not of_operators and TRACES_FUNCTIONS:
        return
    innermost = retrieve_current_functorch_interpreter()
    if innermost.key() != TransformType.Vmap or innermost.level() > 1:
        raise NotImplementedError(
            "dilated_attention must not be compiled under torch.func.grad, vjp, jacrev or nested transforms, got a call traced "
            "inside one: leave fullgraph=True out, use torch.autograd, or use backend='reference'"
        )


def refuse_regions() -> None:
    """Raise NotImplementedError for a call over ranks inside `torch.compiler.nested_compile_region`, while a compiler traces.

    Inductor does not keep the order of a region's calls and the calls around it, and removes a region whose result is not used.
    """
    if torch.compiler.is_compiling() and _is_in_region():
        raise NotImplementedError(
            "torch.compiler.nested_compile_region must hold no call over several ranks, got one: inductor does not keep the order "
            "of its calls; compile the layers one by one instead, or the whole model without regions"
        )


@answers_while_traced
def _is_in_region() -> bool:
    """Whether dynamo traces a region. torch has no public way to ask."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # slow to import, and here already

    try:
        scope: Any = InstructionTranslator.current_tx().output.current_tracer
    except AttributeError:  # another tracer
        return False
    while scope is not None:
        if str(getattr(scope, "source_target", None)) == "invoke_subgraph":
            return True
        scope = scope.parent
    return False
