"""Attention without parameters under the names and arguments of earlier packages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from flexdilated.compat.arguments import Lengths, ignores, pattern_of
from flexdilated.nn.attention import DilatedAttention as Attention
from flexdilated.ordering import check_grid, grid_order, reorder, restore

IGNORED = ("enable_memory_pool", "enable_profiling", "lightweight_pool", "device", "dtype")
IGNORED_BY_RING = (*IGNORED, "ring_size", "use_tf32", "use_flash_attention", "use_pattern_cache", "block_size", "use_checkpointing")


class _Attention(nn.Module):
    """Grouped dilated attention: each branch has its own heads, and the output is 0 at positions that a head does not keep."""

    def __init__(
        self,
        segment_lengths: Lengths,
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        *,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        pattern = pattern_of(segment_lengths, dilation_rates)
        self.attention = Attention(pattern, scale=softmax_scale, dropout_p=dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        """`(b, n, h, d)` from query, key and value of that shape; see `flexdilated.dilated_attention`."""
        return self.attention(query, key, value, is_causal=is_causal)


@ignores(*IGNORED, last="op")
class DilatedAttention(_Attention):
    """The popular port's attention.

    >>> DilatedAttention([16, 64], [1, 2])(*torch.randn(3, 2, 64, 4, 8)).shape
    torch.Size([2, 64, 4, 8])
    """

    def __init__(
        self,
        segment_lengths: Lengths,
        dilation_rates: Sequence[int],
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, attention_dropout, softmax_scale=softmax_scale)


@ignores(*IGNORED, last="use_tf32")
class ImprovedDilatedAttention(_Attention):
    """`DilatedAttention` with the arguments of the forks.

    >>> ImprovedDilatedAttention([16, 64], [1, 2], dropout=0.1).eval()(*torch.randn(3, 2, 64, 4, 8)).shape
    torch.Size([2, 64, 4, 8])
    """

    def __init__(self, segment_lengths: Lengths, dilation_rates: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__(segment_lengths, dilation_rates, dropout)


@ignores(*IGNORED_BY_RING)
class RingDilatedAttention(_Attention):
    """The ring classes' attention, with the arguments of all of them.

    >>> RingDilatedAttention([16, 64], [1, 2])(*torch.randn(3, 2, 64, 4, 8)).shape
    torch.Size([2, 64, 4, 8])

    Each process computes the whole output from whole inputs. To share work or memory, use `flexdilated.DilatedAttention(mesh=...)`.
    """


@ignores(*IGNORED_BY_RING, "hilbert_chunk_size")
class RingDilatedAttentionHybridHilbert(RingDilatedAttention):
    """Dilated attention whose segments are compact patches of a 2-D grid: `RingDilatedAttention` along a Hilbert curve.

    >>> RingDilatedAttentionHybridHilbert([16, 64], [1, 2], grid=(8, 8))(*torch.randn(3, 2, 64, 4, 8)).shape
    torch.Size([2, 64, 4, 8])

    The earlier class reordered keys and values only. Here queries, keys and values are reordered, and outputs are put back.

    Raises:
        ValueError: If `grid`, the `(height, width)` of tokens numbered row by row, is missing: 1-D text has no curve.
    """

    permutation: Tensor
    inverse: Tensor

    def __init__(
        self,
        segment_lengths: Lengths,
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        *,
        grid: Sequence[int] | None = None,
        use_hilbert: bool = True,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, dropout, softmax_scale=softmax_scale)
        self.use_hilbert = use_hilbert
        if use_hilbert:
            order = grid_order(check_grid(grid))  # type: ignore[arg-type]  # None raises there, with the reason
            for name, positions in zip(("permutation", "inverse"), order):
                self.register_buffer(name, positions, persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        """`(b, height * width, h, d)` from query, key and value of that shape, in the original order.

        Raises:
            ValueError: If the number of tokens is not `height * width`.
            NotImplementedError: If causal: the order along the curve is not the order of the tokens.
        """
        if not self.use_hilbert:
            return super().forward(query, key, value, is_causal)
        if is_causal:
            raise NotImplementedError(
                "is_causal must be False when use_hilbert=True, got True: the tokens before a token along the curve are not those "
                "before it in the grid; to be causal along the curve, reorder the tokens themselves with flexdilated.ordering"
            )
        order = self.permutation, self.inverse
        query, key, value = (reorder(x, order) for x in (query, key, value))
        return restore(super().forward(query, key, value), order)
