"""`DilatedPattern.describe`: what a pattern is said to read, and which rules it is said to follow."""

import pytest

from flexdilated import DilatedPattern

HEADS = "At every rate, the heads together keep all tokens."
WHOLE = "The longest segment spans the sequence."


def test_each_rule_is_checked() -> None:
    share, _, length, heads, short, connected = DilatedPattern((16, 64), (1, 8)).describe(101, 6, is_causal=True).splitlines()
    pairs = DilatedPattern((16, 64), (1, 8)).count_pairs(101, 6, is_causal=True)
    assert share == f"{100 * pairs / (6 * 101 * 102 / 2):.3g} % of dense attention."
    assert length == "The longest segment has 64 of 101 tokens: add a segment as long as the sequence."
    assert heads == "At rate 8, some tokens are kept by no head; use rates that divide the 6 key/value heads."
    assert short.startswith("Too short: dense attention is faster on a CPU below about 500 tokens, ")
    assert connected.startswith("Not connected: not all information from tokens 0 to 15 reaches the tokens from 16 on; ")
    assert DilatedPattern.causal(32_768, 8).describe(32_768, 8, is_causal=True).splitlines()[2:] == [
        WHOLE,
        HEADS,
        "Long enough: dilated attention can be faster than dense attention on a CPU and on a GPU.",
        "Connected: causal information crosses all boundaries.",
    ]


@pytest.mark.parametrize(
    ("num_kv_heads", "num_tokens", "says"),
    [
        (7, 499, "Too short: "),
        (7, 500, "Long enough for a CPU; "),
        (8, 249, "Too short: "),
        (8, 250, "Long enough for a CPU; "),
        (8, 8192, "Long enough for a CPU; "),  # on an H200 dense attention was faster here, and LongNet's pattern at 32,768
        (8, 32_768, "Long enough: "),
    ],
)
def test_short_sequences_are_named_by_heads(num_kv_heads: int, num_tokens: int, says: str) -> None:
    assert DilatedPattern((1024,), (2,)).describe(num_tokens, num_kv_heads).splitlines()[-1].startswith(says)


@pytest.mark.parametrize(
    ("pattern", "reads"),
    [
        (DilatedPattern((1024,), (1,)), "Dense attention: every token reads all tokens."),
        (DilatedPattern((3,), (2,), window=600), "Dense attention: every token reads all tokens."),
        (DilatedPattern(global_tokens=600), "Dense attention: every token reads all tokens."),
        (DilatedPattern(window=7), "Each token reads itself and 6 tokens on each side."),
        (DilatedPattern(window=1), "Each token reads itself."),
        (DilatedPattern(global_tokens=3), "Each token reads the first 3 tokens. The first 3 tokens read all tokens."),
        (
            DilatedPattern((7,), (1,), window=2, global_tokens=1),
            "Each token reads itself, 1 token on each side, the first token and its segment of 7 tokens. The first token reads all "
            "tokens.",
        ),
        (
            DilatedPattern((4, 8, 999), (1, 2, 4), window=5),
            "Each token reads itself, 4 tokens on each side and its segment of 4 tokens. In each head, these tokens also read each "
            "other: 1 in 2 tokens of each segment of 8; 1 in 4 of all 600 tokens.",
        ),
        (
            DilatedPattern((6, 6, 999), (4, 4, 4)),
            "In each head, 1 in 4 tokens of each segment of 6 or 600 read each other; "
            "groups of 2 key/value heads keep the same tokens.",
        ),
        (
            DilatedPattern.grouped((4, 8), (1, 2)),
            "In key/value heads 0 to 3, each token reads its segment of 4 tokens. In key/value heads 4 to 7, 1 in 2 tokens of "
            "each segment of 8 read each other.",
        ),
    ],
)
def test_every_kind_of_branch_has_words(pattern: DilatedPattern, reads: str) -> None:
    assert pattern.describe(600, 8).splitlines()[1] == reads


def test_a_causal_window_is_counted_with_its_query() -> None:
    text = DilatedPattern((4, 8), (1, 2), window=5, global_tokens=2).describe(600, 2, is_causal=True).splitlines()[1]
    assert text.startswith("Each token reads a window of 5 tokens, the first 2 and its segment of 4 tokens. In each head, 1 in 2 ")


@pytest.mark.parametrize(
    "pattern", [DilatedPattern((9000,), (1,)), DilatedPattern((9000, 4500), (1, 1)), DilatedPattern(window=9000)]
)
def test_as_many_pairs_as_dense_attention_are_not_called_faster(pattern: DilatedPattern) -> None:
    length, _, speed = pattern.describe(9000, 8).splitlines()[2:]
    assert length == ("Each token reads the whole sequence." if pattern.window else WHOLE)
    assert speed == "Not faster than dense attention: it computes as many pairs or more."


def test_rates_longer_than_the_sequence_lose_no_token_that_is_not_there() -> None:
    assert DilatedPattern((16,), (4,)).describe(3, 3).splitlines()[3] == HEADS
    assert DilatedPattern((16,), (4,)).describe(4, 3).splitlines()[3].startswith("At rate 4, some tokens are kept by no head; ")


@pytest.mark.parametrize(("num_kv_heads", "most"), [(6, 6), (8, 8), (9, 3), (10, 5)])
def test_the_rates_that_a_pattern_should_add_connect_it(num_kv_heads: int, most: int) -> None:
    text = DilatedPattern((16,), (1,)).describe(97, num_kv_heads, is_causal=True)
    assert f"at a rate of at most {most} that divides the {num_kv_heads} key/value heads." in text
    rates = [rate for rate in range(2, most + 1) if num_kv_heads % rate == 0]
    assert all(DilatedPattern((16, 97), (1, rate)).crosses_boundaries(97, num_kv_heads) for rate in rates)


def test_patterns_without_segments_and_with_groups_are_told_what_they_lack() -> None:
    assert "There are no segments: add a segment as long as the sequence." in DilatedPattern(window=7).describe(600, 8)
    assert "At rate 2, some tokens are kept by no head.\n" in DilatedPattern.grouped((4, 8), (1, 2)).describe(600, 8)


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
