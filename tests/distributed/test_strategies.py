"""What each strategy moves and computes, against simulations."""

from typing import Literal

import numpy as np
import pytest

from flexdilated import DilatedPattern
from flexdilated.analysis.strategies import strategies, traffic_by_ranks
from flexdilated.distributed.sharding import even_shard_lengths
from tests.distributed.layers import layer


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("kv_heads", [6, 12])
def test_traffic_of_the_others_equals_a_simulation(ranks: int, kv_heads: int) -> None:
    of = layer(ranks=ranks, kv_heads=kv_heads)
    found = {each.name: each for each in strategies(of)}
    shards = even_shard_lengths(of.tokens, ranks)
    row = of.batch * of.head_dim * 4
    # The ring: K|V of a shard hops from rank to rank; in backward so does the sum of its dK|dV, from the next rank on.
    forward, backward, gathered, reduced = (np.zeros(ranks, np.int64) for _ in range(4))
    for home, size in enumerate(shards):
        for hop in range(1, ranks):
            forward[(home + hop) % ranks] += size * kv_heads * 2 * row
            backward[(home + hop) % ranks] += size * kv_heads * 2 * row
            backward[(home + 1 + hop) % ranks] += size * kv_heads * 2 * row
        for other in range(ranks):
            if other != home:
                gathered[other] += size * kv_heads * 2 * row
                reduced[home] += size * kv_heads * 2 * row
    for name, expected in (("ring-all", (forward, backward)), ("all-gather", (gathered, reduced))):
        np.testing.assert_array_equal(found[name].forward, expected[0])
        np.testing.assert_array_equal(found[name].backward, expected[1])
    # Ulysses: every element of a token and head moves from the rank of the token to that of the head, or back.
    there, back = (np.zeros((2, ranks), np.int64) for _ in range(2))  # q and k, v; forward and backward
    for sender, size in enumerate(shards):
        for receiver in range(ranks):
            if sender != receiver:
                there[:, receiver] += size * np.array([of.heads, 2 * kv_heads]) // ranks * row
                back[:, sender] += size * np.array([of.heads, 2 * kv_heads]) // ranks * row
    np.testing.assert_array_equal(found["ulysses"].forward, there.sum(axis=0) + back[0])
    np.testing.assert_array_equal(found["ulysses"].backward, there[0] + back.sum(axis=0))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rule", ["all", "grouped"])
def test_every_strategy_scores_the_same_pairs(rule: Literal["all", "grouped"], is_causal: bool) -> None:
    of = layer(pattern=DilatedPattern((7, 13, 31), (1, 2, 5), heads=rule), is_causal=is_causal, ranks=3)
    total = of.pattern.count_pairs(of.tokens, of.kv_heads, is_causal=is_causal)
    for each in strategies(of):
        assert each.pairs is not None
        assert each.pairs.shape == (3,)
        assert each.pairs.sum() == total, each.name


def test_traffic_by_ranks_is_that_of_each_number_of_ranks() -> None:
    lines, is_exact = traffic_by_ranks(layer(ranks=6))
    assert is_exact
    assert [ranks for ranks, _ in lines["gather"]] == [2, 4, 6]
    assert [ranks for ranks, _ in lines["ulysses"]] == [2, 6]  # 4 divides 12 heads, but not 6
    for ranks in (2, 4, 6):
        for each in strategies(layer(ranks=ranks), with_pairs=False):
            if each.forward is not None and each.backward is not None:
                assert (ranks, (each.forward + each.backward).max()) in lines[each.name]
    assert [ranks for ranks, _ in traffic_by_ranks(layer(ranks=1))[0]["gather"]] == [1]
