import math
import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from matplotlib.image import imread
from torch import Tensor

from flexdilated import DilatedPattern, attention_map, dilated_attention, draw_attention_map, reference
from tests.cases import Case, least_heads, patterns
from tests.tolerances import EXACT, SINGLE

PATTERN = DilatedPattern((7, 13), (1, 3))


def dense_map(
    q: Tensor, k: Tensor, pattern: DilatedPattern, *, is_causal: bool, scale: float, ignored: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Every query's weights `(B, H, N, N)` by the definition, and the share that zero keys take `(B, H, N)`.

    Written with integers, one pair at a time; torchscale's padded sequence is really built.
    """
    (batch, num_tokens, num_heads, _), kv_heads = q.shape, k.shape[2]
    exponentials = torch.zeros(batch, num_heads, num_tokens, num_tokens, dtype=torch.float64)
    zeros = torch.zeros(batch, num_heads, num_tokens, dtype=torch.float64)
    for branch, (w, r) in enumerate(pattern.branches):
        tokens: list[int | None] = list(range(num_tokens))
        if pattern.zero_padding:
            w = min(w, num_tokens)
            tokens += [None] * (-num_tokens % w)
            cut = [tokens[i : i + w] + [None] * (-w % r) for i in range(0, len(tokens), w)]
            tokens, w = [token for segment in cut for token in segment], len(cut[0])
        for kv_head in pattern.head_range(branch, kv_heads):
            kept = [p for p in range(len(tokens)) if p % w % r == pattern.offset(branch, kv_head, kv_heads)]
            for p in (p for p in kept if p < num_tokens):
                for other in kept:
                    if p // w != other // w or (is_causal and other > p):
                        continue
                    source, key = tokens[p], tokens[other]
                    for head in range(kv_head * num_heads // kv_heads, (kv_head + 1) * num_heads // kv_heads):
                        for b in range(batch):
                            if key is None:
                                zeros[b, head, p] += 1.0
                            elif ignored is None or not ignored[b, key]:
                                score = 0.0 if source is None else scale * (q[b, source, head] @ k[b, key, kv_head]).item()
                                exponentials[b, head, p, key] += math.exp(score)
    total = (exponentials.sum(dim=-1) + zeros).clamp(min=1e-300)
    return exponentials / total[..., None], zeros / total


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    pattern=patterns(),
    num_tokens=st.integers(1, 17),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 2),
    is_causal=st.booleans(),
    ignored=st.sampled_from((None, 0.4, 1.0)),
    scale=st.sampled_from((0.7, 0.0, -0.7)),
    seed=st.integers(0, 2**31),
)
def test_attention_map_equals_the_definition(
    pattern: DilatedPattern,
    num_tokens: int,
    kv_heads: int,
    group: int,
    is_causal: bool,
    ignored: float | None,
    scale: float,
    seed: int,
) -> None:
    kv_heads = max(kv_heads, least_heads(pattern))
    case = Case(pattern, 2, num_tokens, kv_heads, group, is_causal=is_causal, ignored=ignored, seed=seed)
    q, k, _, _, _ = case.tensors()
    mask = case.options().get("key_padding_mask")
    expected, zeros = dense_map(q, k, pattern, is_causal=is_causal, scale=scale, ignored=mask)
    if mask is not None:
        k[mask] = torch.nan
    queries = list(range(num_tokens))[::-1]
    weights = attention_map(q, k, pattern, queries=queries, is_causal=is_causal, scale=scale, key_padding_mask=mask)
    assert weights.dtype == torch.float64
    torch.testing.assert_close(weights, expected[:, :, queries], **EXACT)
    torch.testing.assert_close(weights.sum(dim=-1) + zeros[:, :, queries], (expected.sum(-1) + zeros)[:, :, queries], **EXACT)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        DilatedPattern((7, 13, 43), (1, 3, 5)),
        DilatedPattern((7, 13, 43), (2, 3, 5), offsets="interleaved"),
        DilatedPattern.grouped((7, 13), (2, 3)),
        DilatedPattern.torchscale((7, 43), (1, 4)),
        DilatedPattern.torchscale((11, 7), (3, 4)),  # no rate divides: torchscale's shifted positions
    ],
)
def test_attention_map_times_values_is_the_output(pattern: DilatedPattern, is_causal: bool) -> None:
    case = Case(pattern, batch=2, num_tokens=43, kv_heads=5, group=2, is_causal=is_causal, ignored=0.2, strided=True, seed=3)
    q, k, v, _, _ = case.tensors()
    queries = torch.tensor([41, 0, 17, 6, 7, 42])
    weights = attention_map(q, k, pattern, queries=queries, **case.options())
    out = torch.einsum("bhqn,bnhd->bqhd", weights, v.repeat_interleave(2, dim=2))
    expected = dilated_attention(q, k, v, pattern, **case.options())
    torch.testing.assert_close(out, expected[:, queries], **EXACT)
    torch.testing.assert_close(out, reference.dilated_attention(q, k, v, pattern, **case.options())[0][:, queries], **EXACT)


def test_attention_map_rows_sum_to_one_and_an_empty_row_is_zero() -> None:
    q, k, _, _, _ = Case(PATTERN, num_tokens=23, seed=5).tensors()
    mask = torch.zeros(1, 23, dtype=torch.bool)
    weights = attention_map(q, k, PATTERN, queries=range(23), key_padding_mask=mask)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(1, 5, 23, dtype=torch.float64), **EXACT)
    mask[:] = True
    assert not attention_map(q, k, PATTERN, queries=[4], key_padding_mask=mask).any()


def test_attention_map_counts_a_key_once_per_branch() -> None:
    q, k = torch.zeros(1, 5, 1, 2), torch.zeros(1, 5, 1, 2)
    weights = attention_map(q, k, DilatedPattern((5, 2), (1, 1)), queries=0)
    torch.testing.assert_close(weights[0, 0, 0], torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0]) / 7, **SINGLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_map_of_other_dtypes_is_float32_and_computed_in_it(dtype: torch.dtype) -> None:
    q, k, _, _, _ = Case(PATTERN, seed=7).tensors(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = attention_map(q, k, PATTERN, queries=(11, 2))
    assert weights.dtype == torch.float32
    exact = attention_map(q.double(), k.double(), PATTERN, queries=(11, 2))
    torch.testing.assert_close(weights.double(), exact, **SINGLE)


def test_attention_map_takes_positions_in_every_form() -> None:
    q, k, _, _, _ = Case(PATTERN, seed=7).tensors()
    every = attention_map(q, k, PATTERN, queries=range(43))
    for queries in (5, torch.tensor(5), [5], (torch.tensor(5),), torch.tensor([5], dtype=torch.int32)):
        torch.testing.assert_close(attention_map(q, k, PATTERN, queries=queries), every[:, :, 5:6], **EXACT)
    torch.testing.assert_close(attention_map(q, k, PATTERN, queries=[9, 9, 1]), every[:, :, [9, 9, 1]], **EXACT)


def test_attention_map_of_ignored_nan_keys_and_graph_inputs_is_finite() -> None:
    q, k, _, _, _ = Case(PATTERN, seed=7).tensors()
    mask = torch.zeros(1, 43, dtype=torch.bool)
    mask[0, 3] = True
    k[0, 3] = math.nan
    weights = attention_map(q.requires_grad_(), k, PATTERN, queries=0, key_padding_mask=mask)
    assert weights.isfinite().all()
    assert not weights[..., 3].any()
    assert not weights.requires_grad


def test_attention_map_of_a_long_sequence_needs_no_square() -> None:
    num_tokens = 200_003  # N * N floats would take 160 GB
    q = torch.randn(1, num_tokens, 2, 4)
    weights = attention_map(q, q, DilatedPattern.gigapath(), queries=[0, 150_000])
    assert weights.shape == (1, 2, 2, num_tokens)
    out = torch.einsum("bhqn,bnhd->bqhd", weights, q)
    torch.testing.assert_close(out, dilated_attention(q, q, q, DilatedPattern.gigapath())[:, [0, 150_000]], **SINGLE)


@pytest.mark.parametrize("queries", [[0, 43], [0, -1]])
def test_attention_map_rejects_positions_outside(queries: list[int]) -> None:
    q, k, _, _, _ = Case(PATTERN).tensors()
    with pytest.raises(ValueError, match=rf"^queries\[1\] must be in \[0, N=43\), got {queries[1]}$"):
        attention_map(q, k, PATTERN, queries=queries)
    attention_map(q, k, PATTERN, queries=[0, 42])


def test_attention_map_rejects_what_are_no_positions() -> None:
    q, k, _, _, _ = Case(PATTERN).tensors()
    with pytest.raises(ValueError, match=r"^queries must hold at least one position, got none$"):
        attention_map(q, k, PATTERN, queries=[])
    with pytest.raises(ValueError, match=r"^queries must be one position or a 1-D tensor of them, got shape \(1, 2\)$"):
        attention_map(q, k, PATTERN, queries=torch.tensor([[1, 2]]))
    with pytest.raises(TypeError, match=r"^queries must hold integers, got torch.bool$"):
        attention_map(q, k, PATTERN, queries=torch.ones(43, dtype=torch.bool))
    for wrong in ([True], [1.0]):
        with pytest.raises(TypeError, match=r"^queries must hold integers, got"):
            attention_map(q, k, PATTERN, queries=wrong)
    for wrong in ("12", None, 1.0):
        with pytest.raises(TypeError, match=r"^queries must be an integer, a sequence or a tensor of integers, got"):
            attention_map(q, k, PATTERN, queries=wrong)


def test_attention_map_rejects_tensors_as_dilated_attention_does() -> None:
    q, k, _, _, _ = Case(PATTERN).tensors()
    with pytest.raises(ValueError, match=r"^k must match q in B, N and D"):
        attention_map(q, k[:, 1:], PATTERN, queries=0)
    with pytest.raises(TypeError, match=r"^k must have the dtype of q"):
        attention_map(q, k.float(), PATTERN, queries=0)
    with pytest.raises(TypeError, match=r"^pattern must be a DilatedPattern, got NoneType$"):
        attention_map(q, k, None, queries=0)
    with pytest.raises(ValueError, match=r"^key_padding_mask must have shape"):
        attention_map(q, k, PATTERN, queries=0, key_padding_mask=torch.zeros(43, 1, dtype=torch.bool))


# -- the picture --------------------------------------------------------------------------------------------------------------

GRID = torch.cartesian_prod(torch.arange(7), torch.arange(5)) * 256  # x, y


def pixels(path: Path) -> Tensor:
    return torch.from_numpy(imread(path).copy())[..., :3]


def count(image: Tensor, color: tuple[float, float, float]) -> int:
    return int(((image - torch.tensor(color)).abs().amax(dim=-1) < 0.02).sum())


def test_picture_puts_each_weight_at_its_tile(tmp_path: Path) -> None:
    weights = torch.full((35,), 0.01)
    weights[(GRID[:, 0] == 256 * 6) & (GRID[:, 1] == 0)] = 1.0  # the upper right corner
    draw_attention_map(weights, GRID, tmp_path / "map.png")
    image = pixels(tmp_path / "map.png")
    dark = (image - torch.tensor([0.0, 0.1333, 0.3059])).abs().amax(dim=-1) < 0.05  # cividis at its beginning
    left = int(dark.any(dim=0).nonzero()[0])
    field = dark[:, left:].sum(dim=0)
    width = int((field > 0.5 * field.max()).sum())
    bright = (image[:, : left + width] - torch.tensor([0.9957, 0.9093, 0.2178])).abs().amax(dim=-1) < 0.05
    y, x = bright.nonzero().float().mean(dim=0).tolist()
    top, bottom = (int(i) for i in dark[:, left : left + width].any(dim=1).nonzero()[[0, -1]])
    assert y < top + (bottom - top) / 5
    assert x > left + width * 5.5 / 7
    assert bright.sum() * 20 < dark.sum()


def test_picture_shows_tiles_of_weight_zero_in_grey_and_holes_in_white(tmp_path: Path) -> None:
    weights = torch.linspace(0.1, 1.0, 35)
    grey = (217 / 255, 217 / 255, 217 / 255)
    draw_attention_map(weights, GRID, tmp_path / "all.png")
    assert count(pixels(tmp_path / "all.png"), grey) < 500  # the edges of letters
    weights[10:20] = 0.0
    draw_attention_map(weights, GRID, tmp_path / "some.png")
    assert count(pixels(tmp_path / "some.png"), grey) > 5000
    hole = torch.arange(35) != 17
    white = count(pixels(tmp_path / "all.png"), (1.0, 1.0, 1.0))
    draw_attention_map(torch.linspace(0.1, 1.0, 35)[hole], GRID[hole], tmp_path / "hole.png")
    assert count(pixels(tmp_path / "hole.png"), (1.0, 1.0, 1.0)) > white + 1000


def test_picture_of_logarithms_spreads_small_weights(tmp_path: Path) -> None:
    weights = 10.0 ** -torch.arange(35)
    for log_scale in (False, True):
        draw_attention_map(weights, GRID, tmp_path / f"{log_scale}.png", log_scale=log_scale)
    dark = [count(pixels(tmp_path / f"{log_scale}.png"), (0.0, 0.1333, 0.3059)) for log_scale in (False, True)]
    assert dark[1] * 4 < dark[0]


@pytest.mark.parametrize("name", ["map.png", "map.pdf", "map.svg", "map.PNG"])
def test_picture_of_several_panels_is_written_in_every_format(tmp_path: Path, name: str) -> None:
    draw_attention_map(torch.rand(3, 35), GRID, tmp_path / name, titles=["head 0", "head 1", "head 2"])
    text = (tmp_path / name).read_bytes()
    assert text[:4] in (b"\x89PNG", b"%PDF", b"<?xm")


@pytest.mark.parametrize("log_scale", [False, True])
def test_picture_of_one_tile_or_equal_weights_is_drawn(tmp_path: Path, log_scale: bool) -> None:
    draw_attention_map(torch.ones(1), torch.tensor([[3.0, 4.0]]), str(tmp_path / "one.png"), log_scale=log_scale)
    draw_attention_map(torch.ones(35), GRID, tmp_path / "equal.png", log_scale=log_scale, tile_size=100)
    draw_attention_map(torch.ones(17), torch.rand(17, 2), tmp_path / "scattered.png", log_scale=log_scale)
    draw_attention_map(torch.ones(17), torch.arange(17)[:, None] * torch.tensor([1, 0]), tmp_path / "line.png")


def test_picture_rejects_weights_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^weights must have shape \(N,\) or \(P, N\) with N=rows of coords=35, got \(36,\); leave"
    ):
        draw_attention_map(torch.ones(36), GRID, tmp_path / "map.png")
    with pytest.raises(ValueError, match=r"^weights must have from 1 to 64 panels, got 65$"):
        draw_attention_map(torch.ones(65, 35), GRID, tmp_path / "map.png")
    for wrong in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"^weights must be finite and at least 0, got others$"):
            draw_attention_map(torch.full((35,), wrong), GRID, tmp_path / "map.png")
    with pytest.raises(ValueError, match=r"^weights must not all be 0 under log_scale, got only zeros$"):
        draw_attention_map(torch.zeros(35), GRID, tmp_path / "map.png", log_scale=True)
    with pytest.raises(TypeError, match=r"^weights must be a tensor, got list$"):
        draw_attention_map([1.0], GRID, tmp_path / "map.png")
    with pytest.raises(TypeError, match=r"^weights must hold numbers, got torch.bool$"):
        draw_attention_map(torch.ones(35, dtype=torch.bool), GRID, tmp_path / "map.png")
    draw_attention_map(torch.zeros(35), GRID, tmp_path / "map.png")


def test_picture_rejects_coordinates_and_options_that_do_not_fit(tmp_path: Path) -> None:
    weights = torch.ones(35)
    for wrong in (GRID[:, :1], torch.zeros(0, 2), GRID[0]):
        with pytest.raises(ValueError, match=r"^coords must have shape \(N, 2\), one row per tile, got"):
            draw_attention_map(weights, wrong, tmp_path / "map.png")
    with pytest.raises(ValueError, match=r"^coords must be finite, got others$"):
        draw_attention_map(weights, GRID * math.nan, tmp_path / "map.png")
    with pytest.raises(ValueError, match=r"^path must end in one of \('.png', '.pdf', '.svg'\), got '.*map.gif'$"):
        draw_attention_map(weights, GRID, tmp_path / "map.gif")
    for titles in (["a", "b"], "a"):
        with pytest.raises(ValueError, match=r"^titles must hold one text per panel=1, got"):
            draw_attention_map(weights, GRID, tmp_path / "map.png", titles=titles)
    for size in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"^tile_size must be above 0 and finite, got {size}$"):
            draw_attention_map(weights, GRID, tmp_path / "map.png", tile_size=size)


def test_importing_the_package_imports_no_matplotlib() -> None:
    code = "import sys, flexdilated; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
