"""The plan against the definition: what each output needs, token by token, and who holds it."""

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from flexdilated import DilatedPattern
from flexdilated.core.pieces import Piece
from flexdilated.distributed.planner import cost_model, message_rows, row_counts
from flexdilated.distributed.planner import plan as planning
from flexdilated.distributed.planner.message_rows import Message
from flexdilated.distributed.planner.plan import EXCHANGES, KINDS, ContextPlan, context_plan
from flexdilated.distributed.planner.tasks import Task, local_pieces, tasks_of
from flexdilated.distributed.runtime.row_index import RowIndex
from flexdilated.distributed.runtime.schedule import Schedule, schedule
from tests.distributed.cases import traffic
from tests.distributed.plans import MILLION, Softmax, definition, expected_rows, is_cut, placed, plan_of, plans, wild_plans


def of_equal_documents(*, zero_padding: bool) -> ContextPlan:
    """Documents of one length: some lie inside a shard, of others a border cuts a segment, or lies between two."""
    pattern = DilatedPattern((6, 15), (2, 3), zero_padding=zero_padding)
    documents = tuple((21 * i, 21) for i in range(6))
    return context_plan(pattern, (52, 46, 28), 3, range(3), 1, documents, False)


def listed(plan: ContextPlan, exchange: str, kind: str, rank: int, *, sent: bool) -> list[tuple[int, int, int]]:
    messages = list(message_rows.messages(plan, exchange, kind, rank, sent=sent))
    assert all(message.num_rows == sum(map(len, message.tokens)) for message in messages)
    return [
        (message.peer, head, token)
        for message in messages
        for head, tokens in zip(message.heads.tolist(), message.tokens, strict=True)
        for token in tokens.tolist()
    ]


PROGRESSIONS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=5)


@pytest.mark.parametrize("spread", [0, 99], ids=["sorted", "marked"])
@given(st.lists(PROGRESSIONS, min_size=1, max_size=4), st.data())
def test_rows_of_a_message_are_found(spread: int, runs: list[list[tuple[int, int, int]]], data: st.DataObject) -> None:
    heads = [3 * i for i in range(len(runs))]
    expected = [{first + i * stride for first, stride, rows in each for i in range(rows)} for each in runs]
    with mock.patch.object(message_rows, "SPREAD", spread):
        message = Message(0, np.array(heads), tuple(message_rows._union(*zip(*each)) for each in runs))
    assert [tokens.tolist() for tokens in message.tokens] == [sorted(tokens) for tokens in expected]
    places = {row: i for i, row in enumerate((head, token) for head, each in zip(heads, expected) for token in sorted(each))}
    assert message.num_rows == len(places)
    assert [(head, token) for those, table in message.blocks() for head, row in zip(those, table) for token in row] == list(places)
    rows, stride = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 9))
    lanes = [(head, first) for head, first in places if all((head, first + i * stride) in places for i in range(rows))]
    if lanes:
        asked = data.draw(st.lists(st.sampled_from(lanes), min_size=1))
        table = message.places(*np.array(asked).T, stride, rows)
        assert table.tolist() == [[places[head, first + i * stride] for i in range(rows)] for head, first in asked]
        index = RowIndex.from_table(table, torch.device("cpu"))
        assert index.read().dtype == torch.int32
        assert index.read().tolist() == table.tolist()
    absent = next(i for i in range(999) if (0, message.tokens[0][0] + i) not in places)
    with pytest.raises(AssertionError, match="a row that does not travel"):
        message.places(np.array([0]), message.tokens[0][:1], absent, 2)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
@given(plan=plans() | wild_plans())
def test_rows_that_travel_are_those_that_outputs_need_and_their_rank_lacks(plan: ContextPlan, exchange: str) -> None:
    for kind, expected in expected_rows(plan, exchange).items():
        assert traffic(plan, exchange, kind) == {pair: len(rows) for pair, rows in expected.items()}
        for rank in range(plan.num_ranks):
            received = sorted((b, *row) for (a, b), rows in expected.items() if a == rank for row in rows)
            sent = sorted((a, *row) for (a, b), rows in expected.items() if b == rank for row in rows)
            assert listed(plan, exchange, kind, rank, sent=False) == received
            assert listed(plan, exchange, kind, rank, sent=True) == sent


@settings(max_examples=40)
@given(plans())
def test_rows_are_counted_at_both_ends_exactly_or_at_most(plan: ContextPlan) -> None:
    for exchange in EXCHANGES:
        exact, bounds = row_counts.listed(plan, exchange), row_counts.bounds(plan, exchange)
        for kind in KINDS:
            rows = np.zeros((plan.num_ranks, plan.num_ranks), np.int64)
            for pair, count in traffic(plan, exchange, kind).items():
                rows[pair] = count
            expected = rows.sum(axis=1), rows.sum(axis=0), rows.max(axis=1), rows.max(axis=0)
            assert [x.tolist() for x in exact[kind][:4]] == [x.tolist() for x in expected]
            assert [x.tolist() for x in exact[kind].reversed()[:4]] == [expected[i].tolist() for i in (1, 0, 3, 2)]
            assert all((most >= x).all() for most, x in zip(bounds[kind][:4], expected, strict=True))
            assert exact[kind].messages == np.count_nonzero(rows)
            for rank in range(plan.num_ranks):
                assert row_counts.rows_received(plan, exchange, kind, rank) == expected[0][rank]
        assert row_counts.counts(plan, exchange, 1 << 40) == (exact, True)
        if plan.num_ranks:
            some, is_exact = row_counts.counts(plan, exchange, 0)
            assert not is_exact
            assert some is bounds


@pytest.mark.parametrize(("spans", "expected"), [(3, [1] * 5), (12, [2, 2, 1]), (1 << 16, [5])], ids=["one", "two", "all"])
def test_bounds_are_made_for_as_many_ranks_as_their_pairs_are_spans(spans: int, expected: list[int]) -> None:
    plan = plan_of(DilatedPattern((61,), (2,)), 97, 5, 3)
    whole = row_counts.bounds(plan, "gather")["kv"]
    with mock.patch.object(planning, "SPANS", spans):
        some = list(plan.some_ranks())
        parts = row_counts._counts.__wrapped__(plan, "gather", row_counts._most_rows)["kv"]
    assert [len(ranks) for ranks in some] == expected
    assert [rank for ranks in some for rank in ranks] == list(range(5))
    assert [column.tolist() for column in parts[:4]] == [column.tolist() for column in whole[:4]]


def test_long_lists_of_a_description_are_short_and_differ() -> None:
    def documents(number: int) -> Any:
        given = tuple((3 * i, 3) for i in range(number))
        return context_plan(DilatedPattern((8,), (1,)), (3 * number,), 1, range(1), 1, given, False).description["documents"]

    assert documents(64) == [[3 * i, 3] for i in range(64)]
    assert len(documents(65)) < 100
    assert documents(65) != documents(66)


def piece_softmaxes(piece: Piece, shard_start: int, *, is_causal: bool) -> Iterator[tuple[int, int, tuple[int, ...], int]]:
    """(head, query, keys, zeros) in tokens of the whole sequence, as the fields of `Piece` are documented."""
    for s in range(piece.segments):
        for c in range(piece.offsets):
            for j in range(piece.heads):
                head = piece.head + c * piece.offset_head_step + j * piece.head_step
                first = shard_start + piece.token + s * piece.segment_stride + c
                tokens = range(first, first + piece.rows * piece.row_stride, piece.row_stride)
                for query in tokens:
                    yield head, query, tuple(key for key in tokens if key <= query or not is_causal), piece.zero_keys


def task_softmaxes(task: Task, *, is_causal: bool) -> Iterator[Softmax]:
    """As the fields of `Task` are documented."""
    assert len(task.heads) == len(task.tokens) > 0
    for head, token in zip(task.heads, task.tokens):
        for _, first, end in task.sources:
            for row in range(max(first, task.queries[0]), min(end, task.queries[1])):
                keys = [token + k * task.stride for k in range(*task.keys) if k <= row or not is_causal]
                yield Softmax(task.branch, head, token + row * task.stride, tuple(keys), task.zero_keys)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
@example(plan=of_equal_documents(zero_padding=False))
@example(plan=of_equal_documents(zero_padding=True))
@given(plan=plans() | wild_plans())
def test_pieces_and_tasks_of_all_ranks_compute_every_softmax_once_on_its_rank(plan: ContextPlan, exchange: str) -> None:
    expected = Counter((rank, *softmax[1:]) for rank, softmax in placed(plan, exchange))
    of_branches = {(rank, softmax) for rank, softmax in placed(plan, exchange)}
    found: Counter[tuple[Any, ...]] = Counter()
    for rank in range(plan.num_ranks):
        for piece in local_pieces(plan, rank):
            found.update((rank, *x) for x in piece_softmaxes(piece, plan.limits[rank], is_causal=plan.is_causal))
        found_tasks = tasks_of(plan, exchange, rank)
        assert len({task.shape for task in found_tasks}) == len(found_tasks)
        for task in found_tasks:
            for softmax in task_softmaxes(task, is_causal=plan.is_causal):
                assert (rank, softmax) in of_branches
                found[(rank, *softmax[1:])] += 1
    assert found == expected


@given(plans())
def test_pieces_of_a_rank_lie_in_its_shard_and_those_that_tile_hold_it_once(plan: ContextPlan) -> None:
    tiling = next((i for i, r in enumerate(plan.pattern.dilation_rates) if r == 1 and plan.pattern.heads == "all"), None)
    for rank, length in enumerate(plan.shard_lengths):
        pieces = local_pieces(plan, rank)
        for piece in pieces:
            for _, query, keys, _ in piece_softmaxes(piece, 0, is_causal=plan.is_causal):
                assert all(0 <= token < length for token in (query, *keys))
        tiles = [piece for piece in pieces if piece.covers]
        assert list(pieces[: len(tiles)]) == tiles
        held = Counter((x[0], x[1]) for piece in tiles for x in piece_softmaxes(piece, 0, is_causal=False))
        shard = range(plan.limits[rank], plan.limits[rank + 1])
        cut = tiling is not None and any(
            is_cut(plan, segment) and any(token in shard for token in segment.tokens) for segment in definition(plan)[tiling]
        )
        everything = Counter((head, token) for head in range(len(plan.within)) for token in range(length))
        assert held == (everything if tiling is not None and not cut else Counter())


@pytest.mark.parametrize("exchange", EXCHANGES)
@given(plan=plans())
def test_pairs_are_those_of_real_queries_and_keys(plan: ContextPlan, exchange: str) -> None:
    scored = [0] * plan.num_ranks
    for rank, softmax in placed(plan, exchange):
        scored[rank] += len(softmax.keys)
    assert cost_model.pairs(plan, exchange).tolist() == scored


SIZES = st.fixed_dictionaries(
    {
        "head_dim": st.sampled_from((3, 24)),
        "itemsize": st.sampled_from((2, 4, 8)),
        "batch": st.integers(1, 3),
        "key_padding_mask": st.booleans(),
        "lse_size": st.sampled_from((4, 8)),
    }
)


def received_rows(plan: ContextPlan, exchange: str, kind: str, *, returned: bool = False) -> np.ndarray:
    rows = np.zeros(plan.num_ranks, np.int64)
    for (receiver, sender), count in traffic(plan, exchange, kind).items():
        rows[sender if returned else receiver] += count
    return rows


@settings(max_examples=40)
@given(plans(), SIZES)
def test_bytes_and_buffers_are_those_of_the_rows(plan: ContextPlan, sizes: dict[str, Any]) -> None:
    element, group, dim = sizes["batch"] * sizes["itemsize"], plan.group, sizes["head_dim"]
    lse = sizes["batch"] * sizes["lse_size"]
    for exchange in EXCHANGES:
        kv, q = (received_rows(plan, exchange, kind) for kind in KINDS)
        kv_back, q_back = (received_rows(plan, exchange, kind, returned=True) for kind in KINDS)
        out, out_back = q_back, q  # outputs go back as their queries came
        key, query, output = (2 * dim + sizes["key_padding_mask"]) * element, group * dim * element, group * (dim * element + lse)
        again = (1 + (plan.pattern.detaches and not plan.keeps_outputs)) * kv * key if exchange == "ring" else 0 * kv
        forward, backward = cost_model.bytes_received(plan, exchange, **sizes)
        assert forward.tolist() == (kv * key + q * query + out * output).tolist()
        returned = kv_back * 2 * dim * element + q_back * query + out_back * group * 2 * (dim * element + lse)
        assert backward.tolist() == (returned + again).tolist()
        held = (kv + kv_back) * key
        if exchange == "ring":  # one message is read, one comes, one leaves
            pairs = traffic(plan, "ring", "kv")
            received, sent = (
                [max((n for pair, n in pairs.items() if pair[i] == r), default=0) for r in range(plan.num_ranks)] for i in (0, 1)
            )
            held = (2 * np.array(received) + np.array(sent)) * key
        expected = held + (q + q_back) * query + (out + out_back) * output
        assert cost_model.buffer_bytes(plan, exchange, **sizes).tolist() == expected.tolist()


@given(plans(), SIZES, st.sampled_from((1e3, 1e6, 1e9)), st.data())
def test_choice_is_the_least_time_in_the_budget(
    plan: ContextPlan, sizes: dict[str, Any], compute: float, data: st.DataObject
) -> None:
    buffers = {exchange: int(cost_model.buffer_bytes(plan, exchange, **sizes).max()) for exchange in EXCHANGES}
    budget = data.draw(st.sampled_from(sorted({b + step for b in buffers.values() for step in (-1, 0)} | {0, 1 << 40})))
    times = {}
    for exchange in EXCHANGES:
        received = zip(*(x.tolist() for x in cost_model.bytes_received(plan, exchange, **sizes)))
        # Two products forward and five backward, a multiplication and an addition for each element.
        operations = [14 * sizes["head_dim"] * plan.group * sizes["batch"] * n for n in cost_model.pairs(plan, exchange).tolist()]
        times[exchange] = max((a + b) / 1e6 + n / compute for (a, b), n in zip(received, operations))
    fitting = [exchange for exchange in EXCHANGES if buffers[exchange] <= budget]
    chosen = cost_model.choose(plan, budget=budget, speeds=cost_model.Speeds(1e6, compute), **sizes)
    if fitting:
        assert chosen in fitting
        assert times[chosen] == pytest.approx(min(times[x] for x in fitting), rel=1e-12)
    else:
        assert buffers[chosen] == min(buffers.values())


BFLOAT16 = {"head_dim": 64, "itemsize": 2}
GIGAPATH = replace(DilatedPattern.gigapath(), zero_padding=False)  # whose zero keys shift positions at this length


def test_choice_is_whole_heads_for_a_segment_of_many_ranks_gather_for_two_or_none_and_the_ring_where_no_buffers_fit() -> None:
    one = plan_of(DilatedPattern((512,), (1,)), 512, 8, 1)
    buffers = int(cost_model.buffer_bytes(one, "gather", **BFLOAT16).max())
    for plan, budget, expected in (
        (plan_of(DilatedPattern((64,), (4,)), 512, 8, 4), 0, "gather"),
        (plan_of(DilatedPattern((512,), (1,)), 512, 8, 8), 1 << 40, "heads"),
        (plan_of(DilatedPattern((128,), (1,)), 512, 8, 8), 1 << 40, "gather"),
        (one, 0, "ring"),
        (one, buffers, "gather"),
        (one, buffers - 1, "ring"),
    ):
        assert cost_model.choose(plan, budget=budget, **BFLOAT16) == expected, (plan.pattern, budget)


@pytest.mark.parametrize(("pattern", "num_ranks"), [("longnet", 64), ("gigapath", 8), ("interleaved", 8), ("gigapath", 2)])
def test_choice_by_bounds_is_that_by_exact_rows(pattern: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 1 << 16
    gigapath = replace(DilatedPattern.gigapath(max_wsi_size=65536), zero_padding=False)
    given = {"longnet": DilatedPattern.longnet(), "gigapath": gigapath}
    given["interleaved"] = replace(given["gigapath"], offsets="interleaved")
    for is_causal in (False, True):
        plan = plan_of(given[pattern], tokens, num_ranks, 8, is_causal=is_causal)
        times = {x: cost_model.seconds(plan, x, speeds=cost_model.Speeds(), **BFLOAT16).max() for x in EXCHANGES}
        for counted in (1 << 40, 0):
            monkeypatch.setattr(cost_model, "CHOICE", counted)
            chosen = cost_model.choose.__wrapped__(plan, budget=1 << 40, **BFLOAT16)
            assert times[chosen] == pytest.approx(min(times.values()), rel=1e-3)


def test_numbers_that_64_bits_do_not_hold_are_refused() -> None:
    tokens = 1 << 57
    with pytest.raises(ValueError, match=r"are below 2\*\*62, got"):
        context_plan(DilatedPattern((1 << 40,) * 64, (1,) * 64), (tokens // 2,) * 2, 4, range(4), 1, ((0, tokens),), False)


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("LINK", "fast", "FLEXDILATED_LINK_SPEED must be a number of bytes per second above 0, got 'fast'"),
        ("COMPUTE", "0", "FLEXDILATED_COMPUTE_SPEED must be a number of floating-point operations per second above 0, got '0'"),
        ("LINK", "inf", "FLEXDILATED_LINK_SPEED must be a number of bytes per second above 0, got 'inf'"),
    ],
)
def test_speeds_of_the_environment(variable: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = cost_model.speeds_of_environment.__wrapped__
    assert read() == cost_model.Speeds()
    monkeypatch.setenv("FLEXDILATED_COMPUTE_SPEED", "2e12")
    assert read() == cost_model.Speeds(50e9, 2e12)
    monkeypatch.setenv(f"FLEXDILATED_{variable}_SPEED", value)
    with pytest.raises(ValueError, match=f"^{text}$"):
        read()


def test_default_budget_is_of_the_largest_shard_and_has_a_floor() -> None:
    uneven = context_plan(DilatedPattern((4096,), (1,)), (MILLION, 1024), 2, range(2), 3, ((0, MILLION + 1024),), False)
    assert cost_model.default_budget(uneven, head_dim=64, itemsize=2, batch=5) == 2 * MILLION * 2 * (2 + 2 * 3) * 64 * 2 * 5
    plan = plan_of(GIGAPATH, MILLION, 1024, 16)
    budget = cost_model.default_budget(plan, **BFLOAT16)
    assert budget == 128 * MILLION > 2 * 1024 * 16 * 4 * 64 * 2
    assert cost_model.choose(plan, budget=budget, **BFLOAT16) == "heads"
    ring, heads = (
        cost_model.seconds(plan, name, speeds=cost_model.Speeds(), rows=row_counts.bounds(plan, name), **BFLOAT16).max()
        for name in ("ring", "heads")
    )
    assert ring > 8 * heads


def test_the_schedules_of_many_layers_are_kept_while_they_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer has a pattern of its own; the second step builds nothing."""
    schedule.cache_clear()
    plans = [plan_of(DilatedPattern((16 + length, 64), (1, 3)), 64, 4, 3) for length in range(24)]

    def step() -> list[Schedule]:
        return [schedule(plan, "gather", rank, torch.device("cpu")) for plan in plans for rank in (0, 2)]

    first = step()
    assert len({id(each) for each in first}) == 48
    assert all(a is b for a, b in zip(first, step()))
    total = 0
    for each in first:
        tables = [part.row_index for task in each.tasks for part in (*task.queries, *task.keys)]
        tables += [index for via in (each.kv, each.q) for local in via.local.values() for _, index in local]
        total += (held := sum(x.numel() * 4 for at in tables for x in (at.first, at.lists) if x is not None))
        assert each.nbytes == held > 0
    plans_held = 2 * sum(plan.nbytes for plan in plans)
    assert schedule.nbytes == total + plans_held
    monkeypatch.setattr(schedule, "room", (total + plans_held) // 2)
    schedule.cache_clear()
    step()
    assert 8 < len(schedule) < 48
    assert schedule.nbytes <= schedule.room


@pytest.mark.slow
def test_plan_of_a_billion_tokens_on_128_ranks_holds_no_rows() -> None:
    tracemalloc.start()
    try:
        plan = plan_of(DilatedPattern.longnet(), 10**9, 128, 8)
        moved = {exchange: row_counts.bounds(plan, exchange) for exchange in EXCHANGES}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert moved["gather"]["kv"].received.sum() > 0
    assert moved["heads"]["out"].received.sum() > 0
    assert peak < 20e6
