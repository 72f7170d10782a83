"""The bounded cache: decoding equals the full forward, in memory that the pattern alone determines."""

import copy
import dataclasses
import pickle
import random
import re
from collections.abc import Callable
from math import ceil
from unittest import mock

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.core.tracing import TRACES_UNKNOWN_SIZES
from flexdilated.decode import DilatedKVCache
from flexdilated.decode.layout import _plan_of as plan_of
from flexdilated.decode.tokens import BLOCK
from tests.cases import least_heads, patterns
from tests.decoding import (
    BATCH,
    DIM,
    GROUP,
    GROUPED,
    HEADS,
    LONGNET,
    PATTERNS,
    RAGGED,
    TOKENS,
    draw,
    feed,
    feed_all,
    full,
    make,
    padded_chunk,
    sees,
)
from tests.tolerances import EXACT, SINGLE, assert_twice_naive

DTYPES = "float64, float32, bfloat16 or float16"


@pytest.fixture(autouse=True)
def _without_gradients() -> object:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("pattern", [RAGGED, GROUPED], ids=str)
def test_sinks_are_one_more_key_of_each_head_with_value_zero(pattern: DilatedPattern) -> None:
    inputs, sinks = draw(), torch.linspace(-3.0, 4.0, HEADS * GROUP, dtype=torch.float64)
    cache = make(pattern)
    out = feed_all(cache, inputs, 0, 17, 18, 38, 39, TOKENS, sinks=sinks)
    torch.testing.assert_close(out, full(inputs, pattern, sinks), **EXACT)
    with pytest.raises(ValueError, match=r"sinks must have shape \(H,\)=\(10,\), got \(5,\)"):
        cache.attend(*(x[:, :1] for x in inputs), sinks=sinks[:5])
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="sinks must not require a gradient"):
        cache.attend(*(x[:, :1] for x in inputs), sinks=sinks.requires_grad_())


def test_autocast_does_not_reach_into_the_cache() -> None:
    inputs, cache, autocast = draw(dtype=torch.float32), make(LONGNET, dtype=torch.float32), make(LONGNET, dtype=torch.float32)
    for start, end in ((0, 9), (9, 30), (30, 31)):
        expected = feed(cache, inputs, start, end)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(feed(autocast, inputs, start, end), expected)


def test_low_precision_errs_at_most_twice_as_much_as_plain_pytorch() -> None:
    inputs, cache = draw(dtype=torch.bfloat16), make(LONGNET, dtype=torch.bfloat16)
    out = feed_all(cache, inputs, 0, 20, *range(33, TOKENS + 1))
    assert out.dtype == torch.bfloat16
    naive = dilated_attention(*inputs, LONGNET, is_causal=True, backend="sdpa")
    assert_twice_naive(out, naive, full(inputs, LONGNET))


def test_rows_are_those_of_the_current_segments_alone() -> None:
    assert make(LONGNET).rows_per_head == (7 + 7 + 7,) * HEADS
    assert make(RAGGED).rows_per_head == (ceil(5 / 2) + ceil(11 / 3),) * HEADS
    assert make(GROUPED).rows_per_head == (5, 5, 6, 6, 5)
    assert make(LONGNET, max_length=9).rows_per_head == (7 + 5 + 3,) * HEADS
    cache = make(LONGNET)
    assert cache.nbytes == 2 * 8 * BATCH * HEADS * 21 * DIM
    before = [store.k.data_ptr() for store in cache._stores]
    inputs = draw(300)
    for a, b in ((0, 100), (100, 250), (250, 251)):
        feed(cache, inputs, a, b)
    assert [store.k.data_ptr() for store in cache._stores] == before


@pytest.mark.slow
def test_steps_compile_for_any_number_of_tokens() -> None:
    """Under `dynamic=True` integers that a module holds are symbols too."""
    pattern = DilatedPattern((7,), (2,))  # a branch more takes the tracer seconds
    inputs, cache = draw(), make(pattern)
    torch.compiler.reset()
    step = torch.compile(cache.attend, fullgraph=True, backend="eager", dynamic=True)
    borders = [(0, 2), (2, 5)]
    outs = [step(*(x[:, a:b].contiguous() for x in inputs)) for a, b in borders]
    torch.testing.assert_close(torch.cat(outs, dim=1), full(inputs, pattern)[:, : borders[-1][1]], **EXACT)


@pytest.mark.parametrize(("seen", "kept"), [(13, 8), (13, 7), (14, 9), (28, 22), (20, 0), (5, 9)])
def test_crop_forgets_what_came_after(seen: int, kept: int) -> None:
    pattern = DilatedPattern((7,), (2,))
    inputs, other, cache = draw(), draw(), make(pattern)
    feed(cache, inputs, 0, seen)
    cache.crop(kept)
    kept = min(seen, kept)
    assert cache.lengths.tolist() == [kept] * BATCH
    joined = tuple(torch.cat([x[:, :kept], y[:, kept:]], dim=1) for x, y in zip(inputs, other))
    expected = full(joined, pattern)
    torch.testing.assert_close(feed_all(cache, joined, kept, kept + 1, kept + 12), expected[:, kept : kept + 12], **EXACT)


def test_crop_rejects_what_is_overwritten_and_accepts_its_neighbours() -> None:
    inputs, cache = draw(), make(DilatedPattern((7, 14), (1, 2)))
    feed(cache, inputs, 0, 13)
    cache.crop(torch.tensor([8, 20, 12]))
    assert cache.lengths.tolist() == [8, 13, 12]
    cache.reset()
    feed(cache, inputs, 0, 16)
    with pytest.raises(ValueError, match=r"^length must end in the segment that is stored, .*, got 13 of 16 tokens"):
        cache.crop(13)
    with pytest.raises(ValueError, match=r"got 7 of 16 tokens in sequence 1: segment 0 of segment_length=14 is overwritten"):
        cache.crop(torch.tensor([14, 7, 16]))
    assert cache.lengths.tolist() == [16] * BATCH
    cache.crop(15)
    cache.crop(14)
    with pytest.raises(ValueError, match="got 10 of 14 tokens"):  # the beginning of a segment brings the one before not back
        cache.crop(10)
    cache.crop(0)


POISONS = (torch.nan, torch.inf, -torch.inf)


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data())
def test_rows_that_take_no_part_never_reach_the_output(data: st.DataObject) -> None:
    pattern = dataclasses.replace(data.draw(patterns()), zero_padding=False)
    tokens, heads = data.draw(st.integers(1, 31)), max(least_heads(pattern), data.draw(st.sampled_from((1, 2, 5))))
    seed = data.draw(st.integers(0, 999))
    torch.manual_seed(seed)
    chance = random.Random(seed)  # a drawn value for each of many steps is more than hypothesis shrinks
    inputs = draw(tokens, heads, data.draw(st.sampled_from((1, 2))))
    poisoned = torch.rand(BATCH, tokens, heads) < data.draw(st.sampled_from((0.0, 0.03, 0.2)))
    scale = data.draw(st.sampled_from((None, 0.7, 0.0, -0.7)))
    expected = reference.dilated_attention(*inputs, pattern, is_causal=True, scale=scale)[0]
    expected = expected.masked_fill(sees(inputs, pattern, poisoned)[..., None], torch.nan)
    which, value, element = (
        data.draw(st.sampled_from((1, 2))),
        data.draw(st.sampled_from(POISONS)),
        data.draw(st.integers(0, DIM - 1)),
    )
    inputs[which][..., element].masked_fill_(poisoned, value)

    cache = make(pattern, num_kv_heads=heads, max_length=data.draw(st.sampled_from((None, tokens, tokens + 7))))
    if data.draw(st.booleans()):
        cache.attend(*(torch.full_like(x[:, :1], value) for x in inputs))
        cache.reset()
        assert not cache.lengths.any()
    at, outs = [0] * BATCH, [[] for _ in range(BATCH)]
    while min(at) < tokens:
        size = chance.choice((1, 1, 2, 3, 13))
        counts = [min(chance.randint(0, size), tokens - seen) for seen in at]
        chunk = padded_chunk(inputs, at, counts, value)  # padding is poison, queries too
        with torch.autocast("cpu", torch.bfloat16, enabled=chance.random() < 0.5):
            out = cache.attend(*chunk, lengths=torch.tensor(counts), scale=scale)
        for b, count in enumerate(counts):
            outs[b].append(out[b, :count])
            assert not out[b, count:].any()
            at[b] += count
        if chance.random() < 0.3:
            order = chance.sample(range(BATCH), BATCH)
            cache.reorder(torch.tensor(order))
            at, outs, expected = [at[b] for b in order], [outs[b] for b in order], expected[order]
            inputs = tuple(x[order] for x in inputs)
        if chance.random() < 0.1:
            cache = copy.deepcopy(cache)
    torch.testing.assert_close(torch.stack([torch.cat(out) for out in outs]), expected, **EXACT, equal_nan=True)


def test_long_prompt_with_a_mark_hides_it_from_earlier_tokens() -> None:
    tokens = BLOCK + 17
    for marked in (False, True):
        inputs, cache = draw(tokens), make(LONGNET)
        expected = full(inputs, LONGNET)
        poisoned = torch.zeros(BATCH, tokens, HEADS, dtype=torch.bool)
        poisoned[2, 100, 3] = marked
        expected = expected.masked_fill(sees(inputs, LONGNET, poisoned)[..., None], torch.nan)
        assert expected.isnan().any() == marked
        inputs[2].masked_fill_(poisoned[..., None], torch.nan)
        torch.testing.assert_close(feed(cache, inputs, 0, tokens), expected, **EXACT, equal_nan=True)


@pytest.mark.parametrize("inside", [False, True])
def test_cache_crosses_the_border_of_inference_mode(inside: bool) -> None:
    inputs = draw()
    with torch.inference_mode(inside):
        cache = make(LONGNET)
    outs = []
    for i, (a, b) in enumerate(((0, 9), (9, 10), (10, 20), (20, 21))):
        with torch.inference_mode((i % 2 == 0) == inside):
            outs.append(feed(cache, inputs, a, b))
            cache.reorder(torch.arange(BATCH))
    with torch.inference_mode(not inside):
        cache.crop(20)
        outs[-1] = feed(cache, inputs, 20, 21)
    torch.testing.assert_close(torch.cat([x.clone() for x in outs], dim=1), full(inputs, LONGNET)[:, :21], **EXACT)
    cache.reset()


def test_copies_of_a_cache_go_their_own_ways() -> None:
    inputs, other, cache = draw(), draw(), make(GROUPED)
    feed(cache, inputs, 0, 9)
    copied, pickled = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    expected = full(inputs, GROUPED)[:, 9:12]
    feed(cache, other, 9, 12)
    torch.testing.assert_close(feed(copied, inputs, 9, 12), expected, **EXACT)
    torch.testing.assert_close(feed_all(pickled, inputs, *range(9, 13)), expected, **EXACT)


@pytest.mark.parametrize("pattern", [GROUPED, DilatedPattern((5,), (2,), window=3)], ids=str)
def test_caches_that_share_plans_do_not_disturb_each_other(pattern: DilatedPattern) -> None:
    """Equal and nearly equal layouts take turns. Each plan is made in some mode, under some default device."""
    plan_of.cache_clear()
    inputs, poisoned = draw(31, heads=7), torch.zeros(BATCH, 31, HEADS, dtype=torch.bool)
    poisoned[0, 3] = True
    fewer = tuple(x[:, :, : HEADS * group] for x, group in zip(inputs, (GROUP, 1, 1)))
    narrow = full(fewer, pattern)
    nan = narrow.masked_fill(sees(fewer, pattern, poisoned)[..., None], torch.nan)
    table: list[tuple[tuple[Tensor, ...], Tensor, dict[str, object]]] = [
        ((*fewer[:2], fewer[2].masked_fill(poisoned[..., None], torch.nan)), nan, {}),
        (fewer, narrow, {"max_length": 31}),
        (fewer, full(inputs, pattern)[:, :, : HEADS * GROUP], {"total_kv_heads": 7}),
        (tuple(x.float() for x in fewer), full(tuple(x.float() for x in fewer), pattern), {"dtype": torch.float32}),
        (fewer, narrow, {}),
    ]
    caches = [make(pattern, **options) for *_, options in table]
    for t in range(31):
        more = torch.tensor([1, 1, int(t < 7)])
        for cache, (x, expected, _) in zip(caches, table):
            with torch.inference_mode(t % 2 == 0), torch.device("meta" if t % 3 == 0 else "cpu"):
                out = cache.attend(*(y[:, t : t + 1] for y in x), lengths=more)
            expected = expected[:, t : t + 1].masked_fill(more[:, None, None, None] == 0, 0.0)
            exact = EXACT if out.dtype == torch.float64 else SINGLE
            torch.testing.assert_close(out.double(), expected, equal_nan=True, **exact)
    for cache, (x, expected, _) in zip(caches, table):  # steps that added nothing overwrote nothing
        cache.crop(torch.tensor([31, 31, 6]))
        out = cache.attend(*(y[:, 6:7] for y in x), lengths=torch.tensor([0, 0, 1]))
        exact = EXACT if out.dtype == torch.float64 else SINGLE
        torch.testing.assert_close(out[2].double(), expected[2, 6:7], **exact)
    assert not any(x.is_inference() for plan, _ in plan_of._entries.values() for x in plan if x is not None)


def test_plans_stay_within_their_memory() -> None:
    cache, token = make(DilatedPattern((700,), (1,))), draw(1)
    for _ in range(300):
        cache.attend(*token)
    kept = sum(x.untyped_storage().nbytes() for plan, _ in plan_of._entries.values() for x in plan if x is not None)
    assert 15 << 20 < kept <= 1 << 24


@pytest.mark.skipif(not TRACES_UNKNOWN_SIZES, reason="torch before 2.11 exports no module that reads a cache's tensors")
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
def test_marks_of_an_exported_step_reach_other_calls() -> None:
    inputs, cache = draw(3), make(DilatedPattern((7,), (1,)))
    module = torch.nn.Identity()
    module.forward = lambda q, k, v: cache.attend(q, k, v)  # type: ignore[method-assign]
    step = torch.export.export(module, tuple(x[:, :1] for x in inputs), strict=True).module()
    inputs[2][:, 0] = torch.nan
    assert step(*(x[:, :1] for x in inputs)).isnan().all()
    assert feed(cache, inputs, 1, 2).isnan().all()
    with pytest.raises(NotImplementedError, match=r"^DilatedKVCache.attend must not be called under torch.jit.trace, which keeps"):
        torch.jit.trace(cache.attend, tuple(x[:, 2:] for x in inputs), check_trace=False)


@pytest.mark.parametrize("pattern", [LONGNET, GROUPED], ids=str)
def test_compiled_once_a_step_takes_marks_and_full_sequences(pattern: DilatedPattern) -> None:
    inputs, cache = draw(14), make(pattern, max_length=14)
    poisoned = torch.zeros(BATCH, 14, HEADS, dtype=torch.bool)
    poisoned[0, 11, 4] = True
    expected = full(inputs, pattern).masked_fill(sees(inputs, pattern, poisoned)[..., None], torch.nan)
    inputs[1].masked_fill_(poisoned[..., None], torch.inf)
    compilations = torch._dynamo.testing.CompileCounter()
    torch.compiler.reset()
    step = torch.compile(cache.attend, fullgraph=True, backend=compilations, dynamic=False)
    cache.attend(*(x[:, :9] for x in inputs), lengths=torch.tensor([9, 8, 3]))
    held = [9, 8, 3]
    while min(held) < 14:
        tokens = [torch.stack([x[b, min(n, 13)] for b, n in enumerate(held)])[:, None] for x in inputs]
        more = torch.tensor([int(n < 14) for n in held])
        out = step(*tokens, lengths=more)
        for b, n in enumerate(held):
            torch.testing.assert_close(
                out[b, 0], expected[b, n] if n < 14 else torch.zeros_like(out[b, 0]), **EXACT, equal_nan=True
            )
        held = [n + int(new) for n, new in zip(held, more)]
    assert compilations.frame_count == 1


def test_refused_call_leaves_the_cache_as_it_was() -> None:
    inputs, cache = draw(), make(LONGNET, max_length=14)
    cache.attend(*(x[:, :13] for x in inputs), lengths=torch.tensor([13, 7, 5]))
    before = copy.deepcopy(cache)
    for size in (1, 2):
        chunk = [x[:, 13 : 13 + size] for x in inputs]
        for options, error, message in (
            ({"scale": "1"}, TypeError, "scale must be a number or None, got '1'"),
            ({"scale": True}, TypeError, "scale must be a number or None, got True"),
            ({"scale": torch.nan}, ValueError, "scale must be finite, got nan"),
            ({"lengths": torch.tensor([0, 0, size + 1])}, ValueError, f"lengths must be in [0, T={size}], got [0, 0, {size + 1}]"),
        ):
            with pytest.raises(error, match=f"^{re.escape(message)}$"):
                cache.attend(*chunk, **options)
        if size == 2:
            with pytest.raises(RuntimeError, match="lengths must stay within max_length=14"):
                cache.attend(*chunk)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), pytest.raises(RuntimeError, match="No viable backend"):
            cache.attend(*chunk, lengths=torch.tensor([0, 1, 1]))
        assert torch.equal(cache.lengths, before.lengths)
    at = before.lengths.tolist()
    for _ in range(2):
        more = torch.tensor([int(n < 14) for n in at])
        tokens = [torch.stack([x[b, n] for b, n in enumerate(at)])[:, None] for x in inputs]
        assert torch.equal(cache.attend(*tokens, lengths=more), before.attend(*tokens, lengths=more))
        at = cache.lengths.tolist()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make(LONGNET, batch_size=0), ValueError, "batch_size must be at least 1, got 0"),
        (lambda: make(LONGNET, num_kv_heads=0), ValueError, "num_kv_heads must be at least 1, got 0"),
        (lambda: make(LONGNET, head_dim=2.0), TypeError, "head_dim must be an integer, got 2.0"),
        (lambda: make(LONGNET, max_length=0), ValueError, "max_length must be at least 1, got 0"),
        (lambda: make(LONGNET, dtype=torch.int64), TypeError, f"dtype must be {DTYPES}, got torch.int64"),
        (lambda: make(LONGNET).reorder(torch.tensor([0, 1])), ValueError, "indices must have shape (B,)=(3,), got (2,)"),
        (lambda: make(LONGNET).reorder(torch.tensor([0, 1, 3])), ValueError, "indices must be in [0, B=3), got [0, 1, 3]"),
        (lambda: make(LONGNET).reorder(torch.tensor([0, -1, 2])), ValueError, "indices must be in [0, B=3), got [0, -1, 2]"),
        (lambda: make(LONGNET).reorder(torch.zeros(3)), TypeError, "indices must be int64, got torch.float32"),
        (lambda: make(LONGNET).crop(-1), ValueError, "length must be at least 0, got -1"),
        (lambda: make(LONGNET).crop(1.0), TypeError, "length must be an integer, got 1.0"),
        (lambda: make(LONGNET).crop(torch.ones(3)), TypeError, "length must be an integer, got 1.0"),
        (lambda: make(LONGNET).crop(torch.tensor(1)), ValueError, "length must have shape (B,)=(3,), got ()"),
    ],
)
def test_cache_rejects_wrong_sizes_indices_and_lengths(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()


def test_cache_rejects_shifted_positions_and_accepts_one_segment() -> None:
    pattern = DilatedPattern((7,), (2,), zero_padding=True)
    with pytest.raises(NotImplementedError, match=r"^pattern must not shift positions in decoding, got zero_padding=True and"):
        make(pattern, max_length=8)
    with pytest.raises(NotImplementedError, match="dilation rate 2 of segment length 7"):
        make(pattern)
    inputs, cache = draw(7), make(pattern, max_length=7)
    torch.testing.assert_close(feed_all(cache, inputs, 0, 4, 7), full(inputs, pattern), **EXACT)
    with pytest.raises(TypeError, match=r"^pattern must be a DilatedPattern, got tuple$"):
        make(((7,), (2,)))


def test_attend_rejects_wrong_tensors() -> None:
    q, k, v = (x[:, :2] for x in draw())
    cache, good = make(LONGNET), torch.tensor([2, 1, 0])
    cache.lengths.fill_(7)  # of a copy
    assert cache.lengths.tolist() == [0] * BATCH
    for arguments, error, message in (
        ((q[0], k, v), ValueError, "q must have shape (B, T, H, D), got (2, 10, 3)"),
        ((None, k, v), TypeError, "q must be a tensor, got NoneType"),
        ((q, k, v.tolist()), TypeError, "v must be a tensor, got list"),
        ((q[:2], k, v), ValueError, "q must match the cache in B and D=(3, 3), got (2, 2, 10, 3)"),
        (
            (q, k.float(), v),
            TypeError,
            "k must have the dtype of the cache=torch.float64, got torch.float32; DilatedKVCache(dtype=) says it, under "
            "torch.autocast that of autocast",
        ),
        ((q[:, :, :7], k, v), ValueError, "q must have a multiple of num_kv_heads=5 heads, got 7"),
        ((q, k, v[:, :1]), ValueError, "v must have T=2 tokens of 5 heads, got (3, 1, 5, 3)"),
        ((q[:, :0], k, v), ValueError, "q must have at least one token, got shape (3, 0, 10, 3)"),
        ((q, k, v, good.int()), TypeError, "lengths must be int64, got torch.int32"),
        ((q, k, v, good[:2]), ValueError, "lengths must have shape (B,)=(3,), got (2,)"),
        ((q, k, v, good + 1), ValueError, "lengths must be in [0, T=2], got [3, 2, 1]"),
        ((q, k, v, good - 1), ValueError, "lengths must be in [0, T=2], got [1, 0, -1]"),
    ):
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            cache.attend(*arguments[:3], lengths=arguments[3] if len(arguments) > 3 else None)
    with torch.enable_grad(), pytest.raises(NotImplementedError, match=r"^k must not require a gradient: .*; use torch"):
        cache.attend(q, k.clone().requires_grad_(), v)
    cache.attend(q, k, v, lengths=good)
    for backend in (5, [5]):
        with pytest.raises(ValueError, match=r"^backend must be one of "):
            cache.attend(q, k, v, backend=backend)  # type: ignore[arg-type]
    for number, error in ((-1, ValueError), (2.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"^num_tokens must be (at least 0|an integer), got "):
            cache.new_positions(number)  # type: ignore[arg-type]
    assert cache.new_positions(0).shape == (3, 0)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_recorded_calls_are_taken_back_wherever_segments_end(pattern: DilatedPattern) -> None:
    inputs, wrong = draw(), draw()
    expected, cache = full(inputs, pattern), make(pattern)
    cache.records_past = True
    done = 0
    for kept, rejected in ((0, 9), (13, 0), (2, 6), (1, 1), (0, 31), (7, 3), (4, 0)):
        chunk = tuple(torch.cat([x[:, done : done + kept], y[:, :rejected]], dim=1) for x, y in zip(inputs, wrong))
        out = torch.cat(
            [feed(cache, chunk, i, i + 1) for i in range(kept + rejected)] if rejected == 3 else [cache.attend(*chunk)], 1
        )
        torch.testing.assert_close(out[:, :kept], expected[:, done : done + kept], **EXACT)
        done += kept
        cache.crop(torch.tensor([done] * BATCH))
    torch.testing.assert_close(feed(cache, inputs, done, TOKENS), expected[:, done:], **EXACT)


def test_what_was_not_recorded_or_is_forgotten_or_overtaken_is_not_taken_back() -> None:
    inputs, cache = draw(), make(LONGNET)
    refused = pytest.raises(ValueError, match="length must end in the segment that is stored")
    feed(cache, inputs, 0, 29)
    cache.records_past = True
    feed(cache, inputs, 29, 36)
    with refused:
        cache.crop(27)
    cache.crop(33)
    torch.testing.assert_close(feed(cache, inputs, 33, 61), full(inputs, LONGNET)[:, 33:], **EXACT)
    cache.reset()
    feed_all(cache, inputs, *range(20, 42, 2))
    cache.forget_past(5)  # three calls of two tokens, whose first is the 15th
    with refused:
        cache.crop(13)
    cache.crop(15)
    feed(cache, inputs, 0, 5)
    cache.records_past = False
    feed(cache, inputs, 5, 9)
    with refused:
        cache.crop(20)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_part_of_the_heads_gives_that_part_of_the_outputs(pattern: DilatedPattern) -> None:
    inputs = draw()
    q, k, v = inputs
    parts = []
    for first, held in ((0, 2), (2, 3)):
        cache = make(pattern, num_kv_heads=held, first_head=first, total_kv_heads=HEADS)
        mine = (q[:, :, first * GROUP : (first + held) * GROUP], *(x[:, :, first : first + held] for x in (k, v)))
        parts.append(feed_all(cache, mine, 0, 17, 18, TOKENS))
    torch.testing.assert_close(torch.cat(parts, dim=2), full(inputs, pattern), **EXACT)
    with pytest.raises(ValueError, match=r"first_head must leave room for num_kv_heads=3 of total_kv_heads=5 heads, got 3"):
        make(pattern, num_kv_heads=3, first_head=3, total_kv_heads=HEADS)


def test_selected_sequences_go_on_alone() -> None:
    inputs = draw()
    expected, cache, rows = full(inputs, RAGGED), make(RAGGED), torch.tensor([2, 0, 2, 2])
    feed(cache, inputs, 0, 17)
    cache.select(rows)
    assert cache.batch_size == 4
    torch.testing.assert_close(cache.attend(*(x[rows, 17:] for x in inputs)), expected[rows, 17:], **EXACT)
    with pytest.raises(ValueError, match=r"indices must have shape \(new batch size,\), at least \(1,\), got \(0,\)"):
        cache.select(rows[:0])
    with pytest.raises(ValueError, match=r"indices must be in \[0, B=4\), got \[4\]"):
        cache.select(torch.tensor([4]))


def test_cache_goes_back_behind_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step had stored before it failed is undone as well: here a row of the segment that it began."""
    pattern = DilatedPattern((7, 28), (1, 2))
    q, k, v = (torch.randn(2, 40, 2, 3, dtype=torch.float64) for _ in range(3))
    expected = reference.dilated_attention(q, k, v, pattern, is_causal=True)[0]
    for first in (1, 3):  # tokens of the step
        cache = DilatedKVCache(pattern, batch_size=2, num_kv_heads=2, head_dim=3, dtype=torch.float64)
        cache.records_past = True
        cache.attend(q[:, :28], k[:, :28], v[:, :28])
        with monkeypatch.context() as patched:
            patched.setattr(cache, "_merged", mock.Mock(side_effect=RuntimeError("planted")))
            with pytest.raises(RuntimeError, match=r"^planted$"):
                cache.attend(*(x[:, 28 : 28 + first] for x in (q, k, v)))
        assert cache.lengths.tolist() == [28, 28]
        cache.crop(27)
        torch.testing.assert_close(feed_all(cache, (q, k, v), *range(27, 34)), expected[:, 27:33], **EXACT)
