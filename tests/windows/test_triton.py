"""Windows in the Triton kernels, run by triton's interpreter: bounds of loops, tables, masks and every form against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flexdilated import DilatedPattern
from flexdilated.backends.dense.math import MATH
from flexdilated.backends.kernel import Options
from flexdilated.core.lse import for_backward
from tests.backends.interpreter import watch
from tests.backends.test_triton import assert_close, backend, forward, groups, interpreted, launch, no_plans  # noqa: F401
from tests.cases import Case, poisoned_memory, run_backend
from tests.tolerances import SINGLE

backward = pytest.importorskip("flexdilated.backends.triton.backward")
TileConfig = launch.TileConfig
SEGMENTS = ((16, 64), (1, 2))
WINDOW = Case(DilatedPattern(window=16), num_tokens=67, kv_heads=1, head_dim=16)
DOCUMENTS = (0, 3, 40, 40, 67)
MIXED = replace(WINDOW, pattern=DilatedPattern(*SEGMENTS, window=5))
# Each with the queries and keys of its tiles, and the form of its kernels.
CASES: dict[str, tuple[Case, tuple[int, int], str]] = {
    "itself": (replace(MIXED, pattern=DilatedPattern((16,), (1,), window=1)), (16, 16), ""),
    "narrow": (replace(WINDOW, pattern=DilatedPattern(window=5), is_causal=True), (32, 16), ""),
    "a_tile": (replace(WINDOW, is_causal=True, group=2), (16, 16), ""),
    "whole_tiles": (replace(WINDOW, pattern=DilatedPattern(window=40), group=2), (16, 16), ""),
    "whole_tiles_causal": (replace(WINDOW, pattern=DilatedPattern(window=40), is_causal=True, batch=2), (16, 32), ""),
    "everything": (replace(WINDOW, pattern=DilatedPattern(window=100)), (32, 32), ""),
    "one_token_short": (replace(WINDOW, pattern=DilatedPattern(window=66)), (16, 16), ""),
    "mask": (replace(WINDOW, ignored=0.7, batch=2), (16, 16), ""),
    "causal_mask": (replace(MIXED, ignored=0.4, is_causal=True, group=2), (32, 16), ""),
    "documents": (replace(WINDOW, borders=DOCUMENTS), (16, 16), ""),
    "many_documents": (replace(MIXED, borders=DOCUMENTS, is_causal=True), (16, 16), "LEAST"),
    "grouped_heads": (replace(MIXED, pattern=replace(MIXED.pattern, heads="grouped"), kv_heads=2), (16, 16), ""),
    "detached": (replace(MIXED, pattern=replace(MIXED.pattern, detach_weights=True), lse_gradient=False), (16, 16), ""),
    "descriptors": (replace(WINDOW, pattern=DilatedPattern(window=40), group=2, is_causal=True), (16, 16), "described"),
    "descriptors_of_the_host": (replace(MIXED, pattern=DilatedPattern(*SEGMENTS, window=40)), (16, 16), "HOSTS"),
    "products_ahead": (replace(WINDOW, pattern=DilatedPattern(window=60)), (16, 16), "AHEAD"),
    "sums": (replace(WINDOW, pattern=DilatedPattern(window=40), group=2), (16, 16), "SUMS"),
    "sums_causal": (replace(MIXED, is_causal=True), (32, 16), "SUMS"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_window_equals_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, (queries, keys), form = CASES[name]
    described = form == "described"
    monkeypatch.setattr(launch, "tiles_of", lambda *arguments, **options: TileConfig(queries, keys, 4, 2, described))
    monkeypatch.setattr(launch, "unmeasured_tiles", lambda kernel, *_: TileConfig(queries, keys, 4, 2, True, kernel == "attend"))
    monkeypatch.setattr(launch, "ahead_tiles", lambda *_: TileConfig(queries, keys, 4, 2))
    if form in ("HOSTS", "AHEAD", "SUMS"):
        monkeypatch.setattr(launch, form, True)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)  # as poisoned memory asks for
    groups._groups.cache_clear()
    monkeypatch.setattr(groups, "LEAST", 1 if form == "LEAST" else 8)
    launched = watch(monkeypatch)
    with poisoned_memory():
        actual = run_backend(case, "triton", torch.float32)
    groups._groups.cache_clear()
    assert_close(actual, case)
    windowed = [constants for _, constants in launched if constants.get("WINDOWED")]
    assert bool(windowed) == (name != "everything")
    marks = {"LEAST": "TABLED", "described": "DESCRIBED", "HOSTS": "HOST", "AHEAD": "AHEAD", "SUMS": "SUMS"}
    assert not form or any(constants.get(marks[form]) for constants in windowed)


@pytest.mark.slow
def test_loops_visit_the_tiles_of_the_band_alone_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose tiles follow from the window, and whose code does not."""
    loaded: list[int] = []
    for module in (forward, backward):
        load = module.load_rows
        monkeypatch.setattr(module, "load_rows", lambda *arguments, load=load: (loaded.append(1), load(*arguments))[1])
    monkeypatch.setattr(launch, "tiles_of", lambda *arguments, **options: TileConfig(16, 16, 4, 2))
    launched = watch(monkeypatch)
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


@pytest.mark.parametrize(("rows", "band"), [(37, (-3, 9)), (53, (5, 40)), (29, (-1 << 40, 4)), (53, (30, 1 << 40))])
def test_dense_rows_in_a_band_equal_the_math_kernel(rows: int, band: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """More queries than keys or fewer, and queries without a key."""
    monkeypatch.setattr(launch, "tiles_of", lambda *arguments, **options: TileConfig(16, 16, 4, 2))
    q, dout, dlse = torch.randn(2, 2, rows, 24), torch.randn(2, 2, rows, 24), torch.randn(2, 2, rows)
    k, v = (torch.randn(2, 1, 37, 24) for _ in range(2))
    found: list[Any] = []
    for kernel in (MATH, backend.KERNEL):
        out, lse = kernel.forward(q, k, v, Options(False, 0.3, band=band))
        given = for_backward(lse, dlse)
        found.append((out, lse, *kernel.backward(dout, given[1], q, k, v, out, given[0], Options(False, 0.3, band=band))))
    torch.testing.assert_close(found[1], found[0], **SINGLE)
