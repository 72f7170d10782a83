"""Tokens per second and peak memory of training a language model on one GPU, dilated beside dense, by the length of its sequences.

    python -m benchmarks.training            # a CUDA device; keeps runs/training.json
    python -m benchmarks.training --quick    # whether it runs, on any device

One step is the forward and backward of one sequence of bytes and a step of AdamW, in bfloat16 by autocast, each layer checkpointed.
The dense model is the same with one branch that keeps everything, by the fastest dense kernel that torch has there: cuDNN's.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.environment import provenance, save
from flexdilated import DilatedPattern, LongNetConfig, LongNetLM

OUTPUT = Path("runs/training.json")
VOCAB = 256
DENSE = DilatedPattern((1 << 40,), (1,))
STEPS = 2  # timed, after one that is not


def build(pattern: DilatedPattern, backend: str, options: argparse.Namespace) -> LongNetLM:
    """A model whose layers are checkpointed."""
    config = LongNetConfig(
        vocab_size=VOCAB,
        embed_dim=options.embed_dim,
        num_layers=options.layers,
        num_heads=options.heads,
        pattern=pattern,
        position="rotary",
        backend=backend,
    )
    model = LongNetLM(config).to(options.device)
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def step(model: LongNetLM, tokens: Tensor, optimizer: torch.optim.Optimizer, device: str) -> Tensor:
    """One step on one sequence; the loss of the next byte."""
    with torch.autocast(device, torch.bfloat16):
        logits = model(tokens)
        loss = F.cross_entropy(logits[0, :-1], tokens[0, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def measure(kind: str, num_tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step and the most memory, or why there are none."""
    on_gpu = options.device == "cuda"
    dense = kind == "dense"
    kernel_choice: AbstractContextManager[object] = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if dense and on_gpu else nullcontext()
    pattern = DENSE if dense else DilatedPattern.longnet()
    record: dict[str, Any] = {"attention": kind, "tokens": num_tokens}
    try:
        with kernel_choice:
            model = build(pattern, "sdpa" if dense else options.backend, options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            tokens = torch.randint(VOCAB, (1, num_tokens), device=options.device)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            seconds = []
            for _ in range(1 + STEPS):
                start = time.perf_counter()
                loss = step(model, tokens, optimizer, options.device).item()
                seconds.append(time.perf_counter() - start)
        record |= {
            "first_step_seconds": seconds[0],
            "step_seconds": statistics.median(seconds[1:]),
            "tokens_per_second": num_tokens / statistics.median(seconds[1:]),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
            "loss": loss,
            "parameters": sum(p.numel() for p in model.parameters()),
        }
    except torch.OutOfMemoryError as error:
        record["reason"] = str(error).partition("\n")[0]
    model = optimizer = tokens = None
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every length of both kinds, the dilated first."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model on two short sequences")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--dilated", type=int, nargs="*", default=[1 << 17, 1 << 20], help="lengths for the dilated model")
    parser.add_argument("--dense", type=int, nargs="*", default=[1 << 17], help="lengths for the dense model")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--embed-dim", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--backend", default="auto", help="backend of the dilated model")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--commit", help="of the working tree, where git cannot tell")
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.embed_dim, options.heads, options.dilated, options.dense = 1, 32, 2, [64, 128], [64]
    elif options.device == "cpu":
        parser.error("--device cpu must come with --quick: these sizes are a GPU's")

    torch.manual_seed(2307)
    words = list(sys.argv[1:] if arguments is None else arguments)
    sizes = {name: getattr(options, name) for name in ("layers", "embed_dim", "heads", "backend")}
    report = {**provenance("training", options.device, words, options.commit), "quick": options.quick, **sizes, "measurements": []}
    for kind, num_tokens in [*(("dilated", n) for n in options.dilated), *(("dense", n) for n in options.dense)]:
        report["measurements"].append(measure(kind, num_tokens, options))
        save(report, options.output)
    Console().print(table(report))
    return 0


def table(report: dict[str, Any]) -> Table:
    """What was measured."""
    rows = Table("attention", title=f"{report['hardware']}, torch {report['torch']}, {report['date']}")
    for column in ("tokens", "tokens/s", "s a step", "peak GiB"):
        rows.add_column(column, justify="right")
    for m in report["measurements"]:
        if "reason" in m:
            rows.add_row(m["attention"], f"{m['tokens']:,}", m["reason"][:40], "", "")
            continue
        peak = "" if m["peak_gib"] is None else f"{m['peak_gib']:.1f}"
        rows.add_row(m["attention"], f"{m['tokens']:,}", f"{m['tokens_per_second']:,.0f}", f"{m['step_seconds']:.3f}", peak)
    return rows


if __name__ == "__main__":
    sys.exit(main())
