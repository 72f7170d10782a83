"""`flexdilated choose`: the lines, the picture, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import invoke


def test_prints_lines_of_python_with_sentences_and_addresses() -> None:
    mine = ("--segment-lengths", "64,256", "--dilation-rates", "1,4", "--offsets", "interleaved")
    code, out, err = invoke("choose", "--tokens", 512, "--heads", 16, "--kv-heads", 8, "--causal", *mine)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:5] == [
        "512 tokens, 16 heads, 8 key/value heads, causal; budget 10 % of dense attention",
        "",
        "1  DilatedPattern((512,), (4,), window=8)",
        "   9.38 % of dense attention. Each token reads a window of 8 tokens and, in each head, 1 in 4 of all 512 tokens; "
        "2 heads read the same ones.",
        "   docs/explorer/index.html#w=512&r=4&window=8&N=512&H=16&KV=8&causal=1&heads=all&offsets=blocked",
    ]
    assert lines[-3] == "6  DilatedPattern((64, 256), (1, 4), offsets='interleaved')"
    assert lines[-2].startswith("   15.8 % of dense attention, over the budget. Yours is not connected: ")


@pytest.mark.parametrize("budget", ["50%", "0.5"])
def test_budget_is_a_share_of_dense_attention(budget: str, tmp_path: Path) -> None:
    picture = tmp_path / "choice.png"
    code, out, _ = invoke("choose", "--tokens", 127, "--heads", 3, "--budget", budget, "--preset", "gigapath", "-o", picture)
    assert code == 0
    assert out.startswith("127 tokens, 3 heads, not causal; budget 50 % of dense attention\n")
    assert "(1, 2, 4, 8, 16), zero_padding=True, detach_weights=True)" in out
    assert out.endswith("&zero_padding=1&detach_weights=1\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "0"), "budget must be above 0 and finite, got 0.0"),
        (("--budget", "x"), "Invalid value for '--budget': "),
        (("--segment-lengths", 2**40, "--dilation-rates", 2**40), "--dilation-rates must be at most 1048576 to list"),
    ],
)
def test_refuses_in_one_line(arguments: tuple[object, ...], message: str) -> None:
    code, out, err = invoke("choose", "--tokens", 9, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
