"""The cost per rank of a sharded sequence, from the planner: bytes received, memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flexdilated.analysis.lattice import checked, checked_documents
from flexdilated.analysis.strategies import Layer, layer_plan, memory, strategies
from flexdilated.core.pattern import DilatedPattern, at_least_one
from flexdilated.distributed.planner import cost_model

MOST_HEAD_DIM, MOST_BATCH = 2**12, 2**16  # bytes are 64-bit integers
DTYPES = ("float32", "bfloat16", "float16", "float64")


class RankCost(NamedTuple):
    """The cost of one layer under one way of moving rows: for each number, that of the rank with the largest."""

    is_ours: bool
    is_chosen: bool  # by `exchange="auto"`
    forward_bytes: int  # received
    backward_bytes: int
    both_bytes: int  # received in a forward and its backward, by the rank that gets most of both together
    memory_bytes: int  # q, k, v, out, lse, their gradients, and the messages that a forward holds together
    is_exact: bool  # else bytes and memory are at most so many: listing the rows of all ranks would take long


def count_rank_costs(
    pattern: DilatedPattern,
    num_tokens: int,
    num_heads: int,
    num_ranks: int,
    *,
    group: int = 1,
    head_dim: int = 64,
    dtype: str = "bfloat16",
    batch: int = 1,
    is_causal: bool = False,
    document_lengths: Iterable[int] | None = None,
) -> dict[str, RankCost]:
    """The cost at the busiest rank of one attention layer over contiguous, nearly equal shards: the numbers of `flexdilated plan`.

    Args:
        pattern: Which positions attend to which.
        num_tokens: Sequence length N.
        num_heads: Key/value heads.
        num_ranks: Ranks P that share the sequence.
        group: Query heads per key/value head.
        head_dim: Elements per head, up to 4096.
        dtype: Of q, k and v: float32, bfloat16, float16 or float64.
        batch: Sequences, up to 65536.
        is_causal: Whether a query sees only keys at its own position and before.
        document_lengths: Tokens of packed documents in their order, `num_tokens` in all. Default: one document.

    Returns:
        By name, our exchanges `gather`, `ring` and `heads`, then `ring-all` (ring attention), `all-gather` and, where the ranks
        divide the heads, `ulysses`.

    Raises:
        ValueError: If a number is below 1, a dtype is unknown, some branch would have no head, or documents do not add up to N.
        TypeError: If an argument has the wrong type.
    """
    num_tokens, num_heads = checked(pattern, num_tokens, num_heads, is_causal=is_causal)
    num_ranks, group = at_least_one("num_ranks", num_ranks), at_least_one("group", group)
    head_dim, batch = at_least_one("head_dim", head_dim), at_least_one("batch", batch)
    for name, value, most in (("head_dim", head_dim, MOST_HEAD_DIM), ("batch", batch, MOST_BATCH)):
        if value > most:
            raise ValueError(f"{name} must be at most {most}, got {value}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype!r}")
    documents = checked_documents(num_tokens, document_lengths)
    if len(documents) > 1 and batch > 1:
        raise ValueError(f"batch must be 1 with document_lengths, which pack a batch in one sequence, got {batch}")
    layer = Layer(pattern, num_tokens, num_ranks, num_heads * group, num_heads, head_dim, dtype, batch, is_causal, documents)
    plan = layer_plan(layer)
    sizes = {name: size for name, size in layer.sizes.items() if name != "lse_size"}
    chosen = cost_model.choose(plan, budget=cost_model.default_budget(plan, **sizes), **layer.sizes)
    return {
        each.name: RankCost(
            each.is_ours,
            each.name == chosen,
            int(each.forward.max()),
            int(each.backward.max()),
            int((each.forward + each.backward).max()),
            memory(layer, plan, each.buffers).total,
            each.is_exact,
        )
        for each in strategies(layer, with_pairs=False)
        if each.forward is not None and each.backward is not None and each.buffers is not None
    }
