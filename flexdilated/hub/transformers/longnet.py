"""LongNet as a model of the transformers library."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from flexdilated.core.integers import is_integer
from flexdilated.core.pattern import DilatedPattern
from flexdilated.decode.arguments import cache_refusal
from flexdilated.hub.transformers.cache import CACHE, DilatedCache, check_padding
from flexdilated.hub.transformers.context import IGNORED
from flexdilated.hub.transformers.interface import REFUSED
from flexdilated.hub.transformers.patterns import NAME, pattern_of
from flexdilated.hub.transformers.positions import borders_of, moved, real_first
from flexdilated.nn.config import LongNetConfig
from flexdilated.nn.longnet import LongNetLM
from flexdilated.nn.position import SCALE_BASE, XPos
from flexdilated.nn.transformer import Block

PACKED = (*FlashAttentionKwargs.__annotations__, "shift_labels", "shard_lengths")


class LongNetHFConfig(PreTrainedConfig):
    """What determines a `LongNetForCausalLM`: the fields of `flexdilated.LongNetConfig`, the pattern as `dilated_pattern`.

    Args:
        vocab_size: As in `LongNetConfig`, like all arguments that are not listed here.
        embed_dim: `hidden_size` to the library.
        num_layers: `num_hidden_layers` to the library.
        num_heads: `num_attention_heads` to the library.
        dilated_pattern: A pattern, or what its `to_dict` gives. Default: `DilatedPattern.longnet()`.
        **options: Fields that every configuration of the library has. `use_cache`, by default True: whether `generate` keeps a
            `DilatedCache`; without one it reads the whole prefix again for every token. `tie_word_embeddings` must be False: here
            `tie_embeddings` says it.

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
        scale_base: float = SCALE_BASE,
        scale: float | None = None,
        **options: Any,
    ) -> None:
        self.vocab_size, self.embed_dim, self.num_layers, self.num_heads = vocab_size, embed_dim, num_layers, num_heads
        self.num_kv_heads, self.ffn_dim, self.position, self.tie_embeddings = num_kv_heads, ffn_dim, position, tie_embeddings
        self.dropout_p, self.attention_dropout_p = dropout_p, attention_dropout_p
        self.backend, self.scale_base, self.scale = backend, scale_base, scale
        pattern = DilatedPattern.longnet() if dilated_pattern is None else dilated_pattern
        pattern = pattern if isinstance(pattern, DilatedPattern) else DilatedPattern.from_dict(pattern)
        self.dilated_pattern = pattern.to_dict()
        self.to_longnet()
        if options.get("tie_word_embeddings", False):
            # LongNetLM ties by having no head at all: nothing is left for the library to tie.
            raise ValueError("tie_word_embeddings must be False in LongNetHFConfig, got True; use tie_embeddings")
        self.use_cache = options.pop("use_cache", True)
        super().__init__(**{**options, "tie_word_embeddings": False})

    def to_longnet(self) -> LongNetConfig:
        """The configuration of the `LongNetLM` inside."""
        names = {field.name for field in dataclasses.fields(LongNetConfig)} - {"pattern"}
        values = {name: getattr(self, name) for name in names}
        return LongNetConfig.from_dict({**values, "pattern": self.dilated_pattern})


class CheckpointedBlock(Block, GradientCheckpointingLayer):
    """A block that the library may compute again in the backward, instead of keeping what is inside."""


class CheckpointedLM(LongNetLM):
    """`LongNetLM` of such blocks."""

    block_class = CheckpointedBlock


class LongNetForCausalLM(PreTrainedModel, GenerationMixin):
    """`flexdilated.LongNetLM` as a model of the library: auto classes, `Trainer`, `generate`.

    `generate` decodes by a `DilatedCache`, in time and memory per token that do not grow with the context; where the pattern or
    the positions rule that out, and with `use_cache=False`, it reads the whole prefix again for every token. Documents may be
    padded on either side, with a cache on the left; positions count the real tokens.

    Args:
        config: Sizes, pattern and options.
    """

    config_class = LongNetHFConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    accepts_loss_kwargs = True  # Trainer: the loss takes num_items_in_batch
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["CheckpointedBlock"]
    _supports_context_parallel = False  # the library's and torch's, which know dense attention only; see shard_context

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
        self.model = CheckpointedLM(config.to_longnet())
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embedding = value
        self.model.config = dataclasses.replace(self.model.config, vocab_size=value.num_embeddings)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.model.head = value

    def _init_weights(self, module: nn.Module) -> None:
        """LongNet's own initial weights, for what a checkpoint lacks; called for the innermost modules."""
        if isinstance(module, nn.Embedding):  # perhaps the library's own, made to resize the vocabulary
            nn.init.normal_(module.weight, std=self.config.embed_dim**-0.5)
        elif isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        inputs_embeds: None = None,
        labels: Tensor | None = None,
        past_key_values: DilatedCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 0,
        cache: DilatedCache | None = None,
        **packed: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the token that follows each of `input_ids`, and the loss against `labels`.

        Args:
            input_ids: `(B, N)`.
            attention_mask: `(B, N)`, 1 at real tokens; with a cache that has seen tokens, theirs come first.
            inputs_embeds: Must be None; adapters hand it on.
            labels: `(B, N)`, as `input_ids` (the loss moves them by one), -100 where nothing is learned. The first label of each
                packed document is ignored.
            past_key_values: The name of `cache` before transformers 5.24.
            use_cache: Whether to make one where none is given. Default: no.
            return_dict: Whether to return a `CausalLMOutputWithPast`, or a tuple. Default: what the config says.
            num_items_in_batch: Divides the summed loss, where `Trainer` accumulates gradients.
            output_attentions: Must not be True, here or in the config.
            output_hidden_states: Must not be True, here or in the config.
            logits_to_keep: Only the last so many logits. Default: all.
            cache: The cache that these tokens follow, and join.
            **packed: `cu_seq_lens_q` and `cu_seq_lens_k`, `(documents + 1,)`, the borders of packed documents, for B = 1.
                `max_length_q` and `max_length_k` follow from them, and are not needed. `shift_labels`, `(B, N)`: the labels already
                moved by one; `labels` must come too, and does not count. `shard_lengths`: the tokens of each rank, after
                `shard_context`; by default equally many. No `position_ids`: the model counts them
                itself, so `DataCollatorWithFlattening` must have `return_flash_attn_kwargs=True, return_position_ids=False`.

        Raises:
            NotImplementedError: If weights or hidden states are asked for, the cache is of another class, or packed documents
                come with one.
            TypeError: If an argument has another name.
            ValueError: If the pattern of the config is no longer that of the model, a shape or a number is wrong, borders are
                given once, differ, or come with padding.
        """
        if unknown := sorted(packed.keys() - set(PACKED)):
            raise TypeError(f"LongNetForCausalLM.forward() got an unexpected keyword argument {unknown[0]!r}")
        if inputs_embeds is not None:
            raise NotImplementedError("inputs_embeds must be None in LongNetForCausalLM, got a tensor; give input_ids")
        if cache is not None and past_key_values is not None:
            raise ValueError("cache and past_key_values are two names of one argument, got both")
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DilatedCache()
        if not isinstance(cache, DilatedCache | None):
            raise NotImplementedError(f"{CACHE} must be a DilatedCache in LongNetForCausalLM, got {type(cache).__name__}")
        if not is_integer(logits_to_keep) or logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must be an integer of at least 0 in LongNetForCausalLM, got {logits_to_keep!r}")
        for name, value, reason in (
            ("output_attentions", output_attentions, REFUSED["output_attentions"]),
            ("output_hidden_states", output_hidden_states, "LongNetForCausalLM keeps none; use forward hooks on model.layers"),
        ):
            if getattr(self.config, name) if value is None else value:
                raise NotImplementedError(f"{name} must not be True in LongNetForCausalLM, got True: {reason}")
        if not torch.compiler.is_compiling() and pattern_of(self.config) != self.model.config.pattern:
            raise ValueError(
                f"config.dilated_pattern must stay {self.model.config.pattern} once the model is built, got "
                f"{self.config.dilated_pattern}; build another model with it"
            )
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must have shape (B, N), got {tuple(input_ids.shape)}")
        num_seen = 0 if cache is None else cache.get_seq_length()
        if attention_mask is not None and attention_mask.shape != (input_ids.shape[0], num_seen + input_ids.shape[1]):
            expected = f"{tuple(input_ids.shape)} behind {num_seen} tokens seen" if num_seen else tuple(input_ids.shape)
            raise ValueError(f"attention_mask must have the shape of input_ids={expected}, got {tuple(attention_mask.shape)}")
        real = None if attention_mask is None else attention_mask[:, num_seen:].bool()
        if real is not None and not torch.compiler.is_compiling() and bool(real.all()):
            real = None
        if packed.get("shard_lengths") is not None and self.model.mesh is None:
            raise ValueError("shard_lengths must be None without a mesh, got some; see flexdilated.hub.transformers.shard_context")
        borders = borders_of(None, input_ids, packed)
        if borders is not None and real is not None:
            raise ValueError("cu_seq_lens_q must come without padding, got an attention_mask with padding too")
        if cache is not None:
            if borders is not None:
                raise NotImplementedError("cu_seq_lens_q must be None with a DilatedCache, got borders")
            logits = self._decode(input_ids, real, cache, last_only=logits_to_keep == 1)
        elif real is None:
            logits = self.model(input_ids, cu_seqlens=borders, shard_lengths=packed.get("shard_lengths"))
        else:
            order, back = real_first(real)
            logits = moved(self.model(moved(input_ids, order), key_padding_mask=moved(~real, order)), back)
        if logits_to_keep:  # FSDP2 warns of a model that gives a view of all
            logits = logits[:, -logits_to_keep:]
        shift_labels = packed.get("shift_labels")
        if shift_labels is not None and labels is None:
            raise ValueError("shift_labels must come with labels, got them alone")
        loss = None
        if labels is not None:
            if borders is not None and shift_labels is None:  # the last token of a document does not predict the next document
                starts = torch.isin(torch.arange(labels.shape[1], device=labels.device), borders.to(labels.device))
                labels = labels.masked_fill(starts, IGNORED)
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=logits.shape[-1],
                num_items_in_batch=num_items_in_batch,
                shift_labels=shift_labels,
            )
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def _decode(self, tokens: Tensor, real: Tensor | None, cache: DilatedCache, *, last_only: bool) -> Tensor:
        caches = cache.stores(len(self.model.layers), lambda: self.model.make_caches(tokens.shape[0], max_length=cache.max_length))
        if real is None:
            logits = self.model(tokens, caches=caches, last_only=last_only)
        else:
            check_padding(caches[0], real)
            order, back = real_first(real)
            logits = self.model(moved(tokens, order), caches=caches, lengths=real.sum(-1), last_only=last_only)
            logits = logits if last_only else moved(logits, back)
        cache.see(tokens.shape[1])
        return logits

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        """The library's hook: the cache of a call of `generate` that was given none."""
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic", "dynamic_full"):  # the last is what older versions ask for drafts
            raise NotImplementedError(
                f"cache_implementation must be None in LongNetForCausalLM, whose cache is a DilatedCache, got {implementation!r}"
            )
        if generation_config.use_cache is False or model_kwargs.get(CACHE) is not None:
            return
        is_assistant = bool(getattr(generation_config, "is_assistant", False))  # its cache goes on in longer calls
        # Drafts may go beyond the last token.
        drafts = is_assistant or generation_mode == GenerationMode.ASSISTED_GENERATION or implementation == "dynamic_full"
        max_length = None if drafts else max_cache_length
        if not self._can_decode(max_length):
            generation_config.use_cache = False
            return
        model_kwargs[CACHE] = DilatedCache(max_length)
        if is_assistant:
            model_kwargs[CACHE].activate_past_recording()

    def _can_decode(self, max_length: int | None) -> bool:
        if cache_refusal(self.model.config.pattern, max_length) is not None:
            return False
        try:
            if isinstance(self.model.position, XPos):
                self.model.position.decode(torch.zeros(1, 1, dtype=torch.int64), max_length=max_length)
        except ValueError:  # its decay over so many positions leaves float32
            return False
        return True
