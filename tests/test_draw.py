"""The picture of a pattern: its numbers, its layout, the command and what it refuses."""

import io
import re
import struct
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import flexdilated.draw
from flexdilated import DilatedPattern, reference
from flexdilated.draw import MAX_HEADS, MAX_TOKENS, Preset, draw, multiplicity, show

app = typer.Typer()
app.command()(show)

THREE = DilatedPattern((5, 11, 17), (1, 2, 3))
MANY = DilatedPattern(tuple(range(16, 256, 16)), tuple(range(1, 16)))


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


# -- the numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("pattern", "num_tokens", "num_heads"),
    [
        (THREE, 23, 7),
        (DilatedPattern((5, 11, 17), (2, 3, 7), offsets="interleaved"), 23, 5),
        (DilatedPattern((5, 11, 17), (2, 3, 7), heads="grouped"), 19, 5),
        (DilatedPattern((5, 11, 17), (2, 3, 7), heads="grouped"), 19, 3),
        (DilatedPattern((29,), (3,)), 1, 1),
    ],
)
def test_multiplicity_equals_the_weights_of_the_oracle(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, is_causal: bool
) -> None:
    # With scores of 0 and one-hot values, out is m / sum(m) and exp(lse) is sum(m).
    zeros = torch.zeros(1, num_tokens, num_heads, num_tokens, dtype=torch.float64)
    one_hot = torch.eye(num_tokens, dtype=torch.float64)[None, :, None].expand_as(zeros)
    out, lse = reference.dilated_attention(zeros, zeros, one_hot, pattern, is_causal=is_causal)
    expected = out[0].transpose(0, 1) * lse[0].exp()[..., None]
    counts = multiplicity(pattern, num_tokens, num_heads, is_causal=is_causal)
    torch.testing.assert_close(torch.from_numpy(counts).double(), expected, atol=1e-12, rtol=0.0)
    assert counts.sum() == pattern.count_pairs(num_tokens, num_heads, is_causal=is_causal)


# -- the picture --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "num_tokens", "num_heads", "is_causal"),
    [
        (THREE, 17, 1, False),
        (THREE, 61, 12, True),
        (MANY, 251, 2, False),
        (MANY, 7, 3, True),
        (DilatedPattern((5, 11, 17), (1, 2, 3), heads="grouped"), 53, 7, True),
        (DilatedPattern((5, 11, 17), (1, 2, 3), heads="grouped"), 53, 3, False),
        (DilatedPattern((5,), (2,)), 1, MAX_HEADS, False),
        (THREE, MAX_TOKENS, 1, False),
    ],
)
def test_picture_has_sharp_cells_and_no_text_on_text(
    pattern: DilatedPattern, num_tokens: int, num_heads: int, is_causal: bool
) -> None:
    figure = draw(pattern, num_tokens, num_heads, is_causal=is_causal, name="a name")
    figure.canvas.draw()
    panels = figure.axes
    assert len(panels) == num_heads
    boxes = [*figure.texts, *figure.legends, *(axes.title for axes in panels)]
    boxes += [axes.xaxis.label for axes in panels if axes.get_xlabel()] + [axes.yaxis.label for axes in panels if axes.get_ylabel()]
    extents = [text.get_window_extent() for text in boxes] + [axes.bbox for axes in panels]
    for axes in panels:
        pixels = axes.bbox.width / num_tokens
        assert pixels == pytest.approx(round(pixels), abs=1e-6)
        assert axes.bbox.height == pytest.approx(axes.bbox.width)
    for a, b in combinations(extents, 2):
        assert a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0, (a, b)
    for extent in extents:
        assert 0 <= extent.x0 < extent.x1 <= figure.bbox.width
        assert 0 <= extent.y0 < extent.y1 <= figure.bbox.height


def test_picture_shows_the_multiplicity_of_each_head() -> None:
    figure = draw(THREE, 23, 5, is_causal=True)
    counts = multiplicity(THREE, 23, 5, is_causal=True)
    for head, axes in enumerate(figure.axes):
        shown = np.asarray(axes.images[0].get_array())
        future = np.triu(np.ones((23, 23), dtype=bool), k=1)
        np.testing.assert_array_equal(shown[future], 0)
        np.testing.assert_array_equal(shown[~future], counts[head][~future] + 1)
        offsets = ", ".join(str(THREE.offset(branch, head, 5)) for branch in range(3))
        assert f"head {head}: offsets {offsets}" in axes.get_title()


def test_show_writes_a_png_of_the_figure_size(tmp_path: Path) -> None:
    output = tmp_path / "pattern.png"
    arguments = ("--segment-lengths", "5,11,17", "--dilation-rates", "1,2,3", "--heads", 7, "--tokens", 23, "--causal")
    assert run(*arguments, "--output", output) == (0, "")
    data = output.read_bytes()
    width, height = draw(THREE, 23, 7, is_causal=True).bbox.size
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (round(width), round(height))
    assert list(tmp_path.iterdir()) == [output]


def test_show_replaces_an_older_picture(tmp_path: Path) -> None:
    output = tmp_path / "pattern.PNG"
    output.write_bytes(b"older")
    assert run("-o", output)[0] == 0
    assert output.read_bytes()[:4] == b"\x89PNG"


# -- the terminal -------------------------------------------------------------------------------------------------------------


def test_show_prints_digits_where_there_are_no_colours() -> None:
    arguments = ("--segment-lengths", "3,6", "--dilation-rates", "1,2", "--heads", 1, "--causal")
    code, text = run(*arguments)
    assert code == 0
    rows = [line.rstrip() for line in text.splitlines() if re.fullmatch(r"[12·]+ *", line)]
    assert rows == ["2", "11", "212", "···1", "1·112", "···111"]
    assert "head 0: offsets 0, 0" in text
    assert "66.7 % of causal pairs" in text.replace("\N{NO-BREAK SPACE}", " ")
    assert "blank = future" in text


def test_show_is_as_long_as_the_longest_segment_by_default() -> None:
    assert "64 tokens · 4 heads, blocked offsets · not causal" in run()[1]


def test_show_follows_both_rules() -> None:
    arguments = ("--segment-lengths", "4,8", "--dilation-rates", "2,4", "--heads", 4)
    assert "head 1: offsets 0, 1" in run(*arguments)[1]
    assert "head 1: offsets 1, 1" in run(*arguments, "--offsets", "interleaved")[1]
    assert "length 8, rate 4," in run(*arguments, "--heads-rule", "grouped")[1]


def test_terminal_picture_has_two_rows_per_line_of_half_blocks() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=100, no_color=False)
    flexdilated.draw._print(console, flexdilated.draw._multiplicity_panels(THREE, 17, 5, is_causal=True))
    lines = [line for line in file.getvalue().splitlines() if "▀" in line]
    assert [line.count("▀") for line in lines] == [17 * 3] * 9 + [17 * 2] * 9  # three panels, then two, 9 lines for 17 rows


def test_show_draws_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=40, no_color=False)
    monkeypatch.setattr(flexdilated.draw, "Console", lambda: console)
    assert run("--tokens", 40) == (0, "")
    code, text = run("--tokens", 41)
    assert (code, text) == (2, "error: --tokens must be at most the terminal's width=40, got 41; or name a picture with --output\n")


@pytest.mark.parametrize(
    ("preset", "title"),
    [
        (Preset.LONGNET, "segment lengths 16, 32, 64, 128, 256 · dilation rates 1, 2, 4, 6, 12"),
        (Preset.GIGAPATH, "segment lengths 16, 90, 512, 2896, 16384 · dilation rates 1, 2, 4, 8, 16"),
    ],
)
def test_show_draws_presets_in_miniature(preset: Preset, title: str) -> None:
    code, text = run("--preset", preset.value, "--heads", 1)
    assert code == 0
    assert "in miniature" in text
    assert title in text
    assert "256 tokens" in text


# -- what it refuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dilation-rates", "1,2,65"), "dilation_rates[2] must be in [1, segment_lengths[2]=64], got 65"),
        (("--dilation-rates", "1,2"), "dilation_rates must hold one rate per segment length=3, got (1, 2)"),
        (("--segment-lengths", "16,0,64"), "segment_lengths[1] must be at least 1, got 0"),
        (("--segment-lengths", "16,x,64"), "--segment-lengths must be integers separated by commas, got '16,x,64'"),
        (("--segment-lengths", ""), "--segment-lengths must be integers separated by commas, got ''"),
        (("--dilation-rates", "1,2,4.5"), "--dilation-rates must be integers separated by commas, got '1,2,4.5'"),
        (("--tokens", "0"), "--tokens must be in [1, 512], got 0"),
        (("--tokens", "-3"), "--tokens must be in [1, 512], got -3"),
        (
            ("--tokens", "513"),
            "--tokens must be in [1, 512], got 513; divide all segment lengths and the tokens by one number, which keeps the shape",
        ),
        (
            ("--segment-lengths", "16,32,2048"),
            "--tokens must be in [1, 512], got 2048, the longest segment; "
            "divide all segment lengths and the tokens by one number, which keeps the shape",
        ),
        (("--heads", "0"), "--heads must be in [1, 64], got 0"),
        (("--heads", "65"), "--heads must be in [1, 64], got 65"),
        (("--preset", "longnet", "--dilation-rates", "1"), "--dilation-rates must not be given with --preset=longnet, got 1"),
        (("--preset", "gigapath", "--segment-lengths", "4"), "--segment-lengths must not be given with --preset=gigapath, got 4"),
        (("--output", "pattern.jpg"), "--output must end in .png, got 'pattern.jpg'"),
        (("--output", "pattern"), "--output must end in .png, got 'pattern'"),
    ],
)
def test_show_rejects_bad_input_with_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert run(*arguments) == (2, f"error: {message}\n")


@pytest.mark.parametrize("arguments", [("--tokens", "x"), ("--heads", "1.5"), ("--preset", "bert"), ("--offsets", "random")])
def test_show_rejects_values_of_the_wrong_type(arguments: tuple[str, str]) -> None:
    code, text = run(*arguments)
    assert code == 2
    assert arguments[0] in text


def test_show_accepts_the_limits(tmp_path: Path) -> None:
    assert run("--tokens", MAX_TOKENS, "--heads", 1, "-o", tmp_path / "a.png") == (0, "")
    assert run("--tokens", 1, "--heads", MAX_HEADS, "-o", tmp_path / "b.png") == (0, "")


def test_show_rejects_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    output = tmp_path / "none" / "pattern.png"
    message = f"error: --output must be a file that can be written, got '{output}': No such file or directory\n"
    assert run("-o", output) == (2, message)


def test_show_rejects_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, text = run("-o", tmp_path / "file" / "pattern.png")
    assert code == 2
    assert text.endswith("Not a directory\n")


def test_show_leaves_nothing_behind_where_it_cannot_write(tmp_path: Path) -> None:
    output = tmp_path / "pattern.png"
    output.mkdir()
    code, text = run("-o", output)
    assert code == 2
    assert text == f"error: --output must be a file that can be written, got '{output}': Is a directory\n"
    assert list(tmp_path.iterdir()) == [output]


def test_show_leaves_the_older_picture_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def fill_the_disk(figure: Figure, file: io.BufferedWriter, **options: object) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fill_the_disk)
    output = tmp_path / "pattern.png"
    output.write_bytes(b"older")
    code, text = run("-o", output)
    assert code == 2
    assert text.endswith("No space left on device\n")
    assert list(tmp_path.iterdir()) == [output]
    assert output.read_bytes() == b"older"


def test_show_writes_errors_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught:
        show(tokens=0)
    assert caught.value.exit_code == 2
    assert capsys.readouterr() == ("", "error: --tokens must be in [1, 512], got 0\n")
