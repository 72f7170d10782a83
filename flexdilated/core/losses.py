"""What attention under a pattern loses: tokens and residues without a head, and information across boundaries of segments."""

from __future__ import annotations

import sys
import traceback
import warnings
from functools import lru_cache
from itertools import takewhile

import torch

from flexdilated.core.description import why_not_connected
from flexdilated.core.pattern import DilatedPattern


def check_losses(pattern: DilatedPattern, num_tokens: int | None, num_kv_heads: int, is_causal: bool) -> None:
    """Warn once about tokens or residues without a key/value head, and about lost causal information. Compiled code does not warn.

    Patterns with zero keys do not warn: published weights need them. `num_tokens` None: the longest segment. For errors see
    `DilatedPattern.check_heads`.
    """
    pattern.check_heads(num_kv_heads)
    num_tokens = max(pattern.segment_lengths, default=2) if num_tokens is None else num_tokens
    if not torch.compiler.is_compiling() and type(num_tokens) is int:
        warn_of_losses(pattern, num_tokens, num_kv_heads, is_causal)


@lru_cache(maxsize=4096)
def warn_of_losses(pattern: DilatedPattern, num_tokens: int | None, num_kv_heads: int, is_causal: bool) -> None:
    """`check_losses` without a check of the number of heads. `num_tokens` None: packed documents, whose lengths are not known."""
    if pattern.zero_padding:
        return
    near = "" if pattern.window is None else f" and a window of {pattern.window}"
    near += f" and {pattern.global_tokens} global tokens" if pattern.global_tokens else ""
    name = f"pattern with segments {pattern.segment_lengths} at rates {pattern.dilation_rates}{near}"
    if num_tokens is not None and (token := pattern.first_token_without_head(num_tokens, num_kv_heads)) is not None:
        cure = f", or a rate that divides the {num_kv_heads} key/value heads" if pattern.heads == "all" else ""
        _warn(
            f"{name} has no key/value head for some tokens, the first is token {token}: their output is 0, no query reads them; "
            f"add a branch of rate 1{cure}"
        )
        return
    counts = [(i, r, r - len(pattern.kept_offsets(i, num_kv_heads))) for i, r in enumerate(pattern.dilation_rates)]
    lost = [f"{count} of the {r} residues of branch {i}" for i, r, count in counts if count]
    if lost and pattern.heads == "all":
        _warn(
            f"{name} has no key/value head for {', '.join(lost)}: no query reads these tokens in that branch; use "
            f"DilatedPattern.causal(seq_len, num_kv_heads={num_kv_heads}), or rates that divide the {num_kv_heads} key/value heads "
            "(not the query heads)"
        )
    if num_tokens is None or not is_causal:
        return
    if pattern != DilatedPattern.longnet() and (reason := why_not_connected(pattern, num_tokens, num_kv_heads)) is not None:
        _warn(f"{name} is {reason}")
    elif num_tokens > (longest := max(pattern.segment_lengths, default=num_tokens)):
        _warn(
            f"{name} has no segment longer than {longest} tokens: tokens from position {longest} on see only their own "
            f"segment{near}; make the longest segment at least as long as the sequence, as "
            f"DilatedPattern.causal(seq_len, {num_kv_heads}) does"
        )


@lru_cache(maxsize=4096)  # the text does not depend on the number of tokens
def _warn(text: str) -> None:
    frames = takewhile(
        lambda frame: frame[0].f_globals.get("__name__", "").startswith(("flexdilated.", "torch.")),
        traceback.walk_stack(sys._getframe()),
    )
    warnings.warn(text, stacklevel=1 + sum(1 for _ in frames))
