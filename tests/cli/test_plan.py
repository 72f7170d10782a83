"""`flexdilated plan`: its table, its picture, and what it refuses."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.filesize import decimal

from flexdilated import DilatedPattern
from flexdilated.analysis import strategies
from flexdilated.analysis.strategies import Layer, layer_plan, memory
from flexdilated.cli import plan as module
from flexdilated.cli.plan import LABELS, MOST_ELEMENTS
from flexdilated.distributed.planner import cost_model
from flexdilated.distributed.planner.plan import EXCHANGES
from tests.commands import invoke, refused

PATTERN = ("--segment-lengths", "7,13,31", "--dilation-rates", "1,2,5", "--offsets", "interleaved")
SIZES = ("--heads", 12, "--kv-heads", 4, "--head-dim", 5, "--dtype", "float64", "--causal")
SMALL = ("--tokens", 62, "--context-parallel", 4, *PATTERN, *SIZES)


def layer(batch: int = 1, documents: tuple[int, ...] = (62,)) -> Layer:
    pattern = DilatedPattern((7, 13, 31), (1, 2, 5), offsets="interleaved")
    return Layer(pattern, 62, 4, 12, 4, 5, "float64", batch, True, documents)


def plan(*arguments: object) -> str:
    code, out, err = invoke("plan", *arguments)
    assert (code, err) == (0, "")
    return out


@pytest.mark.parametrize(("batch", "documents"), [(3, (62,)), (1, (20, 0, 42))])
def test_table_holds_the_costs_of_each_strategy(batch: int, documents: tuple[int, ...]) -> None:
    text = plan(*SMALL, "--batch-size", batch, "--document-lengths", ",".join(map(str, documents)))
    of = layer(batch, documents)
    whole = layer_plan(of)
    budget = cost_model.default_budget(whole, head_dim=5, itemsize=8, batch=batch)
    auto = cost_model.choose(whole, budget=budget, **of.sizes)
    each: Any
    for each in strategies.strategies(of):
        label = LABELS[each.name] + (" (auto)" if each.name == auto else "")
        (line,) = re.findall(rf"^{re.escape(label)} +(\d.*)$", text, flags=re.MULTILINE)
        both = each.forward + each.backward
        moved = (each.forward.max(), each.forward.mean(), each.backward.max(), each.backward.mean(), both.max(), each.buffers.max())
        rows, work = f"{each.rows.max() / 4:,.0f}", f"{each.pairs.max() / each.pairs.mean():.2f}"
        total = memory(of, whole, each.buffers).total
        cells = [*(decimal(round(x), precision=2) for x in moved), rows, decimal(total, precision=2), work]
        assert line.split() == " ".join(cells).split()
    assert "62 tokens on 4 ranks, shards: 2 of 16 and 2 of 15 tokens" in text
    assert "12 query and 4 key/value heads of 5, interleaved offsets, causal, float64" in text
    assert "not connected: not all information from tokens 0 to " in text
    assert ("3 documents of 0 to 42 tokens" if len(documents) > 1 else "batch 3, one document") in text


def test_json_holds_the_costs_of_every_rank() -> None:
    found = json.loads(plan(*SMALL, "--batch-size", 3, "--json"))
    of = layer(3)
    assert [found[name] for name in ("tokens", "ranks", "kv_heads", "batch", "document_lengths")] == [62, 4, 4, 3, [62]]
    assert found["pattern"] == of.pattern.to_dict()
    assert found["shard_lengths"] == [16, 16, 15, 15]
    assert f"{LABELS[found['auto']]} (auto)" in plan(*SMALL, "--batch-size", 3)
    expected = strategies.strategies(of)
    assert [each["name"] for each in found["strategies"]] == [each.name for each in expected]
    for each, strategy in zip(found["strategies"], expected):
        assert (each["is_ours"], each["is_exact"], each["why_not"]) == (strategy.is_ours, strategy.is_exact, strategy.why_not)
        for name in ("forward", "backward", "rows", "buffers", "pairs"):
            assert each[name] == getattr(strategy, name).tolist()


@pytest.mark.parametrize("speeds", [(50, 350), (450, 35)], ids=["default", "other"])
@pytest.mark.parametrize("budget", [0, 300])
def test_auto_takes_the_least_time_in_the_budget(budget: int, speeds: tuple[int, int]) -> None:
    text = plan(*SMALL, "--memory-budget", budget, "--link-speed", speeds[0], "--compute-speed", speeds[1])
    costs: dict[str, Any] = {each.name: each for each in strategies.strategies(layer())}
    at, times = cost_model.Speeds(speeds[0] * 1e9, speeds[1] * 1e12), {}
    for name in EXCHANGES:
        each = costs[name]
        times[name] = cost_model.seconds_of(each.forward + each.backward, 3 * each.pairs, 5, at).max()
        assert re.search(rf"\b{name} {1e3 * times[name]:.3g} ms \(", text)
    held = {name: costs[name].buffers.max() for name in EXCHANGES}
    fitting = [name for name in EXCHANGES if held[name] <= budget]
    best = min(fitting, key=times.__getitem__) if fitting else min(EXCHANGES, key=held.__getitem__)
    assert f"\n{best} (auto) " in text
    assert f"at {speeds[0]} GB/s and {speeds[1]} Tflop/s: gather " in text


def test_bounds_are_marked_where_rows_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ", at most" not in plan(*SMALL)
    monkeypatch.setattr(strategies, "COUNTED", 0)
    text = plan(*SMALL)
    assert all(f"\n{name}, at most" in text for name in EXCHANGES)
    assert "\nat most: rows that several branches need are counted once for each of them" in text


def test_local_patterns_strategies_that_cannot_be_and_the_picture(tmp_path: Path) -> None:
    options = ("--tokens", 4096, "--context-parallel", 8, "--segment-lengths", 512, "--dilation-rates", 1, "-o", tmp_path / "a.png")
    text = plan(*options)
    assert "every segment lies inside one shard: our exchanges move nothing" in text
    assert "Ulysses: --heads=12 must be a multiple of --context-parallel=8" in text
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


REFUSED = [
    (("--document-lengths", "10,20"), "--document-lengths must add up to --tokens=64, each at least 0, got 10,20"),
    (("--document-lengths", "10,54", "--batch-size", "2"), "--batch-size must be 1 with --document-lengths"),
    (("--kv-heads", 5), "--kv-heads must divide --heads=12, got 5"),
    (("--output", "plan.pdf"), "--output must end in .png, got 'plan.pdf'"),
    (("--preset", "longnet", "--segment-lengths", "4"), "--preset must come without --segment-lengths and --dilation-rates, got "),
    (("--head-dim", 2**55), f"--tokens must be such that q holds at most {2**55} elements, got {64 * 12 * 2**55} with"),
    (("--segment-lengths", "4,x"), "Invalid value for '--segment-lengths': must be integers separated by commas, got '4,x'"),
    (("--segment-lengths", "4,8"), "--segment-lengths and --dilation-rates must come together, got one of them"),
    (("--segment-lengths", "4", "--dilation-rates", "5"), "--dilation-rates[0] must be in [1, --segment-lengths[0]=4], got 5"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=str)
def test_plan_refuses_in_one_line(changes: tuple[object, ...], message: str) -> None:
    base: dict[object, object] = {"--tokens": 64, "--context-parallel": 2}
    base |= dict(zip(changes[::2], changes[1::2]))
    assert refused("plan", *(x for pair in base.items() for x in pair)).startswith(message)


def test_numbers_of_bytes_are_exact_at_the_largest_size() -> None:
    tokens, ranks, heads, head_dim = 2**40, 16, 2**5, 2**10
    assert tokens * heads * head_dim == MOST_ELEMENTS
    of = Layer(DilatedPattern((2**39, 2**40), (1, 4)), tokens, ranks, heads, heads, head_dim, "float64", 1, False, (tokens,))
    everything = next(each for each in strategies.strategies(of) if each.name == "ring-all")
    row = 2 * 8 * heads * head_dim  # bytes of K and V of a token
    assert everything.forward is not None
    assert everything.backward is not None
    assert everything.forward.tolist() == [(tokens - tokens // ranks) * row] * ranks
    assert everything.backward.tolist() == [2 * (tokens - tokens // ranks) * row] * ranks
    for each in strategies.strategies(of):
        numbers = (each.forward, each.backward, each.rows, each.buffers, each.pairs)
        assert all(number is None or (number >= 0).all() for number in numbers), each.name


def test_default_speeds_are_those_of_a_run() -> None:
    defaults = inspect.signature(module.plan).parameters
    assert cost_model.Speeds(defaults["link_speed"].default * 1e9, defaults["compute_speed"].default * 1e12) == cost_model.Speeds()


def test_columns_are_explained_on_demand() -> None:
    line = ("--tokens", 97, "--context-parallel", 2)
    assert plan(*line).endswith("\nwhat the columns mean: --explain\n")
    assert plan(*line, "--explain").endswith(f"\n\n{module.EXPLANATION}\n")
    assert refused("plan", *line, "--explain", "--json") == "--explain must come without --json, got both\n"
