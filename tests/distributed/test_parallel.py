"""Every rank's part in one process, against the oracle; bytes against the plan."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern
from flexdilated.distributed.planner.plan import EXCHANGES
from flexdilated.distributed.runtime.buffers import Gradients
from flexdilated.distributed.runtime.messages import view_bits
from flexdilated.distributed.runtime.task_attention import TaskAttention
from tests.cases import unshifted
from tests.distributed.cases import ShardedCase, random_case
from tests.distributed.simulation import check, simulate

WIDE = ShardedCase(DilatedPattern((8, 24, 41), (1, 2, 3)), shard_lengths=(11, 13, 17), batch=2, group=2)


def test_gradients_go_home_round_the_ring_while_the_next_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 ranks that all need each other: what was computed of one source is settled after the next source's."""
    case = ShardedCase(DilatedPattern((48,), (1,)), shard_lengths=(12,) * 4)
    met: list[list[str]] = [[] for _ in range(4)]
    differentiate, add = TaskAttention.differentiate, Gradients.add_returned_keys

    def differentiated(work: Any, number: int, parts: Any, *rest: Any) -> None:
        met[work.rank].append(f"from {(work.rank - parts[0].rank) % 4}")
        differentiate(work, number, parts, *rest)

    def added(grads: Any, peer: int, grad: Tensor) -> None:
        rank = next(r for r in range(4) if r not in grads.buffers.schedule.kv.sends)  # it sends to all others
        met[rank].append("home")
        add(grads, peer, grad)

    monkeypatch.setattr(TaskAttention, "differentiate", differentiated)
    monkeypatch.setattr(Gradients, "add_returned_keys", added)
    check(case, "ring")
    assert all(events == ["from 0", "from 1", "from 2", "home", "from 3", "home", "home"] for events in met)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("num_ranks", "device"), [(3, "cpu"), (5, "cpu"), pytest.param(4, "cuda", marks=pytest.mark.gpu)])
def test_any_number_of_ranks_gives_what_one_gives(exchange: str, num_ranks: int, device: str) -> None:
    for seed in range(12):
        check(random_case(1000 * num_ranks + seed, num_ranks), exchange, device)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_many_ranks_give_what_one_gives(exchange: str) -> None:
    lengths = tuple((7, 5, 0, 6)[rank % 4] for rank in range(17))
    pattern = DilatedPattern((6, 20, 40, 76), (1, 2, 3, 5))
    check(ShardedCase(pattern, shard_lengths=lengths, kv_heads=3, group=2, head_dim=3, ignored=0.2, is_causal=True), exchange)
    check(random_case(8002, 8, longest=150), exchange)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_rows_that_were_not_kept_travel_again(exchange: str) -> None:
    for seed in range(3):
        case = random_case(5000 + seed, 3)
        for value, expected in zip(*(simulate(case, exchange, kept=kept)[0].values() for kept in (False, True))):
            assert torch.equal(value, expected)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("num_branches", "again"), [(3, 1), (4, 2)], ids=["kept", "again"])
def test_outputs_of_few_branches_are_kept_for_the_backward(
    exchange: str, num_branches: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = DilatedPattern((8, 24, 41, 29)[:num_branches], (1,) * num_branches, detach_weights=True)
    attended: list[int] = []
    attend = TaskAttention.attend

    def count(work: Any, *arguments: Any) -> None:
        attended.append(work.rank)
        attend(work, *arguments)

    monkeypatch.setattr(TaskAttention, "attend", count)
    check(replace(WIDE, pattern=pattern, is_causal=True), exchange)
    assert len(attended) == again * 3 * (3 if exchange == "ring" else 1)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_empty_batch_gives_what_one_rank_gives(exchange: str) -> None:
    case = replace(WIDE, batch=0, ignored=0.3)
    expected = case.expected()
    for kept in (True, False):
        for name, value in simulate(case, exchange, kept=kept)[0].items():
            assert value.shape == expected[name].shape


@pytest.mark.parametrize("x", [torch.ones(()).expand(3, 2, 1), torch.ones(1, 1, 2)[..., :1], torch.ones(5, 1, 3)[:1, :, 1:]])
def test_bits_of_any_strides_travel(x: Tensor) -> None:
    bits = view_bits(x, torch.bfloat16)
    assert bits.shape == (*x.shape[:-1], 2 * x.shape[-1])
    assert torch.equal(view_bits(bits, torch.float32), x)
    row = torch.cat([bits.new_zeros(*x.shape[:-1], 3), bits], dim=-1)  # an odd place in a message
    assert torch.equal(view_bits(row[..., 3:], torch.float32), x)


@pytest.mark.parametrize(("name", "exchange"), [("q", "heads"), ("k", "ring"), ("v", "gather"), ("v", "heads")])
def test_nan_stays_in_the_rows_that_may_see_it(name: str, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Kernels multiply what the causal mask hides by 0, which NaN in v survives, on one rank too.
    case = ShardedCase(DilatedPattern((5, 16), (1, 3)), shard_lengths=(9, 12, 11), is_causal=name != "v")
    given = {key: case.tensors() for key in "qkv"}
    for i, key in enumerate("qkv"):
        given[key][i][0, 10, 1] = torch.nan
    monkeypatch.setattr(ShardedCase, "tensors", lambda self, dtype=torch.float64: given[name.replace("v", "k")])
    may_see = case.expected()["out"].isnan()
    monkeypatch.setattr(ShardedCase, "tensors", lambda self, dtype=torch.float64: given[name])
    got, _, _ = simulate(case, exchange)
    assert not (got["out"].isnan() & ~may_see).any()
    assert not (got["lse"].isnan() & ~may_see.any(dim=-1).transpose(1, 2)).any()
    # A kernel may take a row whose only key is NaN for an empty one.
    assert got["out"].isnan().sum() >= may_see.sum() - case.head_dim
    # Gradients are NaN at most where a row meets one that saw it: rows of other heads and of segments without it stay finite.
    for key in ("dq", "dk", "dv"):
        assert not got[key][:, :, [0, 2]].isnan().any()
        assert not got[key][:, 16:].isnan().any()
    assert name == "q" or all(got[key].isnan().any() for key in ("dq", "dk"))


@pytest.mark.parametrize(("is_causal", "zero_padding"), [(False, False), (True, True), (True, False)])
def test_one_head_is_computed_by_several_ranks(is_causal: bool, zero_padding: bool) -> None:
    pattern = unshifted(DilatedPattern((8, 67), (1, 2), zero_padding=zero_padding))
    case = ShardedCase(pattern, shard_lengths=(11, 13, 7), kv_heads=1, is_causal=is_causal, ignored=0.2)
    plan = case.plan()
    parts = plan.parts("heads")
    assert len(parts.where(plan.all_segments.branch[parts.segment] == 1).executor) == 3
    check(case, "heads")
