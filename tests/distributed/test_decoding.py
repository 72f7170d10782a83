"""A cache dealt over ranks: decoding equals one process, in memory that falls with the number of ranks."""

import copy
import pickle
import random
import re
from collections.abc import Callable
from itertools import accumulate
from math import ceil
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from flexdilated import DilatedKVCache, DilatedPattern, dilated_attention
from flexdilated.decode.tokens import BLOCK
from flexdilated.distributed import even_shard_lengths, unshard_sequence
from flexdilated.nn import LongNetConfig, LongNetLM
from tests.cases import least_heads
from tests.decoding import (
    BATCH,
    DIM,
    GROUP,
    GROUPED,
    HEADS,
    LONGNET,
    RAGGED,
    TOKENS,
    feed,
    feed_all,
    full,
    make,
    sees,
)
from tests.distributed.caches import decode, draw, prefill, random_shards, rank_of, simulate
from tests.distributed.models import build, draw_tokens
from tests.distributed.processes import exactly
from tests.tolerances import EXACT, assert_twice_naive

FIRST = DilatedPattern((5, 28), (1, 3), window=4, global_tokens=7)


@pytest.mark.parametrize("pattern", [RAGGED, GROUPED, FIRST], ids=str)
def test_sinks_count_once_whatever_the_ranks(pattern: DilatedPattern) -> None:
    """One that no softmax sees, too, and rows of keys that some ranks lack."""
    inputs, sinks = draw(), torch.linspace(-3.0, 4.0, HEADS * GROUP, dtype=torch.float64)
    sinks[1], sinks[2] = -torch.inf, torch.inf

    for out in decode(3, pattern, inputs, (0, 5, 4), 9, 10, 11, 40, TOKENS, sinks=sinks):
        torch.testing.assert_close(out, full(inputs, pattern, sinks), **EXACT)


def random_pattern(chance: random.Random) -> DilatedPattern:
    lengths = [chance.randint(1, 40) for _ in range(chance.randint(1, 3))]
    return DilatedPattern(
        tuple(lengths),
        tuple(chance.randint(1, min(length, 6)) for length in lengths),
        window=chance.choice([None, 6]),
        global_tokens=chance.choice([0, 5, 31]),
        heads=chance.choice(["all", "grouped"]),
        offsets=chance.choice(["blocked", "interleaved"]),
    )


@pytest.mark.parametrize(("size", "seed"), [(2, 0), (3, 0), (3, 1), (5, 0)])
def test_a_prompt_in_shards_and_steps_after_it_equal_one_process(size: int, seed: int) -> None:
    chance = random.Random(100 * size + seed)
    pattern, tokens = random_pattern(chance), chance.choice([1, 2, 29, 53])
    heads, group = max(least_heads(pattern), chance.choice([1, 3])), chance.choice([1, 2])
    prompt = chance.randint(1, tokens)
    shards, scale = random_shards(chance, prompt, size), chance.choice([None, 0.7, -0.3, 0.0])
    chunks, at = [], prompt
    while at < tokens:
        count = min(tokens - at, chance.choice([1, 1, 1, 3, 13]))
        chunks.append((count, chance.random() < 0.3 and random_shards(chance, count, size)))
        at += count
    inputs, longest = draw(tokens, heads, group), chance.choice([None, tokens, tokens + 7])
    sinks = chance.choice([None, torch.linspace(-3.0, 4.0, heads * group, dtype=torch.float64)])
    options = {"scale": scale, "sinks": sinks}

    def work(make: Callable[..., DilatedKVCache]) -> Tensor:
        cache = make(pattern, num_kv_heads=heads, max_length=longest)
        outs, at = [prefill(cache, inputs, shards, **options)], prompt
        for count, cut in chunks:
            whole = tuple(x[:, at : at + count] for x in inputs)
            outs.append(prefill(cache, inputs, cut, at, **options) if cut else cache.attend(*whole, **options))
            at += count
        assert cache.lengths.tolist() == [tokens] * BATCH
        return torch.cat(outs, dim=1)

    outs = simulate(size, work)
    torch.testing.assert_close(outs[0], full(inputs, pattern, **options), **EXACT)
    assert all(torch.equal(out[:, prompt:], outs[0][:, prompt:]) for out in outs)  # the same bits


@pytest.mark.parametrize(("pattern", "size"), [(LONGNET, 2), (RAGGED, 3), (GROUPED, 16), (FIRST, 3)], ids=str)
def test_each_rank_holds_its_share_of_the_rows(pattern: DilatedPattern, size: int) -> None:
    one = make(pattern)

    def work(make: Callable[..., DilatedKVCache]) -> tuple[int, tuple[int, ...], list[int]]:
        cache = make(pattern)
        before = [x.data_ptr() for store in cache._stores for x in store.rows_held]
        prefill(cache, draw(), even_shard_lengths(27, size))
        feed_all(cache, draw(), 27, 28, TOKENS)
        assert [x.data_ptr() for store in cache._stores for x in store.rows_held] == before
        used = [int((store.k != 0).any(-1).sum()) for store in cache._stores]
        return cache.nbytes, cache.rows_per_head, used

    found = simulate(size, work)
    branches = [len(store.rows) for store in one._stores for _ in store.heads]
    by_branch = {head: [ceil(rows / size) for rows in store.rows] for store in one._stores for head in store.heads}
    for nbytes, rows, _ in found:
        assert rows == tuple(sum(by_branch[head]) for head in sorted(by_branch))
        assert nbytes <= one.nbytes / size + 2 * 8 * BATCH * DIM * sum(branches)
    # What is stored is dealt evenly too: no rank has more than a row per branch and head beyond another.
    for used in zip(*(used for _, _, used in found)):
        assert max(used) - min(used) <= BATCH * sum(branches)
        assert sum(used) > 0


def test_low_precision_errs_at_most_twice_as_much_as_plain_pytorch() -> None:
    inputs = draw(dtype=torch.bfloat16)

    out = decode(2, LONGNET, inputs, (13, 7), 20, *range(33, 44), TOKENS)[0]
    assert out.dtype == torch.bfloat16
    naive = dilated_attention(*inputs, LONGNET, is_causal=True, backend="sdpa")
    assert_twice_naive(out, naive, full(tuple(x.double() for x in inputs), LONGNET))


def test_without_the_fused_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexdilated.backends.dense.sdpa.disabled", lambda flag: "it is switched off")
    inputs = draw()

    torch.testing.assert_close(decode(2, RAGGED, inputs, (13, 7), 20, 21, TOKENS)[0], full(inputs, RAGGED), **EXACT)


@pytest.mark.parametrize(
    ("chunks", "poison"), [(((20, 11), 9, 1, 1, 20), torch.nan), (((3, 0), 5, 17, 1), torch.inf), (((BLOCK + 1, 3), 7), torch.nan)]
)
def test_a_mark_reaches_who_sees_it_and_nobody_else(chunks: tuple[Any, ...], poison: float) -> None:
    borders = list(accumulate((sum(chunks[0]), *chunks[1:])))
    tokens = borders[-1]
    inputs = draw(tokens)
    places = torch.zeros(BATCH, tokens, HEADS, dtype=torch.bool)
    places[1, 2, 3] = places[0, tokens - 4, 1] = places[2, sum(chunks[0]) - 1] = True
    expected = full(inputs, LONGNET).masked_fill(sees(inputs, LONGNET, places)[..., None], torch.nan)
    inputs[1][..., 1].masked_fill_(places, poison)

    for out in decode(2, LONGNET, inputs, chunks[0], *borders):
        torch.testing.assert_close(out, expected, **EXACT, equal_nan=True)


@pytest.mark.parametrize("pattern", [GROUPED, FIRST], ids=str)
def test_calls_are_taken_back_and_sequences_change_places(pattern: DilatedPattern) -> None:
    inputs, wrong = draw(), draw(TOKENS + 1)
    expected = full(inputs, pattern)
    rows = torch.tensor([2, 0, 2, 1])

    def work(make: Callable[..., DilatedKVCache]) -> None:
        cache = make(pattern)
        prefill(cache, inputs, (9, 4, 0))
        cache.records_past = True
        done = 13
        for kept, rejected in ((0, 9), (1, 1), (5, 23), (2, 3)):
            chunk = tuple(torch.cat([x[:, done : done + kept], y[:, :rejected]], dim=1) for x, y in zip(inputs, wrong))
            out = feed_all(cache, chunk, *range(kept + rejected + 1)) if rejected == 3 else cache.attend(*chunk)
            torch.testing.assert_close(out[:, :kept], expected[:, done : done + kept], **EXACT)
            done += kept
            cache.crop(done)
        cache.records_past = False
        twin = copy.deepcopy(cache)
        cache.reorder(torch.tensor([1, 1, 0]))
        cache.select(torch.tensor([2, 0]))
        order = torch.tensor([0, 1])
        torch.testing.assert_close(cache.attend(*(x[order, done:] for x in inputs)), expected[order, done:], **EXACT)
        twin.select(rows)
        torch.testing.assert_close(twin.attend(*(x[rows, done:] for x in inputs)), expected[rows, done:], **EXACT)
        cache.reset()
        assert not cache.lengths.any()
        torch.testing.assert_close(prefill(cache, tuple(x[:2] for x in inputs), (1, 0, 4)), expected[:2, :5], **EXACT)

    simulate(3, work)


def test_what_needs_a_mesh_is_refused_without() -> None:
    x, cache, model = torch.zeros(BATCH, 2, HEADS, DIM, dtype=torch.float64), make(LONGNET), build().eval()
    tokens, lengths = draw_tokens(1, 2), {"shard_lengths": (2, 0)}
    alone = "shard_lengths must come with mesh, got (2, 0) and no mesh"
    for call, error, message in (
        (lambda: cache.attend(x, x, x, **lengths), ValueError, alone),
        (lambda: cache.new_positions(2, **lengths), ValueError, alone),
        (lambda: model.generate(tokens, max_new_tokens=1, **lengths), ValueError, alone),
        (lambda: model(tokens, caches=model.make_caches(1), **lengths), ValueError, alone),
        (lambda: make(LONGNET, exchange="ring"), ValueError, "exchange must come with mesh, got 'ring' and no mesh"),
        (lambda: make(LONGNET, mesh=2), TypeError, "mesh must be a DeviceMesh, got int"),
    ):
        with torch.no_grad(), pytest.raises(error, match=f"^{re.escape(message)}$"):
            call()


def test_recorded_shards_and_caches_out_of_step_are_refused() -> None:
    def work(make: Callable[..., DilatedKVCache]) -> None:
        cache = make(LONGNET)
        cache.records_past = True
        with pytest.raises(NotImplementedError, match=r"^records_past must be False with shard_lengths, got True: set it after"):
            prefill(cache, draw(), (3, 4))
        with pytest.raises(ValueError, match=r"^shard_lengths must hold at least 1 token in all, got \(0, 0\)$"):
            prefill(cache, draw(), (0, 0))
        with pytest.raises(ValueError, match=r"^shard_lengths\[\d\] must be the number of tokens of this rank=2, got \(4, 3\)$"):
            cache.attend(*(x[:, :2] for x in draw()), shard_lengths=(4, 3))
        cache = make(LONGNET)
        feed(cache, draw(), 0, 9 - rank_of(cache))
        came = "[9, 9, 9, 1, 1, 1] on rank 0 and [8, 8, 8, 1, 1, 1] on rank 1"
        text = f"lengths of a cache and of a call must be the same on all ranks, got {came}"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            feed(cache, draw(), 9, 10)

    simulate(2, work)


@pytest.mark.slow
@exactly(2)
@torch.no_grad()
def test_a_prompt_by_each_exchange_and_steps_equal_one_process(rank: int, mesh: DeviceMesh) -> None:
    inputs, shards = draw(), (13, 11)
    for pattern, exchange in ((LONGNET, "auto"), (RAGGED, "ring"), (GROUPED, "heads"), (FIRST, "auto")):
        cache, expected = make(pattern, exchange=exchange, mesh=mesh), full(inputs, pattern)
        assert cache.mesh is mesh
        torch.testing.assert_close(prefill(cache, inputs, shards), expected[:, :24], **EXACT)
        torch.testing.assert_close(feed_all(cache, inputs, 24, 25, 26, 39), expected[:, 24:39], **EXACT)
        torch.testing.assert_close(prefill(cache, inputs, (4, 4), 39), expected[:, 39:47], **EXACT)
        twin = copy.deepcopy(cache)
        torch.testing.assert_close(feed(twin, inputs, 47, 48), expected[:, 47:48], **EXACT)
        with pytest.raises(TypeError, match=r"^a cache must be pickled without mesh, got one over 2 ranks"):
            pickle.dumps(cache)
    torch.compiler.reset()
    compilations = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(cache.attend, fullgraph=True, backend=compilations, dynamic=False)
    outs = [step(*(x[:, t : t + 1].contiguous() for x in inputs)) for t in range(47, 53)]
    torch.testing.assert_close(torch.cat(outs, dim=1), expected[:, 47:53], **EXACT)
    assert compilations.frame_count == 1


@pytest.mark.slow
@exactly(2)
@torch.no_grad()
def test_faults_are_raised_by_all_ranks_which_go_on(rank: int, mesh: DeviceMesh) -> None:
    last, inputs = mesh.size() - 1, draw()
    options = {"max_length": TOKENS, "mesh": mesh}  # of which ranks have not agreed yet
    with pytest.raises(ValueError, match=r"^exchange must be one of \('auto', 'gather', 'ring', 'heads'\), got 'nope'$"):
        make(LONGNET, exchange="nope", **options)
    with pytest.raises(ValueError, match=r"^device must be that of mesh=cpu, got meta$"):
        make(LONGNET, device="meta", **options)
    cache = make(LONGNET, **options)
    shards = even_shard_lengths(20, mesh.size())
    here = [x[:, :20].split(list(shards), dim=1)[rank] for x in inputs]
    said = r"k must have the dtype of the cache=torch.float64, got torch.float32; DilatedKVCache\(dtype=\) says it, "
    with pytest.raises(TypeError, match=rf"^{said}under torch.autocast that of autocast$"):
        cache.attend(here[0], here[1].float(), here[2], shard_lengths=shards)
    with pytest.raises(ValueError, match=r"^ranks must agree on scale, got "):
        cache.attend(*here, shard_lengths=shards, scale=1.0 + rank)
    torch.testing.assert_close(prefill(cache, inputs, shards), full(inputs, LONGNET)[:, :20], **EXACT)
    with pytest.raises(ValueError, match=r"^ranks must agree on shape, got \[3, [12], 10\] on rank"):
        feed(cache, inputs, 20, 21 + (rank == last))
    if rank == last:
        cache.crop(19)
    different = r"^lengths of a cache and of a call must be the same on all ranks, got \[20, 20, 20, 1, 1, 1\] on rank 0"
    with pytest.raises(ValueError, match=different):
        feed(cache, inputs, 20, 21)
    cache.crop(19)
    torch.testing.assert_close(feed(cache, inputs, 19, 33), full(inputs, LONGNET)[:, 19:33], **EXACT)
    check_calls_that_were_agreed_on(rank, mesh, cache)


def check_calls_that_were_agreed_on(rank: int, mesh: DeviceMesh, cache: DilatedKVCache) -> None:
    """Ranks that give other shards or lengths hear of it, though all of them have given either before."""
    inputs, splits = draw(), ((3, 1), (1, 3))
    expected = full(inputs, LONGNET)
    for i, split in enumerate(splits):
        end = 33 + 4 * i
        torch.testing.assert_close(prefill(cache, inputs, split, end), expected[:, end : end + 4], **EXACT)
    different = r"^ranks must agree on shard_lengths, got \[3, 1\] on rank 0 and \[1, 3\] on rank 1"
    here = [x[:, 41 : 41 + splits[rank][rank]] for x in inputs]
    step = torch.compile(cache.attend, fullgraph=True, backend="eager", dynamic=False)
    for run in (cache.attend, step):
        with pytest.raises(ValueError, match=different):
            run(*here, shard_lengths=splits[rank])
    with pytest.raises(ValueError, match=different):
        unshard_sequence(here[0], mesh, shard_lengths=splits[rank])
    for added in (torch.ones(BATCH, dtype=torch.int64), torch.tensor([1, 1, 0])):
        twin = copy.deepcopy(cache)
        twin.attend(*(x[:, 41:42] for x in inputs), lengths=added)
    twin = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=r"^lengths of a cache and of a call must .*, got \[41, 41, 41, 1, 1, 0\] on rank 0 and "):
        twin.attend(*(x[:, 41:42] for x in inputs), lengths=torch.tensor([1, 1, rank]))
    prompt = make(LONGNET, mesh=mesh)
    here = [x[:, 4 * rank : 4 * rank + 4] for x in inputs]
    for lengths in ([8, 8, 8], [8, 3, 8]):
        prompt.reset()
        prompt.attend(*here, shard_lengths=(4, 4), lengths=torch.tensor(lengths))
    prompt.reset()
    with pytest.raises(ValueError, match=r"^lengths of a cache and of a call .*, got \[8, 8, 8\] on rank 0 and \[8, 3, 8\] on"):
        prompt.attend(*here, shard_lengths=(4, 4), lengths=torch.tensor([8, 8 - 5 * rank, 8]))
    torch.testing.assert_close(prefill(prompt, inputs, (4, 4)), expected[:, :8], **EXACT)
    torch.testing.assert_close(feed(cache, inputs, 41, 43), expected[:, 41:43], **EXACT)


@pytest.mark.slow
@exactly(2)
@torch.no_grad()
def test_a_refused_compiled_step_does_not_count(rank: int, mesh: DeviceMesh) -> None:
    """A compiler may store before it asks the ranks; what they refuse must not count."""
    inputs, pattern = draw(), DilatedPattern((7,), (2,))  # a branch more takes inductor seconds
    cache = make(pattern, mesh=mesh)
    feed(cache, inputs, 0, 2)
    torch.compiler.reset()
    step = torch.compile(lambda q, k, v, scale: cache.attend(q, k, v, scale=scale), fullgraph=True)
    new = [x[:, 2:3] for x in inputs]
    with pytest.raises(ValueError, match="ranks must agree on scale"):
        step(*new, 0.6 + rank)
    assert cache.lengths.tolist() == [2] * BATCH
    torch.testing.assert_close(cache.attend(*new), full(inputs, pattern)[:, 2:3], **EXACT)


@pytest.mark.slow
@exactly(2)
@torch.no_grad()
def test_orders_that_ranks_do_not_share_are_refused(rank: int, mesh: DeviceMesh) -> None:
    """Beams that a rank orders for itself; and a step that all refuse leaves every rank's cache as it was."""
    inputs = draw()
    cache = make(LONGNET, mesh=mesh)
    feed(cache, inputs, 0, 14)  # a segment ends there
    for change in (cache.reorder, cache.select):
        other = copy.deepcopy(cache)
        getattr(other, change.__name__)(torch.tensor([2, 0, 1] if rank else [2, 1, 0]))
        for tokens in (1, 2):
            with pytest.raises(ValueError, match=r"^the order of the sequences of a cache must be .*, got by hashes"):
                feed(other, inputs, 14, 14 + tokens)
        change(torch.tensor([2, 0, 1]))
        change(torch.tensor([1, 2, 0]))
    with pytest.raises(ValueError, match=r"^lengths of a cache and of a call must be the same"):
        cache.attend(*(x[:, 14:15] for x in inputs), lengths=torch.tensor([1, 1, min(rank, 1)]))
    cache.crop(13)  # of the segment that the refused token would have overwritten
    torch.testing.assert_close(feed(cache, inputs, 13, 16), full(inputs, LONGNET)[:, 13:16], **EXACT)


@pytest.mark.slow
@exactly(3)
def test_generation_equals_one_process(rank: int, mesh: DeviceMesh) -> None:
    prompt, shards = draw_tokens(2, 23), (9, 14, 0)
    start = sum(shards[:rank])
    local = prompt[:, start : start + shards[rank]]
    for options in ({}, {"position": "rotary", "pattern": RAGGED, "num_kv_heads": None}):
        model, whole = build(mesh, **options), build(**options)
        for given in ({"temperature": 0.0}, {"temperature": 0.0, "lengths": torch.tensor([9, 22])}):
            expected = whole.generate(prompt, max_new_tokens=7, **given)
            assert torch.equal(model.generate(local, max_new_tokens=7, shard_lengths=shards, **given), expected)
            assert torch.equal(model.generate(prompt, max_new_tokens=7, **given), expected)  # of this rank's own
        with torch.no_grad():
            caches = model.eval().make_caches(2, mesh=mesh)
            logits = model(local, caches=caches, shard_lengths=shards)
            logits = torch.cat([model(prompt[:, :1], caches=caches), model(prompt[:, 1:6], caches=caches)], dim=1)
            expected = whole.eval()(torch.cat([prompt, prompt[:, :6]], dim=1))[:, 23:]
            torch.testing.assert_close(logits, expected, **EXACT)
    torch.manual_seed(rank)  # all get what rank 0 draws
    drawn = model.generate(local, max_new_tokens=5, shard_lengths=shards, generator=torch.Generator().manual_seed(rank))
    expected = whole.generate(prompt, max_new_tokens=5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn, expected)
    with pytest.raises(ValueError, match=r"^max_new_tokens must be an integer of at least 1, got 0$"):
        model.generate(local, max_new_tokens=0, shard_lengths=shards)
    for name, told in (("stop_tokens", (rank,)), ("pad_token", rank)):
        with pytest.raises(ValueError, match=r"^max_new_tokens, stop_tokens and pad_token must be the same on all ranks, got "):
            model.generate(local, max_new_tokens=2, shard_lengths=shards, **{name: told})
    check_generation_in_another_dtype(mesh, local, shards)
    assert torch.equal(
        model.generate(local, max_new_tokens=1, temperature=0.0, shard_lengths=shards),
        whole.generate(prompt, max_new_tokens=1, temperature=0.0),
    )


def check_generation_in_another_dtype(mesh: DeviceMesh, local: Tensor, shards: tuple[int, ...]) -> None:
    """Layers that FSDP2 keeps in float64 and computes in float32."""
    model, narrow = build(mesh).eval(), build(mesh).float().eval()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    options = {"max_new_tokens": 4, "temperature": 0.0, "shard_lengths": shards}
    assert torch.equal(model.generate(local, dtype=torch.float32, **options), narrow.generate(local, **options))


@pytest.mark.slow
@exactly(2)
@torch.no_grad()
def test_tokens_that_ranks_do_not_share_are_refused(rank: int, mesh: DeviceMesh) -> None:
    """Tokens that are said to be all of them, and are not the same: shards without their lengths, or drawn by each rank."""
    torch.manual_seed(0)
    config = LongNetConfig(vocab_size=29, embed_dim=12, num_layers=2, num_heads=3, pattern=LONGNET)
    model = LongNetLM(config, mesh=mesh).double().eval()
    tokens = torch.randint(29, (2, 24))
    caches = model.make_caches(2, max_length=40, mesh=mesh)
    own = tokens[:, 12 * rank : 12 * rank + 12]
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^the tokens of a call without shard_lengths must be the same on all ranks,"):
                model(own, caches=caches, last_only=True)
        assert [cache.lengths.tolist() for cache in caches] == [[0, 0]] * 2
        logits = model(own, caches=caches, last_only=True, shard_lengths=(12, 12))
        with pytest.raises(ValueError, match=r"^the tokens of a call without shard_lengths must be the same on all ranks"):
            model(tokens[:, rank : rank + 1], caches=caches)
        alone = LongNetLM(model.config).double().eval()
        alone.load_state_dict(model.state_dict())
        of_one = alone.make_caches(2, max_length=40)
        torch.testing.assert_close(logits, alone(tokens, caches=of_one, last_only=True), **EXACT)
        for more in (tokens[:, :1], tokens[:, 3:4], tokens[:, :5]):
            torch.testing.assert_close(model(more, caches=caches), alone(more, caches=of_one), **EXACT)
