"""Attention and its layers under the names and arguments of earlier packages, mapped onto the one implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from flexdilated.compat.arguments import warn_of
from flexdilated.distributed.attention import withdraw_from
from flexdilated.distributed.sharding import even_shard_lengths, shard_sequence, unshard_sequence
from flexdilated.nn import attention
from flexdilated.ordering import check_grid, grid_order, reorder, restore
from flexdilated.pattern import DilatedPattern
from flexdilated.reference import MaskMod, ScoreMod

__all__ = [
    "DilatedAttention",
    "ImprovedDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "MultiheadDilatedAttention",
    "RingAdvancedDistributedDilatedAttention",
    "RingDilatedAttention",
    "RingDilatedAttentionHybrid",
    "RingDilatedAttentionHybridFixed",
    "RingDilatedAttentionHybridHilbert",
    "RingDilatedAttentionV2Collective",
    "RingDilatedAttentionV3",
    "RingMultiheadDilatedAttention",
    "RingMultiheadDilatedAttentionHybrid",
]


# -- attention without parameters ---------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    """Grouped dilated attention on `(b, n, h, d)` tensors; every branch has its own heads, positions it does not keep are 0."""

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        softmax_scale: float | None,
        dropout: float,
        ignored: Mapping[str, object],
        use_checkpointing: bool = False,
        ring: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        warn_of(ignored)
        self.use_checkpointing = use_checkpointing
        pattern = DilatedPattern.grouped(segment_lengths, dilation_rates)
        self.attention = _attention_over(ring, pattern, softmax_scale, dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        """`(b, n, h, d)` from query, key and value of that shape; see `flexdilated.dilated_attention`."""
        if self.use_checkpointing:
            return checkpoint(self.attention, query, key, value, is_causal=is_causal, use_reentrant=False)
        return self.attention(query, key, value, is_causal=is_causal)


class DilatedAttention(_Attention):
    """The popular port's attention; its arguments are explained in `ARGUMENTS`."""

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        op: object = None,
        *,
        enable_memory_pool: bool | None = None,
        enable_profiling: bool | None = None,
        lightweight_pool: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        ignored = {
            "op": op,
            "enable_memory_pool": enable_memory_pool,
            "enable_profiling": enable_profiling,
            "lightweight_pool": lightweight_pool,
            "device": device,
            "dtype": dtype,
        }
        super().__init__(segment_lengths, dilation_rates, softmax_scale=softmax_scale, dropout=attention_dropout, ignored=ignored)


class ImprovedDilatedAttention(_Attention):
    """The same under another name; its arguments are explained in `ARGUMENTS`."""

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        use_tf32: bool | None = None,
        *,
        enable_memory_pool: bool | None = None,
        enable_profiling: bool | None = None,
        lightweight_pool: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        ignored = {
            "use_tf32": use_tf32,
            "enable_memory_pool": enable_memory_pool,
            "enable_profiling": enable_profiling,
            "lightweight_pool": lightweight_pool,
            "device": device,
            "dtype": dtype,
        }
        super().__init__(segment_lengths, dilation_rates, softmax_scale=None, dropout=dropout, ignored=ignored)


class RingDilatedAttention(_Attention):
    """The attention of the ring classes, with the arguments of all of them, which are explained in `ARGUMENTS`.

    As there, every rank of the ring gives the whole query, key and value, the same on all ranks, and gets the whole output; each
    computes the outputs of its own part of the tokens. Gradients too are whole, and those of one process, if all ranks compute
    the same loss from the output. To hold only a part of the sequence on each rank: `flexdilated.DilatedAttention(mesh=...)`.

    Raises:
        ValueError: If `ring_size` is neither 1 nor the number of ranks of the group.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        *,
        softmax_scale: float | None = None,
        ring_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        use_checkpointing: bool = False,
        use_tf32: bool | None = None,
        use_flash_attention: bool | None = None,
        enable_memory_pool: bool | None = None,
        enable_profiling: bool | None = None,
        lightweight_pool: bool | None = None,
        use_pattern_cache: bool | None = None,
        block_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            segment_lengths,
            dilation_rates,
            softmax_scale=softmax_scale,
            dropout=dropout,
            use_checkpointing=use_checkpointing,
            ring=_ring(ring_size, group),
            ignored={
                "use_tf32": use_tf32,
                "use_flash_attention": use_flash_attention,
                "enable_memory_pool": enable_memory_pool,
                "enable_profiling": enable_profiling,
                "lightweight_pool": lightweight_pool,
                "use_pattern_cache": use_pattern_cache,
                "block_size": block_size,
                "device": device,
                "dtype": dtype,
            },
        )


RingDilatedAttentionHybrid = RingDilatedAttention
RingDilatedAttentionHybridFixed = RingDilatedAttention
RingDilatedAttentionV2Collective = RingDilatedAttention
RingDilatedAttentionV3 = RingDilatedAttention


class RingDilatedAttentionHybridHilbert(RingDilatedAttention):
    """Dilated attention whose segments are compact patches of a 2-D grid: tokens are reordered before and put back after.

    The earlier class reordered keys and values only, so that queries met keys of other places. Here all three move.

    Args:
        segment_lengths: As in `RingDilatedAttention`, like all arguments that are not listed here.
        dilation_rates: As there.
        dropout: As there.
        grid: `(height, width)` of the tokens, which are numbered row by row.
        use_hilbert: Whether to reorder at all.
        hilbert_chunk_size: Has no effect.

    Raises:
        ValueError: If there is no grid: tokens of 1-D text have no curve.
    """

    permutation: Tensor
    inverse: Tensor

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        *,
        grid: Sequence[int] | None = None,
        use_hilbert: bool = True,
        hilbert_chunk_size: int | None = None,
        softmax_scale: float | None = None,
        ring_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        use_checkpointing: bool = False,
        use_tf32: bool | None = None,
        use_flash_attention: bool | None = None,
        enable_memory_pool: bool | None = None,
        enable_profiling: bool | None = None,
        lightweight_pool: bool | None = None,
        use_pattern_cache: bool | None = None,
        block_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            segment_lengths,
            dilation_rates,
            dropout,
            softmax_scale=softmax_scale,
            ring_size=ring_size,
            group=group,
            use_checkpointing=use_checkpointing,
            use_tf32=use_tf32,
            use_flash_attention=use_flash_attention,
            enable_memory_pool=enable_memory_pool,
            enable_profiling=enable_profiling,
            lightweight_pool=lightweight_pool,
            use_pattern_cache=use_pattern_cache,
            block_size=block_size,
            device=device,
            dtype=dtype,
        )
        warn_of({"hilbert_chunk_size": hilbert_chunk_size})
        self.grid: tuple[int, int] | None = None
        if not use_hilbert:
            if grid is not None:
                raise ValueError(f"grid must be None when use_hilbert=False, got {grid!r}")
            return
        self.grid = check_grid(grid)  # type: ignore[arg-type]  # None is refused there, with the reason
        for name, places in zip(("permutation", "inverse"), grid_order(self.grid)):
            self.register_buffer(name, places, persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        """`(b, height * width, h, d)` from query, key and value of that shape, in the order in which they are given.

        Raises:
            ValueError: If the tokens are not as many as the grid's.
            NotImplementedError: If causal: along the curve, "before" is another order than the tokens'.
        """
        if self.grid is None:
            return super().forward(query, key, value, is_causal)
        if is_causal:
            raise NotImplementedError(
                "is_causal must be False when use_hilbert=True, got True: those before a token along the curve are not those "
                "before it in the grid; to be causal along the curve, reorder the tokens themselves with flexdilated.ordering"
            )
        height, width = self.grid
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 4 or x.shape[1] != height * width:
                raise ValueError(f"{name} must have shape (b, {height * width}, h, d) under grid={self.grid}, got {tuple(x.shape)}")
        order = self.permutation, self.inverse
        query, key, value = (reorder(x, order) for x in (query, key, value))
        return restore(super().forward(query, key, value), order)


# -- layers with projections -----------------------------------------------------------------------------------------------------


class _Multihead(attention.MultiheadDilatedAttention):
    """`flexdilated.MultiheadDilatedAttention` under the grouped pattern; loads earlier names of its weights."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        dropout: float,
        bias: bool,
        layer_norm: bool,
        layer_norm_eps: float,
        gamma_init: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        ignored: Mapping[str, object],
        use_checkpointing: bool = False,
        ring: dist.ProcessGroup | None = None,
    ) -> None:
        warn_of(ignored)
        pattern = DilatedPattern.grouped(segment_lengths, dilation_rates)
        super().__init__(
            embed_dim,
            num_heads,
            pattern,
            dropout_p=dropout,
            bias=bias,
            layer_norm=layer_norm,
            layer_norm_eps=layer_norm_eps,
            gamma_init=gamma_init,
            device=device,
            dtype=dtype,
        )
        self.attention = _attention_over(ring, pattern, None, dropout)
        self.use_checkpointing = use_checkpointing
        self.register_load_state_dict_pre_hook(_rename_weights)

    @classmethod
    def from_torch(cls, *_: object, **__: object) -> NoReturn:
        """Refused: the converted layer is not one of these."""
        raise NotImplementedError("from_torch must be called on flexdilated.MultiheadDilatedAttention, which takes any pattern")

    def forward(  # type: ignore[override]  # the earlier call, which has no padding mask in fourth place
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor, None]:
        """`((b, n, embed_dim), None)` from query, key and value of that shape; key defaults to query, value to key."""
        if not isinstance(is_causal, bool):
            raise TypeError(
                f"is_causal must be a bool, got {type(is_causal).__name__}; masks go to flexdilated.MultiheadDilatedAttention"
            )
        key = query if key is None else key
        value = key if value is None else value
        if self.use_checkpointing:
            return checkpoint(super().forward, query, key, value, is_causal=is_causal, use_reentrant=False)
        return super().forward(query, key, value, is_causal=is_causal)


class MultiheadDilatedAttention(_Multihead):
    """The popular port's layer, dilation rates before segment lengths as there; arguments are explained in `ARGUMENTS`."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dilation_rates: Sequence[int],
        segment_lengths: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        op: object = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            segment_lengths,
            dilation_rates,
            dropout=dropout,
            bias=bias,
            layer_norm=layer_norm,
            layer_norm_eps=layer_norm_eps,
            gamma_init=gamma_init,
            device=device,
            dtype=dtype,
            ignored={"op": op},
        )


class ImprovedMultiheadDilatedAttention(_Multihead):
    """The same with another last argument, rates before lengths as there; arguments are explained in `ARGUMENTS`."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dilation_rates: Sequence[int],
        segment_lengths: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        use_tf32: bool | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            segment_lengths,
            dilation_rates,
            dropout=dropout,
            bias=bias,
            layer_norm=layer_norm,
            layer_norm_eps=layer_norm_eps,
            gamma_init=gamma_init,
            device=device,
            dtype=dtype,
            ignored={"use_tf32": use_tf32},
        )


class RingMultiheadDilatedAttention(_Multihead):
    """The layer of the ring classes, segment lengths before dilation rates; arguments are explained in `ARGUMENTS`.

    Over a ring as `RingDilatedAttention`: whole inputs, outputs and gradients on every rank; the projections are computed on each.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        *,
        ring_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        use_checkpointing: bool = False,
        use_tf32: bool | None = None,
        use_flash_attention: bool | None = None,
        enable_memory_pool: bool | None = None,
        use_pattern_cache: bool | None = None,
        block_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            segment_lengths,
            dilation_rates,
            dropout=dropout,
            bias=bias,
            layer_norm=layer_norm,
            layer_norm_eps=layer_norm_eps,
            gamma_init=gamma_init,
            device=device,
            dtype=dtype,
            use_checkpointing=use_checkpointing,
            ring=_ring(ring_size, group),
            ignored={
                "use_tf32": use_tf32,
                "use_flash_attention": use_flash_attention,
                "enable_memory_pool": enable_memory_pool,
                "use_pattern_cache": use_pattern_cache,
                "block_size": block_size,
            },
        )


RingAdvancedDistributedDilatedAttention = RingMultiheadDilatedAttention


class RingMultiheadDilatedAttentionHybrid(_Multihead):
    """The hybrid's layer, called like `nn.MultiheadAttention`; arguments are explained in `ARGUMENTS`.

    Over a ring as `RingMultiheadDilatedAttention`; so is the mask, whole and the same on every rank.

    Raises:
        NotImplementedError: If `layer_norm` is asked for: there it normalised queries and keys, not the attention's output.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        *,
        layer_norm: bool = False,
        gamma_init: float = 1.0,
        ring_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        use_flash_attention: bool | None = None,
        enable_memory_pool: bool | None = None,
        use_pattern_cache: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if layer_norm:
            raise NotImplementedError(
                "layer_norm must be False, got True: there it normalised queries and keys; "
                "RingMultiheadDilatedAttention has a LayerNorm before the output projection"
            )
        super().__init__(
            embed_dim,
            num_heads,
            segment_lengths,
            dilation_rates,
            dropout=dropout,
            bias=bias,
            layer_norm=False,
            layer_norm_eps=1e-5,
            gamma_init=gamma_init,
            device=device,
            dtype=dtype,
            ring=_ring(ring_size, group),
            ignored={
                "use_flash_attention": use_flash_attention,
                "enable_memory_pool": enable_memory_pool,
                "use_pattern_cache": use_pattern_cache,
            },
        )

    def forward(  # type: ignore[override]  # the call of nn.MultiheadAttention again
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """As `flexdilated.MultiheadDilatedAttention`, whose docstring explains the arguments."""
        return attention.MultiheadDilatedAttention.forward(
            self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )


# -- a ring of ranks -------------------------------------------------------------------------------------------------------------

SAMPLES = 256  # elements of a tensor that ranks compare
TOLERANCE = 0.01  # of the largest of them: what rounding on other devices may differ by
EAGER_FIRST = "a module over a ring must be called once before it is compiled with fullgraph=True: that call compares the ranks"


def _ring(ring_size: int | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group whose ranks share a sequence, None where this rank is alone."""
    if ring_size is not None and (isinstance(ring_size, bool) or not isinstance(ring_size, int)):
        raise TypeError(f"ring_size must be an integer or None, got {ring_size!r}")
    if group is None:
        if ring_size == 1:
            return None
        if not (dist.is_available() and dist.is_initialized()):
            if ring_size is not None:
                raise ValueError(
                    f"ring_size must be None or 1 where torch.distributed is not initialised, got {ring_size}; "
                    "call torch.distributed.init_process_group first"
                )
            return None
        ring = distributed_c10d._get_default_group()
        if ring_size not in (None, ring.size()):
            raise ValueError(
                f"ring_size must be 1 or the number of ranks of the default group={ring.size()}, got {ring_size}; "
                "for a ring of other ranks give group"
            )
    elif isinstance(group, dist.ProcessGroup):
        ring = group
        if ring_size not in (None, ring.size()):
            raise ValueError(f"ring_size must be the number of ranks of group={ring.size()}, got {ring_size}")
    else:
        raise TypeError(f"group must be a ProcessGroup that holds this rank, or None, got {group!r}")
    return ring if ring.size() > 1 else None


def _attention_over(
    ring: dist.ProcessGroup | None, pattern: DilatedPattern, scale: float | None, dropout_p: float
) -> attention.DilatedAttention:
    if ring is None:
        return attention.DilatedAttention(pattern, scale=scale, dropout_p=dropout_p)
    return _RingAttention(pattern, ring, scale=scale, dropout_p=dropout_p)


class _RingAttention(attention.DilatedAttention):
    """Attention of whole sequences that all ranks of a group hold: each computes its shard, and each gets the whole.

    Outputs and gradients on every rank are those of one process, if all ranks go on to compute the same loss. Ranks that hold
    different sequences, as in data parallelism, would mix them: the first call compares samples of the inputs. It must not be
    compiled with `fullgraph=True`; later calls may.
    """

    def __init__(self, pattern: DilatedPattern, group: dist.ProcessGroup, *, scale: float | None, dropout_p: float) -> None:
        super().__init__(pattern, scale=scale, dropout_p=dropout_p)
        # A name is copied and pickled with the module; a group, and the mesh of it that `forward` builds, are not.
        self.group_name, self.ring_size = group.group_name, group.size()
        self.compared = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mesh": None, "compared": False}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        shard_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """As `flexdilated.DilatedAttention`, of whole sequences; `shard_lengths`, as even as can be by default, tile them."""
        whole = {"query": q, "key": k, "value": v}
        if key_padding_mask is not None:
            whole["key_padding_mask"] = key_padding_mask
        try:
            self._check(whole)
            if self.mesh is None or self.mesh.device_type != q.device.type:
                self.mesh = self._mesh(q.device.type)
            mesh = self.mesh
            lengths = even_shard_lengths(q.shape[1], self.ring_size) if shard_lengths is None else tuple(shard_lengths)
            shards = {name: _Shard.apply(x, mesh, lengths) for name, x in whole.items()}
        except (TypeError, ValueError) as error:
            withdraw_from(self.group_name, str(error))  # the other ranks would wait for this one
            raise
        out = super().forward(
            shards["query"],
            shards["key"],
            shards["value"],
            is_causal=is_causal,
            key_padding_mask=shards.get("key_padding_mask"),
            cu_seqlens=cu_seqlens,
            score_mod=score_mod,
            mask_mod=mask_mod,
            shard_lengths=lengths,
        )
        if not self.compared:
            self._compare(whole, mesh)  # after the ranks have agreed on shapes and dtypes, so that no rank waits here alone
            self.compared = True
        return unshard_sequence(out, mesh, shard_lengths=lengths)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ring_size={self.ring_size}"

    def _check(self, whole: Mapping[str, Tensor]) -> None:
        """That there are tokens to shard, as many in each; the rest is checked where the shards are."""
        for name, x in whole.items():
            dims = 2 if name == "key_padding_mask" else 4
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
            if x.dim() != dims:
                raise ValueError(f"{name} must have {dims} dims, the tokens in the second, got shape {tuple(x.shape)}")
            if x.shape[1] != whole["query"].shape[1]:
                raise ValueError(f"{name} must have the tokens of query={whole['query'].shape[1]}, got {x.shape[1]}")

    @torch.compiler.disable(reason=EAGER_FIRST)
    def _mesh(self, device_type: str) -> DeviceMesh:
        """The ranks of the ring as a mesh for tensors of a device."""
        group = distributed_c10d._resolve_process_group(self.group_name)  # type: ignore[attr-defined, arg-type, unused-ignore]
        if group.size() != self.ring_size:  # a module that another run saved
            raise ValueError(f"ring_size must be the number of ranks of the group={group.size()}, got {self.ring_size}")
        return DeviceMesh.from_group(group, device_type)

    @torch.compiler.disable(reason=EAGER_FIRST)
    def _compare(self, whole: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
        """Refuse inputs that differ between the ranks, by evenly spaced samples."""
        local = torch.stack([_samples(x) for x in whole.values()])[None]
        all_samples = unshard_sequence(local, mesh, dim=0)  # (ranks, tensors, samples)
        allowed = TOLERANCE * all_samples.abs().amax((0, 2))
        for name, differs in zip(whole, ((all_samples - all_samples[0]).abs().amax(2) > allowed).unbind(1)):
            if bool(differs.any()):
                other = int(differs.int().argmax())
                raise ValueError(
                    f"{name} must be the same on all ranks of the ring, got other values on rank {other} than on rank 0; "
                    "for data parallelism give ring_size=1"
                )


class _Shard(torch.autograd.Function):
    """This rank's shard of a tensor that all ranks hold, and backward the whole gradient on each: `unshard_sequence` reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, lengths: tuple[int, ...]) -> Tensor:
        ctx.mesh, ctx.lengths = mesh, lengths
        return shard_sequence(x, mesh, shard_lengths=lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return unshard_sequence(grad, ctx.mesh, shard_lengths=ctx.lengths), None, None


def _samples(x: Tensor) -> Tensor:
    """`(SAMPLES,)` elements of a tensor, evenly spaced in the order of its dims, without a copy of it."""
    if x.numel() == 0:
        return torch.zeros(SAMPLES, device=x.device)
    places = torch.arange(SAMPLES, device=x.device) * (x.numel() - 1) // (SAMPLES - 1)
    return x.detach()[torch.unravel_index(places, x.shape)].float()


# -- weights under earlier names --------------------------------------------------------------------------------------------------


def _rename_weights(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Earlier names to today's: `norm` is `inner_attn_ln`, and a fused `qkv_proj` is three projections."""
    for part in ("weight", "bias"):
        if prefix + f"norm.{part}" in state:
            state[prefix + f"inner_attn_ln.{part}"] = state.pop(prefix + f"norm.{part}")
        if prefix + f"qkv_proj.{part}" in state:
            for name, rows in zip("qkv", state.pop(prefix + f"qkv_proj.{part}").chunk(3)):
                state[prefix + f"{name}_proj.{part}"] = rows
