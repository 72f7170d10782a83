"""Options that the library passes to its attention function: known ones, rejected ones and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils.output_capturing import _active_collector

from flexdilated.distributed.sharding import local_shard_lengths
from flexdilated.hub.transformers.cache import DilatedCacheLayer
from flexdilated.hub.transformers.context import Context
from flexdilated.hub.transformers.patterns import NAME

# Options of a call that change what is computed, and what to say when one is set.
REFUSED = {
    "softcap": "dilated attention does not cap its scores",
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
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "seq_idx",
    "shard_lengths",
    "shift_labels",
    "token_type_ids",
    "use_cache",
}


def tokens_seen(key: Tensor, layer: DilatedCacheLayer | None, context: Context | None, options: Mapping[str, Any]) -> int:
    """Of the sequence, up to the last of this call and on all ranks: as many as a window must hold to hide none of them."""
    if context is not None:
        return sum(local_shard_lengths(context.mesh, key.shape[2], options.get("shard_lengths"))[1])
    return key.shape[2] if layer is None else layer.seen


def refuse_options(options: Mapping[str, Any], num_seen: int) -> None:
    """Raise for an option that changes the attention, or that is unknown.

    Args:
        options: By name, as the library hands them on.
        num_seen: As `tokens_seen` says.

    Raises:
        NotImplementedError: If there is such an option, or attention weights are collected otherwise.
    """
    for name, given in options.items():
        if given is None or given is False or name in KNOWN:
            continue
        if name == "sliding_window" and isinstance(given, int) and given >= num_seen:
            continue  # to have no window a layer needs another type, which may have other rotary positions
        shown = "a tensor" if isinstance(given, Tensor) else repr(given)
        reason = REFUSED.get(name, "nothing is known of such an option")
        raise NotImplementedError(f"{name} must be None with {NAME!r} attention, got {shown}: {reason}")
    # Some models do not hand on output_attentions, and collect what their layers return.
    collected = None if torch.compiler.is_compiling() else _active_collector.get()
    if collected and any("attentions" in name for name in collected):
        raise NotImplementedError(
            f"output_attentions must be None with {NAME!r} attention, got True: {REFUSED['output_attentions']}"
        )
