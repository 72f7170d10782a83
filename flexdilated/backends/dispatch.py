"""The backends that compute whole sequences, each a function of `(q, k, v, call)`, and the choice of one for a call.

torchscale's shifted positions are several such calls. With `zero_padding=True` torchscale pads each segment to a multiple of the
rate, `ceil(w / r) r` tokens, and never removes the padding: row `n` of the padded sequence is the output of token `n`. So a branch
whose rate does not divide its segments is attention over a longer sequence, with zeros in q, k and v after each whole segment. Its
first N rows are the outputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexdilated import reference
from flexdilated.backends import select
from flexdilated.backends.autograd import functions, portable
from flexdilated.backends.dense import fused_op
from flexdilated.backends.flex import backend as flex
from flexdilated.core.call import Call, documents, refuse_compiled_borders
from flexdilated.core.checks import refuse_zero_keys
from flexdilated.core.functorch import is_differentiated, is_mapped
from flexdilated.core.lse import mix_branches
from flexdilated.core.pieces import Documents, shifted_branches
from flexdilated.core.tracing import writes_onnx


def attend_whole(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    """`out` `(B, N, H, D)` and, where it is asked for or costs nothing, `lse` `(B, H, N)` of a checked call."""
    request = call.dispatch_key(q, k, v)
    choice = select(call.backend, request, divided=call.num_kv_heads != k.shape[2])
    requested, call = call.backend, call.replaced(backend=choice.backend)
    if call.backend == "reference":
        return _reference(q, k, v, call)
    traced = torch.compiler.is_compiling()
    of_onnx = (traced or torch.jit.is_tracing()) and writes_onnx()  # type: ignore[attr-defined]
    if call.pattern.zero_padding and not of_onnx and is_shifted(q.shape[1], call):
        return attend_shifted(q, k, v, call.replaced(backend=requested))
    if call.backend == "flex" and requested == "auto" and request.modified:
        return _functions(q, k, v, call)
    if call.backend == "flex" and not of_onnx:
        return flex.attend_flex(q, k, v, call)
    if request.modified or (request.transformed and not traced and not _is_by_sample(q, k, v, call)):
        return functions.attend_by_operations(q, k, v, call)
    return portable.attend_portable(q, k, v, call) if of_onnx else fused_op.attend_fused(q, k, v, call, choice)


def _is_by_sample(q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
    """Whether torch.func.vmap alone is at work, over borders: they can be read in an operator, called for each sample."""
    return call.cu_seqlens is not None and is_mapped(call.cu_seqlens) and not is_differentiated(q, k, v)


def _functions(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    """Run users' functions by flex if it can compile them; only trying it shows whether it can."""
    planned = call.cu_seqlens is not None and torch.compiler.is_compiling()  # by values that a graph has not
    if not planned and not writes_onnx():
        try:
            return flex.attend_flex(q, k, v, call)
        except NotImplementedError:
            if torch.compiler.is_compiling():
                raise
    return functions.attend_by_operations(q, k, v, call)


def _reference(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The definition, in the dtypes of the other backends."""
    refuse_compiled_borders(call, "backend='reference'")
    documents(call.cu_seqlens, q.shape[1])  # refuses borders that do not tile the tokens
    out, lse = reference.dilated_attention(
        q,
        k,
        v,
        call.pattern,
        is_causal=call.is_causal,
        scale=call.scale,
        key_padding_mask=call.key_padding_mask,
        cu_seqlens=call.cu_seqlens,
        score_mod=call.score_mod,
        mask_mod=call.mask_mod,
    )
    return out.to(q.dtype), lse if q.dtype == torch.float64 else lse.float()


# -- torchscale's shifted positions -----------------------------------------------------------------------------------------------


def is_shifted(num_tokens: int, call: Call) -> bool:
    """Whether torchscale shifts the outputs of a checked call of `num_tokens` tokens."""
    if not shifted_branches(call.pattern, num_tokens):
        return False
    if call.cu_seqlens is None:
        return True
    refuse_compiled_borders(call, "zero_padding=True and a rate that does not divide its segments")
    return any(shifted_branches(call.pattern, length) for _, length in documents(call.cu_seqlens, num_tokens))


def attend_shifted(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """`out` `(B, N, H, D)` and `lse` `(B, H, N)` of a checked call with shifted positions, by calls without."""
    num_tokens, pattern = q.shape[1], call.pattern
    if call.is_modified():
        refuse_zero_keys(num_tokens)
    spans = documents(call.cu_seqlens, num_tokens)
    shifted = shifted_branches(pattern, num_tokens)
    branch_results = [
        _attend_shifted_branch(q, k, v, call=call, branch=i, spans=spans) if i in shifted else _attend_branch(q, k, v, call, i)
        for i in range(len(pattern.branches))
        if _branch_heads(call, i, k.shape[2])
    ]
    results = [(out, lse.transpose(1, 2)) for out, lse in branch_results]
    return mix_branches(results, q.dtype, detach_weights=pattern.detach_weights)


def _attend_shifted_branch(q: Tensor, k: Tensor, v: Tensor, call: Call, branch: int, spans: Documents) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of one shifted branch."""
    length, rate = call.pattern.split("torchscale's shift")[0][branch]
    sizes = [size + (size // length * (-length % rate) if size > length else 0) for _, size in spans]
    lengths = list(call.pattern.segment_lengths)
    lengths[branch] = length + -length % rate
    borders, mask = call.cu_seqlens, call.key_padding_mask
    padded = call.replaced(
        pattern=replace(call.pattern, segment_lengths=tuple(lengths)),
        key_padding_mask=None if mask is None else _insert(mask, spans, length, rate),
        cu_seqlens=None if borders is None else F.pad(torch.tensor(sizes, device=borders.device).cumsum(0), (1, 0)).to(borders),
    )
    q, k, v = (_insert(x, spans, length, rate) for x in (q, k, v))
    out, lse = _attend_branch(q, k, v, padded, branch)
    padded_spans = [slice(sum(sizes[:i]), sum(sizes[:i]) + size) for i, (_, size) in enumerate(spans)]
    return torch.cat([out[:, span] for span in padded_spans], dim=1), torch.cat([lse[:, :, span] for span in padded_spans], dim=2)


def _branch_heads(call: Call, branch: int, kv_heads: int) -> range:
    """The key/value heads of the tensors that run a branch, as indices into the tensors."""
    assert call.num_kv_heads is not None
    heads = call.pattern.head_range(branch, call.num_kv_heads)
    return range(max(heads.start - call.first_head, 0), min(heads.stop - call.first_head, kv_heads))


def _attend_branch(q: Tensor, k: Tensor, v: Tensor, call: Call, branch: int) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of one branch of a call: 0 and -inf in heads that do not run it."""
    pattern, kv_heads = call.pattern, k.shape[2]
    held_heads = _branch_heads(call, branch, kv_heads)
    segments, _ = pattern.split("torchscale's shift")
    rules: dict[str, Any] = {"heads": "all", "detach_weights": False}
    if branch < len(segments):
        length, rate = segments[branch]
        alone = replace(pattern, segment_lengths=(length,), dilation_rates=(rate,), window=None, **rules)
    else:
        alone = replace(pattern, segment_lengths=(), dilation_rates=(), **rules)
    call = call.replaced(pattern=alone, return_lse=True)
    assert call.num_kv_heads is not None
    if pattern.heads == "grouped" and branch < len(segments):
        # All heads of the branch keep the same offset, as neighbouring blocked heads do in a model with `rate` times as many heads.
        heads, group = pattern.head_range(branch, call.num_kv_heads), q.shape[2] // kv_heads
        padding = (group * held_heads.start, group * (kv_heads - held_heads.stop))
        q = q[:, :, padding[0] : q.shape[2] - padding[1]]
        k, v = (x[:, :, held_heads.start : held_heads.stop] for x in (k, v))
        call = call.replaced(
            pattern=replace(alone, offsets="blocked"),
            first_head=len(heads) * pattern.offset(branch, heads.start, call.num_kv_heads)
            + held_heads.start
            + call.first_head
            - heads.start,
            num_kv_heads=len(heads) * rate,
        )
    out, lse = attend_whole(q, k, v, call)
    assert lse is not None
    if len(held_heads) == kv_heads:
        return out, lse
    return F.pad(out, (0, 0, *padding)), F.pad(lse, (0, 0, *padding), value=-torch.inf)


def _insert(x: Tensor, spans: Documents, length: int, rate: int) -> Tensor:
    """`x` `(B, N, ...)` with zeros after each whole segment of `length` tokens, up to a multiple of the rate."""
    parts = []
    for start, size in spans:
        num_whole = size // length if size > length else 0
        segments = x[:, start : start + num_whole * length].unflatten(1, (num_whole, length))
        padding = (0, 0) * (x.dim() - 2) + (0, -length % rate)  # `F.pad` takes the last dims first
        parts += [F.pad(segments, padding).flatten(1, 2), x[:, start + num_whole * length : start + size]]
    return torch.cat(parts, dim=1)
