"""What attends to what: the dilated pattern, its branches and their offsets, in plain integers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from flexdilated.core.boundaries import first_uncrossed
from flexdilated.core.branch import Branch, GlobalTokens, HeadRun, Kept, Near, Segments, Window, ceil_div, split_kinds
from flexdilated.core.description import describe
from flexdilated.core.integers import as_integer, at_least_one, index_below, integer_tuple
from flexdilated.core.keywords import takes_num_kv_heads
from flexdilated.core.pattern_svg import branches_svg
from flexdilated.core.presets import FIRST_TOKENS, causal_sizes, check_branches, gigapath_lengths

Heads = Literal["all", "grouped"]
Offsets = Literal["blocked", "interleaved"]

HEADS: tuple[Heads, ...] = ("all", "grouped")
OFFSETS: tuple[Offsets, ...] = ("blocked", "interleaved")

MAX_LENGTH = 2**40  # of a segment: positions and strides, which are multiples of rates, fit in 64 bits
MAX_BRANCHES = 256  # masks, plans and launches take time with each, and published patterns have a handful
FORWARD, BACKWARD = 4, 10  # floating-point operations per pair and element of a head: 2 and 5 products of matrices


@dataclass(frozen=True)
class DilatedPattern:
    """Segment-local dilated attention with one or more branches, as a frozen value of plain integers.

    >>> pattern = DilatedPattern((4, 16), (1, 4))
    >>> [pattern.offset(1, head, num_kv_heads=8) for head in range(8)]  # of the branch at rate 4
    [0, 0, 1, 1, 2, 2, 3, 3]

    Branch `i` cuts the sequence in segments of `w_i` tokens and keeps, for head `h`, the positions `p` with `(p % w_i) % r_i ==
    offset(i, h)`. Kept queries attend to kept keys of their own segment. A sliding window and the global tokens are seen in all
    heads. All branches share one softmax: a pair that two branches of segments join counts twice, and a pair of the window or of
    the global tokens counts once.
    Source: LongNet, arXiv 2307.02486, sections 2.2-2.3; offsets and zero padding as published in torchscale.

    Args:
        segment_lengths: Tokens per segment, one length per branch, each in `[1, 2**40]`; it may exceed the sequence. May be
            empty if there is a window or a global token.
        dilation_rates: Every r-th token of a segment is kept, one rate per branch, `1 <= r <= w`.
        window: Size w of a sliding window, in `[1, 2**40]`, or None. A causal query sees itself and the w - 1 tokens before it;
            in a call that is not causal, also the w - 1 tokens after it. This is `sliding_window=w` in transformers, and
            `window_size=(w - 1, 0)` or `(w - 1, w - 1)` in flash-attn. A window ends at the boundary of a packed document.
        global_tokens: Number g of first tokens of each document, in `[0, 2**40]`, that every query sees. In a call that is not
            causal they also see every key. Models that were trained dense need them (StreamingLLM, arXiv 2309.17453).
        heads: `"all"`: every head runs every branch (LongNet). `"grouped"`: each branch has a contiguous group of (key/value)
            heads, the first `H % K` groups one head larger; offset `i % r_i`; tokens that are not kept give 0. All heads run a
            window and see the global tokens.
        offsets: Which residue a head keeps when `heads="all"`. `"blocked"`: `h // ceil(H / r)` (torchscale, GigaPath, LongViT).
            `"interleaved"`: `h % r` (the text of the paper).
        zero_padding: Reproduce torchscale's zero keys: keys and values are padded with zeros to whole segments and whole rates,
            and those keys take part in non-causal softmaxes. Where a rate does not divide its segment length, torchscale also
            shifts the outputs of several segments; this is reproduced in one process, and raises an error over ranks. Not with a
            window or global tokens, which torchscale has not.
        detach_weights: Reproduce torchscale's gradient, which treats the mixing weights of the branches as constants. Not with a
            window or global tokens.

    Raises:
        ValueError: If there is no branch, the tuples differ in length or hold more than 256, a number is out of range, a rule is
            unknown, or one of torchscale's rules comes with a window or global tokens.
        TypeError: If a number is not an integer, or a flag is not a bool.
    """

    segment_lengths: tuple[int, ...] = ()
    dilation_rates: tuple[int, ...] = ()
    window: int | None = field(default=None, kw_only=True)
    global_tokens: int = field(default=0, kw_only=True)
    heads: Heads = field(default="all", kw_only=True)
    offsets: Offsets = field(default="blocked", kw_only=True)
    zero_padding: bool = field(default=False, kw_only=True)
    detach_weights: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "segment_lengths", integer_tuple("segment_lengths", self.segment_lengths))
        object.__setattr__(self, "dilation_rates", integer_tuple("dilation_rates", self.dilation_rates))
        if self.window is not None:
            object.__setattr__(self, "window", at_least_one("window", self.window))
        object.__setattr__(self, "global_tokens", as_integer("global_tokens", self.global_tokens))
        check_branches(self, MAX_LENGTH, MAX_BRANCHES)
        for name, value, choices in (("heads", self.heads, HEADS), ("offsets", self.offsets, OFFSETS)):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {value!r}")

    @classmethod
    def longnet(cls) -> DilatedPattern:
        """The five branches of the LongNet paper (arXiv 2307.02486, section 4.1): 2048..32768 at rates 1, 2, 4, 6, 12.

        >>> DilatedPattern.longnet().dilation_rates
        (1, 2, 4, 6, 12)
        """
        return cls((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))

    @classmethod
    def torchscale(cls, segment_lengths: Iterable[int], dilation_rates: Iterable[int]) -> DilatedPattern:
        """A pattern under torchscale's rules: blocked offsets, zero keys in the softmax, constant mixing weights.

        >>> DilatedPattern.torchscale((8, 16), (1, 2)).zero_padding
        True
        """
        return cls(segment_lengths, dilation_rates, zero_padding=True, detach_weights=True)  # type: ignore[arg-type]

    @classmethod
    def grouped(
        cls, segment_lengths: Iterable[int], dilation_rates: Iterable[int], *, window: int | None = None, global_tokens: int = 0
    ) -> DilatedPattern:
        """A pattern in which each branch has its own contiguous group of heads, as in the popular ports; all heads run a window.

        >>> list(DilatedPattern.grouped((8, 16), (1, 2)).head_range(branch=1, num_kv_heads=4))
        [2, 3]
        """
        options: dict[str, Any] = {"window": window, "global_tokens": global_tokens, "heads": "grouped"}
        return cls(segment_lengths, dilation_rates, **options)  # type: ignore[arg-type]

    @classmethod
    @takes_num_kv_heads
    def causal(
        cls,
        seq_len: int,
        num_kv_heads: int,
        *,
        window: int | None = None,
        rate: int | None = None,
        global_tokens: int = FIRST_TOKENS,
        budget: float | None = None,
    ) -> DilatedPattern:
        """A pattern for causal models: a window over near tokens, the first tokens, and one dilated branch over the whole sequence.

        >>> DilatedPattern.causal(8192, 8).branches
        (Segments(segment_length=8192, dilation_rate=4), Window(size=256), GlobalTokens(count=4))

        A token and head cost about `window + seq_len / (2 * rate**2)` keys on average; dense attention costs `seq_len / 2`.
        Information from every token reaches all later tokens after enough layers.

        Args:
            seq_len: Tokens of the longest sequence.
            num_kv_heads: Key/value heads, which may be fewer than query heads.
            window: Size of the window. Default: `seq_len / (2 * rate**2)`, so that window and far branch cost the same, but at
                least 256, rounded down to a multiple of a large power of two.
            rate: Rate of the far branch. Default: the largest rate up to 8 that leaves two heads to each residue, about
                `num_kv_heads / 2`; 2 for two or three heads. For one head, or at most 256 tokens, the pattern is dense attention.
            global_tokens: First tokens that every query sees.
            budget: Pairs to score, as a share of the pairs of dense attention, in (0, 1], in place of a window: the longest window
                within it.

        Raises:
            ValueError: If a number is out of range, a residue has no head, `window` is 1 at a rate above 1 or comes with a budget,
                or a window of 256 tokens exceeds the budget.
            TypeError: If a number has the wrong type.
        """
        seq_len, num_kv_heads = at_least_one("seq_len", seq_len), at_least_one("num_kv_heads", num_kv_heads)
        if seq_len > MAX_LENGTH:
            raise ValueError(f"seq_len must be at most {MAX_LENGTH}, got {seq_len}")

        def share(rate: int, window: int) -> float:
            pattern = cls((seq_len,), (rate,), window=window, global_tokens=global_tokens)
            return pattern.count_pairs(seq_len, num_kv_heads, is_causal=True) / (num_kv_heads * seq_len * (seq_len + 1) // 2)

        rate, window = causal_sizes(seq_len, num_kv_heads, window, rate, share, budget)
        pattern = cls((seq_len,), (rate,), window=window or seq_len, global_tokens=global_tokens)
        return pattern if window else cls((seq_len,), (1,))

    @classmethod
    def gigapath(cls, max_wsi_size: int = 262144, tile_size: int = 256) -> DilatedPattern:
        """The pattern of Prov-GigaPath's slide encoder for slides of `max_wsi_size` pixels cut in tiles of `tile_size` pixels.

        >>> DilatedPattern.gigapath().segment_lengths
        (1024, 5792, 32768, 185363, 1048576)

        Five lengths, evenly spaced in log2 from 1024 to the largest number of tiles, rounded down; rates 1, 2, 4, 8, 16;
        torchscale's rules. The default gives 1024, 5792, 32768, 185363, 1048576.

        Raises:
            ValueError: If the slide is not at least four tiles wide.
            TypeError: If a number is not an integer.
        """
        return cls.torchscale(gigapath_lengths(max_wsi_size, tile_size), (1, 2, 4, 8, 16))

    def __repr__(self) -> str:
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        shown = [f"{field.name}={value!r}" if field.kw_only else repr(value) for field, value in values if value != field.default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def to_dict(self) -> dict[str, Any]:
        """The pattern as JSON types; `from_dict` is the inverse.

        >>> DilatedPattern((8,), (2,)).to_dict()['segment_lengths']
        [8]
        """
        optional = {"window": None, "global_tokens": 0}  # left out where unset, as versions without these fields write and read it
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values if n not in optional or v != optional[n]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DilatedPattern:
        """The pattern that `to_dict` wrote.

        >>> DilatedPattern.from_dict({'segment_lengths': [8], 'dilation_rates': [2]}).branches
        (Segments(segment_length=8, dilation_rate=2),)

        Raises:
            ValueError: If a key is unknown, or the lengths or rates are missing.
            TypeError: If the values are no mapping, or one has the wrong type.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"pattern must be a mapping, got {values!r}")
        names = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - names, key=str):
            raise ValueError(f"pattern keys must be among {sorted(names)}, got {unknown}")
        missing = sorted({"segment_lengths", "dilation_rates"} - set(values))
        if missing and values.get("window") is None and not values.get("global_tokens"):
            raise ValueError(f"pattern keys must include segment_lengths and dilation_rates, {missing} missing")
        return cls(**values)

    def _repr_svg_(self) -> str:
        """What a notebook shows: segments and window on the diagonal, and the numbers. `draw_pattern` draws who attends to whom."""
        rule = "grouped by branch" if self.heads == "grouped" else f"{self.offsets} offsets"
        flags = [name for name in ("zero_padding", "detach_weights") if getattr(self, name)]
        branches, near = self.split("the picture of a notebook")
        words = [f"window of {near.window:,} tokens"] * (near.window > 0)
        words += [f"first {near.global_tokens:,}"] * (near.global_tokens > 0)
        words += [f"{w:,} tokens, rate {r}" for w, r in branches]
        return branches_svg(branches, near.window, near.global_tokens, repr(self), [", ".join([rule, *flags]), *words])

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The branches of the pattern, first the segments, then the window, then the global tokens.

        The class of a branch is its kind: `Segments(segment_length, dilation_rate)`, `Window(size)` or `GlobalTokens(count)`.
        """
        segments = tuple(Segments(w, r) for w, r in zip(self.segment_lengths, self.dilation_rates))
        window = () if self.window is None else (Window(self.window),)
        return (*segments, *window, *((GlobalTokens(self.global_tokens),) if self.global_tokens else ()))

    def split(self, consumer: str) -> tuple[tuple[Segments, ...], Near]:
        """The branches of segments, and the pairs that count once.

        >>> DilatedPattern((8,), (2,), window=4).split("an example")
        ((Segments(segment_length=8, dilation_rate=2),), Near(window=4, global_tokens=0))

        Raises:
            NotImplementedError: If a branch is of another kind; the message names the kind and the consumer.
        """
        return split_kinds(self.branches, consumer)

    @property
    def detaches(self) -> bool:
        """Whether `detach_weights` changes a gradient: a head that runs one branch has a mixing weight of 1."""
        return self.detach_weights and self.heads == "all" and len(self.branches) > 1

    def kept(self, head: int, num_kv_heads: int, consumer: str) -> tuple[Kept, ...]:
        """The branches of segments that a head runs, in order, with its offsets. For code that also knows `split`'s near pairs.

        Raises:
            NotImplementedError: As `split`.
        """
        return tuple(
            Kept(length, rate, self.offset(i, head, num_kv_heads))
            for i, (length, rate) in enumerate(self.split(consumer)[0])
            if head in self.head_range(i, num_kv_heads)
        )

    def check_heads(self, num_kv_heads: int) -> None:
        """Raise if `heads="grouped"` has more branches than heads: some branches would never be computed.

        Raises:
            ValueError: If there is no head, or some branch would have none.
        """
        if num_kv_heads < 1:
            raise ValueError(f"num_kv_heads must be at least 1, got {num_kv_heads}")
        if self.heads == "grouped" and num_kv_heads < len(self.segment_lengths):
            raise ValueError(
                f"pattern must have at most one branch per key/value head={num_kv_heads} under heads='grouped', got "
                f"{len(self.segment_lengths)} branches; use more heads, fewer branches or heads='all'"
            )

    @takes_num_kv_heads
    def head_range(self, branch: int, num_kv_heads: int) -> range:
        """The heads that run a branch. Under grouped-query attention these are key/value heads.

        >>> DilatedPattern.grouped((8, 16), (1, 2)).head_range(0, num_kv_heads=5)
        range(0, 3)

        Raises:
            ValueError: If the pattern has no such branch, or more groups of heads than there are heads.
            TypeError: If a number is not an integer.
            NotImplementedError: As `split`.
        """
        branch, num_kv_heads = index_below("branch", branch, len(self.branches)), as_integer("num_kv_heads", num_kv_heads)
        self.check_heads(num_kv_heads)
        segments, _ = split_kinds(self.branches[branch : branch + 1], "head_range")
        if self.heads == "all" or not segments:
            return range(num_kv_heads)
        size, larger = num_kv_heads // len(self.segment_lengths), num_kv_heads % len(self.segment_lengths)  # a symbol has no divmod
        start = branch * size + min(branch, larger)
        return range(start, start + size + (branch < larger))

    @takes_num_kv_heads
    def offset(self, branch: int, head: int, num_kv_heads: int) -> int:
        """The first position that a head keeps in each segment of a branch, in `[0, dilation_rate)`; 0 for other kinds.

        >>> DilatedPattern((16,), (4,)).offset(0, head=7, num_kv_heads=8)
        3

        Raises:
            ValueError: If there is no such branch or head.
            TypeError: If a number is not an integer.
            NotImplementedError: As `split`.
        """
        branch, head = index_below("branch", branch, len(self.branches)), index_below("head", head, num_kv_heads)
        segments, _ = split_kinds(self.branches[branch : branch + 1], "offset")
        if not segments:
            return 0
        rate = segments[0].dilation_rate
        if self.heads == "grouped":
            return branch % rate
        if self.offsets == "interleaved":
            return head % rate
        return head // ceil_div(num_kv_heads, rate)

    @takes_num_kv_heads
    def head_runs(self, branch: int, num_kv_heads: int, within: range | None = None) -> tuple[HeadRun, ...]:
        """The heads of a branch gathered by offset, in ascending order of the offset.

        Args:
            branch: Which branch.
            num_kv_heads: Of the whole model.
            within: The consecutive heads that are held here; runs count heads from its start. Default: all of them.

        Raises:
            ValueError: If there is no such branch, or some of the heads held here do not exist.
        """
        if within is not None and not (within.step == 1 and within.start >= 0 and within.stop <= num_kv_heads):
            raise ValueError(f"within must hold consecutive heads in [0, {num_kv_heads}), got {within}")
        first = 0 if within is None else within.start
        by_offset: dict[int, list[int]] = {}
        for head in self.head_range(branch, num_kv_heads):
            if within is None or head in within:
                by_offset.setdefault(self.offset(branch, head, num_kv_heads), []).append(head - first)
        return tuple(
            HeadRun(offset, heads[0], heads[1] - heads[0] if len(heads) > 1 else 1, len(heads))
            for offset, heads in sorted(by_offset.items())
        )

    @takes_num_kv_heads
    def describe(self, num_tokens: int, num_kv_heads: int, *, is_causal: bool = False) -> str:
        """The pattern in sentences, one per line: its share of the pairs, what each token reads, and the rules for patterns.

        >>> DilatedPattern((16,), (4,)).describe(16, num_kv_heads=4).splitlines()[1]
        'In each head, 1 in 4 of all 16 tokens read each other; each key/value head keeps different tokens.'

        The rules: a segment as long as the sequence, a head for every token at every rate, enough tokens; if causal,
        no boundary that information does not cross. For arguments and errors see `count_pairs` and `check_heads`.
        """
        return "\n".join(describe(self, num_tokens, num_kv_heads, is_causal=is_causal))

    @takes_num_kv_heads
    def crosses_boundaries(self, num_tokens: int, num_kv_heads: int) -> bool:
        """Whether the pattern is connected: causal information from every token reaches all tokens well after it.

        >>> DilatedPattern((16, 64), (1, 2)).crosses_boundaries(64, 4), DilatedPattern((16,), (1,)).crosses_boundaries(64, 4)
        (True, False)

        Connected means: after enough layers, all heads together, every token has received information from every token that is at
        least `2 * r - 1` positions earlier. `r` is the largest rate of the branches that count. A branch counts if some head
        keeps each of its residues and `2 * r - 1 <= L`. `L` is the least common multiple of the lengths of the rate-1 branches.
        False may be wrong only where branches that do not count join the rest, with r above 64 or at more than 128 boundaries.
        A pattern with a window of 2 or more is connected, and every token receives information from all earlier ones.

        Args:
            num_tokens: Sequence length N.
            num_kv_heads: Key/value heads, which may be fewer than query heads.

        Raises:
            ValueError: If a number is below 1, or some branch would have no head.
            TypeError: If a number is not an integer.
        """
        return self.first_uncrossed_boundary(num_tokens, num_kv_heads) is None

    @takes_num_kv_heads
    def first_uncrossed_boundary(self, num_tokens: int, num_kv_heads: int) -> int | None:
        """The first position that stops `crosses_boundaries` from being true, or None for a connected pattern.

        >>> DilatedPattern((16,), (1,)).first_uncrossed_boundary(64, 4)
        16

        Position b is crossed if the tokens from `b` on receive information from all tokens at least `2 * r - 1` positions earlier.
        It is in `[1, N)`: the end of the sequence is no boundary. Without a rate-1 branch the answer is 1. Arguments and errors are
        those of `crosses_boundaries`.
        """
        num_tokens, num_kv_heads = at_least_one("num_tokens", num_tokens), at_least_one("num_kv_heads", num_kv_heads)
        self.check_heads(num_kv_heads)
        segments, near = self.split("crosses_boundaries")
        branches = [(*branch, self.kept_offsets(i, num_kv_heads)) for i, branch in enumerate(segments)]
        return first_uncrossed(branches, near, self.run_of_neighbours, num_tokens)

    @property
    def run_of_neighbours(self) -> int:
        """Length of the runs of tokens in which segments of rate 1 join each token to the next; 1 without such segments."""
        return math.lcm(*(length for length, rate in self.split("run_of_neighbours")[0] if rate == 1))

    def kept_offsets(self, branch: int, num_kv_heads: int) -> range:
        """The residues modulo the rate of a branch that some head keeps."""
        rate = self.dilation_rates[branch]
        if self.heads == "grouped":
            return range(branch % rate, branch % rate + 1)
        sharing = ceil_div(num_kv_heads, rate)  # heads of one offset
        return range(min(rate, num_kv_heads) if self.offsets == "interleaved" else ceil_div(num_kv_heads, sharing))

    @takes_num_kv_heads
    def first_token_without_head(self, num_tokens: int, num_kv_heads: int) -> int | None:
        """The first of the tokens that no head of any branch keeps; None if there is none among the first 1,024."""
        segments, near = self.split("first_token_without_head")
        if near.window:
            return None
        branches = [(w, r, self.kept_offsets(i, num_kv_heads)) for i, (w, r) in enumerate(segments)]
        is_kept = any(len(offsets) == r for _, r, offsets in branches)
        tokens = range(near.global_tokens, 0 if is_kept else min(num_tokens, 1024))
        return next((p for p in tokens if all(p % w % r not in offsets for w, r, offsets in branches)), None)

    @takes_num_kv_heads
    def count_pairs(self, num_tokens: int, num_kv_heads: int, *, is_causal: bool = False) -> int:
        """How many (query, key) pairs are scored, over all heads and branches, a pair that counts m times counted m times.

        >>> DilatedPattern((16,), (1,)).count_pairs(64, num_kv_heads=1), 64 // 16 * 16**2
        (1024, 1024)

        The useful work of the pattern: forward attention costs `4 * head_dim` floating-point operations per pair. Zero keys of
        `zero_padding` are not counted.

        Raises:
            ValueError: If a number is below 1.
            TypeError: If a number is not an integer, or `is_causal` not a bool.
        """
        if not isinstance(is_causal, bool):
            raise TypeError(f"is_causal must be a bool, got {is_causal!r}")
        num_tokens, num_kv_heads = at_least_one("num_tokens", num_tokens), at_least_one("num_kv_heads", num_kv_heads)
        segments, near = self.split("count_pairs")
        total = num_kv_heads * near.count_pairs(num_tokens, is_causal=is_causal)
        for branch, (length, rate) in enumerate(segments):
            for run in self.head_runs(branch, num_kv_heads):
                total += run.heads * Kept(length, rate, run.offset).count_pairs(num_tokens, is_causal=is_causal, near=near)
        return total
