"""`flexdilated choose`: patterns under a budget, each as a line of Python with one sentence, and the trade-off as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from flexdilated.cli import options
from flexdilated.cli.refusal import first_line, refuse
from flexdilated.core.pattern import DilatedPattern


def choose(
    tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of a sequence; of packed documents, the longest one.")
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, max=1024, metavar="N", help="Query heads H.", show_default="12")] = None,
    kv_heads: options.KvHeadsOption = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--from-config",
            metavar="FILE",
            exists=True,
            help="A config.json of the transformers library, or its folder: tokens, heads and causal, where no option is given.",
        ),
    ] = None,
    budget: options.BudgetOption = 0.1,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--no-causal",
            help="Whether a query sees no key after itself.",
            show_default="no-causal, or what the config's architectures say",
        ),
    ] = None,
    segment_lengths: options.SegmentLengthsOption = None,
    dilation_rates: options.DilationRatesOption = None,
    window: options.WindowOption = None,
    global_tokens: options.GlobalTokensOption = 0,
    preset: options.PresetOption = None,
    heads_rule: options.HeadsRuleOption = "all",
    offsets: options.OffsetsOption = "blocked",
    output: options.PictureOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Propose patterns under a budget, best first, each as a line of Python; then your own pattern, where you give one.

    The order follows experiments with small causal models: few branches, a low far rate, a far branch over the whole sequence.
    """
    from flexdilated.analysis.choice import choose_pattern, few_heads
    from flexdilated.draw.choices import draw_choices

    options.check_picture(output)
    if config is not None:
        tokens, heads, kv_heads, is_causal = _sizes(config, tokens, heads, kv_heads)
        causal = is_causal if causal is None else causal
    causal = bool(causal)
    if tokens is None:
        refuse("--tokens or --from-config must be given, got neither")
    heads = 12 if heads is None else heads
    kv_heads = options.kv_heads_named(heads, kv_heads)
    patterns: list[DilatedPattern] = []
    if preset or segment_lengths or dilation_rates or window or global_tokens:
        named = (segment_lengths, dilation_rates, preset)
        rules: dict[str, Any] = {"window": window, "global_tokens": global_tokens, "heads_rule": heads_rule, "offsets": offsets}
        patterns.append(options.pattern_named(*named, heads=kv_heads, tokens=tokens, **rules))
    choices = choose_pattern(tokens, kv_heads, budget=budget, is_causal=causal, patterns=patterns)
    note = few_heads(choices)
    python = [repr(choice.pattern) for choice in choices.shown]
    states = [_explorer_state(choice.pattern, tokens, heads, kv_heads, causal=causal) for choice in choices.shown]
    if as_json:
        numbers = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "causal": causal, "budget": budget, "few_heads": note}
        shown = [
            {"python": line, "explorer": state, **asdict(choice), "pattern": choice.pattern.to_dict()}
            for line, state, choice in zip(python, states, choices.shown)
        ]
        typer.echo(json.dumps({**numbers, "patterns": shown}, indent=1))
    else:
        kind = "causal" if causal else "not causal"
        title = f"{tokens:,} tokens, {options.heads_in_words(heads, kv_heads)}, {kind}"
        typer.echo(f"{title}; budget {100 * choices.budget:.3g} % of dense attention")
        if note is not None:
            typer.echo(note)
        for number, (line, state, choice) in enumerate(zip(python, states, choices.shown), 1):
            over = "" if choice.is_within_budget else ", over the budget"
            typer.echo(f"\n{number}  {line}")
            typer.echo(f"   {100 * choice.share:.3g} % of dense attention{over}. {choice.why}")
            typer.echo(f"   flexdilated explorer '{state}'")
    if output is not None:
        options.write_picture(draw_choices(choices), output, as_json=as_json)


def _sizes(path: Path, tokens: int | None, heads: int | None, kv_heads: int | None) -> tuple[int, int, int | None, bool]:
    """Tokens, heads and key/value heads from the options, else from a config.json; whether its model is causal."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = {**json.loads(file.read_text(encoding="utf-8"))}
        config |= config.get("text_config") or {}  # of models of text and pictures
    except (TypeError, ValueError) as error:
        refuse(f"--from-config must be a config.json of the transformers library, got '{file}': {first_line(error)}")

    def read(option: str, *keys: str) -> int:
        key = next((key for key in keys if key in config), keys[0])
        if key not in config:
            refuse(f"--from-config must hold {' or '.join(keys)}, got none in '{file}'; use {option}")
        if type(config[key]) is not int or config[key] < 1:
            refuse(f"--from-config must hold an integer of at least 1 as {key}, got {config[key]!r} in '{file}'; use {option}")
        return config[key]

    if kv_heads is None:
        keys = [key for key in ("num_key_value_heads", "num_kv_heads") if config.get(key) is not None]
        if config.get("multi_query") is True and not config.get("new_decoder_architecture"):  # of Falcon and StarCoder
            kv_heads = 1
        elif keys:
            kv_heads = read("--kv-heads", *keys)
    tokens = read("--tokens", "max_position_embeddings", "n_positions") if tokens is None else tokens
    is_causal = any("CausalLM" in name for name in config.get("architectures") or ())  # as `set_pattern` reads it
    return tokens, read("--heads", "num_attention_heads", "n_head") if heads is None else heads, kv_heads, is_causal


def _explorer_state(pattern: DilatedPattern, tokens: int, heads: int, kv_heads: int, *, causal: bool) -> str:
    """The state in the explorer's address, after `#`. It selects the last query, which sees the most."""
    segments, near = pattern.split("the explorer's address")
    parts = [f"{name}={','.join(map(str, values))}" for name, values in zip("wr", zip(*segments) if segments else ((), ()))]
    parts += [f"{name}={number}" for name, number in zip(("window", "first"), near) if number]
    parts += [f"N={tokens}", f"H={heads}", f"KV={kv_heads}", f"causal={int(causal)}", f"query={tokens - 1}"]
    flags = ("zero_padding", "detach_weights")
    rules = [f"heads={pattern.heads}", f"offsets={pattern.offsets}"]
    return "&".join([*parts, *rules, *(f"{flag}=1" for flag in flags if getattr(pattern, flag))])
