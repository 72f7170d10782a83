"""`flexdilated choose`: patterns that meet goals under a budget, as a table with reasons, and the trade-off as a picture."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexdilated.analysis.choice import MOST_HEADS, MOST_RANKS, UNITS, Choices, choose_pattern
from flexdilated.analysis.ranks import MOST_HEAD_DIM
from flexdilated.cli import options
from flexdilated.cli.refusal import refuse
from flexdilated.draw.choices import draw_choices

MOST_SHOWN = 1000
LIMIT = 2**100  # of the budget: more than the pairs of any sequence that can be asked for
EXPLANATION = """\
rows: whether each branch keeps all of its rows in some head, or only some: rates beyond the heads leave rows out
of dense: the pairs of queries and keys that are scored, forward, beside those of dense attention
{reach}
undilated: the longest segment at rate 1, in which a token sees all its neighbours; span: the longest segment
These are counts. They do not say how well a model learns: train to know."""
REACH = "layers: after which every token has seen every other, all heads together; - is never"
CAUSAL = (
    "segments of what is tried nest: a token just behind a border of all of them never knows of the one before it, in any number\n"
    "of layers; one more undilated branch, whose segments end elsewhere, joins the two"
)

DOCUMENTS = "\nPairs and bytes are those of all documents, each cut by itself; all else is of the longest."


class GoalName(str, Enum):
    """`choose_pattern`'s goals as the command line spells them."""

    REACH = "reach"
    COVER = "cover"
    BALANCE = "balance"


class MeasureName(str, Enum):
    """`choose_pattern`'s measures as the command line spells them."""

    PAIRS = "pairs"
    MEMORY = "memory"
    TRAFFIC = "traffic"


def choose(
    tokens: Annotated[int, typer.Option(help=f"Sequence length N in tokens, 1 to {options.MAX_LENGTH}.")],
    budget: Annotated[
        int | None,
        typer.Option(
            help="The most that one layer may cost, in the unit of --measure. Default: the pairs of LongNet's published pattern, "
            "or of dense attention if fewer; the memory of dense attention; a tenth of its traffic."
        ),
    ] = None,
    heads: Annotated[int, typer.Option(help=f"Heads H, 1 to {MOST_HEADS}; of grouped-query attention the key/value heads.")] = 12,
    measure: Annotated[
        MeasureName,
        typer.Option(
            metavar="MEASURE",
            help="What the budget is of. pairs: of queries and keys, over all heads. memory: bytes on the rank that needs most. "
            "traffic: bytes that the busiest rank receives, forward and backward.",
        ),
    ] = MeasureName.PAIRS,
    goal: Annotated[
        list[GoalName] | None,
        typer.Option(
            metavar="GOAL",
            help="Repeatable. reach: every token sees every other. cover: every branch keeps every row in some head. balance: no "
            "head has more than 1.05 times the mean pairs. Default: all three; with --causal the last two.",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--within-layers", help="The most layers for the goal reach. Default: any number.")
    ] = None,
    causal: options.CausalOption = False,
    document_lengths: options.DocumentLengthsOption = None,
    ranks: Annotated[int, typer.Option("--context-parallel", help=f"Ranks that share the sequence, 1 to {MOST_RANKS}.")] = 1,
    head_dim: Annotated[int, typer.Option(help=f"Elements per head, 1 to {MOST_HEAD_DIM}, for memory and traffic.")] = 64,
    dtype: Annotated[str, typer.Option(help=f"Of q, k and v: {', '.join(options.DTYPES)}.")] = "bfloat16",
    segment_lengths: Annotated[
        str | None, typer.Option(help="A pattern of yours to place among the others: tokens per segment, comma separated.")
    ] = None,
    dilation_rates: Annotated[str | None, typer.Option(help="Its rates, one per segment length.")] = None,
    preset: Annotated[
        options.Preset | None, typer.Option(metavar="NAME", help="Or a published pattern to place among them: longnet, gigapath.")
    ] = None,
    offsets: options.OffsetsOption = options.OffsetsRule.BLOCKED,
    most: Annotated[int, typer.Option(help="How many patterns to show, besides yours.")] = 5,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also draw the trade-off in this .png file.")] = None,
) -> None:
    """Patterns that meet goals under a budget, each with a reason in one sentence. Counts: nothing about a model's quality."""
    options.check_picture(output)
    options.check_range("--tokens", tokens, options.MAX_LENGTH)
    if budget is not None:
        options.check_range("--budget", budget, LIMIT)
    for option, value, limit in (
        ("--heads", heads, MOST_HEADS),
        ("--context-parallel", ranks, MOST_RANKS),
        ("--head-dim", head_dim, MOST_HEAD_DIM),
        ("--within-layers", layers, LIMIT),
        ("--most", most, MOST_SHOWN),
    ):
        if value is not None:
            options.check_range(option, value, limit)
    if causal and goal is not None and GoalName.REACH in goal:
        refuse("--goal must not be reach with --causal: a token meets the one before it in one layer or never; leave it out")
    if layers is not None and (causal or (goal is not None and GoalName.REACH not in goal)):
        refuse(f"--within-layers must come with the goal reach, got {layers}; --goal reach asks for it, without --causal")
    options.dtype_named(dtype)
    documents = options.documents_named(document_lengths, tokens)
    patterns = []
    if preset is not None or segment_lengths is not None:
        if preset is None and dilation_rates is None:
            refuse("--dilation-rates must come with --segment-lengths, got none")
        patterns.append(
            options.pattern_named(
                segment_lengths,
                dilation_rates,
                preset,
                default_lengths="",
                heads_rule=options.HeadsRule.ALL,
                offsets=offsets,
                heads=heads,
            )
        )
    elif dilation_rates is not None:
        refuse(f"--segment-lengths must come with --dilation-rates, got none for {dilation_rates}")
    try:
        found = choose_pattern(
            tokens,
            heads,
            budget=budget,
            measure=measure.value,
            goals=None if goal is None else [each.value for each in goal],
            layers=layers,
            is_causal=causal,
            document_lengths=documents,
            num_ranks=ranks,
            head_dim=head_dim,
            dtype=dtype,
            patterns=patterns,
            most=most,
        )
    except (ValueError, NotImplementedError) as error:
        refuse(error)
    _print(Console(), found)
    if output is not None:
        options.save_picture(draw_choices(found), output)


def _print(console: Console, found: Choices) -> None:
    kind = "causal" if found.is_causal else "not causal"
    heads = f"{found.num_heads} head{'s' * (found.num_heads != 1)}"
    goals = ", ".join(found.goals) or "none"
    some = found.document_lengths
    documents = f" in {len(some):,} documents of {min(some):,} to {max(some):,}" if len(some) > 1 else ""
    console.print(Text(f"{found.num_tokens:,} tokens{documents}, {heads}, {kind}", style="bold"), soft_wrap=True)
    whose = "" if found.budget_of is None else f", {found.budget_of} (--budget sets another)"
    console.print(Text(f"budget {found.budget:,} {UNITS[found.measure]}{whose}; goals: {goals}\n"), soft_wrap=True)
    if not found.shown:
        console.print(Text("No pattern that was tried meets the goals: ask for fewer, or for more layers."), soft_wrap=True)
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for name in ("", "segment lengths", "rates", "rows"):
        table.add_column(name, no_wrap=True)
    for name in (UNITS[found.measure], "of budget", "of dense", *([] if found.is_causal else ["layers"]), "undilated", "span"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, each in enumerate(found.shown, 1):
        lengths, rates = (", ".join(map(str, x)) for x in (each.pattern.segment_lengths, each.pattern.dilation_rates))
        shares = (f"{100 * value / of:.3g} %" for value, of in ((each.cost, found.budget), (each.pairs, found.dense_pairs)))
        layers = [] if found.is_causal else ["-" if each.layers is None else str(each.layers)]
        rows = "some" if each.partial else "all"
        row = (f"{number} ", lengths, rates, rows, f"{each.cost:,}", *shares, *layers, f"{each.window:,}", f"{each.span:,}")
        table.add_row(*row, style="bold" if each.is_given else "")
    options.print_table(console, table)
    console.print()
    for number, each in enumerate(found.shown, 1):
        console.print(Text(f"{number} {each.why}"), soft_wrap=True)
    reach = CAUSAL if found.is_causal else REACH
    console.print(Text("\n" + EXPLANATION.format(reach=reach) + DOCUMENTS * (len(some) > 1)), soft_wrap=True)
