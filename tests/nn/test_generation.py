"""The model with caches, and what it generates."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM
from flexdilated.nn.position import XPos
from flexdilated.nn.sampling import Sampler
from tests.tolerances import SINGLE

NESTED = DilatedPattern((4, 8), (1, 2))
RAGGED = DilatedPattern((5, 7), (1, 2), offsets="interleaved")
GROUPED = DilatedPattern((3, 6), (1, 2), heads="grouped")
TOKENS, VOCAB = 29, 17


def model(**options: object) -> LongNetLM:
    torch.manual_seed(5)
    defaults = {"vocab_size": VOCAB, "embed_dim": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "pattern": NESTED}
    return LongNetLM(LongNetConfig(**(defaults | options))).eval()


def draw_tokens(batch: int = 3, tokens: int = TOKENS) -> Tensor:
    return torch.randint(VOCAB, (batch, tokens))


@pytest.mark.parametrize(
    ("pattern", "position", "max_length"),
    [(NESTED, "xpos", None), (RAGGED, "xpos", TOKENS), (RAGGED, "rotary", None), (GROUPED, "rotary", TOKENS)],
    ids=str,
)
@torch.no_grad()
def test_logits_with_caches_equal_the_full_forward(pattern: DilatedPattern, position: str, max_length: int | None) -> None:
    lm, tokens = model(pattern=pattern, position=position), draw_tokens()
    caches = lm.make_caches(3, max_length=max_length)
    parts = [
        lm(tokens[:, a:b], caches=caches) for a, b in ((0, 9), (9, 10), (10, 11), (11, 23), *((t, t + 1) for t in range(23, 29)))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), lm(tokens), **SINGLE)


@torch.no_grad()
def test_xpos_centre_is_the_same_in_every_chunk_far_from_the_beginning() -> None:
    # Short reach of each chunk, strong decay: with a centre per chunk the scores would be off by orders of magnitude.
    for pattern, max_length in ((DilatedPattern((96,), (1,)), None), (DilatedPattern((64, 96), (1, 1)), 200)):
        lm, tokens = model(pattern=pattern, num_layers=1), draw_tokens(1, 200)
        lm.position = XPos(6, pattern, scale_base=8.0)
        caches = lm.make_caches(1, max_length=max_length)
        parts = [lm(tokens[:, t : t + 5], caches=caches) for t in range(0, 200, 5)]
        torch.testing.assert_close(torch.cat(parts, dim=1), lm(tokens), **SINGLE)


@torch.no_grad()
def test_xpos_without_a_common_period_needs_a_length() -> None:
    lm = model(pattern=DilatedPattern((1009, 1013), (1, 1)))
    message = (
        "max_length must be at most 65391 in decoding with scale_base=512.0 and segment lengths whose least common multiple is "
        "1022117, got None; use rotary positions"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        lm.make_caches(1)
    with pytest.raises(ValueError, match=r"got 65392; use rotary"):
        lm.make_caches(1, max_length=65392)
    lm.make_caches(1, max_length=65391)


@torch.no_grad()
def test_caches_hold_the_dtype_of_the_keys_under_autocast() -> None:
    lm, tokens = model(), draw_tokens()
    with torch.autocast("cpu", torch.bfloat16):
        caches = lm.make_caches(3)
        parts = [lm(tokens[:, a:b], caches=caches) for a, b in ((0, 9), (9, 10), (10, 29))]
        expected = lm(tokens)
    assert caches[0].dtype == torch.bfloat16
    # Eight bits of mantissa, through two layers.
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=0.05 * expected.abs().max().item(), rtol=0.0)
    assert model().double().make_caches(1)[0].dtype == torch.float64


@torch.no_grad()
@pytest.mark.parametrize("lengths", [None, torch.tensor([29, 1, 17]), torch.tensor([0, 29, 2])], ids=str)
def test_last_logits_are_those_of_the_last_token_of_each_sequence(lengths: Tensor | None) -> None:
    lm, tokens = model(), draw_tokens()
    last = lm(tokens, caches=lm.make_caches(3), lengths=lengths, last_only=True)
    every = lm(tokens, caches=lm.make_caches(3), lengths=lengths)
    assert last.shape == (3, 1, VOCAB)
    for b, n in enumerate([TOKENS] * 3 if lengths is None else lengths.tolist()):
        if n:
            torch.testing.assert_close(last[b, 0], every[b, n - 1], **SINGLE)


@torch.no_grad()
def test_model_rejects_what_does_not_go_with_caches() -> None:
    lm, tokens = model(attention_dropout_p=0.1), draw_tokens()
    caches, padding = lm.make_caches(3), torch.zeros(3, TOKENS, dtype=torch.bool)
    foreign = model(pattern=RAGGED).make_caches(3)
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: lm(tokens, lengths=torch.tensor([1, 2, 3])), ValueError, "lengths must come with caches, got no caches"),
        (lambda: lm(tokens, last_only=True), ValueError, "last_only must come with caches, got no caches; take the last of all"),
        (lambda: lm(tokens, caches=5), TypeError, "caches must be a sequence of DilatedKVCache, got 5; use make_caches"),
        (lambda: lm(tokens, caches=caches[:1]), ValueError, "caches must be one per layer=2, got 1"),
        (lambda: lm(tokens, caches=caches[:1] * 2), ValueError, "caches must be different objects, got one for two"),
        (lambda: lm(tokens[:2], caches=caches), ValueError, "tokens must have the batch size of caches=3, got 2"),
        (lambda: lm(tokens, caches=caches, key_padding_mask=padding), NotImplementedError, "key_padding_mask must be None with"),
        (lambda: lm(tokens, caches=foreign), ValueError, "cache must be for the layer's pattern="),
        (lambda: lm.train()(tokens, caches=caches), NotImplementedError, "cache must come without dropout, got 0.1; call eval"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=f"^{re.escape(message)}"):
            call()
    layer, x = model().layers[0].self_attn, torch.randn(3, 5, 24)
    layer.attention.is_causal = False
    with pytest.raises(NotImplementedError, match=r"^cache must come with is_causal=True, got is_causal=False"):
        layer(x, x, x, cache=caches[0])
    with pytest.raises(TypeError, match=r"^cache must be a DilatedKVCache, got int$"):
        layer(x, x, x, is_causal=True, cache=5)
    with pytest.raises(ValueError, match=r"^lengths must come with cache, got no cache"):
        layer(x, x, x, lengths=torch.tensor([1, 2, 3]))


@torch.no_grad()
def reread(lm: LongNetLM, tokens: Tensor, count: int, sampler: Sampler, generator: torch.Generator | None) -> Tensor:
    """Generation without a cache: the whole prefix is read for each token."""
    for _ in range(count):
        tokens = torch.cat([tokens, sampler.draw(lm(tokens)[:, -1], generator=generator)[:, None]], dim=1)
    return tokens[:, -count:]


@pytest.mark.parametrize(("pattern", "prompt"), [(NESTED, 1), (RAGGED, 7), (GROUPED, 19)], ids=str)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}], ids=str)
def test_generate_gives_what_rereading_gives(pattern: DilatedPattern, prompt: int, options: dict[str, float]) -> None:
    lm, tokens = model(pattern=pattern, tie_embeddings=False), draw_tokens(2, prompt)
    drawn = lm.generate(tokens, max_new_tokens=13, generator=torch.Generator().manual_seed(7), **options)
    expected = reread(lm, tokens, 13, Sampler(**options), torch.Generator().manual_seed(7))
    assert torch.equal(drawn, expected)


def test_generate_takes_prompts_of_different_lengths() -> None:
    lm, tokens = model(), draw_tokens(3, 13)
    lengths = torch.tensor([13, 1, 6])
    drawn = lm.generate(tokens, max_new_tokens=11, lengths=lengths, temperature=0)
    for b, n in enumerate(lengths.tolist()):
        assert torch.equal(drawn[b : b + 1], lm.generate(tokens[b : b + 1, :n], max_new_tokens=11, temperature=0))


@pytest.mark.parametrize("held_in", [iter, set, np.array, torch.tensor])
def test_generate_stops_each_sequence_at_a_stop_token_and_ends_early(held_in: Callable[[tuple[int, ...]], Any]) -> None:
    lm, tokens = model(tie_embeddings=False), draw_tokens(2, 5)
    options = {"max_new_tokens": 40, "temperature": 1.0}
    free = lm.generate(tokens, generator=torch.Generator().manual_seed(1), **options)
    stops = (int(free[0, 3]), int(free[1, 8]))
    ends = [min(row.tolist().index(stop) for stop in stops if stop in row.tolist()) for row in free]
    assert ends[0] != ends[1]
    options |= {"stop_tokens": held_in(stops), "pad_token": VOCAB - 1}
    drawn = lm.generate(tokens, generator=torch.Generator().manual_seed(1), **options)
    assert drawn.shape == (2, max(ends) + 1)
    for row, whole, end in zip(drawn, free, ends):
        assert torch.equal(row[: end + 1], whole[: end + 1])
        assert (row[end + 1 :] == VOCAB - 1).all()


def test_generate_calls_the_model_as_a_module() -> None:
    lm, tokens, seen = model(), draw_tokens(), []
    expected = lm.generate(tokens, max_new_tokens=7, temperature=0)
    lm.register_forward_pre_hook(lambda _, arguments: seen.append(tuple(arguments[0].shape)))
    assert torch.equal(lm.generate(tokens, max_new_tokens=7, temperature=0), expected)
    assert seen == [(3, TOKENS)] + [(3, 1)] * 6
    lm.register_forward_hook(lambda _, arguments, logits: logits.index_fill(2, torch.tensor(5), float("inf")))
    assert (lm.generate(tokens, max_new_tokens=7, temperature=0) == 5).all()


class AlwaysTraining(nn.Module):
    """A part that a user keeps in one mode by a `train` of its own."""

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(True)


@pytest.mark.parametrize("fails", [False, True])
def test_generate_drops_nothing_and_leaves_the_mode_of_every_module(fails: bool) -> None:
    lm, tokens = model(dropout_p=0.5, attention_dropout_p=0.5), draw_tokens()
    expected = lm.generate(tokens, max_new_tokens=5, temperature=0)
    lm.probe = AlwaysTraining()
    modules = [module for module in lm.modules() if not isinstance(module, AlwaysTraining)]
    modes = (torch.rand(len(modules), generator=torch.Generator().manual_seed(0)) < 0.5).tolist()
    modes[:2] = [True, False]
    for module, mode in zip(modules, modes):
        module.training = mode
    seen = []

    def look(*_: object) -> None:
        seen.append([module.training for module in modules])
        if fails and len(seen) == 3:
            raise KeyboardInterrupt

    lm.layers[1].ffn.fc2.register_forward_hook(look)
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        assert torch.equal(lm.generate(tokens, max_new_tokens=5, temperature=0), expected)
    assert not any(any(row) for row in seen)
    assert [module.training for module in modules] == modes
    assert lm.probe.training


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, ValueError, "tokens must have shape (B, N), B and N at least 1, got (3,)"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be an integer of at least 1, got 0"),
        ({"stop_tokens": (1, 17)}, ValueError, "stop_tokens[1] must be in [0, vocab_size=17), got 17"),
        ({"pad_token": -1}, ValueError, "pad_token must be in [0, vocab_size=17), got -1"),
        ({"stop_tokens": (1, 1.5)}, TypeError, "stop_tokens[1] must be an integer, got 1.5"),
        ({"pad_token": True}, TypeError, "pad_token must be an integer, got True"),
        ({"stop_tokens": torch.tensor([True])}, TypeError, "stop_tokens[0] must be an integer, got tensor(True)"),
        ({"lengths": torch.tensor([1.0, 2.5, 5.0])}, TypeError, "lengths must be of int64 or int32, got float32"),
        ({"lengths": torch.tensor([1, 2])}, ValueError, "lengths must have shape (B,)=(3,), got (2,)"),
        ({"lengths": torch.tensor([1, 0, 5])}, ValueError, "lengths must be in [1, N=5], got [1, 0, 5]"),
        ({"lengths": torch.tensor([1, 6, 5])}, ValueError, "lengths must be in [1, N=5], got [1, 6, 5]"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
    ],
)
def test_generate_rejects_wrong_arguments(options: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"tokens": torch.zeros(3, 5, dtype=torch.int64), "max_new_tokens": 2}
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        model().generate(**(arguments | options))
