"""`flexdilated plan`: what a sharded sequence costs each rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from flexdilated.cli import options
from flexdilated.cli.refusal import refuse
from flexdilated.core.description import connection
from flexdilated.core.pattern import BACKWARD, FORWARD

if TYPE_CHECKING:
    from flexdilated.analysis.strategies import Layer, Strategy
    from flexdilated.distributed.planner.cost_model import Speeds
    from flexdilated.distributed.planner.plan import ContextPlan

LABELS = {
    "gather": "gather",
    "ring": "ring",
    "heads": "heads",
    "ring-all": "ring of everything",
    "all-gather": "all-gather of K and V",
    "ulysses": "Ulysses",
}
COLUMNS = (
    *("forward\nbusiest", "forward\nmean", "backward\nbusiest", "backward\nmean", "both\nbusiest", "messages\n"),
    *("rows\nper head", "memory\n", "work\n"),
)
MOST_ELEMENTS = 2**55  # of q: numbers of bytes fit in 64 bits
AT_MOST = "at most: rows that several branches need are counted once for each of them, since listing all rows takes long"
EXPLANATION = f"""\
received: bytes per rank, layer and pass; kB, MB, GB = powers of 1,000
both: forward and backward together
messages: bytes received and sent that a forward holds at the same time, on the rank that holds most
rows per head: rows of K and V that the busiest rank receives in the forward, per key/value head
memory of the busiest rank: q, k, v, out and lse of its shard, their gradients, and the messages
work: (query, key) pairs of the busiest rank / mean over ranks
auto chooses the exchange with the least time at the busiest rank, among those whose messages fit the memory budget;
if none fits, the exchange with the smallest messages
time: estimated for one layer, forward and backward: receiving at --link-speed, then {FORWARD + BACKWARD} operations per pair
and element of a head at --compute-speed, without overlap. The default speeds describe one GPU of a DGX H100
ring of everything: K and V visit every rank, and in the backward again with dK and dV
ring of everything, all-gather: their work is for this pattern
all-gather: K and V of all ranks are kept for the backward, which only reduces dK and dV
Ulysses: two all-to-alls turn shards of the sequence into shards of heads and back"""


def plan(
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Sequence length N in tokens.")],
    ranks: Annotated[
        int,
        typer.Option(
            "--context-parallel",
            min=1,
            max=4096,
            metavar="N",
            help="Ranks P that share the sequence: contiguous shards, as equal as can be.",
        ),
    ],
    preset: options.PresetOption = None,
    segment_lengths: options.SegmentLengthsOption = None,
    dilation_rates: options.DilationRatesOption = None,
    window: options.WindowOption = None,
    global_tokens: options.GlobalTokensOption = 0,
    heads_rule: options.HeadsRuleOption = "all",
    offsets: options.OffsetsOption = "blocked",
    heads: options.HeadsOption = 12,
    kv_heads: options.KvHeadsOption = None,
    head_dim: Annotated[int, typer.Option(min=1, metavar="N", help="Elements per head.")] = 64,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"],
        typer.Option(metavar="DTYPE", help="Of q, k and v: float32, bfloat16, float16 or float64."),
    ] = "bfloat16",
    batch: Annotated[int, typer.Option("--batch-size", min=1, metavar="N", help="Sequences.")] = 1,
    causal: options.CausalOption = False,
    document_lengths: Annotated[
        options.Integers | None,
        typer.Option(
            parser=options.integers,
            metavar="N,N",
            help="Tokens of packed documents, as in cu_seqlens: comma separated, --tokens in all. Default: one document.",
        ),
    ] = None,
    memory_budget: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Bytes that the messages of an exchange may take on a rank, for the choice of auto. "
            "Default: that of exchange='auto', twice q, k, v and out of the largest shard, at least 128 MiB.",
        ),
    ] = None,
    link_speed: Annotated[float, typer.Option(min=0.01, metavar="X", help="GB (1e9 bytes) that a rank gets per second.")] = 50.0,
    compute_speed: Annotated[
        float, typer.Option(min=0.01, metavar="X", help="1e12 floating-point operations that a rank computes per second.")
    ] = 350.0,
    explain: Annotated[bool, typer.Option("--explain", help="Say what each column and each exchange means.")] = False,
    output: options.PictureOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """What a sequence sharded over P ranks costs per rank and layer: bytes received, memory, work. For our exchanges and others.

    Without --preset, lengths and rates the pattern is 2048,4096,8192 at 1,2,4.

    Memory budget and speeds decide which exchange auto takes. In a run, FLEXDILATED_LINK_SPEED (bytes) and
    FLEXDILATED_COMPUTE_SPEED (operations) give the speeds. flexdilated.analysis.strategies has the numbers in Python.
    The picture shows the bytes received per rank against the number of ranks, 1 to P.
    """
    from flexdilated.analysis.strategies import Layer, layer_plan, strategies
    from flexdilated.distributed.planner import cost_model
    from flexdilated.draw.plan import draw_traffic

    if explain and as_json:
        refuse("--explain must come without --json, got both")
    options.check_picture(output)
    kv_heads = options.kv_heads_named(heads, kv_heads)
    pattern_options = (segment_lengths, dilation_rates, preset)
    rules: dict[str, Any] = {"window": window, "global_tokens": global_tokens, "heads_rule": heads_rule, "offsets": offsets}
    pattern = options.pattern_named(*pattern_options, heads=kv_heads, tokens=tokens, **rules)
    documents = (tokens,) if document_lengths is None else tuple(document_lengths)
    if min(documents) < 0 or sum(documents) != tokens:
        refuse(f"--document-lengths must add up to --tokens={tokens}, each at least 0, got {','.join(map(str, documents))}")
    if len(documents) > 1 and batch > 1:
        refuse(f"--batch-size must be 1 with --document-lengths, which pack a batch in one sequence, got {batch}")
    if (elements := tokens * heads * head_dim * batch) > MOST_ELEMENTS:
        refuse(f"--tokens must be such that q holds at most {MOST_ELEMENTS} elements, got {elements} with --batch-size={batch}")
    layer = Layer(
        pattern=pattern,
        tokens=tokens,
        ranks=ranks,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        batch=batch,
        is_causal=causal,
        document_lengths=documents,
    )

    shard_plan, costs = layer_plan(layer), strategies(layer)
    sizes = {name: size for name, size in layer.sizes.items() if name != "lse_size"}
    budget = cost_model.default_budget(shard_plan, **sizes) if memory_budget is None else memory_budget
    speeds = cost_model.Speeds(link_speed * 1e9, compute_speed * 1e12)
    auto = cost_model.choose(shard_plan, budget=budget, speeds=speeds, **layer.sizes)

    if as_json:
        numbers = {"auto": auto, "is_local": shard_plan.is_local, "memory_budget": budget, "link_speed": speeds.link}
        numbers |= {"compute_speed": speeds.compute, "shard_lengths": shard_plan.shard_lengths}
        rows = [{**asdict(cost), "is_ours": cost.is_ours} for cost in costs]
        record = {**asdict(layer), "pattern": pattern.to_dict(), **numbers, "strategies": rows}
        typer.echo(json.dumps(record, indent=1, default=lambda array: array.tolist()))
    else:
        _print(layer, shard_plan, costs, auto, budget=budget, speeds=speeds)
        typer.echo(f"\n{EXPLANATION}" if explain else "what the columns mean: --explain")
    if output is not None:
        options.write_picture(draw_traffic(layer), output, as_json=as_json)


def _print(layer: Layer, shard_plan: ContextPlan, costs: Sequence[Strategy], auto: str, *, budget: int, speeds: Speeds) -> None:
    """Print the table, and the estimates by which an exchange is chosen."""
    from flexdilated.draw.plan import layer_lines

    console = Console()
    console.print(Text(_title(layer), style="bold"), soft_wrap=True)
    lines = layer_lines(layer)
    if shard_plan.is_local:
        lines.append("every segment lies inside one shard: our exchanges move nothing")
    if layer.is_causal:
        lines.append(connection(layer.pattern, max(layer.document_lengths), layer.kv_heads))
    console.print(Text("\n".join(lines) + "\n"), soft_wrap=True)
    options.print_table(console, _table(layer, shard_plan, costs, auto))
    lines = [f"{LABELS[cost.name]}: {cost.why_not}" for cost in costs if cost.why_not is not None]
    lines += ["", _times(layer, costs, speeds)]
    if not all(cost.is_exact for cost in costs):
        lines.append(AT_MOST)
    lines += ["", f"memory budget of the messages: {decimal(budget, precision=2)}"]
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _title(layer: Layer) -> str:
    from flexdilated.distributed.sharding import even_shard_lengths

    shards = even_shard_lengths(layer.tokens, layer.ranks)
    longer = sum(size > shards[-1] for size in shards)
    shard = (
        f"each of {shards[0]:,}" if not longer else f"{longer:,} of {shards[0]:,} and {layer.ranks - longer:,} of {shards[-1]:,}"
    )
    return f"{layer.tokens:,} tokens on {layer.ranks:,} rank{'s' * (layer.ranks > 1)}, shards: {shard} tokens"


def _table(layer: Layer, shard_plan: ContextPlan, costs: Sequence[Strategy], auto: str) -> Table:
    from flexdilated.distributed.planner.plan import EXCHANGES

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("received per rank,\nbytes per layer", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for cost in costs:
        name = LABELS[cost.name] + ("" if cost.is_exact else ", at most") + (" (auto)" if cost.name == auto else "")
        style = "bold" if cost.name == auto else "" if cost.is_ours else "dim"
        table.add_row(Text(name, style), *_cells(layer, shard_plan, cost), end_section=cost.name == EXCHANGES[-1])
    return table


def _cells(layer: Layer, shard_plan: ContextPlan, cost: Strategy) -> list[str]:
    """What `COLUMNS` say of a strategy."""
    from flexdilated.analysis.strategies import memory

    if cost.forward is None or cost.backward is None or cost.rows is None or cost.buffers is None or cost.pairs is None:
        return ["-"] * len(COLUMNS)
    moved = [number for passed in (cost.forward, cost.backward) for number in (passed.max(), passed.mean())]
    moved += [(cost.forward + cost.backward).max(), cost.buffers.max(), memory(layer, shard_plan, cost.buffers).total]
    *moved_bytes, total = (decimal(round(number), precision=2) for number in moved)
    return [*moved_bytes, f"{cost.rows.max() / layer.kv_heads:,.0f}", total, f"{cost.pairs.max() / cost.pairs.mean():.2f}"]


def _times(layer: Layer, costs: Sequence[Strategy], speeds: Speeds) -> str:
    """What auto decides by."""
    from flexdilated.distributed.planner.cost_model import seconds_of

    times = []
    for cost in costs:
        if cost.is_ours and cost.forward is not None and cost.backward is not None and cost.pairs is not None:
            moved, scored = cost.forward + cost.backward, cost.pairs * (layer.group * layer.batch)
            seconds = seconds_of(moved, scored, layer.head_dim, speeds)
            busiest = int(seconds.argmax())
            total, receiving = float(seconds[busiest]), float(moved[busiest] / speeds.link)
            ms = [f"{1e3 * part:.3g}" for part in (total, receiving, total - receiving)]
            at_most = "" if cost.is_exact else "at most "
            times.append(f"{cost.name} {at_most}{ms[0]} ms ({ms[1]} receiving, {ms[2]} computing)")
    speed = f"at {speeds.link / 1e9:g} GB/s and {speeds.compute / 1e12:g} Tflop/s"
    return f"estimated time of the busiest rank, one layer, forward and backward, {speed}: {'; '.join(times)}"
