"""Which lists of a block mask are kept, and what compiled code is given instead of them."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode

from flexdilated import DilatedPattern, create_dilated_block_mask, dilated_mask_mod
from flexdilated.core.custom_op import encode
from flexdilated.masks import block_mask
from flexdilated.masks.block_mask import block_mask_for
from flexdilated.masks.blocks import most_columns

CPU, META = torch.device("cpu"), torch.device("meta")
PATTERNS = {  # of 1,030 tokens, 9 blocks
    "narrow": DilatedPattern((128, 256), (1, 3)),  # no row joins as many
    "wide": DilatedPattern((900, 1100), (1, 300), offsets="interleaved"),
    "grouped": DilatedPattern.grouped((256, 700), (2, 5)),
    "window": DilatedPattern((256,), (3,), window=150),
}
NAMES = [f"{kind}_{of}" for kind in ("kv", "full_kv", "q", "full_q") for of in ("num_blocks", "indices")]


def build(pattern: DilatedPattern, device: torch.device, *, is_causal: bool, narrows: bool) -> BlockMask:
    mask_mod = dilated_mask_mod(pattern, 4, seq_len=1030, is_causal=is_causal, num_kv_heads=2)
    return block_mask_for(pattern, 4, 2, 1030, is_causal, device, mask_mod, narrows=narrows)


@pytest.fixture
def traced() -> Iterator[None]:
    """What the compiler takes, run as it stands. Another function for the question would break the compiler for all other tests."""
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True):
        yield


class Asked(TorchDispatchMode):
    """What the operator is asked for: lists of queries, or of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.of_queries: list[bool] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.flexdilated.block_lists.default:
            self.of_queries.append(args[-1])
        return function(*args, **kwargs or {})


def blocks(counts: Tensor, indices: Tensor) -> list[list[list[int]]]:
    """Of every head and row, the listed blocks."""
    return [[row[:n].tolist() for n, row in zip(*head)] for head in zip(counts[0], indices[0])]


def listed(mask: BlockMask, kind: str) -> list[list[list[int]]]:
    return blocks(getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices"))


@pytest.mark.parametrize("is_causal", [False, True], ids=["any", "causal"])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_function_that_narrows_has_the_same_blocks_and_none_that_is_full(name: str, is_causal: bool) -> None:
    pattern = PATTERNS[name]
    ours = create_dilated_block_mask(pattern, 4, seq_len=1030, is_causal=is_causal, num_kv_heads=2, device=CPU)
    plain, narrow = (build(pattern, CPU, is_causal=is_causal, narrows=narrows) for narrows in (False, True))
    assert plain.BLOCK_SIZE == narrow.BLOCK_SIZE == (128, 128)
    for kind in ("kv", "q"):
        assert listed(plain, kind) == listed(ours, kind)
        assert listed(plain, f"full_{kind}") == listed(ours, f"full_{kind}")
        both = zip(listed(plain, kind), listed(plain, f"full_{kind}"))
        assert listed(narrow, kind) == [[sorted(some + full) for some, full in zip(*head)] for head in both]
        assert not getattr(narrow, f"full_{kind}_num_blocks").any()


@pytest.mark.parametrize("narrows", [False, True])
@pytest.mark.parametrize("is_causal", [False, True], ids=["any", "causal"])
@pytest.mark.parametrize("name", PATTERNS)
def test_compiled_code_on_a_cpu_has_the_same_lists_of_keys_for_both_sides(
    name: str, is_causal: bool, narrows: bool, request: pytest.FixtureRequest
) -> None:
    eager = build(PATTERNS[name], CPU, is_causal=is_causal, narrows=narrows)
    request.getfixturevalue("traced")
    mask = build(PATTERNS[name], CPU, is_causal=is_causal, narrows=narrows)
    for kind in ("kv", "full_kv"):
        assert listed(mask, kind) == listed(eager, kind)
        assert getattr(mask, f"{kind}_indices").shape == (1, 4, 9, 9)  # what the lowering insists on
        assert getattr(mask, f"{kind}_indices").untyped_storage().nbytes() == 4 * (4 * 9 * min(9, width(name)) + 9)
    assert (mask.q_indices, mask.full_q_indices) == (mask.kv_indices, mask.full_kv_indices)  # there is no backward to read them
    if not narrows:
        ours = create_dilated_block_mask(PATTERNS[name], 4, seq_len=1030, is_causal=is_causal, num_kv_heads=2, device=CPU)
        assert [listed(ours, kind) for kind in ("kv", "full_kv")] == [listed(eager, kind) for kind in ("kv", "full_kv")]


def width(name: str) -> int:
    return most_columns(PATTERNS[name], 128, 128)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("is_causal", [False, True], ids=["any", "causal"])
@pytest.mark.parametrize("name", PATTERNS)
def test_compiled_code_elsewhere_has_narrow_lists_and_those_of_queries_where_they_differ(name: str, is_causal: bool) -> None:
    with Asked() as asked:
        mask = build(PATTERNS[name], META, is_causal=is_causal, narrows=False)
    assert asked.of_queries == ([False, True] if is_causal else [False])
    for each in NAMES:
        shape = (1, 4, 9) if each.endswith("num_blocks") else (1, 4, 9, min(9, width(name)))
        assert getattr(mask, each).shape == shape
        assert getattr(mask, each).device == META


@pytest.mark.parametrize("of_queries", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_the_operator_gives_the_lists_of_a_side_in_the_shapes_that_it_says_beforehand(name: str, of_queries: bool) -> None:
    pattern = PATTERNS[name]
    arguments = (encode(pattern), 4, 2, 1030, True, True, CPU, of_queries)
    torch.library.opcheck(torch.ops.flexdilated.block_lists.default, arguments, test_utils="test_faketensor")
    counts, indices, full_counts, full_indices = torch.ops.flexdilated.block_lists(*arguments)
    eager = build(pattern, CPU, is_causal=True, narrows=False)
    kind, rows = "q" if of_queries else "kv", (1, 4, 9, min(9, width(name)))
    assert blocks(counts[None], indices[:-9].view(rows)) == listed(eager, kind)
    assert blocks(full_counts[None], full_indices[:-9].view(rows)) == listed(eager, f"full_{kind}")


def test_a_gpu_takes_blocks_of_whole_tiles() -> None:
    mask = create_dilated_block_mask(DilatedPattern((4,), (2,)), 2, seq_len=64, device=META, BLOCK_SIZE=(16, 48))
    assert mask.kv_num_blocks.shape == (1, 2, 4)
    with pytest.raises(ValueError, match=r"BLOCK_SIZE must be a multiple of 16 on meta.*got \(8, 16\)"):
        create_dilated_block_mask(DilatedPattern((4,), (2,)), 2, seq_len=64, device=META, BLOCK_SIZE=(8, 16))


def test_of_lists_above_16_mib_two_are_kept_and_of_smaller_ones_many() -> None:
    """Entries of 4 bytes, as many as every head and row of blocks may have: for 2,048 rows of as many, 2 ** 22."""

    def kept(heads: int, seq_len: int, size: int = 1) -> tuple[int, int]:
        create_dilated_block_mask(DilatedPattern((2048,), (2048,)), heads, seq_len=seq_len, device=CPU, BLOCK_SIZE=size)
        return block_mask._find_lists.cache_info().currsize, block_mask._find_large_lists.cache_info().currsize

    for cache in (block_mask._find_lists, block_mask._find_large_lists):
        cache.cache_clear()
    assert kept(1, 2048) == (1, 0)
    assert kept(2, 2048) == (1, 1)
    assert kept(1, 2049) == (1, 2)
    assert kept(3, 2048) == (1, 2)
    assert kept(1, 2047) == (2, 2)
    assert kept(1, 1024) == (3, 2)
    assert kept(2, 2048, 16) == (4, 2)
