"""Count the rows that ranks exchange: exactly, by listing them, or at most, by adding up branches.

Two branches often need the same row, which travels once. Listing finds that, and takes time with the number of rows. Adding up the
spans of all branches takes a microsecond per span, and counts such rows twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flexdilated.core.bounded_cache import PIECE, recent
from flexdilated.distributed.planner.message_rows import messages
from flexdilated.distributed.planner.plan import KINDS, ContextPlan
from flexdilated.distributed.planner.spans import Integers, Spans

MESSAGE = 1 << 12  # rows that are listed in the time that one message takes


class RowCounts(NamedTuple):
    """Rows of one kind that ranks exchange, over the key/value heads held here: arrays over ranks."""

    received: Integers
    sent: Integers
    largest_received: Integers  # rows of the largest message
    largest_sent: Integers

    def reversed(self) -> RowCounts:
        """The counts of the same rows on their way back."""
        return RowCounts(self.sent, self.received, self.largest_sent, self.largest_received)


Counts = dict[str, RowCounts]  # by kind


class Bounds(NamedTuple):
    """At most so many rows travel, and the work of listing all ranks, in rows."""

    most: Counts
    to_list: int


def equivalent(plan: ContextPlan, exchange: str) -> str:
    """An exchange that moves the same rows between the same ranks: `"gather"` for all that assign no heads."""
    return "heads" if exchange == "heads" and plan.assigned(exchange).any() else "gather"


def listed(plan: ContextPlan, exchange: str, ranks: Sequence[int] | None = None) -> Counts:
    """The rows that some ranks exchange, by kind, exactly.

    Args:
        plan: The plan.
        exchange: One of `EXCHANGES`.
        ranks: Default: all ranks.
    """
    each = [_listed(plan, equivalent(plan, exchange), rank) for rank in (range(plan.num_ranks) if ranks is None else ranks)]
    return {kind: RowCounts(*np.array([counts[kind] for counts in each], np.int64).T) for kind in KINDS}


@recent(size=lambda found, *of: PIECE * len(KINDS))
def _listed(plan: ContextPlan, exchange: str, rank: int) -> dict[str, tuple[int, ...]]:
    """The fields of `RowCounts` for one rank, by kind."""
    found: dict[str, tuple[int, ...]] = {}
    for kind in KINDS:
        if kind == "out" and not plan.moves:  # outputs go back as their queries came
            received, sent, largest_received, largest_sent = found["q"]
            found[kind] = sent, received, largest_sent, largest_received
            continue
        rows = [[message.num_rows for message in messages(plan, exchange, kind, rank, sent=sent)] for sent in (False, True)]
        found[kind] = *map(sum, rows), *(max(each, default=0) for each in rows)
    return found


def rows_received(plan: ContextPlan, exchange: str, kind: str, rank: int) -> int:
    """The rows of one kind that one rank receives of all others, exactly."""
    return _listed(plan, equivalent(plan, exchange), rank)[kind][0]


def bounds(plan: ContextPlan, exchange: str) -> Bounds:
    """At most so many rows travel: the sum over branches."""
    return _bounds(plan, equivalent(plan, exchange))


@recent(size=lambda found, plan, exchange: plan.nbytes * 2 * len(KINDS))
def _bounds(plan: ContextPlan, exchange: str) -> Bounds:
    ranks = plan.num_ranks
    held = np.array(plan.shard_lengths, np.int64) * len(plan.within)
    found: Counts = {}
    to_list = 0
    for kind in KINDS:
        if kind == "out" and not plan.moves:
            found[kind] = found["q"].reversed()
            continue
        rows = np.zeros((ranks, ranks), np.int64)  # [receiver, sender]
        for receivers in plan.some_ranks():
            spans = plan.spans(exchange, kind, receivers=receivers)
            # Sums of floats are exact below 2 ** 53 rows.
            pairs = (spans.receiver - receivers.start) * ranks + spans.sender
            most = np.bincount(pairs, _most_rows(plan, spans), len(receivers) * ranks)
            rows[receivers.start : receivers.stop] = most.reshape(-1, ranks)
        to_list += 2 * int(rows.sum() + MESSAGE * (ranks + np.count_nonzero(rows)))  # listed by senders and by receivers
        # A message holds no row twice.
        rows = np.minimum(rows, held[:, None] if kind == "out" else held)
        found[kind] = RowCounts(rows.sum(axis=1), rows.sum(axis=0), rows.max(axis=1), rows.max(axis=0))
    return Bounds(found, to_list)


def _most_rows(plan: ContextPlan, spans: Spans) -> Integers:
    """`(spans,)` rows at most: a head keeps one of `rate` tokens, a token is kept by the heads of one offset."""
    same_offset = np.array([max(Counter(offset for _, offset in heads).values(), default=0) for _, heads in plan.kept])
    tokens, rate = spans.end - spans.first, plan.rates[spans.branch]
    return np.minimum(spans.places * -(-tokens // rate), tokens * same_offset[spans.branch])


def counts(plan: ContextPlan, exchange: str, most: int) -> tuple[Counts, bool]:
    """The rows that all ranks exchange, by kind, and whether they are exact: else they are at most so many.

    Args:
        plan: The plan.
        exchange: One of `EXCHANGES`.
        most: The work of listing all ranks, as in `Bounds`, up to which they are listed.
    """
    found = bounds(plan, exchange)
    if found.to_list <= most:
        return listed(plan, exchange), True
    return found.most, False
