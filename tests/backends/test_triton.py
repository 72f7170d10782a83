"""Our own kernels, run by triton's interpreter: tiles, forms, strides, launches, memory, refusals.

Every kind of branch goes through them in tests/doors.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flexdilated import DilatedPattern, backends, dilated_attention, reference
from flexdilated.attention import attend
from flexdilated.backends import DispatchKey
from flexdilated.backends.dense.math import MATH
from flexdilated.backends.kernel import Options
from flexdilated.backends.triton import backend
from flexdilated.backends.triton.groups import PieceGroup
from flexdilated.backends.triton.tiles import TileConfig
from flexdilated.core.branch import ceil_div
from flexdilated.core.call import Call
from flexdilated.core.lse import for_backward
from flexdilated.core.pieces import plan_pieces
from tests.backends import interpreter
from tests.cases import Case, assert_twice_plain, differentiate, poisoned_memory, run_backend, run_reference
from tests.tolerances import HALF_LSE, SINGLE

pytest.importorskip("triton")
if not backend.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1, which is not set where there is a GPU", allow_module_level=True)

from flexdilated.backends.triton import backward, forward, groups, launch
from tests.hardware import simulate

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")  # of pairs that do not see each other

PATTERN = DilatedPattern((19, 43), (1, 3))
TILED = DilatedPattern((37, 43), (1, 3))  # tiles of 32 keys
SHIFTED = DilatedPattern.torchscale((11, 23), (3, 5))
NESTED = DilatedPattern((8, 16), (1, 2))
CASES = {
    "plain": Case(PATTERN, batch=2, kv_heads=2, head_dim=16),
    "no_branch_keeps_all": Case(DilatedPattern((17, 43), (2, 3), offsets="interleaved"), kv_heads=3, head_dim=16, scale=-0.4),
    "grouped_queries": Case(TILED, kv_heads=1, group=2, head_dim=16, is_causal=True),
    "grouped_heads": Case(DilatedPattern((11, 29), (2, 3), heads="grouped"), num_tokens=31, kv_heads=3, group=2, head_dim=16),
    "mask": Case(PATTERN, batch=2, kv_heads=1, head_dim=16, ignored=0.5),
    "causal_mask": Case(TILED, kv_heads=1, group=2, head_dim=16, ignored=0.5, is_causal=True),
    "all_ignored": Case(PATTERN, kv_heads=1, head_dim=16, ignored=1.0),
    "zero_keys": Case(DilatedPattern.torchscale((23, 11, 17), (1, 3, 5)), num_tokens=31, kv_heads=2, head_dim=16),
    "shifted": Case(SHIFTED, num_tokens=29, kv_heads=3, head_dim=16),
    "shifted_causal_mask": Case(SHIFTED, num_tokens=23, kv_heads=3, head_dim=16, is_causal=True, ignored=0.3),
    "zero_scale": Case(PATTERN, kv_heads=1, head_dim=16, scale=0.0),
    "head_dim_1": Case(PATTERN, kv_heads=1, head_dim=1),
    "head_dim_48": Case(TILED, kv_heads=1, head_dim=48, is_causal=True),
    "one_token": Case(PATTERN, num_tokens=1, kv_heads=2, head_dim=16),
    "batch_continues_segments": Case(NESTED, batch=2, num_tokens=16, kv_heads=4, head_dim=16),
    "many_documents": Case(NESTED, num_tokens=37, kv_heads=1, head_dim=16, borders=(0, 1, 3, 6, 10, 15, 21, 28, 33, 37)),
}
WINDOW = Case(DilatedPattern(window=16), num_tokens=67, kv_heads=1, head_dim=16)
WIDE = replace(WINDOW, pattern=DilatedPattern(window=40), group=2)
MIXED = replace(WINDOW, pattern=DilatedPattern((16, 64), (1, 2), window=5))
# Each with the queries and keys of its tiles, and the form of its kernels.
TILED: dict[str, tuple[Case, tuple[int, int], str]] = {
    "grouped_queries": (CASES["grouped_queries"], (16, 64), ""),
    "causal_mask": (CASES["causal_mask"], (16, 16), ""),
    "shifted": (CASES["shifted"], (64, 16), ""),
    "descriptors": (CASES["grouped_queries"], (16, 16), "described"),
    "products_ahead": (CASES["head_dim_48"], (16, 16), "AHEAD"),
    "itself": (replace(MIXED, pattern=DilatedPattern((16,), (1,), window=1)), (16, 16), ""),
    "narrow": (replace(WINDOW, pattern=DilatedPattern(window=5), is_causal=True), (32, 16), ""),
    "whole_tiles": (WIDE, (16, 16), ""),
    "whole_tiles_causal": (replace(WIDE, group=1, is_causal=True, batch=2), (16, 32), ""),
    "everything": (replace(WINDOW, pattern=DilatedPattern(window=100)), (32, 32), ""),
    "one_token_short": (replace(WINDOW, pattern=DilatedPattern(window=66)), (16, 16), ""),
    "window_mask": (replace(WINDOW, ignored=0.7, batch=2), (16, 16), ""),
    "window_causal_mask": (replace(MIXED, ignored=0.4, is_causal=True, group=2), (32, 16), ""),
    "window_documents": (replace(MIXED, borders=(0, 3, 40, 40, 67), is_causal=True), (16, 16), "LEAST"),
    "window_descriptors": (replace(WIDE, is_causal=True), (16, 16), "described"),
    "window_descriptors_of_the_host": (replace(MIXED, pattern=DilatedPattern((16, 64), (1, 2), window=40)), (16, 16), "HOSTS"),
    "window_sums": (WIDE, (16, 16), "SUMS"),
    "window_sums_causal": (replace(MIXED, is_causal=True), (32, 16), "SUMS"),
}
# What the forms to measure leave to the others: nothing is described under a mask and in tables.
BY_POINTERS = ("causal_mask", "all_ignored", "shifted_causal_mask", "zero_scale", "head_dim_1", "one_token")
HOSTED = {"mask": 0, "many_documents": 0, "batch_continues_segments": 2}  # launches, if not any number


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        interpreter.mend(patch)
        patch.setattr(backend, "INTERPRETED_DTYPES", (*backend.INTERPRETED_DTYPES, torch.bfloat16))
        yield


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are planned anew, by what a test puts in place of functions."""
    monkeypatch.setattr(launch, "PLANS", {})


def tile(patch: pytest.MonkeyPatch, queries: int, keys: int) -> None:
    patch.setattr(launch, "tiles_of", lambda *arguments, **options: TileConfig(queries, keys, 4, 2))


@pytest.fixture
def least(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets the number of pieces from which on they share a launch."""

    def take(number: int) -> None:
        monkeypatch.setattr(groups, "LEAST", number)
        monkeypatch.setattr(launch, "PLANS", {})
        groups._groups.cache_clear()

    yield take
    groups._groups.cache_clear()


def by_triton(pattern: DilatedPattern, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda q, k, v: dilated_attention(q, k, v, pattern, return_lse=True, backend="triton", **options)


def assert_close(actual: tuple[Tensor, ...], case: Case) -> None:
    torch.testing.assert_close([a.double() for a in actual], run_reference(case, torch.float32), **SINGLE)


def assert_oracle(case: Case) -> None:
    with poisoned_memory():
        actual = run_backend(case, "triton", torch.float32)
    assert_close(actual, case)


@pytest.mark.parametrize("name", CASES)
def test_pointers_and_forms_to_measure_equal_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of the forward by descriptors of the host, and one kernel for all gradients: another order of sums."""
    with poisoned_memory():
        expected = run_backend(CASES[name], "triton", torch.float32)
    assert_close(expected, CASES[name])
    if name in BY_POINTERS:
        return
    monkeypatch.setattr(launch, "HOSTS", True)
    monkeypatch.setattr(launch, "SUMS", True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)  # as poisoned memory asks for
    launched = interpreter.watch(monkeypatch)
    with poisoned_memory():
        actual = run_backend(CASES[name], "triton", torch.float32)
    assert_close(actual, CASES[name])
    assert all(map(torch.equal, actual[:2], expected[:2]))
    hosted = sum(constants.get("HOST", False) for _, constants in launched)
    assert hosted == HOSTED[name] if name in HOSTED else hosted > 0
    assert ("differentiate_queries" in dict(launched)) == (name == "mask")


MARKS = {"LEAST": "TABLED", "described": "DESCRIBED", "HOSTS": "HOST", "AHEAD": "AHEAD", "SUMS": "SUMS"}


@pytest.mark.slow
@pytest.mark.parametrize("name", TILED)
def test_tiles_of_any_size_equal_the_oracle_in_every_form(
    name: str, least: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, tiles, form = TILED[name]
    config = TileConfig(*tiles, 4, 2)
    described = lambda kernel, *_: TileConfig(*tiles, 4, 2, True, kernel == "attend")  # noqa: E731
    for function, given in (
        ("tiles_of", lambda *arguments, **options: config._replace(described=form == "described")),
        ("unmeasured_tiles", described),
        ("ahead_tiles", lambda *_: config),
    ):
        monkeypatch.setattr(launch, function, given)
    if form in ("HOSTS", "AHEAD", "SUMS"):
        monkeypatch.setattr(launch, form, True)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)  # as poisoned memory asks for
    least(1 if form == "LEAST" else 8)
    launched = interpreter.watch(monkeypatch)
    assert_oracle(case)
    windowed = [constants for _, constants in launched if constants.get("WINDOWED")]
    assert bool(windowed) == (case.pattern.window is not None and name != "everything")
    marked = windowed or [constants for kernel, constants in launched if kernel != "prepare"]
    assert not form or any(constants.get(MARKS[form]) for constants in marked)


@pytest.mark.slow
def test_loops_visit_the_tiles_of_the_band_alone_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose tiles follow from the window, and whose code does not."""
    loaded: list[int] = []
    for module in (forward, backward):
        load = module.load_rows
        monkeypatch.setattr(module, "load_rows", lambda *arguments, load=load: (loaded.append(1), load(*arguments))[1])
    tile(monkeypatch, 16, 16)
    launched = interpreter.watch(monkeypatch)
    kinds, counts = [], {}
    for window in (1, 17, 33):
        launched.clear()
        loaded.clear()
        run_backend(replace(WINDOW, pattern=DilatedPattern(window=window), num_tokens=128, is_causal=True), "triton", torch.float32)
        counts[window] = len(loaded)
        kinds.append([(name, tuple(constants.items())) for name, constants in launched if name != "prepare"])
    assert kinds[0] == kinds[1] == kinds[2]
    # Of 8 tiles of queries: themselves, those beside them, and those two away, as two loads in each of three loops.
    assert counts[17] - counts[1] == 3 * 2 * 7
    assert counts[33] - counts[17] == 3 * 2 * 6


@pytest.mark.parametrize("scale", [2.4e38, -3.4e38])
def test_a_scale_that_is_infinite_in_base_2_equals_the_oracle(scale: float) -> None:
    case, small = replace(CASES["grouped_queries"], scale=scale), 3e-20
    q, k, v, dout, dlse = case.tensors(torch.float32)
    tensors = (q * small, k * small, v, dout, dlse)
    exact = lambda q, k, v: reference.dilated_attention(q, k, v, case.pattern, **case.options())  # noqa: E731
    actual = differentiate(by_triton(case.pattern, **case.options()), *tensors)
    expected = differentiate(exact, *(x.double() for x in tensors))
    for a, e, unit in zip(actual, expected, (1.0, 1.0, small, small, 1.0)):
        torch.testing.assert_close(a.double() * unit, e * unit, **SINGLE)


@pytest.mark.parametrize("pattern", [DilatedPattern((69,), (1,)), DilatedPattern(window=60)], ids=str)
def test_sums_take_no_part_of_keys_after_the_end(pattern: DilatedPattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weight would be 2^200 where all scores of a query are very negative, and infinity times zero is no number."""
    monkeypatch.setattr(launch, "SUMS", True)
    q = torch.full((1, 69, 1, 16), 4.0)
    x = (q, -q + torch.linspace(0, 1e-3, 69).view(1, 69, 1, 1), torch.linspace(0, 1, q.numel()).view_as(q), torch.ones_like(q))
    actual = differentiate(by_triton(pattern, scale=1.0), *x)
    expected = differentiate(lambda *y: reference.dilated_attention(*y, pattern, scale=1.0), *(t.double() for t in x))
    torch.testing.assert_close([a.double() for a in actual], expected, atol=2e-4, rtol=2e-4)


def test_deterministic_algorithms_take_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SUMS", True)
    launched = interpreter.watch(monkeypatch)
    torch.use_deterministic_algorithms(True)
    try:
        run_backend(CASES["one_token"], "triton", torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "differentiate_queries" in dict(launched)


@pytest.mark.slow
def test_grouped_heads_may_lie_four_gigabytes_apart() -> None:
    """Memory that nobody touches is not taken."""
    step, case = 1 << 31, Case(DilatedPattern((64,), (1,)), num_tokens=64, kv_heads=1, group=2, head_dim=16, is_causal=True)
    q, k, v, dout, dlse = case.tensors(torch.float16)
    far = torch.empty(step + q.numel(), dtype=torch.float16).as_strided(q.shape, (0, 16, step, 1)).copy_(q)
    run = by_triton(case.pattern, is_causal=True)
    assert all(map(torch.equal, differentiate(run, far, k, v, dout, dlse), differentiate(run, q, k, v, dout, dlse)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "forms"),
    [
        ("plain", torch.float16, ()),
        ("grouped_queries", torch.bfloat16, ("HOSTS", "SUMS")),
        ("plain", torch.float16, ("LONG",)),
    ],
    ids=str,
)
def test_low_precision_errs_at_most_twice_as_much_as_plain_pytorch(
    name: str, dtype: torch.dtype, forms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tiles that a GPU would take."""
    for form in forms:
        monkeypatch.setattr(launch, form, True)
    launched, case = interpreter.watch(monkeypatch), replace(CASES[name], batch=1, lse_gradient=False)
    actual = run_backend(case, "triton", dtype)
    expected = assert_twice_plain(actual, case, dtype)
    torch.testing.assert_close(actual[1].double(), expected[1], **HALF_LSE)
    assert ("differentiate_queries" in dict(launched)) == ("SUMS" not in forms)
    assert (dict(launched)["attend"]["BLOCK_N"] == 128) == ("LONG" in forms) or "HOSTS" in forms


def test_the_patched_interpreter_rounds_bfloat16_to_nearest() -> None:
    x = torch.cat([torch.randn(1000), torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, 1e-40])])
    bits = torch.from_numpy(interpreter._narrow(x.numpy()).astype("int16")).view(torch.bfloat16)
    torch.testing.assert_close(bits, x.bfloat16(), rtol=0.0, atol=0.0, equal_nan=True)


DENSE: list[tuple[int, bool, bool, tuple[int, int] | None]] = [  # queries, a mask, causal, a band
    *((29, False, False, None), (37, True, False, None), (53, True, False, None), (37, True, True, None)),
    *((rows, False, False, band) for rows, band in ((37, (-3, 9)), (53, (5, 40)), (29, (-1 << 40, 4)), (53, (30, 1 << 40)))),
]


@pytest.mark.parametrize(("rows", "masked", "is_causal", "band"), DENSE)
def test_dense_rows_equal_the_math_kernel(
    rows: int, masked: bool, is_causal: bool, band: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the tasks of a rank call it: more keys than queries or fewer, ignored keys, queries without a key, a gradient of lse."""
    if band is not None:
        tile(monkeypatch, 16, 16)
    ignored = torch.rand(2, 37) < 0.3 if masked else None
    q, dout, dlse = torch.randn(2, 2, rows, 24), torch.randn(2, 2, rows, 24), torch.randn(2, 2, rows)
    k, v = (torch.randn(2, 1, 37, 24) for _ in range(2))
    if ignored is not None:
        k, v = (x.masked_fill(ignored[:, None, :, None], 0.0) for x in (k, v))
    options, found = Options(is_causal, 0.3, ignored, band=band), []
    for kernel in (MATH, backend.KERNEL):
        out, lse = kernel.forward(q, k, v, options)
        given = for_backward(lse, dlse)
        found.append((out, lse, *kernel.backward(dout, given[1], q, k, v, out, given[0], options)))
    torch.testing.assert_close(found[1], found[0], **SINGLE)


def test_a_part_of_a_models_heads_is_that_part_of_its_outputs() -> None:
    q, k, v, _, _ = Case(PATTERN, kv_heads=5, group=2, head_dim=16).tensors(torch.float32)
    whole, _ = reference.dilated_attention(q, k, v, PATTERN)
    call = Call(PATTERN, backend="triton", first_head=2, num_kv_heads=5)
    out, _ = attend(q[:, :, 4:8], k[:, :, 2:4], v[:, :, 2:4], call)
    torch.testing.assert_close(out.double(), whole[:, :, 4:8], **SINGLE)


def poisoned(x: Tensor, kind: str) -> Tensor:
    """The numbers of x in other strides, with NaN between them."""
    b, n, h, d = x.shape
    room = torch.full((b, 2 * n + 1, h, 3 * d), math.nan)
    view = {
        "every other token": room[:, : 2 * n : 2, :, :d],
        "a slice of packed elements": room[:, :n, :, d : 2 * d],
        "an odd place": room[:, :n, :, 1 : d + 1],
        "every third element": room[:, :n, :, ::3],
    }[kind]
    return view.copy_(x)


# The operator itself copies every third element; q, k, v in either direction, and dout are misaligned in an odd place.
@pytest.mark.parametrize(
    ("kind", "count"),
    [("every other token", 0), ("a slice of packed elements", 0), ("an odd place", 7), ("every third element", 0)],
)
def test_strided_inputs_are_read_in_place_and_misaligned_ones_copied_once(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["grouped_queries"]
    q, k, v, dout, dlse = case.tensors(torch.float32)
    copies: list[int] = []
    readable = launch.readable

    def watched(x: Tensor) -> Tensor:
        result = readable(x)
        copies.append(result is not x)
        return result

    monkeypatch.setattr(launch, "readable", watched)
    actual = differentiate(by_triton(case.pattern, is_causal=True), *(poisoned(x, kind) for x in (q, k, v, dout)), dlse)
    torch.testing.assert_close([a.double() for a in actual], run_reference(case, torch.float32), **SINGLE)
    assert sum(copies) == count


def test_rows_far_apart_are_addressed_in_64_bits() -> None:
    same: dict[str, Any] = {"options": Options(False, 1.0), "tiles": TileConfig(16, 16, 4, 2)}
    near = torch.empty(1, 8, 1, 16)
    assert launch._constants(near, near, group=PieceGroup(PIECE, PIECE), **same)["WIDE"] is False
    far, wide = torch.empty_strided((1, 8, 1, 16), (0, 1 << 21, 0, 1), device="meta"), PIECE._replace(row_stride=16)
    assert launch._constants(far, far, group=PieceGroup(wide, wide), **same)["WIDE"] is True


def test_wide_steps_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = launch._constants
    monkeypatch.setattr(launch, "_constants", lambda *x, **y: {**constants(*x, **y), "WIDE": True})
    assert_oracle(CASES["grouped_queries"])


@pytest.mark.slow
def test_nan_in_ignored_keys_stays_there() -> None:
    case = replace(CASES["mask"], is_causal=True)
    q, k, v, dout, dlse = case.tensors(torch.float32)
    ignored = case.options()["key_padding_mask"]
    run = by_triton(PATTERN, is_causal=True, key_padding_mask=ignored)
    clean = differentiate(run, q, k, v, dout, dlse)
    k, v = (x.masked_fill(ignored[:, :, None, None], math.nan) for x in (k, v))
    assert all(map(torch.equal, differentiate(run, q, k, v, dout, dlse), clean))


def test_nan_that_a_query_meets_shows_in_its_lse() -> None:
    q, k, v, _, _ = Case(PATTERN, num_tokens=29, kv_heads=1, head_dim=16).tensors(torch.float32)
    k[:, 5] = math.nan
    options = {"is_causal": True, "return_lse": True}
    out, lse = dilated_attention(q, k, v, PATTERN, backend="triton", **options)
    expected_out, expected_lse = dilated_attention(q, k, v, PATTERN, backend="reference", **options)
    assert torch.equal(out.isnan(), expected_out.isnan())
    assert torch.equal(lse.isnan(), expected_lse.isnan())
    assert torch.equal(lse.isnan()[0, 0], out.isnan()[0, :, 0].all(-1))
    assert lse.isnan().any()


def test_keys_between_padding_alone_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    tile(monkeypatch, 16, 16)
    case = Case(DilatedPattern((128,), (1,)), num_tokens=128, kv_heads=1, head_dim=16)
    q, k, v, _, _ = case.tensors(torch.float32)
    ignored = torch.ones(1, 128, dtype=torch.bool)
    ignored[:, 50:70] = False
    loaded: list[int] = []
    load = forward.load_rows
    monkeypatch.setattr(forward, "load_rows", lambda *arguments: (loaded.append(1), load(*arguments))[1])
    dilated_attention(q, k, v, case.pattern, key_padding_mask=ignored, backend="triton")
    assert len(loaded) == 8 * 2 * 2 + 8  # 8 tiles of queries read themselves, and k and v of 2 tiles out of 8


@pytest.mark.parametrize("detaches", [False, True])
def test_a_piece_is_one_launch_forward_and_two_or_three_backward(detaches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = interpreter.watch(monkeypatch, runs=False)
    case = Case(DilatedPattern((8, 16, 32), (1, 2, 4), detach_weights=detaches), num_tokens=32, kv_heads=4, head_dim=16)
    run_backend(case, "triton", torch.float32)
    one = ["differentiate_keys", "differentiate_queries"]
    assert [name for name, _ in launched] == ["attend"] * 3 + ["prepare", *(["attend", *one] if detaches else one) * 3]


class Allocated(TorchDispatchMode):
    """Bytes of fresh memory that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        known = {x.data_ptr() for x in arguments if isinstance(x, Tensor)}
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor) and x.data_ptr() not in known and function.namespace == "aten":
                self.bytes += x.untyped_storage().nbytes()
        return result


def test_memory_does_not_grow_with_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.watch(monkeypatch, runs=False)
    q, k, v, dout, dlse = Case(PATTERN, num_tokens=32, kv_heads=2, head_dim=16).tensors(torch.float32)
    assert dlse is not None
    used = []
    for lengths, rates in (((32,), (1,)), ((32, 16, 8), (1, 2, 4))):
        out, lse = torch.zeros_like(q), torch.zeros(1, 2, 32)
        pieces = launch_pieces(DilatedPattern(lengths, rates), 32, 2)
        dq, dk, dv = (torch.zeros_like(q) for _ in range(3))
        with Allocated() as allocated:
            launch.forward(out, lse, q, k, v, pieces, Options(False, 0.3))
            launch.backward((dq, dk, dv), dout, dlse, q, k, v, out, lse, pieces, Options(False, 0.3))
        used.append(allocated.bytes)
    assert used[0] == used[1] == 2 * 2 * 32 * 4  # lse and delta of every row


def launch_pieces(pattern: DilatedPattern, num_tokens: int, num_kv_heads: int) -> Any:
    return plan_pieces(pattern, ((0, num_tokens),), num_kv_heads, False)


PIECE = launch_pieces(DilatedPattern((8,), (2,)), 8, 1)[0]


BORDERS = (0, 3, 3, 7, 17)
MANY = {
    **{name: replace(CASES[name], batch=1, group=1, num_tokens=17, borders=BORDERS) for name in ("mask", "shifted")},
    "grouped_heads": replace(CASES["grouped_heads"], num_tokens=17, borders=BORDERS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_pieces_that_share_a_launch_are_equal_in_every_bit_to_each_alone(
    name: str, least: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles_of, launched, found = launch.tiles_of, interpreter.watch(monkeypatch), []
    if name == "grouped_heads":  # descriptors in some kernels of each launch, those of the longer segments
        monkeypatch.setattr(groups, "LEAST_DESCRIBED_ROWS", 5)
        monkeypatch.setattr(
            launch,
            "tiles_of",
            lambda *arguments, described_rows=0, group=1: tiles_of(*arguments)._replace(described=described_rows >= 5),
        )
    for number in (1, 1 << 20):
        least(number)
        launched.clear()
        with poisoned_memory():
            found.append(run_backend(MANY[name], "triton", torch.float32))
        assert any(constants.get("TABLED") for _, constants in launched) == (number == 1)
    assert all(map(torch.equal, *found))
    assert_close(found[0], MANY[name])


def test_launches_do_not_grow_with_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    monkeypatch.setattr(launch, "_launch", lambda *arguments: counts.append(arguments[1]))
    q, out, lse = (torch.empty(1, 512, 4, 16), torch.empty(1, 512, 4, 16), torch.empty(1, 4, 512))
    programs, launches = [], []
    for number in (16, 64):
        borders = sorted(
            {0, 512, *torch.randperm(511, generator=torch.Generator().manual_seed(number))[: number - 1].add(1).tolist()}
        )
        pieces = plan_pieces(PATTERN, tuple((a, b - a) for a, b in pairwise(borders)), 4, True)
        counts.clear()
        launch.forward(out, lse, q, q, q, pieces, Options(True, 0.3))
        launches.append(len(counts))
        programs.append(sum(counts))
        tile = launch.tiles_of("attend", (8, 0), 16, 4).queries
        assert programs[-1] == sum(piece.segments * piece.offsets * piece.heads * ceil_div(piece.rows, tile) for piece in pieces)
    assert launches == [2, 2]


def test_plans_of_many_pieces_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents change from call to call, and their plans are large."""
    monkeypatch.setattr(launch, "_launch", lambda *arguments: None)
    q, lse = torch.empty(1, 512, 4, 16), torch.empty(1, 4, 512)
    for number, kept in ((2, 1), (60, 1), (3, 2)):
        size = 512 // number
        documents = tuple((i * size, size - i % 3) for i in range(number))
        launch.forward(q, lse, q, q, q, plan_pieces(PATTERN, documents, 4, True), Options(True, 0.3))
        assert len(launch.PLANS) == kept


def pretend(patch: pytest.MonkeyPatch, stage: str) -> None:
    """CUDA as it is outside of CUDA graphs (`"none"`), on a side stream (`"warm-up"`) and in a capture there (`"capture"`)."""
    patch.setattr(torch.cuda, "device", lambda device: nullcontext())
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stage == "capture")
    patch.setattr(torch.cuda, "default_stream", lambda: 0)
    patch.setattr(torch.cuda, "current_stream", lambda: 0 if stage == "none" else 1)


def test_a_captured_graph_has_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays would copy them again from memory of the host that is long gone."""
    pieces = plan_pieces(PATTERN, tuple((10 * i, 10 - i % 2) for i in range(9)), 2, False)
    device, found = torch.device("cuda"), {}
    for stage in ("none", "warm-up", "capture"):
        pretend(monkeypatch, stage)
        assert groups.graph_stage(device) == stage
        found[stage] = groups.groups(pieces, device)
        assert groups.graph_stage(torch.device("cpu")) == "none"
    assert found["capture"] == tuple(groups.PieceGroup(piece, piece) for piece in pieces)
    tabled = {stage: [group for group in found[stage] if group.stacked is not group.sample] for stage in found}
    alone = {stage: [group.sample for group in found[stage] if group.stacked is group.sample] for stage in found}
    assert len(tabled["warm-up"]) == len(tabled["none"]) > 0
    # No piece is computed twice, and none is left out.
    rows = {stage: sum(int(np.sum(group.stacked.rows)) for group in found[stage]) for stage in found}
    assert rows["none"] == rows["warm-up"] == rows["capture"]
    assert len(alone["warm-up"]) == len(alone["none"]) + len(tabled["none"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped_heads", "mask"])
def test_a_warm_up_launches_what_a_capture_compiles(
    name: str, least: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def described(x: Any) -> object:
        return (x.dtype, x.data_ptr() % 16) if isinstance(x, torch.Tensor) else type(x)

    keys, found = {}, {}
    run = launch._launch

    def noted(kernel: Any, programs: int, arguments: Any, constants: dict[str, Any], tiles: TileConfig, on: torch.Tensor) -> None:
        launched.add((kernel, *map(described, arguments), *sorted(constants.items()), tiles))
        run(kernel, programs, arguments, constants, tiles, on)

    monkeypatch.setattr(launch, "_launch", noted)
    least(2)
    for stage in ("none", "warm-up", "capture"):
        for module in (groups, launch):  # this machine's tensors are on the CPU
            monkeypatch.setattr(module, "graph_stage", lambda device, stage=stage: stage)
        launched = keys[stage] = set()
        with poisoned_memory():
            found[stage] = run_backend(MANY[name], "triton", torch.float32)
    assert keys["capture"] <= keys["warm-up"]
    assert not keys["capture"] <= keys["none"]
    for stage in ("warm-up", "capture"):
        assert all(map(torch.equal, found[stage], found["none"]))


def test_numbers_of_a_table_may_pass_32_bits() -> None:
    """Tokens, and steps from segment to segment."""
    far = PIECE._replace(token=3 << 31, segment_stride=7 << 31)
    tiles, lanes = np.array([[2, 3], [5, 7]])
    constants = {"WINDOWED": False}
    planned = launch._over(None, groups._group([far, PIECE]).stacked, tiles, lanes, (), constants, TileConfig(16, 16, 4, 2))
    assert planned.table is not None
    table, owners = groups.table_of(*planned.table, torch.device("cpu"))
    assert planned.programs == len(owners) == 2 * 5 + 3 * 7
    assert owners.tolist() == [0] * 10 + [1] * 21
    for row, *numbers, first, count in zip(table.tolist(), (far, PIECE), (2, 3), (0, 10), (10, 21)):
        assert row == [*launch._numbers(*numbers), first, count]


HOPPER = simulate("sm_90")


def request(**changes: Any) -> DispatchKey:
    return DispatchKey(**{"hardware": HOPPER, "dtype": torch.bfloat16, "head_dim": 64, **changes})


SDPA = "; use backend='sdpa'"
CPU, FLOAT16 = simulate("cpu"), (torch.float16,)
OTHER_MAKER = "the Triton kernels are made for NVIDIA's GPUs, and this torch for AMD's (ROCm)"


@pytest.mark.parametrize(
    ("machine", "changes", "message"),
    [
        ({}, {"hardware": simulate("mps")}, f"run on CUDA only, or on a CPU under TRITON_INTERPRET=1{SDPA}"),
        ({"INTERPRETED": False}, {"hardware": CPU}, f"run on CUDA only, or on a CPU under TRITON_INTERPRET=1{SDPA}"),
        ({}, {"hardware": simulate("sm_75")}, f"need sm_80 or newer{SDPA}"),
        ({}, {"dtype": torch.float64}, f"have no float64{SDPA}"),
        ({}, {"dropout": True}, f"have no dropout{SDPA}"),
        ({}, {"modified": True}, "have no score_mod or mask_mod; use backend='flex' or backend='sdpa'"),
        ({}, {"head_dim": 257}, f"head_dim must be at most 256 for the Triton kernels, got 257{SDPA}"),
        ({}, {"hardware": CPU, "dtype": torch.float64}, f"triton's interpreter computes no float64{SDPA}"),
        ({"INTERPRETED_DTYPES": FLOAT16}, {"hardware": CPU}, f"triton's interpreter computes no bfloat16{SDPA}"),
        ({"INSTALLED": None, "WANTED": "that one"}, {}, "triton is not installed; install that one, or use backend='sdpa'"),
        ({"INSTALLED": (3, 4)}, {}, f"triton must be 3.5 or newer, got 3.4{SDPA}"),
        ({"ON_ROCM": True}, {}, f"{OTHER_MAKER}{SDPA}"),
    ],
)
def test_refusals_name_what_to_use(
    machine: dict[str, Any], changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in machine.items():
        monkeypatch.setattr(backend, name, value)
    assert str(backends.why_not("triton", request(**changes))).endswith(message)
    with pytest.raises(NotImplementedError, match=r"backend 'triton' cannot run this on"):
        backends.choose("triton", request(**changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_runs_on_ampere_and_newer(dtype: torch.dtype) -> None:
    for level in ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120"):
        assert (
            backends.why_not("triton", request(hardware=simulate(level), dtype=dtype, head_dim=256, key_padding_mask=True, group=3))
            is None
        )


def without(*names: str) -> Callable[[str], Any]:
    def version(name: str) -> Any:
        if name in names:
            raise PackageNotFoundError(name)
        return "3.8.0+git12345678"

    return version


@pytest.mark.parametrize(
    ("requires", "wanted"),
    [
        (lambda name: ["numpy", 'triton==3.7.1; platform_system == "Linux"'], "triton==3.7.1, which torch"),
        (lambda name: None, "the one of torch"),
        (without("torch"), f"the one of torch {torch.__version__}"),
    ],
)
def test_the_triton_to_install_is_that_of_torch(requires: Any, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other, as the newest, may not fit: torch's builds bring their own."""
    monkeypatch.setattr(backend, "requires", requires)
    assert backend._wanted().startswith(wanted)
    monkeypatch.setattr(backend, "version", without("triton"))  # nightly builds call it pytorch-triton
    assert backend._installed() == (3, 8)


def test_masks_whose_columns_lie_far_apart_are_read_right() -> None:
    """A column of a matrix of 8 GB, of which no more than that column is touched."""
    tokens, far = 64, 1 << 27
    try:
        matrix = torch.empty_strided((1, tokens, far), (tokens * far, far, 1), dtype=torch.bool)
    except RuntimeError:
        pytest.skip("needs 8 GB of address space")
    mask = matrix[:, :, 0].copy_(torch.arange(tokens)[None] % 3 == 2)
    pattern = DilatedPattern((tokens,), (tokens // 2,), offsets="interleaved")
    x = torch.randn(4, 1, tokens, 1, 16)
    masks = (mask, mask.clone(memory_format=torch.contiguous_format))
    assert all(map(torch.equal, *(differentiate(by_triton(pattern, key_padding_mask=each), *x) for each in masks)))
