"""The picture of a pattern in a terminal with colours."""

import io

from rich.console import Console

from flexdilated import DilatedPattern
from flexdilated.draw.pattern import multiplicity_panels
from flexdilated.draw.terminal import print_panels


def test_terminal_picture_has_two_rows_per_line_of_half_blocks() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=100, no_color=False)
    print_panels(console, multiplicity_panels(DilatedPattern((5, 11, 17), (1, 2, 3)), 17, 5, is_causal=True))
    lines = [line for line in file.getvalue().splitlines() if "▀" in line]
    assert [line.count("▀") for line in lines] == [17 * 3] * 9 + [17 * 2] * 9  # three panels, then two, 9 lines for 17 rows
