"""A window and global tokens in calls with functions, in graphs, transforms, attention maps and modules, against the definition."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export
from torch.utils.checkpoint import checkpoint

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM, attention_map, dilated_attention, reference
from flexdilated.export import portable
from flexdilated.nn.position import XPos
from tests.backends.test_mods import Mods, at_most, needs_unknown_sizes, padded, run, with_lse
from tests.backends.test_portable import portable as attend_portable
from tests.cases import Case, differentiate, run_reference
from tests.nn.test_position import HEAD_DIM, scores, xpos_scores
from tests.tolerances import EXACT, SINGLE

MIXED = DilatedPattern((13,), (2,), window=5, global_tokens=3)
CASES = {
    "chunks": Case(DilatedPattern(window=71), num_tokens=211, kv_heads=2, group=2, is_causal=True),
    "both_sides": Case(DilatedPattern(window=71), num_tokens=293, kv_heads=2, ignored=0.3, batch=2),
    "short": Case(replace(MIXED, heads="grouped"), num_tokens=197, kv_heads=2, group=3, ignored=0.7, is_causal=True),
    "window": Case(replace(MIXED, global_tokens=0), num_tokens=131, kv_heads=3, lse_gradient=False),
    "first": Case(DilatedPattern((13, 47), (2, 3), global_tokens=1), num_tokens=131, kv_heads=3, lse_gradient=False),
    "many_first": Case(DilatedPattern(window=3, global_tokens=73), num_tokens=131, kv_heads=2, group=2, ignored=0.3),
    "all_first": Case(DilatedPattern((13,), (2,), global_tokens=1 << 40), num_tokens=67, kv_heads=2),
    "documents": Case(MIXED, num_tokens=167, kv_heads=2, borders=(0, 79, 79, 158, 161, 167), is_causal=True),
    "own_token": Case(DilatedPattern((7,), (7,), window=1), num_tokens=67, kv_heads=2),
    "longer": Case(DilatedPattern(window=1 << 40), num_tokens=67, kv_heads=2, is_causal=True),
    "one_token": Case(MIXED, num_tokens=1, kv_heads=2),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("attend", [with_lse, pytest.param(padded, marks=needs_unknown_sizes)])
def test_functions_equal_the_definition(name: str, attend: Callable[..., Any]) -> None:
    case, mods = (
        replace(CASES[name], scale=0.7, borders=CASES[name].borders if attend is with_lse else None),
        Mods("table", "thirds"),
    )
    with at_most(30_000):
        found = run(attend, case, mods)
    torch.testing.assert_close(found, run(reference.dilated_attention, case, mods), **EXACT)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("documents", "longer", "all_first")])
def test_portable_operations_and_maps_equal_the_definition(name: str) -> None:
    case = CASES[name]
    found = differentiate(lambda *x: attend_portable(*x, case.pattern, **case.options()), *case.tensors())
    torch.testing.assert_close(found, run_reference(case), **EXACT)
    q, k, _, _, _ = case.tensors()
    n, queries = case.num_tokens, sorted({0, case.num_tokens // 2, case.num_tokens - 1})
    tokens = torch.eye(n, dtype=torch.float64)[None, :, None].expand(case.batch, -1, case.kv_heads, -1)
    q, k = (nn.functional.pad(x, (0, n - 3)) if n > 3 else x for x in (q, k))  # values are as wide as keys
    out, _ = reference.dilated_attention(q, k, tokens, case.pattern, **case.options())
    weights = attention_map(q, k, case.pattern, queries=queries, **case.options())
    torch.testing.assert_close(weights, out[:, queries].transpose(1, 2), **EXACT)


@pytest.mark.parametrize("functions", [{}, Mods("alibi", "prefix").functions(torch.empty(0))], ids=["plain", "functions"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_transforms_checkpoints_and_dropout(functions: dict[str, Any], is_causal: bool) -> None:
    q, k, v, dout, _ = Case(MIXED, num_tokens=137, kv_heads=2).tensors()
    tangents = Case(MIXED, num_tokens=137, kv_heads=2, seed=1).tensors()[:3]

    def attend(*x: Tensor, **options: Any) -> Tensor:
        return dilated_attention(*x, MIXED, is_causal=is_causal, backend="sdpa", **functions, **options)

    def define(*x: Tensor) -> Tensor:
        return reference.dilated_attention(*x, MIXED, is_causal=is_causal, **functions)[0]

    def slope(f: Callable[..., Tensor]) -> Any:
        return torch.func.grad(lambda *x: (f(*x) * dout).sum(), (0, 1, 2))

    torch.testing.assert_close(torch.func.jvp(attend, (q, k, v), tangents), torch.func.jvp(define, (q, k, v), tangents), **EXACT)
    expected = [torch.stack(grads) for grads in zip(slope(define)(q, k, v), slope(define)(*tangents))]
    both = [torch.stack(pair) for pair in zip((q, k, v), tangents)]
    torch.testing.assert_close(list(torch.func.vmap(slope(attend))(*both)), expected, **EXACT)

    def dropped(*x: Tensor, wrap: Any = lambda f, *x: f(*x)) -> Tensor:
        torch.manual_seed(3)
        return wrap(partial(attend, dropout_p=0.4), *x)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(dropped(*leaves), leaves, dout)
    again = dropped(*leaves, wrap=partial(checkpoint, use_reentrant=False))
    torch.testing.assert_close(torch.autograd.grad(again, leaves, dout), grads, **EXACT)
    ends = [(dropped(*(x + step * t for x, t in zip((q, k, v), tangents))) * dout).sum() for step in (1e-6, -1e-6)]
    change = sum((g * t).sum() for g, t in zip(grads, tangents))
    torch.testing.assert_close((ends[0] - ends[1]) / 2e-6, change, atol=1e-6, rtol=1e-6)


LEARNS = pytest.param(Mods("alibi", "thirds").functions(torch.empty(0)), True, marks=[pytest.mark.slow, needs_unknown_sizes])


@pytest.mark.parametrize(("functions", "dynamic"), [({}, True), LEARNS, ({}, False)])
def test_one_graph_serves_every_length(functions: dict[str, Any], dynamic: bool) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(with_lse, fullgraph=True, dynamic=dynamic, backend=graphs)
    for n in (131, 67, 29, 293) if dynamic else (131,):
        case = Case(MIXED, batch=2, num_tokens=n, kv_heads=2, group=2)
        found, expected = (
            differentiate(lambda *x, f=f: f(*x, MIXED, is_causal=True, **functions), *case.tensors())
            for f in (compiled, reference.dilated_attention)
        )
        torch.testing.assert_close(found, expected, **EXACT)
    assert graphs.frame_count == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_portable_program_serves_every_length(is_causal: bool) -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return dilated_attention(x, x[:, :, :2], x[:, :, 2:], MIXED, is_causal=is_causal)

    shapes = ({0: Dim("batch"), 1: Dim("length")},)
    served = portable(export(Attention(), (torch.randn(2, 29, 4, 3),), dynamic_shapes=shapes)).module()
    for n in (1, 5, 64, 65, 211):
        x = torch.randn(3, n, 4, 3)
        torch.testing.assert_close(served(x), Attention()(x), **SINGLE)


def test_xpos_decays_over_a_whole_sequence_under_a_window() -> None:
    q, k = torch.randn(2, 1, 1009, 1, HEAD_DIM, dtype=torch.float64)
    pattern, positions = DilatedPattern((16,), (1,), window=3), torch.arange(1009)
    position = XPos(HEAD_DIM, pattern, scale_base=8.0)
    with pytest.raises(ValueError, match=r"^scale_base must be at least 8 with a window in a sequence of 1009 tokens, got 7.0$"):
        XPos(HEAD_DIM, pattern, scale_base=7.0)(positions)
    expected = xpos_scores(q, k, positions, 8.0)
    near = (positions[:, None] - positions).abs() < 3
    for rotation in (position(positions, dtype=q.dtype), position.decode(positions[None], max_length=1009, dtype=q.dtype)):
        torch.testing.assert_close(scores(*rotation.apply(q, k))[..., near], expected[..., near], **EXACT)
    with pytest.raises(
        ValueError, match=r"^max_length must be at most 1021 in decoding with scale_base=8.0 and a window, got None;"
    ):
        position.decode(positions[None])


def test_a_model_under_a_window_alone_is_plain_data_and_causal() -> None:
    config = LongNetConfig(vocab_size=29, embed_dim=24, num_layers=2, num_heads=4, pattern=DilatedPattern(window=5))
    assert LongNetConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    lm, tokens = LongNetLM(config).double().eval(), torch.arange(43)[None] % 29
    logits, changed = lm(tokens), lm(tokens.index_fill(1, torch.tensor([30]), 3))
    moved = (logits != changed).any(dim=-1)[0].nonzero().flatten().tolist()
    assert moved == list(range(30, 39))  # two layers, each of which sees the four tokens before
