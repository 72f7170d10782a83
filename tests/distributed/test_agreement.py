"""Ranks agree on a plan or all raise one error: as threads on each kind of store, then as processes on real groups."""

import gc
import math
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.distributed import agreement
from flexdilated.distributed.agreement import APART, Ledger, agree, withdraw
from flexdilated.distributed.answering import AnsweringStore
from flexdilated.distributed.contract import TAGS
from tests.distributed.processes import Ranks, run_ranks

PLAN = {"segment_lengths": (7, 13), "dtype": "torch.float32", "is_causal": True, "scale": None, "heads": 3}
LONG = timedelta(seconds=600)  # never waited for: a test that does fails by its error
SHORT = timedelta(milliseconds=200)

Outcome = str | None  # the error, as `Type: message`


def attempt(call: Callable[[], None]) -> Outcome:
    try:
        call()
    except (ValueError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def together(calls: Sequence[Callable[[], None]]) -> list[Outcome]:
    """What each rank met, each in its thread."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(attempt, calls))


def round_of(ledgers: Sequence[Ledger], *plans: dict[str, object], timeout: timedelta = LONG) -> list[Outcome]:
    """One round: a plan for all ranks, or one for each."""
    plans = plans * len(ledgers) if len(plans) == 1 else plans
    return together(
        [lambda ledger=ledger, plan=plan: ledger.agree(plan, timeout) for ledger, plan in zip(ledgers, plans, strict=True)]
    )


@contextmanager
def over_once(event: Callable[[], bool]) -> Iterator[None]:
    """The time of a round is over once something has happened, however busy the machine is, and not before."""
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: math.inf if event() else 0.0)
    with mock.patch.object(agreement, "time", clock):
        yield


def all_posted(*ledgers: Ledger) -> Callable[[], bool]:
    """Whether these have come to their next round."""
    keys = [f"{ledger.life}/{ledger.round}/{ledger.rank}" for ledger in ledgers]
    return lambda: ledgers[0].store.check(keys)


def ledgers_on(store: dist.Store, size: int) -> list[Ledger]:
    return [Ledger(store, rank, range(size)) for rank in range(size)]


@pytest.fixture
def pair() -> list[Ledger]:
    return ledgers_on(dist.HashStore(), 2)


@pytest.fixture
def trio() -> list[Ledger]:
    return ledgers_on(dist.HashStore(), 3)


@pytest.fixture(params=["hash", "file", "tcp"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[dist.Store]]:
    """The store as three ranks see it, each through its own client where the kind has clients."""
    if request.param == "hash":
        yield [dist.HashStore()] * 3
    elif request.param == "file":
        yield [dist.FileStore(str(tmp_path / "store"), 3) for _ in range(3)]
    else:
        server = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
        yield [server, *(dist.TCPStore("127.0.0.1", server.port, 3, is_master=False) for _ in range(2))]


class Counted:
    """A store that counts the calls it gets."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.calls = store, 0

    def __getattr__(self, name: str) -> object:
        self.calls += 1
        return getattr(self.store, name)


def test_agree_on_every_store(stores: list[dist.Store]) -> None:
    asked = [AnsweringStore(dist.PrefixStore("p", store), LONG) for store in stores]
    ledgers = [Ledger(store, rank, range(3)) for rank, store in enumerate(asked)]
    assert round_of(ledgers, PLAN) == [None] * 3
    differ = "ValueError: ranks must agree on heads, got 3 on ranks 0, 2 and 5 on rank 1"
    assert round_of(ledgers, PLAN | {"x": 1}, PLAN | {"x": 1, "heads": 5}, PLAN | {"x": 1}) == [differ] * 3
    calls = [lambda: ledgers[0].agree({}, LONG), lambda: ledgers[1].agree({}, LONG), lambda: ledgers[2].withdraw("é must be e")]
    assert together(calls) == ["ValueError: rank 2 refused: é must be e"] * 2 + [None]
    late = "TimeoutError: rank 1 must take part in dilated_attention over this mesh within 0.2 s, it did not"
    with over_once(all_posted(ledgers[0], ledgers[2])):
        for outcome in round_of([ledgers[0], ledgers[2]], {}, timeout=SHORT):
            assert outcome.startswith(late)
    assert attempt(lambda: ledgers[1].agree({}, LONG)).startswith(late)
    assert round_of(ledgers, {}) == [None] * 3


def host_a_store(place: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place.send(store.port)
    place.recv()


@pytest.mark.ranks
def test_silence_of_a_store_ends() -> None:
    """A host that is stopped takes the questions of its clients, and never answers."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    host = multiprocessing.get_context("spawn").Process(target=host_a_store, args=(there,), daemon=True)
    host.start()
    try:
        ledger = Ledger(AnsweringStore(dist.TCPStore("127.0.0.1", here.recv(), is_master=False), SHORT), 0, range(2))
        assert host.pid is not None
        os.kill(host.pid, signal.SIGSTOP)
        for plan in (PLAN, {}):
            with pytest.raises(TimeoutError, match=r"the store of the ranks must answer within 0.2 s, it did not"):
                ledger.agree(plan, SHORT)
    finally:
        host.kill()
        host.join()


def test_a_rank_that_withdraws_from_a_silent_store_has_its_own_error_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def size(self) -> int:
            return 2

    for gone in (TimeoutError("silent"), dist.DistNetworkError("ended")):
        store = AnsweringStore(dist.HashStore(), SHORT)
        ledger, store.gone = Ledger(store, 0, range(2)), gone
        monkeypatch.setattr("flexdilated.distributed.agreement._ledger", lambda group, ledger=ledger: ledger)
        withdraw(Group(), "é must be e")  # type: ignore[arg-type]
        with pytest.raises(type(gone), match=str(gone)):
            ledger.withdraw("é must be e")


class Broken:
    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def add(self, key: str, amount: int) -> int:
        self.calls += 1
        raise self.error


def test_a_store_that_has_ended_is_named_and_not_asked_again() -> None:
    broken = Broken(dist.DistNetworkError("Connection reset by peer\nC++ CapturedTraceback:\n#4 std::function"))
    store = AnsweringStore(broken, LONG)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError, match=r"^the store of the ranks must answer, it is gone: [^\n]* rank 0 [^\n]*$"):
            store.add("x", 1)
    assert broken.calls == 1


@pytest.mark.parametrize("error", [dist.DistStoreError("wait timeout"), ValueError("x")])
def test_other_errors_of_a_store_pass(error: Exception) -> None:
    store = AnsweringStore(Broken(error), LONG)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            store.add("x", 1)


def leave_with_the_store(rank: int, _: None, folder: Path) -> tuple[str, str]:
    """Rank 0 hosts the store and ends; what rank 1 then says of a plan of its own, and rank 2 of wrong arguments."""
    found = folder / "port"
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        (folder / "port.part").write_text(str(store.port))
        (folder / "port.part").rename(found)
    else:
        while not found.exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int(found.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=LONG)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
    q, pattern = torch.zeros(1, 20, 1, 4), DilatedPattern((8, 64), (1, 2))
    dilated_attention(q, q, q, pattern, mesh=mesh)
    dist.barrier()
    if rank == 0:
        os._exit(0)
    time.sleep(1.0)
    try:
        dilated_attention(q, q, q, pattern, mesh=mesh, is_causal=True, scale=math.nan if rank == 2 else None)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("a call without rank 0 must fail")


@pytest.mark.ranks
def test_where_the_store_ends_with_its_rank_the_others_say_so_or_tell_their_own_error(tmp_path: Path) -> None:
    ranks = Ranks(3, tmp_path, timeout=None)
    try:
        found = ranks.run(leave_with_the_store, tmp_path, ending=(0,))
    finally:
        ranks.kill()
    name, told = found[1]
    assert name == "DistNetworkError"
    assert told.startswith("the store of the ranks must answer, it is gone: the process that hosts it")
    assert found[2] == ("ValueError", "scale must be finite, got nan")


@pytest.mark.parametrize(
    ("field", "first", "second", "message"),
    [
        ("dtype", "torch.float32", "torch.bfloat16", "'torch.float32' on ranks 0, 2 and 'torch.bfloat16' on rank 1"),
        ("heads", 3, 5, "3 on ranks 0, 2 and 5 on rank 1"),
        ("scale", 1.0, None, "1.0 on ranks 0, 2 and None on rank 1"),
        ("scale", 1, 1.0, "1 on ranks 0, 2 and 1.0 on rank 1"),
        ("is_causal", True, 1, "True on ranks 0, 2 and 1 on rank 1"),
        ("lengths", (7, 13), [7, 11], r"\[7, 13\] on ranks 0, 2 and \[7, 11\] on rank 1"),
        ("lengths", [7], [7, 13], r"\[7\] on ranks 0, 2 and \[7, 13\] on rank 1"),
        (
            "name",
            "a" * 150,
            "a" * 151,
            r"'a{119}\.\.\. sha256 [0-9a-f]{8} on ranks 0, 2 and 'a{119}\.\.\. sha256 [0-9a-f]{8} on rank 1",
        ),
        (
            "cu_seqlens",
            list(range(1025)),
            [*range(1000), *range(1001, 1026)],
            r"\[0, 1, 2, 3, 4, 5, 6, 7, \.\.\. \(1025 values\)\]\.\.\. sha256 (\w{8}) on ranks 0, 2 "
            r"and \[0, 1, 2, 3, 4, 5, 6, 7, \.\.\. \(1025 values\)\]\.\.\. sha256 (?!\1)\w{8} on rank 1",
        ),
    ],
)
def test_agree_names_field_values_and_ranks(trio: list[Ledger], field: str, first: object, second: object, message: str) -> None:
    outcomes = round_of(trio, PLAN | {field: first}, PLAN | {field: second}, PLAN | {field: first})
    with pytest.raises(ValueError, match=f"^ValueError: ranks must agree on {field}, got {message}$"):
        raise ValueError(outcomes[0])
    assert outcomes == outcomes[:1] * 3
    assert round_of(trio, PLAN | {field: second}) == [None] * 3


def test_agree_names_the_part_of_a_field_that_differs(pair: list[Ledger]) -> None:
    def plan(lengths: list[int], **more: object) -> dict[str, object]:
        return {"pattern": {"lengths": lengths, "offsets": "blocked", **more}, "shards": list(range(20))}

    long = [1 << i for i in range(24)]
    told = "ValueError: ranks must agree on pattern."
    assert round_of(pair, plan(long), plan([*long[:-1], 7])) == [f"{told}lengths[23], got 8388608 on rank 0 and 7 on rank 1"] * 2
    assert round_of(pair, plan([1, 2]), plan([1])) == [f"{told}lengths, got [1, 2] on rank 0 and [1] on rank 1"] * 2
    assert round_of(pair, plan([1]), plan([1], heads="all")) == [f"{told}heads, got nothing on rank 0 and 'all' on rank 1"] * 2
    assert round_of(pair, plan(long), plan(long[:-1])) == [f"{told}lengths[23], got 8388608 on rank 0 and nothing on rank 1"] * 2
    assert (
        round_of(pair, {"pattern": {}}, {})
        == ["ValueError: ranks must agree on pattern, got {} on rank 0 and nothing on rank 1"] * 2
    )
    assert round_of(pair, plan(long), plan(long)) == [None] * 2


def test_agree_accepts_equal_values_that_python_tells_apart(trio: list[Ledger]) -> None:
    nan = [{"lengths": (7, 13), "scale": float("nan")}, {"scale": float("nan"), "lengths": [7, 13]}]
    assert round_of(trio, *nan, nan[0]) == [None] * 3


def test_agree_names_missing_fields_and_every_difference(trio: list[Ledger]) -> None:
    message = (
        "ValueError: ranks must agree on heads, got 3 on rank 0 and 5 on rank 1 and nothing on rank 2"
        "; on mask, got nothing on ranks 0, 1 and 'ball' on rank 2"
    )
    assert round_of(trio, {"heads": 3}, {"heads": 5}, {"mask": "ball"}) == [message] * 3


def test_agree_shortens_long_messages() -> None:
    posts = [dict.fromkeys(map(str, range(17)), rank) for rank in range(11)]
    message = round_of(ledgers_on(dist.HashStore(), 11), *posts)[0]
    assert message.endswith(", ... (17 fields)")
    assert "on 7, got 0 on rank 0 and 1 on rank 1 and " in message
    assert "7 on rank 7, ... (11 values); on 1, got" in message
    outcomes = round_of(ledgers_on(dist.HashStore(), 11), *[{"heads": rank == 9} for rank in range(11)])
    assert (
        outcomes
        == ["ValueError: ranks must agree on heads, got False on ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (10 ranks) and True on rank 9"]
        * 11
    )


def test_agree_rejects_other_types(pair: list[Ledger]) -> None:
    with pytest.raises(TypeError, match=r"plan must map names to JSON types, got another: Object of type dtype is not"):
        pair[0].agree({"dtype": torch.float32}, LONG)
    assert round_of(pair, {"dtype": "torch.float32"}) == [None] * 2  # the refused call was no round


def test_agreed_plan_touches_no_store() -> None:
    store = Counted(dist.HashStore())
    ledgers = ledgers_on(store, 2)
    plans = [PLAN | {"heads": heads} for heads in (3, 5)]
    for plan in plans:
        assert round_of(ledgers, plan) == [None] * 2
    calls = store.calls
    for plan in plans:
        ledgers[0].agree(dict(reversed(plan.items())), SHORT)
    assert store.calls == calls > 0


def test_differing_plan_is_not_agreed(pair: list[Ledger]) -> None:
    for _ in range(2):
        assert (
            round_of(pair, {"heads": 3}, {"heads": 5})
            == ["ValueError: ranks must agree on heads, got 3 on rank 0 and 5 on rank 1"] * 2
        )


def test_remembered_plans_are_bounded_in_the_order_of_rounds(pair: list[Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MAX_AGREED", 2)
    for heads in (3, 5):
        assert round_of(pair, {"heads": heads}) == [None] * 2
    pair[0].agree({"heads": 3}, SHORT)  # a use by one rank alone, as beside a rank that refuses, moves nothing
    assert round_of(pair, {"heads": 7}) == [None] * 2
    assert [len(ledger.agreed) for ledger in pair] == [2, 2]
    for heads in (5, 7):
        pair[0].agree({"heads": heads}, SHORT)
    assert round_of(pair, {"heads": 3}) == [None] * 2
    assert [ledger.round for ledger in pair] == [4, 4]


def test_withdrawal_before_the_others_come_and_after(trio: list[Ledger]) -> None:
    trio[1].withdraw("q must be a tensor, got list")
    refusal = "ValueError: rank 1 refused: q must be a tensor, got list"
    assert round_of([trio[0], trio[2]], PLAN) == [refusal] * 2

    def later() -> None:
        while not trio[0].store.check(["1/1/0"]):
            time.sleep(0.001)
        trio[1].withdraw("scale must be finite, got nan")

    outcomes = together([lambda: trio[0].agree(PLAN, LONG), later])  # rank 2 has not come: rank 0 does not wait for it
    refusal = "ValueError: rank 1 refused: scale must be finite, got nan"
    assert outcomes == [refusal, None]
    assert attempt(lambda: trio[2].agree(PLAN, LONG)) == refusal
    assert round_of(trio, PLAN) == [None] * 3


def test_ranks_that_all_withdraw_go_on(pair: list[Ledger]) -> None:
    for ledger in pair:
        ledger.withdraw("q must be a tensor, got list")
    assert round_of(pair, PLAN) == [None] * 2


def test_withdrawal_beside_an_agreed_plan_is_no_error_in_later_rounds(pair: list[Ledger]) -> None:
    assert round_of(pair, PLAN) == [None] * 2
    for calls in (1, 3):
        pair[1].withdraw("scale must be finite, got nan")
        for ledger in pair:
            for _ in range(calls - (ledger is pair[1])):
                ledger.agree(PLAN, SHORT)
        assert round_of(pair, PLAN | {"heads": calls}) == [None] * 2
    pair[0].agree(PLAN, SHORT)
    pair[1].agree(PLAN, SHORT)
    pair[1].withdraw("scale must be finite, got nan")  # of the call in which the other waits
    assert attempt(lambda: pair[0].agree({}, LONG)) == "ValueError: rank 1 refused: scale must be finite, got nan"
    assert round_of(pair, {}) == [None] * 2


@pytest.mark.parametrize("seed", range(30))
def test_refusals_stop_the_calls_that_they_belong_to_and_no_others(seed: int) -> None:
    """Random programs, each rank at its own pace: it meets a refusal exactly where its own call is new and another's is refused."""
    rng = random.Random(seed)
    size = rng.choice((2, 3, 4))
    steps, known = [], set()
    for _ in range(25):
        plan = rng.randint(0, 5)
        refusing = {rank for rank in range(size) if rng.random() < 0.15}
        met = {rank for rank in range(size) if rank not in refusing} if refusing and plan not in known else set()
        if not refusing:
            known.add(plan)
        steps.append((plan, refusing, met))
    ledgers = ledgers_on(dist.HashStore(), size)

    def program(rank: int) -> None:
        pauses = random.Random(rank)
        for number, (plan, refusing, met) in enumerate(steps):
            time.sleep(pauses.choice((0.0, 0.0, 0.002)))
            if rank in refusing:
                ledgers[rank].withdraw(f"step {number}")
                continue
            outcome = attempt(lambda plan=plan: ledgers[rank].agree({"plan": plan}, LONG))
            if rank in met:
                assert outcome in {f"ValueError: rank {other} refused: step {number}" for other in refusing}, (number, outcome)
            else:
                assert outcome is None, (number, outcome)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(program, range(size)))


def test_rounds_tell_ranks_that_made_other_calls(pair: list[Ledger]) -> None:
    assert round_of(pair, PLAN) == [None] * 2
    for ledger in pair:
        assert [ledger.number(), ledger.number()] == [1, 2]
    assert pair[1].number() == 3
    message = "ValueError: ranks must agree on how many calls they made before this one, got 2 on rank 0 and 3 on rank 1"
    assert round_of(pair, {}) == [message] * 2
    assert round_of(pair, {}) == [None] * 2
    assert [ledger.number() for ledger in pair] == [4, 4]


@pytest.mark.parametrize("others_exchange", [False, True])
def test_a_refused_call_counts_whether_the_others_exchanged_rows_or_not(pair: list[Ledger], others_exchange: bool) -> None:
    assert round_of(pair, PLAN) == [None] * 2
    pair[0].agree(PLAN, SHORT)
    if others_exchange:
        assert pair[0].number() == 1
    pair[1].withdraw("scale must be finite, got nan")
    assert round_of(pair, {}) == [None] * 2
    assert [ledger.number() for ledger in pair] == [2, 2]


def test_a_rank_that_goes_on_after_its_refusal_takes_another_number_than_those_that_wait(pair: list[Ledger]) -> None:
    assert round_of(pair, PLAN) == [None] * 2
    pair[1].withdraw("scale must be finite, got nan")
    for ledger in pair:
        ledger.agree(PLAN, SHORT)
    assert [ledger.number() for ledger in pair] == [1, APART + 2]
    others = {pair[0].number() % TAGS for _ in range(1000)}  # of calls that it has skipped, too, however many
    assert not others & {pair[1].number() % TAGS for _ in range(1000)}
    message = "ValueError: ranks must agree on how many calls they made, one of which a rank refused, got "
    assert round_of(pair, {}) == [f"{message}0 on rank 0 and 1 on rank 1 more than the least of them"] * 2
    assert round_of(pair, {}) == [None] * 2
    assert len({ledger.number() for ledger in pair}) == 1


def test_missing_ranks_are_named_to_all_and_to_themselves() -> None:
    ledgers = ledgers_on(dist.HashStore(), 5)
    with over_once(all_posted(ledgers[0], ledgers[3])):
        outcomes = round_of([ledgers[rank] for rank in (0, 3)], PLAN, timeout=SHORT)
    message = (
        "TimeoutError: ranks 1, 2, 4 must take part in dilated_attention over this mesh within 0.2 s, they did not: they ended, "
        "are slower, or call it with an already agreed plan"
    )
    assert outcomes == [message] * 2
    assert round_of([ledgers[rank] for rank in (1, 2, 4)], PLAN) == [f"{message}; that was before this rank came"] * 3
    assert round_of(ledgers, PLAN) == [None] * 5


@pytest.mark.parametrize(
    ("heads", "outcome"), [(3, None), (5, "ValueError: ranks must agree on heads, got 3 on rank 0 and 5 on rank 1")]
)
def test_last_rank_that_ends_before_it_compares(
    pair: list[Ledger], heads: int, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def end(here: str, outcome: tuple[str, str, int]) -> bytes:
        ended.set()
        raise TimeoutError("ended")

    monkeypatch.setattr(pair[1], "_settle", end)

    def last() -> None:
        while not pair[1].store.check(["1/0/arrived"]):
            time.sleep(0.001)
        pair[1].agree({"heads": heads}, LONG)

    with over_once(ended.is_set):
        assert together([lambda: pair[0].agree({"heads": 3}, SHORT), last]) == [outcome, "TimeoutError: ended"]


def test_a_call_in_which_no_other_rank_came_has_a_number(pair: list[Ledger]) -> None:
    """The others may wait in it, under a plan that they know, for rows of this rank, whose next call has another number."""
    assert [ledger.number() for ledger in pair] == [1, 1]
    with over_once(all_posted(pair[0])):
        assert str(attempt(lambda: pair[0].agree(PLAN, SHORT))).startswith("TimeoutError: rank 1 ")
    assert [ledger.number() for ledger in pair] == [APART + 3, 2]
    assert str(attempt(lambda: pair[1].agree(PLAN, SHORT))).startswith("TimeoutError: rank 1 ")  # it comes late, to its own number
    assert [ledger.number() for ledger in pair] == [APART + 4] * 2


def test_numbers_of_calls_are_never_used_twice(pair: list[Ledger]) -> None:
    """Also where a refusal is behind them: a backward may still wait under the last number."""
    numbers = []
    for step in range(3):
        numbers += [[ledger.number() for ledger in pair]]
        together([lambda: pair[0].agree({"refused": step}, LONG), lambda: pair[1].withdraw("x")])  # noqa: B023
        numbers += [[ledger.number() for ledger in pair]]
        assert round_of(pair, {"step": step}) == [None] * 2
        assert None not in round_of(pair, {"differ": step}, {"differ": -1})
    first, second = zip(*numbers)
    assert first == second
    assert len({number % TAGS for number in first}) == len(first)


def test_a_call_of_another_thread_that_is_refused_during_a_round_is_counted_after_it(
    pair: list[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "_ledger", lambda group: pair[0])
    group = dist.group.WORLD

    def first() -> None:
        with agreement.in_turn(group):  # type: ignore[arg-type]
            pair[0].agree(PLAN, LONG)
            assert pair[0].number() == 1

    def second() -> None:
        while not pair[1].store.check(["1/0/arrived"]):
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="one thread at a time"), agreement.in_turn(group):  # type: ignore[arg-type]
            pass
        pair[1].agree(PLAN, LONG)

    assert together([first, second]) == [None] * 2
    assert [ledger.number() for ledger in pair] == [APART + 3, 1]


@pytest.mark.parametrize("refuses", [False, True])
def test_a_round_whose_time_is_over_is_that_of_one_call(pair: list[Ledger], refuses: bool) -> None:
    """A rank that refuses, or makes, an earlier call of a known plan meets the end of that round in the call that it was for."""
    assert round_of(pair, {}) == [None] * 2
    pair[0].agree({}, SHORT)
    with over_once(all_posted(pair[0])):
        late = attempt(lambda: pair[0].agree(PLAN, SHORT))
    assert str(late).startswith("TimeoutError: rank 1 must take part")
    if refuses:
        pair[1].withdraw("v must have 5 columns, got 7")
    else:
        pair[1].agree({}, SHORT)
    assert str(attempt(lambda: pair[1].agree(PLAN, SHORT))).startswith(str(late))
    assert round_of(pair, PLAN) == [None] * 2


def test_a_round_that_another_rank_was_alone_in_is_left_behind(pair: list[Ledger]) -> None:
    """By a rank that has made more calls since: all of plans that it knew, the first of them instead of that round's."""
    assert round_of(pair, {}) == [None] * 2
    with over_once(all_posted(pair[0])):
        assert str(attempt(lambda: pair[0].agree(PLAN, SHORT))).startswith("TimeoutError: rank 1 must take part")
    pair[1].agree({}, SHORT)
    assert round_of(pair, {"next": 1}) == [None] * 2


def test_store_does_not_grow_with_plans(stores: list[dist.Store]) -> None:
    ledgers = [Ledger(dist.PrefixStore("p", store), rank, range(3)) for rank, store in enumerate(stores)]
    keys = []
    for step in range(7):
        assert round_of(ledgers, {"step": step}) == [None] * 3
        assert None not in round_of(ledgers, *[{"step": step, "rank": rank} for rank in range(3)])
        together([lambda: ledgers[0].agree({}, LONG), lambda: ledgers[1].withdraw("x"), lambda: ledgers[2].agree({}, LONG)])
        keys.append(stores[0].num_keys())
    assert keys == keys[:1] * 7
    for _ in range(3):  # a rank that only ever withdraws
        together([lambda: ledgers[0].agree({}, LONG), lambda: ledgers[1].withdraw("x"), lambda: ledgers[2].agree({}, LONG)])
    assert stores[0].num_keys() <= keys[0]


@pytest.mark.parametrize("alone", [1, 2, 3])
def test_calls_that_a_rank_made_alone_are_compared_once_another_has_refused_one(pair: list[Ledger], alone: int) -> None:
    """Which of its calls was it? Of one call it is that one; of more it may be none of them, but the next."""
    assert round_of(pair, PLAN) == [None] * 2
    for _ in range(2):
        pair[1].agree(PLAN, SHORT)
    assert round_of(pair, PLAN | {"heads": 5}) == [None] * 2  # without a refusal nobody minds
    for _ in range(alone):
        pair[1].agree(PLAN, SHORT)
    pair[0].withdraw("no memory")
    found = round_of(pair, PLAN | {"heads": 7})
    if alone == 1:
        assert found == [None] * 2
    else:
        message = "ValueError: ranks must agree on how many calls they made, one of which a rank refused, got "
        assert found == [f"{message}0 on rank 0 and {alone - 1} on rank 1 more than the least of them"] * 2
    assert round_of(pair, PLAN | {"heads": 7}) == [None] * 2


def test_keys_of_an_earlier_life_are_not_read() -> None:
    store = dist.HashStore()
    earlier = ledgers_on(store, 2)
    assert round_of(earlier, PLAN) == [None] * 2
    pair = ledgers_on(store, 2)
    assert attempt(lambda: pair[0].agree(PLAN, SHORT)).startswith("TimeoutError: rank 1 ")  # not met by rank 1's earlier post
    assert attempt(lambda: pair[1].agree(PLAN, SHORT)).startswith("TimeoutError: rank 1 ")
    assert round_of(pair, PLAN) == [None] * 2
    pair[1].withdraw("q must be a tensor, got list")
    assert round_of(ledgers_on(store, 2), PLAN) == [None] * 2


# Processes: real groups, one start for each world size.


def world_of_two(rank: int, size: int, path: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, size)
    for life in range(2):  # the same name, each life under a prefix of its own
        dist.init_process_group("gloo", store=dist.PrefixStore(str(life), store), rank=rank, world_size=size, timeout=LONG)
        group = dist.group.WORLD
        collectives = group._get_sequence_number_for_group()
        agree(group, PLAN)
        agree(group, PLAN)
        outcome = attempt(lambda group=group: agree(group, PLAN | {"dtype": ["float32", "float64"][rank]}))
        assert outcome == "ValueError: ranks must agree on dtype, got 'float32' on rank 0 and 'float64' on rank 1", outcome
        if rank == 1:
            withdraw(group, "q must be a tensor, got list")
        else:
            outcome = attempt(lambda group=group: agree(group, PLAN | {"heads": 5}))
            assert outcome == "ValueError: rank 1 refused: q must be a tensor, got list", outcome
        agree(group, PLAN | {"heads": 5})
        assert group._get_sequence_number_for_group() == collectives
        dist.barrier()
        assert group._get_sequence_number_for_group() > collectives
        assert len(agreement._ledgers) == 1
        dist.destroy_process_group()
        del group
        gc.collect()
        assert len(agreement._ledgers) == 0


def world_of_four(rank: int, size: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=LONG)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    dp, cp, world = mesh.get_group("dp"), mesh.get_group("cp"), dist.group.WORLD
    row, column = divmod(rank, 2)
    agree(world, PLAN)
    for group, index in ((dp, row), (cp, column)):
        group.set_timeout(LONG)
        assert group.rank() == index
        agree(group, {"step": 0})
    agree(cp, {"row": row})  # each group its own plan
    outcome = attempt(lambda: agree(cp, {"heads": 3 + 2 * (rank == 3)}))  # one group differs, the other does not
    expected = "ValueError: ranks must agree on heads, got 3 on rank 2 and 5 on rank 3" if row else None
    assert outcome == expected, outcome
    agree(dp, {"column": column})
    agree(mesh["cp"].get_group(), {"step": 1})

    if rank == 2:
        withdraw(world, "v must have 5 columns, got 7")
    else:
        outcome = attempt(lambda: agree(world, PLAN | {"v": 5}))
        assert outcome == "ValueError: rank 2 refused: v must have 5 columns, got 7", outcome
    agree(world, PLAN | {"v": 7})

    dist.barrier()
    world.set_timeout(timedelta(seconds=1))
    if rank != 3:  # a rank that never comes
        outcome = attempt(lambda: agree(world, {"step": 2}))
        message = (
            r"TimeoutError: ranks? .*3 must take part in dilated_attention over this mesh within 1 s, "  # others may be late too
        )
        assert outcome is not None, "agreed without rank 3"
        assert re.match(message, outcome), outcome
    world.set_timeout(LONG)
    dist.barrier()


@pytest.mark.ranks
def test_agree_in_two_processes_over_two_groups_of_one_name(tmp_path: Path) -> None:
    run_ranks(world_of_two, 2, tmp_path, 2, str(tmp_path / "store"), timeout=None)


@pytest.mark.ranks
def test_agree_on_the_axes_of_a_mesh_of_four_processes(tmp_path: Path) -> None:
    run_ranks(world_of_four, 4, tmp_path, 4, str(tmp_path / "store"), timeout=None)


def test_group_of_one_needs_no_round() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        agree(dist.group.WORLD, PLAN)
        withdraw(dist.group.WORLD, "alone")
        assert dist.group.WORLD not in agreement._ledgers
    finally:
        dist.destroy_process_group()
