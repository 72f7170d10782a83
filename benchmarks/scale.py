"""What a layer costs each rank from a million tokens on 8 ranks to a billion on 4,096: counted by the planner, nothing is run.

    python -m benchmarks.scale                     # two minutes on one core; finished cells are kept and not repeated
    python -m benchmarks.scale --tokens 1000000 --ranks 8

Every cell is one layer of 16 heads of 64 in bfloat16, not causal, over shards as equal as can be, by the exchange that
`exchange="auto"` takes. Pairs are exact; bytes and memory are at most so many where `is_exact` is false. The time is the planner's
estimate at the speeds of `cost_model.Speeds`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.environment import commit, save
from flexdilated import DilatedPattern
from flexdilated.analysis.strategies import Layer, layer_plan, memory, strategies
from flexdilated.distributed.planner import cost_model

RESULTS = Path(__file__).parent / "results" / "scale.json"
# Over ranks GigaPath's branches run without zero padding, which would shift positions beyond 185,363 tokens.
PATTERNS = {"longnet": DilatedPattern.longnet(), "gigapath": replace(DilatedPattern.gigapath(), zero_padding=False)}
TOKENS = (10**6, 10**7, 10**8, 10**9)
RANKS = (8, 64, 512, 4096)


def cell(pattern: str, tokens: int, ranks: int) -> dict[str, Any]:
    """The costs of one cell, at the busiest rank of each."""
    layer = Layer(PATTERNS[pattern], tokens, ranks, 16, 16, 64, "bfloat16", 1, is_causal=False)
    plan = layer_plan(layer)
    budget = cost_model.default_budget(plan, head_dim=64, itemsize=2)
    auto = cost_model.choose(plan, budget=budget, **layer.sizes)
    chosen = next(strategy for strategy in strategies(layer) if strategy.name == auto)
    assert chosen.forward is not None
    assert chosen.backward is not None
    assert chosen.pairs is not None
    assert chosen.buffers is not None
    received = chosen.forward + chosen.backward
    return {
        "exchange": auto,
        "is_exact": chosen.is_exact,
        "bytes": int(received.max()),
        "memory": memory(layer, plan, chosen.buffers).total,
        "pairs": int(chosen.pairs.max()),
        "imbalance": int(chosen.pairs.max()) / (sum(chosen.pairs.tolist()) / ranks),
        "seconds": float(cost_model.seconds_of(received, chosen.pairs, 64, cost_model.Speeds()).max()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Count the cells that are not kept yet."""
    parser = argparse.ArgumentParser(description="What a layer costs each rank, from a million tokens to a billion.")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    report = json.loads(options.output.read_text()) if options.output.exists() else {"cells": {}}
    for pattern in PATTERNS:
        for tokens in options.tokens:
            for ranks in options.ranks:
                name = f"{pattern}/{tokens}/{ranks}"
                if name not in report["cells"]:
                    report["cells"][name] = {**cell(pattern, tokens, ranks), "commit": commit()}
                    save(report, options.output)
                    print(name, report["cells"][name], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
