"""NaN and ignored keys of one rank: which rows of others they reach."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.distributed.planner.plan import EXCHANGES
from tests.cases import differentiate
from tests.distributed.cases import ShardedCase, arguments, assert_expected, cut, expected_of, shards
from tests.distributed.processes import Ranks, one_size


def check_ignored(rank: int, mesh: DeviceMesh, case: ShardedCase, exchange: str) -> None:
    options = arguments(case, rank, mesh, exchange=exchange)
    q, k, v, dout = (x.clone() for x in shards(case, rank))
    k[options["key_padding_mask"]] = torch.nan
    v[options["key_padding_mask"]] = torch.inf
    dlse = expected_of(case)["dlse"][:, :, case.shard(rank)]
    attend = lambda q, k, v: dilated_attention(q, k, v, case.pattern, **options)  # noqa: E731
    assert_expected(case, rank, differentiate(attend, q, k, v, dout, dlse))


@one_size
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_ignored_keys_of_any_rank_hold_has_no_effect(ranks: Ranks, exchange: str) -> None:
    for is_causal, pattern in ((True, DilatedPattern((5, 22), (1, 3))), (False, DilatedPattern.torchscale((9, 20), (3, 5)))):
        ranks.run(check_ignored, replace(cut(ranks.world_size, ignored=0.3, is_causal=is_causal), pattern=pattern), exchange)
