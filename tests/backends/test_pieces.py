"""Pieces of any boxes and bands by every consumer, against loops over integers."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.backends import KERNEL_BACKENDS
from flexdilated.backends.autograd import functions
from flexdilated.backends.dense import fused_op, piece_loop, windows
from flexdilated.backends.dense.math import MATH
from flexdilated.backends.dense.sdpa import KERNELS
from flexdilated.backends.flex import backend as flex
from flexdilated.backends.kernel import Kernel, Options
from flexdilated.core import pieces as core
from flexdilated.core.call import Call
from flexdilated.core.pieces import UNBOUNDED, Piece, plan_pieces
from tests.backends.flex_emulation import emulate, flex_backend
from tests.backends.mods import Mods, run
from tests.cases import Case, poisoned_memory
from tests.doors.cases import COMET
from tests.tolerances import EXACT

HEADS = 4  # key/value heads
PATTERN = DilatedPattern((5, 7, 11), (1, 1, 1), window=3)  # whose pieces are replaced
BOX = Piece(0, 1, 0, 1, 0, 0, HEADS, 1, 0, 1, 0, 0, -UNBOUNDED, UNBOUNDED, 0, False, 0)
KINDS = ("today", "global", "window", "far", "any")


def boxes(kind: str, draw: random.Random, start: int, length: int) -> Iterator[Piece]:
    """The pieces of one branch over a document."""
    is_causal, g = draw.random() < 0.5, draw.randint(1, max(1, length // 3))
    late = 0 if is_causal else UNBOUNDED
    document = BOX._replace(token=start, key_token=start, rows=length, keys=length, segment_stride=length)
    if kind == "global":
        yield document._replace(keys=min(g, length), high=late)
        if not is_causal and length > g:
            yield document._replace(rows=g, key_token=start + g, keys=length - g, part=1)
    elif kind == "window" and length > g:
        size = draw.randint(1, length - g)
        low, high = (1 - size, 0 if is_causal else size - 1) if size < length - g else (-UNBOUNDED, late)
        yield document._replace(token=start + g, key_token=start + g, rows=length - g, keys=length - g, low=low, high=high)
    elif kind == "far":
        rate, b, kept = draw.choice((1, 2, 4)), draw.randint(1, 3), draw.randint(4, 7)
        segments = length // (rate * kept)
        first, offsets = draw.choice(((0, rate), (rate - 1, 1)))
        rows = kept - b
        far = document._replace(segments=segments, segment_stride=rate * kept, row_stride=rate, rows=rows, keys=rows, head=first)
        far = far._replace(offsets=offsets, offset_head_step=1, heads=HEADS // rate, head_step=rate)
        if segments:
            yield far._replace(token=start + first + b * rate, key_token=start + first, high=0)
        if segments and not is_causal:
            yield far._replace(token=start + first, key_token=start + first + b * rate, low=0, part=1)
    elif kind == "any":
        rate, segments = draw.randint(1, 3), draw.randint(1, 2)
        stride = length // segments
        rows, keys = (draw.randint(0, (stride - 1) // rate) + 1 for _ in range(2))
        token, key_token = (start + draw.randint(0, stride - 1 - (n - 1) * rate) for n in (rows, keys))
        low, high = sorted((draw.randint(-rows, keys), draw.randint(-rows, keys)))
        band = {"low": draw.choice((low, low, -UNBOUNDED, 0)), "high": draw.choice((high, high, UNBOUNDED, 0))}
        if band["low"] <= band["high"]:
            box = document._replace(segments=segments, segment_stride=stride, row_stride=rate, heads=2, head_step=2, **band)
            yield box._replace(token=token, rows=rows, key_token=key_token, keys=keys)


def drawn(seed: int, head_dim: int = 3) -> tuple[tuple[Piece, ...], Case]:
    """Pieces over documents, of which neighbours of equal length share boxes, and a call of that many tokens."""
    draw, found = random.Random(seed), []
    size, count, rest = draw.randint(4, 23), draw.randint(1, 3), draw.choice((0, 13))
    documents = [(size, count), *([(rest, 1)] if rest else [])]
    kinds = draw.sample(KINDS, 3)
    for branch, kind in enumerate(sorted(kinds, key=lambda kind: kind != "today")):
        start = 0
        if kind == "today":  # the first branch covers
            lengths = tuple((i * size, size) for i in range(count)) + (((size * count, rest),) if rest else ())
            today = draw.choice((DilatedPattern((7,), (1,)), DilatedPattern((6,), (2,)), DilatedPattern(window=5)))
            found += plan_pieces(today, lengths, HEADS, draw.random() < 0.5)
            continue
        for length, times in documents:
            for piece in boxes(kind, random.Random(f"{seed} {kind}"), 0, length):
                found += core._repeated(piece._replace(branch=branch), start, times, length)
            start += length * times
    case = Case(
        PATTERN,
        batch=draw.randint(1, 2),
        head_dim=head_dim,
        num_tokens=size * count + rest,
        kv_heads=HEADS,
        group=draw.randint(1, 2),
    )
    return tuple(found), replace(case, ignored=draw.choice((None, 0.3)), lse_gradient=draw.random() < 0.5, seed=seed)


def oracle(
    pieces: tuple[Piece, ...], q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, **options: Any
) -> tuple[Tensor, Tensor]:
    """Loops over the rows of pieces: how often each pair joins, then one dense softmax."""
    tokens, group = q.shape[1], q.shape[2] // HEADS
    times = torch.zeros(HEADS, tokens, tokens, dtype=torch.float64)
    for p in pieces:
        for s, c, j in product(range(p.segments), range(p.offsets), range(p.heads)):
            head = p.head + c * p.offset_head_step + j * p.head_step
            for row, key in product(range(p.rows), range(p.keys)):
                if p.low <= key - row <= p.high:
                    step = s * p.segment_stride + c
                    times[head, p.token + step + row * p.row_stride, p.key_token + step + key * p.row_stride] += 1
    times = times.repeat_interleave(group, 0)[None]
    b, h = torch.arange(q.shape[0])[:, None, None, None], torch.arange(q.shape[2])[:, None, None]
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    if options.get("key_padding_mask") is not None:
        times = times * ~options["key_padding_mask"][:, None, None]
        k, v = (x.masked_fill(options["key_padding_mask"][..., None, None], 0.0) for x in (k, v))
    if options.get("mask_mod") is not None:
        times = times * options["mask_mod"](b, h, i, j)
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if options.get("score_mod") is not None:
        scores = options["score_mod"](scores, b, h, i, j)
    scores = torch.where(times > 0, scores + times.clamp(min=1).log(), -math.inf)
    reached = (scores > -math.inf).any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~reached, 0.0), -1) * reached
    return (weights @ v).transpose(1, 2), torch.logsumexp(scores.masked_fill(~reached, 0.0), -1).masked_fill(
        ~reached[..., 0], -math.inf
    )


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"LEAST_CHUNK": 3, "MOST_CHUNK": 5, "LONG": 9}.items():
        monkeypatch.setattr(windows, name, value)
    caches = (windows.dense_pieces, piece_loop._plan)
    for cache in caches:
        cache.cache_clear()  # type: ignore[attr-defined]
    yield
    for cache in caches:
        cache.cache_clear()  # type: ignore[attr-defined]


def checked(kernel: Kernel) -> Kernel:
    """The kernel, which looks at what it is asked: causal masks of squares, and bands as it takes them."""

    def check(q: Tensor, k: Tensor, options: Options) -> None:
        assert not options.is_causal or q.shape[2] == k.shape[2]
        assert options.band is None or kernel.windows != "none"
        assert options.band is None or kernel.windows == "mask" or q.shape[2] == k.shape[2]

    def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Any:
        check(q, k, options)
        return kernel.run_forward(q, k, v, options)

    def backward(dout: Tensor, q: Tensor, k: Tensor, *more: Tensor, options: Options) -> Any:
        check(q, k, options)
        return kernel.run_backward(dout, q, k, *more, options=options)

    return replace(kernel, run_forward=forward, run_backward=backward)


DENSE = {
    "math": MATH,
    "cpu_flash": next(kernel for kernel in KERNELS if kernel.name == "cpu_flash"),
    "no bands": replace(MATH, windows="none"),
    "bounds": replace(MATH, windows="bounds"),
}


def assert_as_the_oracle(
    attend: Any, seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch, mods: tuple[Mods, ...] = (Mods(),), **tolerance: Any
) -> None:
    for seed in seeds:
        pieces, case = drawn(seed, 16 if tolerance else 3)
        for module in (fused_op, functions, flex):
            monkeypatch.setattr(module, "plan_pieces", lambda *_, found=pieces: found)
        mod = replace(mods[seed % len(mods)], seed=seed)
        expected = run(partial(oracle, pieces), case, mod)
        with poisoned_memory():
            actual = run(attend, case, mod, dtype=torch.float32 if tolerance else torch.float64)
        torch.testing.assert_close([x.double() for x in actual], expected, **(tolerance or EXACT), msg=f"{pieces} of {case}")


def by(backend: str) -> Any:
    return lambda q, k, v, pattern, **options: dilated_attention(q, k, v, pattern, return_lse=True, backend=backend, **options)


@pytest.mark.parametrize("name", DENSE)
def test_dense_kernels_compute_any_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNEL_BACKENDS, "sdpa", lambda request: (checked(DENSE[name]),))
    assert_as_the_oracle(by("sdpa"), range(120), monkeypatch)


MODS = (Mods("table", "thirds"), Mods(None, "prefix"), Mods("alibi"))


def test_functions_compute_any_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_as_the_oracle(by("sdpa"), range(90), monkeypatch, MODS)


def test_flex_computes_any_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, "packed")
    assert_as_the_oracle(flex_backend, range(120), monkeypatch, (*MODS, Mods()))


def test_a_planted_kind_is_computed_rightly_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, case = next((pieces, case) for pieces, case in map(drawn, range(99)) if any(piece.part for piece in pieces))
    emulate(monkeypatch, "packed")
    for module in (fused_op, functions, flex):
        monkeypatch.setattr(module, "plan_pieces", lambda *_: pieces)

    def operations(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, **options: Any) -> Any:
        return functions.attend_by_operations(q, k, v, Call(pattern, scale=3**-0.5, num_kv_heads=HEADS)._replace(**options))

    comet = replace(case, pattern=COMET)
    for attend in (operations, flex_backend):
        torch.testing.assert_close(run(attend, comet, MODS[0]), run(partial(oracle, pieces), case, MODS[0]), **EXACT)
    for attend in (by("sdpa"), by("reference")):
        with pytest.raises(NotImplementedError, match=r"must get branches of kind .* got a branch of kind Comet"):
            run(attend, comet, Mods())


def test_functions_take_a_window_in_three_pieces_and_global_tokens_in_one() -> None:
    pattern = DilatedPattern(window=100, global_tokens=4)
    pieces = windows.dense_pieces(plan_pieces(pattern, ((0, 1000),), 2, True), "mask", alone=True)
    assert Counter(piece.branch for piece in pieces) == {0: 3, 1: 1}
