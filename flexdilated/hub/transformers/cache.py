"""The library's `Cache`, in memory that the pattern alone determines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from flexdilated.core.call import Call
from flexdilated.core.integers import is_integer
from flexdilated.decode import DilatedKVCache
from flexdilated.hub.transformers.patterns import NAME
from flexdilated.hub.transformers.positions import moved, real_first

# Since `activate_past_recording` the library tells that it will crop, but never that it is done; before, it tells nothing: every
# call is recorded. So the last calls are kept, of more tokens than are drafted at once.
IS_TOLD = hasattr(Cache, "activate_past_recording")
MOST_RECORDED = 1024 if IS_TOLD else 64
CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"  # the name of the argument, new in 5.24
LAYER = "_dilated_layer"  # the attribute by which the attention function finds the layer of the keys that it is given


class DilatedCacheLayer(CacheLayerMixin):
    """One layer's `DilatedKVCache`, as the library calls it.

    `update` gives the new keys and values back, and the attention function, which alone knows pattern, heads and padding, attends
    and stores. The `DilatedKVCache` is made by the first call.
    """

    is_compileable = False  # the library would compile of itself: calls must be recorded, for it to crop
    is_croppable = True
    is_sliding = False

    def __init__(self, max_length: int | None = None, **options: Any) -> None:
        super().__init__()
        self.max_length = max_length
        self.kv: DilatedKVCache | None = None
        self.num_seen = 0  # tokens, padding included
        self._is_waiting = False  # for the attention of the last update
        self.record_past = not IS_TOLD

    def activate_past_recording(self) -> None:
        """Keep what the calls until the next `crop` overwrite, the last of them that have `MOST_RECORDED` tokens together."""
        self.record_past = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first attention makes the store, in the pattern of its module."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """The keys and values `(B, Hkv, T, D)` as they are, bound to this layer."""
        self._check_attended()
        self._is_waiting = True
        self.num_seen += key_states.shape[-2]
        keys = key_states.view_as(key_states)  # the attribute belongs to this call alone
        setattr(keys, LAYER, self)
        return keys, value_states

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, call: Call) -> Tensor:
        """Attention of the tokens of the last update, `(B, T, H, D)`, over all that the layer has seen.

        q `(B, T, H, D)`, k and v `(B, T, Hkv, D)` have this rank's heads. `real` `(B, T)`: False for padding, which must be before
        the tokens of a sequence; None: no padding. Raises ValueError if padding follows a token, or if the pattern has changed
        since earlier calls.
        """
        if not self._is_waiting:
            raise NotImplementedError(
                f"keys must be those of one layer with a DilatedCache and {NAME!r} attention, got those of a layer shared"
            )
        if self.kv is None:
            if torch.compiler.is_compiling():
                raise NotImplementedError(
                    "the first call with a DilatedCache must not be compiled, got torch.compile: it allocates; read the prompt "
                    "with the model as it is"
                )
            self.kv = DilatedKVCache(
                call.pattern,
                batch_size=q.shape[0],
                num_kv_heads=k.shape[2],
                head_dim=k.shape[3],
                max_length=self.max_length,
                first_head=call.first_head,
                total_kv_heads=call.num_kv_heads,
                dtype=k.dtype,
                device=k.device,
            )
            self.is_initialized = True
        elif not torch.compiler.is_compiling() and self.kv.pattern != call.pattern:
            raise ValueError(
                f"config.dilated_pattern must stay {self.kv.pattern} while a DilatedCache is in use, got {call.pattern}"
            )
        self.set_recording()
        self._is_waiting = False
        if real is None:
            return self.kv.attend(q, k, v, scale=call.scale, sinks=call.sinks)
        return attend_padded(self.kv, q, k, v, real, call)

    def set_recording(self) -> None:
        """Have the store record the call that follows, if it is to."""
        assert self.kv is not None
        self.kv.records_past = self.record_past and (IS_TOLD or not torch.compiler.is_compiling())
        self.kv.forget_past(MOST_RECORDED)

    def _check_attended(self) -> None:
        if self._is_waiting:
            raise NotImplementedError(
                f"attn_implementation must be {NAME!r} with a DilatedCache, in a model that hands on the keys of its cache as they "
                "are, got an attention that did not ask the cache"
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the mask: the new tokens alone."""
        self._check_attended()
        return query_length, self.num_seen

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.num_seen

    def get_max_length(self) -> int:
        """The `max_length` of the cache; -1 without one."""
        return -1 if self.max_length is None else self.max_length

    get_max_cache_shape = get_max_length  # its name in older versions

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; or, as older versions ask, all from `tokens_to_remove` on, if above 0."""
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.num_seen - tokens_to_remove)
        if self.kv is not None:
            self.kv.crop((self.kv.lengths - removed).clamp(min=0))
        self.num_seen = max(0, self.num_seen - removed)

    def reset(self) -> None:
        if self.kv is not None:
            self.kv.reset()
        self.num_seen, self._is_waiting = 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.kv is not None:
            self.kv.reorder(beam_idx.long())  # int32 in some searches

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.kv is not None:
            self.kv.select(torch.arange(self.kv.batch_size, device=self.kv.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.kv is not None:
            self.kv.select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices.long())


class DilatedCache(Cache):
    """The library's cache for models with `attn_implementation="flexdilated"`, in bounded memory.

    Each layer holds a `flexdilated.DilatedKVCache`: of every head and branch the keys and values of the current segment, so that
    neither bytes nor time per token grow with the context. Outputs are those of the full forward, to rounding, in chunks of any
    size; padding stands on the left. Beams, drafted tokens that are rejected, and several sequences of one prompt are followed.
    Keys and values that the library crops away (assisted generation) leave rows in their place that were overwritten: they are kept
    from call to `crop`, of the last 1,024 tokens or so. For inference: no gradients.

        model.generate(tokens, cache=DilatedCache())  # past_key_values= before transformers 5.24

    `torch.compile(fullgraph=True)` may compile all calls but the first, which allocates. A used cache goes on after its tokens:
    call `reset()` before another prompt, since a chunk of the same prompt looks like one.

    Args:
        max_length: Tokens that will be seen at most, which saves memory where that is less than a segment; leave room for drafts,
            which are seen before they are rejected. Default: any number.

    Raises:
        ValueError: If `max_length` is no integer of at least 1.
    """

    def __init__(self, max_length: int | None = None) -> None:
        if max_length is not None and (not is_integer(max_length) or max_length < 1):
            raise ValueError(f"max_length must be an integer of at least 1, got {max_length!r}")
        super().__init__(layer_class_to_replicate=functools.partial(DilatedCacheLayer, max_length))
        self.max_length = max_length
        self._records_past = False

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """As the library's; a layer that appears late records as those before it."""
        self._grow(layer_idx + 1)
        return super().update(key_states, value_states, layer_idx, *args, **options)

    def stores(self, num_layers: int, make: Callable[[], Sequence[DilatedKVCache]]) -> list[DilatedKVCache]:
        """Every layer's store, for a model that decodes by them itself; `make` gives them where there is none yet."""
        self._grow(num_layers)
        if any(layer.kv is None for layer in self.layers):
            for layer, kv in zip(self.layers, make()):
                layer.kv = kv
        for layer in self.layers:
            layer.set_recording()
        return [layer.kv for layer in self.layers]

    def see(self, num_tokens: int) -> None:
        """Count tokens that the stores of all layers were given."""
        for layer in self.layers:
            layer.num_seen += num_tokens

    def _grow(self, num_layers: int) -> None:
        while len(self.layers) < num_layers:
            layer = DilatedCacheLayer(self.max_length)
            if self._records_past:
                layer.activate_past_recording()
            self.layers.append(layer)

    def activate_past_recording(self) -> None:
        """Keep what the calls until the next `crop` overwrite, in all layers."""
        self._records_past = True
        for layer in self.layers:
            layer.activate_past_recording()

    def _refuse_states(self, *args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(
            f"{CACHE} must be the library's own cache in a model whose layers keep other states, of convolutions, "
            "recurrences or indexers, got a DilatedCache, which holds keys and values; use DynamicCache(config=model.config)"
        )

    get_conv_state = get_recurrent_state = update_conv_state = update_recurrent_state = update_indexer = _refuse_states

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values allocated in all layers, those recorded for `crop` among them."""
        return sum(layer.kv.nbytes for layer in self.layers if layer.kv is not None)


def layer_of(key: Tensor) -> DilatedCacheLayer | None:
    """The layer that a cache bound to its keys, if it is ours."""
    return getattr(key, LAYER, None)


def attend_padded(kv: DilatedKVCache, q: Tensor, k: Tensor, v: Tensor, real: Tensor, call: Call) -> Tensor:
    """`kv.attend` of tokens whose sequences begin where `real` `(B, T)` does."""
    check_padding(kv, real)
    order, back = real_first(real)
    q, k, v = (moved(x, order) for x in (q, k, v))
    return moved(kv.attend(q, k, v, lengths=real.sum(-1), scale=call.scale, sinks=call.sinks), back)


def check_padding(kv: DilatedKVCache, real: Tensor) -> None:
    """Raise ValueError if padding is not before all tokens of a sequence.

    On other devices than the CPU, and in compiled code, an assertion fails there.
    """
    inside = (real[:, 1:] | ~real[:, :-1]).all() & (real[:, 0] | (kv.lengths == 0)).all()
    if real.device.type != "cpu" or torch.compiler.is_compiling():  # to read it would wait for the device at every step
        torch._assert_async(inside, "attention_mask must have its padding before the tokens of a sequence with a DilatedCache")
    elif not bool(inside):
        raise ValueError("attention_mask must have its padding before the tokens of a sequence with a DilatedCache, got it after")
