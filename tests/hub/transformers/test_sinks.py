"""Sinks: a learned score per head that takes part in the softmax with no value, as in GPT-OSS."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern, reference
from tests.hub.transformers import models
from tests.hub.transformers.models import decode, gpt_oss
from tests.tolerances import EXACT, SINGLE

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from transformers.cache_utils import DynamicCache  # noqa: E402

from flexdilated.hub import transformers as hub  # noqa: E402

HEADS = 6


def test_dense_pattern_equals_the_librarys_own_sinks_with_their_gradients() -> None:
    model, tokens = gpt_oss(models.DENSE), models.draw_tokens()
    logits, gradients = models.run(model, input_ids=tokens, use_cache=False)
    model.config.dilated_pattern = None
    model.set_attn_implementation("eager")
    expected, expected_gradients = models.run(model, input_ids=tokens, use_cache=False)
    torch.testing.assert_close(logits, expected, **SINGLE)
    assert expected_gradients["model.layers.0.self_attn.sinks"].abs().min() > 1e-4
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, **SINGLE)


@torch.no_grad()
@pytest.mark.parametrize("pattern", models.PATTERNS)
def test_decoding_equals_the_full_forward(pattern: DilatedPattern) -> None:
    model, tokens, mask = gpt_oss(pattern), models.draw_tokens(), models.mask_of([models.TOKENS, 17, 5], "left")
    options = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    expected = model(tokens, **options, use_cache=False).logits
    real = mask.bool()
    for cache in (DynamicCache(), hub.DilatedCache()):
        logits = decode(model, tokens, cache, [9, 1, 1, 4, 5, 1, 1, 1], mask)
        torch.testing.assert_close(logits[real], expected[real], **SINGLE)


def layer(pattern: DilatedPattern) -> Any:
    return models.build("Llama", pattern).model.layers[0].self_attn


def draw() -> tuple[Tensor, ...]:
    q, k, v = (torch.randn(models.BATCH, h, models.TOKENS, 8, dtype=torch.float64, requires_grad=True) for h in (HEADS, 2, 2))
    return q, k, v, (2 * torch.randn(HEADS, dtype=torch.float64)).requires_grad_()


def oracle(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, pattern: DilatedPattern) -> Tensor:
    out, lse = reference.dilated_attention(*(x.transpose(1, 2) for x in (q, k, v)), pattern, is_causal=True)
    seen, sink = lse.transpose(1, 2).exp(), sinks.exp()
    return out * (seen / (seen + sink))[..., None]


@pytest.mark.parametrize("pattern", models.PATTERNS)
def test_sinks_are_one_more_key_with_their_gradients(pattern: DilatedPattern) -> None:
    module, inputs = layer(pattern), draw()
    expected = oracle(*inputs, pattern)
    weights = torch.randn_like(expected)
    out, _ = hub.dilated_attention_forward(module, *inputs[:3], None, s_aux=inputs[3])
    torch.testing.assert_close(out, expected, **EXACT)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad((out * weights).sum(), inputs), wanted, **EXACT)
    packed = {name: torch.tensor([0, 7, models.TOKENS]) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    out, _ = hub.dilated_attention_forward(module, *(x[:1] for x in inputs[:3]), None, s_aux=inputs[3], **packed)
    parts = [oracle(*(x[:1, :, part] for x in inputs[:3]), inputs[3], pattern) for part in (slice(7), slice(7, None))]
    torch.testing.assert_close(out, torch.cat(parts, dim=1), **EXACT)


@pytest.mark.parametrize("pattern", models.PATTERNS)
def test_a_sink_that_no_softmax_sees_changes_nothing(pattern: DilatedPattern) -> None:
    q, k, v, sinks = (x.detach() for x in draw())
    inputs, found = [x.requires_grad_() for x in (q, k, v)], []
    for s_aux in (None, torch.full_like(sinks, -torch.inf).requires_grad_()):
        out, _ = hub.dilated_attention_forward(layer(pattern), *inputs, None, s_aux=s_aux)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)])
        if s_aux is not None:
            (gradient,) = torch.autograd.grad(out.square().sum(), s_aux)
            assert not gradient.any()
    torch.testing.assert_close(found[1], found[0], **EXACT)


@pytest.mark.parametrize("pattern", [models.INTERLEAVED, models.GROUPED])
def test_a_part_of_the_heads_has_its_own_sinks(pattern: DilatedPattern) -> None:
    module, (q, k, v, sinks) = layer(pattern), draw()
    expected = oracle(q, k, v, sinks, pattern)
    for first, given in ((0, sinks), (3, sinks), (3, sinks[3:])):  # whole, or cut as the heads are
        here, key = slice(first, first + 3), slice(first // 3, first // 3 + 1)
        out, _ = hub.dilated_attention_forward(module, q[:, here], k[:, key], v[:, key], None, s_aux=given, first_head=first)
        torch.testing.assert_close(out, expected[:, :, here], **EXACT)
    with pytest.raises(ValueError, match=r"s_aux must have shape \(H,\)=\(6,\), the query heads of the call, got \(5,\)"):
        hub.dilated_attention_forward(module, q, k, v, None, s_aux=sinks[:5])
