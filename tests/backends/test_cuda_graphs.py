"""Which operators `mode="reduce-overhead"` leaves out of its CUDA graphs: those whose course the host decides at every call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import flexdilated.distributed.attention  # its operators
from flexdilated import DilatedPattern, MultiheadDilatedAttention, dilated_attention
from tests.cases import Case, differentiate
from tests.tolerances import EXACT

PATTERN = DilatedPattern((11, 23, 47), (1, 3, 5))
ON_HOST = (
    "mixture_by_values",
    "mixture_by_values_backward",
    "mixture_keeping_by_values",
    "mixture_keeping_by_values_backward",
    "context_parallel",
    "context_parallel_backward",
    "unshard",
    "ignored_keys",
    "coordinate_order",
    "block_lists",
)
CAPTURED = ("mixture", "mixture_backward", "mixture_keeping", "mixture_keeping_backward", "rotary_angles", "xpos_decay", "gelu")


def traced(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[list[torch._ops.OpOverload]]]:
    """A function compiled without inductor, and this library's operators in each graph that was made of it."""
    graphs: list[list[torch._ops.OpOverload]] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        graphs.append([target for target in targets if target.namespace == "flexdilated"])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=compiler)), graphs


def is_left_out(operator: torch._ops.OpOverload) -> bool:
    return torch.Tag.cudagraph_unsafe in operator.tags


@pytest.mark.parametrize("name", [*ON_HOST, *CAPTURED])
def test_operators_whose_course_the_host_decides_are_left_out(name: str) -> None:
    assert is_left_out(getattr(torch.ops.flexdilated, name).default) == (name in ON_HOST)


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({}, False),
        ({"key_padding_mask": torch.arange(43)[None] % 3 == 0}, False),
        ({"cu_seqlens": torch.tensor([0, 5, 43])}, True),
        ({"dropout_p": 0.3}, True),
    ],
    ids=["plain", "mask", "documents", "dropout"],
)
def test_calls_that_read_values_are_left_out_forward_and_backward(options: dict[str, Any], left_out: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dilated_attention(q, k, v, PATTERN, return_lse=True, **options)

    tensors = Case(PATTERN).tensors()
    compiled, graphs = traced(attend)
    torch.manual_seed(3)
    actual = differentiate(compiled, *tensors)
    forward, backward = graphs
    assert [is_left_out(operator) for operator in (*forward, *backward)] == [left_out, left_out]
    torch.manual_seed(3)
    torch.testing.assert_close(actual, differentiate(attend, *tensors), **EXACT)


def test_a_float_mask_is_looked_at_outside() -> None:
    layer = MultiheadDilatedAttention(12, 3, PATTERN, device="cpu")
    x, mask = torch.randn(2, 43, 12), torch.zeros(2, 43)
    compiled, graphs = traced(lambda x: layer(x, x, x, key_padding_mask=mask)[0])
    with torch.no_grad():
        compiled(x)
    names = {operator._opname: is_left_out(operator) for operator in graphs[0]}
    assert names == {"ignored_keys": True, "mixture": False}


@torch.no_grad()
def test_block_lists_are_made_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        flexdilated.backends.flex.kernel, "flex_attention", lambda q, *_, block_mask, **__: q + block_mask.kv_indices.sum()
    )
    x = torch.randn(1, 131, 2, 16)
    compiled, graphs = traced(lambda x: dilated_attention(x, x, x, PATTERN, backend="flex"))
    compiled(x)
    assert [(operator._opname, is_left_out(operator)) for operator in graphs[0]] == [("block_lists", True)]
