"""Sinks: one more key of value 0 for each head, by a dense softmax with one more column."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdilated import DilatedKVCache, DilatedPattern, MultiheadDilatedAttention, dilated_attention, reference
from flexdilated.nn import LongNetConfig, LongNetLM
from tests.doors.cases import KINDS, multiplicities

PATTERN = DilatedPattern((6,), (3,))  # of rows without keys
N, H, D = 17, 4, 8


def tensors(kv_heads: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = ((2, N, H, D), (2, N, kv_heads, D), (2, N, kv_heads, D), (H,))
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def by_one_more_column(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, pattern: DilatedPattern) -> tuple[Tensor, Tensor]:
    """Causal attention with the sink as a key."""
    counts = multiplicities(pattern, N, H, is_causal=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5 + counts.double().log()
    scores = torch.cat([scores, sinks[:, None, None].expand(2, H, N, 1)], dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :-1], v), scores.logsumexp(-1)


@pytest.mark.parametrize("kind", [kind for kind, pattern in KINDS.items() if not pattern.detaches and not pattern.zero_padding])
def test_the_definition_of_sinks_is_one_more_column(kind: str) -> None:
    """All other ways equal the definition: tests/doors."""
    x, pattern = tensors(4), KINDS[kind]
    actual, expected = reference.dilated_attention(*x[:3], pattern, is_causal=True, sinks=x[3]), by_one_more_column(*x, pattern)
    upstream = [torch.randn_like(y) for y in expected]
    grads = [torch.autograd.grad(ys, x, upstream) for ys in (actual, expected)]
    for a, b in zip((*actual, *grads[0]), (*expected, *grads[1])):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", ["sdpa", "definition"])
def test_sinks_of_minus_infinity_change_nothing_in_rows_without_keys_either(way: str) -> None:
    x, pattern = tensors(), PATTERN
    call = reference.dilated_attention if way == "definition" else partial(dilated_attention, return_lse=True)
    sinks = torch.full((H,), -torch.inf, dtype=torch.float64, requires_grad=True)
    expected, actual = (call(*x[:3], pattern, sinks=s) for s in (None, sinks))
    assert (expected[1] == -torch.inf).any()
    upstream = [torch.randn_like(y) for y in expected]
    grads = [torch.autograd.grad(expected, x[:3], upstream), torch.autograd.grad(actual, (*x[:3], sinks), upstream)]
    torch.testing.assert_close((*actual, *grads[1]), (*expected, *grads[0], torch.zeros_like(sinks)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"sinks must have shape \(H,\)=\(4,\), got \(3,\)"),
        (torch.zeros(4, dtype=torch.int64), TypeError, r"sinks must be a floating-point tensor \(H,\), got torch.int64"),
        (0.0, TypeError, r"sinks must be a floating-point tensor \(H,\), got 0.0"),
        (torch.zeros(4, device="meta"), ValueError, "sinks must be on the device of q=cpu, got meta"),
    ],
)
def test_wrong_sinks(sinks: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        dilated_attention(*tensors()[:3], PATTERN, sinks=sinks)


@pytest.mark.parametrize("sinks", [0.5, torch.zeros(H)])
def test_a_module_takes_no_scores(sinks: Any) -> None:
    with pytest.raises(TypeError, match=r"^sinks must be a bool, got .*; the layer makes the parameter itself"):
        MultiheadDilatedAttention(H * D, H, PATTERN, sinks=sinks)


def test_a_module_learns_sinks_and_decodes_with_them() -> None:
    torch.manual_seed(0)
    pattern = DilatedPattern.causal(N, H)
    module = MultiheadDilatedAttention(H * D, H, pattern, scale=0.3, sinks=True, is_causal=True, dtype=torch.float64)
    plain = MultiheadDilatedAttention(H * D, H, pattern, scale=0.3, is_causal=True, dtype=torch.float64)
    assert module.sinks is not None
    torch.nn.init.normal_(module.sinks)
    plain.load_state_dict({name: x for name, x in module.state_dict().items() if name != "sinks"})
    x = torch.randn(2, N, H * D, dtype=torch.float64)
    out = module(x, x, x)[0]
    assert not torch.allclose(out, plain(x, x, x)[0])
    out.square().sum().backward()
    assert module.sinks.grad is not None
    assert module.sinks.grad.abs().min() > 0
    cache = DilatedKVCache(pattern, batch_size=2, num_kv_heads=H, head_dim=D, dtype=torch.float64)
    with torch.no_grad():
        parts = [module(part, part, part, cache=cache)[0] for part in x.split([5, 1, 11], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), out.detach(), rtol=0, atol=1e-12)
    module.init_weights()
    assert not module.sinks.any()


def test_scale_of_modules_and_configurations() -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 11,
        "embed_dim": 16,
        "num_layers": 1,
        "num_heads": 2,
        "pattern": DilatedPattern((8,), (1,)),
    }
    config = LongNetConfig(**sizes, scale=0.125)
    assert LongNetConfig.from_dict(config.to_dict()) == config
    model = LongNetLM(config)
    assert {module.scale for module in model.modules() if hasattr(module, "dropout_p") and hasattr(module, "pattern")} == {0.125}
    with pytest.raises(TypeError, match="scale must be a number or None, got 'large'"):
        LongNetConfig(**sizes, scale="large")
