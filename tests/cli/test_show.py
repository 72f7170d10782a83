"""`flexdilated show`: what it prints, writes and refuses."""

import io
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from flexdilated import DilatedPattern
from flexdilated.draw.blocks import draw_blocks
from flexdilated.draw.pattern import draw
from tests.commands import invoke, refused
from tests.draw.brute_force import brute_force

TWO = ("--segment-lengths", "15,31", "--dilation-rates", "1,2", "--tokens", 93)
BLOCKS = ("--blocks", "--block-size", 8, *TWO)


def show(*arguments: object) -> str:
    code, out, err = invoke("show", *arguments)
    assert (code, err) == (0, "")
    return out.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("is_blocks", [False, True])
def test_show_writes_a_png_of_the_figure_size_over_an_older_one(tmp_path: Path, is_blocks: bool) -> None:
    output = tmp_path / "pattern.PNG"
    output.write_bytes(b"older")
    pattern = DilatedPattern((15, 31), (1, 2), heads="grouped")
    figure = draw_blocks(pattern, 93, 5, block_size=8) if is_blocks else draw(pattern, 93, 5)
    text = show(*(BLOCKS if is_blocks else TWO), "--heads", 5, "--heads-rule", "grouped", "-o", output)
    assert list(rows_of(text)) == (["each of 0-2", "each of 3, 4", "all 5"] if is_blocks else [])
    data = output.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == tuple(round(size) for size in figure.bbox.size)
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(("tokens", "heads"), [(97, 2), (31, 3)])
def test_show_cuts_no_rows_where_no_terminal_has_a_width(tokens: int, heads: int) -> None:
    text = show("--window", 5, "--segment-lengths", tokens, "--dilation-rates", 2, "--tokens", tokens, "--heads", heads)
    rows = [row for line in text.splitlines() for row in re.split(r"  +", line.strip()) if re.fullmatch(r"[12w·]+", row)]
    assert "\u2026" not in text
    assert [len(row) for row in rows] == [tokens] * heads * tokens


def test_show_prints_digits_where_there_are_no_colours() -> None:
    text = show("--segment-lengths", "3,6", "--dilation-rates", "1,2", "--heads", 1, "--causal")
    rows = [line.rstrip() for line in text.splitlines() if re.fullmatch(r"[12·]+ *", line)]
    assert rows == ["2", "11", "212", "···1", "1·112", "···111"]
    assert "6 tokens · 1 head, blocked offsets · causal · 66.7 % of causal pairs, each counted once" in text
    assert "head 0: offsets 0, 0" in text
    assert "blank = future" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--offsets", "interleaved"), "head 1: offsets 1, 1"),
        (("--heads-rule", "grouped"), "length 8, rate 4,"),
        (("--blocks", "--block-size", 2), "tiles of 2 x 2 pairs"),
        (("--kv-heads", 2, "--causal"), "not connected: not all information from tokens 0 to 0 reaches "),
    ],
)
def test_show_follows_its_options(arguments: tuple[object, ...], expected: str) -> None:
    assert expected in show("--segment-lengths", "4,8", "--dilation-rates", "2,4", "--heads", 4, *arguments)


@pytest.mark.parametrize(("tokens", "cells"), [(40, "1 = 1  2 = 2"), (41, "in cells of 2 x 2 pairs"), (2**40, "joins per pair")])
def test_show_draws_no_wider_than_the_terminal(tokens: int, cells: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=40, no_color=True)
    monkeypatch.setattr("flexdilated.cli.show.Console", lambda: console)
    assert show("--tokens", tokens, "--heads", 1) == ""
    assert cells in file.getvalue()
    assert max(len(line) for line in file.getvalue().splitlines()[3:] if "=" not in line) <= 40


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (("--preset", "longnet"), ["LongNet", "segment lengths 2048, 4096, 8192, 16384, 32768 · dilation rates 1, 2, 4, 6, 12"]),
        (("--blocks",), ["segment lengths 2048, 4096, 8192 · dilation rates 1, 2, 4", "8,192 tokens · 1 head, blocked offsets · "]),
        (("--preset", "causal", "--tokens", 64), ["DilatedPattern.causal", "segment lengths 64 · dilation rates 1"]),
        (("--blocks", "--preset", "gigapath"), ["Prov-GigaPath, without torchscale's zero keys"]),
    ],
)
def test_presets_and_defaults(arguments: tuple[str, ...], lines: list[str]) -> None:
    for found, expected in zip(show("--heads", 1, *arguments).splitlines(), lines):
        assert found.startswith(expected)


def rows_of(text: str) -> dict[str, list[str]]:
    rows = re.findall(r"^((?:each of |all )?[\d, .-]*\d) +(\S+) +(\S+) +([\d.]+ %) +(\S+) +(\S+) +(\S+) +(\S+)\s*$", text, re.M)
    return {name: values for name, *values in rows}


@pytest.mark.parametrize("is_causal", [False, True])
def test_table_holds_the_numbers_of_each_head_and_of_all(is_causal: bool) -> None:
    pattern = DilatedPattern((15, 31), (1, 2))
    rows = rows_of(show(*BLOCKS, "--heads", 4, "--causal" if is_causal else "--no-causal"))
    assert list(rows) == ["each of 0, 1", "each of 2, 3", "all 4"]
    total = np.zeros(4, dtype=int)
    for head, name in ((0, "each of 0, 1"), (2, "each of 2, 3"), (None, "all 4")):
        if head is None:
            partial, full, packed, pairs, tiles = *total, 4 * 12**2
        else:
            tally, _, _ = brute_force(pattern, 93, 4, head, 8, is_causal)
            partial, full, packed, pairs, tiles = tally.partial, tally.full, tally.packed, tally.pairs, 12**2
            total += 2 * np.array([partial, full, packed, pairs])
        visited = partial + full
        counts = [str(partial), str(full), f"{100 * visited / tiles:.3g} %", str(packed), f"{pairs:,}"]
        assert rows[name] == [*counts, f"{visited * 64 / pairs:.2f}", f"{packed * 64 / pairs:.2f}"]
    assert list(rows_of(show(*BLOCKS, "--heads", 1))) == ["0"]


def test_blocks_print_characters_where_there_are_no_colours() -> None:
    sizes = ("--block-size", 4, "--segment-lengths", "8,24", "--dilation-rates", "1,5", "--heads", 1, "--causal", "--tokens", 48)
    text = show("--blocks", *sizes)
    rows = [line.rstrip() for line in text.splitlines() if re.fullmatch(r"[·o#]+ *", line)]
    # Of 6 tiles in 24 tokens, the branch of rate 5 keeps a position in all but tile 4, which has 16 to 19.
    half = ["o", "#o", "ooo", "oo#o", "····o", "oooo#o"]
    assert rows == [*half, *("·" * 6 + row for row in half)]
    assert "tiles of 4 x 4 pairs, queries down, keys across:  · = not visited  o = partial  # = full  blank = future" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--heads", "65"), "--heads must be at most 64 key/value heads, one panel each, got 65"),
        (("--block-size", "8"), "--block-size must come with --blocks, got 8"),
        (("--blocks", "--tokens", "1048577"), "--tokens must be in [1, 1048576] with --block-size=128, got 1048577; use a larger "),
        (("--output", "pattern.jpg"), "--output must end in .png, got 'pattern.jpg'"),
    ],
)
def test_show_rejects_bad_input_with_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert refused("show", *arguments).startswith(message)


def test_show_leaves_everything_as_it_was_where_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def fill_the_disk(figure: Figure, file: io.BufferedWriter, **options: object) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    (tmp_path / "older.png").write_bytes(b"older")
    monkeypatch.setattr(Figure, "savefig", fill_the_disk)
    code, _, err = invoke("show", "-o", tmp_path / "older.png")
    assert code == 2
    assert err == f"error: {tmp_path / 'older.png'} must be a file that can be read or written, got: No space left on device\n"
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("older.png", b"older")]


@pytest.mark.slow
def test_a_terminal_of_few_characters_shows_the_same_in_ascii() -> None:
    command = [sys.executable, "-m", "flexdilated", "show", "--heads", "1", "--blocks"]
    found = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=True)
    text = show("--heads", 1, "--blocks").partition("partial")[0].rstrip()  # the lines of the table are rich's own
    assert "·" in text
    assert found.stdout.decode("ascii").partition("partial")[0].rstrip() == text.replace("·", ".")


def test_a_pipe_is_as_wide_as_a_page_and_cuts_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, side_by_side in ((None, 3), ("60", 1), ("140", 4)):
        monkeypatch.delenv("COLUMNS", raising=False) if columns is None else monkeypatch.setenv("COLUMNS", columns)
        lines = show("--tokens", 31, "--heads", 4, "--segment-lengths", 31, "--dilation-rates", 1).splitlines()
        assert next(line for line in lines if "head 0" in line).count("head") == side_by_side
        assert max(line.count("1") for line in lines) == 31 * side_by_side
