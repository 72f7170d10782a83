"""`flexdilated plan`: what a sharded sequence costs each rank, by our exchanges and by those of others."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexdilated.distributed.plan import EXCHANGES, IDLE_LIMIT, KINDS, ContextPlan, context_plan
from flexdilated.distributed.sharding import even_shard_lengths
from flexdilated.draw import INK, MAX_LENGTH, HeadsRule, OffsetsRule, Preset, _pattern, _save, _wrap
from flexdilated.pattern import DilatedPattern
from flexdilated.refusal import refuse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["OTHERS", "Layer", "Strategy", "draw_traffic", "layer_plan", "plan", "strategies", "traffic_by_ranks"]

Counts = NDArray[np.int64]

OTHERS = ("ring-all", "all-gather", "ulysses")
LABELS = {
    "gather": "gather",
    "ring": "ring",
    "heads": "heads",
    "ring-all": "ring of everything",
    "all-gather": "all-gather of K and V",
    "ulysses": "Ulysses",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

MAX_RANKS = 4096
MAX_RANK_PAIRS = 2**23  # that share a segment, over branches: more take minutes and gigabytes
MAX_BRANCHES = 10  # rows that branches share are counted by inclusion and exclusion
MAX_HEADS = 1024
MAX_HEAD_DIM = 4096
MAX_BATCH = 2**16
LIMIT = 2**62  # counts are 64-bit integers

# Okabe and Ito's colours, safe for colour-blind readers.
COLORS = {"gather": "#0072b2", "ring": "#e69f00", "heads": "#009e73"}
MARKERS = {"gather": "o", "ring": "s", "heads": "^"}
GREYS = {"ring-all": "#4d4d4d", "all-gather": "#8c8c8c", "ulysses": "#b0b0b0"}
DASHES: dict[str, Any] = {"ring-all": (0, (6, 2)), "all-gather": (0, (3, 2)), "ulysses": (0, (1, 1.4))}

EXPLANATION = f"""\
received: bytes per rank, layer and pass; kB, MB, GB = powers of 1,000
both: forward and backward together; messages: what a forward holds of them at once, on the rank that holds most
rows per head: what the busiest rank receives forward, in rows of K and V, per key/value head
memory: busiest rank; q, k, v, out and lse of its shard, their gradients, and the messages a forward holds at once
work: (query, key) pairs of the busiest rank / mean over ranks
auto takes the least of both at the busiest rank among those whose messages fit the memory budget; if none fits, the least messages;
  never heads where the busiest rank would score more than {IDLE_LIMIT} times the pairs
ring of everything: K and V pass every rank; backward once more, with dK and dV; its work and that of all-gather are this pattern's
all-gather: K and V of all ranks are kept for the backward, which only reduces dK and dV
Ulysses: two all-to-alls turn shards of the sequence into shards of heads and back"""


@dataclass(frozen=True)
class Layer:
    """One attention layer over a sharded sequence, in plain numbers."""

    pattern: DilatedPattern
    tokens: int
    ranks: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    batch: int
    is_causal: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def lse_size(self) -> int:
        return 8 if self.dtype == "float64" else 4

    @property
    def sizes(self) -> dict[str, Any]:
        """The keywords of `ContextPlan.bytes_received`."""
        return {"head_dim": self.head_dim, "itemsize": self.itemsize, "batch": self.batch, "lse_size": self.lse_size}


@dataclass(frozen=True)
class Strategy:
    """What one way of moving rows costs: arrays `(ranks,)`, or why it cannot be."""

    name: str
    why_not: str | None = None
    forward: Counts | None = None  # bytes received
    backward: Counts | None = None
    rows: NDArray[np.float64] | None = None  # of K and V received in a forward, over all key/value heads
    buffers: Counts | None = None  # bytes of the messages held at once in a forward
    pairs: Counts | None = None

    @property
    def is_ours(self) -> bool:
        return self.name in EXCHANGES


def layer_plan(layer: Layer) -> ContextPlan:
    """The plan of a layer over shards as equal as can be, one document long."""
    shards, documents = even_shard_lengths(layer.tokens, layer.ranks), ((0, layer.tokens),)
    return context_plan(layer.pattern, shards, layer.kv_heads, range(layer.kv_heads), layer.group, documents, layer.is_causal)


def strategies(layer: Layer, *, with_pairs: bool = True) -> list[Strategy]:
    """The exchanges of `EXCHANGES`, then `OTHERS`.

    The others, for shards of `n` of `N` tokens on `P` ranks, each with `n` rows of q, k, v and the plan's byte sizes:
    ring-all receives `N - n` rows of K|V forward, the same again backward, and the dK|dV of `P - 1` shards: the sum of a shard
    starts at the next rank and goes round until it is home. all-gather receives the same rows at once, and backward `P - 1` partial
    sums of the dK|dV of its own shard. ulysses receives `(N - n) / P` of q, k, v in heads and `n (1 - 1/P)` of out; backward
    `(N - n) / P` of dout and `n (1 - 1/P)` of dq, dk, dv.

    Args:
        layer: The numbers.
        with_pairs: Whether to count pairs, which takes longest.
    """
    plan = layer_plan(layer)
    ours = [_ours(plan, layer, exchange) for exchange in EXCHANGES]
    found = [*ours, *_all_keys(plan, layer), _ulysses(plan, layer)]
    if not with_pairs:
        return found
    # The ring of everything and the all-gather compute what gather computes: the rows of a rank's own queries.
    pairs = {name: plan.pairs(name) for name in ("gather", "heads")}
    pairs |= dict.fromkeys(("ring", "ring-all", "all-gather"), pairs["gather"])
    if found[-1].why_not is None:
        pairs["ulysses"] = _ulysses_pairs(layer)
    return [replace(each, pairs=pairs.get(each.name)) for each in found]


def _ours(plan: ContextPlan, layer: Layer, exchange: str) -> Strategy:
    forward, backward = plan.bytes_received(exchange, **layer.sizes)
    kv, q, out = (plan.traffic(exchange, kind).received(layer.ranks) for kind in KINDS)
    buffers = plan.buffer_bytes(exchange, **layer.sizes)
    return Strategy(exchange, None, forward, backward, _halved(2 * kv + (q + out) * layer.group), buffers)


def _all_keys(plan: ContextPlan, layer: Layer) -> list[Strategy]:
    """Every rank gets the keys and values of all."""
    n, several = _shards(plan), layer.ranks > 1
    others = (layer.tokens - n) * layer.kv_heads
    own = n * layer.kv_heads
    row = 2 * layer.head_dim * layer.itemsize * layer.batch
    # The sum of rank r's dK|dV starts at rank r + 1, so that a rank receives all but the one it starts.
    sums = (layer.tokens - np.roll(n, 1)) * layer.kv_heads
    ring = Strategy(
        "ring-all", None, others * row, (others + sums) * row, _halved(2 * others), np.full_like(n, 2 * own.max() * row * several)
    )
    gathered = (own + others) * row * several
    return [ring, Strategy("all-gather", None, others * row, (layer.ranks - 1) * own * row, _halved(2 * others), gathered)]


def _ulysses(plan: ContextPlan, layer: Layer) -> Strategy:
    for option, heads in (("--heads", layer.heads), ("--kv-heads", layer.kv_heads)):
        if heads % layer.ranks:
            return Strategy("ulysses", f"{option}={heads} must be a multiple of --ranks={layer.ranks}")
    n = _shards(plan)
    row = layer.head_dim * layer.itemsize * layer.batch
    heads, kv_heads = layer.heads // layer.ranks, layer.kv_heads // layer.ranks
    there, back = layer.tokens - n, n * (layer.ranks - 1)  # per head of a rank: tokens of others; own tokens, times other ranks
    forward = there * (heads + 2 * kv_heads) + back * heads
    backward = there * heads + back * (heads + 2 * kv_heads)
    # A rank sends of its shard what it receives of out, and the reverse.
    buffers = (there + back) * (2 * heads + 2 * kv_heads)
    return Strategy("ulysses", None, forward * row, backward * row, _halved(forward), buffers * row)


def _ulysses_pairs(layer: Layer) -> Counts:
    size = layer.kv_heads // layer.ranks
    documents = ((0, layer.tokens),)
    # Ranks whose heads keep the same rows compute the same.
    known: dict[Any, int] = {}
    pairs = []
    for rank in range(layer.ranks):
        within = range(rank * size, (rank + 1) * size)
        alone = context_plan(layer.pattern, (layer.tokens,), layer.kv_heads, within, layer.group, documents, layer.is_causal)
        key = tuple(sorted((offsets, len(heads)) for offsets, heads in alone.classes.items()))
        if key not in known:
            known[key] = int(alone.pairs("gather")[0])
        pairs.append(known[key])
    return np.array(pairs, np.int64)


def _halved(counts: Counts) -> NDArray[np.float64]:
    return counts.astype(np.float64) / 2


def _shards(plan: ContextPlan) -> Counts:
    return np.array(plan.shard_lengths, np.int64)


def plan(
    tokens: Annotated[int, typer.Option(help=f"Sequence length N in tokens, 1 to {MAX_LENGTH}.")],
    ranks: Annotated[
        int, typer.Option(help=f"Ranks P that share the sequence, 1 to {MAX_RANKS}: contiguous shards, as equal as can be.")
    ],
    preset: Annotated[
        Preset | None,
        typer.Option(help="A published pattern, at its published lengths, instead of lengths and rates."),
    ] = None,
    segment_lengths: Annotated[
        str | None,
        typer.Option(help="Tokens per segment of each branch, comma separated. Default, without --preset: 2048,4096,8192."),
    ] = None,
    dilation_rates: Annotated[
        str | None,
        typer.Option(
            help="Every r-th token of a segment is kept: one rate per segment length, comma separated. "
            "Default, without --preset: 1,2,4."
        ),
    ] = None,
    heads_rule: Annotated[
        HeadsRule, typer.Option(help="all: every head runs every branch. grouped: each branch has its own group of heads.")
    ] = HeadsRule.ALL,
    offsets: Annotated[
        OffsetsRule,
        typer.Option(help="Which residue head h of H keeps at rate r. blocked: h // ceil(H / r). interleaved: h mod r."),
    ] = OffsetsRule.BLOCKED,
    heads: Annotated[int, typer.Option(help=f"Query heads H, 1 to {MAX_HEADS}.")] = 12,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; they divide --heads. Default: as many as --heads.")] = None,
    head_dim: Annotated[int, typer.Option(help=f"Elements per head, 1 to {MAX_HEAD_DIM}.")] = 64,
    dtype: Annotated[str, typer.Option(help=f"Of q, k and v: {', '.join(DTYPES)}.")] = "bfloat16",
    batch: Annotated[int, typer.Option("--batch-size", help=f"Sequences, 1 to {MAX_BATCH}.")] = 1,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Whether a query sees no key after itself.")] = False,
    memory_budget: Annotated[
        int | None,
        typer.Option(
            help="Bytes that the messages of an exchange may take on a rank, for the choice of auto. "
            "Default: that of exchange='auto', twice q, k, v and out of the largest shard."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Also draw the bytes received per rank against the number of ranks, 1 to P, in this .png file.",
        ),
    ] = None,
) -> None:
    """What a sequence sharded over P ranks costs per rank and layer: bytes received, memory, work. For our exchanges and others.

    JSON keys: the options by name, batch for --batch-size, with pattern (as DilatedPattern.to_dict); shards (largest, smallest);
    memory_budget; is_local (no rank needs anything of another); auto (the exchange that exchange='auto' takes); strategies, a list
    of: name, is_ours, is_auto, why_not (null if it can be; else all that follows is null), bytes_forward, bytes_backward and
    bytes_both (busiest rank, mean), message_bytes (of the rank that holds most; auto chooses by it and by bytes_both, busiest),
    rows_per_head, memory_bytes of the busiest rank (tensors, gradients, buffers, total), fits_budget, pairs (busiest, mean),
    imbalance.
    """
    if output is not None and output.suffix.lower() != ".png":
        refuse(f"--output must end in .png, got '{output}'")
    for option, value, most in (
        ("--tokens", tokens, MAX_LENGTH),
        ("--ranks", ranks, MAX_RANKS),
        ("--heads", heads, MAX_HEADS),
        ("--head-dim", head_dim, MAX_HEAD_DIM),
        ("--batch-size", batch, MAX_BATCH),
    ):
        if not 1 <= value <= most:
            refuse(f"{option} must be in [1, {most}], got {value}")
    counted = "--heads" if kv_heads is None else "--kv-heads"  # by which the pattern groups
    kv_heads = heads if kv_heads is None else kv_heads
    if not 1 <= kv_heads <= heads or heads % kv_heads:
        refuse(f"--kv-heads must divide --heads={heads}, got {kv_heads}")
    if dtype not in DTYPES:
        refuse(f"--dtype must be one of {', '.join(DTYPES)}, got '{dtype}'")
    if memory_budget is not None and memory_budget < 0:
        refuse(f"--memory-budget must be at least 0 bytes, got {memory_budget}")
    for option, text in (("--segment-lengths", segment_lengths), ("--dilation-rates", dilation_rates)):
        if preset is not None and text is not None:
            refuse(f"{option} must not be given with --preset={preset.value}, got {text}")
    try:
        pattern = _pattern(segment_lengths, dilation_rates, preset, is_published=True)
        pattern = replace(pattern, heads=heads_rule.value, offsets=offsets.value)
    except (TypeError, ValueError, NotImplementedError) as error:
        refuse(str(error))
    if heads_rule is HeadsRule.GROUPED and kv_heads < len(pattern.branches):
        refuse(f"{counted} must be at least the branches={len(pattern.branches)} with --heads-rule=grouped, got {kv_heads}")
    layer = Layer(pattern, tokens, ranks, heads, kv_heads, head_dim, dtype, batch, causal)
    _check_counts(layer)

    found = strategies(layer)
    whole = layer_plan(layer)
    sizes = {name: size for name, size in layer.sizes.items() if name != "lse_size"}
    budget = whole.default_budget(**sizes) if memory_budget is None else memory_budget
    auto = whole.choose(budget=budget, **layer.sizes)
    report = _report(layer, whole, found, budget, auto)
    if as_json:
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        _print(Console(), layer, report)
    if output is not None:
        _save(draw_traffic(layer), output)


def _check_counts(layer: Layer) -> None:
    """Refuse what would not fit 64-bit integers, or would need the memory of all pairs of too many ranks."""
    largest = -(-layer.tokens // layer.ranks)
    elements = layer.tokens * (2 * layer.heads + 2 * layer.kv_heads) * layer.batch
    if 4 * elements * max(layer.head_dim, 8) * layer.itemsize >= LIMIT:
        refuse(f"--tokens must be such that all messages have fewer than 2**62 bytes, got {layer.tokens}")
    if len(layer.pattern.branches) > MAX_BRANCHES:
        refuse(f"--segment-lengths must have at most {MAX_BRANCHES} entries, got {len(layer.pattern.branches)}")
    filled = min(layer.ranks, layer.tokens)
    shared = sum(filled * min(filled, w // largest + 2) for w in layer.pattern.segment_lengths)
    if shared > MAX_RANK_PAIRS:
        refuse(
            f"--ranks must be such that at most {MAX_RANK_PAIRS} pairs of them share a segment, "
            f"got {layer.ranks} with segments of {max(layer.pattern.segment_lengths)} over shards of {largest}"
        )
    pairs, multiple = 0, math.lcm(*layer.pattern.dilation_rates)
    for length, rate in layer.pattern.branches:
        w = min(length, layer.tokens)
        n, rows = largest // rate + 1, w // rate + 1
        # Of one branch at most: all heads of the own rows; or whole heads of two segments at the shard's ends.
        pairs += 3 * layer.kv_heads * n * rows + 2 * rows * rows * (w > largest)
    if pairs >= LIMIT:
        refuse(
            f"--tokens must be such that a rank scores fewer than 2**62 pairs, got {layer.tokens} with --ranks={layer.ranks}; "
            "use more ranks or shorter segments"
        )
    if max(layer.tokens, multiple) * max(layer.pattern.dilation_rates) >= LIMIT:
        refuse(f"--dilation-rates must have a least common multiple that is small enough to count with, got {multiple}")


def _report(layer: Layer, whole: ContextPlan, found: Sequence[Strategy], budget: int, auto: str) -> dict[str, Any]:
    """The answer in JSON types."""
    return {
        "tokens": layer.tokens,
        "ranks": layer.ranks,
        "pattern": layer.pattern.to_dict(),
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "dtype": layer.dtype,
        "batch": layer.batch,
        "causal": layer.is_causal,
        "shards": {"largest": max(whole.shard_lengths), "smallest": min(whole.shard_lengths)},
        "memory_budget": budget,
        "is_local": whole.is_local,
        "auto": auto,
        "strategies": [_row(layer, whole, each, budget, auto) for each in found],
    }


def _row(layer: Layer, whole: ContextPlan, each: Strategy, budget: int, auto: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": each.name,
        "is_ours": each.is_ours,
        "is_auto": each.name == auto,
        "why_not": each.why_not,
    }
    moved = ("bytes_forward", "bytes_backward", "bytes_both", "message_bytes")
    numbers = (*moved, "rows_per_head", "memory_bytes", "fits_budget", "pairs", "imbalance")
    if each.forward is None or each.backward is None or each.rows is None or each.buffers is None or each.pairs is None:
        return row | dict.fromkeys(numbers)
    tokens = _shards(whole) * layer.batch
    gradients = tokens * (2 * layer.heads + 2 * layer.kv_heads) * layer.head_dim * layer.itemsize
    tensors = gradients + tokens * layer.heads * layer.lse_size
    total = tensors + gradients + each.buffers
    busiest = int(total.argmax())
    mean = _mean(each.pairs)
    values = (
        {"busiest": int(each.forward.max()), "mean": _mean(each.forward)},
        {"busiest": int(each.backward.max()), "mean": _mean(each.backward)},
        {"busiest": int((each.forward + each.backward).max()), "mean": _mean(each.forward) + _mean(each.backward)},
        int(each.buffers.max()),
        float(each.rows.max()) / layer.kv_heads,
        {
            "tensors": int(tensors[busiest]),
            "gradients": int(gradients[busiest]),
            "buffers": int(each.buffers[busiest]),
            "total": int(total[busiest]),
        },
        int(each.buffers.max()) <= budget,
        {"busiest": int(each.pairs.max()), "mean": mean},
        int(each.pairs.max()) / mean,
    )
    return row | dict(zip(numbers, values))


def _mean(counts: Counts) -> float:
    return sum(counts.tolist()) / len(counts)


# -- in words -----------------------------------------------------------------------------------------------------------------


def _print(console: Console, layer: Layer, report: dict[str, Any]) -> None:
    for i, line in enumerate(_title(layer)):
        console.print(Text(line, style="bold" if i == 0 else ""), soft_wrap=True)
    if report["is_local"]:
        console.print(Text("every segment lies inside one shard: our exchanges move nothing"), soft_wrap=True)
    console.print()
    table = _table(report)
    table.width = console.measure(table, options=console.options.update(max_width=1000)).maximum  # numbers are never cut
    console.print(table, soft_wrap=True)
    for row in report["strategies"]:
        if row["why_not"] is not None:
            console.print(Text(f"{LABELS[row['name']]}: {row['why_not']}"), soft_wrap=True)
    console.print(Text(f"\nmemory budget of the messages: {_bytes(report['memory_budget'])}\n{EXPLANATION}"), soft_wrap=True)


def _table(report: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("received per rank,\nbytes per layer", no_wrap=True)
    received = ("forward\nbusiest", "forward\nmean", "backward\nbusiest", "backward\nmean", "both\nbusiest", "messages\n")
    columns = (*received, "rows\nper head", "memory\n", "work\n")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in report["strategies"]:
        name = LABELS[row["name"]] + (" (auto)" if row["is_auto"] else "")
        style = "bold" if row["is_auto"] else "" if row["is_ours"] else "dim"
        if row["why_not"] is not None:
            table.add_row(Text(name, style), *["-"] * len(columns))
            continue
        moved = [_bytes(row[key][of]) for key in ("bytes_forward", "bytes_backward") for of in ("busiest", "mean")]
        moved += [_bytes(row["bytes_both"]["busiest"]), _bytes(row["message_bytes"])]
        memory, work = _bytes(row["memory_bytes"]["total"]), f"{row['imbalance']:.2f}"
        table.add_row(
            Text(name, style), *moved, f"{row['rows_per_head']:,.0f}", memory, work, end_section=row["name"] == EXCHANGES[-1]
        )
    return table


def _title(layer: Layer) -> list[str]:
    shards = even_shard_lengths(layer.tokens, layer.ranks)
    longer = sum(size > shards[-1] for size in shards)
    shard = (
        f"each of {shards[0]:,}" if not longer else f"{longer:,} of {shards[0]:,} and {layer.ranks - longer:,} of {shards[-1]:,}"
    )
    return [
        f"{layer.tokens:,} tokens on {layer.ranks:,} rank{'s' * (layer.ranks > 1)}, shards: {shard} tokens",
        *_pattern_lines(layer),
    ]


def _pattern_lines(layer: Layer) -> list[str]:
    lengths, rates = (", ".join(map(str, values)) for values in (layer.pattern.segment_lengths, layer.pattern.dilation_rates))
    heads = f"{layer.heads} heads" if layer.group == 1 else f"{layer.heads} query and {layer.kv_heads} key/value heads"
    rule = "grouped by branch" if layer.pattern.heads == "grouped" else f"{layer.pattern.offsets} offsets"
    kind = f"{'causal' if layer.is_causal else 'not causal'}, {layer.dtype}" + (f", batch {layer.batch}" if layer.batch > 1 else "")
    return [f"segment lengths {lengths}; dilation rates {rates}", f"{heads} of {layer.head_dim}, {rule}, {kind}"]


def _bytes(number: float) -> str:
    """Three digits or more, with a unit of a power of 1,000."""
    units = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
    power = 0
    while power < len(units) - 1 and number >= 999.5:
        number, power = number / 1000, power + 1
    digits = f"{number:,.0f}" if number >= 99.95 or not power else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
    return f"{digits} {units[power]}"


def _decade(number: float) -> str:
    """A power of ten: `100 MB`."""
    power = round(math.log10(number))
    return f"{10 ** (power % 3):,} {('B', 'kB', 'MB', 'GB', 'TB', 'PB', 'EB')[power // 3]}"


# -- the picture --------------------------------------------------------------------------------------------------------------


def draw_traffic(layer: Layer) -> Figure:
    """A matplotlib figure: bytes that the busiest rank receives per layer, forward and backward, against the number of ranks.

    The ranks are the powers of two from 2 to the layer's, and the layer's; both axes are logarithmic. What is 0 is drawn on a line
    of its own at the bottom.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    lines = traffic_by_ranks(layer)
    counts = [ranks for ranks, _ in lines[EXCHANGES[0]]]
    moved = [number for line in lines.values() for _, number in line if number]
    low, high = (10.0 ** math.floor(math.log10(min(moved))), max(moved)) if moved else (1.0, 10.0)
    has_zero = not all(number for line in lines.values() for _, number in line)
    zero = low / (10 * high / low) ** 0.16

    title = [
        f"Bytes received per rank and layer, forward and backward: {layer.tokens:,} tokens",
        *_wrap(_pattern_lines(layer), 110),
    ]
    top, bottom, plot = 0.36 + 0.22 * len(title), 1.46, 3.8  # inches
    height = top + plot + bottom
    figure = Figure(figsize=(8.6, height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.105, bottom / height, 0.865, plot / height))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, line in lines.items():
        style: dict[str, Any]
        if name in EXCHANGES:
            # Lines that coincide stay visible: each is thinner than the one below it, its markers smaller.
            rank = EXCHANGES.index(name)
            style = {"color": COLORS[name], "marker": MARKERS[name], "linewidth": 4.0 - 1.3 * rank, "markersize": 10 - 2.5 * rank}
        else:
            style = {"color": GREYS[name], "linestyle": DASHES[name], "marker": ".", "linewidth": 1.6, "markersize": 5}
        x, y = [ranks for ranks, _ in line], [number or zero for _, number in line]
        axes.plot(x, y, label=_legend(name, layer), zorder=3 if name in EXCHANGES else 2, clip_on=False, **style)
    if has_zero:
        axes.axhline(math.sqrt(low * zero), color=INK, linewidth=0.6, linestyle=(0, (1, 3)))
        below = axes.get_yaxis_transform()
        axes.text(
            0.995, zero * (low / zero) ** 0.2, "nothing travels", transform=below, ha="right", va="bottom", fontsize=8, color=INK
        )
    axes.set_xlim(counts[0] / 2**0.25, counts[-1] * 2**0.25)
    axes.set_ylim(zero / (low / zero) ** 0.4 if has_zero else low / 1.1, high * 10**0.3)
    decades = range(round(math.log10(low)), math.floor(math.log10(high * 10**0.3)) + 1)
    step = -(-len(decades) // 9)
    axes.yaxis.set_major_locator(FixedLocator([zero] * has_zero + [10.0**decade for decade in decades[::step]]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: "0" if y < low / 1.5 else _decade(y)))
    # The asked number itself may lie too near to the power of two below it.
    shown = [ranks for ranks in counts if ranks == counts[-1] or 1.5 * ranks <= counts[-1]]
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(color="#e6e6e6", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(length=2.5, width=0.5, labelsize=8.5, colors=INK)
    axes.set_xlabel("ranks that share the sequence", fontsize=9.5, color=INK)
    axes.set_ylabel("received by the busiest rank", fontsize=9.5, color=INK)
    for side, spine in axes.spines.items():
        spine.set(linewidth=0.6, color=INK, visible=side in ("left", "bottom"))
    for i, text in enumerate(title):
        font = {"fontsize": 10.5, "weight": "bold"} if i == 0 else {"fontsize": 8.5}
        figure.text(0.5, 1 - (0.16 + 0.22 * i + 0.06 * (i > 0)) / height, text, ha="center", va="top", color=INK, **font)
    figure.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 0.08 / height),
        ncols=2,
        fontsize=8.5,
        frameon=False,
        handlelength=3.6,
        columnspacing=1.6,
    )
    return figure


def traffic_by_ranks(layer: Layer) -> dict[str, list[tuple[int, int]]]:
    """By strategy, `(ranks, bytes that the busiest rank receives, both passes)`, for the powers of two up to the layer's ranks."""
    counts = sorted({*(2**i for i in range(1, layer.ranks.bit_length()) if 2**i < layer.ranks), layer.ranks})
    lines: dict[str, list[tuple[int, int]]] = {name: [] for name in (*EXCHANGES, *OTHERS)}
    for ranks in counts:
        for each in strategies(replace(layer, ranks=ranks), with_pairs=False):
            if each.forward is not None and each.backward is not None:
                lines[each.name].append((ranks, int((each.forward + each.backward).max())))
    return lines


def _legend(name: str, layer: Layer) -> str:
    meaning = {
        "gather": "gather: the rows that are needed, at once",
        "ring": "ring: the same rows in steps, in little memory",
        "heads": "heads: whole heads, where that is less",
        "ring-all": "ring of everything: K and V pass every rank",
        "all-gather": "all-gather: K and V of all ranks at once",
        "ulysses": f"Ulysses: where ranks divide the {layer.kv_heads} key/value heads",
    }
    return ("ours, " if name in EXCHANGES else "") + meaning[name]
