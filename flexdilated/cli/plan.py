"""`flexdilated plan`: what a sharded sequence costs each rank."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexdilated.analysis.strategies import Counts, Layer, Strategy, layer_plan, memory, strategies
from flexdilated.cli import options
from flexdilated.cli.refusal import refuse
from flexdilated.core.pattern import BACKWARD, FORWARD
from flexdilated.distributed.planner import cost_model
from flexdilated.distributed.planner.plan import EXCHANGES, ContextPlan
from flexdilated.distributed.sharding import even_shard_lengths
from flexdilated.draw.plan import UNITS, draw_traffic, layer_lines

LABELS = {
    "gather": "gather",
    "ring": "ring",
    "heads": "heads",
    "ring-all": "ring of everything",
    "all-gather": "all-gather of K and V",
    "ulysses": "Ulysses",
}

MAX_RANKS = 4096
MAX_RANK_PAIRS = 2**25  # that share a segment, over branches: half a minute and some gigabytes
LIMIT = 2**62  # counts are 64-bit integers

SPEEDS = cost_model.Speeds()
AT_MOST = "at most: rows that several branches need are counted once for each of them, since listing all rows takes long"
EXPLANATION = f"""\
received: bytes per rank, layer and pass; kB, MB, GB = powers of 1,000
both: forward and backward together; messages: rows received and sent that a forward holds at once, on the rank that holds most
rows per head: what the busiest rank receives forward, in rows of K and V, per key/value head
memory: busiest rank; q, k, v, out and lse of its shard, their gradients, and the messages a forward holds at once
work: (query, key) pairs of the busiest rank / mean over ranks
auto takes the least time at the busiest rank among those whose messages fit the memory budget; if none fits, the least messages
time: an estimate of one layer, both passes: what is received at the speed of the link, then {FORWARD + BACKWARD} operations per
pair and element of a head at that of computing; nothing hides the other. The default speeds are those of a GPU of a DGX H100
ring of everything: K and V pass every rank; backward once more, with dK and dV; its work and that of all-gather are this pattern's
all-gather: K and V of all ranks are kept for the backward, which only reduces dK and dV
Ulysses: two all-to-alls turn shards of the sequence into shards of heads and back"""


def plan(
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Sequence length N in tokens.")],
    ranks: Annotated[
        int,
        typer.Option(
            "--context-parallel",
            min=1,
            metavar="N",
            help="Ranks P that share the sequence: contiguous shards, as equal as can be.",
        ),
    ],
    preset: options.PresetOption = None,
    segment_lengths: options.SegmentLengthsOption = None,
    dilation_rates: options.DilationRatesOption = None,
    heads_rule: options.HeadsRuleOption = options.HeadsRule.ALL,
    offsets: options.OffsetsOption = options.OffsetsRule.BLOCKED,
    heads: options.HeadsOption = 12,
    kv_heads: options.KvHeadsOption = None,
    head_dim: Annotated[int, typer.Option(min=1, metavar="N", help="Elements per head.")] = 64,
    dtype: Annotated[str, typer.Option(help=f"Of q, k and v: {', '.join(options.DTYPES)}.")] = "bfloat16",
    batch: Annotated[int, typer.Option("--batch-size", min=1, metavar="N", help="Sequences.")] = 1,
    causal: options.CausalOption = False,
    document_lengths: options.DocumentLengthsOption = None,
    memory_budget: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Bytes that the messages of an exchange may take on a rank, for the choice of auto. "
            "Default: that of exchange='auto', twice q, k, v and out of the largest shard, at least 128 MiB.",
        ),
    ] = None,
    link_speed: Annotated[float, typer.Option(help="GB (1e9 bytes) that a rank receives per second.")] = SPEEDS.link / 1e9,
    compute_speed: Annotated[
        float, typer.Option(help="1e12 floating-point operations that a rank computes per second.")
    ] = SPEEDS.compute / 1e12,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    output: options.PictureOption = None,
) -> None:
    """What a sequence sharded over P ranks costs per rank and layer: bytes received, memory, work. For our exchanges and others.

    Without --preset, lengths and rates the pattern is 2048,4096,8192 at 1,2,4.

    Memory budget and speeds decide which exchange auto takes. In a run, FLEXDILATED_LINK_SPEED (bytes) and
    FLEXDILATED_COMPUTE_SPEED (operations) give the speeds.
    The picture shows the bytes received per rank against the number of ranks, 1 to P.

    JSON keys: the options by name, batch for --batch-size, with pattern (as DilatedPattern.to_dict); shards (largest, smallest);
    memory_budget; speeds (link, compute: what a rank receives and computes per second, in bytes and operations); is_local (no rank
    needs anything of another); uncrossed_boundary (the first position that causal information does not cross, else null);
    auto (the exchange that exchange='auto' takes); strategies, a list of: name, is_ours, is_auto,
    why_not (null if it can be; else all that follows is null), is_exact (false if listing all rows takes long: bytes, rows, memory
    and seconds are at most so many), bytes_forward, bytes_backward and bytes_both (busiest rank, mean),
    message_bytes (of the rank that holds most), rows_per_head, memory_bytes of the busiest rank (tensors, gradients, buffers,
    total), fits_budget, pairs of all query heads and sequences (busiest, mean), imbalance, seconds of the busiest rank (total,
    receiving, computing; auto chooses by the total).
    """
    options.check_picture(output)
    for option, value, limit in (
        ("--tokens", tokens, options.MAX_LENGTH),
        ("--context-parallel", ranks, MAX_RANKS),
        ("--head-dim", head_dim, 4096),
        ("--batch-size", batch, 2**16),
    ):
        options.at_most(option, value, limit)
    kv_heads = options.kv_heads_named(heads, kv_heads)
    options.dtype_named(dtype)
    for option, speed in (("--link-speed", link_speed), ("--compute-speed", compute_speed)):
        if not 0.0 < speed < math.inf:
            refuse(f"{option} must be a number above 0, got {speed}")
    speeds = cost_model.Speeds(link_speed * 1e9, compute_speed * 1e12)
    pattern = options.pattern_named(
        segment_lengths,
        dilation_rates,
        preset,
        default=options.EXAMPLE,
        heads_rule=heads_rule,
        offsets=offsets,
        heads=kv_heads,
    )
    documents = options.documents_named(document_lengths, tokens)
    if len(documents) > 1 and batch > 1:
        refuse(f"--batch-size must be 1 with --document-lengths, which pack a batch in one sequence, got {batch}")
    layer = Layer(pattern, tokens, ranks, heads, kv_heads, head_dim, dtype, batch, causal, documents)
    _check_counts(layer)

    found = strategies(layer)
    whole = layer_plan(layer)
    sizes = {name: size for name, size in layer.sizes.items() if name != "lse_size"}
    budget = cost_model.default_budget(whole, **sizes) if memory_budget is None else memory_budget
    auto = cost_model.choose(whole, budget=budget, speeds=speeds, **layer.sizes)
    report = _report(layer, whole, found, budget, auto, speeds)
    if as_json:
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        _print(Console(), layer, report)
    if output is not None:
        options.save_picture(draw_traffic(layer), output)


def _check_counts(layer: Layer) -> None:
    """Reject what would not fit 64-bit integers, or would need the memory of all pairs of too many ranks."""
    largest = -(-layer.tokens // layer.ranks)
    elements = layer.tokens * (2 * layer.heads + 2 * layer.kv_heads) * layer.batch
    if 4 * elements * max(layer.head_dim, 8) * layer.itemsize >= LIMIT:
        refuse(f"--tokens must be such that all messages have fewer than 2**62 bytes, got {layer.tokens}")
    if (shared := _pairs_of_ranks(layer, layer.ranks)) > MAX_RANK_PAIRS:
        few = max(ranks for ranks in range(1, layer.ranks) if _pairs_of_ranks(layer, ranks) <= MAX_RANK_PAIRS)
        refuse(
            f"--context-parallel must be such that at most {MAX_RANK_PAIRS} pairs of ranks share a segment, as of {few}, "
            f"got {layer.ranks} of which {shared} do, branch by branch"
        )
    pairs = 0
    for length, rate in layer.pattern.branches:
        w = min(length, layer.tokens)
        n, rows = largest // rate + 1, w // rate + 1
        # Of one branch at most: all heads of the own rows, twice where heads are dealt, and what is rounded in two segments.
        pairs += 3 * layer.kv_heads * n * rows + 2 * rows * rows * (w > largest)
    if pairs * layer.group * layer.batch >= LIMIT:
        refuse(
            f"--tokens must be such that a rank scores fewer than 2**62 pairs, got {layer.tokens} with "
            f"--context-parallel={layer.ranks}; use more ranks or shorter segments"
        )
    if layer.tokens * (widest := max(layer.pattern.dilation_rates)) >= LIMIT:
        refuse(f"--dilation-rates must be such that --tokens times each is below 2**62, got {widest}")


def _pairs_of_ranks(layer: Layer, ranks: int) -> int:
    """How many may share a segment, over branches."""
    shard, filled = -(-layer.tokens // ranks), min(ranks, layer.tokens)
    return sum(filled * min(filled, w // shard + 2) for w in layer.pattern.segment_lengths)


def _report(
    layer: Layer, whole: ContextPlan, found: Sequence[Strategy], budget: int, auto: str, speeds: cost_model.Speeds
) -> dict[str, Any]:
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
        "document_lengths": list(layer.document_lengths),
        "shards": {"largest": max(whole.shard_lengths), "smallest": min(whole.shard_lengths)},
        "memory_budget": budget,
        "speeds": speeds._asdict(),
        "is_local": whole.is_local,
        "uncrossed_boundary": _boundary(layer),
        "auto": auto,
        "strategies": [_row(layer, whole, each, budget, auto, speeds) for each in found],
    }


def _boundary(layer: Layer) -> int | None:
    return layer.pattern.first_uncrossed_boundary(max(layer.document_lengths), layer.kv_heads) if layer.is_causal else None


def _row(layer: Layer, whole: ContextPlan, each: Strategy, budget: int, auto: str, speeds: cost_model.Speeds) -> dict[str, Any]:
    row: dict[str, Any] = {"name": each.name, "is_ours": each.is_ours, "is_auto": each.name == auto, "why_not": each.why_not}
    moved = ("bytes_forward", "bytes_backward", "bytes_both", "message_bytes")
    numbers = ("is_exact", *moved, "rows_per_head", "memory_bytes", "fits_budget", "pairs", "imbalance", "seconds")
    if each.forward is None or each.backward is None or each.rows is None or each.buffers is None or each.pairs is None:
        return row | dict.fromkeys(numbers)
    scored, moved_bytes = each.pairs * (layer.group * layer.batch), each.forward + each.backward
    mean = _mean(scored)
    seconds = cost_model.seconds_of(moved_bytes, scored, layer.head_dim, speeds)
    busiest = int(seconds.argmax())
    receiving = float(moved_bytes[busiest] / speeds.link)
    values = (
        each.is_exact,
        {"busiest": int(each.forward.max()), "mean": _mean(each.forward)},
        {"busiest": int(each.backward.max()), "mean": _mean(each.backward)},
        {"busiest": int((each.forward + each.backward).max()), "mean": _mean(each.forward) + _mean(each.backward)},
        int(each.buffers.max()),
        float(each.rows.max()) / layer.kv_heads,
        memory(layer, whole, each.buffers)._asdict(),
        int(each.buffers.max()) <= budget,
        {"busiest": int(scored.max()), "mean": mean},
        int(scored.max()) / mean,
        {"total": float(seconds[busiest]), "receiving": receiving, "computing": float(seconds[busiest]) - receiving},
    )
    return row | dict(zip(numbers, values))


def _mean(counts: Counts) -> float:
    return sum(counts.tolist()) / len(counts)


def _print(console: Console, layer: Layer, report: dict[str, Any]) -> None:
    for i, line in enumerate(_title(layer)):
        console.print(Text(line, style="bold" if i == 0 else ""), soft_wrap=True)
    if report["is_local"]:
        console.print(Text("every segment lies inside one shard: our exchanges move nothing"), soft_wrap=True)
    if layer.is_causal:
        console.print(Text(options.connection(layer.pattern, max(layer.document_lengths), layer.kv_heads)), soft_wrap=True)
    console.print()
    options.print_table(console, _table(report))
    for row in report["strategies"]:
        if row["why_not"] is not None:
            console.print(Text(f"{LABELS[row['name']]}: {row['why_not']}"), soft_wrap=True)
    console.print(Text(_times(report)), soft_wrap=True)
    if any(row["is_exact"] is False for row in report["strategies"]):
        console.print(Text(AT_MOST), soft_wrap=True)
    console.print(Text(f"\nmemory budget of the messages: {_bytes(report['memory_budget'])}\n{EXPLANATION}"), soft_wrap=True)


def _times(report: dict[str, Any]) -> str:
    """What auto decides by."""
    told = []
    for row in report["strategies"]:
        if row["is_ours"]:
            total, receiving, computing = (f"{1e3 * row['seconds'][part]:.3g}" for part in ("total", "receiving", "computing"))
            at_most = "" if row["is_exact"] else "at most "
            told.append(f"{row['name']} {at_most}{total} ms ({receiving} receiving, {computing} computing)")
    link, compute = report["speeds"]["link"] / 1e9, report["speeds"]["compute"] / 1e12
    of = f"one layer, forward and backward, at {link:g} GB/s and {compute:g} Tflop/s"
    return f"\nestimated time of the busiest rank, {of}: {'; '.join(told)}"


def _table(report: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("received per rank,\nbytes per layer", no_wrap=True)
    received = ("forward\nbusiest", "forward\nmean", "backward\nbusiest", "backward\nmean", "both\nbusiest", "messages\n")
    columns = (*received, "rows\nper head", "memory\n", "work\n")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in report["strategies"]:
        name = LABELS[row["name"]] + (", at most" if row["is_exact"] is False else "") + (" (auto)" if row["is_auto"] else "")
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
        *layer_lines(layer),
    ]


def _bytes(number: float) -> str:
    """Three digits or more, with a unit of a power of 1,000."""
    power = 0
    while power < len(UNITS) - 1 and number >= 999.5:
        number, power = number / 1000, power + 1
    digits = f"{number:,.0f}" if number >= 99.95 or not power else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
    return f"{digits} {UNITS[power]}"
