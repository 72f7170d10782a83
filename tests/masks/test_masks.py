"""The pattern as FlexAttention parts: by integers, against the oracle under FlexAttention, and against torch's own block mask."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention, or_masks
from torch.utils._python_dispatch import TorchDispatchMode

from flexdilated import DilatedPattern, create_dilated_block_mask, dilated_mask_mod, dilated_score_mod, reference
from flexdilated.masks.functions import checked_score_mod
from flexdilated.tuning.checks import Attend
from tests.cases import Case, calls, differentiate, windowed_calls
from tests.tolerances import EXACT

PATTERN = DilatedPattern((7, 13, 29), (1, 3, 5))
EVERY = (dilated_mask_mod, dilated_score_mod, partial(create_dilated_block_mask, device="cpu"))
NAMES = ["mask_mod", "score_mod", "block_mask"]

Mod = Callable[..., Tensor]


def part(make: Callable[..., Any], case: Case, **options: object) -> Any:
    """A mask, a score function or a block mask for the call."""
    heads = case.kv_heads * case.group
    return make(case.pattern, heads, seq_len=case.num_tokens, is_causal=case.is_causal, num_kv_heads=case.kv_heads, **options)


def pairs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, q_idx and kv_idx that broadcast to all pairs `(B, H, N, N)`."""
    p = torch.arange(case.num_tokens)
    heads = torch.arange(case.kv_heads * case.group)
    return torch.arange(case.batch)[:, None, None, None], heads[:, None, None], p[:, None], p


def multiplicity(case: Case) -> Tensor:
    """(H, N, N): how often a pair counts, by the definition."""
    p = torch.arange(case.num_tokens)
    count = torch.zeros(case.kv_heads, case.num_tokens, case.num_tokens, dtype=torch.float64)
    segments, near = case.pattern.split("tests")
    for i, (w, r) in enumerate(segments):
        for h in case.pattern.head_range(i, case.kv_heads):
            kept = p % w % r == case.pattern.offset(i, h, case.kv_heads)
            count[h] += kept[:, None] & kept & (p[:, None] // w == p // w)
    count[:, ((p[:, None] - p).abs() < near.window) | (torch.minimum(p[:, None], p) < near.global_tokens)] = 1
    return (count.tril() if case.is_causal else count).repeat_interleave(case.group, dim=0)


def dense(case: Case, score_mod: Mod, mask_mod: Mod | None = None) -> Attend:
    """FlexAttention's definition over all pairs, differentiable: `out` `(B, N, H, D)` and `lse`."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(case.group, dim=2) for x in (k, v))
        scores = score_mod(torch.einsum("bqhd,bkhd->bhqk", q, k) * case.head_dim**-0.5, *pairs(case))
        if mask_mod is not None:
            scores = scores.masked_fill(~mask_mod(*pairs(case)), -torch.inf)
        reached = (scores > -torch.inf).any(dim=-1, keepdim=True)
        scores = scores.masked_fill(~reached, 0.0)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1) * reached, v)
        return out, scores.logsumexp(dim=-1).masked_fill(~reached[..., 0], -torch.inf)

    return attend


def attend_by_flex(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`out` `(B, N, H, D)` and `lse` by torch's eager FlexAttention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with torch.no_grad():
        out, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True), **options)
    return out.transpose(1, 2), aux.lse


def attend_by_reference(case: Case) -> Attend:
    return lambda q, k, v: reference.dilated_attention(q, k, v, case.pattern, is_causal=case.is_causal)


def assert_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(actual, expected, **EXACT)


@settings(max_examples=150)
@given(windowed_calls())
def test_mask_mod_is_true_where_a_branch_joins_the_pair(case: Case) -> None:
    case = replace(case, pattern=replace(case.pattern, zero_padding=False))
    joined = multiplicity(case) > 0
    assert torch.equal(part(dilated_mask_mod, case)(*pairs(case)).expand_as(joined), joined)


INTERLEAVED, GROUPED, WINDOW = {"offsets": "interleaved"}, {"heads": "grouped", "window": 2**32}, {"window": 2**31}
FIRST = {"global_tokens": 2**32, "window": 3}
RULES: tuple[Any, ...] = ({}, INTERLEAVED, GROUPED, WINDOW, FIRST, {"window": 100}, {"window": 9, "global_tokens": 5})


@pytest.mark.parametrize(
    ("dtype", "rules", "compiled"),
    [
        *((dtype, rules, False) for dtype in (torch.int8, torch.int32, torch.int64) for rules in RULES),
        *((torch.int8, WINDOW, True), (torch.int32, GROUPED, True), (torch.int64, INTERLEAVED, True)),
    ],
    ids=str,
)
def test_segments_and_rates_longer_than_the_integers_of_positions(dtype: torch.dtype, rules: Any, compiled: bool) -> None:
    """torch wraps a Python number to the dtype of the tensor: 2**32 is 0, and 2**32 + 5 is 5."""
    torch._dynamo.reset()
    lengths = (127, 128, 2**31 - 1, 2**31, 2**32, 2**32 + 5, 2**32 + 5, 2**40)
    for length, rate in zip(lengths, (3, 3, 1, 3, 1, 5, 2**32 + 3, 7)):
        case = Case(DilatedPattern((17, length), (2, rate), **rules), num_tokens=128, kv_heads=3, group=2)
        mask_mod, score_mod = part(dilated_mask_mod, case), part(checked_score_mod, case)
        if compiled:
            mask_mod, score_mod = (torch.compile(f, fullgraph=True, backend="eager") for f in (mask_mod, score_mod))
        pair, count = [x.to(dtype) for x in pairs(case)], multiplicity(case)
        assert torch.equal(mask_mod(*pair).expand_as(count[None]), count[None] > 0), (length, rate)
        assert torch.equal(score_mod(torch.zeros(1, *count.shape), *pair), count[None].float().log()), (length, rate)
        if not case.pattern.split("tests")[1]:
            assert not mask_mod(*pair[:2], pair[2], pair[3] * 0 - 1).any()  # -1 is in the segment of no token


@pytest.mark.parametrize("make", [dilated_mask_mod, dilated_score_mod])
def test_a_branch_of_rate_1_asks_for_no_residues(make: Callable[..., Mod]) -> None:
    """Every pair of a kernel would pay for them."""
    seen = Counter[str]()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[function.overloadpacket.__name__] += 1
            return function(*args, **kwargs or {})

    case = Case(DilatedPattern((7, 13), (1, 1)), kv_heads=3)
    with Seen():
        part(make, case)(*([torch.zeros(())] if make is dilated_score_mod else []), *pairs(case))
    assert seen["floor_divide"] > 0 == seen["remainder"]


BLOCKED = {
    "three_branches": Case(DilatedPattern((31, 67, 101), (1, 3, 5)), num_tokens=263, kv_heads=3),
    "gqa": Case(DilatedPattern((31, 101), (1, 7), offsets="interleaved"), num_tokens=131, kv_heads=3, group=2),
    "grouped": Case(DilatedPattern.grouped((31, 67, 263), (1, 2, 11)), num_tokens=263, kv_heads=4),
    "whole": Case(DilatedPattern((1000,), (1,)), num_tokens=256, kv_heads=2),
    "alike": Case(DilatedPattern((64, 128), (1, 1)), num_tokens=512, kv_heads=3),
    "dilated": Case(DilatedPattern((263,), (61,)), num_tokens=263, kv_heads=5),
    "one_token": Case(PATTERN, num_tokens=1),
}


def assert_same_blocks(ours: BlockMask, theirs: BlockMask) -> None:
    assert ours.shape == theirs.shape
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, indices = (getattr(ours, f"{name}_{x}") for x in ("num_blocks", "indices"))
        their_counts, their_indices = (getattr(theirs, f"{name}_{x}") for x in ("num_blocks", "indices"))
        assert counts.dtype == indices.dtype == torch.int32
        assert torch.equal(counts, their_counts)
        assert torch.equal(listed(counts, indices), listed(their_counts, their_indices))


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """(blocks, 4): batch, head, row and column of each block of the lists, in order; what follows a row's own is never read."""
    valid = torch.arange(indices.shape[-1]) < counts[..., None]
    blocks = torch.cat([valid.nonzero()[:, :3], indices[valid][:, None]], dim=1)
    return blocks.unique(dim=0)


@pytest.mark.parametrize(
    ("name", "size", "is_causal"),
    [(name, size, (i + j) % 2 == 0) for i, name in enumerate(BLOCKED) for j, size in enumerate((128, 16, (16, 8), (5, 17)))],
    ids=str,
)
def test_block_mask_lists_the_blocks_that_torch_finds(name: str, size: int | tuple[int, int], is_causal: bool) -> None:
    case = replace(BLOCKED[name], is_causal=is_causal)
    n = case.num_tokens
    ours = part(create_dilated_block_mask, case, device="cpu", BLOCK_SIZE=size)
    theirs = create_block_mask(part(dilated_mask_mod, case), 1, case.kv_heads * case.group, n, n, device="cpu", BLOCK_SIZE=size)
    assert_same_blocks(ours, theirs)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_heads", [1, 6])
def test_lists_of_full_blocks_have_the_strides_of_the_others(num_heads: int, is_causal: bool) -> None:
    """Kernels step through both by the strides of one: with others they read the blocks of another row, and past the end."""
    pattern = DilatedPattern((64, 512), (1, 4))
    mask = create_dilated_block_mask(pattern, num_heads, seq_len=2048 + 5, is_causal=is_causal, device="cpu", BLOCK_SIZE=16)
    assert mask.full_kv_num_blocks.max() != mask.kv_num_blocks.max()
    assert mask.full_kv_indices.stride() == mask.kv_indices.stride()
    assert mask.full_q_indices.stride() == mask.q_indices.stride()


@pytest.mark.parametrize("kv_heads", [2, 3], ids=["alike", "differ"])
def test_lists_of_a_cpu_are_as_wide_as_the_sequence_and_never_look_contiguous(kv_heads: int) -> None:
    """Contiguous ones would be another graph to the compiler than narrow ones, whose rows overlap."""
    heads = "all" if kv_heads == 2 else "grouped"
    dense, narrow = DilatedPattern((80, 80), (1, 1), heads=heads), DilatedPattern((16, 16), (1, 1), heads=heads)
    widths = set()
    for pattern in (dense, narrow):
        mask = create_dilated_block_mask(pattern, kv_heads, seq_len=80, device="cpu", BLOCK_SIZE=16)
        for indices in (mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices):
            assert indices.shape == (1, kv_heads, 5, 5)
            assert not indices[0, 0].is_contiguous()
            assert indices.stride(3) == 1
            widths.add(indices.stride(2))
    assert widths == {1, 6}  # of the fullest row; one more where that is all of them


def test_block_mask_of_a_million_tokens_holds_less_than_two_megabytes() -> None:
    mask = create_dilated_block_mask(DilatedPattern((2048,), (1,)), 8, seq_len=1 << 20, device="cpu")
    tensors = (x for x in vars(mask).values() if isinstance(x, Tensor))
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    assert sum(storages.values()) < 2 << 20
    assert mask.full_kv_num_blocks.sum() == 8 * 2**13 * 16


def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() <= h + 3


def slope(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - (h + 1) * (q_idx - kv_idx).abs() / 8


@pytest.mark.parametrize("is_causal", [False, True])
def test_functions_compose_with_a_user_s_own(is_causal: bool) -> None:
    case = Case(PATTERN, batch=2, num_tokens=37, kv_heads=3, group=2, is_causal=is_causal)
    q, k, v, _, _ = case.tensors()
    mask_mod, score_mod = part(dilated_mask_mod, case), part(dilated_score_mod, case)
    count = multiplicity(case)

    both = and_masks(mask_mod, window)
    either = or_masks(mask_mod, window)
    assert torch.equal(both(*pairs(case)), (count > 0) & window(*pairs(case)))
    assert torch.equal(either(*pairs(case)), (count > 0) | window(*pairs(case)))

    with mock.patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True):
        actual = attend_by_flex(
            q,
            k,
            v,
            score_mod=lambda score, *pair: score_mod(slope(score, *pair), *pair),
            block_mask=create_block_mask(both, None, 6, 37, 37, device="cpu"),
        )
    expected = dense(case, lambda score, *pair: slope(score, *pair) + count.log(), window)(q, k, v)
    assert_close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_functions_are_made_inside_a_compiled_function(is_causal: bool) -> None:
    torch._dynamo.reset()
    case = Case(PATTERN, num_tokens=37, kv_heads=3, group=2, is_causal=is_causal)

    def evaluate(score: Tensor, *pair: Tensor) -> tuple[Tensor, Tensor]:
        return part(dilated_mask_mod, case)(*pair), part(dilated_score_mod, case)(score, *pair)

    arguments = torch.randn(1, 6, 37, 37), *pairs(case)
    assert all(map(torch.equal, torch.compile(evaluate, fullgraph=True, backend="eager")(*arguments), evaluate(*arguments)))


@pytest.mark.parametrize("make", [dilated_mask_mod, dilated_score_mod])
def test_the_same_arguments_give_the_same_function(make: Callable[..., Mod]) -> None:
    equal = DilatedPattern([7, 13, 29], [1, 3, 5])  # type: ignore[arg-type]
    assert make(PATTERN, 4, seq_len=37) is make(equal, 4, seq_len=37, is_causal=False, num_kv_heads=4)
    assert make(PATTERN, 4, seq_len=37) is not make(PATTERN, 4, seq_len=37, is_causal=True)


def test_the_same_arguments_give_the_same_lists() -> None:
    mask = create_dilated_block_mask(PATTERN, 4, seq_len=37, device="cpu")
    same = create_dilated_block_mask(PATTERN, 4, seq_len=37, device=torch.device("cpu"), BLOCK_SIZE=(128, 128), num_kv_heads=4)
    other = create_dilated_block_mask(PATTERN, 4, seq_len=37, device="cpu", BLOCK_SIZE=(128, 64))
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_indices", "full_q_indices"):
        assert getattr(mask, name) is getattr(same, name)
        assert getattr(mask, name) is not getattr(other, name)


REFUSED = [
    ({"pattern": (7, 1)}, TypeError, r"pattern must be a DilatedPattern, got tuple"),
    ({"num_heads": 4.0}, TypeError, r"num_heads must be an integer, got 4.0"),
    ({"num_heads": 0}, ValueError, r"num_heads must be at least 1, got 0"),
    ({"seq_len": "37"}, TypeError, r"seq_len must be an integer, got '37'"),
    ({"seq_len": 0}, ValueError, r"seq_len must be at least 1, got 0"),
    ({"is_causal": 1}, TypeError, r"is_causal must be a bool, got 1"),
    ({"num_kv_heads": True}, TypeError, r"num_kv_heads must be an integer, got True"),
    ({"num_kv_heads": 0}, ValueError, r"num_kv_heads must be at least 1, got 0"),
    ({"num_kv_heads": 4}, ValueError, r"num_kv_heads must divide num_heads=6, got 4"),
]
REFUSED_BLOCKS = [
    ({"BLOCK_SIZE": 128.0}, TypeError, r"BLOCK_SIZE must be an integer or a pair of them, got 128.0"),
    ({"BLOCK_SIZE": [128, 128]}, TypeError, r"BLOCK_SIZE must be an integer or a pair of them, got \[128, 128\]"),
    ({"BLOCK_SIZE": (128, None)}, TypeError, r"BLOCK_SIZE must be an integer or a pair of them, got \(128, None\)"),
    ({"BLOCK_SIZE": 0}, ValueError, r"BLOCK_SIZE must be at least 1, got 0"),
    ({"BLOCK_SIZE": (128, -1)}, ValueError, r"BLOCK_SIZE must be at least 1, got \(128, -1\)"),
]


def call(make: Callable[..., Any], **changes: Any) -> Any:
    """A valid call for 37 tokens and 6 heads, with changes."""
    arguments = {"pattern": PATTERN, "num_heads": 6, "seq_len": 37, **changes}
    return make(arguments.pop("pattern"), arguments.pop("num_heads"), **arguments)


@pytest.mark.parametrize("make", EVERY, ids=NAMES)
@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_every_function_rejects(make: Callable[..., Any], changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(make, **changes)


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED_BLOCKS, ids=[message for _, _, message in REFUSED_BLOCKS])
def test_block_mask_rejects(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(create_dilated_block_mask, device="cpu", **changes)


PADDED = DilatedPattern((8, 12), (2, 4), zero_padding=True)
ONE_SEGMENT = DilatedPattern((37,), (4,), zero_padding=True)
SHIFTED = DilatedPattern((9,), (4,), zero_padding=True)
ZERO_KEYS = [
    (PADDED, 37, 6, False),
    (replace(ONE_SEGMENT, offsets="interleaved"), 23, 6, False),  # a head of offset 3 keeps 5 tokens, one of offset 0 keeps 6
    (SHIFTED, 36, 6, False),
    (SHIFTED, 36, 6, True),
    (SHIFTED, 10, 1, True),  # only the last output moves: behind the end
    (replace(PADDED, dilation_rates=(2, 5)), 37, 6, True),
]


@pytest.mark.parametrize("make", EVERY, ids=NAMES)
@pytest.mark.parametrize(("pattern", "num_tokens", "kv_heads", "is_causal"), ZERO_KEYS)
def test_zero_keys_and_shifts_are_refused(
    make: Callable[..., Any], pattern: DilatedPattern, num_tokens: int, kv_heads: int, is_causal: bool
) -> None:
    options = {"seq_len": num_tokens, "num_kv_heads": kv_heads, "is_causal": is_causal}
    message = rf"pattern must add no zero keys at seq_len={num_tokens}, got zero_padding=True with segments .*; use flexdilated"
    with pytest.raises(NotImplementedError, match=message):
        call(make, pattern=pattern, **options)
    call(make, pattern=replace(pattern, zero_padding=False), **options)


@settings(max_examples=50)
@given(calls())
def test_zero_padding_is_refused_wherever_it_changes_the_reference(case: Case) -> None:
    case = replace(case, pattern=replace(case.pattern, zero_padding=True))
    exact = replace(case, pattern=replace(case.pattern, zero_padding=False))
    q, k, v, _, _ = case.tensors()
    try:
        part(dilated_mask_mod, case)
    except NotImplementedError:
        return
    assert_close(attend_by_reference(case)(q, k, v), attend_by_reference(exact)(q, k, v))


def test_constant_mixing_weights_are_refused_by_the_score_function_alone() -> None:
    pattern = DilatedPattern((7, 13), (1, 3), detach_weights=True)
    with pytest.raises(NotImplementedError, match=r"pattern must have detach_weights=False, got True: .* no score_mod; use"):
        call(dilated_score_mod, pattern=pattern)
    call(dilated_mask_mod, pattern=pattern)
    call(create_dilated_block_mask, pattern=pattern, device="cpu")


@pytest.mark.parametrize(
    "pattern",
    [
        DilatedPattern((13,), (3,), detach_weights=True),
        replace(DilatedPattern.grouped((7, 13), (1, 3)), detach_weights=True),
        DilatedPattern((13,), (3,), window=4, global_tokens=2),
    ],
    ids=["one_branch", "grouped", "near"],
)
def test_the_mask_alone_serves_where_every_pair_counts_once(pattern: DilatedPattern) -> None:
    case = Case(pattern, lse_gradient=False)
    assert part(dilated_score_mod, case) is None
    attend = dense(case, lambda score, *pair: score, part(dilated_mask_mod, case))
    assert_close(differentiate(attend, *case.tensors()), differentiate(attend_by_reference(case), *case.tensors()))


def test_block_mask_built_inside_a_compiled_function() -> None:
    pattern = DilatedPattern((300, 700), (1, 3))

    def joined(x: Tensor) -> Tensor:
        mask = create_dilated_block_mask(pattern, 4, seq_len=x.shape[0], is_causal=True, device="cpu")
        return x.sum() * 0 + mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()

    torch._dynamo.reset()
    compiled = torch.compile(joined, fullgraph=True, backend="eager")
    for num_tokens in (1000, 1500):
        x = torch.randn(num_tokens)
        assert compiled(x) == joined(x) > 0

    def small(x: Tensor) -> Tensor:
        return x + create_dilated_block_mask(pattern, 4, seq_len=64, device="cpu", BLOCK_SIZE=32).kv_num_blocks.sum()

    with pytest.raises(Exception, match=r"BLOCK_SIZE must be 128 inside torch\.compile"):
        torch.compile(small, fullgraph=True, backend="eager")(torch.randn(3))
