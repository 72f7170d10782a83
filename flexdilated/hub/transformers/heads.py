"""Which of a model's heads an attention module of the transformers library was given: tensor parallelism hands over a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed
from torch import Tensor, nn

QUERY_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads")


class HeadShard(NamedTuple):
    """A part of a model's heads.

    `first_query` and `first_key` are the indices in the model of the first query and key/value head here, `total_key` counts the
    model's key/value heads, each of which serves `group` query heads, and `key_heads` selects, of the key/value heads in the call,
    those that its queries read.
    """

    first_query: int
    first_key: int
    total_key: int
    group: int
    key_heads: slice


def find_head_shard(module: nn.Module, num_heads: int, num_kv_heads: int, first_head: int | None = None) -> HeadShard | None:
    """The position in the model of the heads in a call; None if the call has all heads.

    The model's heads are counted by its config. If a call has fewer, the position of its rank is read from the parameters of the
    module: tensor parallelism leaves them as DTensors.

    `num_heads` are the query heads of the call, `num_kv_heads` its key/value heads, either this rank's part of them or all.
    `first_head`: index in the model of the first query head, if the caller knows. Raises NotImplementedError if the part of
    the heads is not known, ValueError if `first_head` leaves too few heads.
    """
    config: Any = getattr(module, "config", None)
    total = _count(config, QUERY_HEADS)
    if total is None:
        total = _count(module, QUERY_HEADS)
    if first_head is not None:
        if total is None or not 0 <= first_head <= total - num_heads:
            raise ValueError(f"first_head must leave room for {num_heads} of the model's {total} query heads, got {first_head}")
        first = first_head
    elif total == num_heads or (not _is_distributed() and (total is None or _count(module, QUERY_HEADS) == num_heads)):
        return None  # in one process a module may differ from its config, as where the stages of a model do
    else:
        first = _rank(module, num_heads, total) * num_heads
    assert total is not None
    total_key = _count(config, KEY_HEADS) or total
    return None if num_heads == total else _key_heads(module, first, total, total_key, num_heads, num_kv_heads)


def count_kv_heads(config: Any) -> int | None:
    """The key/value heads of a config's model, None where it does not say, or layers have different numbers of them."""
    try:
        return _count(config, KEY_HEADS) or _count(config, QUERY_HEADS)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError, since transformers 5.24
        return None


def sinks_here(sinks: Tensor, num_heads: int, shard: HeadShard | None) -> Tensor:
    """The sinks of the `num_heads` query heads here, from a parameter that tensor parallelism cut or left whole.

    Raises ValueError if there are more or fewer.
    """
    if type(sinks).__name__ == "DTensor":  # by name: its module takes a third of a second to import
        sinks = sinks.to_local()  # type: ignore[attr-defined]
    if shard is not None and sinks.shape == (shard.group * shard.total_key,):
        sinks = sinks[shard.first_query : shard.first_query + num_heads]
    if sinks.shape != (num_heads,):
        raise ValueError(f"s_aux must have shape (H,)=({num_heads},), the query heads of the call, got {tuple(sinks.shape)}")
    return sinks


def _key_heads(module: nn.Module, first: int, total: int, total_key: int, num_heads: int, num_kv_heads: int) -> HeadShard:
    """Which key/value heads the query heads `first, ..., first + num_heads - 1` of `total` read."""
    if num_kv_heads == num_heads and (total_key == total or _shards_keys(module)):
        # As many as queries: the model has repeated its key/value heads, if it had fewer.
        return HeadShard(first, first, total, 1, slice(None))
    if num_kv_heads == num_heads == total_key and not hasattr(module, "k_proj"):
        raise NotImplementedError(
            f"{type(module).__name__} must have k_proj where key holds as many heads as query={num_heads}, of {total}: they may be "
            f"all {total_key} of the model, or those of this rank's queries, repeated"
        )
    group = total // total_key
    if num_kv_heads * total == total_key * num_heads:
        return HeadShard(first, first // group, total_key, group, slice(None))
    if num_kv_heads == total_key and (num_heads % group == 0 or group % num_heads == 0) and first % min(group, num_heads) == 0:
        first_key = first // group
        return HeadShard(first, first_key, total_key, group, slice(first_key, first_key + max(1, num_heads // group)))
    raise NotImplementedError(
        f"key must hold {total_key * num_heads // total} or all of the model's {total_key} key/value heads where query holds "
        f"{num_heads} of {total} heads, got {num_kv_heads}"
    )


def _count(holder: Any, names: Sequence[str]) -> int | None:
    """The first of the attributes that is a number."""
    return next((value for name in names if isinstance(value := getattr(holder, name, None), int)), None)


def _is_distributed() -> bool:
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _rank(module: nn.Module, num_heads: int, total: int | None) -> int:
    """How many ranks hold the heads before this one's, by the DTensors among the module's parameters."""
    places = {place for parameter in module.parameters() for place in _places(parameter)} if _is_distributed() else set()
    if len(places) == 1:
        rank, size = places.pop()
        if total == size * num_heads:
            return rank
    if total is None:
        raise NotImplementedError(
            f"config must say num_attention_heads over several processes, got {type(module).__name__} without: offsets follow from "
            "a head's place in the whole model"
        )
    raise NotImplementedError(
        f"query must hold all {total} heads of the model, got {num_heads}, and no parameter of {type(module).__name__} says which: "
        "offsets follow from a head's place in the whole model; use the library's own tensor parallelism (tp_plan), or have the "
        "wrapper of the attention pass first_head, the index of its first query head"
    )


def _places(parameter: Tensor) -> list[tuple[int, int]]:
    """`(rank, size)` of the mesh axes that shard a parameter."""
    from torch.distributed.tensor import DTensor, Shard  # takes a third of a second, which whoever made DTensors has spent

    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    axes = [axis for axis, placement in enumerate(parameter.placements) if isinstance(placement, Shard) and mesh.size(axis) > 1]
    return [(mesh.get_local_rank(axis), mesh.size(axis)) for axis in axes]


def _shards_keys(module: nn.Module) -> bool:
    """Whether the module's projection of keys is cut over ranks."""
    projection = getattr(module, "k_proj", None)
    return isinstance(projection, nn.Module) and any(_places(parameter) for parameter in projection.parameters())
