"""A pattern in sentences: what each token reads, and whether the rules for patterns are followed."""

from __future__ import annotations

from typing import Any

# From which lengths a pattern may be faster than dense attention: on a CPU with 8 or more key/value heads and with fewer, on a GPU.
CPU_TOKENS, GPU_TOKENS = {True: 250, False: 500}, 8192


def reads(pattern: Any, num_tokens: int, num_kv_heads: int, *, is_causal: bool) -> str:
    """What each token reads in one layer."""
    segments, near = pattern.split("describe")
    if not near and [(min(length, num_tokens), rate) for length, rate in segments] == [(num_tokens, 1)]:
        return f"Dense attention: every token reads {'itself and all tokens before it' if is_causal else 'all tokens'}."
    heads, readers = ("each head", "") if pattern.heads == "all" else ("the heads of its branch", " in the heads of its branch")
    near_tokens = [f"a window of {near.window:,} tokens"] if near.window else []
    near_tokens += [f"the first {near.global_tokens}{'' if near.window else ' tokens'}"] if near.global_tokens else []
    near_tokens += [f"its segment of {min(length, num_tokens):,} tokens{readers}" for length, rate in segments if rate == 1]
    text = [f"Each token reads {' and '.join(near_tokens)}."] if near_tokens else []
    lengths = {far: [length for length, rate in segments if rate == far] for _, far in segments if far > 1}
    parts = [
        f"1 in {rate} of all {num_tokens:,} tokens"
        if max(far) >= num_tokens
        else f"1 in {rate} of the tokens of segments of {' and '.join(f'{length:,}' for length in far)}"
        for rate, far in lengths.items()
    ]
    count = ""
    if len(parts) == 1 and pattern.heads == "all" and num_kv_heads % (rate := max(lengths)) == 0:
        sharing = num_kv_heads // rate
        count = f"; {sharing} heads keep the same tokens" if sharing > 1 else "; each head keeps other tokens"
    if parts:
        text.append(f"In {heads}, {', '.join(parts)}{' also' if near_tokens else ''} read each other{count}.")
    return " ".join([*text, *(["No token reads a later one."] if is_causal else [])])


def why_not_connected(pattern: Any, num_tokens: int, num_kv_heads: int) -> str | None:
    """What a causal model loses under a pattern that is not connected, and the cure; None for a connected pattern."""
    boundary = pattern.first_uncrossed_boundary(num_tokens, num_kv_heads)
    if boundary is None:
        return None
    rate = min((pattern.run_of_neighbours + 1) // 2, num_kv_heads)
    cure = f", or add a branch as long as the sequence at a rate of at most {rate}" if pattern.heads == "all" and rate > 1 else ""
    return (
        f"not connected: not all information from tokens 0 to {boundary - 1} reaches the tokens from {boundary} on; "
        f"add a window{',' if cure else ' or'} use DilatedPattern.causal(seq_len, {num_kv_heads}){cure}"
    )


def connection(pattern: Any, num_tokens: int, num_kv_heads: int) -> str:
    """Whether causal information crosses all boundaries, in one line."""
    why = why_not_connected(pattern, num_tokens, num_kv_heads)
    return "connected: causal information crosses all boundaries" if why is None else why


def describe(pattern: Any, num_tokens: int, num_kv_heads: int, *, is_causal: bool) -> list[str]:
    """The share of the pairs of dense attention, what each token reads, and one sentence per rule for patterns."""
    pattern.check_heads(num_kv_heads)
    pairs = pattern.count_pairs(num_tokens, num_kv_heads, is_causal=is_causal)
    dense = num_kv_heads * num_tokens * (num_tokens + 1) // 2 if is_causal else num_kv_heads * num_tokens**2
    longest = max(pattern.segment_lengths, default=0)
    length = f"The longest segment has {longest:,} of {num_tokens:,} tokens" if longest else "There are no segments"
    lost = [str(r) for i, r in enumerate(pattern.dilation_rates) if len(pattern.kept_offsets(i, num_kv_heads)) < r]
    cure = f"; use rates that divide the {num_kv_heads} key/value heads" if pattern.heads == "all" else ""
    limit = CPU_TOKENS[num_kv_heads >= 8]
    short = f"Too short: dense attention is faster on a CPU below about {limit} tokens, and on a GPU below several thousand."
    long = "Long enough for a CPU; on a GPU dense attention is faster below several thousand tokens."
    sentences = [
        f"{100 * pairs / dense:.3g} % of dense attention.",
        reads(pattern, num_tokens, num_kv_heads, is_causal=is_causal),
        "The longest segment holds the sequence." if longest >= num_tokens else f"{length}: add one as long as the sequence.",
        f"No head keeps some tokens at rate {', '.join(lost)}{cure}."
        if lost
        else "Each remainder of positions has a key/value head, at every rate.",
        short if num_tokens < limit else long if num_tokens < GPU_TOKENS else "Long enough to be faster than dense attention.",
    ]
    if is_causal:
        text = connection(pattern, num_tokens, num_kv_heads)
        sentences.append(f"{text[0].upper()}{text[1:]}.")
    return sentences
