"""NaN and ignored keys of one rank: which rows of others they reach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.distributed.planner.plan import EXCHANGES
from tests.cases import differentiate
from tests.distributed.cases import ShardedCase, arguments, assert_expected, cut, expected_of, shards, simple
from tests.distributed.processes import Ranks, one_size
from tests.tolerances import EXACT


def visible(case: ShardedCase) -> Tensor:
    """`(B, queries, H, keys)` bool: who may see whom, by the oracle."""
    given, n = case.named(), case.num_tokens
    v = torch.eye(n, dtype=torch.float64)[None, :, None].expand(case.batch, n, case.kv_heads, n)
    return reference.dilated_attention(given["q"], given["k"], v, case.pattern, **case.options())[0] > 0


def check_nan(rank: int, mesh: DeviceMesh, case: ShardedCase, name: str, exchange: str) -> None:
    """One row of rank 1 is NaN: of q, k or v."""
    token, head, here = case.shard(1).start + 2, 1, case.shard(rank)
    # Kernels multiply what the causal mask hides by 0, which NaN survives, on one rank too: v forwards, k backwards.
    seen, near = visible(case), visible(replace(case, is_causal=False))
    least, most = (torch.zeros(case.batch, case.num_tokens, case.kv_heads, dtype=torch.bool) for _ in range(2))
    if name == "q":  # aten's CPU kernel takes a row of NaN scores as one without keys
        most[0, token, head] = True
    else:
        least[0, :, head] = seen[0, :, head, token]
        most[0, :, head] = (near if name == "v" else seen)[0, :, head, token]
        assert least.any()
    assert not most.all()
    met = (near & most[..., None]).any(dim=1).transpose(1, 2)[:, here]  # keys of a row with NaN
    touched = most.clone()
    if name != "q":
        touched[0, :, head] = near[0, :, head, token]
    most, touched = most[:, here], touched[:, here]
    given = case.named()
    given[name][0, token, head] = torch.nan
    given["dlse"] = expected_of(case)["dlse"]
    options = arguments(case, rank, mesh, exchange=exchange)
    inputs = [given[x][:, here] for x in ("q", "k", "v", "dout")]
    out, lse, dq, dk, dv = differentiate(
        lambda q, k, v: dilated_attention(q, k, v, case.pattern, **options), *inputs, given["dlse"][:, :, here]
    )
    assert out.isnan().any(dim=-1)[least[:, here]].all()
    if name == "k":
        assert lse.transpose(1, 2).isnan()[least[:, here]].all()
    expected = {key: x[:, :, here].transpose(1, 2) if key == "lse" else x[:, here] for key, x in expected_of(case).items()}
    finite = (("out", out, most), ("lse", lse.transpose(1, 2), most), ("dq", dq, touched), ("dk", dk, met), ("dv", dv, met))
    for key, x, rows in finite:
        torch.testing.assert_close(x[~rows], expected[key][~rows], **EXACT)


@one_size
@pytest.mark.parametrize(
    ("name", "is_causal", "exchange"),
    [
        ("q", True, "gather"),
        ("q", False, "ring"),
        ("q", True, "heads"),
        ("k", False, "gather"),
        ("k", True, "ring"),
        ("k", False, "heads"),
        ("v", True, "gather"),
        ("v", False, "ring"),
        ("v", True, "heads"),
    ],
)
def test_nan_of_one_rank_stays_in_the_rows_that_may_see_it(ranks: Ranks, name: str, is_causal: bool, exchange: str) -> None:
    case = replace(simple(ranks.world_size, batch=2, is_causal=is_causal), pattern=DilatedPattern((5, 22), (1, 3)))
    ranks.run(check_nan, case, name, exchange)


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
