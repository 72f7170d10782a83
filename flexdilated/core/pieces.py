"""A branch as strided boxes of q, k, v: segments x offsets x heads x rows, read as views of the original tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexdilated.core.bounded_cache import DOCUMENT, PIECE, recent
from flexdilated.core.pattern import DilatedPattern, HeadRun, ceil_div, num_kept


class Piece(NamedTuple):
    """Dense attention over one box of rows: `segments x offsets x heads` independent softmaxes of `rows` queries and keys.

    Row `l` of segment `s`, offset `c`, head `j` is token `token + s * segment_stride + c + l * row_stride` of key/value head
    `head + c * offset_head_step + j * head_step`. Its output belongs to the token that `out_token` and `out_segment_stride` give,
    which differs from its source only under torchscale's shifted positions.
    """

    token: int
    segments: int
    segment_stride: int
    offsets: int
    offset_head_step: int
    head: int
    heads: int
    head_step: int
    rows: int
    row_stride: int
    out_token: int
    out_segment_stride: int
    out_rows: int  # the first rows whose outputs exist; the rest would fall behind the end
    zero_row: bool  # one row of zeros, query and key, follows the real rows (torchscale's second padding)
    zero_keys: int  # zero keys that take part in every softmax, beside `zero_row`
    tiles: bool  # belongs to the pieces that come first and, together, hold every position of every head once
    branch: int  # whose it is: outputs of one branch's pieces never meet

    @property
    def moved(self) -> bool:
        """Whether outputs of its branch belong to other tokens than their queries, or to none (torchscale's shifted positions).

        The pieces that are left may all stand where they should, while outputs of later segments have fallen behind the end.
        """
        return self.out_segment_stride != self.segment_stride

    @property
    def holds_tokens_alone(self) -> bool:
        """Whether it is attention among tokens at their own positions, without torchscale's zero keys and shifts."""
        return not (self.zero_keys or self.zero_row or self.moved)


Documents = tuple[tuple[int, int], ...]  # of each `(first token, number of tokens)`

# Documents are put in order of length where their runs of equal neighbours become so many times fewer, and have, on average, at
# most so many tokens.
FEWER_RUNS, SHORT_RUN = 2, 512

_Sizes = tuple[int, int, int, int]  # of `_segment_sizes`


class _Rows(NamedTuple):
    """Segments of one branch and offset that have the same shape."""

    first: int
    segments: int
    rows: int
    out_rows: int
    zero_row: bool
    zero_keys: int


def plan_pieces(
    pattern: DilatedPattern,
    documents: Documents,
    num_heads: int,
    is_causal: bool,
    within: range | None = None,
) -> tuple[Piece, ...]:
    """The boxes that make up a pattern over packed documents, of each `(first token, number of tokens)`.

    A branch that keeps every position of every head comes first, and its pieces say so. Of `num_heads` key/value heads of the model
    the tensors hold those `within`, by default all. Zero keys lie behind every real query, so a causal pattern has none.
    """
    return uncached(_plan)(pattern, documents, num_heads, is_causal, within)


def runs_of(documents: Documents) -> list[tuple[int, int, int]]:
    """`(first token, number of tokens, number of documents)` of the neighbours of equal length. Empty documents are left out."""
    runs: list[tuple[int, int, int]] = []
    for start, num_tokens in documents:
        if runs and runs[-1][1] == num_tokens:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        elif num_tokens:
            runs.append((start, num_tokens, 1))
    return runs


class Order(NamedTuple):
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


def arrange(documents: Documents, device: torch.device) -> tuple[Documents, Order]:
    """Many short documents in order of length, and that order. Other documents stay where they are.

    Boxes of equal neighbours are computed together. Long documents gain nothing: launches are little of their time, and
    copies of q, k and v take memory.
    """
    runs = runs_of(documents)
    num_tokens, sizes = sum(length * count for _, length, count in runs), {length for _, length, _ in runs}
    if not runs or len(runs) < FEWER_RUNS * len(sizes) or num_tokens > SHORT_RUN * len(runs):
        return documents, Order()
    first, length = torch.tensor(sorted(documents, key=lambda document: document[1]), device="cpu").T
    start = length.cumsum(0) - length
    tokens = torch.arange(num_tokens, device="cpu") + (first - start).repeat_interleave(length)
    return tuple(zip(start.tolist(), length.tolist())), Order(tokens.to(device), tokens.argsort().to(device))


def uncached(function: Any) -> Any:
    """A cached function as the compiler may trace it: without its cache, which it warns about."""
    return function.__wrapped__ if torch.compiler.is_compiling() else function


@recent(size=lambda pieces, pattern, documents, *rest: PIECE * len(pieces) + DOCUMENT * len(documents))
def _plan(
    pattern: DilatedPattern, documents: Documents, num_heads: int, is_causal: bool, within: range | None
) -> tuple[Piece, ...]:
    some = [(start, num_tokens, None) for start, num_tokens in documents if num_tokens]
    return tuple(
        piece
        for i in branch_order(pattern)
        for piece in document_pieces(pattern, i, some, num_heads, is_causal, within=within, tiles=i == everything_kept(pattern))
    )


def everything_kept(pattern: DilatedPattern) -> int | None:
    """The first branch that keeps every position of every head, if there is one."""
    return next((i for i, rate in enumerate(pattern.dilation_rates) if rate == 1 and pattern.heads == "all"), None)


def branch_order(pattern: DilatedPattern) -> list[int]:
    """The branches as pieces are computed: the one that keeps everything first."""
    return sorted(range(len(pattern.branches)), key=lambda i: i != everything_kept(pattern))


def segment_pieces(
    pattern: DilatedPattern,
    branch: int,
    start: int,
    num_tokens: int,
    num_heads: int,
    is_causal: bool,
    *,
    within: range | None = None,
    segments: range | None = None,
    tiles: bool = False,
    runs: Sequence[HeadRun] | None = None,
) -> Iterator[Piece]:
    """The boxes of one branch over a document of `num_tokens` tokens from token `start`; `segments` picks some of its segments.

    `runs` are the pattern's `head_runs` of the branch, where they are known.
    """
    length, rate = min(pattern.segment_lengths[branch], num_tokens), pattern.dilation_rates[branch]
    moves = pattern.zero_padding and num_tokens > length  # a single segment stays where it is
    out_stride = length + -length % rate if moves else length
    sizes = list(_segment_sizes(length, out_stride, num_tokens, segments))
    alike: dict[tuple[_Rows, int, int], list[HeadRun]] = {}
    for run in pattern.head_runs(branch, num_heads, within) if runs is None else runs:
        for rows in _segment_rows(pattern, run.offset, length, rate, out_stride, num_tokens, is_causal, sizes):
            alike.setdefault((rows, run.heads, run.step), []).append(run)
    for (rows, heads, step), those in alike.items():
        for first, offsets, head_step in _affine(those):
            yield Piece(
                token=start + rows.first * length + first.offset,
                segments=rows.segments,
                segment_stride=length,
                offsets=offsets,
                offset_head_step=head_step,
                head=first.start,
                heads=heads,
                head_step=step,
                rows=rows.rows,
                row_stride=rate,
                out_token=start + rows.first * out_stride + first.offset,
                out_segment_stride=out_stride,
                out_rows=rows.out_rows,
                zero_row=rows.zero_row,
                zero_keys=rows.zero_keys,
                tiles=tiles,
                branch=branch,
            )


def document_pieces(
    pattern: DilatedPattern,
    branch: int,
    documents: Sequence[tuple[int, int, range | None]],
    num_heads: int,
    is_causal: bool,
    *,
    within: range | None,
    tiles: bool,
) -> Iterator[Piece]:
    """The boxes of one branch over documents, of each `(first token, number of tokens, segments)`.

    Neighbours of equal length share boxes: a document is then one more segment.
    """

    runs = pattern.head_runs(branch, num_heads, within)

    def pieces(start: int, num_tokens: int, segments: range | None) -> Iterator[Piece]:
        return segment_pieces(
            pattern, branch, start, num_tokens, num_heads, is_causal, within=within, segments=segments, tiles=tiles, runs=runs
        )

    if len(documents) == 1:  # whose length a compiler may know by a symbol alone
        yield from pieces(*documents[0])
        return
    known: dict[tuple[int, range | None], tuple[int, tuple[Piece, ...]]] = {}
    for (num_tokens, segments), group in groupby(documents, key=lambda document: document[1:]):
        equal = list(group)
        start, count = equal[0][0], len(equal)
        if (num_tokens, segments) not in known:
            known[num_tokens, segments] = start, tuple(pieces(start, num_tokens, segments))
        first, found = known[num_tokens, segments]
        for piece in found:
            yield from _repeated(piece, start - first, count, num_tokens)


def _repeated(piece: Piece, ahead: int, count: int, stride: int) -> Iterator[Piece]:
    """A piece `ahead` tokens later, `count` times, `stride` tokens apart, in as few boxes as possible."""
    shift = range(0, count * stride, stride)
    if not piece.moved and piece.segments * piece.segment_stride == stride:
        piece, shift = piece._replace(segments=piece.segments * count), range(1)
    elif not piece.moved and piece.segments <= count > 1:
        shift = range(0, piece.segments * piece.segment_stride, piece.segment_stride)
        piece = piece._replace(segments=count, segment_stride=stride, out_segment_stride=stride)
    for first in shift:
        yield piece._replace(token=piece.token + ahead + first, out_token=piece.out_token + ahead + first)


def _segment_sizes(length: int, out_stride: int, num_tokens: int, segments: range | None) -> Iterator[_Sizes]:
    """Whole segments, then the shorter last one: the first, how many, their tokens, and the one whose outputs the end may cut."""
    whole, rest = divmod(num_tokens, length)
    for first, end, size in ((0, whole, length), (whole, whole + 1, rest)):
        if segments is not None:
            first, end = max(first, segments.start), min(end, segments.stop)
        if size and first < end:
            # Only where positions shift may outputs fall behind the end: some of segment `edge`, all of those after it.
            yield first, end - first, size, end if out_stride == length else num_tokens // out_stride


def _segment_rows(
    pattern: DilatedPattern, offset: int, length: int, rate: int, out_stride: int, tokens: int, is_causal: bool, sizes: list[_Sizes]
) -> Iterator[_Rows]:
    """The rows that one offset keeps of segments of some sizes."""
    padded = ceil_div(length, rate)  # rows of any offset in a segment that is padded to whole rates
    shifted = out_stride != length
    for first, count, size, edge in sizes:
        real = num_kept(size, rate, offset)
        # Only a shifted output can show the padding row of a whole segment; elsewhere it is one more zero key.
        zero_row = shifted and size == length and padded > real
        zero_keys = padded - real - zero_row if pattern.zero_padding and not is_causal else 0
        rows = real + zero_row
        full, inside = min(count, max(0, edge - first)), 0
        if first <= edge < first + count:
            inside = min(rows, num_kept(tokens - edge * out_stride, rate, offset))
            full += inside == rows
        if full and rows:
            yield _Rows(first, full, rows, rows, zero_row, zero_keys)
        if 0 < inside < rows:
            yield _Rows(edge, 1, rows, inside, zero_row, zero_keys)


def _affine(runs: list[HeadRun]) -> Iterator[tuple[HeadRun, int, int]]:
    """Cut runs of ascending offset where the step in offset is not 1 or the step in heads changes: (first, count, head step).

    Where the heads are a part of a model's, the next offset may begin at an earlier one: a view has no stride for such a step.
    """
    first, offsets, step = runs[0], 1, 0
    for before, after in pairwise(runs):
        ahead = after.start - before.start
        if after.offset == before.offset + 1 and ahead > 0 and (offsets == 1 or ahead == step):
            offsets, step = offsets + 1, ahead
        else:
            yield first, offsets, step
            first, offsets, step = after, 1, 0
    yield first, offsets, step


Part = tuple[slice, slice, slice, slice]  # of a box: sequences, segments, offsets, heads


def slabs(piece: Piece, batch: int, bytes_per_segment: int, limit: int) -> Iterator[Part]:
    """Cut the (batch, segments) of a piece so that one packed tensor of a slab holds about `limit` bytes."""
    per_slab = max(1, limit // max(1, bytes_per_segment))
    batch_step = max(1, per_slab // piece.segments)
    segment_step = min(piece.segments, per_slab)
    for b in range(0, batch, batch_step):
        for s in range(0, piece.segments, segment_step):
            yield slice(b, b + batch_step), slice(s, s + segment_step), slice(None), slice(None)


def view_parts(piece: Piece, batch: int, num_tokens: int, group: int, most: int, *, offsets_apart: bool) -> Iterator[Part]:
    """Split a piece into parts that `fold` views without a copy, in tensors whose batch stride is `num_tokens` token strides.

    A view has one stride for (sequence, segment) and one for the heads, so the loop is over the smaller of offsets and heads.
    A sequence has `num_tokens` tokens, a key/value head has `group` query heads, and a launch takes a batch of at most `most`.
    """
    sequences, segments, offsets, heads = ([slice(None)] for _ in range(4))
    if batch > 1 and piece.segments > 1 and (piece.moved or piece.segments * piece.segment_stride != num_tokens):
        if batch <= piece.segments:
            sequences = _each(batch)
        else:
            segments = _each(piece.segments)
    if piece.offsets > 1:
        if offsets_apart or piece.offsets <= piece.heads:
            offsets = _each(piece.offsets)
        else:
            heads = _each(piece.heads)
    if group > 1 and piece.heads > 1 and piece.head_step > 1:  # query heads of different key heads have no common stride
        heads = _each(piece.heads)
    for b, s, o, h in product(sequences, segments, offsets, heads):
        counts = (len(range(batch)[b]), len(range(piece.segments)[s]))
        for some, those, *_ in slabs(piece._replace(segments=counts[1]), counts[0], 1, most):
            yield some if counts[0] == batch else b, those if counts[1] == piece.segments else s, o, h


@recent(size=lambda found, pieces, *sizes: PIECE * len(found))
def parts_of(
    pieces: tuple[Piece, ...], batch: int, num_tokens: int, group: int, most: int, offsets_apart: bool
) -> tuple[tuple[Piece, Part], ...]:
    """The pieces with their `view_parts`, one after another."""
    return tuple(
        (piece, part) for piece in pieces for part in view_parts(piece, batch, num_tokens, group, most, offsets_apart=offsets_apart)
    )


def _each(count: int) -> list[slice]:
    return [slice(i, i + 1) for i in range(count)]


def box(x: Tensor, piece: Piece, *, group: int = 1, output: bool = False) -> Tensor:
    """The rows of a piece in `x` `(B, N, H, D)` as one affine view `b s o h g r d`.

    Sequence, segment, offset, key/value head, query head of it (`group` of them, or 1), row, element.

    Args:
        x: Any strides; `H` is `group` times the key/value heads.
        piece: The box; its real rows, without `zero_row`.
        group: Query heads per key/value head: 1 for k and v.
        output: Whether `x` is indexed by output tokens (out, lse and their gradients) instead of source tokens.
    """
    batch, token, head, dim = x.stride()
    first, segment, rows = (
        (piece.out_token, piece.out_segment_stride, piece.out_rows)
        if output
        else (piece.token, piece.segment_stride, piece.rows - piece.zero_row)
    )
    head *= group
    return x.as_strided(
        (x.shape[0], piece.segments, piece.offsets, piece.heads, group, rows, x.shape[3]),
        (
            batch,
            segment * token,
            token + piece.offset_head_step * head,
            piece.head_step * head,
            x.stride(2),
            piece.row_stride * token,
            dim,
        ),
        x.storage_offset() + first * token + piece.head * head,
    )


def fold(rows: Tensor, num_rows: int, fill: float = 0.0, *, offsets_apart: bool = False) -> Tensor:
    """A slab `b s o h g r d` as a kernel's `(b s o) (h g) r d`, of `num_rows` rows: a view where strides allow.

    Where each offset has one head, offsets are the kernel's heads, `(b s) o r d`, unless they must stay `offsets_apart`: with key
    heads shared by query heads, or a key padding mask. Rows that the slab lacks (`zero_row`, outputs after the end) are filled.
    """
    if rows.shape[5] < num_rows:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, num_rows - rows.shape[5]), value=fill)
    return rows.reshape(_folded(rows, offsets_apart))


def fold_view(rows: Tensor, *, offsets_apart: bool = False) -> Tensor | None:
    """All rows of a slab as `fold` gives them, where strides make that a view, else None."""
    try:
        return rows.view(_folded(rows, offsets_apart))
    except RuntimeError:
        return None


Layout = tuple[Sequence[int], Sequence[int], int]  # size, strides and offset of a view in a tensor


@recent(size=lambda found, *arguments: PIECE * len(found))
def view_layouts(
    parts: tuple[Any, ...], size: tuple[int, ...], strides: tuple[int, ...], group: int, output: bool
) -> tuple[Layout | None, ...]:
    """The layout that `fold_view` gives each part of a tensor `(B, N, H, D)`, by its size and strides.

    `parts`: the arguments of `parts_of`.
    """
    x, apart = torch.empty_strided(size, strides, device="meta"), parts[-1]
    views = [fold_view(box(x, piece, group=group, output=output)[part], offsets_apart=apart) for piece, part in parts_of(*parts)]
    return tuple(None if y is None else (y.shape, y.stride(), int(y.storage_offset())) for y in views)


def _folded(rows: Tensor, offsets_apart: bool) -> tuple[int, int, int, int]:
    b, s, o, h, g, r, d = rows.shape
    return (b * s * o, h * g, r, d) if offsets_apart or h * g > 1 else (b * s, o, r, d)


def unfold(rows: Tensor, like: Tensor) -> Tensor:
    """A kernel's rows, as `fold` gives them, in the shape of the slab `like`, `b s o h g r d`, which may have fewer rows."""
    b, s, o, h, g, r, d = like.shape
    return rows[:, :, :r].view(b, s, o, h, g, r, d)
