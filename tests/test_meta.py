"""Meta tensors and fake ones: shapes and dtypes of every call, without values; what reads values is refused by name."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flexdilated import (
    DilatedKVCache,
    DilatedPattern,
    LongNetConfig,
    LongNetLM,
    attention_map,
    create_dilated_block_mask,
    dilated_attention,
    masks,
)
from flexdilated.core.hardware import Hardware, detect
from flexdilated.core.tracing import holds_values

PATTERN = DilatedPattern((5, 13), (1, 3))
VOCAB, WIDTH, HEADS = 29, 24, 4
VALUELESS = ("meta", "fake")


@contextlib.contextmanager
def valueless(kind: str) -> Iterator[torch.device]:
    """Where tensors are made that hold no values, and their device."""
    with FakeTensorMode() if kind == "fake" else contextlib.nullcontext():
        yield torch.device("cpu" if kind == "fake" else "meta")


def draw(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, device=device, dtype=dtype, requires_grad=True)


def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + (q_idx - kv_idx) * 0.1


def earlier(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx <= q_idx


CALLS: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "plain": lambda device: {},
    "causal": lambda device: {"is_causal": True, "scale": -0.3},
    "mask": lambda device: {"key_padding_mask": torch.zeros(2, 31, dtype=torch.bool, device=device)},
    "dropout": lambda device: {"dropout_p": 0.25},
    "functions": lambda device: {"score_mod": bias, "mask_mod": earlier},
    "reference": lambda device: {"backend": "reference"},
    "detached": lambda device: {"pattern": DilatedPattern((5, 13), (1, 3), detach_weights=True)},
    "zero_padding": lambda device: {"pattern": DilatedPattern.torchscale((5, 13), (1, 3))},
}


@pytest.mark.parametrize(("kind", "dtype"), [("meta", torch.float64), ("meta", torch.bfloat16), ("fake", torch.float32)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_attention_says_its_shapes(name: str, kind: str, dtype: torch.dtype) -> None:
    with valueless(kind) as device:
        q, k, v = (draw(2, 31, heads, 7, device=device, dtype=dtype) for heads in (6, 3, 3))
        options = {"pattern": PATTERN, **CALLS[name](device)}
        out, lse = dilated_attention(q, k, v, return_lse=True, **options)
        wide = torch.promote_types(dtype, torch.float32)
        assert (out.shape, out.dtype, out.device) == (q.shape, dtype, device)
        assert (lse.shape, lse.dtype, lse.device) == ((2, 6, 31), wide, device)
        assert not holds_values(out)
        grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
        assert [(g.shape, g.dtype, g.device) for g in grads] == [(x.shape, dtype, device) for x in (q, k, v)]


@pytest.mark.parametrize("kind", VALUELESS)
@pytest.mark.parametrize("position", ["rotary", "xpos"])
def test_longnet_says_its_shapes(position: str, kind: str) -> None:
    config = LongNetConfig(
        vocab_size=VOCAB, embed_dim=WIDTH, num_layers=1, num_heads=HEADS, num_kv_heads=2, pattern=PATTERN, position=position
    )
    with valueless(kind) as device, device:
        model = LongNetLM(config)
        tokens = torch.zeros(2, 31, dtype=torch.int64)
        logits = model(tokens, key_padding_mask=torch.zeros(2, 31, dtype=torch.bool))
        assert (logits.shape, logits.device) == ((2, 31, VOCAB), device)
        logits.sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        assert model(tokens[:1], cu_seqlens=torch.empty(4, dtype=torch.int64)).shape == (1, 31, VOCAB)
        with torch.autocast("cpu", torch.bfloat16):
            expected = torch.bfloat16 if kind == "fake" else torch.float32  # the meta device has no autocast
            assert model(tokens).dtype == expected


@pytest.mark.parametrize("kind", VALUELESS)
@torch.no_grad()
def test_a_cache_says_its_shapes(kind: str) -> None:
    with valueless(kind) as device, device:
        model = LongNetLM(LongNetConfig(vocab_size=VOCAB, embed_dim=WIDTH, num_layers=1, num_heads=HEADS, pattern=PATTERN))
        caches = model.make_caches(2, max_length=999)
        for num_tokens in (300, 1, 150):
            tokens, lengths = torch.zeros(2, num_tokens, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
            assert model(tokens, caches=caches, lengths=lengths).shape == (2, num_tokens, VOCAB)
        caches[0].reorder(torch.zeros(2, dtype=torch.int64))
        assert caches[0].lengths.shape == (2,)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("borders", [(), (0, 11, 37)], ids=["one document", "documents"])
@pytest.mark.parametrize("pattern", [PATTERN, DilatedPattern((13,), (3,), window=5), DilatedPattern(window=5)], ids=str)
def test_make_fx_traces_sizes_that_are_numbers(pattern: DilatedPattern, borders: tuple[int, ...], is_causal: bool) -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor, *cu_seqlens: Tensor) -> Tensor:
        return dilated_attention(q, k, v, pattern, is_causal=is_causal, cu_seqlens=cu_seqlens[0] if cu_seqlens else None)

    def with_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
        out = forward(*inputs)
        return out, *torch.autograd.grad(out.sin().sum(), inputs[:3])

    torch.manual_seed(0)
    inputs = [torch.randn(1, 37, heads, 7, requires_grad=True) for heads in (6, 3, 3)] + [torch.tensor(borders)] * bool(borders)
    for function in (forward, with_gradients):
        for mode in ("real", "fake"):
            torch.testing.assert_close(make_fx(function, tracing_mode=mode)(*inputs)(*inputs), function(*inputs))
        with pytest.raises(
            NotImplementedError,
            match=r"^q and k must have sizes that are numbers outside .*, got \(.*; use torch.export,",
        ):
            make_fx(function, tracing_mode="symbolic")(*inputs)


@pytest.mark.parametrize("name", CALLS)
def test_calls_do_not_depend_on_the_default_device(name: str) -> None:
    cpu = torch.device("cpu")
    q, k, v = (torch.randn(2, 31, heads, 7, requires_grad=True) for heads in (6, 3, 3))
    options = {"pattern": PATTERN, "return_lse": True, **CALLS[name](cpu)}

    def run() -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        out, lse = dilated_attention(q, k, v, **options)
        return out, lse, *torch.autograd.grad((out * out).sum() + lse.sum(), (q, k, v))

    expected = run()
    with torch.device("meta"):
        actual = run()
    assert all(torch.equal(a, e) for a, e in zip(actual, expected))


def test_maps_and_masks_do_not_depend_on_the_default_device() -> None:
    q = torch.randn(2, 31, 6, 7)
    pattern = DilatedPattern((150, 300, 300), (1, 3, 2))

    def run() -> tuple[Tensor, ...]:
        mask = create_dilated_block_mask(pattern, 6, seq_len=700, device="cpu")
        return attention_map(q, q, PATTERN, queries=[3, 30]), *mask.as_tuple()[2:4], mask.kv_indices

    expected = run()
    masks.block_mask._find_lists.cache_clear()
    with torch.device("meta"):
        actual = run()
    assert all(torch.equal(a, e) for a, e in zip(actual, expected))


@pytest.mark.parametrize("kind", VALUELESS)
@pytest.mark.parametrize("options", [{"score_mod": bias}, {"backend": "reference"}], ids=["functions", "reference"])
def test_what_plans_by_borders_refuses_such_without_values(options: dict[str, Any], kind: str) -> None:
    with valueless(kind) as device:
        q = draw(1, 31, 6, 7, device=device)
        borders = torch.empty(3, dtype=torch.int32, device=device)
        with pytest.raises(NotImplementedError, match=r"cu_seqlens must hold values for this call, got a meta or fake tensor"):
            dilated_attention(q, q, q, PATTERN, cu_seqlens=borders, **options)


def test_borders_without_values_are_refused_beside_tokens_with_values() -> None:
    q, borders = torch.zeros(1, 31, 6, 7), torch.empty(3, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=r"cu_seqlens must hold values for q on cpu, got a tensor on meta"):
        dilated_attention(q, q, q, PATTERN, cu_seqlens=borders)
    model = LongNetLM(LongNetConfig(vocab_size=VOCAB, embed_dim=WIDTH, num_layers=1, num_heads=HEADS, pattern=PATTERN))
    with pytest.raises(ValueError, match=r"cu_seqlens must hold values for q on cpu, got a tensor on meta"):
        model(torch.zeros(1, 31, dtype=torch.int64), cu_seqlens=borders)


@pytest.mark.parametrize("backend", ["flex", "flash"])
def test_named_backends_refuse_the_meta_device(backend: str) -> None:
    q = torch.zeros(1, 31, 6, 7, device="meta")
    with pytest.raises(NotImplementedError, match=rf"backend '{backend}' cannot run this on meta: "):
        dilated_attention(q, q, q, PATTERN, backend=backend)


@pytest.mark.parametrize("kind", VALUELESS)
@torch.no_grad()
def test_what_reads_tokens_or_lengths_is_refused(kind: str) -> None:
    with valueless(kind) as device, device:
        model = LongNetLM(LongNetConfig(vocab_size=VOCAB, embed_dim=WIDTH, num_layers=1, num_heads=HEADS, pattern=PATTERN))
        with pytest.raises(NotImplementedError, match="tokens and the model must hold values to draw from, got meta or fake ones"):
            model.generate(torch.zeros(2, 3, dtype=torch.int64), max_new_tokens=2)
        cache = DilatedKVCache(PATTERN, batch_size=2, num_kv_heads=2, head_dim=7)
        with pytest.raises(NotImplementedError, match="length must be that of a cache with values, got a meta or fake tensor"):
            cache.crop(1)


def test_a_fake_gpu_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect("cuda") == Hardware("cuda")
    with FakeTensorMode():
        q = torch.zeros(1, 31, 6, 7, device="cuda")
        assert dilated_attention(q, q, q, PATTERN).device.type == "cuda"
