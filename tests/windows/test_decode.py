"""The cache under a window and global tokens: any chunks, lengths, marks, crops and orders, on any ranks, equal the definition."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from flexdilated import DilatedKVCache, DilatedPattern
from flexdilated.nn import LongNetConfig, LongNetLM
from tests.decoding import BATCH, DIM, draw, feed, feed_all, full, make, padded_chunk, sees
from tests.distributed.caches import prefill, random_shards, simulate
from tests.tolerances import EXACT

SEGMENTS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((), ()), ((7,), (1,)), ((5, 11), (1, 2)), ((13,), (3,)))
FIRST = DilatedPattern((6, 8), (1, 2), window=3, global_tokens=5)
LOST = "length must keep the keys of the window=|length must end in the segment that is stored"


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Stored:
    """By loops over integers, the tokens of one sequence that a cache still stores, per branch."""

    def __init__(self, pattern: DilatedPattern) -> None:
        first = pattern.global_tokens  # whose rows nothing overwrites
        self.starts: list[tuple[int, Callable[[int], int]]] = [(w, lambda p, w=w: p // w * w) for w in pattern.segment_lengths]
        if pattern.window is not None:
            self.starts.append((pattern.window, lambda p: max(first, p - pattern.window + 1)))
        self.rows: list[dict[int, int]] = [{} for _ in self.starts]

    def write(self, positions: range) -> None:
        for rows, (period, _) in zip(self.rows, self.starts):
            rows.update({p % period: p for p in positions})

    def reaches(self, end: int) -> bool:
        """Whether all tokens are stored that position `end` sees before itself."""
        return all(
            rows.get(p % period) == p for rows, (period, start) in zip(self.rows, self.starts) for p in range(start(end), end)
        )


def run_case(seed: int, make_cache: Callable[..., DilatedKVCache], size: int = 1) -> tuple[int, int]:
    """Random calls on one cache against the definition; the number of crops that were taken, and of those that were rejected."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, group, (lengths, rates) = chance.choice([2, 3]), chance.choice([1, 2]), chance.choice(SEGMENTS)
    window, rule = chance.choice([1, 2, 3, 5, 8, 17, 50]), chance.choice(["all", "grouped"])
    near = {"window": chance.choice([window, window, None]), "global_tokens": chance.choice([0, 1, 4, 9, 60])}
    if not any((*near.values(), lengths)):
        near["global_tokens"] = 3
    pattern, tokens = DilatedPattern(lengths, rates, heads=rule, **near), chance.randint(3, 41)
    max_length, records = chance.choice([None, tokens, tokens + 3]), chance.random() < 0.4
    sizes = heads * group, heads, heads
    inputs = tuple(torch.randn(BATCH, tokens, h, DIM, dtype=torch.float64, generator=generator) for h in sizes)
    poisoned = torch.rand(BATCH, tokens, heads, generator=generator) < chance.choice([0.0, 0.1])
    cache = make_cache(pattern, num_kv_heads=heads, max_length=max_length)
    if not lengths:
        rows = (-(-min(x, max_length or x) // size) for x in near.values() if x)
        assert cache.rows_per_head == (sum(rows),) * heads  # whatever the number of tokens
    at, stored, taken, rejected = [0] * BATCH, [Stored(pattern) for _ in range(BATCH)], 0, 0
    expected = definition(inputs, pattern, poisoned)
    if size > 1 and not records and chance.random() < 0.7:
        prompt = chance.randint(1, tokens)
        out = prefill(cache, marked(inputs, poisoned), random_shards(chance, prompt, size))
        torch.testing.assert_close(out, expected[:, :prompt], equal_nan=True, **EXACT)
        at = [prompt] * BATCH
        for rows in stored:
            rows.write(range(prompt))
    cache.records_past = records
    first, before = list(at), copy.deepcopy(stored)  # where the recorded calls began
    for _ in range(24):
        longest = chance.choice([1, 1, 1, 2, 3, 11, window, window + 1, 2 * window + 1, *[tokens // 2] * (0 if any(at) else 9)])
        added = [chance.randint(longest == 1, longest) if a + longest <= tokens else 0 for a in at]
        if not any(added):
            break
        out = cache.attend(*padded_chunk(marked(inputs, poisoned), at, added), lengths=torch.tensor(added))
        for b, count in enumerate(added):
            part = expected[b, at[b] : at[b] + count]
            torch.testing.assert_close(out[b, :count], part, equal_nan=True, msg=lambda text: f"seed {seed}: {text}", **EXACT)
            stored[b].write(range(at[b], at[b] + count))
            at[b] += count
        action = chance.random()
        if action < 0.15:
            order = [chance.randrange(BATCH) for _ in range(BATCH)]
            (cache.reorder if chance.random() < 0.5 else cache.select)(torch.tensor(order))
            inputs, poisoned, expected = tuple(x[order] for x in inputs), poisoned[order], expected[order]
            at, stored = [at[b] for b in order], [copy.deepcopy(stored[b]) for b in order]
        elif action < 0.5:
            ends = [max(0, a - chance.choice([0, 0, 1, 1, 2, 4, a])) for a in at]
            is_exact = all(rows.reaches(end) for rows, end, a in zip(stored, ends, at) if end < a)
            if not is_exact and not (records and all(end >= start for end, start in zip(ends, first))):
                rejected += 1
                with pytest.raises(ValueError, match=LOST):
                    cache.crop(torch.tensor(ends))
                continue
            taken += 1
            cache.crop(torch.tensor(ends))
            if not is_exact:
                stored = before
                for rows, start, end in zip(stored, first, ends):
                    rows.write(range(start, end))
            for b, end in enumerate(ends):  # other tokens follow
                for x in inputs:
                    x[b, end:] = torch.randn(x[b, end:].shape, dtype=x.dtype, generator=generator)
            at, expected = ends, definition(inputs, pattern, poisoned)
        else:
            continue
        first, before = list(at), copy.deepcopy(stored)
    assert cache.lengths.tolist() == at
    return taken, rejected


def marked(inputs: tuple[Tensor, ...], poisoned: Tensor) -> tuple[Tensor, ...]:
    q, *others = inputs
    return q, *(x.masked_fill(poisoned[..., None], torch.nan) for x in others)


def definition(inputs: tuple[Tensor, ...], pattern: DilatedPattern, poisoned: Tensor) -> Tensor:
    """The outputs of whole sequences, NaN where a token sees a poisoned key of its head."""
    q, *others = inputs
    finite = q, *(x.masked_fill(poisoned[..., None], 0.0) for x in others)
    out = full(finite, pattern)
    return out.masked_fill(sees(finite, pattern, poisoned)[..., None], torch.nan) if poisoned.any() else out


def test_sequences_equal_the_definition() -> None:
    counts = [run_case(seed, make) for seed in range(40)]
    taken, rejected = map(sum, zip(*counts))
    assert taken > 60  # after a crop, each sequence goes on with other tokens
    assert rejected > 15


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 5])
def test_ranks_equal_the_definition(size: int) -> None:
    for seed in range(5):
        simulate(size, lambda make_cache, seed=seed: run_case(1000 * size + seed, make_cache, size))


def test_crop_names_the_window_and_takes_its_last_token() -> None:
    cache, x = make(DilatedPattern(window=5)), torch.randn(BATCH, 9, 5, DIM, dtype=torch.float64)
    cache.attend(x, x, x)
    cache.crop(8)  # token 8 replaced token 3, which token 8 does not see, and token 7 does
    with pytest.raises(ValueError, match=r"^length must keep the keys of the window=5 before it .* got 7 of 8 tokens in"):
        cache.crop(7)
    cache.crop(0)


def test_nothing_overwrites_global_tokens() -> None:
    inputs, cache = draw(), make(DilatedPattern(window=5, global_tokens=4))
    expected = full(inputs, cache.pattern)
    for first, last in ((4, 50), (3, 50), (4, 9), (6, 9), (7, 9)):  # token 9 would overwrite token 4
        feed(cache, inputs, int(cache.lengths[0]), last)
        cache.crop(first)
        torch.testing.assert_close(feed(cache, inputs, first, 11), expected[:, first:11], **EXACT)
        cache.crop(0)


@pytest.mark.parametrize("global_tokens", [0, 1, 5, 6, 7, 30])
@pytest.mark.parametrize("pattern", [FIRST, DilatedPattern((6,), (4,)), DilatedPattern(window=6), DilatedPattern(global_tokens=9)])
def test_plans_repeat_behind_the_global_tokens(pattern: DilatedPattern, global_tokens: int) -> None:
    pattern = dataclasses.replace(pattern, global_tokens=global_tokens or pattern.global_tokens)
    (layout,) = (store.layout for store in make(pattern)._stores)
    seen = set()
    for position in range(5 * layout.period + pattern.global_tokens):
        at = torch.tensor([position])
        plan, exact = layout.next_plan(at, torch.ones_like(at)), layout._plan(at, None)
        assert torch.equal(plan.bias, exact.bias)
        stored = ~exact.unstored.expand_as(exact.places)
        assert torch.equal(plan.places[stored], exact.places[stored])
        seen.add(id(plan))
    assert len(seen) <= 3 * layout.period + pattern.global_tokens


@pytest.mark.parametrize("global_tokens", [0, 5])
def test_a_step_compiles_once(global_tokens: int) -> None:
    torch.compiler.reset()
    pattern = DilatedPattern((5,), (2,), window=7, global_tokens=global_tokens)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    inputs = tuple(torch.randn(BATCH, 31, heads, DIM, dtype=torch.float64) for heads in (4, 2, 2))
    cache = make(pattern, num_kv_heads=2)
    prompt = feed_all(cache, inputs, 0, 3)
    cache.attend = torch.compile(cache.attend, backend=counter, fullgraph=True)  # type: ignore[method-assign]
    out = feed_all(cache, inputs, *range(3, 32))
    torch.testing.assert_close(torch.cat([prompt, out], dim=1), full(inputs, pattern), **EXACT)
    assert counter.frame_count == 1


@pytest.mark.parametrize("pattern", [DilatedPattern(window=5), DilatedPattern((8,), (2,), window=3), FIRST], ids=str)
def test_a_language_model_generates_what_the_whole_sequence_gives(pattern: DilatedPattern) -> None:
    torch.manual_seed(3)
    config = LongNetConfig(vocab_size=31, embed_dim=16, num_layers=2, num_heads=2, pattern=pattern, position="rotary")
    lm, tokens = LongNetLM(config).eval(), torch.randint(31, (2, 9))
    for _ in range(14):
        tokens = torch.cat([tokens, lm(tokens)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(lm.generate(tokens[:, :9], max_new_tokens=14, temperature=0.0), tokens[:, 9:])
