"""Measure where other backends overtake sdpa on this machine, and keep it for `backend="auto"`: `nox -s bench -- --crossover`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import describe, provenance, save
from flexdilated.backends.measured import CHALLENGERS, FILE, faster
from flexdilated.core.hardware import detect
from flexdilated.tuning.timing import NUM_HEADS, PATTERN, attention_call, in_turns, inputs

ROUNDS = 5
GPU_LENGTHS, GPU_DTYPES, HEAD_DIMS = (
    (1024, 4096, 16384, 65536, 262144),
    (torch.bfloat16, torch.float16, torch.float32),
    (64, 128, 256),
)
SETTING = ("dtype", "training", "head_dim", "tokens")  # of a measurement


def main(arguments: list[str] | None = None) -> None:
    """Measure every setting, and keep it beside what is kept of other devices, settings and backends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two short lengths, and nothing is kept: whether it runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backends", nargs="+", choices=CHALLENGERS, help="these alone beside sdpa; flex compiles for minutes")
    parser.add_argument("--tokens", type=int, nargs="+", help="these lengths alone")
    parser.add_argument("--file", type=Path, default=FILE, help="where it is kept")
    parser.add_argument("--commit", help="of the working tree, where git cannot tell")
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(words)
    on_gpu = options.device != "cpu"
    lengths = (64, 128) if options.quick else GPU_LENGTHS if on_gpu else (256, 1024, 4096)
    lengths = tuple(options.tokens or lengths)
    dtypes = GPU_DTYPES if on_gpu else (torch.float32, torch.bfloat16)
    backends = tuple(options.backends or (CHALLENGERS if on_gpu else ("flex",)))
    measured = [
        entry
        for dtype in (dtypes[:1] if options.quick else dtypes)
        for head_dim in ((64,) if options.quick or not on_gpu else HEAD_DIMS)
        for entry in measure(backends, dtype, head_dim, lengths, options.device)
    ]
    if options.quick:
        return
    table = json.loads(FILE.read_text())
    described = about(options.device, words, options.commit)
    kept = table.setdefault(described["device"], {"provenance": [], "measured": [], "forms": [], "checks": []})
    kept["measured"], replaced = merged(kept["measured"], measured)
    kept["provenance"] = [*([] if replaced else kept["provenance"]), described]
    kept["date"] = described["date"]
    save(table, options.file)
    print(f"kept in {options.file}")


def measure(
    backends: Sequence[str], dtype: torch.dtype, head_dim: int, lengths: Iterable[int], device: str
) -> Iterator[dict[str, Any]]:
    """The time of backends over that of sdpa, of every length; on a GPU forward alone, then forward and backward."""
    for training in (False, True) if device != "cpu" else (False,):
        for tokens in lengths:
            name = str(dtype).removeprefix("torch.")
            entry: dict[str, Any] = {"dtype": name, "training": training, "head_dim": head_dim, "tokens": tokens}
            for backend in backends:
                ratio = over_sdpa(backend, tokens, head_dim, dtype, device, training=training)
                ratio = entry[f"{backend}_over_sdpa"] = None if ratio is None else round(ratio, 3)
                where = f"{name} D={head_dim} training={training} N={tokens}"
                print(f"{where}: {backend} {ratio} -> {faster(entry)}", flush=True)
            yield entry


def about(device: str, words: Sequence[str], commit: str | None, program: str = "crossover") -> dict[str, Any]:
    """What was measured, with what, when and how."""
    found = {"pattern": PATTERN.to_dict(), "num_heads": NUM_HEADS, "is_causal": True, **describe()}
    found |= {**provenance(program, device, words, commit), "device": detect(device).device_class}
    if device != "cpu":
        for name in ("device_class", "threads"):  # of the CPU
            del found[name]
    return found


def merged(kept: list[dict[str, Any]], measured: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """`(entries, is_replaced)`: the kept entries, updated by the measured ones; `is_replaced`: no kept value remains."""
    found = {tuple(entry[name] for name in SETTING): entry for entry in kept}
    new = {tuple(entry[name] for name in SETTING): entry for entry in measured}
    replaced = all(key in new and set(found[key]) <= set(new[key]) for key in found)
    for key, entry in new.items():
        found[key] = {**found.get(key, {}), **entry}
    return list(found.values()), replaced


def over_sdpa(backend: str, tokens: int, head_dim: int, dtype: torch.dtype, device: str, *, training: bool) -> float | None:
    """Median time of a backend over that of sdpa, in turns, after a call of each that compiles; None where it cannot run."""
    x = inputs(tokens, head_dim, dtype, torch.device(device))
    calls = {name: attention_call(name, x, training=training) for name in (backend, "sdpa")}
    try:
        expected, actual = (calls[name]()[0] for name in ("sdpa", backend))
    except (NotImplementedError, torch.cuda.OutOfMemoryError):
        return None
    # A fast wrong answer must not be kept.
    torch.testing.assert_close(actual.float(), expected.float(), atol=0.05 if dtype != torch.float32 else 1e-4, rtol=0.02)
    medians = in_turns(calls, torch.device(device), ROUNDS)
    return medians[backend] / medians["sdpa"]


if __name__ == "__main__":
    main()
