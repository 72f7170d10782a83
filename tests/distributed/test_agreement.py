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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from itertools import combinations
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
from flexdilated.distributed import ledger as ledger_module
from flexdilated.distributed.agreement import agree, withdraw
from flexdilated.distributed.answering import AnsweringStore
from flexdilated.distributed.contract import TAGS
from flexdilated.distributed.ledger import APART, Ledger
from tests.distributed.processes import Ranks, run_ranks

PLAN = {"segment_lengths": (7, 13), "dtype": "torch.float32", "is_causal": True, "scale": None, "heads": 3}
LONG = timedelta(seconds=600)  # never waited for: a test that does fails by its error
SHORT = timedelta(milliseconds=200)


class FaultError(Exception):
    """Of one rank alone."""


Outcome = str | None  # the error, as `Type: message`


def attempt(call: Callable[[], None]) -> Outcome:
    try:
        call()
    except (ValueError, TimeoutError, RuntimeError, FaultError) as error:
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
    with mock.patch.object(ledger_module, "time", clock):
        yield


def all_posted(*ledgers: Ledger) -> Callable[[], bool]:
    """Whether these have come to their next round."""
    keys = [f"{ledger.life}/{ledger.page}/{ledger.round}/{ledger.rank}" for ledger in ledgers]
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
    with Ranks(3, tmp_path, timeout=None) as ranks:
        found = ranks.run(leave_with_the_store, tmp_path, ending=(0,))
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
    monkeypatch.setattr(ledger_module, "MAX_AGREED", 2)
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
        while not trio[0].store.check(["1/0/1/0"]):
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


def lost_by(reason: str) -> str:
    return (
        f"RuntimeError: ranks may be at different calls over this mesh since an error: {reason}; put each step in "
        "flexdilated.distributed.shared_failures of this mesh, from which all go on together"
    )


def test_a_refusal_that_others_meet_in_their_call_is_one_of_all(pair: list[Ledger]) -> None:
    """Before the next call with messages all compare, whether they know its plan or not."""
    assert round_of(pair, PLAN) == [None] * 2
    for _ in range(2):
        for ledger in pair:
            ledger.agree(PLAN, SHORT)
        pair[1].withdraw("scale must be finite, got nan")
        assert attempt(lambda: pair[0].agree({}, LONG)) == "ValueError: rank 1 refused: scale must be finite, got nan"
        for ledger in pair:
            ledger.agree(PLAN, SHORT)
        rounds = pair[0].round
        assert together([lambda ledger=ledger: (ledger.number(LONG), None)[1] for ledger in pair]) == [None] * 2
        assert [ledger.round for ledger in pair] == [rounds + 1] * 2
        assert len({ledger.number(SHORT) for ledger in pair}) == 1  # without another round


@pytest.mark.parametrize("others_exchange", [False, True])
def test_a_refusal_that_others_meet_in_a_later_call_ends_all_calls(pair: list[Ledger], others_exchange: bool) -> None:
    """They have made the call that it is of: did that rank leave it alone out, or all that follow in its model?"""
    assert round_of(pair, PLAN) == [None] * 2
    pair[0].agree(PLAN, SHORT)
    if others_exchange:
        assert pair[0].number(SHORT) == 1
    pair[1].withdraw("scale must be finite, got nan")
    refusal = "rank 1 refused: scale must be finite, got nan"
    assert (
        attempt(lambda: pair[0].agree({}, LONG))
        == f"ValueError: {refusal}; that was another call than the one that this rank is in"
    )
    lost = f"rank 0 met an error of another call than the one that it was in: {refusal}"
    assert attempt(lambda: pair[1].agree({}, LONG)) == f"ValueError: {lost}"
    for ledger in pair:
        for _ in range(2):
            assert attempt(lambda ledger=ledger: ledger.agree(PLAN, SHORT)) == lost_by(lost)
        assert attempt(lambda ledger=ledger: ledger.number(SHORT)) == lost_by(lost)
        ledger.withdraw("again")  # of which others have heard
    for ledger in pair:
        ledger.turn_page()
    assert round_of(pair, {}) == [None] * 2
    assert len({ledger.number(SHORT) for ledger in pair}) == 1


def test_a_rank_that_goes_on_after_its_refusal_is_not_paired(pair: list[Ledger]) -> None:
    """The others may wait in the refused call, under a plan that they know, for rows of this rank."""
    assert round_of(pair, PLAN) == [None] * 2
    pair[1].withdraw("scale must be finite, got nan")
    for ledger in pair:
        ledger.agree(PLAN, SHORT)
    assert pair[0].number(SHORT) == 1
    with over_once(all_posted(pair[1])):
        assert str(attempt(lambda: pair[1].number(SHORT))).startswith("TimeoutError: rank 0 must take part")
    others = {pair[0].number(SHORT) for _ in range(100)}
    assert str(attempt(lambda: pair[0].agree({}, SHORT))).startswith(
        "ValueError: rank 1 refused: scale must be finite, got nan; that"
    )
    assert str(attempt(lambda: pair[1].number(SHORT))).startswith("ValueError: rank 0 met an error of another call")
    for ledger in pair:
        ledger.turn_page()
    assert not {number % TAGS for number in others} & {pair[1].number(SHORT) % TAGS for _ in range(100)}


@pytest.mark.parametrize("turned", [False, True])
def test_a_rank_that_waits_for_all_is_met_by_one_in_a_later_call_alone(pair: list[Ledger], turned: bool) -> None:
    """Rows of the calls that it has made may be on their way."""
    here, there = pair
    for ledger in pair:
        if turned:
            ledger.turn_page()
    for _ in range(2):
        number = there.next_number()
    assert here.met(1, number + 1) is None  # it may be anywhere

    thread = threading.Thread(target=attempt, args=(lambda: there.agree({"call": "é"}, LONG),))
    thread.start()
    while (found := here.met(1, number + 1)) is None:
        time.sleep(0.001)
    assert [found[0]["call"][0], found[1]] == ["'é'", 2]
    assert here.met(1, number) is None
    assert here.met(1, number - 1) is None
    for _ in range(2):
        here.next_number()
    here.agree({"call": "é"}, LONG)
    thread.join()
    assert here.met(1, number + 1) is None  # that round is over


def stepping(
    monkeypatch: pytest.MonkeyPatch, ledgers: Sequence[Ledger], timeout: timedelta = LONG
) -> Callable[[Ledger], AbstractContextManager[None]]:
    """Steps of ledgers, which stand for their groups."""
    monkeypatch.setattr(agreement, "_ledger", lambda ledger: ledger)
    monkeypatch.setattr(agreement, "_ledgers", {ledger: ledger for ledger in ledgers})
    monkeypatch.setattr(agreement, "timeout_of", lambda ledger: timeout)
    return lambda ledger: agreement.step(ledger, str, ())  # type: ignore[arg-type]


def faulty_program(seed: int, size: int) -> tuple[list[list[tuple[int, bool]]], dict[tuple[int, int, int], str], bool]:
    """Steps of calls, each of a plan that moves rows or not; what fails where on which rank; whether an error ends its step."""
    rng = random.Random(seed)
    moves = [rng.random() < 0.7 for _ in range(5)]
    steps = [[(plan, moves[plan]) for plan in rng.choices(range(5), k=rng.randint(1, 3))] for _ in range(6)]
    places = [(rank, step, layer) for rank in range(size) for step, layers in enumerate(steps) for layer in range(len(layers))]
    faults = {place: rng.choice(["before", "refused", "behind"]) for place in rng.sample(places, rng.randint(1, 3))}
    return steps, faults, rng.random() < 0.7


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_no_two_ranks_give_one_number_to_two_calls(seed: int, in_steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails where, and is caught: of messages nobody waits for any here, so ranks run ahead as far as they can. In steps
    all ranks skip the same ones."""
    size = 2 + seed % 3
    steps, faults, ends_step = faulty_program(seed, size)
    ledgers = ledgers_on(dist.HashStore(), size)
    timeout = LONG if in_steps else SHORT
    step_of = stepping(monkeypatch, ledgers, timeout)
    seen: list[dict[int, tuple[int, int]]] = [{} for _ in ledgers]
    skipped: list[list[int]] = [[] for _ in ledgers]

    def layer(rank: int, step: int, number: int) -> None:
        ledger, (plan, moves) = ledgers[rank], steps[step][number]
        fault, before = faults.get((rank, step, number)), agreement.events_of(ledger)  # type: ignore[arg-type]
        try:
            if fault == "before":
                raise FaultError
            if fault == "refused":
                ledger.withdraw("its arguments")
                raise FaultError
            ledger.agree({"plan": plan}, timeout)
            if moves:
                seen[rank][ledger.number(timeout)] = (step, number)
            if fault == "behind":
                raise FaultError
        except Exception as error:
            agreement.tell(ledger, before, repr(error), is_backward=False)  # type: ignore[arg-type]
            if ends_step:
                raise

    def program(rank: int) -> None:
        pauses = random.Random(rank)
        for step, layers in enumerate(steps):
            time.sleep(pauses.choice((0.0, 0.0, 0.002)))
            around = step_of(ledgers[rank]) if in_steps else nullcontext()
            try:
                with around:
                    for number in range(len(layers)):
                        layer(rank, step, number)
            except (FaultError, ValueError, TimeoutError, RuntimeError):
                skipped[rank].append(step)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(program, range(size)))
    for one, other in combinations(seen, 2):
        assert {n: (one[n], other[n]) for n in one.keys() & other.keys() if one[n] != other[n]} == {}
    tags = [number % TAGS for number in {number for numbers in seen for number in numbers}]
    assert len(set(tags)) == len(tags)
    if in_steps:
        assert skipped == skipped[:1] * size
        failing = {step for _, step, _ in faults}
        if ends_step:
            assert set(skipped[0]) >= failing
        healthy = set(range(len(steps))) - failing
        assert not healthy & set(skipped[0])
        assert all(
            {step for step, _ in numbers.values()} >= healthy & {s for s, layers in enumerate(steps) if any(m for _, m in layers)}
            for numbers in seen
        )


def test_rounds_tell_ranks_that_made_other_calls(pair: list[Ledger]) -> None:
    assert round_of(pair, PLAN) == [None] * 2
    for ledger in pair:
        assert [ledger.number(SHORT), ledger.number(SHORT)] == [1, 2]
    assert pair[1].number(SHORT) == 3
    told = "ranks must agree on how many calls they made before this one, got 2 on rank 0 and 3 on rank 1"
    assert round_of(pair, {}) == [f"ValueError: {told}"] * 2
    assert round_of(pair, {}) == [lost_by(told)] * 2
    for ledger in pair:
        ledger.turn_page()
    assert round_of(pair, {}) == [None] * 2
    assert [ledger.number(SHORT) for ledger in pair] == [APART + 1] * 2


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

    def end(here: str, outcome: tuple[str, str, int, int]) -> bytes:
        ended.set()
        raise TimeoutError("ended")

    monkeypatch.setattr(pair[1], "_settle", end)

    def last() -> None:
        while not pair[1].store.check(["1/0/0/arrived"]):
            time.sleep(0.001)
        pair[1].agree({"heads": heads}, LONG)

    with over_once(ended.is_set):
        assert together([lambda: pair[0].agree({"heads": 3}, SHORT), last]) == [outcome, "TimeoutError: ended"]


def test_a_late_rank_goes_on_from_the_call_that_it_was_late_for(pair: list[Ledger]) -> None:
    """If it comes in another call, all are lost: the others may have left more out."""
    for calls in (0, 1):
        assert round_of(pair, {"calls": calls}) == [None] * 2
        with over_once(all_posted(pair[0])):
            assert str(attempt(lambda: pair[0].agree(PLAN, SHORT))).startswith("TimeoutError: rank 1 ")
        for _ in range(calls):
            pair[1].agree({"calls": 0}, SHORT)
        late = str(attempt(lambda: pair[1].agree(PLAN, SHORT)))
        assert late.startswith("TimeoutError: rank 1 ")
        assert late.endswith("that was another call than the one that this rank is in") == bool(calls)
        if not calls:
            assert round_of(pair, PLAN | {"heads": 5}) == [None] * 2
            assert [ledger.number(SHORT) for ledger in pair] == [2, 2]
    assert str(attempt(lambda: pair[0].agree(PLAN, SHORT))).startswith("ValueError: rank 1 met an error of another call than ")


def test_numbers_of_calls_are_never_used_twice(pair: list[Ledger]) -> None:
    """Also where a refusal is behind them, or a step: a backward may still wait under the last number."""
    numbers: list[list[int]] = []

    def count() -> None:
        mine: dict[int, int] = {}
        assert together([lambda at=at: mine.update({at: pair[at].number(LONG)}) for at in (0, 1)]) == [None] * 2
        numbers.append([mine[0], mine[1]])

    for turn in range(4):
        count()
        together([lambda: pair[0].agree({"refused": turn}, LONG), lambda: pair[1].withdraw("x")])  # noqa: B023
        count()
        assert round_of(pair, {"turn": turn}) == [None] * 2
        assert None not in round_of(pair, {"differ": turn}, {"differ": -1})
        count()
        if turn % 2:
            for ledger in pair:
                ledger.turn_page()
    first, second = zip(*numbers)
    assert first == second
    assert len({number % TAGS for number in first}) == len(first)


def test_calls_of_two_threads_at_once_end_all_calls(pair: list[Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was first ends well, if it does on the others."""
    monkeypatch.setattr(agreement, "_ledger", lambda group: pair[0])
    group = dist.group.WORLD

    def first() -> None:
        with agreement.in_turn(group):  # type: ignore[arg-type]
            pair[0].agree(PLAN, LONG)
            assert pair[0].number(SHORT) == 1

    def second() -> None:
        while not pair[1].store.check(["1/0/0/arrived"]):
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="one thread at a time"), agreement.in_turn(group):  # type: ignore[arg-type]
            pass
        pair[1].agree(PLAN, LONG)

    assert together([first, second]) == [None] * 2
    told = "rank 0 gave up: a thread called over the mesh during a call of another"
    assert attempt(lambda: pair[1].agree({}, LONG)) == f"ValueError: {told}"
    assert round_of(pair, {}) == [lost_by(told)] * 2


@pytest.mark.parametrize("refuses", [False, True])
def test_a_round_whose_time_is_over_is_that_of_one_call(pair: list[Ledger], refuses: bool) -> None:
    """A rank that comes late has made the calls before it, or is lost: one that it refused was another."""
    assert round_of(pair, {}) == [None] * 2
    pair[0].agree({}, SHORT)
    with over_once(all_posted(pair[0])):
        late = attempt(lambda: pair[0].agree(PLAN, SHORT))
    assert str(late).startswith("TimeoutError: rank 1 must take part")
    if refuses:
        pair[1].withdraw("v must have 5 columns, got 7")
        assert str(attempt(lambda: pair[1].agree(PLAN, SHORT))).startswith(
            "RuntimeError: ranks may be at different calls over this mesh"
        )
        assert str(attempt(lambda: pair[0].agree(PLAN, SHORT))).startswith("ValueError: rank 1 met an error of another call")
    else:
        pair[1].agree({}, SHORT)
        assert str(attempt(lambda: pair[1].agree(PLAN, SHORT))).startswith(str(late))
        assert round_of(pair, PLAN) == [None] * 2


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


@pytest.mark.parametrize("refused", [False, True])
def test_calls_that_a_rank_made_alone_are_compared_behind_a_refusal(pair: list[Ledger], refused: bool) -> None:
    """Without one nobody minds: they moved nothing."""
    assert round_of(pair, PLAN) == [None] * 2
    if refused:
        pair[0].withdraw("no memory")
        assert attempt(lambda: pair[1].agree({}, LONG)) == "ValueError: rank 0 refused: no memory"
    for _ in range(2):
        pair[1].agree(PLAN, SHORT)
    message = "ValueError: ranks must agree on how many calls they made since one was refused, got 1 on rank 0 and 3 on rank 1"
    assert round_of(pair, PLAN | {"heads": 7}) == [message if refused else None] * 2


def test_all_ranks_leave_a_step_together(trio: list[Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    step = stepping(monkeypatch, trio)
    ended: list[int] = []

    def program(ledger: Ledger, error: BaseException | None, wait: bool) -> None:
        with step(ledger):
            if wait:  # until the others are at the end: they wait there
                while not all(ledger.store.check([f"{ledger.life}/{ledger.page}/0/{rank}"]) for rank in (1, 2)):
                    time.sleep(0.001)
                assert not ended
            if error is not None:
                raise error
        ended.append(ledger.rank)

    def programs(error: BaseException | None, wait: bool) -> list[Outcome]:
        return together([lambda at=at: program(trio[at], error if at == 0 else None, wait and at == 0) for at in range(3)])

    for _ in range(2):
        ended.clear()
        assert programs(None, wait=True) == [None] * 3
        ended.clear()
        assert programs(ValueError("no batch"), wait=True) == [
            "ValueError: no batch",
            *["ValueError: rank 0 refused: no batch"] * 2,
        ]
        assert ended == []
    assert len({ledger.page for ledger in trio}) == 1
    # A rank that fails early begins the next step when all have left this one.
    begun = threading.Event()

    def fails() -> None:
        assert attempt(lambda: program(trio[0], ValueError("no batch"), wait=False)) == "ValueError: no batch"
        with step(trio[0]):
            begun.set()

    def goes_on(ledger: Ledger) -> None:
        with pytest.raises(ValueError, match=r"^rank 0 refused: no batch$"), step(ledger):
            assert not begun.wait(0.05)
        with step(ledger):
            pass

    assert together([fails, *[lambda ledger=ledger: goes_on(ledger) for ledger in trio[1:]]]) == [None] * 3
    with pytest.raises(FaultError), step(trio[0]):
        raise FaultError
    clock = SimpleNamespace(sleep=time.sleep, monotonic=iter([0.0, 1000.0]).__next__)
    late = "ranks 1, 2 must leave the step of shared_failures in which another rank failed within 605 s"
    with mock.patch.object(ledger_module, "time", clock):
        assert attempt(lambda: step(trio[0]).__enter__()) == f"TimeoutError: {late}"
    for ledger in trio[1:]:  # they lose the step that it could not begin, too
        with pytest.raises(ValueError, match=r"^rank 0 refused: $"):
            program(ledger, None, wait=False)
    for ledger in trio[1:]:
        with pytest.raises(ValueError, match=f"^rank 0 refused: {late}$"):
            program(ledger, None, wait=False)
    assert {ledger.page for ledger in trio} == {trio[0].page}
    with pytest.raises(KeyboardInterrupt):
        program(trio[0], KeyboardInterrupt(), wait=False)
    for ledger in trio[1:]:
        with pytest.raises(ValueError, match=r"^rank 0 refused: $"):
            program(ledger, None, wait=False)


@pytest.mark.parametrize("failing", [0, 1, None])
def test_store_does_not_grow_with_failing_steps(trio: list[Ledger], failing: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    step, store, keys = stepping(monkeypatch, trio), trio[0].store, []

    def program(ledger: Ledger, number: int) -> None:
        with step(ledger):
            ledger.agree({"number": number}, LONG)
            if ledger.rank == (number % 3 if failing is None else failing):
                raise FaultError("failing")
            ledger.agree({"more": number}, LONG)

    for number in range(12):
        assert None not in together([lambda ledger=ledger: program(ledger, number) for ledger in trio])  # noqa: B023
        keys.append(store.num_keys())
    assert max(keys[6:]) <= max(keys[:6])
    assert all(len(ledger.kept) <= 4 for ledger in trio)


def test_an_error_that_is_caught_inside_of_a_step_ends_it_for_all(pair: list[Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    step = stepping(monkeypatch, pair)

    def fails() -> None:
        with step(pair[0]):
            pair[0].agree(PLAN, LONG)
            before = pair[0].events
            pair[0].agree({}, LONG)
            agreement.tell(pair[0], before, "a hook", is_backward=False)  # type: ignore[arg-type]
            told = str(attempt(lambda: pair[0].agree(PLAN, LONG)))
            assert told.endswith(
                "rank 0 refused: a hook; leave this step of shared_failures by an error, as the others do, and go on with the next"
            )

    def goes_on() -> None:
        with step(pair[1]):
            pair[1].agree(PLAN, LONG)
            pair[1].agree({}, LONG)

    assert together([fails, goes_on]) == ["ValueError: rank 0 refused: a hook"] * 2

    def falls_back(ledger: Ledger) -> None:
        with step(ledger):
            if ledger.rank:
                ledger.withdraw("its arguments")
            else:
                assert attempt(lambda: ledger.agree({"new": 1}, LONG)) == "ValueError: rank 1 refused: its arguments"
            ledger.agree({"new": 2}, LONG)

    assert together([lambda ledger=ledger: falls_back(ledger) for ledger in pair]) == [None] * 2


def test_a_step_of_one_rank_alone_is_told_apart(pair: list[Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    step = stepping(monkeypatch, pair, SHORT)
    with (
        over_once(lambda: pair[0].store.check(["1/1/0/0"])),
        pytest.raises(TimeoutError, match=r"^rank 1 must come to the end of shared_failures .* or outside of this step"),
        step(pair[0]),
    ):
        pass
    assert pair[0].number(SHORT) != pair[1].number(SHORT)
    for _ in range(2):
        pair[1].turn_page()
    agreement._begins[pair[1]] = 1  # type: ignore[index]
    with ThreadPoolExecutor(1) as pool, step(pair[1]):
        told = pool.submit(attempt, lambda: step(pair[1]).__enter__()).result()
        assert told == (
            "RuntimeError: shared_failures must run in one thread at a time over one mesh, got it while another thread is inside"
        )
        pair[0].turn_page()
        pool.submit(pair[0].agree, ledger_module.END, LONG)


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


@pytest.mark.parametrize(("size", "least", "most"), [(2, 39, 41), (2000, 2, 3)])
def test_of_more_ranks_each_looks_at_their_store_more_rarely(size: int, least: int, most: int) -> None:
    """In the last two of ten seconds, by a clock that only sleeping moves."""
    clock, looks = [0.0], []

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        looks.append(clock[0])

    waiting = Ledger(dist.HashStore(), 0, range(size))
    patched = mock.patch.object(ledger_module, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: clock[0]))
    with patched, pytest.raises(TimeoutError, match="must take part"):
        waiting.agree(PLAN, timedelta(seconds=10))
    assert least <= sum(look > 8.0 for look in looks) <= most
