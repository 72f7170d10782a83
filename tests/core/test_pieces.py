"""The plan by integers alone, and the views by the numbers in them."""

from collections import Counter
from collections.abc import Iterator
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from flexdilated import DilatedPattern
from flexdilated.core.pieces import Piece, TokenOrder, arrange, plan_pieces, runs_of, segment_pieces
from flexdilated.core.slabs import box, pack, pack_layout, slabs, view_parts
from tests.cases import least_heads, patterns, unshifted


def softmaxes(piece: Piece) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(head, tokens) of each softmax of a piece, as the fields of `Piece` are documented."""
    for s in range(piece.segments):
        for c in range(piece.offsets):
            for j in range(piece.heads):
                head = piece.head + c * piece.offset_head_step + j * piece.head_step
                first = piece.token + s * piece.segment_stride + c
                yield head, tuple(first + row * piece.row_stride for row in range(piece.rows))


@st.composite
def documents(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    sizes = draw(st.lists(st.integers(0, 23), min_size=1, max_size=3))
    sizes = [size for size in sizes for _ in range(draw(st.integers(1, 3)))]  # equal neighbours share boxes
    return tuple((sum(sizes[:i]), size) for i, size in enumerate(sizes))


@given(patterns(), documents(), st.integers(1, 11), st.booleans())
def test_plan_holds_each_kept_segment_of_each_branch_and_head_once(
    pattern: DilatedPattern, documents: tuple[tuple[int, int], ...], num_kv_heads: int, is_causal: bool
) -> None:
    num_kv_heads = max(num_kv_heads, least_heads(pattern))
    pattern = DilatedPattern.from_dict({**pattern.to_dict(), "zero_padding": False})
    expected: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for i, (w, r) in enumerate(pattern.branches):
        for head in pattern.head_range(i, num_kv_heads):
            for start, size in documents:
                for segment in range(0, size, w):
                    inside = range(segment, min(segment + w, size))
                    kept = tuple(start + p for p in inside if p % w % r == pattern.offset(i, head, num_kv_heads))
                    expected[head, kept] += bool(kept)
    found: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for piece in plan_pieces(pattern, documents, num_kv_heads, is_causal):
        assert piece.zero_keys == 0
        found.update(softmaxes(piece))
    assert found == +expected


@given(patterns(), st.integers(1, 43), st.integers(1, 11), st.booleans())
def test_plan_of_zero_padding_has_torchscale_s_keys(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, is_causal: bool
) -> None:
    num_kv_heads = max(num_kv_heads, least_heads(pattern))
    pattern = unshifted(DilatedPattern.from_dict({**pattern.to_dict(), "zero_padding": True}))
    expected: Counter[tuple[object, ...]] = Counter()
    for i, (w, r) in enumerate(pattern.branches):
        w = min(w, num_tokens)
        padded = w + -w % r
        for head in pattern.head_range(i, num_kv_heads):
            for s in range(-(-num_tokens // w)):
                rows = range(pattern.offset(i, head, num_kv_heads), padded, r)
                tokens = tuple(s * w + j for j in rows if j < w and s * w + j < num_tokens)
                expected[head, tokens, 0 if is_causal else len(rows) - len(tokens)] += bool(tokens)
    found: Counter[tuple[object, ...]] = Counter()
    pieces = plan_pieces(pattern, ((0, num_tokens),), num_kv_heads, is_causal)
    for piece in pieces:
        found.update((*softmax, piece.zero_keys) for softmax in softmaxes(piece))
    assert found == +expected


@given(patterns(), documents(), st.integers(1, 11))
def test_pieces_that_cover_come_first_and_hold_every_position_of_every_head_once(
    pattern: DilatedPattern, documents: tuple[tuple[int, int], ...], num_kv_heads: int
) -> None:
    num_kv_heads = max(num_kv_heads, least_heads(pattern))
    pieces = plan_pieces(unshifted(pattern), documents, num_kv_heads, False)
    covering = [piece for piece in pieces if piece.covers]
    assert list(pieces[: len(covering)]) == covering
    num_tokens = sum(size for _, size in documents)
    found = Counter((head, token) for piece in covering for head, tokens in softmaxes(piece) for token in tokens)
    everything = Counter((head, token) for head in range(num_kv_heads) for token in range(num_tokens))
    can_cover = pattern.heads == "all" and 1 in pattern.dilation_rates
    assert found == (everything if can_cover else Counter())


@given(patterns(), st.integers(1, 43), st.data())
def test_plan_of_a_part_of_the_heads_is_that_part_and_has_views(
    pattern: DilatedPattern, num_tokens: int, data: st.DataObject
) -> None:
    num_kv_heads = max(data.draw(st.integers(1, 11)), least_heads(pattern))
    first = data.draw(st.integers(0, num_kv_heads - 1))
    within = range(first, data.draw(st.integers(first + 1, num_kv_heads)))
    documents, pattern = ((0, num_tokens),), unshifted(pattern)
    whole, part = plan_pieces(pattern, documents, num_kv_heads, False), plan_pieces(pattern, documents, num_kv_heads, False, within)
    expected = Counter(softmax for piece in whole for softmax in softmaxes(piece) if softmax[0] in within)
    found = Counter((first + head, tokens) for piece in part for head, tokens in softmaxes(piece))
    assert found == expected
    lse = torch.zeros(1, len(within), num_tokens).transpose(1, 2)[..., None]  # one token is one element further
    for piece in part:
        box(lse, piece)


@pytest.mark.parametrize("segments", [range(1), range(1, 3), range(3, 5), range(4, 5), range(2, 2)], ids=str)
def test_a_part_of_the_segments_has_their_softmaxes_and_no_others(segments: range) -> None:
    pattern, num_kv_heads = DilatedPattern((7,), (3,)), 5  # segments of 7 tokens, the last of 3
    everything = [each for piece in segment_pieces(pattern, 0, 11, 31, num_kv_heads, False) for each in softmaxes(piece)]
    some = [
        each for piece in segment_pieces(pattern, 0, 11, 31, num_kv_heads, False, segments=segments) for each in softmaxes(piece)
    ]
    expected = [each for each in everything if (each[1][0] - 11) // 7 in segments]
    assert sorted(some) == sorted(expected)


def test_a_part_of_the_segments_covers_nothing() -> None:
    pieces = [*segment_pieces(DilatedPattern((7,), (1,)), 0, 0, 31, 5, False, segments=range(1, 3))]
    assert [piece.covers for piece in pieces] == [False]


@pytest.mark.parametrize(
    ("sizes", "boxes"),
    [([7] * 30, 1), ([23] * 30, 2 + 1), ([22] * 30, 1), ([7, 7, 23, 7, 7, 7], 1 + 2 + 1), ([230] * 3, 3 + 1)],
    ids=["short", "a_rest", "whole_segments", "mixed", "long"],
)
def test_neighbours_of_equal_length_share_boxes(sizes: list[int], boxes: int) -> None:
    documents = tuple((sum(sizes[:i]), size) for i, size in enumerate(sizes))
    assert len(plan_pieces(DilatedPattern((11,), (1,)), documents, 5, False)) == boxes


def test_shifted_positions_have_no_pieces() -> None:
    pattern = DilatedPattern((7,), (5,), zero_padding=True)
    assert plan_pieces(pattern, ((0, 7), (7, 3)), 1, False)
    with pytest.raises(NotImplementedError, match=r"^pattern must not shift positions here, got .* at 8 tokens"):
        plan_pieces(pattern, ((0, 7), (7, 8)), 1, False)


@pytest.mark.parametrize("sizes", [[3, 5] * 20, [5, 0, 3, 3] * 9, [1, 2, 3, 4, 5] * 3], ids=str)
def test_many_short_documents_are_put_in_order_of_length(sizes: list[int]) -> None:
    documents = tuple((sum(sizes[:i]), size) for i, size in enumerate(sizes))
    arranged, order = arrange(documents, torch.device("cpu"))
    tokens = torch.arange(sum(sizes))
    assert order.tokens is not None
    found = sorted((int(order.tokens[start]), size) for start, size in arranged if size)
    assert found == [document for document in documents if document[1]]
    assert all(torch.equal(order.tokens[a : a + n], order.tokens[a] + tokens[:n]) for a, n in arranged if n)
    assert [count for _, _, count in runs_of(arranged)] == [sizes.count(size) for size in sorted(set(sizes)) if size]
    assert torch.equal(order.put(order.take(tokens, 0), 0), tokens)


@pytest.mark.parametrize(
    "sizes", [[9], [0, 0], [5] * 40, [3, 5, 7], [3000, 5000] * 20], ids=["one", "none", "equal", "few", "long"]
)
def test_other_documents_stay_where_they_are(sizes: list[int]) -> None:
    documents = tuple((sum(sizes[:i]), size) for i, size in enumerate(sizes))
    assert arrange(documents, torch.device("cpu")) == (documents, TokenOrder())


def test_a_plan_is_made_once_but_where_the_compiler_would_warn_about_a_cache() -> None:
    def plan() -> tuple[Piece, ...]:
        return plan_pieces(DilatedPattern((7, 13), (2, 3)), ((0, 83),), 5, False)

    assert plan() is plan()
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True):
        assert plan() == plan() is not plan()


@pytest.mark.parametrize(
    ("rate", "within", "boxes"),
    [  # (first head, first offset, offsets, heads from offset to offset), where heads count from the first held
        (5, range(5), [(0, 0, 5, 1)]),
        (5, range(3, 8), [(2, 0, 3, 1), (0, 3, 2, 1)]),  # heads 5, 6, 7, then 3, 4
        (2, range(1, 3), [(1, 0, 1, 0), (0, 1, 1, 0)]),  # head 2, then 1: no view goes back
        (7, range(7, 13), [(0, 0, 6, 1)]),
        (4, range(2, 5), [(2, 0, 1, 0), (0, 2, 2, 1)]),  # offsets 0, then 2 and 3
    ],
)
def test_offsets_are_one_box_as_long_as_their_heads_go_on_alike(
    rate: int, within: range, boxes: list[tuple[int, int, int, int]]
) -> None:
    pieces = plan_pieces(DilatedPattern((140,), (rate,), offsets="interleaved"), ((0, 1400),), 13, False, within)
    assert [(piece.head, piece.token, piece.offsets, piece.offset_head_step) for piece in pieces] == boxes


PIECE = plan_pieces(DilatedPattern((11,), (3,)), ((0, 83),), 2, False)[0]  # 7 whole segments


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 13])
@pytest.mark.parametrize("limit", [1, 13, 26, 39, 91, 92, 182, 1 << 62])
def test_slabs_cover_batch_and_segments_once_within_their_limit(batch: int, size: int, limit: int) -> None:
    assert PIECE.segments == 7
    found: Counter[tuple[int, int]] = Counter()
    parts = list(slabs(PIECE, batch, size, limit))
    for batches, segments, *rest in parts:
        assert rest == [slice(None)] * 2
        slab = [(b, s) for b in range(batch)[batches] for s in range(PIECE.segments)[segments]]
        assert slab
        assert size * len(slab) <= max(limit, size)
        found.update(slab)
    assert found == Counter((b, s) for b in range(batch) for s in range(PIECE.segments))
    assert len(parts) == 1 or 7 * batch * max(1, size) > limit


LONGNET, GIGAPATH = DilatedPattern((128, 256, 512, 1024, 2048), (1, 2, 4, 6, 12)), DilatedPattern.gigapath()


@pytest.mark.parametrize(
    ("pattern", "batch", "num_tokens", "kv_heads", "group", "masked", "launches"),
    [  # rates 4 and below take 1 + 2 + 3 launches; offsets of 6 and 12 are in two pieces, of one or two heads each
        (LONGNET, 1, 1 << 11, 12, 1, False, 12),
        (LONGNET, 1, 1 << 11, 12, 1, True, 25),
        (LONGNET, 3, 1 << 11, 12, 1, False, 12),
        (GIGAPATH, 1, 1 << 13, 16, 1, False, None),
        (LONGNET, 2, 901, 4, 3, False, None),
        (LONGNET, 5, 901, 12, 1, False, None),
        (DilatedPattern((8, 16), (1, 4), offsets="interleaved"), 2, 48, 8, 2, False, 1 + 8),
        (DilatedPattern((8, 16), (1, 4), offsets="interleaved"), 7, 53, 9, 1, False, None),
        (DilatedPattern((5, 7), (1, 2), heads="grouped"), 3, 35, 4, 2, True, None),
        (DilatedPattern.torchscale((6, 12), (1, 4)), 4, 43, 8, 1, False, None),
    ],
)
def test_parts_hold_every_row_once_as_views(
    pattern: DilatedPattern, batch: int, num_tokens: int, kv_heads: int, group: int, masked: bool, launches: int | None
) -> None:
    apart = masked or group > 1
    pieces, count = plan_pieces(pattern, ((0, num_tokens),), kv_heads, False), 0
    x = torch.arange(batch * num_tokens * kv_heads * group).view(batch, num_tokens, kv_heads * group, 1).expand(-1, -1, -1, 2)
    wide = torch.empty(batch, num_tokens, 3, kv_heads * group, 2, device="meta")[:, :, 1]  # heads of q, as packed q, k and v are
    keys = torch.empty(batch, num_tokens, kv_heads, 2, device="meta")
    for piece in pieces:
        found = []
        for part in view_parts(piece, batch, num_tokens, group, 3000, offsets_apart=apart):
            rows = box(x, piece, group=group)[part]
            packed = pack(rows, offsets_apart=apart)
            assert packed.shape[0] <= 3000
            assert torch.equal(packed.view(rows.shape), rows)
            found.append(rows.flatten())
            for each in (rows, box(wide, piece, group=group)[part], box(keys, piece)[part]):
                assert pack_layout(each.shape, each.stride(), apart) is not None
            count += 1
        assert torch.equal(torch.cat(found).sort()[0], box(x, piece, group=group).flatten().sort()[0])
    assert launches in (None, count)


@given(patterns(), st.integers(1, 29), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_box_is_a_view_of_the_rows_of_its_piece(
    pattern: DilatedPattern, num_tokens: int, kv_heads: int, group: int, strided: bool
) -> None:
    kv_heads = max(kv_heads, least_heads(pattern))
    shape = (2, num_tokens, kv_heads * group, 3)
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    if strided:  # another storage order, and a storage offset
        x = torch.stack([x, x], dim=1)[:, 1].transpose(1, 2).contiguous().transpose(1, 2)
    for piece in plan_pieces(unshifted(pattern), ((0, num_tokens),), kv_heads, False):
        view = box(x, piece, group=group)
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        softmax = softmaxes(piece)
        for s in range(piece.segments):
            for c in range(piece.offsets):
                for j in range(piece.heads):
                    head, tokens = next(softmax)
                    heads = slice(head * group, (head + 1) * group)
                    assert torch.equal(view[:, s, c, j], x[:, list(tokens), heads].transpose(1, 2))
