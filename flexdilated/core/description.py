"""A pattern in sentences: what each token reads, and whether the rules for patterns are followed."""

from __future__ import annotations

from typing import Any

# From which lengths a pattern was faster than dense attention: on a CPU with 8 or more key/value heads and with fewer, on a GPU.
CPU_TOKENS, GPU_TOKENS = {True: 250, False: 500}, 32_768


def reads(pattern: Any, num_tokens: int, num_kv_heads: int, *, is_causal: bool) -> str:
    """What each token reads in one layer."""
    segments, near = pattern.split("describe")
    branches = [(min(length, num_tokens), rate) for length, rate in segments]
    if max(near) >= num_tokens or (not near and branches == [(num_tokens, 1)]):
        return f"Dense attention: every token reads {'itself and all tokens before it' if is_causal else 'all tokens'}."
    near_tokens = _window(near.window, is_causal=is_causal)
    first = "the first token" if near.global_tokens == 1 else f"the first {near.global_tokens:,} tokens"
    near_tokens += [first.removesuffix(" tokens") if near.window > 1 and is_causal else first] if near.global_tokens else []
    text = [f"T{first[1:]} read{'s' * (near.global_tokens == 1)} all tokens."] * (near.global_tokens > 0 and not is_causal)
    if pattern.heads == "all":
        near_tokens += dict.fromkeys(f"its segment of {length:,} tokens" for length, rate in branches if rate == 1)
        text += _far("each head", branches, num_tokens, also=bool(near_tokens))
        rates = {rate for _, rate in branches if rate > 1}
        if len(rates) == 1 and num_kv_heads % (rate := max(rates)) == 0:
            sharing = num_kv_heads // rate
            count = "each key/value head keeps different tokens"
            count = f"groups of {sharing} key/value heads keep the same tokens" if sharing > 1 else count
            text[-1] = f"{text[-1][:-1]}; {count}."
    else:
        for i, branch in enumerate(branches):
            heads = pattern.head_range(i, num_kv_heads)
            name = f"key/value heads {heads[0]} to {heads[-1]}" if len(heads) > 1 else f"key/value head {heads[0]}"
            also = " also" if near_tokens else ""
            text += [f"In {name}, each token{also} reads its segment of {branch[0]:,} tokens."] * (branch[1] == 1)
            text += _far(name, [branch], num_tokens, also=bool(near_tokens))
    listed = " and ".join([", ".join(near_tokens[:-1])] * (len(near_tokens) > 1) + near_tokens[-1:])
    text = [f"Each token reads {listed}."] * bool(near_tokens) + text
    return " ".join([*text, *(["No token reads later tokens."] if is_causal else [])])


def _window(window: int, *, is_causal: bool) -> list[str]:
    """The tokens of a window, which lie on both sides of a query that is not causal."""
    if window > 1 and is_causal:
        return [f"a window of {window:,} tokens"]
    sides = f"{window - 1:,} token{'s' * (window > 2)} on each side"
    return ["itself"] * (window > 0) + [sides] * (window > 1)


def _far(heads: str, branches: list[tuple[int, int]], num_tokens: int, *, also: bool) -> list[str]:
    """One sentence for branches of which the same heads keep every r-th token, if there are any."""
    lengths: dict[int, dict[int, None]] = {}
    for length, rate in branches:
        lengths.setdefault(rate, {})[length] = None
    parts = []
    for rate, far in lengths.items():
        if rate > 1 and num_tokens in far and not any(length % rate for length in far if length < num_tokens):
            parts.append(f"1 in {rate} of all {num_tokens:,} tokens")
        elif rate > 1:
            parts.append(f"1 in {rate} tokens of each segment of {' or '.join(f'{length:,}' for length in far)}")
    subject = "these tokens" if len(parts) > 1 else parts[0] if parts else ""
    listed = f": {'; '.join(parts)}" if len(parts) > 1 else ""
    return [f"In {heads}, {subject}{' also' if also else ''} read each other{listed}."] * bool(parts)


def why_not_connected(pattern: Any, num_tokens: int, num_kv_heads: int) -> str | None:
    """What a causal model loses under a pattern that is not connected, and the cure; None for a connected pattern."""
    boundary = pattern.first_uncrossed_boundary(num_tokens, num_kv_heads)
    if boundary is None:
        return None
    most = min((pattern.run_of_neighbours + 1) // 2, num_kv_heads)
    rate = max(rate for rate in range(1, most + 1) if num_kv_heads % rate == 0)  # other rates may leave tokens without a head
    far = f"a branch as long as the sequence at a rate of at most {rate} that divides the {num_kv_heads} key/value heads"
    cure = f", or add {far}" if pattern.heads == "all" and rate > 1 else ""
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
    longest, near = max(pattern.segment_lengths, default=0), pattern.split("describe")[1]
    length = f"The longest segment has {longest:,} of {num_tokens:,} tokens" if longest else "There are no segments"
    offsets_by_rate = [(r, pattern.kept_offsets(i, num_kv_heads)) for i, r in enumerate(pattern.dilation_rates)]
    lost = [str(r) for r, offsets in offsets_by_rate if offsets.start > 0 or offsets.stop < min(r, num_tokens)]
    cure = f"; use rates that divide the {num_kv_heads} key/value heads" if pattern.heads == "all" else ""
    limit = CPU_TOKENS[num_kv_heads >= 8]
    short = f"Too short: dense attention is faster on a CPU below about {limit} tokens, and on a GPU maybe below {GPU_TOKENS:,}."
    long = f"Long enough for a CPU; on a GPU dense attention may be faster below {GPU_TOKENS:,} tokens."
    longer = "Long enough: dilated attention can be faster than dense attention on a CPU and on a GPU."
    speed = short if num_tokens < limit else long if num_tokens < GPU_TOKENS else longer
    spans = "The longest segment spans the sequence." if longest >= num_tokens else "Each token reads the whole sequence."
    sentences = [
        f"{100 * pairs / dense:.3g} % of dense attention.",
        reads(pattern, num_tokens, num_kv_heads, is_causal=is_causal),
        spans if max(longest, *near) >= num_tokens else f"{length}: add a segment as long as the sequence.",
        f"At rate {', '.join(lost)}, some tokens are kept by no head{cure}."
        if lost
        else "At every rate, the heads together keep all tokens.",
        speed if pairs < dense else "Not faster than dense attention: it computes as many pairs or more.",
    ]
    if is_causal:
        text = connection(pattern, num_tokens, num_kv_heads)
        sentences.append(f"{text[0].upper()}{text[1:]}.")
    return sentences
