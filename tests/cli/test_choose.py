"""`flexdilated choose`: the lines, the picture, and what is refused."""

import json
from pathlib import Path

import pytest

from flexdilated import DilatedPattern
from tests.commands import invoke, refused


def test_prints_lines_of_python_with_sentences_and_addresses() -> None:
    mine = ("--segment-lengths", "64,256", "--dilation-rates", "1,4", "--offsets", "interleaved")
    code, out, err = invoke("choose", "--tokens", 512, "--heads", 16, "--kv-heads", 8, "--causal", *mine)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[1].startswith("few key/value heads (8): little is gained at 512 tokens. ")
    assert [lines[0], *lines[2:6]] == [
        "512 tokens, 16 heads, 8 key/value heads, causal; budget 10 % of dense attention",
        "",
        "1  DilatedPattern((16, 512), (1, 4))",
        "   9.6 % of dense attention. Each token reads its segment of 16 tokens. In each head, 1 in 4 of all 512 tokens also read "
        "each other; 2 heads keep the same tokens. No token reads a later one.",
        "   flexdilated explorer 'w=16,512&r=1,4&N=512&H=16&KV=8&causal=1&query=511&heads=all&offsets=blocked'",
    ]
    assert lines[-3] == "6  DilatedPattern((64, 256), (1, 4), offsets='interleaved')"
    assert lines[-2].startswith("   15.8 % of dense attention, over the budget. Yours is not connected: ")


def test_budget_is_a_share_of_dense_attention(tmp_path: Path) -> None:
    picture = tmp_path / "choice.png"
    code, out, _ = invoke("choose", "--tokens", 127, "--heads", 3, "--budget", "50%", "--preset", "gigapath", "-o", picture)
    assert code == 0
    assert out.startswith("127 tokens, 3 heads, not causal; budget 50 % of dense attention\n")
    assert "(1, 2, 4, 8, 16), zero_padding=True, detach_weights=True)" in out
    assert out.endswith(f"&zero_padding=1&detach_weights=1'\nwrote '{picture}'\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "0"), "budget must be in (0, 1], got 0.0"),
        (("--budget", "10"), "budget must be in (0, 1], got 10.0; 0.1 or 10% is a tenth of the pairs"),
        (("--budget", "x"), "Invalid value for '--budget': "),
        (("--segment-lengths", 2**40, "--dilation-rates", 2**40), "--dilation-rates must be at most 1048576 to list"),
    ],
)
def test_refuses_in_one_line(arguments: tuple[object, ...], message: str) -> None:
    assert refused("choose", "--tokens", 9, *arguments).startswith(message)


def test_json_holds_what_is_printed() -> None:
    line = "choose --tokens 512 --heads 16 --kv-heads 8 --segment-lengths 64,256 --dilation-rates 1,4"
    found, printed = json.loads(invoke(*line.split(), "--json")[1]), invoke(*line.split())[1]
    assert [found[name] for name in ("tokens", "heads", "kv_heads", "causal", "budget")] == [512, 16, 8, False, 0.1]
    assert [each["is_given"] for each in found["patterns"]] == [False] * (len(found["patterns"]) - 1) + [True]
    for number, each in enumerate(found["patterns"], 1):
        over = "" if each["is_within_budget"] else ", over the budget"
        share = f"{100 * each['share']:.3g} % of dense attention{over}. {each['why']}"
        assert f"\n{number}  {each['python']}\n   {share}\n   flexdilated explorer '{each['explorer']}'\n" in printed
        pattern = DilatedPattern.from_dict(each["pattern"])
        assert each["pairs"] == pattern.count_pairs(512, 8)


@pytest.mark.parametrize(
    ("heads", "tokens", "says"),
    [
        (
            4,
            4096,
            "takes 43 % of the pairs; a local segment of 256 tokens and a far branch over all tokens are within the budget from",
        ),
        (4, 6500, "the default of models, takes "),
        (4, 7000, None),
        (2, 2**20, "take at least 25 % at any length, over the budget."),
        (1, 512, "takes 100 % of the pairs; "),
    ],
)
def test_few_heads_are_said_with_the_length_from_which_they_pay(heads: int, tokens: int, says: str | None) -> None:
    line = invoke("choose", "--tokens", tokens, "--heads", heads, "--causal")[1].splitlines()[1]
    assert line.startswith(f"few key/value heads ({heads}): little is gained at {tokens:,} tokens. ") == (says is not None)
    assert (says or "") in line
    branches = ((256, 1), (tokens, heads))
    pairs = sum(DilatedPattern((length,), (rate,)).count_pairs(tokens, heads, is_causal=True) for length, rate in branches)
    assert (pairs > 0.1 * heads * tokens * (tokens + 1) / 2) == (says is not None)
