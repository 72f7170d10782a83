"""`flexdilated show`: what it prints, writes and refuses."""

import io
import re
import struct
from pathlib import Path

import pytest
from rich.console import Console

from flexdilated import DilatedPattern
from flexdilated.cli.options import Preset
from flexdilated.draw.pattern import draw
from tests.commands import invoke

THREE = DilatedPattern((5, 11, 17), (1, 2, 3))


def show(*arguments: object) -> tuple[int, str, str]:
    return invoke("show", *arguments)


def test_show_writes_a_png_of_the_figure_size(tmp_path: Path) -> None:
    output = tmp_path / "pattern.png"
    arguments = ("--segment-lengths", "5,11,17", "--dilation-rates", "1,2,3", "--heads", 7, "--tokens", 23, "--no-causal")
    assert show(*arguments, "--output", output) == (0, "", "")
    data = output.read_bytes()
    width, height = draw(THREE, 23, 7).bbox.size
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (round(width), round(height))
    assert list(tmp_path.iterdir()) == [output]


def test_show_replaces_an_older_picture(tmp_path: Path) -> None:
    output = tmp_path / "pattern.PNG"
    output.write_bytes(b"older")
    assert show("-o", output)[0] == 0
    assert output.read_bytes()[:4] == b"\x89PNG"


# -- the terminal -------------------------------------------------------------------------------------------------------------


def test_show_prints_digits_where_there_are_no_colours() -> None:
    arguments = ("--segment-lengths", "3,6", "--dilation-rates", "1,2", "--heads", 1, "--causal")
    code, text, _ = show(*arguments)
    assert code == 0
    rows = [line.rstrip() for line in text.splitlines() if re.fullmatch(r"[12·]+ *", line)]
    assert rows == ["2", "11", "212", "···1", "1·112", "···111"]
    assert "head 0: offsets 0, 0" in text
    assert "66.7 % of causal pairs" in text.replace("\N{NO-BREAK SPACE}", " ")
    assert "blank = future" in text


def test_show_is_as_long_as_the_longest_segment_by_default() -> None:
    assert "64 tokens · 4 heads, blocked offsets · not causal" in show()[1]


def test_show_follows_both_rules() -> None:
    arguments = ("--segment-lengths", "4,8", "--dilation-rates", "2,4", "--heads", 4)
    assert "head 1: offsets 0, 1" in show(*arguments)[1]
    assert "head 1: offsets 1, 1" in show(*arguments, "--offsets", "interleaved")[1]
    assert "length 8, rate 4," in show(*arguments, "--heads-rule", "grouped")[1]


def test_show_draws_key_value_heads() -> None:
    code, text, _ = show("--heads", 6, "--kv-heads", 2, "--causal")
    assert code == 0
    assert "64 tokens · 2 heads, blocked offsets · causal" in text
    assert text.endswith(
        "\nnot connected: not all information from tokens 0 to 31 reaches the tokens from 32 on; "
        "use DilatedPattern.causal(seq_len, 2), or add a branch as long as the sequence at a rate of at most 2\n"
    )
    assert show("--heads", 1, "--tokens", 16, "--causal")[1].endswith("\nconnected: causal information crosses all boundaries\n")


@pytest.mark.parametrize(("tokens", "cells"), [(40, "1 = 1  2 = 2"), (41, "in cells of 2 x 2 pairs"), (2**40, "joins per pair")])
def test_show_draws_no_wider_than_the_terminal(tokens: int, cells: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=40, no_color=True)
    monkeypatch.setattr("flexdilated.cli.show.Console", lambda: console)
    assert show("--tokens", tokens, "--heads", 1) == (0, "", "")
    assert cells in file.getvalue()
    assert max(len(line) for line in file.getvalue().splitlines()[3:] if "=" not in line) <= 40


@pytest.mark.parametrize(
    ("preset", "title"),
    [
        (Preset.LONGNET, "segment lengths 2048, 4096, 8192, 16384, 32768 · dilation rates 1, 2, 4, 6, 12\n32,768 tokens"),
        (Preset.GIGAPATH, "segment lengths 1024, 5792, 32768, 185363, 1048576 · dilation rates 1, 2, 4, 8, 16\n1,048,576 tokens"),
    ],
)
def test_show_draws_presets_at_their_published_lengths(preset: Preset, title: str) -> None:
    code, text, _ = show("--preset", preset.value, "--heads", 1)
    assert code == 0
    assert title in text
    assert "joins per pair, in cells of " in text


# -- what it refuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--segment-lengths", "64", "--dilation-rates", "65"),
            "--dilation-rates[0] must be in [1, --segment-lengths[0]=64], got 65",
        ),
        (
            ("--segment-lengths", "16,64", "--dilation-rates", "1"),
            "--dilation-rates must hold one rate per segment length=2, got (1,)",
        ),
        (("--segment-lengths", "16,0", "--dilation-rates", "1,1"), "--segment-lengths[1] must be at least 1, got 0"),
        (
            ("--segment-lengths", "16,x", "--dilation-rates", "1,1"),
            "--segment-lengths must be integers separated by commas, got '16,x'",
        ),
        (("--segment-lengths", "", "--dilation-rates", "1"), "--segment-lengths must be integers separated by commas, got ''"),
        (("--segment-lengths", "9", "--dilation-rates", "4.5"), "--dilation-rates must be integers separated by commas, got '4.5'"),
        (
            ("--dilation-rates", "1"),
            "--segment-lengths must be given with the other of --segment-lengths and --dilation-rates, got none",
        ),
        (("--heads", "65"), "--heads must be at most 64, got 65"),
        (("--tokens", f"{2**40 + 1}"), "--tokens must be at most 1099511627776, got 1099511627777"),
        (("--heads", "6", "--kv-heads", "4"), "--kv-heads must divide --heads=6, got 4"),
        (("--preset", "longnet", "--dilation-rates", "1"), "--dilation-rates must not be given with --preset=longnet, got 1"),
        (("--preset", "gigapath", "--segment-lengths", "4"), "--segment-lengths must not be given with --preset=gigapath, got 4"),
        (("--output", "pattern.jpg"), "--output must end in .png, got 'pattern.jpg'"),
        (("--output", "pattern"), "--output must end in .png, got 'pattern'"),
    ],
)
def test_show_rejects_bad_input_with_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert show(*arguments) == (2, "", f"error: {message}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tokens", "x"),
        ("--tokens", "0"),
        ("--segment-lengths", "1"),
        ("--kv-heads", "0"),
        ("--block-size", "0"),
        ("--block-size", "1048577"),
        ("--heads", "1.5"),
        ("--preset", "bert"),
        ("--offsets", "random"),
    ],
)
def test_show_rejects_values_of_the_wrong_type_or_range(arguments: tuple[str, str]) -> None:
    code, _, err = show(*arguments)
    assert code == 2
    assert arguments[0] in err


@pytest.mark.parametrize("case", ["no folder", "a file as folder", "a folder as file", "a full disk"])
def test_show_leaves_everything_as_it_was_where_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    output, why = {
        "no folder": (tmp_path / "none" / "pattern.png", "No such file or directory"),
        "a file as folder": (tmp_path / "file" / "pattern.png", "Not a directory"),
        "a folder as file": (tmp_path / "pattern.png", "Is a directory"),
        "a full disk": (tmp_path / "older.png", "No space left on device"),
    }[case]
    (tmp_path / "file").write_text("")
    (tmp_path / "pattern.png").mkdir()
    (tmp_path / "older.png").write_bytes(b"older")
    if case == "a full disk":
        from matplotlib.figure import Figure

        def fill_the_disk(figure: Figure, file: io.BufferedWriter, **options: object) -> None:
            file.write(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Figure, "savefig", fill_the_disk)
    assert show("-o", output) == (2, "", f"error: --output must be a file that can be written, got '{output}': {why}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "pattern.png", "older.png"}
    assert (tmp_path / "older.png").read_bytes() == b"older"
