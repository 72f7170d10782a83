"""`flexdilated plan`: what it prints, in words and in JSON, writes and refuses."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from flexdilated import DilatedPattern
from flexdilated.analysis import strategies
from flexdilated.analysis.strategies import OTHERS
from flexdilated.cli.plan import _bytes
from flexdilated.distributed.planner import cost_model
from flexdilated.distributed.planner.plan import EXCHANGES, context_plan
from flexdilated.distributed.planner.row_counts import listed
from tests.commands import invoke

MILLION = 1 << 20


def plan(*arguments: object) -> tuple[int, str, str]:
    return invoke("plan", *arguments)


def ask(*arguments: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON answer, and its strategies by name."""
    code, text, err = plan(*arguments, "--json")
    assert code == 0, err
    answer = json.loads(text)
    return answer, {row["name"]: row for row in answer["strategies"]}


# -- documents ----------------------------------------------------------------------------------------------------------------


def test_documents_move_segments_against_shards() -> None:
    """LongNet's segments lie inside shards of 131,072 tokens; those of documents need not."""
    lengths = (100_000, 0, 300_000, 48_576, 600_000)
    options = ("--tokens", MILLION, "--context-parallel", 8, "--preset", "longnet", "--causal")
    alone, one = ask(*options)
    answer, rows = ask(*options, "--document-lengths", ",".join(map(str, lengths)))
    assert (alone["is_local"], answer["is_local"]) == (True, False)
    assert (alone["document_lengths"], answer["document_lengths"]) == ([MILLION], list(lengths))
    documents = ((0, 100_000), (100_000, 300_000), (400_000, 48_576), (448_576, 600_000))
    expected = context_plan(DilatedPattern.longnet(), (MILLION // 8,) * 8, 12, range(12), 1, documents, True)
    for exchange in EXCHANGES:
        found = cost_model.bytes_received(expected, exchange, head_dim=64, itemsize=2)
        busiest = [rows[exchange][name]["busiest"] for name in ("bytes_forward", "bytes_backward")]
        assert busiest == [int(each.max()) for each in found]
        assert rows[exchange]["pairs"]["busiest"] == int(cost_model.pairs(expected, exchange).max())
    assert rows["gather"]["bytes_forward"]["busiest"] > 0 == one["gather"]["bytes_forward"]["busiest"]
    assert rows["ring-all"]["bytes_both"] == one["ring-all"]["bytes_both"]
    code, out, _ = plan(*options, "--document-lengths", ",".join(map(str, lengths)))
    assert code == 0
    assert "5 documents of 0 to 600,000 tokens" in out
    assert "one document" in plan(*options)[1]


# -- the numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "ranks", "ring", "ulysses", "gather", "whole_heads"),
    [
        ("longnet", 8, 917_504, 229_376, 0, 0),
        ("longnet", 64, 1_032_192, 32_256, 1_366, 1_366),
        ("gigapath", 8, 917_504, 229_376, 90_397, 48_261),
        ("gigapath", 64, 1_032_192, 32_256, 114_215, 18_227),
    ],
)
def test_rows_of_published_patterns(pattern: str, ranks: int, ring: int, ulysses: int, gather: int, whole_heads: int) -> None:
    answer, rows = ask("--tokens", MILLION, "--context-parallel", ranks, "--preset", pattern, "--heads", 64)
    assert rows["ring-all"]["rows_per_head"] == rows["all-gather"]["rows_per_head"] == ring
    assert rows["ulysses"]["rows_per_head"] == ulysses
    # 2 * 64 elements of 2 bytes, for 64 heads.
    assert (
        rows["ulysses"]["bytes_forward"]
        == rows["ulysses"]["bytes_backward"]
        == {"busiest": ulysses * 2**14, "mean": ulysses * 2**14}
    )
    assert rows["ring-all"]["bytes_forward"]["busiest"] == rows["all-gather"]["bytes_backward"]["busiest"] == ring * 2**14
    assert rows["ring-all"]["bytes_backward"]["busiest"] == 2 * ring * 2**14
    exact = pattern == "longnet"
    assert [rows[name]["is_exact"] for name in EXCHANGES] == [exact] * 3
    assert rows["gather"]["rows_per_head"] == rows["ring"]["rows_per_head"] <= gather * (1 if exact else 1.05)
    assert rows["heads"]["rows_per_head"] <= whole_heads * (1 if exact else 1.05)
    assert answer["is_local"] is (gather == 0)
    assert (rows["gather"]["rows_per_head"] == 0) is (gather == 0)
    assert all(row["imbalance"] >= 1.0 for row in rows.values())


def test_rates_with_a_huge_common_multiple_are_counted() -> None:
    """That of the primes below 50 is above 6e17; a rank lacks the rows of all others that some branch keeps."""
    primes = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
    tokens, ranks, heads = 1 << 16, 8, 4
    lengths, rates = (",".join(map(str, each)) for each in ((tokens,) * len(primes), primes))
    pattern = ("--segment-lengths", lengths, "--dilation-rates", rates, "--offsets", "interleaved")
    _, rows = ask("--tokens", tokens, "--context-parallel", ranks, *pattern, "--heads", heads, "--head-dim", 8)
    kept = [[any(token % rate == head % rate for rate in primes) for token in range(tokens)] for head in range(heads)]
    shards = [sum(sum(each[rank * tokens // ranks : (rank + 1) * tokens // ranks]) for each in kept) for rank in range(ranks)]
    assert rows["gather"]["rows_per_head"] == pytest.approx((sum(shards) - min(shards)) / heads, abs=1)


@pytest.mark.parametrize("causal", ["--causal", "--no-causal"])
def test_json_equals_the_plan(causal: str) -> None:
    options = ("--segment-lengths", "7,13,31", "--dilation-rates", "1,2,5", "--offsets", "interleaved")
    sizes = ("--heads", 12, "--kv-heads", 4, "--head-dim", 5, "--batch-size", 3, "--dtype", "float64", causal)
    answer, rows = ask("--tokens", 62, "--context-parallel", 4, *options, *sizes)
    pattern = DilatedPattern((7, 13, 31), (1, 2, 5), offsets="interleaved")
    whole = context_plan(pattern, (16, 16, 15, 15), 4, range(4), 3, ((0, 62),), causal == "--causal")
    keywords: dict[str, Any] = {"head_dim": 5, "itemsize": 8, "batch": 3, "lse_size": 8}
    inputs = {name: answer[name] for name in ("tokens", "ranks", "heads", "kv_heads", "head_dim", "dtype", "batch", "causal")}
    assert list(inputs.values()) == [62, 4, 12, 4, 5, "float64", 3, causal == "--causal"]
    assert DilatedPattern.from_dict(answer["pattern"]) == pattern
    assert answer["shards"] == {"largest": 16, "smallest": 15}
    assert answer["is_local"] is whole.is_local is False
    assert answer["uncrossed_boundary"] == (14 if causal == "--causal" else None)
    budget = cost_model.default_budget(whole, head_dim=5, itemsize=8, batch=3)
    assert answer["memory_budget"] == budget
    assert answer["auto"] == cost_model.choose(whole, budget=budget, **keywords)
    tensors = 3 * 16 * (12 * (2 * 5 * 8 + 8) + 4 * 2 * 5 * 8)
    for name in EXCHANGES:
        row = rows[name]
        for key, moved in zip(("bytes_forward", "bytes_backward"), cost_model.bytes_received(whole, name, **keywords)):
            assert row[key] == {"busiest": moved.max(), "mean": pytest.approx(moved.mean())}
        buffers, pairs = (
            cost_model.buffer_bytes(whole, name, **keywords),
            3 * 3 * cost_model.pairs(whole, name),
        )  # query heads of each key's, sequences
        assert row["pairs"] == {"busiest": pairs.max(), "mean": pytest.approx(pairs.mean())}
        assert row["imbalance"] == pytest.approx(pairs.max() / pairs.mean())
        assert row["fits_budget"] is bool(buffers.max() <= budget)
        memory = row["memory_bytes"]
        assert memory["total"] == memory["tensors"] + memory["gradients"] + memory["buffers"]
        assert memory["tensors"] <= tensors
        assert memory["buffers"] in buffers
        kv, q, out = (listed(whole, name)[kind].received for kind in ("kv", "q", "out"))
        assert row["is_exact"]
        assert row["rows_per_head"] == (kv + 3 * (q + out) / 2).max() / 4
        assert row["is_ours"]
        assert row["is_auto"] is (name == answer["auto"])
    assert [row["is_ours"] for row in rows.values()] == [True] * 3 + [False] * 3
    assert tuple(rows) == (*EXCHANGES, *OTHERS)


def test_memory_holds_tensors_gradients_and_messages() -> None:
    _, rows = ask("--tokens", 60, "--context-parallel", 2, "--heads", 4, "--kv-heads", 2, "--head-dim", 8, "--dtype", "float32")
    gradients = 30 * (2 * 4 + 2 * 2) * 8 * 4
    buffers = {
        "ring-all": 2 * 30 * 2 * 2 * 8 * 4,
        "all-gather": 60 * 2 * 2 * 8 * 4,
        # Half of q, k, v and out of 30 tokens leaves, and as much arrives.
        "ulysses": 2 * gradients // 2,
    }
    for name, size in buffers.items():
        expected = {"tensors": gradients + 30 * 4 * 4, "gradients": gradients, "buffers": size}
        assert rows[name]["memory_bytes"] == {**expected, "total": sum(expected.values())}


def test_memory_budget_decides_the_choice() -> None:
    options = ("--tokens", MILLION, "--context-parallel", 8, "--preset", "gigapath")
    answer, rows = ask(*options, "--memory-budget", 2**40, "--link-speed", 1)
    assert answer["auto"] == "heads"
    assert all(rows[name]["fits_budget"] for name in EXCHANGES)
    answer, rows = ask(*options, "--memory-budget", 0)
    smallest = min(EXCHANGES, key=lambda name: rows[name]["memory_bytes"]["buffers"])
    assert answer["auto"] == smallest
    assert not any(rows[name]["fits_budget"] for name in EXCHANGES)


def test_ulysses_says_why_it_cannot_be() -> None:
    for heads, kv_heads, reason in ((12, 12, "--heads=12"), (16, 4, "--kv-heads=4"), (4, 2, "--heads=4")):
        _, rows = ask("--tokens", 4096, "--context-parallel", 8, "--heads", heads, "--kv-heads", kv_heads)
        assert rows["ulysses"]["why_not"] == f"{reason} must be a multiple of --context-parallel=8"
        assert all(rows["ulysses"][key] is None for key in ("bytes_forward", "rows_per_head", "memory_bytes", "imbalance"))
    code, text, _ = plan("--tokens", 4096, "--context-parallel", 8)
    assert code == 0
    assert "Ulysses: --heads=12 must be a multiple of --context-parallel=8" in text
    _, rows = ask("--tokens", 4096, "--context-parallel", 8, "--heads", 16, "--kv-heads", 8)
    assert rows["ulysses"]["why_not"] is None


@pytest.mark.slow
def test_a_billion_tokens_on_1024_ranks() -> None:
    answer, rows = ask("--tokens", "1_000_000_000", "--context-parallel", 1024, "--preset", "longnet")
    assert answer["shards"] == {"largest": 976_563, "smallest": 976_562}
    assert rows["all-gather"]["rows_per_head"] == 10**9 - 976_562
    assert 0 < rows["gather"]["rows_per_head"] < 32_768
    assert rows["gather"]["imbalance"] == pytest.approx(1.0, abs=1e-3)


# -- in words -----------------------------------------------------------------------------------------------------------------


def test_plan_prints_the_table() -> None:
    code, text, _ = plan("--tokens", MILLION, "--context-parallel", 8, "--preset", "longnet", "--heads", 16)
    assert code == 0
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert lines["gather (auto)"][2:] == [*["0", "B"] * 6, "0", "2.16", "GB", "1.00"]
    assert lines["ring of everything"][3:12] == ["3.76", "GB", "3.76", "GB", "7.52", "GB", "7.52", "GB", "11.3"]
    assert lines["Ulysses"][1:11] == [*["940", "MB"] * 4, "1.88", "GB"]
    assert lines["Ulysses"][13] == "229,376"
    assert "1,048,576 tokens on 8 ranks, shards: each of 131,072 tokens" in text
    assert "every segment lies inside one shard: our exchanges move nothing" in text
    assert "16 heads of 64, blocked offsets, not causal, bfloat16" in text


@pytest.mark.parametrize("speeds", [(50, 350), (450, 35)], ids=["default", "other"])
@pytest.mark.parametrize("budget", [0, 10**8, 10**10])
def test_plan_prints_what_it_chooses_by(budget: int, speeds: tuple[int, int]) -> None:
    options: tuple[Any, ...] = ("--tokens", 100_003, "--context-parallel", 8, "--preset", "gigapath", "--heads", 16)
    options = (*options, "--memory-budget", budget, "--link-speed", speeds[0], "--compute-speed", speeds[1])
    answer, rows = ask(*options)
    assert answer["speeds"] == {"link": speeds[0] * 1e9, "compute": speeds[1] * 1e12}
    fitting = [name for name in EXCHANGES if rows[name]["message_bytes"] <= budget]
    times = {name: rows[name]["seconds"]["total"] for name in EXCHANGES}
    best = min(fitting, key=times.__getitem__) if fitting else min(EXCHANGES, key=lambda name: rows[name]["message_bytes"])
    assert answer["auto"] == best
    text = plan(*options)[1]
    assert {"time", "messages"} <= set(text.split())
    row = next(line for line in text.splitlines() if line.startswith(f"{best} (auto)"))
    assert _bytes(rows[best]["message_bytes"]) in row
    assert f"forward and backward, at {speeds[0]} GB/s and {speeds[1]} Tflop/s: gather {1e3 * times['gather']:.3g} ms (" in text
    assert "\nestimated time of the busiest rank, one layer, forward" in text
    for name in EXCHANGES:
        seconds, pairs = rows[name]["seconds"], rows[name]["pairs"]["busiest"]
        assert seconds["total"] == pytest.approx(seconds["receiving"] + seconds["computing"])
        assert seconds["receiving"] <= rows[name]["bytes_both"]["busiest"] / (speeds[0] * 1e9) * (1 + 1e-12)
        assert seconds["computing"] <= 14 * 64 * pairs / (speeds[1] * 1e12) * (1 + 1e-12)
        assert f"{name} {1e3 * seconds['total']:.3g} ms" in text


def test_plan_says_at_most_where_rows_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--tokens", 620, "--context-parallel", 4, "--segment-lengths", "130,310", "--dilation-rates", "2,5", "--heads", 4)
    text, (_, exact) = plan(*options)[1], ask(*options)
    assert "at most" not in text
    assert all(row["is_exact"] in (True, None) for row in exact.values())
    monkeypatch.setattr(strategies, "COUNTED", 0)
    text, (_, bounds) = plan(*options)[1], ask(*options)
    assert [name for name, row in bounds.items() if row["is_exact"] is False] == list(EXCHANGES)
    assert all(any(line.startswith(f"{name}, at most ") for line in text.splitlines()) for name in EXCHANGES)
    assert "\nat most: rows that several branches need are counted once for each of them" in text
    for name in EXCHANGES:
        for key in ("bytes_forward", "bytes_backward", "bytes_both"):
            assert exact[name][key]["busiest"] <= bounds[name][key]["busiest"] <= 2 * exact[name][key]["busiest"]
        assert exact[name]["message_bytes"] <= bounds[name]["message_bytes"]
        assert exact[name]["pairs"] == bounds[name]["pairs"]


def test_plan_says_how_uneven_shards_are() -> None:
    code, text, _ = plan("--tokens", 100_003, "--context-parallel", 8, "--heads", 8, "--kv-heads", 2, "--batch-size", 3, "--causal")
    assert code == 0
    assert "100,003 tokens on 8 ranks, shards: 3 of 12,501 and 5 of 12,500 tokens" in text
    assert "8 query and 2 key/value heads of 64, blocked offsets, causal, bfloat16, batch 3" in text


def test_plan_writes_a_png(tmp_path: Path) -> None:
    output = tmp_path / "plan.png"
    code, text, _ = plan("--tokens", 10_007, "--context-parallel", 8, "--output", output, "--json")
    assert code == 0
    assert json.loads(text)["ranks"] == 8
    data = output.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", data[16:24])) > 600
    assert list(tmp_path.iterdir()) == [output]


# -- refusals -----------------------------------------------------------------------------------------------------------------

REFUSED = [
    (("--document-lengths", "10,20"), "--document-lengths must add up to --tokens=64, each at least 0, got 30, the least 10"),
    (("--document-lengths", "-1,65"), "--document-lengths must add up to --tokens=64, each at least 0, got 64, the least -1"),
    (("--document-lengths", "10,54", "--batch-size", "2"), "--batch-size must be 1 with --document-lengths"),
    (("--document-lengths", "10,x"), "--document-lengths must be integers separated by commas, got '10,x'"),
    (("--link-speed", 0), "--link-speed must be a number above 0, got 0.0"),
    (("--compute-speed", "nan"), "--compute-speed must be a number above 0, got nan"),
    (("--tokens", 0), "Invalid value for '--tokens': "),
    (("--tokens", 2**40 + 1), "--tokens must be at most 1099511627776, got 1099511627777"),
    (("--context-parallel", 0), "Invalid value for '--context-parallel': "),
    (("--context-parallel", 4097), "--context-parallel must be at most 4096, got 4097"),
    (("--heads", 0), "Invalid value for '--heads': "),
    (("--heads", 1025), "--heads must be at most 1024, got 1025"),
    (("--kv-heads", 5), "--kv-heads must divide --heads=12, got 5"),
    (("--kv-heads", 0), "Invalid value for '--kv-heads': "),
    (("--kv-heads", 24), "--kv-heads must divide --heads=12, got 24"),
    (("--head-dim", 0), "Invalid value for '--head-dim': "),
    (("--batch-size", 0), "Invalid value for '--batch-size': "),
    (("--dtype", "int8"), "--dtype must be one of float32, bfloat16, float16, float64, got 'int8'"),
    (("--memory-budget", -1), "Invalid value for '--memory-budget': "),
    (("--output", "plan.pdf"), "--output must end in .png, got 'plan.pdf'"),
    (("--output", "no/such/folder/plan.png"), "--output must be a file that can be written, got 'no/such/folder/plan.png': "),
    (("--preset", "longnet", "--segment-lengths", "4"), "--segment-lengths must not be given with --preset=longnet, got 4"),
    (("--preset", "gigapath", "--dilation-rates", "4"), "--dilation-rates must not be given with --preset=gigapath, got 4"),
    (("--segment-lengths", "4,x", "--dilation-rates", "1,1"), "--segment-lengths must be integers separated by commas, got '4,x'"),
    (("--segment-lengths", "4,8"), "--dilation-rates must be given with the other of --segment-lengths and"),
    (("--segment-lengths", "4", "--dilation-rates", "5"), "--dilation-rates[0] must be in [1, --segment-lengths[0]=4], got 5"),
    (
        ("--tokens", 2**40, "--batch-size", 65536),
        "--tokens must be such that all messages have fewer than 2**62 bytes, got 1099511627776",
    ),
    (
        ("--tokens", 10**10, "--segment-lengths", 10**10, "--dilation-rates", 1),
        "--tokens must be such that a rank scores fewer than 2**62 pairs, got 10000000000 with --context-parallel=2; ",
    ),
    (
        ("--tokens", 10**10, "--segment-lengths", 10**10, "--dilation-rates", 10**10),
        "--dilation-rates must be such that --tokens times each is below 2**62, got 10000000000",
    ),
    (
        ("--tokens", 10**6, "--context-parallel", 4096, "--segment-lengths", "1000000,999999,999998", "--dilation-rates", "1,1,1"),
        "--context-parallel must be such that at most 33554432 pairs of ranks share a segment, as of 3344, got 4096 of which ",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=str)
def test_plan_refuses_in_one_line(changes: tuple[object, ...], message: str) -> None:
    base: dict[object, object] = {"--tokens": 64, "--context-parallel": 2}
    base |= dict(zip(changes[::2], changes[1::2]))
    code, out, err = plan(*(x for pair in base.items() for x in pair))
    assert code == 2
    assert out == "" or "--output" in changes
    assert err.startswith(f"error: {message}"), err
    assert err.count("\n") == 1


def test_plan_accepts_as_many_branches_as_attention_does() -> None:
    lengths, rates = ((",".join(map(str, values))) for values in (range(13, 25), range(1, 13)))
    code, out, err = plan("--tokens", 47, "--context-parallel", 3, "--segment-lengths", lengths, "--dilation-rates", rates)
    assert (code, err) == (0, "")
    assert "ring of everything" in out


@pytest.mark.parametrize(
    "changes", [("--tokens", "many"), ("--preset", "dense"), ("--context-parallel", "1.5"), ("--heads-rule", "some")]
)
def test_plan_refuses_what_is_no_number_or_name(changes: tuple[str, str]) -> None:
    base = {"--tokens": "64", "--context-parallel": "2"} | dict([changes])
    code, _, err = plan(*(x for pair in base.items() for x in pair))
    assert code == 2
    assert changes[0] in err


def test_plan_accepts_the_boundaries() -> None:
    for changes in (
        {"--tokens": 1},
        {"--context-parallel": 1},
        {"--context-parallel": 4096},
        {"--heads": 1},
        {"--kv-heads": 12},
        {"--head-dim": 1},
    ):
        base = {"--tokens": 64, "--context-parallel": 2} | changes
        assert ask(*(x for pair in base.items() for x in pair))[1]["gather"]["why_not"] is None
