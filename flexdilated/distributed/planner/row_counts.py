"""Count the rows that ranks exchange: exactly, by listing them, or at most, by adding up branches.

Two branches often need the same row, which travels once. Listing finds that, and takes time with the number of rows. Adding up the
spans of all branches takes a microsecond per span, and counts such rows twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from flexdilated.core.bounded_cache import recent
from flexdilated.distributed.planner.message_rows import messages
from flexdilated.distributed.planner.plan import KINDS, ContextPlan
from flexdilated.distributed.planner.segments import Integers

MESSAGE = 1 << 12  # rows that are listed in the time that one message takes


class RowCounts(NamedTuple):
    """Rows of one kind that ranks exchange, over the key/value heads of these ranks. Arrays are `(num_ranks,)`."""

    received: Integers
    sent: Integers
    largest_received: Integers  # rows of the largest message
    largest_sent: Integers
    messages: int  # of all ranks

    def reversed(self) -> RowCounts:
        """The counts of the same rows on their way back."""
        return RowCounts(self.sent, self.received, self.largest_sent, self.largest_received, self.messages)


Counts = dict[str, RowCounts]  # by kind


def equivalent(plan: ContextPlan, exchange: str) -> str:
    """An exchange that moves the same rows between the same ranks: `"gather"` for all that assign no heads."""
    return "heads" if exchange == "heads" and plan.assigned.any() else "gather"


def listed(plan: ContextPlan, exchange: str) -> Counts:
    """Count the rows that ranks exchange, by kind, exactly."""
    return _counts(plan, equivalent(plan, exchange), _listed_rows)


def rows_received(plan: ContextPlan, exchange: str, kind: str, rank: int) -> int:
    """The rows of one kind that one rank receives of all others, exactly."""
    return sum(message.num_rows for message in messages(plan, exchange, kind, rank, sent=False))


def bounds(plan: ContextPlan, exchange: str) -> Counts:
    """Upper bounds of the rows that travel, by kind: the sums over branches."""
    return _counts(plan, equivalent(plan, exchange), _most_rows)


@recent(size=lambda counts, plan, *options: plan.nbytes * 2 * len(KINDS))
def _counts(plan: ContextPlan, exchange: str, rows_of: Callable[[ContextPlan, str, str], Integers]) -> Counts:
    tables = {kind: rows_of(plan, exchange, kind) for kind in KINDS}
    counts = {
        kind: RowCounts(rows.sum(1), rows.sum(0), rows.max(1), rows.max(0), int(np.count_nonzero(rows)))
        for kind, rows in tables.items()
    }
    return {**counts, "out": counts["q"].reversed()}


def _listed_rows(plan: ContextPlan, exchange: str, kind: str) -> Integers:
    """`(receivers, senders)` rows of one kind."""
    rows = np.zeros((plan.num_ranks, plan.num_ranks), np.int64)
    for rank in range(plan.num_ranks):
        for message in messages(plan, exchange, kind, rank, sent=False):
            rows[rank, message.peer] = message.num_rows
    return rows


def _most_rows(plan: ContextPlan, exchange: str, kind: str) -> Integers:
    """`(receivers, senders)` rows of one kind at most."""
    ranks = plan.num_ranks
    rows = np.zeros((ranks, ranks), np.int64)
    same_offset = np.array([max(Counter(offset for _, offset in heads).values(), default=0) for _, heads in plan.branch_heads])
    for receivers in plan.some_ranks():
        spans = plan.spans(exchange, kind, receivers=receivers)
        # A head keeps one of `rate` tokens, a token is kept by the heads of one offset.
        tokens, rate = spans.end - spans.first, plan.rates[spans.branch]
        max_rows = np.minimum(spans.places * -(-tokens // rate), tokens * same_offset[spans.branch])
        # Sums of floats are exact below 2 ** 53 rows.
        pairs = (spans.receiver - receivers.start) * ranks + spans.sender
        rows[receivers.start : receivers.stop] = np.bincount(pairs, max_rows, len(receivers) * ranks).reshape(-1, ranks)
    # A message holds no row twice.
    shard_rows = np.array(plan.shard_lengths, np.int64) * len(plan.within)
    return np.minimum(rows, shard_rows)


def counts(plan: ContextPlan, exchange: str, max_work: int) -> tuple[Counts, bool]:
    """`(counts, is_exact)`: the rows that ranks exchange, by kind; upper bounds if listing takes more than `max_work` rows."""
    upper = bounds(plan, exchange)
    work = 2 * sum(int(upper[kind].received.sum()) + MESSAGE * (plan.num_ranks + upper[kind].messages) for kind in KINDS)
    return (listed(plan, exchange), True) if work <= max_work else (upper, False)
