"""The `transformers` library: its models under a dilated pattern, and LongNet as one of its models.

Importing this module registers `"flexdilated"` as an attention implementation, and `LongNetForCausalLM` with the auto classes:

    import flexdilated.hub.transformers
    config = AutoConfig.from_pretrained(folder)
    config.dilated_pattern = DilatedPattern.longnet()       # saved and loaded with the config, and chooses "flexdilated"
    model = AutoModelForCausalLM.from_pretrained(folder, config=config)

Source: the library's documentation of `AttentionInterface` and `AttentionMaskInterface`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils.output_capturing import _active_collector

from flexdilated.attention import attend
from flexdilated.call import Call
from flexdilated.hub.dilated_configs import NAME, extend_configs_and_models
from flexdilated.hub.head_shards import HeadShard, find_head_shard
from flexdilated.masks import dilated_score_mod
from flexdilated.nn.longnet import LongNetConfig, LongNetLM
from flexdilated.pattern import DilatedPattern

__all__ = ["NAME", "LongNetForCausalLM", "LongNetHFConfig", "dilated_attention_forward", "dilated_attention_positions", "register"]

# Options of a call that change what is computed, and what to say when one is set.
REFUSED = {
    "softcap": "dilated attention does not cap its scores",
    "sliding_window": "the pattern says what is seen; set config.sliding_window=None",
    "s_aux": "dilated attention has no sinks",
    "sinks": "dilated attention has no sinks",
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
    "token_type_ids",
    "use_cache",
}


def register() -> None:
    """Make `"flexdilated"` an attention implementation and LongNet one of the auto classes' models; importing the module does it.

    Any model that takes its attention from the library's interface then runs with `attn_implementation="flexdilated"` and the
    pattern in `config.dilated_pattern`. Calling it again changes nothing.
    """
    extend_configs_and_models()
    AttentionInterface.register(NAME, dilated_attention_forward)
    AttentionMaskInterface.register(NAME, dilated_attention_positions)
    AutoConfig.register(LongNetHFConfig.model_type, LongNetHFConfig, exist_ok=True)
    AutoModelForCausalLM.register(LongNetHFConfig, LongNetForCausalLM, exist_ok=True)


# -- where tokens are -------------------------------------------------------------------------------------------------------------


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
    """The library's mask function: no mask, but where each key and query stands in its document.

    Positions count from the first real token of a row, so left padding moves no segment. The signature, and that options of other
    mask functions are dropped, are the library's.

    Args:
        batch_size: B.
        q_length: Queries.
        kv_length: Keys, unwritten rows of a static cache included.
        q_offset: Tokens before the first query.
        kv_offset: Tokens before the first key.
        mask_function: Causal or bidirectional, with or without packed documents.
        attention_mask: `(B, tokens)`, True or 1 at real tokens; what it does not reach is not real.
        local_size: Of a sliding window or chunks, which the layers that get such a mask refuse.
        use_vmap: Must be False: the library sets it for mask functions of a model's own.
        device: Where the answer lives.
        **options: For other mask functions.

    Returns:
        None where queries and keys are the same real tokens of one document. Otherwise `(B, 1, 1, keys + q_length)` int64: the
        position of every key, then of every query; -1 at keys to ignore. Keys after the last query are left out where none was
        written before. Packed documents have a second row `(B, 1, 2, ...)`: the number of the document. `(B, 1, 0, local_size)`
        where there is a window: models make such masks whether or not a layer reads them.

    Raises:
        NotImplementedError: If the model asks for a mask function of its own.
        RuntimeError: If `position_ids` pack documents inside `torch.compile`, where they cannot be read.
    """
    if local_size is not None:
        return torch.empty(batch_size, 1, 0, local_size, dtype=torch.int64, device=device)
    if use_vmap:
        raise NotImplementedError(f"mask functions of a model's own must be absent with {NAME!r} attention, got one")
    if kv_offset:
        raise NotImplementedError(f"the cache must hold every token from the first, got a first key at {kv_offset}")
    packed = mask_function not in (causal_mask_function, bidirectional_mask_function)
    compiling = torch.compiler.is_compiling()
    documents = _documents(mask_function, batch_size, kv_length, device) if packed else None
    if documents is not None and compiling:
        torch._assert_async(
            (documents == 0).all(),
            "position_ids must not pack documents inside torch.compile; pass cu_seq_lens_q and cu_seq_lens_k",
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
        both = torch.stack((keys - starts, documents), dim=1)[:, None]
        return torch.cat((both, both), dim=-1)
    queries = torch.arange(q_length, device=device).expand(batch_size, -1) + q_offset
    if attention_mask is None:
        real = keys <= queries[:, -1:]
    else:
        real = attention_mask.to(device=device, dtype=torch.bool)[:, :num_keys]
        real = F.pad(real, (0, num_keys - real.shape[1]))
    if kv_length == q_length and (attention_mask is None or (not compiling and bool(real.all()))):
        return None
    first = _first(real)[:, None]
    return torch.cat((torch.where(real, keys - first, -1), queries - first), dim=-1)[:, None, None]


def _documents(mask_function: Callable[..., Tensor], batch_size: int, num_tokens: int, device: torch.device | str) -> Tensor:
    """`(B, N)` number of the document of each token: a token opens one when it does not see the token before it."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    rows = torch.arange(batch_size, device=device)[:, None]
    later = torch.arange(1, num_tokens, device=device)[None]
    joined = mask_function(rows, zero, later, later - 1).expand(batch_size, -1)
    ahead = mask_function(rows, zero, later - 1, later).any()
    if torch.compiler.is_compiling():
        torch._assert_async(~ahead, "mask functions must be causal or bidirectional with flexdilated attention")
    elif bool(ahead):
        raise NotImplementedError(
            f"mask functions must be causal or bidirectional with {NAME!r} attention, got one that looks ahead"
        )
    return F.pad((~joined).long(), (1, 0)).cumsum(-1)


def _first(real: Tensor) -> Tensor:
    """`(B,)` index of the first True of `(B, N)`; 0 where there is none."""
    return real.int().argmax(-1)


def _shifted(x: Tensor, shift: Tensor) -> Tensor:
    """`x` `(B, N, ...)` with row b turned left by `shift[b]`."""
    index = (torch.arange(x.shape[1], device=x.device) + shift[:, None]) % x.shape[1]
    return torch.take_along_dim(x, index.view(*index.shape, *(1,) * (x.dim() - 2)), dim=1)


# -- the attention ----------------------------------------------------------------------------------------------------------------


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
    **options: Any,
) -> tuple[Tensor, None]:
    """The library's attention function, under the pattern of `module.config.dilated_pattern`.

    Training, prefill and encoders run `dilated_attention`. Where a cache holds more keys than there are queries, the queries are
    scored against all its rows, O(queries * keys), with the pattern's rule as a mask; the result is that of the full forward.
    The signature, and that options which change no attention are dropped, are the library's; an option that is not known to be
    such is refused.

    Where a call holds a part of the model's heads, their offsets and branches are those of their place in the model: under the
    library's tensor parallelism it is read from the parameters of `module`, and any other wrapper has to say `first_head`.

    Args:
        module: Whose `config` holds the pattern, and whose `is_causal` counts where the call says nothing.
        query: `(B, H, queries, D)`.
        key: `(B, Hkv, keys, D)`.
        value: As key.
        attention_mask: What `dilated_attention_positions` gave: None, or positions.
        dropout: Probability of dropping an attention weight.
        scaling: Multiplies the scores. Default: `D ** -0.5`.
        is_causal: Whether a query sees only keys at its own position and before.
        first_head: Index in the model of the first query head here. Default: as `module` and its config say.
        **options: `cu_seq_lens_q`, `cu_seq_lens_k`: borders of packed documents, for B = 1. Others of the library's options.

    Returns:
        `(B, queries, H, D)` and None in the place of the weights.

    Raises:
        ValueError: If the config has no pattern or a malformed one, or borders are given twice and differ.
        TypeError: If the pattern is not a mapping.
        NotImplementedError: If the call asks for softcap, sinks, windows, biases, weights, a paged cache, cross-attention, a mask
            that is no padding mask, or an option that is not known; or if it holds some of the heads, and nothing says which.
    """
    _refuse_options(options)
    config: Any = module.config
    crosses = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
    if crosses or getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise NotImplementedError(
            f"config must have no cross-attention with {NAME!r} attention, got {type(config).__name__} with it"
        )
    pattern = _pattern_of(config)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True)) and getattr(config, "is_causal", None) is not False
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    num_keys = _num_keys(query, key, attention_mask)
    shard = find_head_shard(module, query.shape[1], key.shape[1], first_head)
    if shard is not None:
        key, value = key[:, shard.held], value[:, shard.held]
    q, k, v = query.transpose(1, 2), key[:, :, :num_keys].transpose(1, 2), value[:, :, :num_keys].transpose(1, 2)
    borders = _borders(attention_mask, q, options)
    if borders is None and options.get("seq_idx") is not None:
        raise ValueError(
            "seq_idx must come with cu_seq_lens_q and cu_seq_lens_k, or position_ids that pack documents, got it alone"
        )
    if num_keys != q.shape[1]:
        if borders is not None:
            raise NotImplementedError(
                f"cu_seq_lens_q must be None while decoding from a cache, got {num_keys} keys for {q.shape[1]} queries"
            )
        if not is_causal:
            raise NotImplementedError(
                f"queries and keys must be the same tokens unless is_causal=True, got {q.shape[1]} queries and {num_keys} keys"
            )
        assert attention_mask is not None
        positions = attention_mask[:, 0, 0]
        return _decode(q, k, v, pattern, shard, positions[:, num_keys:], positions[:, :num_keys], scaling, dropout), None

    call = Call(
        pattern,
        is_causal,
        scaling,
        dropout,
        first_head=0 if shard is None else shard.first_key,
        num_heads=None if shard is None else shard.total_key,
    )
    if borders is not None:
        batch, cu_seqlens = q.shape[0], borders
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        out, _ = attend(q, k, v, call._replace(cu_seqlens=cu_seqlens))
        return out[0].unflatten(0, (batch, -1)).contiguous(), None
    if attention_mask is None:
        return attend(q, k, v, call)[0].contiguous(), None
    real = attention_mask[:, 0, 0, :num_keys] >= 0
    shift = _first(real)
    q, k, v, padding = (_shifted(x, shift) for x in (q, k, v, ~real))
    out, _ = attend(q, k, v, call._replace(key_padding_mask=padding))
    return _shifted(out, -shift).contiguous(), None


def _refuse_options(options: Mapping[str, Any]) -> None:
    for name, given in options.items():
        if given is None or given is False or name in KNOWN:
            continue
        shown = "a tensor" if isinstance(given, Tensor) else repr(given)
        reason = REFUSED.get(name, "nothing is known of such an option")
        raise NotImplementedError(f"{name} must be None with {NAME!r} attention, got {shown}: {reason}")
    # Some models do not hand on output_attentions, and collect what their layers return.
    collected = None if torch.compiler.is_compiling() else _active_collector.get()
    if collected and any("attentions" in name for name in collected):
        raise NotImplementedError(
            f"output_attentions must be None with {NAME!r} attention, got True: {REFUSED['output_attentions']}"
        )


def _pattern_of(config: Any) -> DilatedPattern:
    values = getattr(config, "dilated_pattern", None)
    if values is None:
        raise ValueError(
            f"config.dilated_pattern must be set with {NAME!r} attention, got None in {type(config).__name__}; "
            "use config.dilated_pattern = DilatedPattern(...)"
        )
    # The compiler cannot trace the checks of from_dict.
    return DilatedPattern(**values) if torch.compiler.is_compiling() else DilatedPattern.from_dict(values)


def _num_keys(query: Tensor, key: Tensor, mask: Tensor | None) -> int:
    """How many keys, from the first, the call is about."""
    num_queries = query.shape[2]
    if mask is None:
        if key.shape[2] != num_queries:
            raise NotImplementedError(
                f"attention_mask must say where {num_queries} queries stand among {key.shape[2]} keys, got None: "
                "the model must make its masks with transformers.masking_utils"
            )
        return num_queries
    if mask.dim() == 4 and mask.shape[2] == 0:
        raise NotImplementedError(
            f"config must have no sliding window or attention chunks, got {mask.shape[3]}: the pattern says what is seen; set "
            'config.sliding_window = None, or "full_attention" for every layer in config.layer_types'
        )
    if mask.dtype != torch.int64 or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] > 2 or mask.shape[3] <= num_queries:
        raise NotImplementedError(
            f"attention_mask must be a (B, N) padding mask with {NAME!r} attention, got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    return mask.shape[3] - num_queries


def _borders(mask: Tensor | None, q: Tensor, options: Mapping[str, Any]) -> Tensor | None:
    """`cu_seqlens` of packed documents over the flattened batch, or None."""
    given, other = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    found = None
    if mask is not None and mask.shape[2] == 2:
        positions = mask[:, 0, 0, : q.shape[1]].flatten()
        found = F.pad((positions == 0).nonzero()[:, 0], (0, 1), value=positions.shape[0])
    if given is None and other is None:
        return found
    if given is None or other is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must come together, got one of them")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q must come with one row of tokens, got batch size {q.shape[0]}")
    if mask is not None and found is None:
        raise ValueError("cu_seq_lens_q must come without padding, got an attention_mask with padding too")
    for name, borders in (("cu_seq_lens_k", other), ("position_ids", found)):
        if borders is None or borders is given:
            continue
        if torch.compiler.is_compiling():  # documents told by position_ids are refused there
            if given.shape != borders.shape:
                raise ValueError(f"cu_seq_lens_q must have as many borders as {name}={borders.shape[0]}, got {given.shape[0]}")
            torch._assert_async((given == borders).all(), f"cu_seq_lens_q must have the borders of {name}")
            continue
        if given.tolist() != borders.tolist():
            raise ValueError(f"cu_seq_lens_q must have the borders of {name}={borders.tolist()}, got {given.tolist()}")
    return given


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern,
    shard: HeadShard | None,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """Causal attention of some queries over all keys of a cache, `(B, queries, H, D)`, by the pattern's rule on their positions.

    One softmax over the union of the branches: the score plus the log of how many of them join the pair.
    """
    if pattern.detach_weights and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        pattern = dataclasses.replace(pattern, detach_weights=False)  # the outputs are the same
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    first_head, total_kv_heads = (0, num_kv_heads) if shard is None else (shard.first_query, shard.total_key)
    group = num_heads // num_kv_heads if shard is None else shard.group
    count = dilated_score_mod(pattern, group * total_kv_heads, seq_len=k.shape[1], is_causal=True, num_kv_heads=total_kv_heads)
    ignored = key_positions < 0
    out_dtype, dtype = q.dtype, torch.promote_types(q.dtype, torch.float32)
    # Rows that were never written, or are padding, may hold anything.
    q, k, v = q.to(dtype), *(x.to(dtype).masked_fill(ignored[:, :, None, None], 0.0) for x in (k, v))
    grouped = q.unflatten(2, (num_kv_heads, -1))  # (B, queries, Hkv, H / Hkv, D)
    scores = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k).flatten(1, 2) * scale
    batch = torch.arange(q.shape[0], device=q.device).view(-1, 1, 1, 1)
    heads = torch.arange(first_head, first_head + num_heads, device=q.device).view(1, -1, 1, 1)
    # -1 lies in no segment of a real query, so ignored keys drop out here.
    scores = count(scores, batch, heads, query_positions[:, None, :, None], key_positions[:, None, None])
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    weights = F.dropout(weights, dropout_p, training=dropout_p > 0.0).unflatten(1, (num_kv_heads, -1))
    return torch.einsum("bhgqk,bkhd->bqhgd", weights, v).flatten(2, 3).to(out_dtype)


# -- LongNet as a model of the library --------------------------------------------------------------------------------------------


class LongNetHFConfig(PreTrainedConfig):
    """What determines a `LongNetForCausalLM`: the fields of `flexdilated.LongNetConfig`, the pattern as `dilated_pattern`.

    Args:
        vocab_size: As in `LongNetConfig`.
        embed_dim: As in `LongNetConfig`; `hidden_size` to the library.
        num_layers: As in `LongNetConfig`; `num_hidden_layers` to the library.
        num_heads: As in `LongNetConfig`; `num_attention_heads` to the library.
        dilated_pattern: A pattern, or what its `to_dict` gives. Default: `DilatedPattern.longnet()`.
        num_kv_heads: As in `LongNetConfig`.
        ffn_dim: As in `LongNetConfig`.
        position: As in `LongNetConfig`.
        tie_embeddings: As in `LongNetConfig`.
        dropout_p: As in `LongNetConfig`.
        attention_dropout_p: As in `LongNetConfig`.
        backend: As in `LongNetConfig`.
        **options: Fields that every configuration of the library has.

    Raises:
        ValueError: As `LongNetConfig` and `DilatedPattern.from_dict`.
        TypeError: As `DilatedPattern.from_dict`.
    """

    model_type = "flexdilated_longnet"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "embed_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
    }

    def __init__(
        self,
        vocab_size: int = 256,
        embed_dim: int = 512,
        num_layers: int = 6,
        num_heads: int = 8,
        dilated_pattern: DilatedPattern | Mapping[str, Any] | None = None,
        num_kv_heads: int | None = None,
        ffn_dim: int | None = None,
        position: str = "xpos",
        tie_embeddings: bool = True,
        dropout_p: float = 0.0,
        attention_dropout_p: float = 0.0,
        backend: str = "auto",
        **options: Any,
    ) -> None:
        self.vocab_size, self.embed_dim, self.num_layers, self.num_heads = vocab_size, embed_dim, num_layers, num_heads
        self.num_kv_heads, self.ffn_dim, self.position, self.tie_embeddings = num_kv_heads, ffn_dim, position, tie_embeddings
        self.dropout_p, self.attention_dropout_p, self.backend = dropout_p, attention_dropout_p, backend
        self.dilated_pattern = DilatedPattern.longnet() if dilated_pattern is None else dilated_pattern
        self.to_longnet()
        # LongNetLM ties by having no head at all: nothing is left for the library to tie. No cache is kept between tokens.
        super().__init__(**{**options, "tie_word_embeddings": False, "use_cache": False})

    def to_longnet(self) -> LongNetConfig:
        """The configuration of the `LongNetLM` inside."""
        names = {field.name for field in dataclasses.fields(LongNetConfig)} - {"pattern"}
        values = {name: getattr(self, name) for name in names}
        return LongNetConfig.from_dict({**values, "pattern": self.dilated_pattern})


class LongNetForCausalLM(PreTrainedModel, GenerationMixin):
    """`flexdilated.LongNetLM` as a model of the library: auto classes, `Trainer`, `generate`.

    `generate` keeps no cache: it reads the whole prefix again for every token. Documents may be padded on either side; positions
    count from the first real token.

    Args:
        config: Sizes, pattern and options.
    """

    config_class = LongNetHFConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    accepts_loss_kwargs = True  # Trainer: the loss takes num_items_in_batch
    _no_split_modules: ClassVar[list[str]] = ["Block"]

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Dilated attention: there is no other.

        Raises:
            ValueError: If another is asked for.
        """
        if requested_attention not in (None, NAME):
            raise ValueError(
                f"attn_implementation must be None or {NAME!r} in LongNetForCausalLM, got {requested_attention!r}; "
                "for attention weights see flexdilated.attention_map"
            )
        return NAME

    def __init__(self, config: LongNetHFConfig) -> None:
        super().__init__(config)
        self.model = LongNetLM(config.to_longnet())
        self.generation_config.use_cache = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.model.head = value

    def _init_weights(self, module: nn.Module) -> None:
        """LongNet's own initial weights, for what a checkpoint lacks; called for the innermost modules."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.embed_dim**-0.5)
        elif isinstance(module, nn.LayerNorm) or module is self.model.head:
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            name = next(name for name, found in self.named_modules() if found is module)
            gamma = math.sqrt(math.log(2 * self.config.num_layers))
            nn.init.xavier_normal_(module.weight, gain=1.0 if name.endswith(("q_proj", "k_proj")) else gamma)
            nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> CausalLMOutput | tuple[Tensor, ...]:
        """Logits of the token that follows each of `input_ids`, and the loss against `labels`.

        Args:
            input_ids: `(B, N)`.
            attention_mask: `(B, N)`, 1 at real tokens.
            labels: `(B, N)`, as `input_ids` (the loss moves them by one), -100 where nothing is learned.
            past_key_values: Must be None.
            use_cache: Must not be True.
            return_dict: Whether to return a `CausalLMOutput`, or a tuple. Default: what the config says.
            cu_seq_lens_q: `(documents + 1,)` borders of packed documents, for B = 1.
            cu_seq_lens_k: The same.
            max_length_q: Follows from the borders, and is not needed.
            max_length_k: The same.
            num_items_in_batch: Divides the summed loss, where `Trainer` accumulates gradients.
            output_attentions: Must not be True, here or in the config.
            output_hidden_states: Must not be True, here or in the config.

        Raises:
            NotImplementedError: If a cache, weights or hidden states are asked for.
            ValueError: If the pattern of the config is no longer that of the model, a shape is wrong, or borders are given once,
                differ, or come with padding.
        """
        if past_key_values is not None or use_cache:
            raise NotImplementedError(
                "use_cache must be False, got True: LongNetForCausalLM reads the prefix again for every token"
            )
        for name, given, reason in (
            ("output_attentions", output_attentions, REFUSED["output_attentions"]),
            ("output_hidden_states", output_hidden_states, "LongNetForCausalLM keeps none; use forward hooks on model.layers"),
        ):
            if getattr(self.config, name) if given is None else given:
                raise NotImplementedError(f"{name} must not be True in LongNetForCausalLM, got True: {reason}")
        if not torch.compiler.is_compiling() and self.config.dilated_pattern != self.model.config.pattern.to_dict():
            raise ValueError(
                f"config.dilated_pattern must stay {self.model.config.pattern} once the model is built, got "
                f"{self.config.dilated_pattern}; build another model with it"
            )
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must have shape (B, N), got {tuple(input_ids.shape)}")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids={tuple(input_ids.shape)}, got {tuple(attention_mask.shape)}"
            )
        real = None if attention_mask is None else attention_mask.bool()
        if real is not None and not torch.compiler.is_compiling() and bool(real.all()):
            real = None
        borders = None
        if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
            if real is not None:
                raise ValueError("cu_seq_lens_q must come without padding, got an attention_mask with padding too")
            borders = _borders(None, input_ids, {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k})
        if real is None:
            logits = self.model(input_ids, cu_seqlens=borders)
        else:
            shift = _first(real)
            tokens, padding = _shifted(input_ids, shift), _shifted(~real, shift)
            logits = _shifted(self.model(tokens, key_padding_mask=padding), -shift)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=logits.shape[-1], num_items_in_batch=num_items_in_batch
            )
        output = CausalLMOutput(loss=loss, logits=logits)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()


register()
