"""The tiles of a pattern: their numbers against brute force, their picture, and `flexdilated show --blocks`."""

import io
import re
import struct
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import typer
from numpy.typing import NDArray
from rich.console import Console
from typer.testing import CliRunner

import flexdilated.draw
from flexdilated import DilatedPattern
from flexdilated.draw import MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_LENGTH, PICTURE_CELLS, draw_blocks, show
from flexdilated.draw_blocks import Cell, HeadTiles, Tally, all_heads, describe_heads, head_tiles
from flexdilated.masks import create_dilated_block_mask

app = typer.Typer()
app.command()(show)

CASES = [
    (DilatedPattern((5, 11, 17), (1, 2, 3)), 43, 7, 4),
    (DilatedPattern((13, 29), (1, 7), offsets="interleaved"), 61, 5, 3),
    (DilatedPattern((5, 11, 17), (2, 3, 7), heads="grouped"), 47, 5, 7),
    (DilatedPattern((13, 13, 300, 500), (3, 3, 2, 2)), 41, 3, 5),  # branches that are the same, or are at this length
    (DilatedPattern((31,), (11,)), 7, 11, 2),  # heads that keep nothing
    (DilatedPattern((31,), (2,)), 1, 2, 128),
    (DilatedPattern((6, 12), (1, 2)), 37, 2, 1),
]


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output.replace("\N{NO-BREAK SPACE}", " ")


def branches_of(pattern: DilatedPattern, head: int, num_heads: int) -> list[tuple[int, int, int]]:
    return [
        (length, rate, pattern.offset(i, head, num_heads))
        for i, (length, rate) in enumerate(pattern.branches)
        if head in pattern.head_range(i, num_heads)
    ]


def is_joined(q: int, k: int, length: int, rate: int, offset: int, is_causal: bool) -> bool:
    is_kept = q % length % rate == offset and k % length % rate == offset
    return is_kept and q // length == k // length and not (is_causal and k > q)


def tiles_of(joined: NDArray[np.bool_], block_size: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which tiles hold a joined pair, and which hold nothing else."""
    size = -(-len(joined) // block_size)
    visited, full = (np.zeros((size, size), dtype=bool) for _ in range(2))
    for i, j in np.ndindex(size, size):
        tile = joined[i * block_size : (i + 1) * block_size, j * block_size : (j + 1) * block_size]
        visited[i, j] = tile.any()
        full[i, j] = tile.sum() == block_size**2
    return visited, full


def brute_force(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, head: int, block_size: int, is_causal: bool
) -> tuple[Tally, NDArray[np.bool_], NDArray[np.bool_]]:
    """Looks at every pair of the sequence, and of the kept rows of every branch."""
    raw = np.zeros((num_tokens, num_tokens), dtype=bool)
    packed = pairs = 0
    for branch in branches_of(pattern, head, num_heads):
        joined = np.zeros_like(raw)
        for q, k in np.ndindex(raw.shape):
            joined[q, k] = is_joined(q, k, *branch, is_causal)
        kept = [p for p in range(num_tokens) if is_joined(p, p, *branch, is_causal)]
        raw |= joined
        packed += int(tiles_of(joined[np.ix_(kept, kept)], block_size)[0].sum())
        pairs += int(joined.sum())
    visited, full = tiles_of(raw, block_size)
    return Tally(block_size, visited.size, int((visited & ~full).sum()), int(full.sum()), packed, pairs), visited, full


def of_head(found: list[HeadTiles], head: int) -> HeadTiles:
    (one,) = (of for of in found if head in of.heads)
    return one


# -- the numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("pattern", "num_tokens", "num_heads", "block_size"), CASES)
def test_numbers_and_cells_equal_a_look_at_every_pair(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, block_size: int, is_causal: bool
) -> None:
    found = head_tiles(pattern, num_tokens, num_heads, block_size, 1, is_causal=is_causal)
    assert sorted(head for of in found for head in of.heads) == list(range(num_heads))
    for head in range(num_heads):
        tally, visited, full = brute_force(pattern, num_tokens, num_heads, head, block_size, is_causal)
        _, each, cells = of_head(found, head)
        assert each == tally
        expected = np.where(full, Cell.FULL, np.where(visited, Cell.VISITED, Cell.NONE))
        if is_causal:
            expected[np.triu_indices(len(expected), k=1)] = Cell.FUTURE
        np.testing.assert_array_equal(cells, expected)
    assert all_heads(found).pairs == pattern.count_pairs(num_tokens, num_heads, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("pattern", "num_tokens", "num_heads", "block_size"), CASES)
def test_raw_numbers_are_those_of_the_block_mask(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, block_size: int, is_causal: bool
) -> None:
    found = head_tiles(pattern, num_tokens, num_heads, block_size, 1, is_causal=is_causal)
    mask = create_dilated_block_mask(
        pattern, num_heads, seq_len=num_tokens, is_causal=is_causal, device="cpu", BLOCK_SIZE=block_size
    )
    for head in range(num_heads):
        each = of_head(found, head).each
        assert each.partial == mask.kv_num_blocks[0, head].sum()
        assert each.full == mask.full_kv_num_blocks[0, head].sum()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("group", [2, 3, 5, 100])
def test_cells_say_how_many_of_their_tiles_are_visited(group: int, is_causal: bool) -> None:
    pattern, num_tokens, block_size = DilatedPattern((22, 97), (1, 11)), 197, 4
    _, visited, full = brute_force(pattern, num_tokens, 2, 1, block_size, is_causal)
    cells = of_head(head_tiles(pattern, num_tokens, 2, block_size, group, is_causal=is_causal), 1).cells
    present = np.tril(np.ones_like(visited)) if is_causal else np.ones_like(visited)
    size = -(-len(visited) // group)
    assert cells.shape == (size, size)
    for i, j in np.ndindex(size, size):
        part = np.s_[i * group : (i + 1) * group, j * group : (j + 1) * group]
        tiles, seen, whole = present[part].sum(), visited[part].sum(), full[part].sum()
        if tiles == 0:
            expected = Cell.FUTURE
        elif whole == tiles:
            expected = Cell.FULL
        elif seen == tiles:
            expected = Cell.VISITED
        elif seen == 0:
            expected = Cell.NONE
        else:
            expected = Cell.OVER_HALF if seen / tiles >= 0.5 else Cell.UNDER_HALF
        assert cells[i, j] == expected, (i, j)
    if group == 2:
        assert set(cells.flat) == set(Cell) - (set() if is_causal else {Cell.FUTURE})


def test_heads_with_the_same_tiles_are_one_entry() -> None:
    pattern = DilatedPattern((64, 128), (1, 2))
    (alone,) = head_tiles(pattern, 256, 4, 16, 1)
    assert alone.heads == (0, 1, 2, 3)
    first, second = head_tiles(DilatedPattern((15, 31), (1, 2)), 93, 4, 8, 1)
    assert (first.heads, second.heads) == ((0, 1), (2, 3))
    assert first.each.pairs != second.each.pairs


def test_waste_divides_pairs_in_visited_tiles_by_useful_pairs() -> None:
    tally = Tally(block_size=10, tiles=40, partial=6, full=3, packed=4, pairs=350)
    assert (tally.density, tally.waste_raw, tally.waste_packed) == ("22.5 %", "2.57", "1.14")
    assert tally._replace(pairs=1).waste_raw == "900"
    assert tally._replace(pairs=0).waste_packed == "-"


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        ((3,), "3"),
        ((0, 4), "0, 4"),
        ((2, 3, 4), "2-4"),
        ((0, 1, 2, 5), "0, 1, 2, 5"),
        ((1, 5, 9, 13, 17), "1, 5, ..., 17 (5 heads)"),
    ],
)
def test_heads_are_named_briefly(heads: tuple[int, ...], text: str) -> None:
    assert describe_heads(heads) == text


# -- the picture --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "num_tokens", "num_heads", "block_size", "is_causal"),
    [
        (DilatedPattern((2048, 4096, 8192), (1, 2, 4)), 16384, 4, 128, False),
        (DilatedPattern((100, 1500, 2000), (1, 300, 2), heads="grouped"), 3100, 7, 128, True),
        (DilatedPattern((15, 31), (1, 7)), 93, 64, 8, True),
        (DilatedPattern.longnet(), 1048576, 12, 128, True),
        (DilatedPattern((31,), (2,)), 1, 1, 128, False),
        (DilatedPattern((3000, 5000), (500, 700)), 9999, 12, 20, False),
    ],
)
def test_picture_has_sharp_cells_and_no_text_on_text(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, block_size: int, is_causal: bool
) -> None:
    figure = draw_blocks(pattern, num_tokens, num_heads, block_size=block_size, is_causal=is_causal, name="a name")
    figure.canvas.draw()
    panels = figure.axes
    boxes = [*figure.texts, *figure.legends, *(axes.title for axes in panels)]
    boxes += [axes.xaxis.label for axes in panels if axes.get_xlabel()] + [axes.yaxis.label for axes in panels if axes.get_ylabel()]
    for axes in panels:
        pixels = axes.bbox.width / axes.images[0].get_array().shape[1]
        assert pixels == pytest.approx(round(pixels), abs=1e-6)
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            assert ticks
            labels = [tick.label1 for tick in ticks if tick.label1.get_visible()]
            boxes += labels
    extents = [text.get_window_extent() for text in boxes] + [axes.bbox for axes in panels]
    for a, b in combinations(extents, 2):
        assert a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0, (a, b)
    for extent in extents:
        assert 0 <= extent.x0 < extent.x1 <= figure.bbox.width
        assert 0 <= extent.y0 < extent.y1 <= figure.bbox.height


def test_picture_shows_the_tiles_of_each_head_in_tokens() -> None:
    pattern = DilatedPattern((15, 31), (1, 7))
    found = head_tiles(pattern, 93, 5, 8, 1, is_causal=True)
    figure = draw_blocks(pattern, 93, 5, block_size=8, is_causal=True)
    assert len(figure.axes) == len(found) > 1
    for of, axes in zip(found, figure.axes):
        np.testing.assert_array_equal(np.asarray(axes.images[0].get_array()), of.cells)
        assert axes.images[0].get_extent() == [-0.5, 95.5, 95.5, -0.5]  # 12 tiles of 8 tokens
        assert f"waste: raw {of.each.waste_raw}, packed {of.each.waste_packed}" in axes.get_title().replace("\xa0", " ")
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "tiles of 8 x 8 pairs"
    assert [text.get_text() for text in legend.get_texts()] == ["not visited", "partial", "full", "future"]


def test_picture_of_many_tiles_says_how_many_a_cell_stands_for() -> None:
    pattern = DilatedPattern((64,), (1,))
    figure = draw_blocks(pattern, 2 * PICTURE_CELLS + 1, 1, block_size=1)
    assert figure.axes[0].images[0].get_array().shape == (342, 342)  # of 3 x 3 tiles
    assert figure.axes[0].images[0].get_extent() == [-0.5, 1025.5, 1025.5, -0.5]
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "tiles of 1 x 1 pairs, 3 x 3 of them per cell"
    labels = ["none visited", "less than half", "half or more", "all visited", "all full"]
    assert [text.get_text() for text in legend.get_texts()] == labels
    figure = draw_blocks(pattern, PICTURE_CELLS, 1, block_size=1)
    assert figure.axes[0].images[0].get_array().shape == (PICTURE_CELLS, PICTURE_CELLS)


def test_outlines_of_very_many_segments_are_left_out() -> None:
    def outlines(num_tokens: int) -> int:
        axes = draw_blocks(DilatedPattern((5, 500), (1, 1)), num_tokens, 1, block_size=8).axes[0]
        return sum(len(lines.get_segments()) for lines in axes.collections if len(lines.get_segments()[0]) == 5)

    assert outlines(320) == 64 + 1
    assert outlines(321) == 1


# -- the command --------------------------------------------------------------------------------------------------------------

SMALL = ("--blocks", "--block-size", 8, "--segment-lengths", "15,31", "--dilation-rates", "1,2", "--tokens", 93)


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of the table, by their first column."""
    rows = re.findall(r"^((?:each of |all )?[\d, .-]*\d) +(\S+) +(\S+) +([\d.]+ %) +(\S+) +(\S+) +(\S+) +(\S+)\s*$", text, re.M)
    return {name: values for name, *values in rows}


@pytest.mark.parametrize("is_causal", [False, True])
def test_table_holds_the_numbers_of_each_head_and_of_all(is_causal: bool) -> None:
    pattern = DilatedPattern((15, 31), (1, 2))
    code, text = run(*SMALL, "--heads", 4, "--causal" if is_causal else "--no-causal")
    assert code == 0
    rows, total = rows_of(text), np.zeros(4, dtype=int)
    assert list(rows) == ["each of 0, 1", "each of 2, 3", "all 4"]
    for head, name in ((0, "each of 0, 1"), (2, "each of 2, 3")):
        tally, _, _ = brute_force(pattern, 93, 4, head, 8, is_causal)
        visited = tally.partial + tally.full
        assert rows[name] == [
            str(tally.partial),
            str(tally.full),
            f"{100 * visited / 12**2:.3g} %",
            str(tally.packed),
            f"{tally.pairs:,}",
            f"{visited * 8 * 8 / tally.pairs:.2f}",
            f"{tally.packed * 8 * 8 / tally.pairs:.2f}",
        ]
        total += 2 * np.array([tally.partial, tally.full, tally.packed, tally.pairs])
    partial, full, packed, pairs = total
    assert pairs == pattern.count_pairs(93, 4, is_causal=is_causal)
    assert rows["all 4"][:2] == [str(partial), str(full)]
    assert rows["all 4"][2] == f"{100 * (partial + full) / (4 * 12**2):.3g} %"
    assert rows["all 4"][3:5] == [str(packed), f"{pairs:,}"]
    assert rows["all 4"][5:] == [f"{(partial + full) * 64 / pairs:.2f}", f"{packed * 64 / pairs:.2f}"]


def test_table_of_one_head_has_no_sum() -> None:
    assert list(rows_of(run(*SMALL, "--heads", 1)[1])) == ["0"]


def test_table_at_a_million_tokens_has_whole_numbers_at_80_columns() -> None:
    code, text = run("--blocks", "--preset", "longnet", "--tokens", 2**20, "--heads", 64)
    assert code == 0
    row = rows_of(text)["all 64"]
    visited, full = 2**20 // 32768 * 256**2, 2**20 // 2048 * 16**2
    pairs = DilatedPattern.longnet().count_pairs(2**20, 64)
    assert row[:3] == [f"{64 * (visited - full):,}", f"{64 * full:,}", "3.12 %"]
    assert row[4] == f"{pairs:,}"
    assert row[5] == f"{64 * visited * 128**2 / pairs:.2f}"
    assert "128 x 128 of them per cell" in text


def test_blocks_print_characters_where_there_are_no_colours() -> None:
    arguments = (
        "--blocks",
        "--block-size",
        4,
        "--segment-lengths",
        "8,24",
        "--dilation-rates",
        "1,5",
        "--heads",
        1,
        "--causal",
    )
    code, text = run(*arguments)
    assert code == 0
    assert "48 tokens · 1 head, blocked offsets · causal" in text  # twice the longest segment
    rows = [line.rstrip() for line in text.splitlines() if re.fullmatch(r"[·o#]+ *", line)]
    # Of 6 tiles in 24 tokens, the branch of rate 5 keeps a position in all but tile 4, which has 16 to 19.
    half = ["o", "#o", "ooo", "oo#o", "····o", "oooo#o"]
    assert rows == [*half, *("·" * 6 + row for row in half)]
    assert "tiles of 4 x 4 pairs, queries down, keys across:  · = not visited  o = partial  # = full  blank = future" in text


def test_terminal_cells_stand_for_more_tiles_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for width, cells in ((200, 64), (20, 19)):
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, color_system="truecolor", width=width, no_color=False)
        monkeypatch.setattr(flexdilated.draw, "Console", lambda console=console: console)
        assert run("--blocks", "--heads", 1)[0] == 0
        lines = [line.count("▀") for line in file.getvalue().splitlines() if "▀" in line]
        assert lines == [cells] * -(-cells // 2)  # of 128 tiles, 2 or 7 per cell


def test_show_blocks_writes_a_png_of_the_figure_size_and_prints_the_table_alone(tmp_path: Path) -> None:
    output = tmp_path / "blocks.png"
    code, text = run(*SMALL, "--heads", 5, "--causal", "--heads-rule", "grouped", "-o", output)
    assert code == 0
    assert "tokens ·" not in text
    assert list(rows_of(text)) == ["each of 0-2", "each of 3, 4", "all 5"]
    data = output.read_bytes()
    figure = draw_blocks(DilatedPattern((15, 31), (1, 2), heads="grouped"), 93, 5, block_size=8, is_causal=True)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == tuple(round(size) for size in figure.bbox.size)
    assert list(tmp_path.iterdir()) == [output]


def test_blocks_have_defaults_of_their_own() -> None:
    code, text = run("--blocks")
    assert code == 0
    assert "segment lengths 2048, 4096, 8192 · dilation rates 1, 2, 4" in text
    assert "16,384 tokens · 4 heads, blocked offsets · not causal · 50 % of tiles visited" in text
    assert "tiles of 128 x 128 pairs, 2 x 2 of them per cell" in text


@pytest.mark.parametrize(
    ("preset", "name", "title"),
    [
        ("longnet", "LongNet", "segment lengths 2048, 4096, 8192, 16384, 32768 · dilation rates 1, 2, 4, 6, 12"),
        (
            "gigapath",
            "Prov-GigaPath, without torchscale's zero keys",
            "segment lengths 1024, 5792, 32768, 185363, 1048576 · dilation rates 1, 2, 4, 8, 16",
        ),
    ],
)
def test_blocks_draw_presets_as_published(preset: str, name: str, title: str) -> None:
    code, text = run("--blocks", "--preset", preset, "--heads", 1)
    assert code == 0
    assert text.splitlines()[:2] == [name, title]
    assert "65,536 tokens" in text


def test_blocks_follow_both_rules() -> None:
    arguments = ("--blocks", "--block-size", 8, "--segment-lengths", "30,62", "--dilation-rates", "2,4", "--tokens", 93)
    text = run(*arguments, "--heads", 8)[1]
    assert "heads 0-3: 2 choices of offsets" in text  # 0 and 0, 0 and 1: the same tiles, the same number of pairs
    assert "heads 6, 7: offsets 1, 3" in text
    assert "heads 0, 4: offsets 0, 0" in run(*arguments, "--heads", 8, "--offsets", "interleaved")[1]
    assert "heads 4-7: length 62, rate 4," in run(*arguments, "--heads", 8, "--heads-rule", "grouped")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--block-size", "64"), "--block-size must come with --blocks, got 64"),
        (("--block-size", "0"), "--block-size must come with --blocks, got 0"),
        (("--blocks", "--block-size", "0"), f"--block-size must be in [1, {MAX_BLOCK_SIZE}], got 0"),
        (("--blocks", "--block-size", "-5"), f"--block-size must be in [1, {MAX_BLOCK_SIZE}], got -5"),
        (("--blocks", "--block-size", f"{MAX_BLOCK_SIZE + 1}"), "--block-size must be in [1, 1048576], got 1048577"),
        (("--blocks", "--tokens", "0"), "--tokens must be in [1, 1048576] with --block-size=128, got 0"),
        (
            ("--blocks", "--tokens", "1048577"),
            "--tokens must be in [1, 1048576] with --block-size=128, got 1048577; "
            "at most 8192 blocks can be drawn, of a larger --block-size",
        ),
        (
            ("--blocks", "--block-size", "1"),
            "--tokens must be in [1, 8192] with --block-size=1, got 16384, twice the longest segment; "
            "at most 8192 blocks can be drawn, of a larger --block-size",
        ),
        (
            ("--blocks", "--block-size", "7", "--preset", "longnet"),
            "--tokens must be in [1, 57344] with --block-size=7, got 65536, the preset's default; "
            "at most 8192 blocks can be drawn, of a larger --block-size",
        ),
        (
            ("--blocks", "--block-size", "4096", "--tokens", "16777217"),
            "--tokens must be in [1, 16777216] with --block-size=4096, got 16777217",
        ),
        (("--blocks", "--segment-lengths", "4096"), "dilation_rates must hold one rate per segment length=1, got (1, 2, 4)"),
        (("--blocks", "--heads", "65"), "--heads must be in [1, 64], got 65"),
        (("--blocks", "--output", "blocks.jpg"), "--output must end in .png, got 'blocks.jpg'"),
        (
            ("--blocks", "--segment-lengths", f"5,{MAX_LENGTH + 1}"),
            f"--segment-lengths must be at most {MAX_LENGTH}, got {MAX_LENGTH + 1}",
        ),
        (("--dilation-rates", f"{MAX_LENGTH + 1}"), f"--dilation-rates must be at most {MAX_LENGTH}, got {MAX_LENGTH + 1}"),
    ],
)
def test_show_blocks_rejects_bad_input_with_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert run(*arguments) == (2, f"error: {message}\n")


def test_show_blocks_accepts_the_limits(tmp_path: Path) -> None:
    one = ("--blocks", "--heads", 1, "-o", tmp_path / "a.png")
    lengths = ("--segment-lengths", 1, "--dilation-rates", 1)
    assert rows_of(run(*one, *lengths, "--block-size", 1, "--tokens", MAX_BLOCKS)[1])["0"][:3] == ["0", "8,192", "0.0122 %"]
    assert rows_of(run(*one, "--block-size", MAX_BLOCK_SIZE)[1])["0"][:3] == ["1", "0", "100 %"]
    longest = ("--segment-lengths", MAX_LENGTH, "--dilation-rates", MAX_LENGTH, "--tokens", 300)
    assert rows_of(run(*one, *longest)[1])["0"][:5] == ["1", "0", "11.1 %", "1", "1"]
    assert run("--segment-lengths", MAX_LENGTH, "--dilation-rates", MAX_LENGTH, "--tokens", 3, "--heads", 1)[0] == 0
