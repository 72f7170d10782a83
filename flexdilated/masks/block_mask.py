"""The `BlockMask` of a pattern: the lists of blocks that hold a joined pair, for every head, in eager and in compiled code."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexdilated.core.call import MaskMod
from flexdilated.core.custom_op import decode, encode
from flexdilated.core.functorch import in_no_mode
from flexdilated.core.integers import is_integer
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.tracing import uncached
from flexdilated.masks.blocks import BlockLists, Direction, HeadBranch, block_lists, head_branches, most_columns
from flexdilated.masks.functions import checked, mask_mod_of

LARGE = 1 << 22  # entries: 16 MiB
TILE = 16  # the least that Triton's matrix product takes


def create_dilated_block_mask(
    pattern: DilatedPattern,
    num_heads: int,
    *,
    seq_len: int,
    is_causal: bool = False,
    device: torch.device | str,
    BLOCK_SIZE: int | tuple[int, int] = 128,  # noqa: N803  torch's name
    num_kv_heads: int | None = None,
) -> BlockMask:
    """The `BlockMask` of `dilated_mask_mod`, of shape `(1, num_heads, seq_len, seq_len)`, built in closed form.

    >>> mask = create_dilated_block_mask(DilatedPattern.causal(1024, 8), 8, seq_len=1024, is_causal=True, device='cpu')
    >>> mask.shape, mask.kv_num_blocks.shape  # blocks of 128 tokens
    ((1, 8, 1024, 1024), torch.Size([1, 8, 8]))

    It lists the same blocks as `torch.nn.attention.flex_attention.create_block_mask`, at a cost that grows with their number. The
    lists are only as wide as their fullest row, which slicing, `as_tuple`, `to_dense` and `str` of torch's class do not
    expect. Results are cached: do not write into them.

    Args:
        pattern: As in `dilated_mask_mod`, like all arguments that are not listed here.
        device: Where the lists live: that of q, k and v.
        BLOCK_SIZE: Tokens per block, or `(query tokens, key tokens)` per block.

    Raises:
        TypeError: As `dilated_mask_mod`.
        ValueError: As `dilated_mask_mod`; or if a block size is below 1, or no multiple of 16 on a GPU.
        NotImplementedError: As `dilated_mask_mod`; or, inside `torch.compile`, for a block size other than 128.
    """
    num_kv_heads = checked(pattern, num_heads, seq_len, is_causal, num_kv_heads)
    sizes = _block_sizes(BLOCK_SIZE)
    device = torch.empty(0, device=device).device  # with its index
    if device.type != "cpu" and any(size % TILE for size in sizes):
        raise ValueError(f"BLOCK_SIZE must be a multiple of {TILE} on {device}, the least tile of its kernels, got {BLOCK_SIZE}")
    if torch.compiler.is_compiling() and sizes != (128, 128):
        raise NotImplementedError(f"BLOCK_SIZE must be 128 inside torch.compile, got {BLOCK_SIZE}; build the mask outside")
    return block_mask_for(
        pattern,
        num_heads,
        num_kv_heads,
        seq_len=seq_len,
        is_causal=is_causal,
        device=device,
        mask_mod=uncached(mask_mod_of)(pattern, num_heads, num_kv_heads, is_causal),
        narrows=False,
        sizes=sizes,
    )


def block_mask_for(
    pattern: DilatedPattern,
    num_heads: int,
    num_kv_heads: int,
    seq_len: int,
    is_causal: bool,
    device: torch.device,
    mask_mod: MaskMod,
    *,
    narrows: bool,
    sizes: tuple[int, int] = (128, 128),
) -> BlockMask:
    """The block mask of a pattern with another mask function, which may remove pairs of the pattern.

    `narrows`: whether the function removes pairs that the pattern joins; then every block is listed as partial. Under the compiler,
    with blocks of 128, the lists come from an opaque operator: one graph serves every length.
    """
    if not torch.compiler.is_compiling():
        kv, q = _lists(
            _Wanted(
                pattern=pattern,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                seq_len=seq_len,
                is_causal=is_causal,
                sizes=sizes,
                device=device,
                separate_full=not narrows,
            )
        )
        return assemble(kv, q, (seq_len, seq_len), sizes, mask_mod)
    arguments = (encode(pattern), num_heads, num_kv_heads, seq_len, is_causal, not narrows, device)
    kv = _shaped(_traced_lists(*arguments, False), seq_len, pattern, num_heads, device)
    needs_queries = is_causal and device.type != "cpu"  # only a backward reads them
    q = _shaped(_traced_lists(*arguments, True), seq_len, pattern, num_heads, device) if needs_queries else kv
    return assemble(kv, q, (seq_len, seq_len), sizes, mask_mod)


def assemble(kv: BlockLists, q: BlockLists, seq_lengths: tuple[int, int], sizes: tuple[int, int], mask_mod: MaskMod) -> BlockMask:
    """The `BlockMask` from the key blocks of each query block (`kv`) and the query blocks of each key block (`q`)."""
    return BlockMask(
        seq_lengths=seq_lengths,
        kv_num_blocks=kv.partial_counts,
        kv_indices=kv.partial_indices,
        full_kv_num_blocks=kv.full_counts,
        full_kv_indices=kv.full_indices,
        q_num_blocks=q.partial_counts,
        q_indices=q.partial_indices,
        full_q_num_blocks=q.full_counts,
        full_q_indices=q.full_indices,
        BLOCK_SIZE=sizes,
        mask_mod=mask_mod,
    )


class _Wanted(NamedTuple):
    """Everything that determines the lists of a block mask, as a cache key."""

    pattern: DilatedPattern
    num_heads: int
    num_kv_heads: int
    seq_len: int
    is_causal: bool
    sizes: tuple[int, int]
    device: torch.device
    separate_full: bool


def _lists(key: _Wanted) -> tuple[BlockLists, BlockLists]:
    """`(kv, q)` block lists, `(1, heads, ...)` each, from one of two caches: large lists are kept for few keys."""
    rows, columns = (key.seq_len // size for size in key.sizes)
    large = key.num_heads * rows * min(columns, most_columns(key.pattern, *key.sizes)) > LARGE
    return _find_large_lists(key) if large else _find_lists(key)


@lru_cache(maxsize=64)
@in_no_mode
def _find_lists(key: _Wanted) -> tuple[BlockLists, BlockLists]:
    pattern, num_heads, num_kv_heads, seq_len, is_causal, sizes, device, separate_full = key
    classes: dict[tuple[HeadBranch, ...], int] = {}
    kinds = [head_branches(pattern, h, num_kv_heads, seq_len) for h in range(num_kv_heads)]
    class_of_head = [classes.setdefault(kind, len(classes)) for kind in kinds for _ in range(num_heads // num_kv_heads)]

    def side(row_size: int, column_size: int, direction: Direction) -> BlockLists:
        lists_of_class = [
            block_lists(kind, seq_len, row_size, column_size, direction, separate_full=separate_full) for kind in classes
        ]
        return by_head(lists_of_class, class_of_head, -(-seq_len // column_size), device)

    kv = side(sizes[0], sizes[1], "before" if is_causal else "any")
    symmetric = not is_causal and sizes[0] == sizes[1]
    return kv, kv if symmetric else side(sizes[1], sizes[0], "after" if is_causal else "any")


_find_large_lists = lru_cache(maxsize=2)(_find_lists.__wrapped__)


def by_head(lists_of_class: list[BlockLists], class_of_head: list[int], columns: int, device: torch.device) -> BlockLists:
    """The lists of the distinct heads as `(1, heads, ...)` tensors; equal heads share memory."""
    # Both kinds of lists need one width: kernels read the lists of full blocks with the strides of the partial ones (kernels of
    # attention up to torch 2.12, the kernel of decoding still).
    width = max(indices.shape[1] for lists in lists_of_class for indices in (lists.partial_indices, lists.full_indices))
    return BlockLists(*(_stacked(parts, class_of_head, width, columns, device) for parts in zip(*lists_of_class)))


def _stacked(parts: tuple[Tensor, ...], class_of_head: list[int], width: int, columns: int, device: torch.device) -> Tensor:
    if parts[0].dim() == 1:
        stacked = torch.stack(parts)
    else:
        stacked = torch.stack([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])
    is_shared = len(parts) == 1
    lists = (stacked if is_shared else stacked[torch.tensor(class_of_head, device="cpu")]).to(device)
    if lists.dim() == 3 and device.type == "cpu":
        # One more where they fill the rows, so that the strides never look contiguous: the compiler would make two graphs of it.
        lists = torch.nn.functional.pad(lists, (0, 1)) if lists.shape[2] == columns else lists
        flat = torch.cat([lists.flatten(), lists.new_zeros(columns)])
        lists = _full_width(flat, lists.shape[0], lists.shape[1], lists.shape[2], columns)
    return lists[None].expand(1, len(class_of_head), *lists.shape[1:]) if is_shared else lists[None]


def _full_width(flat: Tensor, heads: int, rows: int, width: int, columns: int) -> Tensor:
    """`(heads, rows, columns)` over the memory of narrow lists: rows overlap, and what follows a row's own blocks is never read.

    The CPU lowering of flex_attention insists on lists as wide as the sequence has blocks.
    """
    return flat.as_strided((heads, rows, columns), (rows * width, width, 1))


def _traced_size(pattern: DilatedPattern, seq_len: int) -> tuple[int, int]:
    """For blocks of 128: the number of block rows, and an upper bound of the list width that depends on sizes only."""
    rows = -(-seq_len // 128)
    return rows, min(rows, most_columns(pattern, 128, 128))


# In no CUDA graph, whose memory is written again at every replay: these lists are kept, and made on the host.
@torch.library.custom_op("flexdilated::block_lists", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _traced_lists(
    encoded_pattern: list[int],
    num_heads: int,
    num_kv_heads: int,
    seq_len: int,
    is_causal: bool,
    separate_full: bool,
    device: torch.device,
    of_queries: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts `(heads, rows)` and flat indices of partial and full blocks, padded to a width that is known beforehand."""
    pattern = decode(encoded_pattern)
    lists = _lists(
        _Wanted(
            pattern=pattern,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            seq_len=seq_len,
            is_causal=is_causal,
            sizes=(128, 128),
            device=device,
            separate_full=separate_full,
        )
    )[of_queries]
    rows, width = _traced_size(pattern, seq_len)

    def flat(indices: Tensor) -> Tensor:
        indices_narrow = indices[0, :, :, :width]
        padded = torch.nn.functional.pad(indices_narrow, (0, width - indices_narrow.shape[2]))
        return torch.cat([padded.flatten(), padded.new_zeros(rows)])

    # Copies: the compiler may reuse the memory of what an operator returns, and these lists are kept.
    return (
        lists.partial_counts[0].clone(memory_format=torch.contiguous_format),
        flat(lists.partial_indices),
        lists.full_counts[0].clone(memory_format=torch.contiguous_format),
        flat(lists.full_indices),
    )


@_traced_lists.register_fake
def _(encoded_pattern: list[int], *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_heads, _, seq_len, _, _, device, _ = options
    rows, width = _traced_size(decode(encoded_pattern), seq_len)
    counts, flat = (num_heads, rows), (num_heads * rows * width + rows,)
    partial, indices, full, full_indices = (
        torch.empty(shape, dtype=torch.int32, device=device) for shape in (counts, flat, counts, flat)
    )
    return partial, indices, full, full_indices


def _shaped(
    lists: tuple[Tensor, Tensor, Tensor, Tensor], seq_len: int, pattern: DilatedPattern, num_heads: int, device: torch.device
) -> BlockLists:
    """The outputs of `_traced_lists` as `(1, heads, ...)` lists of a BlockMask."""
    rows, width = _traced_size(pattern, seq_len)
    columns = rows if device.type == "cpu" else width

    def shaped(flat: Tensor) -> Tensor:
        return _full_width(flat, num_heads, rows, width, columns)[None]

    partial_counts, partial_indices, full_counts, full_indices = lists
    return BlockLists(partial_counts[None], shaped(partial_indices), full_counts[None], shaped(full_indices))


def _block_sizes(size: int | tuple[int, int]) -> tuple[int, int]:
    sizes = size if isinstance(size, tuple) else (size, size)
    if len(sizes) != 2 or any(not is_integer(s) for s in sizes):
        raise TypeError(f"BLOCK_SIZE must be an integer or a pair of them, got {size!r}")
    if min(sizes) < 1:
        raise ValueError(f"BLOCK_SIZE must be at least 1, got {size}")
    return sizes
