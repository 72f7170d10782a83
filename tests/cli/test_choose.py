"""`flexdilated choose`: the table, the sentences, the picture, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexdilated.analysis import choose_pattern
from tests.commands import invoke


def test_prints_every_choice_with_its_reason() -> None:
    code, out, err = invoke("choose", "--tokens", 307, "--heads", 5, "--budget", 200_000, "--preset", "longnet")
    assert (code, err) == (0, "")
    assert "307 tokens, 5 heads, not causal\nbudget 200,000 pairs; goals: reach, cover, balance\n" in out
    for number, each in enumerate(choose_pattern(307, 5, budget=200_000).shown[:1], 1):
        assert f"\n{number} {each.why}\n" in out
    assert "Yours. It misses: cover (every branch keeps every row in some head)." in out
    assert "They do not say how well a model learns" in out


def test_says_whose_budget_it_takes_and_marks_what_leaves_rows_out() -> None:
    code, out, _ = invoke("choose", "--tokens", 40_009, "--heads", 6, "--goal", "reach", "--goal", "balance")
    assert code == 0
    assert "\nbudget 992,182,227 pairs, as LongNet's published pattern (--budget sets another); goals: reach, balance\n" in out
    assert [line.split()[0] for line in out.splitlines() if "1, 32" in line and " some " in line]
    assert "rows: whether each branch keeps all of its rows in some head, or only some" in out
    _, out, _ = invoke("choose", "--tokens", 40_009, "--heads", 6)
    assert " some " not in out.partition("\n1 ")[2].partition("\n\n")[0]


def test_packed_documents_are_counted_each_by_itself() -> None:
    code, out, err = invoke("choose", "--tokens", 2060, "--heads", 4, "--document-lengths", "2000,7,53")
    assert (code, err) == (0, "")
    assert out.startswith("2,060 tokens in 3 documents of 7 to 2,000, 4 heads, not causal\n")
    first = choose_pattern(2060, 4, document_lengths=[2000, 7, 53]).shown[0]
    assert f" {first.cost:,} " in out
    assert "Pairs and bytes are those of all documents, each cut by itself; all else is of the longest." in out
    code, _, err = invoke("choose", "--tokens", 2060, "--document-lengths", "2000,7")
    assert (code, err) == (
        2,
        "error: --document-lengths must add up to --tokens=2060, each at least 0, got 2007, the least 7\n",
    )


def test_writes_the_trade_off(tmp_path: Path) -> None:
    picture = tmp_path / "choice.png"
    arguments = ("--measure", "traffic", "--context-parallel", 3, "--causal", "--output", picture)
    code, out, _ = invoke("choose", "--tokens", 127, "--heads", 3, "--budget", 10**6, *arguments)
    assert code == 0
    assert "bytes received per rank" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_says_that_no_pattern_meets_the_goals() -> None:
    code, out, _ = invoke("choose", "--tokens", 1_000_003, "--heads", 3, "--budget", 10**9, "--within-layers", 1, "--goal", "reach")
    assert code == 0
    assert "No pattern that was tried meets the goals: ask for fewer, or for more layers." in out  # dense attention alone does


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", 0, "--budget", 9), "--tokens must be in [1, "),
        (("--tokens", 9, "--budget", 0), "--budget must be in [1, "),
        (("--tokens", 9, "--budget", 9, "--heads", 0), "--heads must be in [1, 1024], got 0"),
        (("--tokens", 9, "--budget", 9, "--context-parallel", 65), "--context-parallel must be in [1, 64], got 65"),
        (("--tokens", 9, "--budget", 9, "--causal", "--goal", "reach"), "--goal must not be reach with --causal: "),
        (("--tokens", 9, "--causal", "--within-layers", 2), "--within-layers must come with the goal reach, got 2"),
        (("--tokens", 9, "--within-layers", 0), "--within-layers must be in [1, "),
        (("--tokens", 9, "--most", 0), "--most must be in [1, "),
        (("--tokens", 9, "--head-dim", 10**27, "--measure", "memory"), "--head-dim must be in [1, 4096], got 1000"),
        (
            ("--tokens", 9, "--segment-lengths", 2**40, "--dilation-rates", 2**40),
            "--dilation-rates must be at most 1048576 to list",
        ),
        (("--tokens", 9, "--output", "no/such/folder/a.png"), "--output must be a file that can be written, got 'no/such"),
        (("--tokens", 9, "--budget", 9, "--segment-lengths", "4"), "--dilation-rates must come with --segment-lengths, got none"),
        (
            ("--tokens", 9, "--budget", 9, "--dilation-rates", "4"),
            "--segment-lengths must come with --dilation-rates, got none for 4",
        ),
        (("--tokens", 9, "--budget", 9, "--output", "a.pdf"), "--output must end in .png"),
        (("--tokens", 9, "--budget", 9, "--dtype", "int8"), "--dtype must be one of"),
    ],
)
def test_refuses_in_one_line(arguments: tuple[object, ...], message: str) -> None:
    code, out, err = invoke("choose", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
