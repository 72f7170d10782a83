"""Compare the ratios of a benchmark run with the kept ones of the same class of machine; fail when one is much worse.

    pytest benchmarks --benchmark-json=run.json
    python benchmarks/compare.py run.json [--keep]

Only ratios of two measurements of one run are compared, never seconds. With --keep the run's ratios are accepted, whatever they
are, and replace the kept ones of the same names.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flexdilated.core.files import replaced

RESULTS = Path(__file__).parent / "results"
ALLOWED_LOSS = 0.15
# What is kept beside each number, where a benchmark recorded it.
DETAILS = (
    "backend",
    "device",
    "threads",
    "ranks",
    "cpu",
    "python",
    "torch",
    "commit",
    "date",
    "shape",
    "dtype",
    "is_causal",
    "pair_ratio",
    "peak_bytes",
    "tensor_bytes",
    "longest_document",
    "first_step_seconds",
)

Entries = dict[str, dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 when a ratio is more than `ALLOWED_LOSS` worse than the kept one and --keep is not given."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="what pytest wrote under --benchmark-json")
    parser.add_argument("--keep", action="store_true", help="make this run's ratios the kept ones")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the kept ratios")
    options = parser.parse_args(arguments)

    run = json.loads(options.run.read_text())
    if run["benchmarks"] and not any("ratios" in benchmark["extra_info"] for benchmark in run["benchmarks"]):
        print("nothing to compare: these benchmarks are to look at")
        for benchmark in run["benchmarks"]:
            if benchmark["extra_info"]:
                print(benchmark["name"], *(f"{key}={value}" for key, value in benchmark["extra_info"].items()))
        return 0
    device_class, measured = read_run(run)
    if options.keep and any(benchmark["extra_info"].get("quick") for benchmark in run["benchmarks"]):
        parser.error("--keep must come with a run at full size, this one was --quick")
    path = options.results / f"{device_class}.json"
    baseline: Entries = json.loads(path.read_text())["measurements"] if path.exists() else {}

    console = Console()
    console.print(table(device_class, measured, baseline))
    lost = sorted(name for name, entry in measured.items() if loss(entry, baseline.get(name)) > ALLOWED_LOSS)
    for name in lost:
        console.print(
            f"{name}: {loss(measured[name], baseline[name]):.0%} worse than kept", style="red", soft_wrap=True, markup=False
        )
    if not options.keep:
        return 1 if lost else 0
    baseline = dict(sorted((baseline | measured).items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        file.write((json.dumps({"device_class": device_class, "measurements": baseline}, indent=2) + "\n").encode())
    console.print(f"kept in {path}", soft_wrap=True, markup=False)
    return 0


def read_run(run: dict[str, Any]) -> tuple[str, Entries]:
    """The class of machine and the measurements of a pytest-benchmark report, by name.

    Raises:
        ValueError: If it holds none, or two of one name, or more than one class of machine.
    """
    machine = run["machine_info"]
    entries: Entries = {}
    classes = set()
    for benchmark in run["benchmarks"]:
        info = benchmark["extra_info"]
        if "device_class" not in info:
            continue  # it failed before it recorded anything
        classes.add(info["device_class"])
        info = info | {"cpu": machine.get("cpu", {}).get("brand_raw"), "python": machine.get("python_version")}
        details = {key: info[key] for key in DETAILS if info.get(key) is not None}
        for number in [*info["ratios"], *([info["crossover"]] if "crossover" in info else [])]:
            if number["name"] in entries:
                raise ValueError(f"measurements must have distinct names, got {number['name']!r} twice")
            entries[number["name"]] = {key: value for key, value in number.items() if key != "name"} | details
    if len(classes) != 1:
        raise ValueError(f"the run must hold measurements of one class of machine, got {sorted(classes)}")
    return classes.pop(), entries


def loss(entry: dict[str, Any], baseline: dict[str, Any] | None) -> float:
    """By how much a ratio is worse than the kept one, 0.2 for 20 %; below 0 where it is better. A crossover is no ratio: 0."""
    if baseline is None or "value" not in entry:
        return 0.0
    return shortfall(entry["value"], baseline["value"], entry["better"])


def shortfall(value: float, goal: float, better: str) -> float:
    """By how much `value` is worse than `goal`."""
    return (value / goal if better == "lower" else goal / value) - 1.0


def verdict(entry: dict[str, Any]) -> str:
    """What a ratio says of its target."""
    if "value" not in entry:
        return "reported"
    if entry["target"] is None:
        return "no target"
    missed = shortfall(entry["value"], entry["target"], entry["better"])
    return "target met" if missed <= 0 else f"target missed by {missed:.1%}"


def table(device_class: str, measured: Entries, baseline: Entries) -> Table:
    """Every measurement of the run beside what is kept."""
    result = Table("measurement", title=device_class)
    for column in ("ratio", "kept", "target", "worse by"):
        result.add_column(column, justify="right", no_wrap=True)
    result.add_column("verdict")
    for name, entry in measured.items():
        before = baseline.get(name)
        if "value" not in entry:
            shown = [crossover(entry), "" if before is None else crossover(before), "", ""]
        else:
            better = "<=" if entry["better"] == "lower" else ">="
            shown = [
                f"{entry['value']:.3f}",
                "" if before is None else f"{before['value']:.3f}",
                "" if entry["target"] is None else f"{better} {entry['target']:g}",
                "" if before is None else f"{loss(entry, before):+.1%}",
            ]
        result.add_row(name, *shown, verdict(entry))
    return result


def crossover(entry: dict[str, Any]) -> str:
    """The first number of tokens at which the pattern is faster than dense attention."""
    if entry["tokens"] is not None:
        return f"N={entry['tokens']}"
    return f"N>{max(map(int, entry['speedups']))}"


if __name__ == "__main__":
    sys.exit(main())
