"""What ranks compare, and calls that they mix up: an error on every rank, by name or by the timeout, and never wrong numbers."""

import os
import re
import threading
import time
import traceback
from collections.abc import Callable
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
from flexdilated._version import __version__
from flexdilated.distributed import attention, consistency, gather_tokens, unshard_sequence
from flexdilated.distributed.consistency import MOST_CHARACTERS, TAGS, Fields, differences, one_call, shown
from flexdilated.distributed.runtime import transport
from tests.distributed.cases import ShardedCase, arguments, check_sound, results, shards, simple
from tests.distributed.processes import Ranks, exactly, one_size
from tests.tolerances import EXACT

PATTERN = DilatedPattern((24,), (1,))  # cut between two ranks of 13 tokens
LOCAL = DilatedPattern((13,), (1,))
TOKENS = 13


Arguments = dict[str, Any]


def call(case: ShardedCase, rank: int, mesh: DeviceMesh, change: Callable[[Arguments], Arguments] = dict, **options: Any) -> Tensor:
    """The output of this rank, by arguments of which it may change some."""
    given = {**dict(zip("qkv", shards(case, rank))), "pattern": case.pattern, **arguments(case, rank, mesh, **options)}
    return dilated_attention(**given | change(given))[0]


def all_three(function: Callable[[Tensor], Tensor]) -> Callable[[Arguments], Arguments]:
    return lambda given: {name: function(given[name]) for name in "qkv"}


# What one rank changes, as ranks name it, with the value of the others and its own.
FIELDS: tuple[tuple[str, str, str, Callable[[Arguments], Arguments]], ...] = (
    ("pattern.segment_lengths", "[8, 67]", "[8, 61]", lambda _: {"pattern": DilatedPattern((8, 61), (1, 2))}),
    ("shard_lengths", "[11, 13", "[12, 13", lambda x: {"shard_lengths": (12, *x["shard_lengths"][1:])}),
    ("num_kv_heads", "3", "2", all_three(lambda x: x[:, :, :2])),
    ("query_heads_per_kv_head", "1", "2", lambda x: {"q": x["q"].repeat(1, 1, 2, 1)}),
    ("head_dim", "3", "2", all_three(lambda x: x[..., :2])),
    ("batch", "1", "2", all_three(lambda x: x.expand(2, -1, -1, -1))),
    ("dtype", "'torch.float64'", "'torch.float32'", all_three(Tensor.float)),
    ("key_padding_mask", "False", "True", lambda x: {"key_padding_mask": torch.zeros(x["q"].shape[:2], dtype=torch.bool)}),
    ("documents", "'none'", "[[0, 3], [3, ", lambda x: {"cu_seqlens": torch.tensor([0, 3, sum(x["shard_lengths"])])}),
    ("differentiable", "False", "True", lambda x: {"q": x["q"].clone().requires_grad_()}),
    ("is_causal", "False", "True", lambda _: {"is_causal": True}),
    ("exchange", "'auto'", "'ring'", lambda _: {"exchange": "ring"}),
    ("scale", f"{3**-0.5!r}", "3.25", lambda _: {"scale": 3.25}),
    ("dropout_p", "0.0", "0.5", lambda _: {"dropout_p": 0.5}),
    ("sinks", "False", "True", lambda x: {"sinks": x["q"].new_zeros(x["q"].shape[2])}),
)


@one_size
def test_ranks_that_differ_all_raise_both_values(rank: int, mesh: DeviceMesh) -> None:
    case, odd = simple(mesh.size()), mesh.size() - 1
    for number, (field, usual, other, change) in enumerate(FIELDS):
        options = {} if field == "scale" else {"scale": 0.5 + number / 128}
        message = rf"^ranks must agree on (.*; on )?{field}, got {re.escape(usual)}.* and {re.escape(other)}.*on rank {odd}$"
        with pytest.raises(ValueError, match=message):
            call(case, rank, mesh, change if rank == odd else dict, **options)
    q, k, v, _ = shards(case, rank)
    given = {"shard_lengths": case.shard_lengths, "cu_seqlens": torch.tensor([0, 3, case.num_tokens - 1])}
    with pytest.raises(ValueError, match=rf"^cu_seqlens must rise from 0 to the number of tokens={case.num_tokens} of all ranks"):
        dilated_attention(q, k, v, case.pattern, mesh=mesh, **given)
    a, b = case.shard_lengths[:2]  # equal lengths are assumed where none are declared
    match = rf"^ranks must agree on shard_lengths, got .*\[{a}, {a}.* on rank 0 and .*\[{b}, {b}"
    with pytest.raises(ValueError, match=match):
        dilated_attention(q, k, v, case.pattern, mesh=mesh)
    version = __version__ if rank else "1.2.3"
    match = rf"^ranks must agree on the version of flexdilated, got '1\.2\.3' on rank 0 and '{__version__}' on rank"
    with mock.patch.object(consistency, "__version__", version), pytest.raises(ValueError, match=match):
        dilated_attention(q, k, v, case.pattern, mesh=mesh, shard_lengths=case.shard_lengths, scale=0.125)
    check_sound(case, rank, mesh)


@exactly(2)
def test_sinks_on_one_rank_alone_raise_on_both_beside_a_function_too(rank: int, mesh: DeviceMesh) -> None:
    q, sinks = torch.ones(1, 8, 4, 8), None if rank else torch.zeros(4)
    with pytest.raises(ValueError, match=r"^ranks must agree on sinks, got True on rank 0 and False on rank 1$"):
        dilated_attention(q, q, q, PATTERN, sinks=sinks, mesh=mesh, score_mod=lambda score, *_: score)


def count_collectives(rank: int, mesh: DeviceMesh) -> list[int]:
    """Collectives after each of five steps, the first step with another scale, and one under no_grad; then of a memory of two."""
    case, counts = simple(mesh.size()), []
    with mock.patch.object(dist, "all_gather", side_effect=dist.all_gather) as gather:
        for scale in (0.7,) * 5 + (0.9,):
            results(case, rank, mesh, scale=scale)
            counts.append(gather.call_count)
        with torch.no_grad():
            call(case, rank, mesh, scale=0.7)
        counts.append(gather.call_count)
        with mock.patch.object(consistency, "MOST_PLANS", 2):
            mesh = own(mesh)
            for scale in (2.1, 2.2, 2.1, 2.3, 2.2, 2.1):
                call(case, rank, mesh, scale=scale)
                counts.append(gather.call_count)
    return counts


@one_size
def test_ranks_compare_each_plan_once_and_again_once_it_is_forgotten(ranks: Ranks) -> None:
    assert ranks.run(count_collectives) == [[1, 1, 1, 1, 1, 2, 3, 4, 5, 5, 6, 6, 7]] * ranks.world_size


def test_what_differs_is_shown_with_its_ranks() -> None:
    assert differences([4, 5, 7], [{"a": "1", "b": "2"}, {"a": "1"}, {"a": "3", "b": "2"}]) == [
        "a, got 1 on ranks 4, 5 and 3 on rank 7",
        "b, got 2 on ranks 4, 7 and nothing on rank 5",
    ]
    many = [{"a": str(rank % 11)} for rank in range(22)]
    assert differences(range(22), many)[0].endswith("7 on ranks 7, 18, ... (11 values)")
    most = [{"a": str(rank < 11)} for rank in range(12)]
    assert differences(range(12), most)[0].endswith("7, ... (11 ranks) and False on rank 11")
    long, other = list(range(1000)), [*range(999), 0]
    assert shown(long) != shown(other)
    assert len(shown(long)) < MOST_CHARACTERS + 30
    assert Fields({"a": (1, 2)}).digest == Fields({"a": [1, 2]}).digest != Fields({"a": [2, 1]}).digest


def own(mesh: DeviceMesh, timeout: timedelta | None = None) -> DeviceMesh:
    """The same ranks in a group of their own, which a case may leave out of order."""
    return DeviceMesh.from_group(dist.new_group(mesh.mesh.tolist(), timeout=timeout), "cpu")


def short(rank: int, mesh: DeviceMesh) -> timedelta:
    """Of a group whose ranks wait for messages that do not come: many times what a step takes on this machine now."""
    began = time.monotonic()
    check_step(rank, mesh, 3)
    seconds = torch.tensor(time.monotonic() - began)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=mesh.get_group())
    return timedelta(seconds=min(max(4.0, 200 * seconds.item()), 60.0))


def whole(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2 * TOKENS, 3, 5, dtype=torch.float64, generator=generator) for _ in range(3)]


def shard(rank: int, seed: int) -> list[Tensor]:
    return [x[:, rank * TOKENS : (rank + 1) * TOKENS].clone().requires_grad_() for x in whole(seed)]


def assert_right(out: Tensor, inputs: list[Tensor], rank: int, seed: int, pattern: DilatedPattern = PATTERN) -> None:
    given = [x.requires_grad_() for x in whole(seed)]
    expected = dilated_attention(*given, pattern)
    here = slice(rank * TOKENS, (rank + 1) * TOKENS)
    torch.testing.assert_close(out, expected[:, here], **EXACT)
    if inputs[0].grad is not None:
        expected.square().sum().backward()
        for x, e in zip(inputs, given):
            torch.testing.assert_close(x.grad, e.grad[:, here], **EXACT)


def check_step(rank: int, mesh: DeviceMesh, seed: int, pattern: DilatedPattern = PATTERN) -> None:
    inputs = shard(rank, seed)
    out = dilated_attention(*inputs, pattern, mesh=mesh)
    out.square().sum().backward()
    assert_right(out, inputs, rank, seed, pattern)


OUT_OF_STEP = r"^ranks must exchange rows in (the backward of )?call \d+ over this mesh.*(?i:timed? ?out|closed)"


def backwards_in_another_order(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    inputs = [shard(rank, seed) for seed in (1, 2)]
    outs = [dilated_attention(*x, PATTERN, mesh=mesh, exchange=exchange) for x in inputs]
    with pytest.raises(RuntimeError, match=OUT_OF_STEP):
        outs[rank].square().sum().backward()


def a_layer_left_out(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    """The forward of the layer, on rank 0, and the backward of the layer before it, on rank 1."""
    inputs = shard(rank, 1)
    first = dilated_attention(*inputs, PATTERN, mesh=mesh, exchange=exchange)
    with pytest.raises(RuntimeError, match=OUT_OF_STEP):
        dilated_attention(*shard(rank, 2), PATTERN, mesh=mesh, exchange=exchange) if rank == 0 else first.sum().backward()


def a_layer_left_out_in_inference(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    """Of three layers of one plan, rank 0 leaves out the second: its third pairs with the second of rank 1. No whole is made."""

    def model() -> Tensor:
        x = shard(rank, 1)[0]
        for layer in range(3):
            x = x if layer == 1 and rank == 0 else dilated_attention(x, x, x, PATTERN, mesh=mesh, exchange=exchange)
        return unshard_sequence(x, mesh)

    dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, exchange=exchange)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"(?i)timed? ?out|closed"):
        model()


def two_known_plans(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    for scale in (0.5, 0.7):
        dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, exchange=exchange, scale=scale)
    with pytest.raises(RuntimeError, match=OUT_OF_STEP):
        dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, exchange=exchange, scale=0.5 if rank else 0.7)


def a_new_plan_beside_a_known_one(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, exchange=exchange)
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out|closed"):
        dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, exchange=exchange, is_causal=bool(rank))


def a_call_that_one_rank_refuses(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    """The next call of the rank that goes on is not taken for the call in which the other one waits."""
    dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, exchange=exchange)
    if rank == 1:
        with pytest.raises(ValueError, match="scale must be finite"):
            dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, exchange=exchange, scale=float("nan"))
    with pytest.raises(RuntimeError, match=OUT_OF_STEP):
        dilated_attention(*shard(rank, 2 + rank), PATTERN, mesh=mesh, exchange=exchange)


def a_kernel_that_fails_on_one_rank(rank: int, mesh: DeviceMesh, exchange: str) -> None:
    dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, exchange=exchange)
    if rank == 1:
        failing.add(threading.get_ident())
        with pytest.raises(MemoryError):
            dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, exchange=exchange)
        failing.remove(threading.get_ident())
    with pytest.raises(RuntimeError, match=OUT_OF_STEP):
        dilated_attention(*shard(rank, 2 + rank), PATTERN, mesh=mesh, exchange=exchange)


failing: set[int] = set()  # threads


def fail_or(forward: Callable[..., Any], *args: Any) -> Any:
    if threading.get_ident() in failing:
        raise MemoryError
    return forward(*args)


CASES = (
    *((backwards_in_another_order, exchange) for exchange in ("gather", "ring", "heads")),
    *((a_layer_left_out, exchange) for exchange in ("gather", "ring", "heads")),
    (a_layer_left_out_in_inference, "ring"),
    (two_known_plans, "heads"),
    (a_new_plan_beside_a_known_one, "gather"),
    (a_call_that_one_rank_refuses, "ring"),
    (a_kernel_that_fails_on_one_rank, "gather"),
)


@pytest.mark.slow
@exactly(2)
def test_calls_that_differ_end_in_the_timeout(rank: int, mesh: DeviceMesh) -> None:
    """Each case in a thread and a process group of its own: all timeouts run out together."""
    timeout = short(rank, mesh)
    meshes = [own(mesh, timeout) for _ in CASES]
    failures: list[str] = []

    def run(case: Callable[..., None], exchange: str, mesh: DeviceMesh) -> None:
        try:
            case(rank, mesh, exchange)
        except BaseException:
            failures.append(f"{case.__name__}, {exchange}: {traceback.format_exc()}")

    threads = [threading.Thread(target=run, args=(*case, mesh)) for case, mesh in zip(CASES, meshes)]
    with mock.patch.object(attention, "context_forward", partial(fail_or, attention.context_forward)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, "\n".join(failures)


def check_loss(rank: int, mesh: DeviceMesh, phase: str) -> None:
    """The process of rank 1 ends in the middle of a call."""
    case = simple(mesh.size())
    check_sound(case, rank, mesh)
    if rank != 1:
        with pytest.raises(RuntimeError, match=r"^ranks must exchange rows in "):
            results(case, rank, mesh)
        return
    calls = mock.Mock(side_effect=lambda batch: os._exit(1) if calls.call_count == end else send(batch))
    end, send = {"forward": 1, "backward": 2}[phase], dist.batch_isend_irecv
    with mock.patch.object(dist, "batch_isend_irecv", calls):
        results(case, rank, mesh, exchange="auto")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_rank_that_ends_is_an_error_on_the_others(phase: str, tmp_path: Path) -> None:
    with Ranks(3, tmp_path) as ranks:
        ranks.run(check_loss, phase, ending=(1,))


@exactly(2)
def test_a_call_too_many_is_named_where_ranks_compare(rank: int, mesh: DeviceMesh) -> None:
    mesh = own(mesh)
    dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh)
    if rank == 0:
        with pytest.raises(ValueError, match=r"^sinks must have shape"):  # a call that raises counts too
            dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, sinks=torch.zeros(99))
    for _ in range(2):  # still so when the error has been caught
        with pytest.raises(ValueError, match=r"^ranks must agree on the number of the call over this mesh, got \d+ on rank 0"):
            dilated_attention(*shard(rank, 1), PATTERN, mesh=mesh, scale=0.3)


def check_way(rank: int, mesh: DeviceMesh, pattern: DilatedPattern, way: str) -> None:
    inputs = shard(rank, 5)
    attend = partial(dilated_attention, pattern=pattern, mesh=mesh, exchange="gather")
    if way == "in turn":  # two models, whose backwards come in another order than their forwards
        other = shard(rank, 6)
        out, second = attend(*inputs), attend(*other)
        second.square().sum().backward()
        assert_right(second, other, rank, 6, pattern)
    elif way == "no_grad":
        with torch.no_grad():
            assert_right(attend(*inputs), inputs, rank, 5, pattern)
        return
    elif way == "twice":
        out = attend(*inputs)
        out.square().sum().backward(retain_graph=True)
    else:  # the first forward of a reentrant checkpoint is not differentiated
        out = checkpoint(attend, *inputs, use_reentrant=way == "reentrant")
    for x in inputs:
        x.grad = None
    out.square().sum().backward()
    assert_right(out, inputs, rank, 5, pattern)


@exactly(2)
@pytest.mark.parametrize("way", ["checkpoint", "reentrant", "twice", "no_grad", "in turn"])
def test_numbered_calls_give_what_one_rank_gives(rank: int, mesh: DeviceMesh, way: str) -> None:
    for pattern in (PATTERN, LOCAL):
        check_way(rank, mesh, pattern, way)


@exactly(2)
def test_transforms_and_threads_are_refused_by_name(rank: int, mesh: DeviceMesh) -> None:
    q, k, v = (x.detach() for x in shard(rank, 1))
    attend = lambda q: dilated_attention(q, k, v, PATTERN, mesh=mesh)  # noqa: E731
    for transform in (lambda: torch.func.jvp(attend, (q,), (q,)), lambda: torch.func.grad(lambda q: attend(q).sum())(q)):
        with pytest.raises(NotImplementedError, match=r"^mesh must come without torch\.func"):
            transform()
    with pytest.raises(NotImplementedError, match=r"^mesh must come without torch\.func"):
        torch.func.vmap(lambda q: attend(q[None]))(q)
    with fwAD.dual_level(), pytest.raises(NotImplementedError, match=r"^mesh must come without torch\.func and forward-mode"):
        attend(fwAD.make_dual(q, q))
    met: list[str] = []

    def other() -> None:
        try:
            attend(q)
        except RuntimeError as error:
            met.append(str(error))

    with one_call(mesh.get_group()):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert [error[:78] for error in met] == ["dilated_attention must run in one thread at a time over one mesh, got a call d"]
    check_step(rank, mesh, 9)


@exactly(2)
@pytest.mark.parametrize(
    ("exchange", "is_mixed"), [("gather", False), ("ring", False), ("heads", False), ("gather", True)], ids=str
)
def test_messages_without_tags_carry_their_number(rank: int, mesh: DeviceMesh, exchange: str, is_mixed: bool) -> None:
    """As over a backend that matches messages by their order alone."""
    send = dist.P2POp

    def untagged(make: Any, message: Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> dist.P2POp:
        return send(make, message, peer, group, 0)

    with mock.patch.object(transport, "has_tags", return_value=False), mock.patch.object(dist, "P2POp", untagged):
        inputs, mesh = shard(rank, 4), own(mesh)
        out = dilated_attention(*inputs, PATTERN, mesh=mesh, exchange=exchange)
        if is_mixed:
            other = dilated_attention(*shard(rank, 6), PATTERN, mesh=mesh, exchange=exchange)
            with pytest.raises(RuntimeError, match="ranks must make the same calls of dilated_attention in the same order, got"):
                (out, other)[rank].square().sum().backward()
        else:
            out.square().sum().backward()
            assert_right(out, inputs, rank, 4)


def test_tags_differ_between_calls_and_directions() -> None:
    fields = Fields({"a": 1})
    tags = {fields.tag(number, backward=back) for number in range(1000) for back in (False, True)}
    assert len(tags) == 2000
    assert min(tags) >= 0
    assert max(fields.tag(n, backward=True) for n in (0, TAGS - 1, TAGS)) < 1 << 31
    assert fields.tag(TAGS + 7) == fields.tag(7) != Fields({"a": 2}).tag(7)  # a billion calls later


@exactly(2)
def test_wholes_that_ranks_put_together_are_compared(rank: int, mesh: DeviceMesh) -> None:
    """Shards of other lengths, dtypes and gradients, which are compared at each call."""
    x = shard(rank, 1)[0].detach()
    good, expected = torch.zeros(1, dtype=torch.int64), whole(1)[0]
    for call, match in (
        (lambda: gather_tokens(x[:, rank:, :, 0], good, mesh), "shard_lengths of gather_tokens, got "),
        (lambda: unshard_sequence(x.float() if rank else x, mesh), "dtype, got 'torch.float64' on rank 0 and 'torch.float32' on"),
        (lambda: unshard_sequence(x, mesh, reduce_gradients=bool(rank)), "reduce_gradients, got False on rank 0 and True on"),
        (lambda: unshard_sequence(x.clone().requires_grad_(rank > 0), mesh, reduce_gradients=True), "requires_grad, got "),
        (lambda: unshard_sequence(torch.ones(2, 2, 3), mesh, dim=int(rank == 0)), "dim, got 1 on rank 0 and 0 on rank 1"),
        (
            lambda: unshard_sequence(x, mesh) if rank else dilated_attention(*shard(0, 1), PATTERN, mesh=mesh, scale=0.9),
            "call, got",
        ),
    ):
        with pytest.raises(ValueError, match=f"^ranks must agree on .*{match}"):
            call()
    with pytest.raises(TypeError, match=r"^the tensors must be plain ones, this rank's shards, got a DTensor; full_tensor\(\) is"):
        unshard_sequence(DTensor.from_local(torch.ones(1, 2), mesh, [Shard(1)]), mesh)
    with torch.no_grad():
        if rank == 0:  # a layer whose plan has no messages, which rank 1 leaves out
            dilated_attention(*shard(rank, 1), LOCAL, mesh=mesh, scale=0.9)
        dilated_attention(*shard(rank, 1), LOCAL, mesh=mesh, scale=0.9)
    with pytest.raises(ValueError, match=r"^ranks must agree on the number of the call over this mesh, got \d+ on rank 0 and"):
        unshard_sequence(torch.zeros(1, 1), mesh)
    if rank == 1:
        with one_call(mesh.get_group()):
            pass
    torch.testing.assert_close(unshard_sequence(x, mesh), expected, **EXACT)
    with pytest.raises(RuntimeError, match=r"^positions must be the same on all ranks, got others"):
        gather_tokens(x[..., 0], good + rank, mesh)
    torch.testing.assert_close(gather_tokens(x[..., 0], good, mesh), expected[:, :1, :, 0], **EXACT)


@exactly(2)
def test_gradients_of_two_wholes_are_not_mixed(rank: int, mesh: DeviceMesh) -> None:
    """Gradients of a whole are never added to those of another whole; the error leaves the ranks in order."""

    def wholes() -> tuple[list[Tensor], list[Tensor]]:
        parts = [torch.full((1, 2, 3), 1.0 + i, dtype=torch.float64, requires_grad=True) for i in range(2)]
        return parts, [unshard_sequence(x, mesh, reduce_gradients=True) for x in parts]

    for _ in range(2):  # and where ranks have compared the same fields before
        _, of = wholes()
        with pytest.raises(ValueError, match=r"^ranks must agree on the number of the forward, got \d+ on rank 0 and \d+ on"):
            of[rank].sum().backward()
        parts, of = wholes()
        for each in of:
            each.sum().backward()
        for x in parts:
            torch.testing.assert_close(x.grad, torch.full_like(x, float(mesh.size())), **EXACT)


@exactly(2)
def test_maps_in_another_order_are_an_error_on_both_ranks(rank: int, mesh: DeviceMesh) -> None:
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
