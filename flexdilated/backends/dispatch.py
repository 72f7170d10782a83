"""The backends that compute whole sequences, each a function of `(q, k, v, call)`, and the choice of one for a call."""

from __future__ import annotations

import torch
from torch import Tensor

from flexdilated import reference
from flexdilated.backends import select
from flexdilated.backends.autograd import functions, portable
from flexdilated.backends.dense import fused_op
from flexdilated.backends.flex import backend as flex
from flexdilated.core import shifted
from flexdilated.core.call import Call, documents, refuse_compiled_borders
from flexdilated.core.functorch import is_differentiated, is_mapped
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
    if call.pattern.zero_padding and not of_onnx and shifted.is_shifted(q.shape[1], call):
        return shifted.attend_shifted(q, k, v, call.replaced(backend=requested), attend_whole)
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
