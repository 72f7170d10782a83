"""The schema of an operator follows from the fields of its options; whatever sees operators sees them in eager calls as well."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.core.custom_op import is_plain_eager, schema_of


class Options(NamedTuple):
    lengths: Sequence[int]
    rank: int
    scale: float
    is_causal: bool
    name: str


class Subclass(Tensor):
    pass


class Operators(TorchDispatchMode):
    """The names of the operators that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_schema_is_made_of_the_fields() -> None:
    assert schema_of(Options) == "SymInt[] lengths, SymInt rank, float scale, bool is_causal, str name"


@pytest.mark.parametrize(
    ("mode", "is_plain"),
    [
        (nullcontext, True),
        (torch.inference_mode, True),
        (torch.no_grad, True),
        (lambda: torch.autocast("cpu", torch.bfloat16), True),
        (Operators, False),
        (FakeTensorMode, False),
        (TorchFunctionMode, False),
    ],
)
def test_modes_see_operators(mode: Callable[[], AbstractContextManager[object]], is_plain: bool) -> None:
    x = torch.zeros(2)
    with mode():
        assert is_plain_eager((x, None, torch.nn.Parameter(x))) == is_plain


def test_tensors_of_subclasses_and_without_memory_keep_operators() -> None:
    x = torch.zeros(2)
    assert not is_plain_eager((x, x.as_subclass(Subclass)))
    assert not is_plain_eager((x, torch.zeros(2, device="meta")))


def test_transforms_and_tracers_see_operators() -> None:
    answers: list[bool] = []

    def ask(x: Tensor) -> Tensor:
        answers.append(is_plain_eager((torch.zeros(2),)))
        return x.sum()

    x = torch.ones(2, requires_grad=True)
    torch.func.vmap(ask)(torch.ones(2, 2))
    torch.func.grad(ask)(torch.ones(2))
    make_fx(ask)(torch.ones(2))
    make_fx(ask, pre_dispatch=True)(torch.ones(2))
    torch.jit.trace(ask, torch.ones(2), check_trace=False)
    y = x * 2.0
    y.register_hook(lambda grad: answers.append(is_plain_eager((torch.zeros(2),))))
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True)
    assert answers == [False] * 6


def test_a_mode_sees_the_operator_of_a_call_and_of_its_backward() -> None:
    q = torch.ones(1, 8, 2, 4, requires_grad=True)
    with Operators() as operators:
        dilated_attention(q, q, q, DilatedPattern((4, 8), (1, 2))).sum().backward()
    names = [name.partition("flexdilated.")[2] for name in operators.names if "flexdilated." in name]
    assert names == ["mixture.default", "mixture_backward.default"]
