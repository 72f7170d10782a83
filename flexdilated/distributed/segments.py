"""Which segments the shards of a sequence cut, in integers, and which rows heads keep of them.

The sequence is cut in contiguous shards. A segment that lies inside one shard, with its outputs, is computed there. What follows
speaks of the *cut* segments alone. The tokens of a segment, and its outputs, are numbered `0, 1, ...` as slots; each rank holds an
interval of these numbers, and a head keeps the slots of its offset modulo the rate.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexdilated.core.bounded_cache import DOCUMENT
from flexdilated.core.pattern import DilatedPattern
from flexdilated.distributed.spans import Integers, Kept, Spans, expanded


class Segments(NamedTuple):
    """Cut segments, branch by branch and each document's ascending: arrays over segments.

    Slot `j < size` is token `token + j`, and its output that of token `out_token + j`, for `j < outputs`. Slots from `size` on are
    queries of zeros, where `outputs` reaches beyond it. With `padded` slots of keys, those from `slots` on hold zeros.

    An entry may stand for several neighbours, of which it is the first, if all are whole with their tokens at one rank and their
    outputs, if any, at one other: torchscale's rules move the outputs of narrow segments far, many at once.
    """

    branch: Integers
    token: Integers
    out_token: Integers
    size: Integers
    slots: Integers
    outputs: Integers
    padded: Integers
    first_source: Integers  # ranks that hold tokens
    last_source: Integers
    first_owner: Integers  # ranks that hold outputs; where there are none, the last comes before the first
    last_owner: Integers
    repeats: Integers

    def where(self, chosen: Integers | slice) -> Segments:
        return Segments(*(x[chosen] for x in self))

    def alone(self) -> Segments:
        """Each segment by itself."""
        which, number = expanded(np.zeros_like(self.repeats), self.repeats)
        each = self.where(which)
        # The outputs of neighbours lie as far apart as a whole segment has slots.
        token, out_token = each.token + number * each.size, each.out_token + number * each.slots
        return each._replace(token=token, out_token=out_token, repeats=np.ones_like(number))


@dataclass(frozen=True, eq=False)
class CutSegments:
    """The segments of dilated attention that the shards of a sequence cut, and what the heads held here keep of them."""

    pattern: DilatedPattern
    shard_lengths: tuple[int, ...]  # contiguous in the order of ranks; some may be 0
    num_heads: int  # key/value heads of the whole model
    within: range  # the key/value heads that these ranks hold
    group: int  # query heads per key/value head
    documents: tuple[tuple[int, int], ...]  # (first token, number of tokens) of each packed one
    is_causal: bool

    @property
    def num_ranks(self) -> int:
        return len(self.shard_lengths)

    @property
    def nbytes(self) -> int:
        """Of the documents and shards, which are what a plan has most of."""
        return DOCUMENT * (len(self.documents) + self.num_ranks)

    @property
    def num_tokens(self) -> int:
        return sum(self.shard_lengths)

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Where shards begin, and the end."""
        return tuple(accumulate(self.shard_lengths, initial=0))

    @cached_property
    def limits(self) -> Integers:
        return np.array(self.borders, np.int64)

    @cached_property
    def rates(self) -> Integers:
        """Of each branch."""
        return np.array(self.pattern.dilation_rates, np.int64)

    @cached_property
    def lengths(self) -> Integers:
        """Of the segments of each branch, which are no longer than the sequence."""
        return np.array([min(length, self.num_tokens) for length in self.pattern.segment_lengths], np.int64)

    @cached_property
    def _crossing(self) -> tuple[tuple[int, int], ...]:
        """The documents that lie in more than one shard."""
        starts = [start for start, _ in self.documents]
        found = {}
        for border in self.borders[1:-1]:
            i = bisect_right(starts, border) - 1
            # Of documents that begin at one token only the last has any.
            if i >= 0 and starts[i] < border < sum(self.documents[i]):
                found[i] = self.documents[i]
        return tuple(found.values())

    @cached_property
    def parts_of_documents(self) -> tuple[Integers, Integers, Integers, Integers, Integers]:
        """`(rank, begin, end, tokens of the document, how many alike)` of each part of a document that a rank holds."""
        start, num_tokens = np.array([document for document in self.documents if document[1]], np.int64).reshape(-1, 2).T
        first, last = self.rank_of(start), self.rank_of(start + num_tokens - 1)
        which, rank = expanded(first, last - first + 1)
        of = start[which], num_tokens[which]
        begin, end = (np.clip(border - of[0], 0, of[1]) for border in (self.limits[rank], self.limits[rank + 1]))
        # Few of many are not whole.
        parts, times = np.unique(np.stack([rank, begin, end, of[1]]), axis=1, return_counts=True)
        return (*parts, times)

    def stride_of_outputs(self, length: Any, rate: Any) -> Any:
        """How far the outputs of segments of such lengths lie apart: numbers, or arrays of them."""
        return length + -length % rate if self.pattern.zero_padding else length

    @cached_property
    def _table(self) -> tuple[Integers, Integers]:
        """`(branches + 1,)` where the cut segments of each branch stand among those of all, and `(entries, 5)` these, as `cut`."""
        start, num_tokens = np.array(self._crossing, np.int64).reshape(-1, 2).T
        inner = np.unique(self.limits[1:-1])
        # Where tokens or outputs reach a border or the end of a document. Segments between two such places look alike.
        low, high = np.searchsorted(inner, start, side="right"), np.searchsorted(inner, start + num_tokens)
        document, number = expanded(low, high - low + 1)
        place = np.where(number < high[document], np.append(inner, 0)[number], (start + num_tokens)[document]) - start[document]
        w = np.minimum(self.lengths[:, None], num_tokens)
        out = self.stride_of_outputs(w, self.rates[:, None])
        name = (np.arange(len(w))[:, None] * len(start) + document) * (self.num_tokens + 1)
        steps = (w, out) if self.pattern.zero_padding else (w,)
        names = [name + index for step in steps for index in (place // step[:, document], -(-place // step[:, document]))]
        name, index = np.divmod(np.unique(np.concatenate([each.reshape(-1) for each in names])), self.num_tokens + 1)
        branch, document = np.divmod(name, max(1, len(start)))
        w, out, start, num_tokens = w[branch, document], out[branch, document], start[document], num_tokens[document]
        repeats = np.where(np.append(name[1:] == name[:-1], False), np.append(index[1:], 0), -(-num_tokens // w)) - index
        # Those that begin before a border and end, or write, behind it.
        first, end = start + index * w, np.minimum(start + (index + 1) * out, start + num_tokens)
        cut = np.searchsorted(inner, first, side="right") < np.searchsorted(inner, end)
        whole = (index + 1) * w <= num_tokens
        table = np.stack([start, num_tokens, index, whole, repeats], axis=1)[cut]
        return np.searchsorted(branch[cut], np.arange(len(self.lengths) + 1)), table

    @cached_property
    def cut(self) -> tuple[Integers, ...]:
        """Per branch, `(entries, 5)` of its cut segments: document start, document tokens, index, whether whole, how many alike."""
        return tuple(self.all_cut[a:b] for a, b in pairwise(self.begin.tolist()))

    def rank_of(self, tokens: Integers) -> Integers:
        return np.searchsorted(self.limits, tokens, side="right") - 1

    @property
    def begin(self) -> Integers:
        """`(branches + 1,)`: where those of each branch stand among the cut segments of all."""
        return self._table[0]

    @property
    def all_cut(self) -> Integers:
        """`(entries, 5)` of the cut segments of all branches, as `cut`."""
        return self._table[1]

    @cached_property
    def all_segments(self) -> Segments:
        """The cut segments of all branches."""
        start, num_tokens, index, whole, repeats = self.all_cut.T
        branch = np.repeat(np.arange(len(self.lengths)), np.diff(self.begin))
        w = np.minimum(self.lengths[branch], num_tokens)
        out = self.stride_of_outputs(w, self.rates[branch])
        token, out_token = start + index * w, start + index * out
        size = np.where(whole == 1, w, num_tokens - index * w)
        # As in core/pieces.py: only a shifted output can show the padding row of a whole segment.
        slots = np.where((out != w) & (num_tokens > w) & (whole == 1), out, size)
        outputs = np.clip(start + num_tokens - out_token, 0, slots)
        sources = self.rank_of(token), self.rank_of(token + size - 1)
        first_owner = self.rank_of(out_token)
        last_owner = np.where(outputs > 0, self.rank_of(out_token + outputs - 1), first_owner - 1)
        padded = out if self.pattern.zero_padding and not self.is_causal else slots
        return Segments(branch, token, out_token, size, slots, outputs, padded, *sources, first_owner, last_owner, repeats)

    @cached_property
    def moves(self) -> bool:
        """Whether an output of a cut segment belongs to another token than its query, or to none."""
        at = self.all_segments
        return bool(((at.out_token != at.token) | (at.outputs != at.size)).any())

    @cached_property
    def segments(self) -> tuple[Segments, ...]:
        """Per branch, its cut segments."""
        return tuple(self.all_segments.where(slice(a, b)) for a, b in pairwise(self.begin.tolist()))

    def held(self, token: Integers, size: Integers, rank: Integers | int) -> tuple[Integers, Integers]:
        """The slots that a rank holds of those that begin at a token."""
        return np.clip(self.limits[rank] - token, 0, size), np.clip(self.limits[np.add(rank, 1)] - token, 0, size)

    @cached_property
    def kept(self) -> tuple[Kept, ...]:
        """Per branch, what the heads held here keep."""
        runs = [self.pattern.head_runs(branch, self.num_heads, self.within) for branch in range(len(self.pattern.segment_lengths))]
        heads = [tuple(sorted((run.start + j * run.step, run.offset) for run in each for j in range(run.heads))) for each in runs]
        return tuple(Kept(rate, each) for rate, each in zip(self.pattern.dilation_rates, heads))

    def offsets_of(self, branch: int) -> dict[int, list[int]]:
        """The heads of each offset."""
        found: dict[int, list[int]] = {}
        for head, offset in self.kept[branch].heads:
            found.setdefault(offset, []).append(head)
        return found

    @cached_property
    def all_kept(self) -> tuple[Integers, Integers, Integers]:
        """Heads and their offsets, one branch's after another's: where those of each branch begin, they, and their offsets."""
        heads, offsets = np.array([one for each in self.kept for one in each.heads], np.int64).reshape(-1, 2).T
        return np.cumsum(self.num_kept) - self.num_kept, heads, offsets

    @cached_property
    def num_kept(self) -> Integers:
        """Heads of each branch."""
        return np.array([len(each.heads) for each in self.kept], np.int64)

    @cached_property
    def offsets(self) -> tuple[Integers, Integers, Integers, Integers]:
        """Different offsets, branch by branch and ascending: where those of each begin, how many, they, and heads of each."""
        start, _, offsets = self.all_kept
        names, heads = np.unique(self.named(np.repeat(np.arange(len(start)), self.num_kept), offsets), return_counts=True)
        borders = np.searchsorted(names, self.named(np.arange(len(start) + 1), 0))
        count = np.diff(borders)
        return borders[:-1], count, names - np.repeat(self.named(np.arange(len(start)), 0), count), heads

    @cached_property
    def _around(self) -> tuple[Integers, Integers]:
        """The same of each branch twice, as residues go around: they, and they as `named`."""
        first, count, offsets, _ = self.offsets
        branch = np.repeat(np.arange(len(first)), 2 * count)
        which, number = expanded(np.zeros_like(count), 2 * count)
        twice = offsets[first[which] + number % count[which]] + number // count[which] * self.rates[branch]
        return twice, self.named(branch, twice)

    def named(self, branch: Integers, residue: Integers | int) -> Integers:
        """Residues of several branches as numbers, those of each branch behind the last's."""
        return branch * (2 * int(self.rates.max())) + residue

    def by_offsets(self, spans: Spans) -> Spans:
        """The same rows, of residues that go from the offset of one head to that of another; spans without rows are left out.

        Where residues are many and heads are few, spans that seem to differ hold the same.
        """
        count, (twice, names) = self.offsets[1], self._around
        first, end = (
            np.searchsorted(names, self.named(spans.branch, residue)) for residue in (spans.residue, spans.residue + spans.residues)
        )
        some = first < end
        if not some.all():
            spans, first, end = spans.where(some), first[some], end[some]
        rate = self.rates[spans.branch]
        is_whole = end - first == count[spans.branch]
        return spans._replace(
            residue=np.where(is_whole, 0, twice[first] % rate),
            residues=np.where(is_whole, rate, twice[end - 1] - twice[first] + 1),
        )

    def near(self, branch: int, rank: int) -> NDArray[np.bool_]:
        """The segments of which a rank may hold outputs."""
        at = self.segments[branch]
        return (at.first_owner <= rank) & (rank <= at.last_owner)


def inside(begin: Any, end: Any, num_tokens: Any, w: Any, out: Any) -> tuple[Any, Any]:
    """The segments of a document that lie between two places in it, with their outputs: the first, and the one behind the last."""
    # Sources begin no later than outputs, and outputs end no earlier, but for the end of the document.
    first, last = np.maximum(0, -(-begin // w)), -(-num_tokens // w)
    stop = np.minimum(np.where(num_tokens <= end, last, np.maximum(0, end // out)), last)
    return first, np.maximum(first, stop)
