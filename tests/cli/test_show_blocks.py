"""`flexdilated show --blocks`: its table, its picture, what it refuses."""

import io
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from flexdilated import DilatedPattern
from flexdilated.cli.options import MAX_LENGTH
from flexdilated.cli.show import MAX_BLOCKS
from flexdilated.draw.blocks import draw_blocks
from tests.commands import invoke
from tests.draw.brute_force import brute_force


def show(*arguments: object) -> tuple[int, str, str]:
    code, out, err = invoke("show", *arguments)
    return code, out.replace("\N{NO-BREAK SPACE}", " "), err


SMALL = ("--blocks", "--block-size", 8, "--segment-lengths", "15,31", "--dilation-rates", "1,2", "--tokens", 93)


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of the table, by their first column."""
    rows = re.findall(r"^((?:each of |all )?[\d, .-]*\d) +(\S+) +(\S+) +([\d.]+ %) +(\S+) +(\S+) +(\S+) +(\S+)\s*$", text, re.M)
    return {name: values for name, *values in rows}


@pytest.mark.parametrize("is_causal", [False, True])
def test_table_holds_the_numbers_of_each_head_and_of_all(is_causal: bool) -> None:
    pattern = DilatedPattern((15, 31), (1, 2))
    code, text, _ = show(*SMALL, "--heads", 4, "--causal" if is_causal else "--no-causal")
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
    assert list(rows_of(show(*SMALL, "--heads", 1)[1])) == ["0"]


@pytest.mark.slow
def test_table_at_a_million_tokens_has_whole_numbers_at_80_columns() -> None:
    code, text, _ = show("--blocks", "--preset", "longnet", "--tokens", 2**20, "--heads", 64)
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
        "--tokens",
        48,
    )
    code, text, _ = show(*arguments)
    assert code == 0
    assert "48 tokens · 1 head, blocked offsets · causal" in text
    rows = [line.rstrip() for line in text.splitlines() if re.fullmatch(r"[·o#]+ *", line)]
    # Of 6 tiles in 24 tokens, the branch of rate 5 keeps a position in all but tile 4, which has 16 to 19.
    half = ["o", "#o", "ooo", "oo#o", "····o", "oooo#o"]
    assert rows == [*half, *("·" * 6 + row for row in half)]
    assert "tiles of 4 x 4 pairs, queries down, keys across:  · = not visited  o = partial  # = full  blank = future" in text


def test_terminal_cells_stand_for_more_tiles_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for width, cells in ((200, 64), (20, 19)):
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, color_system="truecolor", width=width, no_color=False)
        monkeypatch.setattr("flexdilated.cli.show.Console", lambda console=console: console)
        assert show("--blocks", "--heads", 1, "--tokens", 16384)[0] == 0
        lines = [line.count("▀") for line in file.getvalue().splitlines() if "▀" in line]
        assert lines == [cells] * -(-cells // 2)  # of 128 tiles, 2 or 7 per cell


def test_show_blocks_writes_a_png_of_the_figure_size_and_prints_the_table_alone(tmp_path: Path) -> None:
    output = tmp_path / "blocks.png"
    code, text, _ = show(*SMALL, "--heads", 5, "--causal", "--heads-rule", "grouped", "-o", output)
    assert code == 0
    assert "tokens ·" not in text
    assert list(rows_of(text)) == ["each of 0-2", "each of 3, 4", "all 5"]
    data = output.read_bytes()
    figure = draw_blocks(DilatedPattern((15, 31), (1, 2), heads="grouped"), 93, 5, block_size=8, is_causal=True)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == tuple(round(size) for size in figure.bbox.size)
    assert list(tmp_path.iterdir()) == [output]


def test_blocks_have_defaults_of_their_own() -> None:
    code, text, _ = show("--blocks")
    assert code == 0
    assert "segment lengths 2048, 4096, 8192 · dilation rates 1, 2, 4" in text
    assert "8,192 tokens · 4 heads, blocked offsets · not causal · 100 % of tiles visited" in text
    assert "tiles of 128 x 128 pairs, queries" in text


@pytest.mark.parametrize(
    ("preset", "name", "tokens", "title"),
    [
        ("longnet", "LongNet", "32,768", "segment lengths 2048, 4096, 8192, 16384, 32768 · dilation rates 1, 2, 4, 6, 12"),
        (
            "gigapath",
            "Prov-GigaPath, without torchscale's zero keys",
            "65,536",
            "segment lengths 1024, 5792, 32768, 185363, 1048576 · dilation rates 1, 2, 4, 8, 16",
        ),
    ],
)
def test_blocks_draw_presets_as_published(preset: str, name: str, tokens: str, title: str) -> None:
    code, text, _ = show("--blocks", "--preset", preset, "--heads", 1)
    assert code == 0
    assert text.splitlines()[:2] == [name, title]
    assert f"{tokens} tokens" in text


def test_blocks_follow_both_rules() -> None:
    arguments = ("--blocks", "--block-size", 8, "--segment-lengths", "30,62", "--dilation-rates", "2,4", "--tokens", 93)
    text = show(*arguments, "--heads", 8)[1]
    assert "heads 0-3: 2 choices of offsets" in text  # 0 and 0, 0 and 1: the same tiles, the same number of pairs
    assert "heads 6, 7: offsets 1, 3" in text
    assert "heads 0, 4: offsets 0, 0" in show(*arguments, "--heads", 8, "--offsets", "interleaved")[1]
    assert "heads 4-7: length 62, rate 4," in show(*arguments, "--heads", 8, "--heads-rule", "grouped")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--block-size", "64"), "--block-size must come with --blocks, got 64"),
        (
            ("--blocks", "--tokens", "1048577"),
            "--tokens must be in [1, 1048576] with --block-size=128, got 1048577; use a larger --block-size",
        ),
        (
            ("--blocks", "--block-size", "7", "--preset", "gigapath"),
            "--tokens must be in [1, 57344] with --block-size=7, got 65536; use a larger --block-size",
        ),
        (("--blocks", "--output", "blocks.jpg"), "--output must end in .png, got 'blocks.jpg'"),
        (
            ("--blocks", "--segment-lengths", f"5,{MAX_LENGTH + 1}", "--dilation-rates", "1,1"),
            f"--segment-lengths must be at most {MAX_LENGTH}, got {MAX_LENGTH + 1}",
        ),
    ],
)
def test_show_blocks_rejects_bad_input_with_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert show(*arguments) == (2, "", f"error: {message}\n")


def test_show_blocks_accepts_the_limits(tmp_path: Path) -> None:
    one = ("--blocks", "--heads", 1, "-o", tmp_path / "a.png")
    lengths = ("--segment-lengths", 1, "--dilation-rates", 1)
    assert rows_of(show(*one, *lengths, "--block-size", 1, "--tokens", MAX_BLOCKS)[1])["0"][:3] == ["0", "8,192", "0.0122 %"]
    assert rows_of(show(*one, "--block-size", 2**20)[1])["0"][:3] == ["1", "0", "100 %"]
    longest = ("--segment-lengths", MAX_LENGTH, "--dilation-rates", MAX_LENGTH, "--tokens", 300)
    assert rows_of(show(*one, *longest)[1])["0"][:5] == ["1", "0", "11.1 %", "1", "1"]
    assert show("--segment-lengths", MAX_LENGTH, "--dilation-rates", MAX_LENGTH, "--tokens", 3, "--heads", 1)[0] == 0
