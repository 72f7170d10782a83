"""Which patterns are connected, by a look at every pair of tokens; the preset for causal models; the warning."""

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from flexdilated import (
    DilatedAttention,
    DilatedKVCache,
    DilatedPattern,
    LongNet,
    LongNetConfig,
    LongNetLM,
    MultiheadDilatedAttention,
    dilated_attention,
    dilated_mask_mod,
    dilated_score_mod,
)
from flexdilated.core import losses
from flexdilated.core.description import why_not_connected
from tests.analysis.definition import seen_after
from tests.cases import least_heads

causal = DilatedPattern.causal
BEST = DilatedPattern((16, 512), (1, 4))  # of the experiments with 512 tokens and 8 heads


@st.composite
def questions(draw: st.DrawFn) -> tuple[DilatedPattern, int, int]:
    """A pattern that mostly has a rate-1 branch, tokens and heads."""
    lengths, rates = [], []
    for i in range(draw(st.integers(1, 4))):
        lengths.append(draw(st.integers(1, 24)) * draw(st.sampled_from((1, 1, 2, 3))))
        rates.append(1 if i == 0 and draw(st.integers(0, 7)) else draw(st.integers(1, min(lengths[-1], 5))))
    heads, offsets = draw(st.sampled_from(("all", "all", "all", "grouped"))), draw(st.sampled_from(("blocked", "interleaved")))
    pattern = DilatedPattern(tuple(lengths), tuple(rates), heads=heads, offsets=offsets)
    return pattern, draw(st.integers(1, 97)), draw(st.integers(least_heads(pattern), 9))


def is_connected(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int) -> bool:
    """The definition, token by token: which earlier tokens each token has received information from."""
    lengths = [w for w, r in pattern.branches if r == 1]
    run = next(n for n in range(1, 10**9) if all(n % w == 0 for w in lengths))
    kept = [{pattern.offset(i, h, num_kv_heads) for h in pattern.head_range(i, num_kv_heads)} for i in range(len(pattern.branches))]
    counting = [r for r, offsets in zip(pattern.dilation_rates, kept) if 2 * r - 1 <= run and offsets == set(range(r))]
    received: list[int] = []  # a bit for each earlier token
    for q in range(num_tokens):
        bits = 1 << q
        for (w, r), offsets in zip(pattern.branches, kept):
            for k in range(q // w * w, q):
                if q % w % r in offsets and (q - k) % r == 0:
                    bits |= received[k]
        received.append(bits)
    far = 2 * max(counting, default=1) - 1
    return all(received[q] >> k & 1 for q in range(num_tokens) for k in range(q - far + 1))


@given(questions())
def test_crosses_boundaries_is_the_definition(question: tuple[DilatedPattern, int, int]) -> None:
    pattern, num_tokens, num_kv_heads = question
    expected = is_connected(pattern, num_tokens, num_kv_heads)
    assert pattern.crosses_boundaries(num_tokens, num_kv_heads) == expected
    if (boundary := pattern.first_uncrossed_boundary(num_tokens, num_kv_heads)) is not None:
        assert 1 <= boundary < num_tokens
        assert pattern.crosses_boundaries(boundary, num_kv_heads)


@given(questions())
def test_tokens_of_a_connected_pattern_receive_from_all_tokens_well_before(question: tuple[DilatedPattern, int, int]) -> None:
    pattern, num_tokens, num_kv_heads = question
    if pattern.crosses_boundaries(num_tokens, num_kv_heads):
        seen = seen_after(pattern, num_tokens, num_kv_heads, num_tokens, is_causal=True)
        assert np.tril(~seen, -(2 * max(pattern.dilation_rates) - 1)).sum() == 0


FIRST = [
    (BEST, 512, 8, None),
    (BEST, 513, 8, 512),
    (BEST, 512, 3, 16),  # residue 3 has no head
    (DilatedPattern((16, 512), (1, 4), offsets="interleaved"), 512, 4, None),
    (DilatedPattern((16, 512), (1, 4), offsets="interleaved"), 512, 3, 16),
    (DilatedPattern((16, 512), (1, 4), heads="grouped"), 512, 8, 16),
    (DilatedPattern((16, 512), (1, 9)), 512, 9, 16),  # two rows of rate 9 do not fit in 16 tokens
    (DilatedPattern((17, 512), (1, 9)), 512, 9, None),
    (DilatedPattern((512,), (2,)), 512, 8, 1),
    (DilatedPattern((512,), (1,)), 512, 1, None),
    (DilatedPattern((32, 128, 512), (1, 4, 8)), 1024, 8, 512),
    (DilatedPattern((32, 128, 512, 768), (1, 4, 8, 8)), 1536, 8, None),
    (DilatedPattern((32, 128, 512, 768), (1, 4, 8, 8)), 1537, 8, 1536),
    (DilatedPattern((48, 32), (1, 1)), 96, 1, None),
    (DilatedPattern((48, 32), (1, 1)), 97, 1, 96),
    (DilatedPattern((16, 514), (1, 4)), 600, 8, 512),  # tokens 510 to 513 have no later row in their far segment
    (DilatedPattern((16, 510), (1, 4)), 600, 8, 512),  # token 512 has no earlier row in its far segment
    (DilatedPattern((16, 508), (1, 4)), 600, 8, None),
    (DilatedPattern.longnet(), 32768, 12, None),
    (DilatedPattern.longnet(), 2**40, 12, 32768),
    (DilatedPattern((2047, 4096, 8191), (1, 4, 8)), 2**40, 8, 33533954),
    (DilatedPattern((2**39 - 1, 2**40), (1, 1)), 2**40, 1, None),
    (DilatedPattern((5,), (5,)), 1, 1, None),
    (DilatedPattern((44, 23), (1, 5)), 49, 5, None),  # no token is nine after one that token 44 misses
    (DilatedPattern((7, 34, 16, 4), (1, 5, 2, 3)), 117, 9, None),  # rate 5 does not count in runs of 7, but joins them
    (DilatedPattern((10, 48, 20), (1, 5, 8)), 64, 5, 50),  # crossing each boundary of a short run is not enough
]


@pytest.mark.parametrize(("pattern", "num_tokens", "num_kv_heads", "boundary"), FIRST)
def test_first_uncrossed_boundary(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, boundary: int | None) -> None:
    assert pattern.first_uncrossed_boundary(num_tokens, num_kv_heads) == boundary
    assert pattern.crosses_boundaries(num_tokens, num_kv_heads) == (boundary is None)


@pytest.mark.parametrize(
    ("seq_len", "num_kv_heads", "rate", "window"),
    [
        (512, 8, 4, 256),  # the least window
        (8192, 8, 4, 256),
        (2**17, 12, 6, 1792),  # 1,820 rounded down
        (2**17, 32, 8, 1024),  # the largest rate
        (8192, 9, 3, 448),  # at rate 4 blocked offsets of 9 heads leave a residue out; 455 rounded down
        (8192, 2, 2, 1024),
        (4096, 3, 2, 512),
        (257, 19, 7, 256),
        (256, 19, 1, None),
        (1, 1, 1, None),
        (8192, 1, 1, None),
    ],
)
def test_causal_preset(seq_len: int, num_kv_heads: int, rate: int, window: int | None) -> None:
    expected = DilatedPattern((seq_len,), (rate,), window=window, global_tokens=4 if window else 0)
    assert DilatedPattern.causal(seq_len, num_kv_heads) == expected


@pytest.mark.parametrize("seq_len", [1, 61, 257, 512, 768, 1000, 8191, 2**20, 2**40])
def test_causal_preset_is_connected_and_costs_what_it_says(seq_len: int) -> None:
    for num_kv_heads in range(1, 40):
        pattern = DilatedPattern.causal(seq_len, num_kv_heads)
        assert pattern.crosses_boundaries(seq_len, num_kv_heads)
        if pattern.window is None:
            assert pattern == DilatedPattern((seq_len,), (1,))
            continue
        (rate,) = pattern.dilation_rates
        far, size = seq_len / (2 * rate**2), pattern.window
        assert rate <= 8
        assert max(0.75 * far - 1, 256) <= size <= max(far, 256)
        keys = pattern.count_pairs(seq_len, num_kv_heads, is_causal=True) / (seq_len * num_kv_heads)
        without_near = far * (1 - size / seq_len) ** 2
        assert abs(keys - (size * (1 - size / 2 / seq_len) + without_near)) <= 1 + pattern.global_tokens
        assert keys <= (seq_len + 1) / 2


def test_causal_preset_takes_a_window_a_rate_and_global_tokens() -> None:
    assert causal(512, 8, window=7, rate=4) == DilatedPattern((512,), (4,), window=7, global_tokens=4)
    assert causal(512, 16, rate=16, global_tokens=0) == DilatedPattern((512,), (16,), window=256)
    assert causal(512, 1, window=1, global_tokens=7) == DilatedPattern((512,), (1,), window=1, global_tokens=7)
    assert causal(512, 8, window=2).crosses_boundaries(512, 8)


@pytest.mark.parametrize(("seq_len", "num_kv_heads", "budget"), [(1021, 3, 0.9), (8192, 8, 0.2), (8191, 9, 0.2), (2**40, 16, 0.02)])
@pytest.mark.parametrize("global_tokens", [0, 4, 61])
def test_causal_preset_with_a_budget_has_the_longest_window_within_it(
    seq_len: int, num_kv_heads: int, budget: float, global_tokens: int
) -> None:
    pattern = causal(seq_len, num_kv_heads, budget=budget, global_tokens=global_tokens)
    size = pattern.window
    assert size is not None
    unit = 2 ** (size.bit_length() - 3)  # windows are multiples of it
    assert replace(pattern, window=None) == replace(causal(seq_len, num_kv_heads, global_tokens=global_tokens), window=None)
    assert size % unit == 0
    within, over = (
        each.count_pairs(seq_len, num_kv_heads, is_causal=True) * 2 / (num_kv_heads * seq_len * (seq_len + 1))
        for each in (pattern, replace(pattern, window=size + unit))
    )
    assert within <= budget < over


def test_a_budget_of_1_is_dense_attention() -> None:
    assert [causal(n, 8, budget=1) for n in (1, 61, 8192)] == [DilatedPattern((n,), (1,)) for n in (1, 61, 8192)]


RATE = "rate must be at most seq_len=%d and have a head for each of its residues among num_kv_heads=8, got %d; "


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: causal(512, 8, window=1), ValueError, "window must be at least 2 beside a branch of rate=4, got 1"),
        (lambda: causal(512, 8, window=0), ValueError, "window must be at least 1, got 0"),
        (lambda: causal(512, 8, rate=0), ValueError, "rate must be at least 1, got 0"),
        (lambda: causal(512, 8, rate=9), ValueError, RATE % (512, 9)),
        (lambda: causal(512, 8, rate=5), ValueError, RATE % (512, 5)),
        (lambda: causal(2, 8, rate=4), ValueError, RATE % (2, 4)),
        (lambda: causal(0, 8), ValueError, "seq_len must be at least 1, got 0"),
        (lambda: causal(2**40 + 1, 8), ValueError, f"seq_len must be at most {2**40}, got {2**40 + 1}"),
        (lambda: causal(61, 8, global_tokens=-1), ValueError, f"global_tokens must be in [0, {2**40}], got -1"),
        (lambda: causal(61, 8, global_tokens=1.5), TypeError, "global_tokens must be an integer, got 1.5"),
        (lambda: causal(512, 8, budget=0.5, window=7), ValueError, "window must be None with budget, which determines it, got 7"),
        (lambda: causal(512, 8, budget="10%"), TypeError, "budget must be a number, got '10%'"),
        (lambda: causal(512, 8, budget=True), TypeError, "budget must be a number, got True"),
        (lambda: causal(512, 8, budget=0), ValueError, "budget must be in (0, 1], got 0; 0.1 is a tenth of the pairs of dense"),
        (lambda: causal(512, 8, budget=float("nan")), ValueError, "budget must be in (0, 1], got nan; "),
        (lambda: causal(512, 8, budget=0.76), ValueError, "budget must be at least 0.77"),
        (lambda: causal(61, 8, budget=0.9), ValueError, "budget must be at least 1 for a window of 61 tokens and the far branch"),
        (lambda: causal(512, 0), ValueError, "num_kv_heads must be at least 1, got 0"),
        (lambda: BEST.crosses_boundaries(0, 1), ValueError, "num_tokens must be at least 1, got 0"),
        (lambda: BEST.crosses_boundaries(1, 0), ValueError, "num_kv_heads must be at least 1, got 0"),
        (lambda: BEST.crosses_boundaries(1, 1.5), TypeError, "num_kv_heads must be an integer, got 1.5"),
    ],
)
def test_preset_and_question_reject(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"^{re.escape(message)}"):
        call()


LOSSY = DilatedPattern((4, 8), (1, 2))
TEXT = (
    r"^pattern with segments \(4, 8\) at rates \(1, 2\) is not connected: not all information from tokens 0 to 7 reaches the "
    r"tokens from 8 on; add a window, use DilatedPattern\.causal\(seq_len, 2\), or add a branch as long as the sequence at a rate "
    r"of at most 2 that divides the 2 key/value heads$"
)


@pytest.fixture
def forgotten() -> Iterator[None]:
    losses.warn_of_losses.cache_clear()
    losses._warn.cache_clear()
    yield
    losses.warn_of_losses.cache_clear()
    losses._warn.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_causal_attention_warns_once_of_a_pattern_that_is_not_connected() -> None:
    q = torch.randn(1, 13, 2, 3)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for x in (q, q, q[:, :11]):
            dilated_attention(x, x, x, LOSSY, is_causal=True)
    assert len(warned) == 1
    assert re.match(TEXT, str(warned[0].message))
    assert warned[0].filename == __file__


SPLIT = DilatedPattern((4, 8), (1, 4))  # with 2 heads: residues 2 and 3 of rate 4 have none
SPARSE = DilatedPattern((16,), (8,))
WHERE: dict[str, Callable[[DilatedPattern], object]] = {
    "dilated_attention": lambda pattern: dilated_attention(*[torch.randn(1, 17, 2, 3)] * 3, pattern, is_causal=True),
    "MultiheadDilatedAttention": lambda pattern: MultiheadDilatedAttention(8, 4, pattern, num_kv_heads=2, is_causal=True),
    "DilatedKVCache": lambda pattern: DilatedKVCache(pattern, batch_size=1, num_kv_heads=2, head_dim=3),
    "dilated_mask_mod": lambda pattern: dilated_mask_mod(pattern, 4, seq_len=17, is_causal=True, num_kv_heads=2),
    "dilated_score_mod": lambda pattern: dilated_score_mod(pattern, 4, seq_len=17, is_causal=True, num_kv_heads=2),
    "LongNetLM": lambda pattern: LongNetLM(LongNetConfig(vocab_size=7, embed_dim=8, num_layers=1, num_heads=2, pattern=pattern)),
    "LongNet": lambda pattern: LongNet(8, 2, 1, 1, 5, pattern),
}


def warnings_of(call: Callable[[], object]) -> list[str]:
    """The texts of two calls, all of them shown at a line of this file."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        call(), call()
    assert {each.filename for each in warned} <= {__file__}
    return [str(each.message) for each in warned]


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("name", WHERE)
def test_a_pattern_that_meets_heads_warns_once_of_what_is_lost(name: str) -> None:
    split, without = (
        r"^pattern with segments \(4, 8\) at rates \(1, 4\) ",
        "has no key/value head for 2 of the 4 residues of branch ",
    )
    for pattern, texts in (
        (SPLIT, [split + without + "1:", split + "is not connected: .* 0 to 3 "]),
        (
            SPARSE,
            [r"^pattern with segments \(16,\) at rates \(8,\) has no key/value head for some tokens, the first is token 2: "],
        ),
        (DilatedPattern.causal(32, 4, window=8), []),  # of rate 2
        (
            DilatedPattern.causal(32, num_kv_heads=8, window=8),  # query heads by mistake
            [r"^pattern with segments \(32,\) at rates \(4,\) and a window of 8 and 4 global tokens " + without + "0:"],
        ),
    ):
        if pattern.window is not None and name == "LongNet":  # takes no window
            continue
        warned = warnings_of(partial(WHERE[name], pattern))
        assert len(warned) == len(texts)
        assert all(re.match(*each) for each in zip(texts, warned))


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("pattern", "num_kv_heads", "lost"),
    [
        (DilatedPattern((16, 64), (1, 8), window=3), 4, "4 of the 8 residues of branch 1"),
        (DilatedPattern((64,), (4,), window=3), 6, "1 of the 4 residues of branch 0"),  # blocked: 0, 0, 1, 1, 2, 2
        (DilatedPattern((64,), (4,), window=3, offsets="interleaved"), 6, None),
        (DilatedPattern((16, 64, 64), (4, 1, 5)), 3, "1 of the 4 residues of branch 0, 2 of the 5 residues of branch 2"),
        (DilatedPattern.longnet(), 12, None),
        (DilatedPattern.longnet(), 4, "2 of the 6 residues of branch 3, 8 of the 12 residues of branch 4"),
        (DilatedPattern.gigapath(), 8, None),
        (DilatedPattern.grouped((16, 64), (1, 8), window=3), 4, None),  # one residue by design
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_residues_without_a_key_value_head_warn_once(
    pattern: DilatedPattern, num_kv_heads: int, lost: str | None, packed: bool
) -> None:
    q, k = torch.randn(1, 13, 2 * num_kv_heads, 2), torch.randn(1, 13, num_kv_heads, 2)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 6, 13])} if packed else {}
    warned = warnings_of(lambda: dilated_attention(q, k, k, pattern, **options))
    assert len(warned) == (lost is not None)
    assert lost is None or warned[0].endswith(
        f" has no key/value head for {lost}: no query reads these tokens in that branch; use DilatedPattern.causal(seq_len, "
        f"num_kv_heads={num_kv_heads}), or rates that divide the {num_kv_heads} key/value heads (not the query heads)"
    )


BEYOND = (
    r"^pattern with segments \(16,\) at rates \(2,\) and a window of 4 and 4 global tokens has no segment longer than 16 "
    r"tokens: tokens from position 16 on see only their own segment and a window of 4 and 4 global tokens; make the longest "
    r"segment at least as long as the sequence, as "
    r"DilatedPattern\.causal\(seq_len, 4\) does$"
)


@pytest.mark.usefixtures("forgotten")
def test_causal_calls_beyond_the_longest_segment_warn_once() -> None:
    pattern = DilatedPattern.causal(16, 4, window=4)
    call = lambda n, **options: warnings_of(lambda: dilated_attention(*torch.randn(3, 1, n, 4, 2), pattern, **options))  # noqa: E731
    assert call(16, is_causal=True) == call(17) == []
    (text,) = call(17, is_causal=True)
    assert re.match(BEYOND, text)
    assert call(40, is_causal=True) == []
    assert warnings_of(lambda: dilated_attention(*torch.randn(3, 1, 17, 4, 2), DilatedPattern(window=4), is_causal=True)) == []


@pytest.mark.usefixtures("forgotten")
def test_a_cache_beyond_the_longest_segment_warns_once_by_its_real_lengths() -> None:
    pattern = DilatedPattern.causal(16, 4, window=4)
    cache = DilatedKVCache(pattern, batch_size=2, num_kv_heads=4, head_dim=2)

    def step(num_tokens: int, *lengths: int) -> list[str]:
        new = torch.randn(3, 2, num_tokens, 4, 2)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            cache.attend(*new, lengths=torch.tensor(lengths) if lengths else None)
        assert {each.filename for each in warned} <= {__file__}
        return [str(each.message) for each in warned]

    assert step(14, 3, 9) == step(7, 7, 4) == step(3) == []  # 13 and 16 tokens, of 24 with padding
    cache.crop(15)
    assert step(1) == []
    (text,) = step(1)
    assert re.match(BEYOND, text)
    assert step(1) == []
    cache.reset()
    assert step(16) == step(1) == []


@pytest.mark.usefixtures("forgotten")
def test_a_cache_does_not_read_its_lengths_before_the_longest_segment_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DilatedKVCache(DilatedPattern.causal(16, 4, window=4), batch_size=1, num_kv_heads=4, head_dim=2)
    reads: list[int] = []
    read = torch.Tensor.max
    monkeypatch.setattr(torch.Tensor, "max", lambda x, *args: reads.append(1) or read(x, *args))
    for _ in range(20):
        cache.attend(*torch.randn(3, 1, 1, 4, 2))
    assert len(reads) == 1


@pytest.mark.usefixtures("forgotten")
def test_tokens_without_a_head_are_those_whose_output_is_0() -> None:
    for pattern, cure in (
        (SPARSE, "or a rate that divides the 2 key/value heads"),
        (DilatedPattern((6, 16), (3, 2), heads="grouped"), "branch of rate 1"),
    ):
        q = torch.randn(1, 17, 2, 3, generator=torch.Generator().manual_seed(3))
        with pytest.warns(UserWarning, match=rf"has no head for token .* add a branch of rate 1.*{cure}$|.*{cure}$"):
            out = dilated_attention(q, q, q, pattern)
        lost = (out == 0).flatten(2).all(-1)[0].nonzero()[0].item()
        assert pattern.first_token_without_head(17, 2) == lost
        assert pattern.first_token_without_head(int(lost), 2) is None


@pytest.mark.usefixtures("forgotten")
def test_no_warning_without_need() -> None:
    covering = DilatedPattern((16, 16), (2, 2), heads="grouped")  # each branch keeps the tokens that the other does not
    q, short = torch.randn(1, 13, 2, 3), torch.randn(1, 8, 2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dilated_attention(q, q, q, LOSSY)
        dilated_attention(q, q, q, covering)
        dilated_attention(q, q, q, DilatedPattern((16,), (2,)))
        dilated_attention(short, short, short, LOSSY, is_causal=True)
        dilated_attention(q, q, q, LOSSY, is_causal=True, cu_seqlens=torch.tensor([0, 6, 13]))
        dilated_attention(q, q, q, DilatedPattern.torchscale((4, 8), (1, 2)), is_causal=True, backend="reference")
        MultiheadDilatedAttention(24, 12, DilatedPattern.longnet(), is_causal=True)
        MultiheadDilatedAttention(16, 4, LOSSY, is_causal=True)
        MultiheadDilatedAttention(16, 4, LOSSY)
        layer = DilatedAttention(LOSSY, is_causal=True)
        torch.compile(layer, fullgraph=True, backend="aot_eager")(q, q, q)
        layer = DilatedAttention(DilatedPattern((8,), (4,), window=2), is_causal=True)  # a residue is lost, and tokens are beyond 8
        torch.compile(layer, fullgraph=True, backend="aot_eager")(q, q, q)


def test_causal_preset_has_a_plain_signature() -> None:
    assert list(inspect.signature(causal).parameters) == ["seq_len", "num_kv_heads", "window", "rate", "global_tokens", "budget"]
    assert causal(512, num_kv_heads=8) == causal(512, 8)


def test_cures_of_grouped_heads_are_a_window_and_the_preset() -> None:
    grouped = DilatedPattern((4, 16), (1, 2), heads="grouped")
    why = why_not_connected(grouped, 16, 8)
    assert why is not None
    assert why.endswith("tokens 0 to 3 reaches the tokens from 4 on; add a window or use DilatedPattern.causal(seq_len, 8)")
    assert why_not_connected(replace(grouped, window=2), 16, 8) is None
    assert why_not_connected(grouped, 4, 8) is None
