"""The doors over ranks: a case in uneven shards, on each of several processes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import dilated_attention
from tests.doors.cases import CASES, VARIANTS, Question, Results, assert_near, results

EXCHANGES = ("auto", "gather", "ring", "heads")
LENGTHS = {2: (12, 17), 3: (11, 0, 18)}


def refusal(case: Question, exchange: str) -> str | None:
    """What the error must say."""
    if case.has_functions and exchange == "ring":
        return "exchange must be 'auto', 'gather' or 'heads' with score_mod"
    return "pattern must not shift positions" if case.is_shifted else None


def shard(rank: int, mesh: DeviceMesh, case: Question) -> tuple[tuple[int, ...], slice]:
    """The tokens of each rank, and those of this one."""
    lengths = LENGTHS[mesh.size()] if case.num_tokens > 1 else (1, *[0] * (mesh.size() - 1))
    first = sum(lengths[:rank])
    return lengths, slice(first, first + lengths[rank])


def attend_shards(rank: int, mesh: DeviceMesh, case: Question, exchange: str) -> Results:
    """`results` of a rank's shard; gradients of the table and of sinks are summed over ranks."""
    lengths, here = shard(rank, mesh, case)
    others = (here.start, case.num_tokens - here.stop)

    def attend(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None, **keywords: Any) -> tuple[Tensor, Tensor]:
        """The whole sequence, of which this rank knows its own rows."""
        mask = None if key_padding_mask is None else key_padding_mask[:, here]
        keywords |= {"mesh": mesh, "exchange": exchange, "shard_lengths": lengths, "key_padding_mask": mask, "return_lse": True}
        out, lse = dilated_attention(q[:, here], k[:, here], v[:, here], case.pattern, **keywords)
        return F.pad(out, (0, 0, 0, 0, *others)), F.pad(lse, others, value=-torch.inf)

    found = results(attend, case)
    for name in ("dtable", "dsinks"):
        if name in found:
            dist.all_reduce(found[name])
    return found


def check_kind(rank: int, mesh: DeviceMesh, kind: str, exchange: str) -> None:
    """Check every variant of a kind, on every rank."""
    warnings.filterwarnings("ignore", "pattern with segments")
    for variant in VARIANTS:
        case = CASES[kind, variant]
        reason = refusal(case, exchange)
        try:
            if reason is None:
                assert_near(attend_shards(rank, mesh, case, exchange), case, case.dtype, shard(rank, mesh, case)[1])
            else:
                with pytest.raises(NotImplementedError, match=reason):
                    attend_shards(rank, mesh, case, exchange)
        except BaseException as error:
            raise AssertionError(f"variant {variant}: {type(error).__name__}: {error}") from error
