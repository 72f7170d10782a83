"""A window and global tokens in graphs, transforms and modules, against the definition."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export
from torch.utils.checkpoint import checkpoint

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM, dilated_attention, reference
from flexdilated.core.branch import Near
from flexdilated.export import portable
from flexdilated.nn.position import XPos
from tests.backends.mods import Mods, with_lse
from tests.cases import Case, differentiate
from tests.nn.rotations import HEAD_DIM, scores, xpos_scores
from tests.tolerances import EXACT, SINGLE

MIXED = DilatedPattern((13,), (2,), window=5, global_tokens=3)


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


@pytest.mark.parametrize("dynamic", [True, False])
def test_one_graph_serves_every_length(dynamic: bool) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(with_lse, fullgraph=True, dynamic=dynamic, backend=graphs)
    for n in (131, 67, 29, 293) if dynamic else (131,):
        case = Case(MIXED, batch=2, num_tokens=n, kv_heads=2, group=2)
        found, expected = (
            differentiate(lambda *x, f=f: f(*x, MIXED, is_causal=True), *case.tensors())
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


@pytest.mark.parametrize("near", [Near(window=3), Near(global_tokens=2), Near(3, 2)], ids=str)
def test_xpos_decays_over_a_whole_sequence_under_a_window_or_global_tokens(near: Near) -> None:
    q, k = torch.randn(2, 1, 1009, 1, HEAD_DIM, dtype=torch.float64)
    positions = torch.arange(1009)
    pattern = DilatedPattern((16,), (1,), window=near.window or None, global_tokens=near.global_tokens)
    position = XPos(HEAD_DIM, pattern, scale_base=8.0)
    where = "with a window or global tokens in a sequence of 1009 tokens"
    with pytest.raises(ValueError, match=rf"^scale_base must be at least 8 {where}, got 7.0$"):
        XPos(HEAD_DIM, pattern, scale_base=7.0)(positions)
    expected = xpos_scores(q, k, positions, 8.0)
    joined = near.joins(positions[:, None], positions)
    for rotation in (position(positions, dtype=q.dtype), position.decode(positions[None], max_length=1009, dtype=q.dtype)):
        torch.testing.assert_close(scores(*rotation.apply(q, k))[..., joined], expected[..., joined], **EXACT)
    message = r"^max_length must be at most 1021 in decoding with scale_base=8.0 and a window or global tokens, got None;"
    with pytest.raises(ValueError, match=message):
        position.decode(positions[None])


def test_a_model_under_a_window_alone_is_plain_data_and_causal() -> None:
    config = LongNetConfig(vocab_size=29, embed_dim=24, num_layers=2, num_heads=4, pattern=DilatedPattern(window=5))
    assert LongNetConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    lm, tokens = LongNetLM(config).double().eval(), torch.arange(43)[None] % 29
    logits, changed = lm(tokens), lm(tokens.index_fill(1, torch.tensor([30]), 3))
    moved = (logits != changed).any(dim=-1)[0].nonzero().flatten().tolist()
    assert moved == list(range(30, 39))  # two layers, each of which sees the four tokens before
