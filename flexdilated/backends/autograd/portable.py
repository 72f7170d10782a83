"""The mixture in operators that every runtime has: one dense attention per branch, whatever the number of tokens.

For graphs that leave torch or Python. Everything else in the package is faster: here rows are gathered instead of viewed, and all
scores of a branch exist at once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flexdilated.backends.autograd.grids import LONGEST, Tile, locate, locate_keys, tiles
from flexdilated.core.branch import Kept, Near
from flexdilated.core.call import Call
from flexdilated.core.custom_op import Inputs, OpOptions
from flexdilated.core.lse import accumulated, mix_branches, normalised
from flexdilated.core.pattern import DilatedPattern


def attend_portable(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """`out` `(B, N, H, D)` and `lse` `(B, H, N)` of a checked call without functions; N may be a symbol.

    Raises:
        NotImplementedError: For packed documents, dropout, and torchscale's shifted positions.
    """
    return mixture(*Inputs(q, k, v, call.key_padding_mask, call.cu_seqlens), *call.op_options().encoded())


def mixture(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The operator `flexdilated::mixture` in portable operations: same arguments, same results."""
    inputs, op_options = Inputs(*arguments[:6]), OpOptions.decoded(arguments[6:])
    q, k, v, key_padding_mask = inputs[:4]
    _check(op_options.pattern, q.shape[1], inputs.cu_seqlens, op_options.dropout_p)
    global_tokens = op_options.pattern.global_tokens
    if global_tokens and _always(q.shape[1] <= global_tokens):  # every pair counts once
        op_options = op_options._replace(pattern=DilatedPattern((global_tokens,), (1,)))
    if key_padding_mask is not None:
        # What ignored keys and values hold must not matter, and 0 times NaN would.
        k, v = (x.masked_fill(key_padding_mask[:, :, None, None], 0.0) for x in (k, v))
    within = range(op_options.first_head, op_options.first_head + k.shape[2])
    parts = [
        _attend_tile(q, k, v, key_padding_mask=key_padding_mask, op_options=op_options, tile=tile, within=within)
        for tile in tiles(op_options.pattern, "portable programs", is_causal=op_options.is_causal)
        if tile.heads(op_options.pattern, op_options.num_kv_heads, within)
    ]
    return mix_branches(parts, q.dtype, detach_weights=op_options.pattern.detach_weights)


def _check(pattern: DilatedPattern, num_tokens: int, cu_seqlens: Tensor | None, dropout_p: float) -> None:
    if cu_seqlens is not None:
        raise NotImplementedError(
            "cu_seqlens must be None in a portable program, got borders, whose values decide about shapes; give each document as a "
            "sequence of its own"
        )
    if dropout_p > 0.0:
        raise NotImplementedError(f"dropout_p must be 0 in a portable program, got {dropout_p}; call eval() first")
    for length, rate in pattern.split("portable programs")[0]:
        if pattern.zero_padding and length % rate and not _always(num_tokens <= length):
            raise NotImplementedError(
                f"pattern must have rates that divide its segments with zero_padding=True in a portable program, got segments of "
                f"{length} at rate {rate} for more than {length} tokens; export with torch.export.Dim(max={length}), or use "
                "dataclasses.replace(pattern, zero_padding=False)"
            )


def _attend_tile(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, op_options: OpOptions, tile: Tile, within: range
) -> tuple[Tensor, Tensor]:
    """One tile's out `(B, N, H, D)` and lse `(B, N, H)`: 0 and -inf at tokens that a head does not keep.

    Whatever has a symbol for a size is made by indexing alone: whether it may be reshaped would depend on whether the symbol is 1.
    """
    pattern, (length, rate) = op_options.pattern, tile.block
    batch_size, num_tokens, group, device = q.shape[0], q.shape[1], q.shape[2] // k.shape[2], q.device
    # A longer segment is one segment of all tokens; where nothing says that it is longer, it is as if tokens followed.
    if not tile.is_first and _always(num_tokens <= (length if tile.window is None else tile.window.size)):
        length, tile = num_tokens, tile._replace(window=None)
    num_segments = 1 if tile.is_first else (num_tokens + length - 1) // length
    num_rows = (length + rate - 1) // rate
    if not isinstance(length, int):
        num_rows += 2  # that nothing sees: torch's product asks whether a symbol is at least 2, and the answer must be yes
    kv_heads = tile.heads(pattern, op_options.num_kv_heads, within)
    first, lanes = (kv_heads.start - within.start) * group, len(kv_heads) * group
    offset = torch.cat(
        [torch.full((group,), pattern.offset(tile.branch, head, op_options.num_kv_heads), device=device) for head in kv_heads]
    )

    softmax = torch.arange(batch_size * num_segments * lanes, device=device)[:, None]  # (Z, 1): batch, segment, lane
    lane, batch = softmax % lanes, softmax // (num_segments * lanes)
    start = (softmax // lanes - batch * num_segments) * length  # not by %: the ONNX exporter has none for symbols
    kept_rows, row = Kept(length, rate, offset[lane]), torch.arange(num_rows, device=device)
    low, high = (0, 0) if tile.window is None else tile.window.band(is_causal=op_options.is_causal)
    key_row = torch.arange(low, num_rows + high, device=device)
    if tile.keys is not None:
        key_row = torch.arange(num_tokens + 2 if tile.keys.stop == LONGEST else tile.keys.stop, device=device)
    places = locate(row, start, kept_rows, num_tokens)  # (Z, R)
    token, is_padding = locate_keys(tile, key_row, start, kept_rows, num_tokens)
    pairs = places[0][:, :, None], token[:, None]
    query, key = (row[:, None], key_row) if tile.keys is None else pairs

    def rows(x: Tensor, head: Tensor, token: Tensor, is_padding: Tensor) -> Tensor:
        return x[batch, token, head].to(accumulated(x.dtype)).masked_fill(is_padding[..., None], 0.0)  # (Z, R, D)

    visible = ~is_padding if key_padding_mask is None else ~(is_padding | key_padding_mask[batch, token])
    if pattern.zero_padding and not op_options.is_causal:
        # Rows after the last token are zero keys: those of a whole segment, or up to a multiple of the rate in a shorter one.
        is_longer = torch.full((), num_tokens, device=device) > length
        visible = visible | is_padding & (is_longer | (row * rate + offset[lane] < num_tokens + -num_tokens % rate))
    visible = visible[:, None]
    if op_options.is_causal:
        visible = visible & (key <= query)
    if tile.window is not None:
        visible = visible & Near(tile.window.size).joins(query, key)
    if tile.apart:
        visible = visible & ~tile.apart.joins(*pairs)

    head = first + lane
    scores = torch.bmm(rows(q, head, *places), rows(k, head // group, token, is_padding).transpose(1, 2)) * op_options.scale
    weights, lse = normalised(scores.masked_fill(~visible, -math.inf), dim=-1)
    out, lse = torch.bmm(weights, rows(v, head // group, token, is_padding)), lse[..., 0]

    n, lane = torch.arange(num_tokens, device=device)[:, None], torch.arange(lanes, device=device)
    segment = torch.zeros_like(n) if tile.is_first else n // length
    softmax = (torch.arange(batch_size, device=device)[:, None, None] * num_segments + segment) * lanes + lane  # (B, N, h)
    position = n - segment * length - offset  # (N, h), relative to the first kept position
    is_kept, row = (position >= 0) & (position % rate == 0), position.clamp(min=0) // rate
    if tile.is_first:
        is_kept, row = is_kept & (position < length), row.clamp(max=num_rows - 1)
    out = out[softmax, row].masked_fill(~is_kept[..., None], 0.0)
    lse = lse[softmax, row].masked_fill(~is_kept, -math.inf)
    head_padding = (first, q.shape[2] - first - lanes)  # the heads that run other branches
    return torch.nn.functional.pad(out, (0, 0, *head_padding)), torch.nn.functional.pad(lse, head_padding, value=-math.inf)


def _always(condition: bool) -> bool:
    """Whether a comparison is known to be true for all values of its symbols. Adds no guard to the graph."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # not loaded with the package

    return statically_known_true(condition)
