"""Names and arguments of earlier dilated-attention packages, mapped onto the one implementation (docs/migration.md)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flexdilated.nn import attention
from flexdilated.ordering import check_grid, grid_order, reorder, restore
from flexdilated.pattern import DilatedPattern

__all__ = [
    "ARGUMENTS",
    "Argument",
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


class Argument(NamedTuple):
    """What an argument of the earlier packages means here, or why it is no longer needed; and which classes warn of it."""

    meaning: str
    warns: Literal["never", "always", "without parameters"] = "never"


# The text of the warnings and of the table in docs/migration.md.
ARGUMENTS: dict[str, Argument] = {
    "segment_lengths": Argument("tokens per segment, one per branch; the sequence need not be a multiple of them"),
    "dilation_rates": Argument("every r-th token of a segment is kept, one rate per branch"),
    "softmax_scale": Argument("multiplies the scores; None: head_dim ** -0.5"),
    "attention_dropout": Argument("probability of dropping an attention weight in training"),
    "dropout": Argument("probability of dropping an attention weight in training"),
    "bias": Argument("whether the four projections have a bias"),
    "layer_norm": Argument(
        "whether a LayerNorm stands before the output projection; its weights load under their earlier name `norm` too"
    ),
    "layer_norm_eps": Argument("epsilon of that LayerNorm"),
    "gamma_init": Argument("gain of the initial value and output projections"),
    "ring_size": Argument("must be None or 1: the whole sequence is computed where it is"),
    "use_checkpointing": Argument("computes the layer again in the backward pass instead of keeping it; off unless given"),
    "use_hilbert": Argument("whether queries, keys and values are reordered along a Hilbert curve, and outputs put back"),
    "grid": Argument("(height, width) of the 2-D tokens that a Hilbert curve orders; the earlier packages had no such argument"),
    "device": Argument(
        "where the parameters live; attention without parameters computes where its inputs are", "without parameters"
    ),
    "dtype": Argument("of the parameters; attention without parameters computes in the dtype of its inputs", "without parameters"),
    "op": Argument(
        "the kernel is chosen by device, dtype and mask; to name one, use flexdilated.dilated_attention(backend=...)", "always"
    ),
    "use_flash_attention": Argument(
        "the kernel is chosen by device, dtype and mask; to name one, use flexdilated.dilated_attention(backend=...)", "always"
    ),
    "use_tf32": Argument("a layer changes no global setting; call torch.set_float32_matmul_precision", "always"),
    "enable_memory_pool": Argument(
        "there is nothing to pool: branches are views, and only q, k, v, out and lse are kept", "always"
    ),
    "lightweight_pool": Argument("there is no memory pool", "always"),
    "enable_profiling": Argument("a layer does not profile itself; use torch.profiler", "always"),
    "use_pattern_cache": Argument("the plan of a pattern is plain integers and always cached", "always"),
    "block_size": Argument("the kernel chooses its own blocks", "always"),
    "hilbert_chunk_size": Argument("one curve covers the whole grid", "always"),
}


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
        ring_size: int | None = None,
    ) -> None:
        super().__init__()
        _check_ring_size(ring_size)
        _warn_of(ignored)
        self.use_checkpointing = use_checkpointing
        pattern = DilatedPattern.grouped(segment_lengths, dilation_rates)
        self.attention = attention.DilatedAttention(pattern, scale=softmax_scale, dropout_p=dropout)

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
    """The attention of the ring classes, with the arguments of all of them, which are explained in `ARGUMENTS`."""

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        *,
        softmax_scale: float | None = None,
        ring_size: int | None = None,
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
            ring_size=ring_size,
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
        _warn_of({"hilbert_chunk_size": hilbert_chunk_size})
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
        ring_size: int | None = None,
    ) -> None:
        _check_ring_size(ring_size)
        _warn_of(ignored)
        super().__init__(
            embed_dim,
            num_heads,
            DilatedPattern.grouped(segment_lengths, dilation_rates),
            dropout_p=dropout,
            bias=bias,
            layer_norm=layer_norm,
            layer_norm_eps=layer_norm_eps,
            gamma_init=gamma_init,
            device=device,
            dtype=dtype,
        )
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
    """The layer of the ring classes, segment lengths before dilation rates; arguments are explained in `ARGUMENTS`."""

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
            ring_size=ring_size,
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
            ring_size=ring_size,
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


# -- what they share ---------------------------------------------------------------------------------------------------------------


def _check_ring_size(ring_size: int | None) -> None:
    if ring_size not in (None, 1):
        raise NotImplementedError(
            f"ring_size must be None or 1, got {ring_size!r}: a sequence cannot be sharded over ranks yet; call it on the whole one"
        )


def _warn_of(given: Mapping[str, object]) -> None:
    """One warning for each argument that was given though it has no effect, at the line that gave it.

    Python shows a warning once per such line, so a loop that builds layers warns once.
    """
    for name, value in given.items():
        if value is None:
            continue
        frame, level = sys._getframe(1), 2
        while frame.f_back is not None and frame.f_code.co_filename == __file__:
            frame, level = frame.f_back, level + 1
        warnings.warn(f"{name} has no effect: {ARGUMENTS[name].meaning}", stacklevel=level)


def _rename_weights(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Earlier names to today's: `norm` is `inner_attn_ln`, and a fused `qkv_proj` is three projections."""
    for part in ("weight", "bias"):
        if prefix + f"norm.{part}" in state:
            state[prefix + f"inner_attn_ln.{part}"] = state.pop(prefix + f"norm.{part}")
        if prefix + f"qkv_proj.{part}" in state:
            for name, rows in zip("qkv", state.pop(prefix + f"qkv_proj.{part}").chunk(3)):
                state[prefix + f"{name}_proj.{part}"] = rows
