"""The library's attention function: dilated attention under the pattern of a config."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from flexdilated.attention import attend
from flexdilated.core.call import Call, ScoreMod
from flexdilated.core.hardware import autocast_dtype
from flexdilated.core.tracing import uncached
from flexdilated.distributed.sharding import local_shard_lengths
from flexdilated.hub.transformers.cache import DilatedCacheLayer, layer_of
from flexdilated.hub.transformers.context import Context, context_of
from flexdilated.hub.transformers.heads import HeadShard, find_head_shard, sinks_here
from flexdilated.hub.transformers.patterns import NAME, check_type, pattern_of_layer, record_implementation, refuse_crossing
from flexdilated.hub.transformers.positions import borders_of, borders_of_positions, moved, real_first, refuse_documents
from flexdilated.masks.functions import checked_score_mod

# Options of a call that change what is computed, and what to say when one is set.
REFUSED = {
    "sliding_window": "the pattern says what is seen; set config.sliding_window above the longest sequence",
    "sinks": "dilated attention has one sink for each head, called s_aux, and none for each token",
    "position_bias": "dilated attention takes no bias of scores",
    "indices": "the pattern says what is seen",
    "block_indices": "the pattern says what is seen",
    "cache": "dilated attention has no paged cache; use a dynamic or static one",
    "block_table": "dilated attention has no paged cache; use a dynamic or static one",
    "output_attentions": "dilated attention never forms its weights; flexdilated.attention_map gives those of chosen queries",
}

# Options that leave the attention as it is, or are read here. Models hand on whatever they were called with.
KNOWN = {
    *("cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "position_ids", "seq_idx"),
    *("deterministic", "logits_to_keep", "num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict"),
    *("shard_lengths", "shift_labels", "token_type_ids", "use_cache"),
}


def dilated_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    first_head: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of the transformers library, with the pattern of `module.config.dilated_pattern`.

    Training, prefill and encoders run `dilated_attention`. With a `DilatedCache` the queries are scored against the rows that the
    pattern can still reach. With another cache that has more keys than there are queries, the queries are scored against all its
    rows, O(queries * keys), with the pattern as a mask. The result equals that of the full forward. The transformers
    library defines the signature. Known options that do not change attention are ignored; unknown options raise an error.

    If a call has a part of the model's heads, offsets and branches follow from the index of each head in the model. Under the
    library's tensor parallelism this index is read from the parameters of `module`. Other wrappers must pass `first_head`.

    Args:
        module: Its `config` contains the pattern; its `is_causal` is the default of `is_causal`.
        query: `(B, H, queries, D)`.
        key: `(B, Hkv, keys, D)`.
        value: As key; its head dim may be another.
        attention_mask: What `dilated_attention_positions` gave: None, or positions.
        dropout: Probability of dropping an attention weight.
        scaling: Multiplies the scores. Default: `D ** -0.5`.
        is_causal: Whether a query sees only keys at its own position and before.
        first_head: Index in the model of the first query head here. Default: as `module` and its config say.
        s_aux: Sinks, `(H,)`: the score of one more key, of value 0, that every query of a head sees once.
        softcap: Caps scores at `softcap * tanh(score / softcap)`, as Gemma 2 does.
        **options: `cu_seq_lens_q`, `cu_seq_lens_k`: borders of packed documents, for B = 1. Others of the library's options.

    Returns:
        `(B, queries, H, D)` and None in the place of the weights.

    Raises:
        ValueError: If the config has no pattern or a malformed one, borders are given twice and differ, or there are more or fewer
            sinks than query heads.
        TypeError: If the pattern is not a mapping.
        NotImplementedError: If the call asks for windows, a soft cap with a DilatedCache, biases, weights, a paged cache,
            cross-attention, a mask that is no padding mask, or an option that is not known; if positions alone pack documents
            beside padding or a cache; if it is not known whether the call is causal, or which heads of the
            model it has.
    """
    layer, context = layer_of(key), context_of(module)
    _refuse_options(options, _tokens_seen(key, layer, context, options))
    config: Any = module.config
    refuse_crossing(config)
    if not torch.compiler.is_compiling():
        check_type(config)
        record_implementation(config)
    _refuse_other_tokens(module, config)
    if getattr(module, "compressor", None) is not None:  # DeepSeek-V4: behind padding its mask does not show what it adds
        raise NotImplementedError(
            f"layers must attend to tokens with {NAME!r} attention, got {type(module).__name__}, which compresses them"
        )
    pattern = pattern_of_layer(module)
    if is_causal is None:
        is_causal = _is_causal(module, config)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    num_keys = _num_keys(query, key, attention_mask, layer)
    shard = find_head_shard(module, query.shape[1], key.shape[1], first_head)
    if shard is not None:
        key, value = key[:, shard.key_heads], value[:, shard.key_heads]
    q, k, v = query.transpose(1, 2), key[:, :, :num_keys].transpose(1, 2), value[:, :, :num_keys].transpose(1, 2)
    q, k, v = _of_one_width(q, k, v)
    sinks = None if s_aux is None else sinks_here(s_aux, query.shape[1], shard)
    call = Call(
        pattern=pattern,
        is_causal=is_causal,
        scale=scaling,
        dropout_p=dropout,
        sinks=sinks,
        first_head=0 if shard is None else shard.first_key,
        num_kv_heads=None if shard is None else shard.total_key,
        score_mod=None if softcap is None else uncached(_capped)(float(softcap)),
    )
    if context is None:
        if options.get("shard_lengths") is not None:
            raise ValueError("shard_lengths must be None without a mesh, got some; see flexdilated.hub.transformers.shard_context")
        borders = borders_of(attention_mask, q, options)
        if borders is None and options.get("seq_idx") is not None:
            raise ValueError(
                "seq_idx must come with cu_seq_lens_q and cu_seq_lens_k, or position_ids that pack documents, got it alone"
            )
        if borders is None and num_keys == q.shape[1]:
            # Values that no cache concatenated are a view of a projection. A cache would mix documents at the next token.
            is_cached = layer is not None or torch.compiler.is_compiling() or not value._is_view()
            if attention_mask is None and call.is_causal and not is_cached:
                borders = borders_of_positions(options.get("position_ids"), q)
            else:
                refuse_documents(options.get("position_ids"), attention_mask, num_keys, is_causal=call.is_causal)
        if layer is not None:
            _refuse_with_cache(borders, call)
            real = None if attention_mask is None or attention_mask.shape[3] == 0 else attention_mask[:, 0, 0, :num_keys] >= 0
            # Rotary positions of float32 make queries and keys float32 again under autocast, and leave values.
            cast = autocast_dtype(q.device)
            if cast is not None and q.dtype != torch.float64:
                q, k, v = (x.to(cast) for x in (q, k, v))
            out = layer.attend(q, k, v, real, call)
        elif num_keys != q.shape[1]:
            out = _decode(q, k, v, attention_mask, borders=borders, shard=shard, call=call)
        else:
            out = _attend_whole(q, k, v, attention_mask, borders, call)
    else:
        if dropped := [name for name in context.packing_options if options.get(name) is None]:
            raise NotImplementedError(
                f"{dropped[0]} must be None over a mesh with layers that do not hand it on to their attention, got it, and "
                f"{type(module).__name__}"
            )
        context.attended.add(getattr(module, "layer_idx", len(context.attended)))  # DiffLlama's layers call twice
        # The positions of documents, which the mask tells, are checked where the tokens come in.
        borders = borders_of(None, q, options)
        call = call.replaced(
            mesh=context.mesh, exchange=context.exchange, cu_seqlens=borders, shard_lengths=options.get("shard_lengths")
        )
        out, _ = attend(q, k, v, call)
    return out[..., : value.shape[3]].contiguous(), None


def _tokens_seen(key: Tensor, layer: DilatedCacheLayer | None, context: Context | None, options: Mapping[str, Any]) -> int:
    """Of the sequence, up to the last of this call and on all ranks: as many as a window must hold to hide none of them."""
    if context is not None:
        return sum(local_shard_lengths(context.mesh, key.shape[2], options.get("shard_lengths"))[1])
    return key.shape[2] if layer is None else layer.num_seen


def _refuse_options(options: Mapping[str, Any], num_seen: int) -> None:
    """Raise NotImplementedError for an option that changes the attention, or is unknown, or if weights are collected otherwise.

    `num_seen`: as `_tokens_seen` says.
    """
    for name, value in options.items():
        if value is None or value is False or name in KNOWN:
            continue
        if name == "sliding_window" and isinstance(value, int) and value >= num_seen:
            continue  # to have no window a layer needs another type, which may have other rotary positions
        shown = "a tensor" if isinstance(value, Tensor) else type(value).__name__ if name == "cache" else repr(value)
        reason = REFUSED.get(name, "nothing is known of such an option")
        raise NotImplementedError(f"{name} must be None with {NAME!r} attention, got {shown}: {reason}")
    # Some models do not hand on output_attentions, and collect what their layers return.
    collected = None if torch.compiler.is_compiling() else _active_collector.get()
    if collected and any("attentions" in name for name in collected):
        raise NotImplementedError(
            f"output_attentions must be None with {NAME!r} attention, got True: {REFUSED['output_attentions']}"
        )


@functools.lru_cache(maxsize=512)  # read in every layer of every step
def _parameters(module_class: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(module_class.forward).parameters)


def _refuse_other_tokens(module: nn.Module, config: Any) -> None:
    """Reject a layer whose keys come from other tokens, or may do so."""
    is_cross = getattr(module, "is_cross_attention", None)
    parameters = uncached(_parameters)(type(module))
    # One class for both: it is told by its attribute, or by a field of its config, and that of BART by being no causal decoder.
    may_cross = "encoder_hidden_states" in parameters and is_cross is None and getattr(config, "add_cross_attention", None) is None
    crosses = "key_value_states" in parameters and getattr(module, "is_decoder", False) and not getattr(module, "is_causal", False)
    if is_cross or "Cross" in type(module).__name__ or may_cross or (is_cross is None and crosses):
        raise NotImplementedError(f"layers must have no cross-attention with {NAME!r} attention, got {type(module).__name__}")


def _of_one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad values or keys with zeros to one head dim, which changes no score and no output."""
    missing = k.shape[3] - v.shape[3]
    if missing >= 0:
        return q, k, F.pad(v, (0, missing)) if missing else v
    return F.pad(q, (0, -missing)), F.pad(k, (0, -missing)), v


def _refuse_with_cache(borders: Tensor | None, call: Call) -> None:
    if borders is not None:
        raise NotImplementedError("cu_seq_lens_q must be None with a DilatedCache, got borders")
    if not call.is_causal:
        raise NotImplementedError("is_causal must be True with a DilatedCache, got False")
    if call.dropout_p:
        raise NotImplementedError(f"dropout must be 0 with a DilatedCache, got {call.dropout_p}")
    if call.score_mod is not None:
        raise NotImplementedError("softcap must be None with a DilatedCache, got a cap; use a dynamic or static cache")


def _decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, borders: Tensor | None, shard: HeadShard | None, call: Call
) -> Tensor:
    """Attention of some queries over all keys of a cache, `(B, queries, H, D)`, with the pattern on their positions.

    One softmax over the union of the branches; a pair that counts m times has `log m` added to its score. A sink is one more key,
    of value 0.
    """
    if borders is not None:
        raise NotImplementedError(
            f"cu_seq_lens_q must be None while decoding from a cache, got {k.shape[1]} keys for {q.shape[1]} queries"
        )
    if not call.is_causal:
        raise NotImplementedError(
            f"queries and keys must be the same tokens unless is_causal=True, got {q.shape[1]} queries and {k.shape[1]} keys"
        )
    assert mask is not None
    pattern, num_heads, num_keys = call.pattern, q.shape[2], k.shape[1]
    if pattern.detach_weights and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        pattern = dataclasses.replace(pattern, detach_weights=False)  # the outputs are the same
    key_positions, query_positions = mask[:, 0, 0, :num_keys], mask[:, 0, 0, num_keys:]
    first_head, total_kv_heads = (0, k.shape[2]) if shard is None else (shard.first_query, shard.total_key)
    group = num_heads // k.shape[2] if shard is None else shard.group
    count = checked_score_mod(pattern, group * total_kv_heads, num_keys, total_kv_heads, is_causal=True)
    batch = torch.arange(q.shape[0], device=q.device).view(-1, 1, 1, 1)
    heads = torch.arange(first_head, first_head + num_heads, device=q.device).view(1, -1, 1, 1)
    dtype = torch.promote_types(q.dtype, torch.float32)
    bias = torch.zeros(q.shape[0], num_heads, q.shape[1], num_keys, dtype=dtype, device=q.device)
    bias = count(bias, batch, heads, query_positions[:, None, :, None], key_positions[:, None, None])
    ignored = key_positions < 0
    bias = bias.masked_fill(ignored[:, None, None], -math.inf)  # because a window and global tokens also join position -1
    # Rows that were never written, or are padding, may hold anything.
    k, v = (x.to(dtype).masked_fill(ignored[:, :, None, None], 0.0) for x in (k, v))
    empty = (bias == -math.inf).all(-1, keepdim=True)
    bias = bias.masked_fill(empty, 0.0)  # or the gradients were NaN
    if call.sinks is not None:
        k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
        bias = torch.cat([bias, call.sinks.to(dtype)[None, :, None, None].expand(*bias.shape[:3], 1)], dim=-1)
    q_, k, v = (x.transpose(1, 2) for x in (q.to(dtype), k, v))
    if call.score_mod is not None:  # SDPA has no place for it
        k, v = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
        scores = call.score_mod(q_ @ k.mT * call.checked_scale(), batch, heads, query_positions, key_positions) + bias
        out = F.dropout(scores.softmax(-1), call.dropout_p) @ v
        return out.masked_fill(empty, 0.0).transpose(1, 2).to(q.dtype)
    out = F.scaled_dot_product_attention(
        q_, k, v, attn_mask=bias, dropout_p=call.dropout_p, scale=call.checked_scale(), enable_gqa=num_heads != k.shape[1]
    )
    return out.masked_fill(empty, 0.0).transpose(1, 2).to(q.dtype)


def _attend_whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, borders: Tensor | None, call: Call) -> Tensor:
    """Whole sequences: packed, padded or neither."""
    if borders is not None:
        batch = q.shape[0]
        q, k, v = (rearrange(x, "b n h d -> 1 (b n) h d") for x in (q, k, v))
        out, _ = attend(q, k, v, call.replaced(cu_seqlens=borders))
        return rearrange(out, "1 (b n) h d -> b n h d", b=batch)
    if mask is None:
        return attend(q, k, v, call)[0]
    real = mask[:, 0, 0, : q.shape[1]] >= 0
    order, back = real_first(real)
    q, k, v, padding = (moved(x, order) for x in (q, k, v, ~real))
    return moved(attend(q, k, v, call.replaced(key_padding_mask=padding))[0], back)


@functools.lru_cache(maxsize=64)  # one function for all layers and steps
def _capped(softcap: float) -> ScoreMod:
    def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def _is_causal(module: nn.Module, config: Any) -> bool:
    flags = [value for value in (getattr(module, "is_causal", None), getattr(config, "is_causal", None)) if value is not None]
    if not flags:  # transformers' own function would assume causal; its models without the attribute are encoders
        raise NotImplementedError(
            f"{type(module).__name__} must have is_causal with {NAME!r} attention, got none: nothing tells encoder from decoder"
        )
    return all(flags)


def _num_keys(query: Tensor, key: Tensor, mask: Tensor | None, layer: DilatedCacheLayer | None) -> int:
    """The number of keys, from the first, that a call attends to; with a bounded cache the number of its queries."""
    num_queries = query.shape[2]
    if mask is not None and mask.dtype == torch.int64 and mask.shape[1:] in ((1, 1, 0), (1, 1, num_queries)):
        if layer is None:
            raise NotImplementedError(
                "the cache must hold every token from the first, or be a DilatedCache, got one that has forgotten some, or an "
                "attention_mask that is no (B, N) padding mask"
            )
        return num_queries
    if mask is None:
        if key.shape[2] != num_queries:
            raise NotImplementedError(
                f"attention_mask must say where {num_queries} queries stand among {key.shape[2]} keys, got None: "
                "the model must make its masks with transformers.masking_utils"
            )
        return num_queries
    if mask.dim() == 4 and mask.shape[2] == 0:
        raise NotImplementedError(
            f"config must have no sliding window or attention chunks that hide tokens, got {mask.shape[3]}: the pattern says what "
            "is seen; set config.sliding_window or config.attention_chunk_size above the longest sequence"
        )
    num_keys = mask.shape[-1] - num_queries
    is_ours = mask.dtype == torch.int64 and mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] in (1, 2)
    if not is_ours or num_keys not in (num_queries, key.shape[2]):
        raise NotImplementedError(
            f"attention_mask must be a (B, N) padding mask with {NAME!r} attention, got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    return num_keys
