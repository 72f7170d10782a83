"""Positions of tokens in their documents, from the library's masks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, create_causal_mask

from flexdilated.core.tracing import holds_values
from flexdilated.hub.transformers.patterns import NAME

RISES = "_dilated_rises"  # the attribute of positions that were found to rise, which all layers are given
CAN_READ_MASKS = "allow_is_causal_skip" in inspect.signature(create_causal_mask).parameters  # before, static caches say it too


def dilated_attention_positions(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """The mask function of the transformers library. It returns positions in documents instead of a mask.

    Positions count the real tokens of a row, so padding does not change segments or windows. The transformers library defines the
    signature, and passes options of other mask functions, which are ignored.

    Args:
        batch_size: B.
        q_length: Queries.
        kv_length: Keys, unwritten rows of a static cache included.
        q_offset: Tokens before the first query.
        kv_offset: Tokens before the first key.
        mask_function: Causal or bidirectional, with or without packed documents.
        attention_mask: `(B, tokens)`, True or 1 at real tokens; keys after its end are not real.
        local_size: Of a sliding window or chunks. If it is less than all keys seen, layers with such a mask raise an error.
        use_vmap: Must be False: the library sets it for mask functions of a model's own.
        device: Device of the result.
        **options: For other mask functions.

    Returns:
        None where queries and keys are the same real tokens of one document. Otherwise `(B, 1, 1, keys + q_length)` int64: the
        position of every key, then of every query; -1 at keys to ignore. Keys after the last query are left out where none was
        written before. Packed documents have a second row `(B, 1, 2, ...)`: the number of the document. `(B, 1, 0, local_size)`
        where a window hides keys: models make such masks whether or not a layer reads them. After tokens that a `DilatedCache`
        has seen, only the new tokens: `(B, 1, 1, q_length)`, -1 at padding, or `(B, 1, 1, 0)` where there is no padding.

    Raises:
        ValueError: If the mask has other dims than two, or, without a cache, more or fewer columns than there are tokens.
        NotImplementedError: If the model asks for a mask function of its own, or reads its mask itself, or if there is padding
            among the keys of other queries.
        RuntimeError: If `position_ids` pack documents inside `torch.compile`, where they cannot be read.
    """
    if local_size is not None:
        if local_size < kv_offset + kv_length:
            return torch.empty(batch_size, 1, 0, local_size, dtype=torch.int64, device=device)
        if "allow_is_bidirectional_skip" in options:  # which the library says of these alone; their windows are other functions
            mask_function = bidirectional_mask_function
    if use_vmap:
        raise NotImplementedError(f"mask functions of a model's own must be absent with {NAME!r} attention, got one")
    if CAN_READ_MASKS and mask_function is causal_mask_function and q_length > 1 and not options.get("allow_is_causal_skip", True):
        # Neither documents nor a function of its own make the library say so: the model does.
        raise NotImplementedError(
            f"layers must leave their mask to the attention with {NAME!r} attention, got a model that reads it, as indexers do "
            "that choose keys for each query"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must have shape (B, N) with {NAME!r} attention, got {tuple(attention_mask.shape)}")
    if mask_function is bidirectional_mask_function and kv_length != q_length:
        if attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all())):
            return None  # of a layer that attends otherwise, as one that pools: dilated ones refuse it
        raise NotImplementedError(
            f"attention_mask must be None with {NAME!r} attention where queries and keys are not the same tokens, got padding "
            f"among {kv_length} keys of {q_length} queries"
        )
    is_first = isinstance(q_offset, int) and q_offset == 0  # that of a static cache is a tensor
    if attention_mask is not None and is_first and attention_mask.shape[1] == kv_length != q_length:
        # Without a cache the library takes the keys to be as many as the mask has columns.
        raise ValueError(f"attention_mask must have a column for each of the {q_length} tokens, got {kv_length}")
    if kv_offset:
        if kv_length != q_length:
            raise NotImplementedError(f"the cache must hold every token from the first, got a first key at {kv_offset}")
        return _new_tokens(attention_mask, batch_size, q_length, kv_offset, device)
    packed = mask_function not in (causal_mask_function, bidirectional_mask_function)
    compiling = torch.compiler.is_compiling()
    documents = _documents(mask_function, batch_size, kv_length, device) if packed else None
    if local_size is not None and attention_mask is not None:
        documents = None  # chunks count from the first real token; the library packs only where there is no mask
    if documents is not None and compiling:
        torch._assert_async(
            (documents == 0).all(),
            "position_ids must be None, or not pack documents, inside torch.compile; cu_seq_lens_q and cu_seq_lens_k pack them",
        )
        documents = None
    if documents is not None and not bool(documents.any()):
        documents = None
    num_keys = kv_length
    if mask_function is not bidirectional_mask_function and not (compiling and isinstance(q_offset, Tensor)) and int(q_offset) == 0:
        num_keys = min(kv_length, q_length)  # the rest of a static cache comes after the queries
    keys = torch.arange(num_keys, device=device).expand(batch_size, -1)
    if documents is not None:
        starts = torch.where(F.pad(documents.diff(dim=-1), (1, 0), value=1) > 0, keys, 0).cummax(-1).values
        rows = torch.stack((keys - starts, documents), dim=1)[:, None]
        return torch.cat((rows, rows), dim=-1)
    queries = torch.arange(q_length, device=device) + q_offset
    if attention_mask is None:
        real = keys <= queries[-1]
    else:
        real = attention_mask.to(device=device, dtype=torch.bool)[:, :num_keys]
        real = F.pad(real, (0, num_keys - real.shape[1]))
    if kv_length == q_length and (attention_mask is None or (not compiling and bool(real.all()))):
        return None
    positions = real.cumsum(-1) - 1
    return torch.cat((torch.where(real, positions, -1), positions.index_select(1, queries)), dim=-1)[:, None, None]


def _new_tokens(
    attention_mask: Tensor | None, batch_size: int, num_tokens: int, num_seen: int, device: torch.device | str
) -> Tensor:
    none = torch.empty(batch_size, 1, 1, 0, dtype=torch.int64, device=device)
    if attention_mask is None:
        return none
    real = attention_mask.to(device=device, dtype=torch.bool)[:, num_seen : num_seen + num_tokens]
    real = F.pad(real, (0, num_tokens - real.shape[1]))
    if not torch.compiler.is_compiling() and bool(real.all()):
        return none
    return torch.where(real, 0, -1)[:, None, None]


def _documents(mask_function: Callable[..., Tensor], batch_size: int, num_tokens: int, device: torch.device | str) -> Tensor:
    """`(B, N)` number of the document of each token: a token opens one when it does not see the token before it."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    rows = torch.arange(batch_size, device=device)[:, None]
    later = torch.arange(1, num_tokens, device=device)[None]
    joined = mask_function(rows, zero, later, later - 1).expand(batch_size, -1)
    sees_later = mask_function(rows, zero, later - 1, later).any()
    if torch.compiler.is_compiling():
        torch._assert_async(~sees_later, "mask functions must be causal or bidirectional with flexdilated attention")
    elif bool(sees_later):
        raise NotImplementedError(
            f"mask functions must be causal or bidirectional with {NAME!r} attention, got one that looks ahead"
        )
    return F.pad((~joined).long(), (1, 0)).cumsum(-1)


def real_first(real: Tensor) -> tuple[Tensor, Tensor]:
    """Indices `(B, N)` that move the real tokens of each row to the front, in order, and indices that move them back."""
    back = torch.where(real, real.cumsum(-1), real.sum(-1, keepdim=True) + (~real).cumsum(-1)) - 1
    return torch.empty_like(back).scatter(1, back, torch.arange(real.shape[1], device=real.device).expand_as(back)), back


def moved(x: Tensor, index: Tensor) -> Tensor:
    """`x` `(B, N, ...)`, reordered: token i of row b of the result is token `index[b, i]` of row b."""
    # `take_along_dim` would make a graph for every N.
    return x.gather(1, index.view(*index.shape, *(1,) * (x.dim() - 2)).expand(x.shape))


def refuse_documents(position_ids: Any, mask: Tensor | None, num_tokens: int, *, is_causal: bool) -> None:
    """Raise NotImplementedError for positions that pack documents where the library does not detect documents.

    It looks for documents in causal models that have neither a mask nor a cache. `position_ids` `(B or 1, num_tokens)` are read
    once for all layers; other shapes (several axes) are not checked. `mask` is None, or `(B, 1, 1, ...)`: among its first
    `num_tokens`, -1 is padding. Positions of neighbouring real tokens must differ by 1; positions of padding are not checked.
    """
    if not _are_read(position_ids, num_tokens):
        return
    jumps = position_ids.diff(dim=-1) != 1
    if mask is not None and mask.shape[3] > 0:
        real = mask[:, 0, 0, :num_tokens] >= 0
        jumps = jumps & (real[:, 1:] & real[:, :-1]).to(jumps.device)
    if bool(jumps.any()):
        where, remedy = " and a cache or padding", "use_cache=False and no padding, or "
        if not is_causal:
            where, remedy = " that is not causal", ""
        raise NotImplementedError(
            f"position_ids must rise by 1 with {NAME!r} attention{where}, got others: to pack documents pass {remedy}"
            "cu_seq_lens_q and cu_seq_lens_k"
        )
    setattr(position_ids, RISES, _version(position_ids))


def _are_read(position_ids: Any, num_tokens: int) -> TypeGuard[Tensor]:
    """Whether positions of tokens must be read: they have one axis and values, and were not found to rise before."""
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != num_tokens or num_tokens < 2:
        return False
    if torch.compiler.is_compiling() or not holds_values(position_ids):
        return False
    version = _version(position_ids)
    return version is None or getattr(position_ids, RISES, None) != version


def _version(positions: Tensor) -> int | None:
    return None if positions.is_inference() else positions._version


def borders_of_positions(position_ids: Any, q: Tensor) -> Tensor | None:
    """`cu_seqlens` over the flattened batch, of positions beside a mask of ones, where the library does not look for documents."""
    if not _are_read(position_ids, q.shape[1]):
        return None
    jumps = position_ids.diff(dim=-1) != 1
    if not bool(jumps.any()):
        setattr(position_ids, RISES, _version(position_ids))
        return None
    starts = F.pad(jumps, (1, 0), value=True).expand(q.shape[0], -1).flatten()
    return F.pad(starts.nonzero()[:, 0], (0, 1), value=starts.shape[0]).to(q.device)


def borders_of(mask: Tensor | None, q: Tensor, options: Mapping[str, Any]) -> Tensor | None:
    """`cu_seqlens` of packed documents over the flattened batch, or None."""
    query_borders, key_borders = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    mask_borders = None
    if mask is not None and mask.shape[2] == 2:
        positions = mask[:, 0, 0, : q.shape[1]].flatten()
        mask_borders = F.pad((positions == 0).nonzero()[:, 0], (0, 1), value=positions.shape[0])
    if query_borders is None and key_borders is None:
        return mask_borders
    if query_borders is None or key_borders is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must come together, got one of them")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q must come with one row of tokens, got batch size {q.shape[0]}")
    if mask is not None and mask_borders is None:
        raise ValueError("cu_seq_lens_q must come without padding, got an attention_mask with padding too")
    for name, borders in (("cu_seq_lens_k", key_borders), ("position_ids", mask_borders)):
        if borders is None or borders is query_borders:
            continue
        if torch.compiler.is_compiling():  # documents told by position_ids are refused there
            if query_borders.shape != borders.shape:
                raise ValueError(
                    f"cu_seq_lens_q must have as many borders as {name}={borders.shape[0]}, got {query_borders.shape[0]}"
                )
            torch._assert_async((query_borders == borders).all(), f"cu_seq_lens_q must have the borders of {name}")
            continue
        if query_borders.tolist() != borders.tolist():
            raise ValueError(f"cu_seq_lens_q must have the borders of {name}={borders.tolist()}, got {query_borders.tolist()}")
    return query_borders
