"""Attention without parameters under the names and arguments of earlier packages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flexdilated.compat.arguments import warns
from flexdilated.compat.ring import attention_over
from flexdilated.core.pattern import DilatedPattern
from flexdilated.ordering import check_grid, grid_order, reorder, restore


class _Attention(nn.Module):
    """Grouped dilated attention on `(b, n, h, d)` tensors; every branch has its own heads, positions it does not keep are 0."""

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        softmax_scale: float | None,
        dropout: float,
        *,
        ring_size: int | None = 1,
        group: dist.ProcessGroup | None = None,
        use_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.use_checkpointing = use_checkpointing
        pattern = DilatedPattern.grouped(segment_lengths, dilation_rates)
        self.attention = attention_over(pattern, ring_size, group, scale=softmax_scale, dropout_p=dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        """`(b, n, h, d)` from query, key and value of that shape; see `flexdilated.dilated_attention`."""
        if self.use_checkpointing:
            return checkpoint(self.attention, query, key, value, is_causal=is_causal, use_reentrant=False)
        return self.attention(query, key, value, is_causal=is_causal)


class DilatedAttention(_Attention):
    """The popular port's attention; its arguments are explained in `ARGUMENTS`."""

    @warns("always", "without parameters")
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
        super().__init__(segment_lengths, dilation_rates, softmax_scale, attention_dropout)


class ImprovedDilatedAttention(_Attention):
    """The same under another name; its arguments are explained in `ARGUMENTS`."""

    @warns("always", "without parameters")
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
        super().__init__(segment_lengths, dilation_rates, None, dropout)


class RingDilatedAttention(_Attention):
    """The attention of the ring classes, with the arguments of all of them, which are explained in `ARGUMENTS`.

    As there, every rank of the ring gives the whole query, key and value, the same on all ranks, and gets the whole output; each
    computes the outputs of its own part of the tokens. Gradients too are whole, and those of one process, if all ranks compute
    the same loss from the output. To hold only a part of the sequence on each rank: `flexdilated.DilatedAttention(mesh=...)`.

    Raises:
        ValueError: If `ring_size` is neither 1 nor the number of ranks of the group.
    """

    @warns("always", "without parameters")
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
            softmax_scale,
            dropout,
            ring_size=ring_size,
            group=group,
            use_checkpointing=use_checkpointing,
        )


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

    @warns("always", "without parameters")
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
        )
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
