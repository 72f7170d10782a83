"""The kept measurements, as the pages of this site show them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # Okabe and Ito's, safe for colour-blind readers

Entries = dict[str, dict[str, Any]]


class Table:
    """A Markdown table: rendered on the page, and as text where a reader is no browser."""

    def __init__(self, header: Sequence[str], rows: Iterable[Sequence[object]], *, words: int = 1) -> None:
        self.header, self.rows, self.words = list(header), [[str(cell) for cell in row] for row in rows], words

    def __repr__(self) -> str:
        # The first columns say what, the others are numbers.
        rule = ["---" if i < self.words else "--:" for i in range(len(self.header))]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.header, rule, *self.rows))

    def _repr_markdown_(self) -> str:
        return repr(self)


class Text(str):
    """Markdown text that a cell computed."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        return str(self)


def measurements(device_class: str) -> Entries:
    """What `nox -s bench -- --keep` kept of a class of machines, by name."""
    return json.loads((RESULTS / f"{device_class}.json").read_text())["measurements"]


def named(entries: Entries, *beginnings: str) -> Entries:
    """Those whose names begin so, in that order."""
    return {name: entry for beginning in beginnings for name, entry in entries.items() if name.startswith(beginning)}


def provenance(entries: Iterable[dict[str, Any]], command: str) -> Text:
    """One sentence: on what, with what, when, by which command."""
    found = list(entries)

    def values(key: str) -> list[str]:
        return sorted({str(entry[key]) for entry in found if key in entry})

    cpus = [cpu.replace("(R)", "").replace("  ", " ").strip() for cpu in values("cpu")]
    threads = "/".join(values("threads"))
    commits = ", ".join(commit[:7] for commit in values("commit"))
    versions = f"torch {', '.join(values('torch'))}, Python {', '.join(values('python'))}"
    where = ", ".join([*cpus, f"{threads} thread{'s' * (threads != '1')}"])
    return Text(f"Measured by `{command}` on {where}; {versions}; {' and '.join(values('date'))}, commit {commits}.")


def axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    """A figure with one set of axes, as all plots of the site look."""
    from flexdilated.draw.figure import new

    figure = new(7.2, 3.8, dpi=150, layout="constrained", facecolor="white")
    plot = figure.add_subplot()
    plot.set_title(title, fontsize=10)
    plot.set_xlabel(x)
    plot.set_ylabel(y)
    plot.grid(alpha=0.3)
    plot.spines[["top", "right"]].set_visible(False)
    return figure, plot


def tokens_axis(plot: Any, ticks: Sequence[int]) -> None:
    """A logarithmic axis with these numbers of tokens."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    plot.set_xscale("log", base=2)
    plot.xaxis.set_major_locator(FixedLocator(list(ticks)))
    plot.xaxis.set_minor_locator(NullLocator())
    plot.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
