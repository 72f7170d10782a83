import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexdilated import DilatedPattern
from flexdilated.nn import Rotary, XPos
from flexdilated.nn.position import token_positions
from tests.nn.rotations import HEAD_DIM, scores, turned, xpos_scores
from tests.tolerances import EXACT, SINGLE

TOKENS = 23
NESTED = DilatedPattern((4, 8, 16), (1, 2, 4))
RAGGED = DilatedPattern((7, 11), (1, 3))


def draw(tokens: int = TOKENS, heads: int = 3) -> Tensor:
    """Rows of norm about 1, so that scores are of order 1."""
    return torch.randn(2, tokens, heads, HEAD_DIM) * HEAD_DIM**-0.5


@pytest.mark.parametrize(("base", "start"), [(100.0, 0), (10000.0, 0), (10000.0, 1_000_000)])
def test_rotary_turns_pairs_by_the_definition(base: float, start: int) -> None:
    q, k = draw(heads=5), draw(heads=1)
    positions = torch.randperm(1009)[:TOKENS] + start
    for actual, x in zip(Rotary(HEAD_DIM, base=base)(positions).apply(q, k), (q, k)):
        torch.testing.assert_close(actual.double(), turned(x, positions, base), **SINGLE)


POSITIONS = pytest.mark.parametrize("position", [Rotary(HEAD_DIM), XPos(HEAD_DIM, NESTED)], ids=["rotary", "xpos"])


@POSITIONS
def test_position_keeps_dtype_and_has_no_state(position: nn.Module) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        rotation = position(torch.arange(TOKENS), dtype=dtype)
        q, k = rotation.apply(draw().to(dtype), draw().to(dtype))
        assert q.dtype == k.dtype == dtype
        assert {table.dtype for table in rotation[:4]} == {torch.promote_types(dtype, torch.float32)}
        torch.set_default_dtype(dtype)
        try:
            assert torch.equal(position(torch.arange(TOKENS)).k_cos, rotation.k_cos)
        finally:
            torch.set_default_dtype(torch.float32)
    assert not position.state_dict()


@pytest.mark.parametrize("start", [0, 1_000_003])
def test_positions_in_float64_are_exact(start: int) -> None:
    q, k, positions = draw().double(), draw().double(), torch.arange(TOKENS) + start
    for actual, x in zip(Rotary(HEAD_DIM)(positions, dtype=torch.float64).apply(q, k), (q, k)):
        torch.testing.assert_close(actual, turned(x, positions), **EXACT)
    length, scale_base = (64, 13.0) if start == 0 else (1_000_000, 13_000.0)
    position = XPos(HEAD_DIM, DilatedPattern((length,), (1,)), scale_base=scale_base)
    expected = xpos_scores(q, k, positions, scale_base)
    torch.testing.assert_close(scores(*position(positions, dtype=torch.float64).apply(q, k)), expected, **EXACT)
    decoded = position.decode(positions[None].expand(2, -1), dtype=torch.float64)
    torch.testing.assert_close(scores(*decoded.apply(q, k)), expected, **EXACT)


@POSITIONS
def test_rotation_in_float32_is_refused_for_float64_and_wider_ones_are_taken(position: nn.Module) -> None:
    positions, q = torch.arange(TOKENS), draw()
    with pytest.raises(
        ValueError, match=r"^rotation must be in float64 for q.dtype=float64, got float32; give dtype=torch.float64 to the position"
    ):
        position(positions).apply(q.double(), q.double())
    wide, _ = position(positions, dtype=torch.float64).apply(q, q)
    exact, _ = position(positions, dtype=torch.float64).apply(q.double(), q.double())
    assert torch.equal(wide, exact.float())


REJECTED = [
    *(({"head_dim": value}, f"head_dim must be even and at least 2, got {value}") for value in (-2, 0, 1, 13)),
    *(({"base": value}, f"base must be above 1, got {value}") for value in (1.0, 0.0, -3.0, math.nan)),
    *(({"scale_base": value}, f"scale_base must be above 0, got {value}") for value in (0.0, -1.0, math.nan)),
    ({"pattern": 7}, "pattern must be a DilatedPattern, got int"),
]


@pytest.mark.parametrize(("options", "message"), REJECTED, ids=str)
def test_positions_reject_options(options: dict[str, Any], message: str) -> None:
    for build in (XPos, Rotary) if options.keys() & {"head_dim", "base"} else (XPos,):
        least = {"head_dim": 2, "base": 1.001} | ({"pattern": NESTED} if build is XPos else {})
        build(**least)
        with pytest.raises((ValueError, TypeError), match=f"^{message}$"):
            build(**least | options)


@pytest.mark.parametrize("scale_base", [13.0, 512.0])
@pytest.mark.parametrize("start", [0, 3, 1_000_003])
def test_xpos_scores_equal_the_definition_inside_every_segment(scale_base: float, start: int) -> None:
    q, k = draw(), draw()
    positions = torch.arange(TOKENS) + start
    actual = scores(*XPos(HEAD_DIM, NESTED, scale_base=scale_base)(positions).apply(q, k))
    expected = xpos_scores(q, k, positions, scale_base)
    together = positions[:, None] // 16 == positions // 16
    torch.testing.assert_close(actual[..., together], expected[..., together], **SINGLE)


def test_xpos_gradients_are_finite_at_the_edge_of_its_range() -> None:
    tokens = 1009
    least = math.ceil(tokens / 160 * math.log(3.5))
    q, k = (draw(tokens, 1).requires_grad_() for _ in range(2))
    out = XPos(HEAD_DIM, DilatedPattern((tokens,), (1,)), scale_base=least)(torch.arange(tokens)).apply(q, k)
    (out[0].tanh().sum() + out[1].tanh().sum()).backward()
    for x in (*out, q.grad, k.grad):
        assert x.isfinite().all()


@pytest.mark.parametrize(
    "pattern", [DilatedPattern((100_003,), (1,)), DilatedPattern((7, 100_003), (1, 2))], ids=["nested", "ragged"]
)
def test_xpos_rejects_a_decay_that_leaves_float32_and_accepts_the_base_it_names(pattern: DilatedPattern) -> None:
    tokens = 1009
    x = draw(tokens, 1)
    message = r"^scale_base must be at least 8 where segments reach over 1009 tokens, got 7.0$"
    with pytest.raises(ValueError, match=message):
        XPos(HEAD_DIM, pattern, scale_base=7.0)(torch.arange(tokens)).apply(x, x)
    for y in XPos(HEAD_DIM, pattern, scale_base=8.0)(torch.arange(tokens)).apply(x, x):
        assert y.isfinite().all()


@pytest.mark.parametrize("pattern", [RAGGED, DilatedPattern((1_000_000,), (1,))], ids=["ragged", "long"])
@pytest.mark.parametrize("start", [0, 999_000])
def test_xpos_scores_equal_the_definition_everywhere_where_segments_do_not_nest_or_are_long(
    pattern: DilatedPattern, start: int
) -> None:
    q, k, positions = draw(), draw(), torch.arange(TOKENS) + start
    actual = scores(*XPos(HEAD_DIM, pattern)(positions).apply(q, k))
    torch.testing.assert_close(actual, xpos_scores(q, k, positions, 512.0), **SINGLE)


@pytest.mark.parametrize("borders", [None, (0, 9, 9, 10, 23)], ids=str)
@pytest.mark.parametrize("pattern", [NESTED, RAGGED, DilatedPattern((5, 10), (1, 2))], ids=["nested", "ragged", "short"])
def test_rotation_of_a_shard_is_that_of_the_whole(pattern: DilatedPattern, borders: tuple[int, ...] | None) -> None:
    cu_seqlens, cpu = None if borders is None else torch.tensor(borders, dtype=torch.int32), torch.device("cpu")
    for position in (XPos(HEAD_DIM, pattern, scale_base=13.0), Rotary(HEAD_DIM)):
        whole = position(token_positions(TOKENS, cu_seqlens, cpu))
        start = 0
        for length in (0, 7, 16, 0):
            positions = token_positions(length, cu_seqlens, cpu, start)
            described = {"length": TOKENS, "cu_seqlens": cu_seqlens} if isinstance(position, XPos) else {}
            shard = position(positions, **described)
            for actual, expected in zip(shard[:4], whole[:4]):
                assert torch.equal(actual, expected[start : start + length])
            assert shard.log_growth == whole.log_growth
            q, k = draw(length), draw(length, 1)
            assert [x.shape for x in shard.apply(q, k)] == [q.shape, k.shape]
            start += length


def test_xpos_rejects_a_whole_described_in_part_or_out_of_range() -> None:
    position, positions = XPos(HEAD_DIM, NESTED), torch.arange(5)
    with pytest.raises(
        ValueError, match=r"^cu_seqlens must come with length, got no length; positions alone are taken as the whole$"
    ):
        position(positions, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"^length must be at least 1, got 0$"):
        position(positions, length=0)
    position(positions[:1], length=1)
    # The whole decides whether the decay stays in float32, and every rank says the same.
    with pytest.raises(ValueError, match=r"^scale_base must be at least 8 where segments reach over 1009 tokens, got 7.0$"):
        XPos(HEAD_DIM, DilatedPattern((1009,), (1,)), scale_base=7.0)(positions, length=1009)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("borders", [(0, 7), (0, 3, 7), (0, 1, 6, 7), (0, 0, 3, 3, 3, 7, 7)], ids=str)
def test_token_positions_begin_anew_in_every_document(borders: tuple[int, ...], dtype: torch.dtype) -> None:
    expected = [p for a, b in pairwise(borders) for p in range(b - a)]
    actual = token_positions(7, torch.tensor(borders, dtype=dtype), torch.device("cpu"))
    assert torch.equal(actual, torch.tensor(expected))
    for start in range(8):
        shard = token_positions(7 - start, torch.tensor(borders, dtype=dtype), torch.device("cpu"), start)
        assert torch.equal(shard, torch.tensor(expected[start:], dtype=torch.int64))


@pytest.mark.parametrize("operator", ["rotary_angles", "xpos_decay"])
@pytest.mark.parametrize("view", ["transposed", "expanded", "sliced"])
def test_operators_give_the_strides_that_compilers_are_told(operator: str, view: str) -> None:
    positions = {
        "transposed": torch.arange(12).view(4, 3).T,
        "expanded": torch.arange(4).expand(3, 4),
        "sliced": torch.arange(40).view(4, 10)[:, ::2],
    }[view]
    torch.library.opcheck(getattr(torch.ops.flexdilated, operator), (positions, 8, 100.0, False))
