"""Calls of one plan that ranks mix up are errors; what ranks may do alone stays legal. Real processes, a few for each case."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from flexdilated import DilatedPattern, attention_map, dilated_attention
from flexdilated.distributed import agreement, exchange, gather_tokens, sharding, shared_failures, telling, unshard_sequence, waits
from flexdilated.distributed import rank as rank_of_context
from flexdilated.distributed.agreement import _ledger
from flexdilated.distributed.answering import AnsweringStore
from flexdilated.distributed.contract import TAGS, Contract
from flexdilated.distributed.ledger import MAX_WORDS, Ledger
from flexdilated.distributed.waits import Wait
from flexdilated.nn import DilatedAttention, LongNetConfig, LongNetLM, MultiheadDilatedAttention
from tests.distributed.processes import Ranks
from tests.tolerances import EXACT

SHORT = timedelta(seconds=8)  # of a group whose ranks wait for messages that do not come
PATTERN = DilatedPattern((24,), (1,))  # cut between two ranks of 13 tokens
LOCAL = DilatedPattern((13,), (1,))
TOKENS = 13


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes for all cases that end well."""
    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.kill()


@pytest.fixture
def breaking(tmp_path: Path) -> Iterator[Ranks]:
    """Two processes for one case that ends in a timeout, which closes gloo's connections."""
    ranks = Ranks(2, tmp_path, timeout=SHORT)
    yield ranks
    ranks.kill()


def whole(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2 * TOKENS, 3, 5, dtype=torch.float64, generator=generator) for _ in range(3)]


def shard(rank: int, seed: int) -> list[Tensor]:
    return [x[:, rank * TOKENS : (rank + 1) * TOKENS].clone().requires_grad_() for x in whole(seed)]


def assert_right(out: Tensor, inputs: list[Tensor], rank: int, seed: int, pattern: DilatedPattern = PATTERN) -> None:
    """Of the output and, where there are any, the gradients of its sum of squares."""
    given = [x.requires_grad_() for x in whole(seed)]
    expected = dilated_attention(*given, pattern)
    here = slice(rank * TOKENS, (rank + 1) * TOKENS)
    torch.testing.assert_close(out, expected[:, here], **EXACT)
    if inputs[0].grad is not None:
        expected.square().sum().backward()
        for x, e in zip(inputs, given):
            torch.testing.assert_close(x.grad, e.grad[:, here], **EXACT)


def check_step(rank: int, mesh: DeviceMesh, seed: int, pattern: DilatedPattern = PATTERN) -> None:
    """One training step gives what one rank gives."""
    inputs = shard(rank, seed)
    out = dilated_attention(*inputs, pattern, mesh=mesh)
    out.square().sum().backward()
    assert_right(out, inputs, rank, seed, pattern)


def exchanged(mesh: DeviceMesh) -> int:
    return _ledger(mesh.get_group()).exchanged


# -- mixed up -----------------------------------------------------------------------------------------------------------------


OUT_OF_STEP = r"(?i)^rank [01] must exchange rows with this rank.*(timed? ?out|closed)"
PATIENT = mock.patch.object(waits, "MOMENT", 30.0)  # both times end at about one moment, but for a busy machine


def backwards_in_another_order(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    inputs = [shard(rank, seed) for seed in (1, 2)]
    outs = [dilated_attention(*x, PATTERN, mesh=mesh, exchange=exchange) for x in inputs]
    for out, x, seed in zip(outs, inputs, (1, 2)):
        assert_right(out, x, rank, seed)
    with PATIENT, pytest.raises(RuntimeError, match=OUT_OF_STEP) as caught:
        outs[rank].square().sum().backward()
    for each in (0, 1):
        assert f"rank {each} waited for rank {1 - each} in the backward of call {1 + each} with DilatedPattern(" in str(
            caught.value
        )


def one_call_left_out(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    inputs = shard(rank, 1)
    first = dilated_attention(*inputs, PATTERN, mesh=mesh, exchange=exchange)

    def goes_on() -> None:
        if rank == 0:  # a layer that the other rank skips
            dilated_attention(*shard(rank, 2), PATTERN, mesh=mesh, exchange=exchange)
        else:
            first.square().sum().backward()

    with PATIENT, pytest.raises(RuntimeError, match=OUT_OF_STEP) as caught:
        goes_on()
    assert "rank 0 waited for rank 1 in call 2 with DilatedPattern(" in str(caught.value)
    assert "rank 1 waited for rank 0 in the backward of call 1 with DilatedPattern(" in str(caught.value)


def calls_of_two_known_plans(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    """Both ranks have made both calls before: no round compares them again."""

    def call(is_wide: bool) -> Tensor:
        x = [each.double() if is_wide else each.float() for each in shard(rank, 1)]
        return dilated_attention(*x, PATTERN, mesh=mesh, exchange=exchange, scale=0.5 if is_wide else None)

    call(True), call(False)
    with PATIENT, pytest.raises(RuntimeError, match=OUT_OF_STEP) as caught:
        call(rank == 0)
    assert all(f"rank {each} waited for rank {1 - each} in call 3 with DilatedPattern(" in str(caught.value) for each in (0, 1))
    assert (
        "; these calls differ in dtype, got 'torch.float64' on rank 0 and 'torch.float32' on rank 1; in scale, got 0.5 on "
        in str(caught.value)
    )


def a_new_plan_beside_a_known_one(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    """One rank waits for the others to agree, the other one for rows."""
    dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, exchange=exchange)
    errors = TimeoutError if rank else RuntimeError
    with PATIENT, pytest.raises(errors, match="rank 1 waited in the first call with Dilated") as caught:
        dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, exchange=exchange, is_causal=bool(rank))
    assert "rank 0 waited for rank 1 in call 2 with DilatedPattern(" in str(caught.value)
    assert "; these calls differ in is_causal, got False on rank 0 and True on rank 1" in str(caught.value)


def goes_on_after_its_refusal(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    """The others wait in the refused call: the next one of this rank is not taken for it."""
    dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, exchange=exchange)
    if rank == 1:
        with pytest.raises(ValueError, match="scale must be finite"):
            dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, exchange=exchange, scale=float("nan"))
    # Rank 1 compares its next call, to which nobody comes; rank 0 waits for rows. Whose time is over first, the other hears of.
    error, match = ((TimeoutError, ValueError), r"rank 0 (must take part|gave up: it waited in vain in call 2)")
    if rank == 0:
        error, match = (RuntimeError, "rank 1 refused call 2: scale must be finite")
    with PATIENT, pytest.raises(error, match=match):
        dilated_attention(*shard(rank, 2 + rank), PATTERN, mesh=mesh, exchange=exchange)
    with pytest.raises((RuntimeError, ValueError, TimeoutError), match=r"rank [01] (gave up|met an error of another call)"):
        dilated_attention(*shard(rank, 3), PATTERN, mesh=mesh, exchange=exchange)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["gather", "ring", "heads"])
def test_backwards_in_another_order_are_an_error_on_both_ranks(breaking: Ranks, exchange: str) -> None:
    breaking.run(backwards_in_another_order, exchange)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [one_call_left_out, goes_on_after_its_refusal, calls_of_two_known_plans, a_new_plan_beside_a_known_one],
)
def test_calls_out_of_step_are_an_error_on_both_ranks(breaking: Ranks, case: Callable[..., None]) -> None:
    breaking.run(case, "gather")


def check_a_shorter_timeout(rank: int, mesh: DeviceMesh) -> None:
    """One that is set after the connections were made holds for messages too, or this test does not end."""
    dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh)
    mesh.get_group().set_timeout(SHORT)
    if rank == 0:
        with pytest.raises(RuntimeError, match=OUT_OF_STEP):
            dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh)
    else:
        mesh.get_group().get_group_store().wait(["rank 0 has ended"], timedelta(seconds=240))
    mesh.get_group().get_group_store().set("rank 0 has ended", "")


@pytest.mark.ranks
@pytest.mark.slow
def test_a_timeout_that_is_set_later_holds_for_messages(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, timeout=timedelta(hours=2)) as ranks:
        ranks.run(check_a_shorter_timeout, deadline=200)


def told_in_the_next_round(rank: int, mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh)
    if rank == 0:
        agreement.number_of_call(group)  # as of a call that nobody else makes
    with pytest.raises(ValueError, match="ranks must agree on how many calls they made before this one, got 2 on rank 0 and 1 on"):
        dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, scale=0.3)
    with pytest.raises(
        RuntimeError, match="at different calls over this mesh since an error: ranks must agree on how many calls they made"
    ):
        dilated_attention(*shard(rank, 3), PATTERN, mesh=mesh)
    with shared_failures(mesh):  # nobody knows which of them are to come, but that they begin a step together
        check_step(rank, mesh, 3)
    check_step(rank, mesh, 4)


@pytest.mark.ranks
def test_a_call_too_many_is_told_where_ranks_compare(tmp_path: Path) -> None:
    with Ranks(2, tmp_path) as ranks:
        ranks.run(told_in_the_next_round)


# -- legal --------------------------------------------------------------------------------------------------------------------


def check_legal(rank: int, mesh: DeviceMesh, pattern: DilatedPattern, way: str) -> None:
    inputs, options = shard(rank, 5), {"mesh": mesh, "exchange": "gather"}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return dilated_attention(q, k, v, pattern, **options)

    before = exchanged(mesh)
    if way == "compiled":
        torch._dynamo.reset()
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for _ in range(3):
            for x in inputs:
                x.grad = None
            out = compiled(*inputs)
            out.square().sum().backward()
        assert exchanged(mesh) - before == (0 if pattern == LOCAL else 3)  # counted when it runs, not when it is traced
    elif way == "checkpoint":
        out = checkpoint(attend, *inputs, use_reentrant=False)
        out.square().sum().backward()
    elif way == "twice":
        out = attend(*inputs)
        out.square().sum().backward(retain_graph=True)
        for x in inputs:
            x.grad = None
        out.square().sum().backward()
    elif way == "no_grad":
        with torch.no_grad():
            out = attend(*inputs)
    else:
        raise AssertionError(way)
    assert_right(out, inputs, rank, 5, pattern)


@pytest.mark.ranks
@pytest.mark.parametrize("pattern", [PATTERN, LOCAL], ids=["cut", "local"])
@pytest.mark.parametrize("way", ["checkpoint", "twice", "no_grad", pytest.param("compiled", marks=pytest.mark.slow)])
def test_numbered_calls_give_what_one_rank_gives(pair: Ranks, way: str, pattern: DilatedPattern) -> None:
    pair.run(check_legal, pattern, way)


def local_alone(rank: int, mesh: DeviceMesh) -> None:
    """Once ranks have agreed, a call that moves nothing may be made by one rank alone."""
    dilated_attention(*shard(rank, 1), LOCAL, mesh=mesh)
    for seed in range(3):
        if rank == 0:
            check_step(rank, mesh, seed, LOCAL)
        check_step(rank, mesh, seed)


@pytest.mark.ranks
def test_a_rank_may_make_local_calls_alone(pair: Ranks) -> None:
    pair.run(local_alone)


def caught_refusals(rank: int, mesh: DeviceMesh) -> None:
    for scale in (None, 0.4):  # a new plan: calls that a rank made alone before are not counted behind it
        dilated_attention(*shard(rank, 1), LOCAL, mesh=mesh, scale=scale)
    for scale in (0.25, 0.75):
        dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, scale=scale)
    # Beside a new plan: both raise, and both may go on.
    scale, match = (float("nan"), "scale must be finite") if rank == 1 else (1.25, "rank 1 refused: scale must be finite")
    with pytest.raises(ValueError, match=match):
        dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, scale=scale)
    # So does an error that is a function's own.
    options, error = ({"score_mod": lambda *pair: {}[17]}, KeyError) if rank == 1 else ({"scale": 1.5}, ValueError)
    with pytest.raises(error, match="^17" if rank == 1 else "^rank 1 refused: KeyError: 17$"):
        dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, **options)
    for seed in (7, 8):
        check_step(rank, mesh, seed)
    # Beside an agreed plan that moves nothing: the other rank makes the call, and meets the refusal in a later one.
    with pytest.raises(ValueError, match="scale must be finite") if rank == 1 else nullcontext():
        dilated_attention(*shard(rank, 1), LOCAL, mesh=mesh, scale=float("inf") if rank == 1 else None)
    for error in (ValueError, RuntimeError):
        with pytest.raises(error, match=r"rank 1 refused: scale must be finite"):
            dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, scale=1.75)
    with shared_failures(mesh):
        check_step(rank, mesh, 9)


@pytest.mark.ranks
def test_ranks_go_on_after_a_refusal_that_is_caught(pair: Ranks) -> None:
    pair.run(caught_refusals)


# -- what is refused ----------------------------------------------------------------------------------------------------------


def check_refused(rank: int, mesh: DeviceMesh) -> None:
    q, k, v = (x.detach() for x in shard(rank, 1))
    attend = lambda q: dilated_attention(q, k, v, PATTERN, mesh=mesh)  # noqa: E731
    for transform in (lambda: torch.func.jvp(attend, (q,), (q,)), lambda: torch.func.grad(lambda q: attend(q).sum())(q)):
        with pytest.raises(NotImplementedError, match=r"^mesh must come without torch\.func"):
            transform()
    with pytest.raises(NotImplementedError, match=r"^mesh must come without torch\.func"):
        torch.func.vmap(lambda q: attend(q[None]))(q)
    with fwAD.dual_level(), pytest.raises(NotImplementedError, match=r"^mesh must come without torch\.func and forward-mode"):
        attend(fwAD.make_dual(q, q))
    ledger = _ledger(mesh.get_group())
    met: list[Exception] = []

    def other() -> None:
        try:
            attend(q)
        except RuntimeError as error:
            met.append(error)

    ledger.turn["thread"] = threading.get_ident()  # as a call of this thread has it, which would say at its end that all are lost
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    ledger.turn.clear()
    ledger.meanwhile = False
    assert [str(error)[:78] for error in met] == ["dilated_attention must run in one thread at a time over one mesh, got a call d"]
    check_step(rank, mesh, 9)


@pytest.mark.ranks
def test_transforms_and_threads_are_refused_by_name(pair: Ranks) -> None:
    pair.run(check_refused)


# -- without tags -------------------------------------------------------------------------------------------------------------


def check_headers(rank: int, mesh: DeviceMesh, exchange_name: str, is_mixed: bool) -> None:
    """As over a backend that matches messages by their order alone."""
    send = dist.P2POp

    def untagged(make: Any, message: Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> dist.P2POp:
        return send(make, message, peer, group, 0)

    with mock.patch.object(exchange, "has_tags", return_value=False), mock.patch.object(dist, "P2POp", untagged):
        inputs = shard(rank, 4)
        out = dilated_attention(*inputs, PATTERN, mesh=mesh, exchange=exchange_name)
        if is_mixed:
            other = dilated_attention(*shard(rank, 6), PATTERN, mesh=mesh, exchange=exchange_name)
            with pytest.raises(
                RuntimeError, match="ranks must make the same calls of dilated_attention in the same order, got rows of another"
            ):
                (out, other)[rank].square().sum().backward()
        else:
            out.square().sum().backward()
            assert_right(out, inputs, rank, 4)


def check_refusals_count(rank: int, mesh: DeviceMesh, kind: str) -> None:
    """A call that was refused has a number: a rank that goes on alone must not take its next one for that in which others wait."""
    good = [x.detach() for x in shard(rank, 3)]

    def of_dtensors(bad: bool) -> Tensor:
        q, k, v = (DTensor.from_local(x, mesh, [Shard(1)], run_check=False) for x in good)
        return dilated_attention(q, k, v.to_local() if bad else v, PATTERN).to_local()

    def masked(mask: Tensor) -> Tensor:
        return dilated_attention(*good, PATTERN, mesh=mesh, key_padding_mask=mask)

    compiled = torch.compile(masked, backend="aot_eager", fullgraph=kind == "compiled whole")

    def of_masks(bad: bool) -> Tensor:
        return compiled(torch.zeros(1, 7 if bad else TOKENS, dtype=torch.bool))

    call = of_dtensors if kind == "dtensors" else of_masks
    call(False)
    ledger = _ledger(mesh.get_group())
    made = ledger.exchanged
    for refused in (1, 2):
        with pytest.raises((TypeError, ValueError, torch._dynamo.exc.Unsupported)):
            call(True)
        assert_right(call(False), good, rank, 3)
        assert ledger.exchanged == made + 2 * refused


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["dtensors", "compiled whole", "compiled"])
def test_refused_calls_are_counted(pair: Ranks, kind: str) -> None:
    pair.run(check_refusals_count, kind)


FAILING = {  # what the others read of it
    "arguments": r"key_padding_mask must have shape \(B, N\)=\(1, 13\), got \(1, 7\)",
    "module before": r"query must have shape \(B, N, 6\) or \(N, 6\), got \(1, 13, 7\)",
    "operation before": "must have same reduction dim",
    "operation behind": "must have same reduction dim",
    "break behind": "graph_break",
    "attention maps": "fullgraph must be False with attention_map over several ranks",
}


def failing(kind: str, mesh: DeviceMesh) -> Callable[[], Any]:
    """A compiled call that fails while it is traced: by its arguments, before its attention, behind it, or by what it is."""
    q, k, v = (x[:, :TOKENS] for x in whole(3))
    module, module_of_wrong_width = (MultiheadDilatedAttention(6, 3, PATTERN, mesh=mesh) for _ in range(2))
    module_of_wrong_width.q_proj = torch.nn.Linear(11, 6)

    def arguments() -> Any:
        return dilated_attention(q, k, v, PATTERN, mesh=mesh, key_padding_mask=torch.zeros(1, 7, dtype=torch.bool))

    def module_before() -> Any:
        x = torch.zeros(1, TOKENS, 7)
        return module(x, x, x)

    def operation_before() -> Any:
        x = torch.zeros(1, TOKENS, 6)
        return module_of_wrong_width(x, x, x)

    def operation_behind() -> Any:
        return dilated_attention(q, k, v, PATTERN, mesh=mesh, scale=0.3) @ torch.zeros(11, 2)

    def break_behind() -> Any:
        out = dilated_attention(q, k, v, PATTERN, mesh=mesh, scale=0.3)
        torch._dynamo.graph_break()
        return out

    def attention_maps() -> Any:
        return attention_map(q, k, PATTERN, queries=[0], mesh=mesh)

    calls = (arguments, module_before, operation_before, operation_behind, break_behind, attention_maps)
    return torch.compile(dict(zip(FAILING, calls))[kind], fullgraph=True, backend="eager")


def check_compiler_fails(rank: int, mesh: DeviceMesh, kind: str) -> None:
    """On one rank, while the other makes a call whose plan is new: it hears of it at once. On all, which go on."""
    torch._dynamo.reset()
    ledger = _ledger(mesh.get_group())
    for failed in (0, 1):
        before = ledger.exchanged
        if rank == failed:
            with pytest.raises(torch._dynamo.exc.TorchDynamoException):
                failing(kind, mesh)()
            assert ledger.exchanged == before + 1
        else:
            scale = 0.5 + failed + 2 * [*FAILING].index(kind)
            with pytest.raises(ValueError, match=f"rank {failed} refused: torch.compile failed: .*{FAILING[kind]}"):
                dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, scale=scale)
        check_step(rank, mesh, 2)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        failing(kind, mesh)()
    check_step(rank, mesh, 5)
    check_step(rank, mesh, 6, DilatedPattern((26,), ([*FAILING].index(kind) + 1,)))
    assert not telling._traced


@pytest.mark.ranks
@pytest.mark.parametrize("kind", FAILING)
def test_ranks_hear_of_a_compiler_that_fails(pair: Ranks, kind: str) -> None:
    pair.run(check_compiler_fails, kind)


class Breaking(DilatedAttention):
    """An attention that a compiler must take whole, and cannot until it is mended."""

    is_broken = True

    def forward(self, *args: Any, **options: Any) -> Tensor:
        out = super().forward(*args, **options)
        if self.is_broken:
            torch._dynamo.graph_break()
        return out


def check_compiler_fails_inside(rank: int, mesh: DeviceMesh) -> None:
    """A compiled part of a module that tells of its errors: they are told once."""
    torch._dynamo.reset()
    module, x = MultiheadDilatedAttention(6, 3, PATTERN, mesh=mesh), torch.randn(1, TOKENS, 6)
    module.attention.__class__ = Breaking
    module.attention.compile(fullgraph=True, backend="eager")
    ledger = _ledger(mesh.get_group())
    before = ledger.exchanged
    with pytest.raises(torch._dynamo.exc.Unsupported):
        module(x, x, x)
    assert ledger.exchanged == before + 1
    module.attention.is_broken = False
    module(x, x, x)
    check_step(rank, mesh, 7)


class Wrapping(torch.nn.Module):
    """A user's layer that says where it failed."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.mesh, self.is_causal = inner, inner.mesh, inner.is_causal

    def forward(self, *args: Any, **options: Any) -> Tensor:
        try:
            found: Tensor = self.inner(*args, **options)
        except Exception as error:
            raise RuntimeError("layer 0 failed") from (error if self.training else None)
        return found


@contextmanager
def broken_compiler() -> Iterator[None]:
    """An error inside of dynamo, which it raises as another."""
    with mock.patch.object(torch._dynamo.guards.CheckFunctionManager, "__init__", side_effect=RuntimeError("guards break")):
        yield


def check_told_once(rank: int, mesh: DeviceMesh, kind: str) -> None:
    """One rank fails inside modules that tell, by an error that becomes another on its way; all go on."""
    torch._dynamo.reset()
    module, x = MultiheadDilatedAttention(6, 3, PATTERN, mesh=mesh), torch.randn(1, TOKENS, 6)
    attention: Any = module.attention
    if kind == "internal":
        attention.compile(fullgraph=True, backend="eager")
    else:
        module.attention = Wrapping(attention).train(kind == "caused")
    ledger, scale = _ledger(mesh.get_group()), 0.01 * (1 + len(kind))
    before = ledger.exchanged
    if rank == 0:
        breaking = broken_compiler() if kind == "internal" else mock.patch.object(attention, "exchange", "none")
        with breaking, pytest.raises(Exception, match=r"guards break|layer 0 failed"):
            module(x, x, x)
        assert ledger.exchanged == before + 1
    else:
        with pytest.raises(ValueError, match="rank 0 refused: "):
            dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, scale=scale)
    for seed in (2, 3):
        check_step(rank, mesh, seed)
    check_step(rank, mesh, 4, DilatedPattern((26,), (10 + len(kind),)))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["internal", "caused", "instead"])
def test_an_error_that_becomes_another_is_told_of_once(pair: Ranks, kind: str) -> None:
    pair.run(check_told_once, kind)


def check_marks_of_other_compilations(rank: int, mesh: DeviceMesh) -> None:
    """What is compiled ahead of time ends without a word, and what fails behind it is another's; a frame that is skipped runs."""
    torch._dynamo.reset()
    ledger, inputs = _ledger(mesh.get_group()), [x.detach() for x in shard(rank, 9)]
    assert_right(torch.compile(dilated_attention, fullgraph=True, backend="eager")(*inputs, PATTERN, mesh=mesh), inputs, rank, 9)
    before = ledger.exchanged
    with mock.patch.dict(telling._traced, {"[7/0]": [telling._Trace(mesh.get_group().group_name, None, True)]}, clear=True):
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(lambda x: torch._dynamo.graph_break(), fullgraph=True, backend="eager")(inputs[0])
        assert ledger.exchanged == before

    def skipped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        for _ in range(1):
            with torch._dynamo.error_on_graph_break(True):
                out = out + dilated_attention(q, k, v, PATTERN, mesh=mesh)
            if rank == 1:
                torch._dynamo.graph_break()
        return out

    assert_right(torch.compile(skipped, backend="eager")(*inputs), inputs, rank, 9)
    assert ledger.exchanged == before + 1
    check_step(rank, mesh, 10)


@pytest.mark.ranks
def test_other_compilations_are_not_those_of_a_call(pair: Ranks) -> None:
    pair.run(check_marks_of_other_compilations)


def check_compiler_in_a_handler(rank: int, mesh: DeviceMesh) -> None:
    """A fallback is compiled while another error is handled, which is none of its own."""
    torch._dynamo.reset()
    ledger, good = _ledger(mesh.get_group()), [x.detach() for x in shard(rank, 8)]
    before = ledger.exchanged
    try:
        raise RuntimeError("what the fallback is for")
    except RuntimeError:
        attend = torch.compile(dilated_attention, fullgraph=True, backend="eager")
        assert_right(attend(*good, PATTERN, mesh=mesh), good, rank, 8)
        assert ledger.exchanged == before + 1
        with pytest.raises(torch._dynamo.exc.TorchDynamoException):
            failing("break behind", mesh)()
        assert ledger.exchanged == before + 2
    check_step(rank, mesh, 8)


@pytest.mark.ranks
def test_a_compiler_that_succeeds_in_a_handler_has_not_failed(pair: Ranks) -> None:
    pair.run(check_compiler_in_a_handler)


@pytest.mark.ranks
def test_a_compiler_that_fails_in_a_module_is_told_of_once(pair: Ranks) -> None:
    pair.run(check_compiler_fails_inside)


@pytest.mark.ranks
@pytest.mark.parametrize("exchange_name", ["gather", "ring", "heads"])
def test_messages_without_tags_carry_their_number(pair: Ranks, exchange_name: str) -> None:
    pair.run(check_headers, exchange_name, False)


@pytest.mark.ranks
@pytest.mark.slow
def test_messages_of_another_call_are_refused_without_tags(breaking: Ranks) -> None:
    breaking.run(check_headers, "gather", True)


def test_tags_differ_between_calls_and_directions() -> None:
    def tag(digest: int, number: int, *, backward: bool) -> int:
        return Contract(mock.Mock(), {}, digest).tag(number, backward=backward)

    tags = {tag(TAGS - 3, number, backward=back) for number in range(1000) for back in (False, True)}
    assert len(tags) == 2000
    assert min(tags) >= 0
    assert max(tag(c, n, backward=True) for c in (0, TAGS - 1) for n in (0, TAGS - 1, TAGS)) < 1 << 31
    assert tag(5, TAGS + 7, backward=True) == tag(5, 7, backward=True)  # a billion calls later


@contextmanager
def ranks_on(store: AnsweringStore, moment: float) -> Iterator[Callable[..., Wait]]:
    """Waits of ranks 4, 5 and 6 of the world, which are a group on a store."""
    groups = [mock.Mock(rank=mock.Mock(return_value=rank), size=mock.Mock(return_value=3)) for rank in range(3)]
    with (
        mock.patch.object(waits, "posts_of", return_value=(store, "1")),
        mock.patch.object(waits, "global_ranks", return_value=[4, 5, 6]),
        mock.patch.object(waits, "groups", return_value=[]),
        mock.patch.object(waits, "lose"),
        mock.patch.object(waits, "MOMENT", moment),
    ):
        yield lambda rank, *call: Wait(groups[rank], *call)


LOST, OVER = RuntimeError("Connection closed"), RuntimeError("Timed out waiting 3 s")
SOON, LATER = 0.0, 0.2


def test_a_lost_rank_has_no_word_and_a_store_that_is_gone_none_of_others() -> None:
    store = AnsweringStore(dist.HashStore(), timedelta(seconds=1))
    with ranks_on(store, 0.2) as wait:
        assert wait(0, "call 1").tell([1, 2], LATER) == "rank 4 waited in call 1; ranks 5, 6 did not tell of a wait"
        others = "rank 4 waited in call 1; rank 6 did not tell of a wait"
        assert wait(1, "call 2").tell([0, 2], SOON) == f"rank 5 waited in call 2; {others}"
        assert wait(2, "call 3").tell([], SOON) == "rank 6 waited in call 3"
        # Rank 4 waited for the others, which are asked too.
        assert wait(1, "call 1").tell([0], LATER) == "ranks 5, 4 waited in call 1; rank 6 waited in call 3"
        store.gone = TimeoutError("silent")
        assert wait(1, "call 4").tell([0], LATER) == "rank 5 waited in call 4; rank 4 did not tell of a wait"


def test_waits_in_calls_that_differ_say_in_what() -> None:
    store = AnsweringStore(dist.HashStore(), timedelta(seconds=1))
    plan: dict[str, object] = {"scale": 0.5, "documents": [[0, 7]]}
    with ranks_on(store, 0.2) as wait:
        wait(0, "call 1", 1, plan).tell([], SOON)
        assert wait(1, "call 1", 1, plan).tell([0], LATER) == "ranks 5, 4 waited in call 1"
        assert wait(2, "call 1", 1, plan | {"scale": 1}).tell([0, 1], LATER) == (
            "ranks 6, 4, 5 waited in call 1; these calls differ in scale, got 0.5 on ranks 4, 5 and 1 on rank 6"
        )
        # Of another kind of call words say enough.
        assert wait(2, "a sum", 1, {"what": "a sum"}).tell([0], LATER) == "rank 6 waited in a sum; rank 4 waited in call 1"
        assert wait(2, "a sum").tell([0], LATER) == "rank 6 waited in a sum; rank 4 waited in call 1"


def test_a_rank_that_others_wait_for_through_a_third_is_named() -> None:
    with ranks_on(AnsweringStore(dist.HashStore(), timedelta(seconds=1)), 0.01) as wait:
        text = f"rank 5 waited for rank 6 in call 4; rank 6 did not tell of a wait; {OVER}$"
        with pytest.raises(RuntimeError, match=f": {text}"), wait(1, "call 4").for_rows([2]):
            raise OVER
        with pytest.raises(RuntimeError, match=f": rank 4 waited for rank 5 in call 5; {text}"), wait(0, "call 5").for_rows([1]):
            raise OVER
        with pytest.raises(RuntimeError, match="; an earlier call over this mesh failed"), wait(0, "call 6").for_rows([1]):
            raise LOST


def test_a_call_that_a_rank_has_refused_is_told_to_those_that_waited_in_it() -> None:
    store = dist.HashStore()
    pair = [Ledger(store, rank, range(2)) for rank in range(2)]
    assert [ledger.next_number() for ledger in pair] == [1, 1]
    pair[1].withdraw("scale must be finite, got nan")
    told = []
    with ranks_on(AnsweringStore(store, timedelta(seconds=1)), 0.01) as wait:
        for number in (1, 2, 3):
            with pytest.raises(RuntimeError) as caught, wait(0, "the call", number).for_rows([1]):
                raise OVER
            told.append("; rank 5 refused call 2: scale must be finite, got nan" in str(caught.value))
    assert told == [True, True, False]  # the backward of call 1 has no partner either; call 3 comes after the refused one


def test_the_first_of_two_refusals_is_told_to_those_that_waited_in_it() -> None:
    store = dist.HashStore()
    pair = [Ledger(store, rank, range(2)) for rank in range(2)]
    for number in range(MAX_WORDS):
        pair[1].withdraw(f"reason {number + 1}")
    with ranks_on(AnsweringStore(store, timedelta(seconds=1)), 0.01) as wait:
        for number in (1, 3, MAX_WORDS):
            assert f"rank 5 refused call {number}: reason {number}" in wait(0, "the call", number).tell([1], SOON)
        assert "did not tell" in wait(0, "the call", MAX_WORDS + 1).tell([1], SOON)
    pair[1].withdraw("one more")
    assert len(json.loads(store.get(f"{pair[1].life}/refused/1"))) == MAX_WORDS


@pytest.mark.parametrize("refuses", [True, False])
def test_why_a_rank_is_lost_is_told_through_a_third_that_waits_in_an_earlier_call(refuses: bool) -> None:
    store = dist.HashStore()
    three = [Ledger(store, rank, range(3)) for rank in range(3)]
    if refuses:
        three[2].withdraw("no memory")
    else:
        three[2].next_number()
        three[2].inform(1, "failed in call 1: no memory")
    with ranks_on(AnsweringStore(store, timedelta(seconds=1)), 0.01) as wait:
        wait(1, "call 1", 1).tell([2], SOON)
        told = wait(0, "call 2", 2).tell([1], SOON)
    assert f"rank 6 {'refused' if refuses else 'failed in'} call 1: no memory" in told


def test_a_rank_whose_store_is_gone_meets_its_own_error() -> None:
    group = mock.Mock(rank=mock.Mock(return_value=0), size=mock.Mock(return_value=2))
    with (
        mock.patch.object(agreement, "_ledger", side_effect=dist.DistNetworkError("gone")),  # which asks the store
        mock.patch.object(agreement, "_ledgers", {}),
        pytest.raises(ValueError, match="my own"),
        telling.telling_call(group),
    ):
        raise ValueError("my own")


def test_a_rank_that_waits_over_another_mesh_says_so() -> None:
    store, other = AnsweringStore(dist.HashStore(), timedelta(seconds=1)), mock.Mock(rank=mock.Mock(return_value=1))
    with ranks_on(store, 0.01) as wait, mock.patch.object(waits, "groups", return_value=[other]):
        wait(2, "call 7").tell([], SOON)
    with ranks_on(store, 0.01) as wait:
        told = wait(0, "call 2").tell([1], SOON)
    assert told == "rank 4 waited in call 2; rank 5 waited in call 7 over another mesh"


@pytest.mark.parametrize("error", [LOST, OVER])
def test_a_word_that_comes_a_moment_later_is_waited_for(error: RuntimeError) -> None:
    store = AnsweringStore(dist.HashStore(), timedelta(seconds=1))

    def sleep(seconds: float) -> None:  # between two looks the other rank tells
        store.set("1/waited/1", json.dumps(["waited in call 2", [], {}, 2]))

    with (
        ranks_on(store, 30.0) as wait,
        mock.patch.object(waits, "time", mock.Mock(monotonic=time.monotonic, sleep=sleep)),
        pytest.raises(RuntimeError, match=r": rank 4 waited for rank 5 in call 1; rank 5 waited in call 2; "),
        wait(0, "call 1").for_rows([1]),
    ):
        raise error


def test_the_word_of_an_error_that_was_caught_is_taken_back() -> None:
    store = dist.HashStore()
    with ranks_on(AnsweringStore(store, timedelta(seconds=1)), 30.0) as wait:
        wait(0, "call 1").tell([], SOON)
        wait(0, "call 2")  # at once: another rank may be on its way to the word of call 1
        assert wait(1, "call 1").tell([0], SOON) == "ranks 5, 4 waited in call 1"
        with mock.patch.object(waits, "MOMENT", 0.0):
            wait(0, "call 3")
            assert wait(1, "call 4").tell([0], SOON) == "rank 5 waited in call 4; rank 4 did not tell of a wait"
        wait(0, "call 5").tell([], SOON)
        wait(0, "call 5").tell([], SOON, "another topic")
        assert wait(1, "call 5").tell([0], SOON) == "ranks 5, 4 waited in call 5"
        assert store.multi_get(["1/another topic/0"])
        with mock.patch.multiple(waits, MOMENT=-1.0, SURELY=-1.0):  # all words, of one error and of those before it
            wait(0, "call 6")
            wait(1, "call 6")
        assert store.num_keys() == 0


@pytest.mark.parametrize(
    ("peers", "names"), [([1, 2, 1], "rank 5 or rank 6"), ([2], "rank 6"), ([0, 1, 2] * 3, "rank 4 or rank 5 or rank 6")]
)
def test_the_ranks_that_may_be_meant_are_named(peers: Sequence[int], names: str) -> None:
    store = AnsweringStore(dist.HashStore(), timedelta(seconds=1))
    for error in (LOST, OVER, RuntimeError("watchdog timeout")):
        with (
            ranks_on(store, 0.01) as wait,
            pytest.raises(RuntimeError, match=f"^{names} must exchange rows .*: rank 4 waited for {names} in call 1; .*; {error}$"),
            wait(0, "call 1").for_rows(peers),
        ):
            raise error


def test_many_ranks_that_may_be_meant_are_counted_and_all_are_asked() -> None:
    store, group = AnsweringStore(dist.HashStore(), timedelta(seconds=1)), mock.Mock()
    group.rank.return_value, group.size.return_value = 0, 20
    with (
        mock.patch.object(waits, "posts_of", return_value=(store, "1")),
        mock.patch.object(waits, "global_ranks", return_value=list(range(20))),
        mock.patch.object(waits, "lose"),
    ):
        for rank in (*range(1, 13), *range(14, 20)):
            store.set(f"1/waited/{rank}", json.dumps(["waited for one of 19 ranks in call 7", [], {}, 7]))
        wait, silent = Wait(group, "call 7"), "rank 13 did not tell of a wait"
        with pytest.raises(RuntimeError, match=f"^one of 19 ranks must .*; {silent}") as caught, wait.for_rows(range(1, 20)):
            raise LOST
        assert "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (19 ranks) waited for one of 19 ranks in call 7" in str(caught.value)
        with (
            pytest.raises(RuntimeError, match=f"^all ranks of the mesh must take part in call 7, but .*; {silent}"),
            wait.for_all(),
        ):
            raise LOST


def leave_a_collective(rank: int, mesh: DeviceMesh) -> None:
    """One rank puts a sequence together, the other attends."""
    inputs = shard(rank, 1)
    dilated_attention(*inputs, PATTERN, mesh=mesh)
    call = (lambda: unshard_sequence(inputs[0], mesh)) if rank == 0 else (lambda: dilated_attention(*inputs, PATTERN, mesh=mesh))
    with PATIENT, pytest.raises(RuntimeError, match=r"must (exchange rows|take part in unshard_sequence)") as caught:
        call()
    assert "rank 0 waited in unshard_sequence of shape=(1, 13, 3, 5), dtype=torch.float64, dim=1, " in str(caught.value)
    assert "rank 1 waited for rank 0 in call 2 with DilatedPattern(" in str(caught.value)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_collective_names_the_calls_of_the_ranks(breaking: Ranks) -> None:
    breaking.run(leave_a_collective)


def refused_collectives(rank: int, mesh: DeviceMesh) -> None:
    """One rank refuses to put a sequence together, and goes on: its next call is none of those in which the other waits."""
    x = shard(rank, 1)[0].detach()
    good, bad = torch.zeros(1, dtype=torch.int64), torch.zeros(1)

    def gather(positions: Tensor) -> Tensor:
        return gather_tokens(x[..., 0], positions, mesh)

    def unshard(dim: int) -> Tensor:
        return unshard_sequence(x, mesh, dim=dim)

    expected = whole(1)[0]
    for call, right, wrong, of in ((gather, good, bad, expected[:, :1, :, 0]), (unshard, 1, 7, expected)):
        torch.testing.assert_close(call(right), of, **EXACT)
        if rank == 1:
            with pytest.raises((TypeError, ValueError)):
                call(wrong)
        with pytest.raises(ValueError, match=r"^ranks must make the same calls before this one, got others: "):
            call(right)
        for again in (call, lambda right: dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh)):
            with pytest.raises(
                RuntimeError, match=r"at different calls over this mesh since an error: rank . gave up: ranks must make the"
            ):
                again(right)
        with shared_failures(mesh):
            torch.testing.assert_close(call(right), of, **EXACT)
    # Beside a call whose plan is new.
    with pytest.raises(ValueError, match="dim=7" if rank == 1 else "^rank 1 refused: batch must hold tensors with dim=7"):
        dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, scale=3.25) if rank == 0 else unshard(7)
    torch.testing.assert_close(unshard(1), expected, **EXACT)
    # Other lengths that put as many tokens together, and other shapes, are other calls of as many.
    match = r"^shard_lengths, dtype, reduce_gradients and the other dims of shards must be the same on all ranks, got others"
    with pytest.raises(ValueError, match=match):
        gather_tokens(x[:, rank:, :, 0], good, mesh)
    with pytest.raises(ValueError, match=match):
        unshard_sequence(x.float() if rank else x, mesh)
    with pytest.raises(ValueError, match=match):
        unshard_sequence(x, mesh, reduce_gradients=bool(rank))
    torch.testing.assert_close(unshard(1), expected, **EXACT)
    with pytest.raises(RuntimeError, match=r"^positions must be the same on all ranks, got others"):
        gather(good + rank)
    with shared_failures(mesh):
        torch.testing.assert_close(gather(good), expected[:, :1, :, 0], **EXACT)


def backwards_of_wholes(rank: int, mesh: DeviceMesh) -> None:
    """Gradients of a whole are added up over ranks that take others, or none: all of them hear so, and the next step is right."""

    def wholes() -> tuple[list[Tensor], list[Tensor]]:
        parts = [torch.full((1, 2, 3), 1.0 + i, dtype=torch.float64, requires_grad=True) for i in range(2)]
        return parts, [unshard_sequence(x, mesh, reduce_gradients=True) for x in parts]

    def backwards(of: list[Tensor], *order: int) -> None:
        for i in order:
            of[i].sum().backward()

    def program(*order: int, inside: bool, goes_on: bool) -> None:
        _, of = wholes()
        with shared_failures(mesh) if inside else nullcontext():
            backwards(of, *order)
            if goes_on:  # to a call whose messages have another size
                wholes()

    match = r"^backwards of unshard_sequence must come in one order on all ranks, got others: "
    calls = r"^ranks must make the same calls in the same order, got others: .* waited in the backward of call "
    for inside in (False, True):
        for mine, others, error in (((0,), (1,), match), ((0, 1), (1, 0), match), ((0, 1), (0,), calls)):
            with pytest.raises(ValueError, match=error):
                program(*(mine if rank == 0 else others), inside=inside, goes_on=error is calls and rank != 0)
            with shared_failures(mesh):
                parts, of = wholes()
                backwards(of, 0, 1)
            for x in parts:
                torch.testing.assert_close(x.grad, torch.full_like(x, float(mesh.size())), **EXACT)


@pytest.mark.ranks
def test_gradients_of_two_wholes_are_not_mixed(pair: Ranks) -> None:
    pair.run(backwards_of_wholes)


@pytest.mark.ranks
def test_a_refused_collective_is_not_taken_for_the_next(pair: Ranks) -> None:
    pair.run(refused_collectives)


def failing_steps(rank: int, mesh: DeviceMesh) -> None:
    """Steps of which one rank fails before its calls, between them, behind them or in a collective, under plans old and new: each
    step gives what one rank gives, or an error on all."""
    patterns = [DilatedPattern((24,), (rate,)) for rate in (1, 2, 3)]
    places = ["before", "between", "behind", "unshard", "memory", None]
    done, expected = [], []
    for number in range(18):
        place, failing = places[number % 6], number // 6 % 2
        fails = place if failing == rank else None
        match = "^a batch" if fails else f"^rank {failing} refused: OSError: a batch"
        error = OSError if fails else ValueError
        with pytest.raises(error, match=match) if place else nullcontext(), shared_failures(mesh):
            for layer in range(2):
                if fails == ("before", "between")[layer]:
                    raise OSError("a batch")
                # A plan that is new: the other rank waits in a round. test_steps.py has those that are known.
                scale = 2.0 + number + 0.5 * layer if place in ("before", "between") else None
                inputs = shard(rank, number)
                out = dilated_attention(*inputs, patterns[number % 3], mesh=mesh, scale=scale)
                if scale is None:
                    assert_right(out, inputs, rank, number, patterns[number % 3])
            if fails == "unshard":
                raise OSError("a batch")
            short = mock.patch.object(sharding, "_whole", side_effect=OSError("a batch"))
            with short if fails == "memory" else nullcontext():
                torch.testing.assert_close(unshard_sequence(inputs[0].detach(), mesh), whole(number)[0], **EXACT)
            if fails == "behind":
                raise OSError("a batch")
            done.append(number)
        expected += [number] if place is None or (place == "behind" and failing != rank) else []
    assert done == expected
    check_step(rank, mesh, 3)


@pytest.mark.ranks
def test_all_ranks_skip_a_step_in_which_one_fails(pair: Ranks) -> None:
    pair.run(failing_steps)


def maps_in_another_order(rank: int, mesh: DeviceMesh) -> None:
    """Two maps that ranks have made before, a new one beside one that they have made, and one that a rank refuses."""
    q, k, _ = (x.detach() for x in shard(rank, 1))

    def query(number: int) -> Tensor:
        return attention_map(q, k, PATTERN, queries=number, mesh=mesh)

    whole_q, whole_k, _ = whole(1)
    expected = attention_map(whole_q, whole_k, PATTERN, queries=5)[..., rank * TOKENS : (rank + 1) * TOKENS]
    for number in (5, 9):
        query(number)
    for other in (9, 9, 11):  # again, once both have caught it
        with pytest.raises(ValueError, match=rf"^ranks must agree on queries, got \[5\] on rank 0 and \[{other}\] on rank 1$"):
            query(other if rank else 5)
    torch.testing.assert_close(query(5), expected, **EXACT)
    # A map that one rank refuses is not taken for its next one, which looks alike.
    for turn in (0, 1):
        if rank == turn:
            with pytest.raises(TypeError, match="k must have the dtype of q"):
                attention_map(q, k.float(), PATTERN, queries=5, mesh=mesh)
        else:
            with pytest.raises(ValueError, match=f"^rank {turn} refused: k must have the dtype of q"):
                query(5)
    torch.testing.assert_close(query(5), expected, **EXACT)


@pytest.mark.ranks
def test_maps_in_another_order_are_an_error_on_both_ranks(tmp_path: Path) -> None:
    with Ranks(2, tmp_path) as ranks:
        ranks.run(maps_in_another_order)


# -- told, and not told -------------------------------------------------------------------------------------------------------


class Failing(torch.nn.Module):
    """A module over ranks whose hooks of a user raise what they are told to."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = MultiheadDilatedAttention(6, 3, PATTERN, mesh=mesh)
        self.before: Callable[[], None] | None = None
        self.behind: Callable[[], None] | None = None
        self.inner.q_proj.register_forward_pre_hook(lambda *_: self.before() if self.before else None)
        self.inner.out_proj.register_forward_pre_hook(lambda *_: self.behind() if self.behind else None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, x, x)[0]
        return out


def raising(error: BaseException, cause: BaseException | None = None) -> Callable[[], None]:
    def call() -> None:
        raise error from cause

    return call


FILE = b"caf\xe9.bin"  # a name that is no UTF-8, as file systems allow


class UnreadableError(RuntimeError):
    """Its text is an error."""

    def __str__(self) -> str:
        raise ValueError("no text")


def check_module_step(rank: int, mesh: DeviceMesh, module: Failing, seed: int) -> None:
    whole_x = torch.randn(1, 2 * TOKENS, 6, generator=torch.Generator().manual_seed(seed))
    alone = MultiheadDilatedAttention(6, 3, PATTERN)
    alone.load_state_dict(module.inner.state_dict())
    here = slice(rank * TOKENS, (rank + 1) * TOKENS)
    torch.testing.assert_close(module(whole_x[:, here]), alone(whole_x, whole_x, whole_x)[0][:, here])


def told_errors() -> list[Callable[[], None]]:
    again, cyclic, one, other = (RuntimeError(name) for name in ("again", "cyclic", "one", "other"))
    one.__cause__, other.__cause__ = other, one
    found = [raising(error) for error in (again, again, KeyboardInterrupt("stop"), UnreadableError(), SystemExit(3))]
    unnamed = RuntimeError(f"cannot parse {os.fsdecode(FILE)}")
    return [*found, raising(RuntimeError("still"), again), raising(cyclic, cyclic), raising(one), raising(unnamed)]


def check_errors_are_told_each_time(rank: int, mesh: DeviceMesh) -> None:
    """Of whatever kind, the same object twice, an earlier one as the cause, or in a circle; all go on."""
    module, x, ledger = Failing(mesh), torch.randn(1, TOKENS, 6), _ledger(mesh.get_group())
    check_module_step(rank, mesh, module, 0)
    for number, fail in enumerate(told_errors()):
        before = ledger.exchanged
        if rank == 1:
            module.before = fail
            with pytest.raises(BaseException) as caught:  # noqa: PT011
                module(x)
            assert not isinstance(caught.value, (AttributeError, ValueError))
            module.before = None
        else:
            with pytest.raises(ValueError, match=r"^rank 1 refused: "):
                dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, scale=0.01 + 0.01 * number)
        assert ledger.exchanged == before + 1
        check_module_step(rank, mesh, module, number)


@pytest.mark.ranks
def test_errors_are_told_each_time_whatever_they_are(pair: Ranks) -> None:
    pair.run(check_errors_are_told_each_time)


def check_errors_behind(rank: int, mesh: DeviceMesh) -> None:
    """Behind the attention of a module, whose model may have more of them. A recomputation that ends early is no error."""
    module, x, ledger = Failing(mesh), torch.randn(1, TOKENS, 6), _ledger(mesh.get_group())
    check_module_step(rank, mesh, module, 0)
    for logs in (0, 1):  # one rank reads more of a checkpoint, whose recomputation then ends behind the module
        y = checkpoint(
            lambda x, logs: (out := module(x), out.norm() if logs and rank == 0 else None)[0], x, logs, use_reentrant=False
        )
        y.sum().backward()
        assert ledger.lost is None
    for who in ("one rank", "both"):
        module.behind = raising(RuntimeError("behind")) if rank or who == "both" else None
        with torch.no_grad(), pytest.raises(RuntimeError, match="behind") if module.behind else nullcontext():
            module(x)
        if not module.behind:  # the next layer, whose plan is new; one that is known ends by the timeout
            with pytest.raises(ValueError, match=r"^rank 1 refused: behind$"):
                dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, scale=0.66)
        module.behind = None
        with pytest.raises(
            RuntimeError, match=r"at different calls over this mesh since an error: rank [01] refused: behind; put each"
        ):
            check_module_step(rank, mesh, module, 1)  # the next layer, or the next step?
        with shared_failures(mesh):
            check_module_step(rank, mesh, module, 1)
        check_module_step(rank, mesh, module, 2)
    dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, scale=0.77)
    check_module_step(rank, mesh, module, 3)


@pytest.mark.ranks
def test_errors_behind_a_call_end_all_calls_until_the_next_step(pair: Ranks) -> None:
    pair.run(check_errors_behind)


def check_default_compile_fails(rank: int, mesh: DeviceMesh) -> None:
    """Without fullgraph too, where the error reaches the user; not where a frame is run uncompiled."""
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in shard(rank, 1))

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such backend")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = dilated_attention(q, k, v, PATTERN, mesh=mesh)
        torch._dynamo.graph_break()
        return out + 0

    assert_right(torch.compile(attend, backend="eager")(q, k, v), [q, k, v], rank, 1)
    ledger = _ledger(mesh.get_group())
    before = ledger.exchanged
    torch._dynamo.reset()
    if rank == 1:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
            torch.compile(dilated_attention, backend=broken)(q, k, v, PATTERN, mesh=mesh)
        assert ledger.exchanged == before + 1
    else:
        with pytest.raises(ValueError, match=r"rank 1 refused: torch.compile failed: .*no such backend"):
            dilated_attention(q, k, v, PATTERN, mesh=mesh, scale=0.123)
    check_step(rank, mesh, 3)


@pytest.mark.ranks
def test_ranks_hear_of_a_compiler_that_fails_without_fullgraph(pair: Ranks) -> None:
    pair.run(check_default_compile_fails)


class Net(torch.nn.Module):
    """A model in which a user's adapter attends on its own over the mesh, and may fail there; hung up by a user's hook."""

    def __init__(self, mesh: DeviceMesh | None, place: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LongNetConfig(vocab_size=29, embed_dim=12, num_layers=2, num_heads=3, pattern=PATTERN)
        self.model, self.mesh = LongNetLM(config, mesh=mesh).double().eval(), mesh
        self.error: BaseException | None = None
        first, last = self.model.layers
        if place == "behind the first layer":
            first.register_forward_hook(lambda module, args, out: self.adapt(out))
        elif place == "before the last attention itself":
            last.self_attn.attention.register_forward_pre_hook(lambda module, args: (self.adapt(args[0].flatten(2)), None)[1])
        else:
            inside = {"inside the last layer": last.self_attn_layer_norm, "behind the last": last.ffn}
            inside.get(place, last).register_forward_pre_hook(lambda module, args: self.adapt(args[0]))

    def adapt(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (3, 4))
        attention_map(q, q, PATTERN, queries=[1], mesh=self.mesh)
        more = dilated_attention(q, q, q, PATTERN, is_causal=True, mesh=self.mesh)
        if self.error is not None:
            raise self.error
        return x + more.flatten(2)

    @torch.no_grad()
    def check(self, rank: int, alone: "Net", seed: int) -> None:
        tokens = torch.randint(29, (1, 2 * TOKENS), generator=torch.Generator().manual_seed(seed))
        here = slice(rank * TOKENS, (rank + 1) * TOKENS)
        torch.testing.assert_close(self.model(tokens[:, here]), alone.model(tokens)[:, here], **EXACT)


def hears(rank: int, mesh: DeviceMesh, scale: float, fails: Callable[[], object], reason: str) -> None:
    """Rank 1 fails in what both do and tells; rank 0 leaves it there without a word, and hears in a call of its own."""
    with pytest.raises(BaseException, match=reason if rank else "without a word"), torch.no_grad():
        fails()
    assert (_ledger(mesh.get_group()).lost is None) == (rank == 0)
    for error in (ValueError, RuntimeError) if rank == 0 else (RuntimeError,):
        with pytest.raises(error, match=f"rank 1 refused: {reason}"):
            dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, scale=scale)
    with shared_failures(mesh):
        check_step(rank, mesh, 3)


def check_calls_of_others_inside(rank: int, mesh: DeviceMesh, place: str) -> None:
    """A user's calls over the mesh inside a model do not count for its own."""
    net, alone = Net(mesh, place), Net(None, place)
    net.check(rank, alone, 0)
    net.error = ValueError("the adapter failed") if rank else GeneratorExit("without a word")
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    hears(rank, mesh, 0.5 + 0.01 * len(place), lambda: net.model(tokens), "the adapter failed")
    net.error = None
    net.check(rank, alone, 1)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "place",
    [
        "behind the first layer",
        "before the last layer",
        "inside the last layer",
        "before the last attention itself",
        "behind the last",
    ],
)
def test_calls_inside_a_model_do_not_count_for_its_own(pair: Ranks, place: str) -> None:
    pair.run(check_calls_of_others_inside, place)


def check_kernels_that_fail(rank: int, mesh: DeviceMesh) -> None:
    """In the call of a layer, when its rows are away: the other rank goes on to the next layer."""
    torch.manual_seed(0)
    config = LongNetConfig(vocab_size=29, embed_dim=12, num_layers=2, num_heads=3, pattern=PATTERN)
    model, tokens = LongNetLM(config, mesh=mesh).double().eval(), torch.zeros(1, TOKENS, dtype=torch.int64)
    full = torch.OutOfMemoryError("no memory is left")

    def fails() -> None:
        if rank == 0:
            model.layers[0].register_forward_hook(lambda *_: raising(GeneratorExit("without a word"))())
            model(tokens)
        with mock.patch.object(rank_of_context._Work, "finish", side_effect=full):
            model(tokens)

    model(tokens)
    hears(rank, mesh, 0.345, fails, "(OutOfMemoryError: )?no memory is left")


@pytest.mark.ranks
def test_a_rank_whose_kernel_fails_is_told_of_in_the_next_call(pair: Ranks) -> None:
    pair.run(check_kernels_that_fail)


def check_waits_behind_a_kernel_that_fails(rank: int, mesh: DeviceMesh) -> None:
    """A call that both know: the reason is in the message of the rank that went on to the next one."""
    q, k, v = (x.detach() for x in shard(rank, 1))
    attend = partial(dilated_attention, q, k, v, PATTERN, mesh=mesh)
    attend()
    if rank == 1:
        full = torch.OutOfMemoryError("no memory is left")
        with mock.patch.object(rank_of_context._Work, "finish", side_effect=full), pytest.raises(torch.OutOfMemoryError):
            attend()
    else:
        assert_right(attend(), [q], rank, 1)
    match = (
        "rank 1 did not come to call 3: OutOfMemoryError: no mem"
        if rank == 0
        else "error: rank 1 refused: OutOfMemoryError: no mem"
    )
    with pytest.raises(RuntimeError, match=match):
        attend()  # of rank 1 the next step, of rank 0 the next layer


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_whose_kernel_fails_is_out_of_step(breaking: Ranks) -> None:
    breaking.run(check_waits_behind_a_kernel_that_fails)


def check_two_groups_of_one_compile(rank: int, mesh: DeviceMesh) -> None:
    """A compiler that fails over two groups of the same ranks refuses the first call alone, which the others hear of."""
    torch._dynamo.reset()
    other = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dilated_attention(dilated_attention(q, k, v, PATTERN, mesh=mesh), k, v, PATTERN, mesh=other)

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such backend")

    q, k, v = (x.detach() for x in shard(rank, 1))
    check_step(rank, other, 0)
    ledgers = [_ledger(each.get_group()) for each in (mesh, other)]
    before = [ledger.exchanged for ledger in ledgers]
    if rank == 1:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
            torch.compile(attend, fullgraph=True, backend=broken)(q, k, v)
    else:
        with pytest.raises(ValueError, match=r"rank 1 refused: torch.compile failed: .*no such backend"):
            dilated_attention(q, k, v, PATTERN, mesh=mesh, scale=0.0123)
    assert [ledger.exchanged for ledger in ledgers] == [before[0] + 1, before[1]]
    for seed in range(2):
        check_step(rank, other, seed)
        check_step(rank, mesh, seed)


@pytest.mark.ranks
def test_a_compiler_that_fails_over_two_groups_is_told_of_once(pair: Ranks) -> None:
    pair.run(check_two_groups_of_one_compile)
