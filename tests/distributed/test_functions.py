"""Users' score and mask functions over shards against the oracle on the whole sequence: ranks in one process, then processes."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import flexdilated.backends.autograd.functions
from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.distributed.planner.tasks import tasks_of
from flexdilated.distributed.sharding import shard_sequence
from tests.backends.mods import Mods
from tests.distributed.cases import ShardedCase, arguments, cut, grid, shards
from tests.distributed.functions import EXCHANGES, NAMES, check, drawn, emulate, expected_of, weighed
from tests.distributed.processes import Ranks, exactly, one_size
from tests.tolerances import EXACT


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("backend", "num_ranks", "seeds"), [("sdpa", 3, 10), ("sdpa", 5, 10), ("sdpa", 16, 2), ("flex", 3, 5), ("flex", 5, 4)]
)
def test_any_number_of_ranks_gives_what_one_gives(
    exchange: str, backend: str, num_ranks: int, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "flex":
        emulate(monkeypatch)
    for seed in range(seeds):
        check(*drawn(1000 * num_ranks + seed, num_ranks), exchange, backend)


@pytest.mark.parametrize(("is_causal", "ignored"), [(False, 0.3), (True, None)])
def test_flex_lists_whole_and_partial_blocks(is_causal: bool, ignored: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of several blocks of 128 rows, cut where blocks are not."""
    emulate(monkeypatch)
    pattern = DilatedPattern((400, 700), (1, 2))
    case = ShardedCase(pattern, shard_lengths=(190, 313, 197), kv_heads=2, head_dim=3, ignored=ignored, is_causal=is_causal)
    check(case, Mods(None, None), "heads", "flex")
    check(case, Mods("alibi", "thirds"), "gather", "flex")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_flex_over_ranks_adds_zero_keys(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    pattern = DilatedPattern((12, 24), (1, 4), zero_padding=True)
    case = ShardedCase(pattern, shard_lengths=(17, 0, 10, 4), kv_heads=4, head_dim=3)
    assert any(task.zero_keys for rank in range(4) for task in tasks_of(case.plan(), exchange, rank)), "cut segments have some"
    check(case, Mods(None, None), exchange, "flex")


def test_scores_are_bounded_in_tasks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flexdilated.backends.autograd.functions, "SCORES", 40)
    check(cut(3, ignored=0.3, is_causal=True), Mods("table", "thirds"), "gather")


def check_oracle(rank: int, mesh: DeviceMesh, case: ShardedCase, mods: Mods, exchange: str, way: str) -> None:
    q, k, v, _ = (x.clone().requires_grad_() for x in shards(case, rank))
    table = mods.table(q.shape[2])
    given = arguments(case, rank, mesh, exchange=exchange, **mods.functions(table))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return dilated_attention(q, k, v, case.pattern, **given)

    if way == "flex":
        with pytest.MonkeyPatch.context() as monkeypatch:
            emulate(monkeypatch)
            out, lse = dilated_attention(q, k, v, case.pattern, backend="flex", **given)
    elif way == "checkpointed":
        out, lse = checkpoint(attend, q, k, v, use_reentrant=False)
    elif way == "compiled":
        torch._dynamo.reset()
        out, lse = torch.compile(attend, backend="aot_eager")(q, k, v)
    else:
        out, lse = attend(q, k, v)
    inputs = (q, k, v, table)
    grads = torch.autograd.grad(weighed(case, rank, mods, out, lse), inputs, allow_unused=True)
    found = [out.detach(), lse.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs))]
    dist.all_reduce(found[-1], group=mesh.get_group())
    here = case.shard(rank)
    for name, value, expected in zip(NAMES, found, expected_of(case, mods), strict=True):
        part = expected if name == "dtable" else expected[:, :, here] if name == "lse" else expected[:, here]
        torch.testing.assert_close(value, part, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@exactly(3)
@pytest.mark.parametrize(
    ("exchange", "way"),
    [
        *(("gather", way) for way in ("flex", "checkpointed")),
        ("heads", "flex"),
        *(pytest.param(exchange, "compiled", marks=pytest.mark.slow) for exchange in EXCHANGES),
    ],
)
def test_flex_checkpoints_and_compilers_change_nothing(ranks: Ranks, exchange: str, way: str) -> None:
    ranks.run(check_oracle, cut(3, ignored=0.3), Mods("table", "thirds"), exchange, way)


def uneven(mesh: DeviceMesh, heads: int) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k and v of a whole sequence, of which the longest shards compute most, and the options of its shards."""
    lengths, generator = (5, 26, 31, 2, 9, 1, 14, 3)[: mesh.size()], torch.Generator().manual_seed(7)
    whole = [torch.randn(1, sum(lengths), heads, 8, dtype=torch.float64, generator=generator) for _ in range(3)]
    return whole, {"mesh": mesh, "shard_lengths": lengths}


def check_table_alone(rank: int, mesh: DeviceMesh, exchange: str, asks: str) -> None:
    """A table learns where nothing else does, or is asked for alone."""
    whole, given = uneven(mesh, 1)
    tokens = whole[0].shape[1]
    pattern, table = DilatedPattern((tokens,), (1,)), torch.randn(1, 2 * tokens, dtype=torch.float64)
    dist.broadcast(table, 0, group=mesh.get_group())
    attend = partial(dilated_attention, pattern=pattern, score_mod=lambda s, b, h, i, j: s + table[h, i - j + tokens])
    table.requires_grad_()
    expected = torch.autograd.grad(attend(*whole).sum(), table)[0]
    shards = shard_sequence([x.clone().requires_grad_(asks == "table of all") for x in whole], **given)
    out = attend(*shards, exchange=exchange, **given)
    if asks == "backward":
        out.sum().backward()
    mine = table.grad if asks == "backward" else torch.autograd.grad(out.sum(), table)[0]
    dist.all_reduce(mine, group=mesh.get_group())
    torch.testing.assert_close(mine, expected, **EXACT)
    with torch.no_grad():
        assert not attend(*shards, exchange=exchange, **given).requires_grad


def check_changed_function(rank: int, mesh: DeviceMesh, exchange: str, _: str) -> None:
    """A number that a function reads changes before the backward: gradients are those of the forward."""
    whole, given = uneven(mesh, 2)
    whole, shards = ([x.clone().requires_grad_() for x in parts] for parts in (whole, shard_sequence(whole, **given)))
    slope, window = 0.3, 40
    functions: dict[str, Any] = {
        "score_mod": lambda s, b, h, i, j: s - slope * (i - j).abs(),
        "mask_mod": lambda b, h, i, j: (i - j).abs() < window,
    }
    pattern = DilatedPattern((9, whole[0].shape[1]), (1, 2))
    expected = torch.autograd.grad(reference.dilated_attention(*whole, pattern, **functions)[0].sum(), whole)
    out = dilated_attention(*shards, pattern, exchange=exchange, **given, **functions)
    slope, window = 9.0, 2
    for ours, wanted in zip(torch.autograd.grad(out.sum(), shards), shard_sequence(list(expected), **given)):
        torch.testing.assert_close(ours, wanted, **EXACT)


@one_size
@pytest.mark.parametrize(
    ("check", "exchange", "asks"),
    [
        (check_table_alone, "gather", "backward"),
        (check_table_alone, "heads", "table"),
        (check_table_alone, "gather", "table of all"),
        (check_table_alone, "heads", "table of all"),
        (check_changed_function, "gather", ""),
        (check_changed_function, "heads", ""),
    ],
)
def test_gradients_of_a_table_alone_and_of_what_a_function_read(ranks: Ranks, check: Any, exchange: str, asks: str) -> None:
    ranks.run(check, exchange, asks)


def compare_dtensors(mesh: DeviceMesh, both: bool, backend: str) -> None:
    mesh = grid(mesh.size()) if both else mesh
    placements: list[Placement] = [Shard(1), Shard(2)] if both else [Shard(2)]
    pattern = DilatedPattern((8, 30), (1, 3))
    case = ShardedCase(pattern, shard_lengths=(41,), batch=2, kv_heads=12, group=2, is_causal=True)
    mods, given = Mods("table", "thirds"), case.named()
    table = mods.table(24)
    options = {**case.options(), **mods.functions(table)}
    whole = [given[name].clone().requires_grad_() for name in "qkv"]
    parts = [distribute_tensor(given[name], mesh, placements).requires_grad_() for name in "qkv"]
    expected = reference.dilated_attention(*whole, pattern, **options)[0]
    out = dilated_attention(*parts, pattern, backend=backend, **options)
    torch.testing.assert_close(out.full_tensor(), expected, **EXACT)
    wanted = torch.autograd.grad(expected, [*whole, table], given["dout"])
    *grads, mine = torch.autograd.grad(out, [*parts, table], distribute_tensor(given["dout"], mesh, placements))
    dist.all_reduce(mine)
    for value, other in zip((*(x.full_tensor() for x in grads), mine), wanted, strict=True):
        torch.testing.assert_close(value, other, **EXACT)
    # As the guide to three axes says it: the sum over the ranks that hold heads comes with the backward.
    axis = mesh["columns"] if both else mesh
    copy = DTensor.from_local(table, axis, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    out = dilated_attention(*parts, pattern, backend=backend, **case.options(), **mods.functions(copy))
    (mine,) = torch.autograd.grad(out, [table], distribute_tensor(given["dout"], mesh, placements))
    if both:
        dist.all_reduce(mine, group=mesh["rows"].get_group())
    torch.testing.assert_close(mine, wanted[-1], **EXACT)


def check_dtensors(rank: int, mesh: DeviceMesh, both: bool, backend: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        emulate(monkeypatch)
        compare_dtensors(mesh, both, backend)


@pytest.mark.parametrize(
    ("ranks", "both", "backend"),
    [
        pytest.param(3, False, "flex", id="heads-flex-3_ranks"),
        pytest.param(4, True, "sdpa", id="tokens_and_heads-sdpa-4_ranks"),
    ],
    indirect=["ranks"],
)
@pytest.mark.ranks
def test_functions_are_told_the_heads_of_the_model(ranks: Ranks, both: bool, backend: str) -> None:
    ranks.run(check_dtensors, both, backend)


def check_dropout(rank: int, mesh: DeviceMesh) -> Tensor:
    """Ranks seeded alike, of equal data, without rows to move; then with some."""
    q = torch.ones(1, 16, 2, 4, dtype=torch.float64)
    v = torch.eye(16, dtype=torch.float64)[None, :, None, :4].expand(1, 16, 2, 4)
    found = []
    for length, seed in ((16, 1), (16, 1), (16, 2), (16 * mesh.size(), 1), (16 * mesh.size(), 1)):
        torch.manual_seed(seed)
        options: dict[str, Any] = {"score_mod": lambda s, b, h, i, j: s, "dropout_p": 0.5, "mesh": mesh}
        found.append(dilated_attention(q, q, v, DilatedPattern((length,), (1,)), **options))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[3], found[4])
    assert not torch.equal(found[0], found[2])
    drawn = torch.rand(1)  # what is drawn inside leaves the generator as one seed does
    torch.manual_seed(1)
    torch.randint(1 << 62, (1,))
    assert torch.equal(drawn, torch.rand(1))
    return found[0]


@one_size
def test_ranks_that_are_seeded_alike_drop_differently(ranks: Ranks) -> None:
    outs = ranks.run(check_dropout)
    assert all(not torch.equal(outs[0], out) for out in outs[1:])


def check_refused_whole(mesh: DeviceMesh, case: ShardedCase, inputs: tuple[Tensor, ...], mods: dict[str, Any]) -> None:
    torch._dynamo.reset()
    for options in (mods, {"backend": "flex"}, {**mods, "backend": "flex"}):
        attend = partial(dilated_attention, shard_lengths=case.shard_lengths, mesh=mesh, **options)
        match = "fullgraph must be False with score_mod, mask_mod or backend='flex' over several ranks"
        with pytest.raises(torch._dynamo.exc.Unsupported, match=match):
            torch.compile(attend, backend="eager", fullgraph=True)(*inputs, case.pattern)

    class Attends(nn.Module):
        def forward(self, *inputs: Tensor) -> Any:
            return attend(*inputs, case.pattern)

    match = "mesh must be None with score_mod, mask_mod or backend='flex' under torch.export"
    with pytest.raises(NotImplementedError, match=match):
        torch.export.export(Attends(), inputs, strict=False)


@one_size
def test_what_ranks_refuse_leaves_them_in_order(rank: int, mesh: DeviceMesh) -> None:
    case = cut(mesh.size())
    q, k, v, _ = shards(case, rank)
    mods = Mods("alibi", "thirds").functions(torch.zeros(()))

    def refuses(error: type[Exception], match: str, pattern: DilatedPattern = case.pattern, **options: Any) -> None:
        with pytest.raises(error, match=match):
            dilated_attention(q, k, v, pattern, mesh=mesh, shard_lengths=case.shard_lengths, **options)

    refuses(
        NotImplementedError,
        r"^exchange must be 'auto', 'gather' or 'heads' with score_mod and mask_mod, got 'ring'",
        **mods,
        exchange="ring",
    )
    refuses(NotImplementedError, "come with a pattern that adds no zero keys", DilatedPattern.torchscale((9, 20), (3, 5)), **mods)
    q, k, v = q.float(), k.float(), v.float()
    for given in (mods, {}):
        refuses(NotImplementedError, r"backend 'flex' cannot run this on cpu: .* gives no lse on CPU", **given, backend="flex")
    q, k, v, _ = shards(case, rank)
    with pytest.MonkeyPatch.context() as monkeypatch:
        emulate(monkeypatch)
        refuses(
            NotImplementedError,
            r"^exchange must be 'auto', 'gather' or 'heads' with backend='flex', got 'ring'",
            backend="flex",
            exchange="ring",
        )
        shifted = DilatedPattern.torchscale((7, 16), (3, 5))
        refuses(NotImplementedError, r"^pattern must not shift positions over ranks, got zero_padding=True and rates", shifted)
        backend = "flex" if rank == 0 else "sdpa"
        refuses(ValueError, r"ranks must agree on flex, got True on rank 0 and False on rank", backend=backend)
    alone = {"score_mod": mods["score_mod"]} if rank == 0 else {}
    refuses(ValueError, r"ranks must agree on score_mod, got True on rank 0 and False on rank", **alone)
    refuses(TypeError, "mask_mod must return a bool", mask_mod=lambda b, h, i, j: i)
    check_refused_whole(mesh, case, (q, k, v), mods)
    for exchange in EXCHANGES:  # by the inputs' names too, where torch would leave the second part out
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = dilated_attention(*leaves, case.pattern, mesh=mesh, exchange=exchange, shard_lengths=case.shard_lengths, **mods)
        with pytest.raises(NotImplementedError, match="must not be differentiated twice"):
            torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    check_oracle(rank, mesh, case, Mods("table", "thirds"), "auto", "plain")
