"""A branch as strided boxes of q, k, v: segments x offsets x heads x rows, read as views of the original tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.core.bounded_cache import DOCUMENT_BYTES, PIECE_BYTES, recent
from flexdilated.core.branch import HeadRun, Kept, Near, Window, ceil_div
from flexdilated.core.pattern import DilatedPattern

UNBOUNDED = 1 << 40  # in a band: as far as there are rows


class Piece(NamedTuple):
    """`segments x offsets x heads` independent softmaxes of `rows` queries and `keys` keys each: strided boxes of `(B, N, H, D)`.

    Query row `l` in segment `s`, offset `c` and head `j` is token `token + s * segment_stride + c + l * row_stride` of key/value
    head `head + c * offset_head_step + j * head_step`. Key rows are counted from `key_token` in the same way. Pairs with
    `low <= key row - query row <= high` join. Consumers read the two boxes and the band, never the kind of the branch.
    """

    token: int  # token of segment 0, offset 0, row 0
    segments: int
    segment_stride: int  # tokens from one segment to the next
    offsets: int  # number of consecutive offsets, one token apart
    offset_head_step: int  # key/value heads from the first head of one offset to that of the next
    head: int  # first key/value head of the first offset
    heads: int  # heads per offset
    head_step: int  # key/value heads from one head of an offset to the next
    rows: int  # queries of one softmax
    row_stride: int  # tokens from one row to the next: the dilation rate
    key_token: int  # like `token`, for the box of keys
    keys: int  # keys of one softmax
    low: int  # smallest `key row - query row` of a joined pair
    high: int  # largest `key row - query row` of a joined pair
    zero_keys: int  # number of torchscale's zero keys in every softmax
    covers: bool  # belongs to the first branch, whose pieces have every row of every head once as query, and once as key
    branch: int  # index into `pattern.branches`
    writes: bool = False  # belongs to pieces that have every query row of every head once, before all others
    part: int = 0  # planned pieces of one part of a branch have no query row and no key row in common

    @property
    def is_banded(self) -> bool:
        """Whether the joined pairs are a band: neither all pairs nor a causal mask."""
        return self.low != -UNBOUNDED or self.high not in (0, UNBOUNDED)

    def of_keys(self) -> Piece:  # no property: the compiler of torch 2.9 looks for those in the fields
        """A piece whose queries are the keys of this one."""
        return self._replace(token=self.key_token, rows=self.keys)

    def moved(self, tokens: int) -> Piece:
        """The piece, moved by `tokens` tokens."""
        return self._replace(token=self.token + tokens, key_token=self.key_token + tokens)


Documents = tuple[tuple[int, int], ...]  # of each `(first token, number of tokens)`

# Documents are put in order of length where their runs of equal neighbours become so many times fewer, and have, on average, at
# most so many tokens.
FEWER_RUNS, SHORT_RUN = 2, 512

MOST_KEPT = 3  # outputs of branches that are kept for a backward, relative to `out`; more are computed again

_Sizes = tuple[int, int, int]  # of `_segment_sizes`


class _EqualSegments(NamedTuple):
    """Segments of one branch and offset that have the same shape."""

    first: int
    segments: int
    skipped: int  # rows of global tokens, before them
    rows: int
    zero_keys: int


def plan_pieces(
    pattern: DilatedPattern,
    documents: Documents,
    num_kv_heads: int,
    is_causal: bool,
    within: range | None = None,
) -> tuple[Piece, ...]:
    """The boxes that make up a pattern over packed documents, of each `(first token, number of tokens)`.

    A branch that keeps every position of every head comes first, and its pieces say so. Of `num_kv_heads` heads of the model the
    tensors hold those `within`, by default all. Zero keys lie behind every real query, so a causal pattern has none.
    """
    plan = _plan.function if torch.compiler.is_compiling() else _plan
    return plan(pattern, documents, num_kv_heads, is_causal, within)


def kept_rows(pattern: DilatedPattern, num_tokens: int) -> int:
    """Rows per head of the outputs of all branches that a forward keeps for `detach_weights`; 0 if it keeps none.

    Whether they are kept depends on the pattern only, so that all ranks and graphs of all lengths agree.
    """
    blocks = pattern.split("kept outputs")[0] if pattern.detaches else ()
    if sum(ceil_div(w, r) / w for w, r in blocks) > MOST_KEPT:
        return 0
    return sum(num_tokens // w * ceil_div(w, r) + ceil_div(num_tokens % w, r) for w, r in blocks)


def runs_of(documents: Documents) -> list[tuple[int, int, int]]:
    """`(first token, number of tokens, number of documents)` of the neighbours of equal length. Empty documents are left out."""
    runs: list[tuple[int, int, int]] = []
    for start, num_tokens in documents:
        if runs and runs[-1][1] == num_tokens:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        elif num_tokens:
            runs.append((start, num_tokens, 1))
    return runs


class TokenOrder(NamedTuple):
    """The order in which packed tokens are computed: the token at each place and the place of each token, `(N,)`.

    None: as they are.
    """

    tokens: Tensor | None = None
    places: Tensor | None = None

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """`x` by places."""
        return x if self.tokens is None else x.index_select(dim, self.tokens)

    def put(self, x: Tensor, dim: int = 1) -> Tensor:
        """`x`, which is by places, by tokens."""
        return x if self.places is None else x.index_select(dim, self.places)


def arrange(documents: Documents, device: torch.device) -> tuple[Documents, TokenOrder]:
    """Many short documents in order of length, and that order. Other documents stay where they are.

    Boxes of equal neighbours are computed together. Long documents gain nothing: launches are little of their time, and
    copies of q, k and v take memory.
    """
    runs = runs_of(documents)
    num_tokens, sizes = sum(length * count for _, length, count in runs), {length for _, length, _ in runs}
    if not runs or len(runs) < FEWER_RUNS * len(sizes) or num_tokens > SHORT_RUN * len(runs):
        return documents, TokenOrder()
    first, length = torch.tensor(sorted(documents, key=lambda document: document[1]), device="cpu").T
    start = length.cumsum(0) - length
    tokens = torch.arange(num_tokens, device="cpu") + (first - start).repeat_interleave(length)
    return tuple(zip(start.tolist(), length.tolist())), TokenOrder(tokens.to(device), tokens.argsort().to(device))


def shifted_branches(pattern: DilatedPattern, num_tokens: int) -> tuple[int, ...]:
    """The branches whose outputs torchscale shifts in a document of `num_tokens` tokens (`zero_padding`).

    It pads each segment to a multiple of the rate, and reads the padded rows back as positions. A single segment is not shifted.
    """
    if not pattern.zero_padding:
        return ()
    branches = enumerate(pattern.split("torchscale's shift")[0])
    return tuple(i for i, (length, rate) in branches if length % rate and num_tokens > length)


def refuse_shifts(pattern: DilatedPattern, documents: Iterable[tuple[int, ...]], place: str) -> None:
    """Raise NotImplementedError if torchscale shifts positions in a document, `(first token, number of tokens)` each.

    `backends/dispatch.py` computes shifted positions, for whole sequences of one process.
    """
    if not pattern.zero_padding:
        return
    longest = max((document[1] for document in documents), default=0)
    if shifted_branches(pattern, longest):
        raise NotImplementedError(
            f"pattern must not shift positions {place}, got zero_padding=True and rates {pattern.dilation_rates} that do not "
            f"divide segments {pattern.segment_lengths} at {longest} tokens; use segment lengths that are multiples of their rates"
        )


@recent(size=lambda pieces, pattern, documents, *_: PIECE_BYTES * len(pieces) + DOCUMENT_BYTES * len(documents))
def _plan(
    pattern: DilatedPattern, documents: Documents, num_kv_heads: int, is_causal: bool, within: range | None
) -> tuple[Piece, ...]:
    refuse_shifts(pattern, documents, "here")
    spans = [(start, num_tokens, None) for start, num_tokens in documents if num_tokens]
    covering = everything_kept(pattern)
    first = len(pattern.branches) - 1 if pattern.global_tokens else covering  # all queries see the global tokens
    return tuple(
        piece._replace(writes=i == first)
        for i in branch_order(pattern, first)
        for piece in document_pieces(pattern, i, spans, num_kv_heads, is_causal, within=within, covers=i == covering)
    )


def everything_kept(pattern: DilatedPattern) -> int | None:
    """The first branch that keeps every position of every head, if there is one."""
    segments, near = pattern.split("pieces")
    if near:
        return None if near.global_tokens else len(segments)  # branches of segments leave near pairs out
    return next((i for i, (_, rate) in enumerate(segments) if rate == 1 and pattern.heads == "all"), None)


def branch_order(pattern: DilatedPattern, first: int | None) -> list[int]:
    """The branches as pieces are computed."""
    return sorted(range(len(pattern.branches)), key=lambda i: i != first)


def segment_pieces(
    pattern: DilatedPattern,
    branch: int,
    start: int,
    num_tokens: int,
    num_kv_heads: int,
    is_causal: bool,
    *,
    within: range | None = None,
    segments: range | None = None,
    covers: bool = False,
    runs: Sequence[HeadRun] | None = None,
) -> Iterator[Piece]:
    """The boxes of one branch over a document of `num_tokens` tokens from token `start`; `segments` picks some of its segments.

    `runs` are the pattern's `head_runs` of the branch, where they are known.
    """
    all_segments, near = pattern.split("pieces")
    runs = pattern.head_runs(branch, num_kv_heads, within) if runs is None else runs
    if branch >= len(all_segments):
        is_window = isinstance(pattern.branches[branch], Window)
        for run in runs:
            yield from _near_pieces(
                near, start, num_tokens, run, is_window=is_window, is_causal=is_causal, covers=covers, branch=branch
            )
        return
    length, rate = all_segments[branch]
    length = min(length, num_tokens)
    sizes = list(_segment_sizes(length, num_tokens, segments, near.global_tokens))
    runs_by_shape: dict[tuple[_EqualSegments, int, int], list[HeadRun]] = {}
    for run in runs:
        for rows in _segment_rows(pattern, run.offset, length, rate, is_causal, sizes):
            runs_by_shape.setdefault((rows, run.heads, run.step), []).append(run)
    for (rows, heads, step), equal_runs in runs_by_shape.items():
        for first, offsets, head_step in _affine(equal_runs):
            yield from far_boxes(
                Piece(
                    token=start + rows.first * length + first.offset + rows.skipped * rate,
                    segments=rows.segments,
                    segment_stride=length,
                    offsets=offsets,
                    offset_head_step=head_step,
                    head=first.start,
                    heads=heads,
                    head_step=step,
                    rows=rows.rows,
                    row_stride=rate,
                    key_token=start + rows.first * length + first.offset + rows.skipped * rate,
                    keys=rows.rows,
                    low=-UNBOUNDED,
                    high=0 if is_causal else UNBOUNDED,
                    zero_keys=rows.zero_keys,
                    covers=covers,
                    branch=branch,
                ),
                near.far_rows(rate),
            )


def far_boxes(piece: Piece, apart: int) -> Iterator[Piece]:
    """The pairs of a square piece whose rows are at least `apart` rows from each other, as one or two squares."""
    rows = piece.rows - apart
    if apart == 0:
        yield piece
    elif rows > 0:
        shorter, later = piece._replace(rows=rows, keys=rows), piece.token + apart * piece.row_stride
        yield shorter._replace(token=later, high=0)
        if piece.high != 0:
            yield shorter._replace(key_token=later, low=0, high=UNBOUNDED, part=1)


def _near_pieces(
    near: Near, start: int, num_tokens: int, run: HeadRun, *, is_window: bool, is_causal: bool, covers: bool, branch: int
) -> Iterator[Piece]:
    """The window, or the global tokens, over a document: boxes of all its tokens. The window is that of the other tokens."""
    first = min(near.global_tokens, num_tokens)
    num_remaining, high = num_tokens - first, 0 if is_causal else UNBOUNDED
    boxes = [(first, num_remaining, first, num_remaining, -UNBOUNDED, high)]  # first query, queries, first key, keys, band
    if is_window and near.window < num_remaining:
        boxes = [(first, num_remaining, first, num_remaining, 1 - near.window, 0 if is_causal else near.window - 1)]
    elif not is_window and is_causal:
        boxes = [(0, num_tokens, 0, first, -UNBOUNDED, 0)]
    elif not is_window:
        boxes = [(0, first, 0, num_tokens, -UNBOUNDED, high), (first, num_remaining, 0, first, -UNBOUNDED, high)]
    for part, (query, queries, key, keys, low, high) in enumerate(boxes):
        if queries:
            yield Piece(
                token=start + query,
                segments=1,
                segment_stride=num_tokens,
                offsets=1,
                offset_head_step=0,
                head=run.start,
                heads=run.heads,
                head_step=run.step,
                rows=queries,
                row_stride=1,
                key_token=start + key,
                keys=keys,
                low=low,
                high=high,
                zero_keys=0,
                covers=covers,
                branch=branch,
                part=part,
            )


def document_pieces(
    pattern: DilatedPattern,
    branch: int,
    documents: Sequence[tuple[int, int, range | None]],
    num_kv_heads: int,
    is_causal: bool,
    *,
    within: range | None,
    covers: bool,
) -> Iterator[Piece]:
    """The boxes of one branch over documents, of each `(first token, number of tokens, segments)`.

    Neighbours of equal length share boxes: a document is then one more segment.
    """

    runs = pattern.head_runs(branch, num_kv_heads, within)

    def pieces(start: int, num_tokens: int, segments: range | None) -> Iterator[Piece]:
        return segment_pieces(
            pattern, branch, start, num_tokens, num_kv_heads, is_causal, within=within, segments=segments, covers=covers, runs=runs
        )

    if len(documents) == 1:  # whose length a compiler may know by a symbol alone
        yield from pieces(*documents[0])
        return
    pieces_by_length: dict[tuple[int, range | None], tuple[int, tuple[Piece, ...]]] = {}
    for (num_tokens, segments), group in groupby(documents, key=lambda document: document[1:]):
        same_length = list(group)
        start, count = same_length[0][0], len(same_length)
        if (num_tokens, segments) not in pieces_by_length:
            pieces_by_length[num_tokens, segments] = start, tuple(pieces(start, num_tokens, segments))
        first, first_pieces = pieces_by_length[num_tokens, segments]
        for piece in first_pieces:
            yield from _repeated(piece, start - first, count, num_tokens)


def _repeated(piece: Piece, shift_tokens: int, count: int, stride: int) -> Iterator[Piece]:
    """A piece `shift_tokens` tokens later, `count` times, `stride` tokens apart, in as few boxes as possible."""
    shift = range(0, count * stride, stride)
    if piece.segments * piece.segment_stride == stride:
        piece, shift = piece._replace(segments=piece.segments * count), range(1)
    elif piece.segments <= count > 1:
        shift = range(0, piece.segments * piece.segment_stride, piece.segment_stride)
        piece = piece._replace(segments=count, segment_stride=stride)
    for first in shift:
        yield piece.moved(shift_tokens + first)


def _segment_sizes(length: int, num_tokens: int, segments: range | None, global_tokens: int) -> Iterator[_Sizes]:
    """Whole segments, then the shorter last one: the number of the first, how many, and their tokens.

    Segments that hold global tokens come one by one.
    """
    num_whole, last_size = divmod(num_tokens, length)
    with_global = min(ceil_div(global_tokens, length), num_whole)
    runs = [
        *((i, i + 1, length) for i in range(with_global)),
        (with_global, num_whole, length),
        (num_whole, num_whole + 1, last_size),
    ]
    for first, end, size in runs:
        if segments is not None:
            first, end = max(first, segments.start), min(end, segments.stop)
        if size and first < end:
            yield first, end - first, size


def _segment_rows(
    pattern: DilatedPattern, offset: int, length: int, rate: int, is_causal: bool, sizes: list[_Sizes]
) -> Iterator[_EqualSegments]:
    """The rows that one offset keeps in segments of the given sizes. Rows of global tokens are left out."""
    branch, padded = Kept(length, rate, offset), ceil_div(length, rate)  # padded: rows of a segment with torchscale's zero padding
    for first, count, size in sizes:
        skipped = branch.rows(min(max(pattern.global_tokens - first * length, 0), size))
        rows = branch.rows(size) - skipped
        if rows:
            yield _EqualSegments(first, count, skipped, rows, padded - rows if pattern.zero_padding and not is_causal else 0)


def _affine(runs: list[HeadRun]) -> Iterator[tuple[HeadRun, int, int]]:
    """Cut runs of ascending offset where the step in offset is not 1 or the step in heads changes: (first, count, head step).

    Where the heads are a part of a model's, the next offset may begin at an earlier one: a view has no stride for such a step.
    """
    first, offsets, step = runs[0], 1, 0
    for previous, run in pairwise(runs):
        head_distance = run.start - previous.start
        if run.offset == previous.offset + 1 and head_distance > 0 and (offsets == 1 or head_distance == step):
            offsets, step = offsets + 1, head_distance
        else:
            yield first, offsets, step
            first, offsets, step = run, 1, 0
    yield first, offsets, step
