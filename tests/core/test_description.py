"""`DilatedPattern.describe`: what a pattern is said to read, and which rules it is said to follow."""

import pytest

from flexdilated import DilatedPattern

HEADS = "Each remainder of positions has a key/value head, at every rate."
WHOLE = "The longest segment holds the sequence."


def test_each_rule_is_checked() -> None:
    share, _, length, heads, short, connected = DilatedPattern((16, 64), (1, 8)).describe(101, 6, is_causal=True).splitlines()
    pairs = DilatedPattern((16, 64), (1, 8)).count_pairs(101, 6, is_causal=True)
    assert share == f"{100 * pairs / (6 * 101 * 102 / 2):.3g} % of dense attention."
    assert length == "The longest segment has 64 of 101 tokens: add one as long as the sequence."
    assert heads == "No head keeps some tokens at rate 8; use rates that divide the 6 key/value heads."
    assert short.startswith("Too short: dense attention is faster on a CPU below about 500 tokens, ")
    assert connected.startswith("Not connected: not all information from tokens 0 to 15 reaches the tokens from 16 on; ")
    assert DilatedPattern.causal(8192, 8).describe(8192, 8, is_causal=True).splitlines()[2:] == [
        WHOLE,
        HEADS,
        "Long enough to be faster than dense attention.",
        "Connected: causal information crosses all boundaries.",
    ]


@pytest.mark.parametrize(
    ("num_kv_heads", "num_tokens", "says"),
    [(7, 499, "Too short: "), (7, 500, "Long enough for a CPU; "), (8, 249, "Too short: "), (8, 250, "Long enough for a CPU; ")],
)
def test_short_sequences_are_named_by_heads(num_kv_heads: int, num_tokens: int, says: str) -> None:
    assert DilatedPattern((1024,), (2,)).describe(num_tokens, num_kv_heads).splitlines()[-1].startswith(says)


@pytest.mark.parametrize(
    ("pattern", "reads"),
    [
        (DilatedPattern((1024,), (1,)), "Dense attention: every token reads all tokens."),
        (DilatedPattern(window=7), "Each token reads a window of 7 tokens."),
        (DilatedPattern(global_tokens=3), "Each token reads the first 3 tokens."),
        (
            DilatedPattern((4, 8, 999), (1, 2, 4), window=5),
            "Each token reads a window of 5 tokens and its segment of 4 tokens. In each head, 1 in 2 of the tokens of segments "
            "of 8, 1 in 4 of all 600 tokens also read each other.",
        ),
        (
            DilatedPattern.grouped((4, 8), (1, 2)),
            "Each token reads its segment of 4 tokens in the heads of its branch. In the heads of its branch, 1 in 2 of the tokens "
            "of segments of 8 also read each other.",
        ),
    ],
)
def test_every_kind_of_branch_has_words(pattern: DilatedPattern, reads: str) -> None:
    assert pattern.describe(600, 8).splitlines()[1] == reads


def test_patterns_without_segments_and_with_groups_are_told_what_they_lack() -> None:
    assert "There are no segments: add one as long as the sequence." in DilatedPattern(window=7).describe(600, 8)
    assert "No head keeps some tokens at rate 2.\n" in DilatedPattern.grouped((4, 8), (1, 2)).describe(600, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tokens": 0, "num_kv_heads": 8}, "num_tokens must be at least 1, got 0"),
        ({"num_tokens": 8, "num_kv_heads": 1}, "pattern must have at most one branch per key/value head=1 .*, got 2 branches"),
        ({"num_tokens": 8, "num_kv_heads": 8, "is_causal": 1}, "is_causal must be a bool, got 1"),
        ({"num_tokens": 8, "num_heads": 8}, "takes num_kv_heads, the number of key/value heads, got num_heads"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        DilatedPattern.grouped((4, 8), (1, 2)).describe(**arguments)
