"""torchtitan's inner attention made ours, by its own overrides.

Nothing of torchtitan is changed: a run names `dilated_flex` or `dilated_varlen` in `--override.imports`, with the pattern.

    torchrun ... -m torchtitan.train ... --parallelism.context_parallel_load_balancer None --override.imports \\
        'flexdilated.hub.torchtitan.dilated_flex={"pattern": {"segment_lengths": [8192], "dilation_rates": [4], "window": 256}}'

Source: torchtitan 0.3.0, config/override.py, models/common/attention.py, protocols/module.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flexdilated.distributed.mesh import canonical_mesh
from flexdilated.hub.requires import require

require("torchtitan", at_least="0.3.0", below="0.4", extra="torchtitan", python="3.11")

import spmd_types as spmd  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.nn.attention.flex_attention import BlockMask  # noqa: E402
from torchtitan.config.override import override  # noqa: E402
from torchtitan.distributed.parallel_dims import ParallelDims  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402
from torchtitan.protocols.sharding import ShardingConfig  # noqa: E402

from flexdilated.attention import attend  # noqa: E402
from flexdilated.backends import BACKENDS  # noqa: E402
from flexdilated.core.call import EXCHANGES, Call, ScoreMod  # noqa: E402
from flexdilated.core.pattern import DilatedPattern  # noqa: E402

__all__ = ["DilatedInnerAttention", "DilatedVarlenAttention", "dilated_flex", "dilated_varlen"]

INPUTS = ("q_BLNH", "k_BLNH", "v_BLNH")  # by these names torchtitan says how the arguments of `forward` are sharded


class DilatedInnerAttention(Module):
    """Causal dilated attention as a model's inner attention: packed documents, a part of the heads, a part of the tokens.

    Tensor parallelism hands over the heads of this rank, whose offsets follow from their index in the model. On the `cp` axis this
    library's exchange takes the place of the all-gather of keys and values that torchtitan's sharding declares.
    """

    _sharding_config: ShardingConfig | None

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """As torchtitan's own, whose `block_size` is that of the mask; flex's `kernel_options` have no meaning here."""

        pattern: DilatedPattern
        backend: str = "auto"
        exchange: str = "auto"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.pattern, self.backend, self.exchange = config.pattern, config.backend, config.exchange
        self.mesh: DeviceMesh | None = None  # of the axis on which the tokens are sharded
        self.tp_rank, self.tp_size = 0, 1

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Take this rank's place from torchtitan's meshes, and leave the keys and values where they are.

        Raises NotImplementedError if the model shards the sequence in a way that is not known here.
        """
        tp, self.mesh = parallel_dims.get_optional_mesh("tp"), canonical_mesh(parallel_dims.get_optional_mesh("cp"))
        if tp is not None:
            self.tp_rank, self.tp_size = tp.get_local_rank(), tp.size()
        if self.mesh is not None:
            self._sharding_config = _without_gather(self._sharding_config)
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: Tensor,  # noqa: N803
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: BlockMask | VarlenMetadata | None = None,
        score_mod: ScoreMod | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """`(B, N, H, D)` from q of that shape and k, v `(B, N, Hkv, D)`: this rank's tokens and heads.

        `attention_masks`: torchtitan's, which says where documents begin. None: every row is one document. `score_mod` and
        `out_transform` must be None, and `enable_gqa` True where k has fewer heads than q.

        Raises:
            NotImplementedError: If there is a score function or a transform of the output, the mask is of another kind, or the
                documents of a block mask are asked for inside a compiled graph.
            ValueError: If the mask is none of causal documents over contiguous shards, or heads differ without `enable_gqa`.
        """
        for name, value in (("score_mod", score_mod), ("out_transform", out_transform)):
            if value is not None:
                raise NotImplementedError(
                    f"{name} must be None under dilated attention, got a function; leave such layers as they are"
                )
        if not enable_gqa and k_BLNH.shape[2] != q_BLNH.shape[2]:
            raise ValueError(f"enable_gqa must be True where k has other heads than q={q_BLNH.shape[2]}, got {k_BLNH.shape[2]}")
        heads = k_BLNH.shape[2]
        call = Call(
            pattern=self.pattern,
            is_causal=True,
            scale=scale,
            backend=self.backend,
            mesh=self.mesh,
            exchange="auto" if self.mesh is None else self.exchange,
            first_head=self.tp_rank * heads,
            num_kv_heads=self.tp_size * heads,
        )
        with spmd.no_typecheck():  # plain tensors: types are stated again where this module's sharding says so
            return self._attend(q_BLNH, k_BLNH, v_BLNH, self._borders(attention_masks, q_BLNH), call)

    def extra_repr(self) -> str:
        return f"{self.pattern}, backend={self.backend!r}, exchange={self.exchange!r}"

    def _borders(self, mask: BlockMask | VarlenMetadata | None, q: Tensor) -> list[Tensor] | None:
        """Where documents begin and end: in each row, or, of one tensor, in the rows one after another; None: with the rows."""
        if mask is None and self.mesh is None:
            return None
        if isinstance(mask, VarlenMetadata) and self.mesh is None:
            return [mask.cu_seq_q]
        if not isinstance(mask, BlockMask):
            expected = "a BlockMask or VarlenMetadata" if self.mesh is None else "a BlockMask over a cp axis"
            raise NotImplementedError(f"attention_masks must be {expected}, got {type(mask).__name__}")
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "attention_masks must be VarlenMetadata in a compiled model, got a BlockMask, whose documents no graph can hold; "
                "use dilated_varlen"
            )
        starts = document_starts(mask, q.shape[0], q.shape[1], self.mesh)  # (B, N)
        rows, length = starts.shape
        if int(starts.sum()) == rows:
            return None
        end = starts.new_full((1,), length, dtype=torch.int64)
        if self.mesh is None or rows == 1:
            return [torch.cat([starts.flatten().nonzero()[:, 0], end * rows])]
        return [torch.cat([row.nonzero()[:, 0], end]) for row in starts]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, borders: list[Tensor] | None, call: Call) -> Tensor:
        if borders is None:
            return attend(q, k, v, call)[0]
        if len(borders) == 1:  # rows one after another are documents too
            a, b, c = (x.flatten(0, 1)[None] for x in (q, k, v))
            return attend(a, b, c, call.replaced(cu_seqlens=borders[0]))[0].view(q.shape)
        rows = zip(*(x.split(1) for x in (q, k, v)), borders)
        return torch.cat([attend(a, b, c, call.replaced(cu_seqlens=documents))[0] for a, b, c, documents in rows])


class DilatedVarlenAttention(DilatedInnerAttention):
    """Dilated attention in place of torchtitan's `VarlenAttention`, whose mask gives the boundaries of the documents."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """As torchtitan's own; its window must be its default, all earlier tokens."""

        pattern: DilatedPattern
        backend: str = "auto"
        exchange: str = "auto"


@override(target=FlexAttention.Config, exact=True, description="flexdilated's dilated attention instead of FlexAttention")
def dilated_flex(
    config: FlexAttention.Config,
    *,
    pattern: DilatedPattern | Mapping[str, Any],
    backend: str = "auto",
    exchange: str = "auto",
) -> DilatedInnerAttention.Config:
    """Replace every `FlexAttention` by dilated attention; its mask gives the documents.

    Args:
        config: torchtitan's config of the attention.
        pattern: Which positions attend to which, or its `to_dict()`, which torchtitan can write as JSON.
        backend: `"auto"` or the name of a backend.
        exchange: How rows travel on the `cp` axis, as in `flexdilated.dilated_attention`.

    Raises:
        ValueError: If there is no such pattern, or a backend or exchange is unknown.
        TypeError: If the pattern is neither a pattern nor a mapping.
    """
    fields = _fields(pattern, backend, exchange, replaced=config)
    return DilatedInnerAttention.Config(**fields, block_size=config.block_size)


@override(target=VarlenAttention.Config, exact=True, description="flexdilated's dilated attention instead of VarlenAttention")
def dilated_varlen(
    config: VarlenAttention.Config,
    *,
    pattern: DilatedPattern | Mapping[str, Any],
    backend: str = "auto",
) -> DilatedVarlenAttention.Config:
    """Replace every `VarlenAttention`, which torchtitan runs without a `cp` axis only; layers may be compiled.

    Args and errors are those of `dilated_flex`; an attention with a window of its own raises ValueError.
    """
    if tuple(config.window_size) != (-1, 0):
        raise ValueError(f"window_size must be (-1, 0) for a dilated pattern to say what is seen, got {config.window_size}")
    fields = _fields(pattern, backend, "auto", replaced=config)
    return DilatedVarlenAttention.Config(**fields)


def document_starts(mask: BlockMask, rows: int, length: int, mesh: DeviceMesh | None) -> Tensor:
    """`(B, N)` bool: where documents begin in whole sequences, read from the mask of this rank's queries.

    A token begins a document if it does not see the token before it. Every token must see itself and the first token of its
    document, but neither the next token nor the last token of the document before. Every rank of the mesh must call this function.
    If a rank finds another mask, or the mask differs between heads, all ranks raise ValueError.
    """
    if mask.shape[1] != 1:
        raise ValueError(f"attention_masks must be one mask for all heads, got {mask.shape[1]}")
    rank, size = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    total, device = length * size, mask.kv_indices.device
    query = torch.arange(length, device=device)
    positions, row = query + rank * length, torch.arange(rows, device=device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=device)

    def sees(key: Tensor) -> Tensor:
        """`(B, N local)`: whether the queries see these keys, False where there is no such key."""
        inside = (key >= 0) & (key < total)
        return mask.mask_mod(row, head, query, key.clamp(0, total - 1)) & inside

    starts = ~sees(positions - 1).expand(rows, length)
    if mesh is not None:
        local = starts.to(torch.uint8).contiguous()
        shards = [torch.empty_like(local) for _ in range(size)]
        dist.all_gather(shards, local, mesh.get_group())
        starts = torch.cat(shards, dim=1).bool()
    first = torch.where(starts, torch.arange(total, device=device), 0).cummax(1).values[:, rank * length :][:, :length]
    is_valid = (sees(positions) & ~sees(positions + 1) & sees(first) & ~sees(first - 1)).all()
    if mesh is not None:
        is_valid = is_valid.long()
        dist.all_reduce(is_valid, dist.ReduceOp.MIN, mesh.get_group())
    if not bool(is_valid):
        raise ValueError(
            "attention_masks must be the causal mask of packed documents over contiguous shards, got another; the pattern says "
            "what else is seen, and --parallelism.context_parallel_load_balancer must be None"
        )
    return starts


def _fields(pattern: DilatedPattern | Mapping[str, Any], backend: str, exchange: str, replaced: Any) -> dict[str, Any]:
    """The fields of a config in place of torchtitan's own."""
    for name, value, choices in (("backend", backend, ("auto", *BACKENDS)), ("exchange", exchange, EXCHANGES)):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    pattern = pattern if isinstance(pattern, DilatedPattern) else DilatedPattern.from_dict(pattern)
    inherited = {"param_init": replaced.param_init, "sharding_config": replaced.sharding_config}
    return {"pattern": pattern, "backend": backend, "exchange": exchange, **inherited}


def _without_gather(sharding: ShardingConfig | None) -> ShardingConfig:
    """Keys and values where they come from: torchtitan would gather them on the `cp` axis, and add up their gradients."""
    source: dict[str, Any] = {} if sharding is None else sharding.in_src_shardings or {}
    layouts = list(source.values())
    is_uniform = set(source) == set(INPUTS) and all(layout == layouts[0] for layout in layouts)
    if sharding is None or sharding.local_map is None or not is_uniform or sharding.out_src_shardings != layouts[0]:
        raise NotImplementedError(
            f"sharding_config must shard {', '.join(INPUTS)} and the output alike over a cp axis, as torchtitan's GQA does, got "
            f"{sharding}"
        )
    local_map = dataclasses.replace(sharding.local_map, in_grad_placements=tuple(source[name] for name in INPUTS))
    return dataclasses.replace(sharding, in_dst_shardings=dict(source), local_map=local_map)
