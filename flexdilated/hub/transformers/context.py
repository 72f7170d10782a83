"""A model of the library whose tokens are sharded over the ranks of a mesh."""

from __future__ import annotations

import inspect
import warnings
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from flexdilated.core.checks import check_exchange
from flexdilated.distributed.consistency import MOST_ITEMS, Fields, compare, one_call
from flexdilated.distributed.mesh import group_of
from flexdilated.distributed.sharding import local_shard_lengths
from flexdilated.hub.transformers.cache import CACHE
from flexdilated.hub.transformers.patterns import NAME
from flexdilated.nn.attention import DilatedAttention, MultiheadDilatedAttention
from flexdilated.nn.longnet import LongNetLM
from flexdilated.nn.position import token_positions

PLACE = "_dilated_context"  # the attribute by which the attention function finds the mesh of a module
SHARDED = "in a model over a mesh"
IGNORED = -100  # a label, to the library
HIDDEN = (
    "the labels between shards are all ignored, so ranks cannot tell by them whether they hold shards of one sequence; "
    "cut one batch of all ranks by flexdilated.distributed.shard_sequence"
)
# Families, each with a `ForCausalLM`, of which shards gave the logits and losses of the whole; gpt2's is `GPT2LMHeadModel`.
FAMILIES = (
    *("Arcee", "Cohere", "DeepseekV3", "DiffLlama", "Ernie4_5", "Exaone4", "GPTNeoX", "Gemma", "Gemma2", "Gemma3", "Glm", "Glm4"),
    *("GptOss", "Granite", "Helium", "HunYuanDenseV1", "Llama", "LongNet", "Mistral", "Mixtral", "Nemotron", "Olmo", "Olmo2"),
    *("Phi", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SeedOss", "SmolLM3", "StableLm", "Starcoder2"),
)
MODELS = {"GPT2LMHeadModel", *(f"{family}ForCausalLM" for family in FAMILIES)}


class Context:
    """The mesh over which a model's tokens are sharded, the exchange, and the state of a forward.

    `attended`: layers that have attended, by index. `compared`: modes (training, evaluation: they have different loaders) in which
    the labels of neighbouring ranks have been compared. `has_warned`: whether a warning said that the labels show nothing.
    `packing_options`: names of the forward's options that its layers must pass on to their attention.
    """

    def __init__(self, mesh: DeviceMesh, exchange: str) -> None:
        self.mesh, self.exchange = mesh, exchange
        self.attended: set[int] = set()
        self.has_warned = False
        self.compared: set[bool] = set()
        self.packing_options: tuple[str, ...] = ()

    def __deepcopy__(self, memo: Any) -> Context:
        return Context(self.mesh, self.exchange)  # process groups have no copies


def context_of(module: nn.Module) -> Context | None:
    """The context that `shard_context` gave a module."""
    return getattr(module, PLACE, None)


def context_mesh(model: nn.Module) -> DeviceMesh:
    """The mesh whose ranks share a model's sequences, by which `flexdilated.distributed.shard_sequence` cuts a batch.

    Raises:
        ValueError: If the model has none.
    """
    context = context_of(model)
    if context is None:
        raise ValueError(f"model must have a mesh, got {type(model).__name__} without; use shard_context")
    return context.mesh


def shard_context(model: PreTrainedModel, mesh: DeviceMesh, *, exchange: str = "auto") -> PreTrainedModel:
    """Shard the tokens of a model over the ranks of a mesh, in place: each rank gives contiguous tokens, and gets their logits.

    Positions are those of the whole sequence, and segments may cross shards anywhere. The parameters stay whole: a rank's gradient
    is that of its own tokens, and the sum over the axis is the whole. `forward` then takes `shard_lengths` too, the number of
    tokens of each rank, by default equally many, and `cu_seq_lens_q` and `cu_seq_lens_k` are the borders of documents packed in the
    whole sequence. Tokens behind the shard are the labels of its last: give `labels` with `shift_labels`, the labels already
    moved by one, and with `num_items_in_batch`, the number of labels of all ranks: the loss is then the rank's part of the sum.
    Every rank must run every forward and backward.

    Args:
        model: With a dilated pattern, of one of the `ForCausalLM` classes in `docs/transformers.md`, or `LongNetForCausalLM`.
        mesh: A 1-D `DeviceMesh`, or one axis of a larger one, whose ranks hold the sequence in their order.
        exchange: How keys and values travel, as in `flexdilated.dilated_attention`.

    Returns:
        The model. Its `forward` raises NotImplementedError for padding, for a cache, and, when it is done, if some of the model's
        layers did not attend; ValueError for positions other than those of the whole sequence, labels alone, and, but for
        `LongNetForCausalLM`, a rank without tokens.

    Raises:
        TypeError: If the mesh is no `DeviceMesh`, or the model none of the library's.
        ValueError: If the mesh has other than one dim, or the exchange is unknown.
        NotImplementedError: If shards of the model's class were not compared with the whole, it has another attention, or its
            rotary positions depend on the longest one.
    """
    check_exchange(exchange, mesh)
    group_of(mesh)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel, got {type(model).__name__}")
    _check_model(model)
    context = Context(mesh, exchange)
    for module in model.modules():
        setattr(module, PLACE, context)
        if isinstance(module, (DilatedAttention, MultiheadDilatedAttention, LongNetLM)):
            module.mesh, module.exchange = mesh, exchange
    model.register_forward_pre_hook(_check_labels, with_kwargs=True)
    if any(isinstance(module, LongNetLM) for module in model.modules()):
        model.register_forward_pre_hook(_place_tokens, with_kwargs=True)
        return model
    model.base_model.register_forward_pre_hook(_place_tokens, with_kwargs=True)
    model.base_model.register_forward_hook(_check_layers)
    return model


def _check_model(model: PreTrainedModel) -> None:
    config: Any = model.config
    name = type(model).__name__
    if hasattr(model, PLACE):
        raise ValueError(f"model must be without a mesh, got {name} with one")
    if MODELS.isdisjoint(base.__name__ for base in type(model).__mro__):
        raise NotImplementedError(f"model must be one of {', '.join(sorted(MODELS))} to be sharded, got {name}")
    if config._attn_implementation != NAME or getattr(config, "dilated_pattern", None) is None:
        raise NotImplementedError(f"model must have a dilated_pattern and {NAME!r} attention, got {config._attn_implementation!r}")
    parameters = getattr(config, "rope_parameters", None) or {}  # some have them for each kind of layer
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            raise NotImplementedError(f"rope_type must not depend on the longest position over a mesh, got {rope['rope_type']!r}")


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(inspect.signature(module.forward).parameters, args)), **kwargs}


def _cache_of(arguments: dict[str, Any]) -> Any:
    """The cache that a call is given, by its new name or its old one."""
    old_cache = arguments.get("past_key_values")
    return arguments.get(CACHE) if old_cache is None else old_cache


def _check_labels(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    arguments = _by_name(module, args, kwargs)
    context: Context = getattr(module, PLACE)
    if arguments.get("output_router_logits") or getattr(module.config, "output_router_logits", False):
        raise NotImplementedError(f"output_router_logits must be False {SHARDED}, got True: its loss is no sum over tokens")
    num_logits = arguments.get("logits_to_keep", 0)
    has_cache = arguments.get("use_cache") or _cache_of(arguments) is not None
    if not (isinstance(num_logits, int) and num_logits == 0) and not has_cache:  # which the base model refuses
        raise NotImplementedError(
            f"logits_to_keep must be 0 {SHARDED}, got {num_logits}: it would keep the last tokens of each shard"
        )
    if arguments.get("labels") is None:
        return (), arguments
    for name in ("shift_labels", "num_items_in_batch"):
        if arguments.get(name) is None:
            raise ValueError(
                f"labels must come with {name} {SHARDED}, got them without: the label of a shard's last token is the next rank's, "
                "and the loss is a mean over the labels of all ranks"
            )
    arguments["shift_labels"] = arguments["shift_labels"].contiguous()  # the library's loss takes a view of them
    if module.training not in context.compared and not torch.compiler.is_compiling():
        packed = arguments.get("cu_seq_lens_q") is not None
        if _compare_labels(context, arguments["labels"], arguments["shift_labels"], arguments["num_items_in_batch"], packed=packed):
            context.compared.add(module.training)
        elif not context.has_warned:
            context.has_warned = True
            warnings.warn(HIDDEN, stacklevel=2)
    return (), arguments


def _compare_labels(context: Context, labels: Tensor, shift_labels: Tensor, count: Any, *, packed: bool) -> bool:
    """Whether the labels of several shards were compared, in the first forwards with labels. Ignored labels cannot be compared.

    A loader that does not know the mesh, such as `Trainer`'s, gives each rank different sequences. Raises ValueError if the label
    after a shard is neither the first of the next shard nor the end of a packed document, or if ranks count different labels.
    """
    ends = [x[:, place].tolist() if x.dim() == 2 and x.shape[1] else None for x, place in ((labels, 0), (shift_labels, -1))]
    gathered: list[Any] = [None] * context.mesh.size()
    group = context.mesh.get_group()
    ranks = dist.get_process_group_ranks(group)
    with one_call(group) as number:
        compare(group, labels.device, Fields({"call": "the comparison of labels"}), (number,), each_time=True)
        dist.all_gather_object(gathered, [*ends, float(count)], group=group)
    if len({of_rank for *_, of_rank in gathered}) > 1:
        counts = ", ".join(f"{of_rank:g} on rank {rank}" for rank, (*_, of_rank) in zip(ranks[:MOST_ITEMS], gathered))
        raise ValueError(f"num_items_in_batch must be the number of labels of all ranks {SHARDED}, the same on each, got {counts}")
    shards = [(rank, first, following) for rank, (first, following, _) in zip(ranks, gathered) if None not in (first, following)]
    for (left_rank, _, following), (right_rank, first, _) in pairwise(shards):
        if len(following) != len(first) or any(a != b and not (packed and a == IGNORED) for a, b in zip(following, first)):
            raise ValueError(
                f"labels must be those of one sequence in shards {SHARDED}, got shift_labels that end in {following} on rank "
                f"{left_rank}, labels that begin with {first} on rank {right_rank}; cut one batch of all ranks, as Trainer's is "
                "not, by flexdilated.distributed.shard_sequence"
            )
    return len(shards) < 2 or any(label != IGNORED for _, _, following in shards[:-1] for label in following)


def _place_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Give the tokens of a shard their positions in the whole sequence; reject arguments that do not work on shards."""
    arguments = _by_name(module, args, kwargs)
    context: Context = getattr(module, PLACE)
    context.attended = set()
    context.packing_options = tuple(name for name in ("cu_seq_lens_q", "shard_lengths") if arguments.get(name) is not None)
    tokens = arguments.get("input_ids")
    tokens = arguments["inputs_embeds"] if tokens is None else tokens
    cache = _cache_of(arguments)
    if cache is not None or arguments.get("use_cache"):
        cache_given = "use_cache=True" if cache is None else type(cache).__name__
        raise NotImplementedError(
            f"use_cache must be False and {CACHE} None {SHARDED}, got {cache_given}; a model without a mesh generates"
        )
    parameters = inspect.signature(module.forward).parameters
    if "use_cache" in parameters:
        arguments["use_cache"] = False
    mask = arguments.pop("attention_mask", None)
    if mask is not None and (torch.compiler.is_compiling() or mask.dim() != 2 or not bool(mask.all())):
        raise NotImplementedError(
            f"attention_mask must be None {SHARDED}, got a mask; leave padding out, and pack documents by cu_seq_lens_q"
        )
    if "position_ids" not in parameters:
        return (), arguments
    rank, lengths = local_shard_lengths(context.mesh, tokens.shape[1], arguments.get("shard_lengths"))
    if min(lengths) == 0:  # the library looks at the last token; the other ranks would wait for this one
        raise ValueError(f"shard_lengths must be at least 1 {SHARDED} of the library, got {tuple(lengths)}")
    positions = token_positions(tokens.shape[1], arguments.get("cu_seq_lens_q"), tokens.device, sum(lengths[:rank]))[None]
    position_ids = arguments.get("position_ids")
    if position_ids is not None and (torch.compiler.is_compiling() or not _agree(position_ids, positions)):
        raise ValueError(
            f"position_ids must be None, or count from {sum(lengths[:rank])} in the whole sequence on rank {rank} {SHARDED}, "
            "got others; cu_seq_lens_q packs documents, and generate() needs a model without a mesh"
        )
    arguments["position_ids"] = positions
    if "cu_seq_lens_q" in context.packing_options and torch.compiler.is_compiling():
        # A mask that is made: the library would look for documents in the positions, which cannot be read here.
        arguments["attention_mask"] = torch.cat((positions, positions), dim=-1).expand(tokens.shape[0], -1)[:, None, None]
    return (), arguments


def _agree(position_ids: Tensor, positions: Tensor) -> bool:
    return position_ids.shape[-1] == positions.shape[-1] and position_ids.dim() == 2 and bool((position_ids == positions).all())


def _check_layers(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    context: Context = getattr(module, PLACE)
    config: Any = module.config
    if len(context.attended) != config.num_hidden_layers:
        raise NotImplementedError(
            f"every layer must attend {SHARDED}, got {len(context.attended)} that did of {config.num_hidden_layers} of "
            f"{type(module).__name__}"
        )
