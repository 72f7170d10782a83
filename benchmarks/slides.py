"""Slides through Prov-GigaPath's encoder: packed beside one at a time, and beside the authors' algorithm over plain attention.

    python -m benchmarks.slides            # keeps benchmarks/results/slides.json
    python -m benchmarks.slides --quick    # whether it runs; keeps nothing

Ratios are of layers of the published width, as many as `--depth` says, with random weights: packing and attention cost the same in
each of the twelve. Slides are read from files of TRIDENT's format, and results written as `slides encode-all` writes them. What is
compared alternates. Peak memory is that of a fresh process.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.environment import describe, save
from flexdilated import DilatedPattern
from flexdilated.slides import store
from flexdilated.slides.encode import Clock, EncodedSlide, encode_slides
from flexdilated.slides.gigapath import LongNetViT

RESULTS = Path(__file__).parent / "results" / "slides.json"
IN_CHANS, BUDGET = 1536, 4096
# (tiles, slides); the authors' algorithm forms its scores, so it ends where memory does.
CASES = ((10, 64), (30, 32), (100, 16), (300, 8), (5_000, 2), (20_000, 1))
PLAIN_TILES = 5_000
MEMORY_TILES = (300, 5_000, 20_000, 100_000)  # whose memory is measured


class PlainAttention(nn.Module):
    """torchscale's dilated attention, branch by branch, as published: pad, gather, attend, scatter, mix by log-sum-exp.

    flash-attn is replaced by a matrix product, a softmax and a matrix product.
    """

    def __init__(self, pattern: DilatedPattern) -> None:
        super().__init__()
        self.pattern, self.is_causal = pattern, False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        """`(1, N, H, D)` to the same."""
        num_tokens, num_heads, head_dim = q.shape[1:]
        outs, lses = [], []
        for length, rate in self.pattern.branches:
            length = min(length, num_tokens)
            segments, num_rows = math.ceil(num_tokens / length), math.ceil(length / rate)
            offset = torch.arange(num_heads) // math.ceil(num_heads / rate)

            gathered = partial(_gathered, segments, length, num_rows, rate, offset)
            scores = gathered(q) @ gathered(k).mT * head_dim**-0.5
            lse = scores.logsumexp(-1)
            out = (scores - lse[..., None]).exp() @ gathered(v)
            whole_out = out.new_zeros(segments, num_heads, rate, num_rows, head_dim)
            whole_lse = out.new_full((segments, num_heads, rate, num_rows), -1e8)
            whole_out[:, torch.arange(num_heads), offset] = out
            whole_lse[:, torch.arange(num_heads), offset] = lse
            outs.append(whole_out.permute(0, 3, 2, 1, 4).flatten(1, 2)[:, :length].flatten(0, 1)[:num_tokens])
            lses.append(whole_lse.permute(0, 3, 2, 1).flatten(1, 2)[:, :length].flatten(0, 1)[:num_tokens])
        mixing = torch.stack(lses).softmax(dim=0)
        return (mixing[..., None] * torch.stack(outs)).sum(dim=0)[None]


def _gathered(segments: int, length: int, num_rows: int, rate: int, offset: Tensor, x: Tensor) -> Tensor:
    """What each head keeps of each segment, `(segments, H, kept, D)`."""
    _, num_tokens, num_heads, head_dim = x.shape
    x = torch.cat([x[0], x.new_zeros(segments * length - num_tokens, num_heads, head_dim)]).unflatten(0, (segments, length))
    x = torch.cat([x, x.new_zeros(segments, num_rows * rate - length, num_heads, head_dim)], dim=1).unflatten(1, (num_rows, rate))
    return x.permute(0, 3, 2, 1, 4)[:, torch.arange(num_heads), offset]


def build(depth: int, *, plain: bool = False) -> LongNetViT:
    torch.manual_seed(0)
    model = LongNetViT(in_chans=IN_CHANS, depth=depth).eval()
    if plain:
        for layer in model.encoder.layers:
            layer.self_attn.attention = PlainAttention(model.pattern)
    return model


def write_slides(folder: Path, tiles: int, slides: int) -> dict[str, Path]:
    """Files as TRIDENT writes them, embeddings in float16."""
    generator = np.random.default_rng(tiles)
    side = math.isqrt(tiles) + 1
    paths = {}
    for i in range(slides):
        path = folder / f"{tiles}-{i}.h5"
        with h5py.File(path, "w") as file:
            features = file.create_dataset("features", (tiles, IN_CHANS), "f2")
            for start in range(0, tiles, 8192):
                features[start : start + 8192] = generator.standard_normal((min(8192, tiles - start), IN_CHANS), np.float32)
            cells = np.arange(tiles)
            coords = file.create_dataset("coords", data=np.stack([cells % side, cells // side], -1) * 256)
            coords.attrs.update({"patch_size_level0": 256, "target_magnification": 20})
        paths[path.stem] = path
    return paths


def encode(model: LongNetViT, slides: Mapping[str, Path], budget: int, output: Path) -> dict[str, Any]:
    """Encode and write slides: seconds, the shares of files in them, and the embeddings."""
    clock = Clock()
    start = time.perf_counter()
    results = []
    for result in encode_slides(model, slides, token_budget=budget, clock=clock):
        assert isinstance(result, EncodedSlide), result
        results.append(result)
    writing = time.perf_counter()
    for result in results:
        store.write_slide(output, result, {}, {})
    end = time.perf_counter()
    seconds = end - start
    embeddings = torch.stack([result.embedding for result in results])
    return {"seconds": seconds, "reading": clock.reading / seconds, "writing": (end - writing) / seconds, "embeddings": embeddings}


def compare(folder: Path, tiles: int, slides: int, depth: int, rounds: int) -> dict[str, Any]:
    """Packed, alone and the authors' algorithm, in turn; the same embeddings by all. Files: their share of the time, packed."""
    paths = write_slides(folder, tiles, slides)
    model = build(depth)
    ways = {"packed": (model, BUDGET), "alone": (model, 1)}
    if tiles <= PLAIN_TILES:
        ways["authors"] = (build(depth, plain=True), 1)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    files: dict[str, list[float]] = {way: [] for way in ways}
    results: dict[str, Any] = {}
    for _ in range(rounds + 1):  # the first is not counted
        for way, (encoder, budget) in ways.items():
            results[way] = encode(encoder, paths, budget, folder / "out")
            seconds[way].append(results[way]["seconds"])
            files[way].append(results[way]["reading"] + results[way]["writing"])
            torch.testing.assert_close(results[way]["embeddings"], results["packed"]["embeddings"], atol=1e-4, rtol=1e-4)
    for path in paths.values():
        path.unlink()
    times = {way: values[1:] for way, values in seconds.items()}
    ratios = {
        f"packed over {way}": statistics.median(a / b for a, b in zip(times["packed"], values))
        for way, values in times.items()
        if way != "packed"
    }
    rates = {f"{way}, slides per minute": 60 * slides / statistics.median(values) for way, values in times.items()}
    files_share = statistics.median(files["packed"][1:])
    return {"tiles": tiles, "slides": slides, "depth": depth, "rounds": rounds, **ratios, **rates, "files": files_share}


def peak_memory(path: Path, depth: int) -> dict[str, Any]:
    """GiB of a process that encodes one slide, its libraries and weights included; and the shares of files in its time."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_memory, (path, depth, torch.get_num_threads()))


def _peak_memory(path: Path, depth: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    result = encode(build(depth), {path.stem: path}, BUDGET, path.with_name("out"))
    del result["embeddings"]
    return {**result, "depth": depth, "peak GiB": _high_water() / 2**30}


def _high_water() -> int:
    """Most bytes of memory that this process has had; ru_maxrss would begin at what its parent had."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def _cpu() -> str:
    """Its name, as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _merged(baseline: list[dict[str, Any]], measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was kept, with what was measured in its place, by the number of tiles."""
    rows = {row["tiles"]: row for row in (*baseline, *measured)}
    return [rows[tiles] for tiles in sorted(rows)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small slides, nothing is kept")
    parser.add_argument("--depth", type=int, default=1, help="layers in the comparison; memory is that of all twelve")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", choices=["cases", "memory"], help="measure one of the two; what is not measured stays as it was kept"
    )
    sizes = [tiles for tiles, _ in CASES]
    parser.add_argument(
        "--tiles", type=int, nargs="*", choices=sizes, help="compare these alone, the others stay as they were kept"
    )
    parser.add_argument("--memory", type=int, nargs="*", default=MEMORY_TILES, help="sizes of the slides whose memory is measured")
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    cases, large = (((10, 2), (30, 2)), ()) if options.quick else (CASES, options.memory)
    cases, large = (() if options.only == "memory" else cases, () if options.only == "cases" else large)
    cases = tuple(case for case in cases if options.tiles is None or case[0] in options.tiles)
    is_partial = options.only is not None or options.tiles is not None
    baseline = json.loads(RESULTS.read_text()) if is_partial else {"cases": [], "memory": []}
    environment = {**describe(), "cpu": _cpu(), "python": platform.python_version()}
    measured = {"command": shlex.join(["python", "-m", "benchmarks.slides", *words]), **environment}
    rows_of_part: dict[str, list[dict[str, Any]]] = {"cases": [], "memory": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for tiles, slides in cases:
            row = compare(folder, tiles, slides, options.depth, 1 if options.quick else options.rounds)
            rows_of_part["cases"].append({**row, **measured})
            print(row, flush=True)
        for tiles in large:
            ((_, path),) = write_slides(folder, tiles, 1).items()
            row = {"tiles": tiles, **peak_memory(path, 12)}
            rows_of_part["memory"].append({**row, **measured})
            print(row, flush=True)
            path.unlink()
    report = {part: _merged(baseline[part], rows) for part, rows in rows_of_part.items()}
    if not options.quick:
        save(report, RESULTS)


if __name__ == "__main__":
    main()
