import ast
import copy
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.utils.flop_counter import FlopCounterMode

import flexdilated.core.pattern
from flexdilated import DilatedPattern, dilated_attention
from flexdilated.core import boundaries, branch, description, integers, keywords, pattern_svg, presets
from flexdilated.core.pattern import BACKWARD, FORWARD
from tests.cases import least_heads, patterns


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (DilatedPattern.longnet(), DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))),
        (
            DilatedPattern.torchscale([7, 13], [1, 5]),
            DilatedPattern((7, 13), (1, 5), heads="all", offsets="blocked", zero_padding=True, detach_weights=True),
        ),
        (DilatedPattern.grouped([7, 13], [1, 5]), DilatedPattern((7, 13), (1, 5), heads="grouped")),
        (DilatedPattern.grouped([7, 13], [1, 5], window=3), DilatedPattern((7, 13), (1, 5), window=3, heads="grouped")),
        (DilatedPattern.gigapath(), DilatedPattern.torchscale((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16))),
        # (16384 / 256)^2 = 2^12 tiles at most: lengths are 2^10, 2^10.5, 2^11, 2^11.5, 2^12, rounded down.
        (DilatedPattern.gigapath(max_wsi_size=16384), DilatedPattern.torchscale((1024, 1448, 2048, 2896, 4096), (1, 2, 4, 8, 16))),
        (
            DilatedPattern.gigapath(max_wsi_size=16391, tile_size=4097),
            DilatedPattern.torchscale((1024, 362, 128, 45, 16), (1, 2, 4, 8, 16)),
        ),
        (DilatedPattern(iter([7, 13]), range(1, 3)), DilatedPattern((7, 13), (1, 2))),  # type: ignore[arg-type]
        (DilatedPattern.from_dict({"segment_lengths": [7], "dilation_rates": [2]}), DilatedPattern((7,), (2,))),
    ],
)
def test_presets_are_those_that_were_published(pattern: DilatedPattern, expected: DilatedPattern) -> None:
    assert pattern == expected


@given(patterns())
def test_pattern_equals_its_copies_and_has_a_small_picture(pattern: DilatedPattern) -> None:
    copies = [
        copy.copy(pattern),
        copy.deepcopy(pattern),
        pickle.loads(pickle.dumps(pattern)),
        DilatedPattern.from_dict(json.loads(json.dumps(pattern.to_dict()))),
    ]
    for twin in copies:
        assert twin == pattern
        assert hash(twin) == hash(pattern)
    many = DilatedPattern((1, *pattern.segment_lengths * 4, 2**40), (1, *pattern.dilation_rates * 4, 3))
    for picture in (pattern._repr_svg_(), many._repr_svg_()):
        ElementTree.fromstring(picture)
        assert len(picture) < 12_000


@pytest.mark.parametrize(
    "module", [flexdilated.core.pattern, boundaries, branch, description, integers, keywords, pattern_svg, presets]
)
def test_pattern_module_and_what_it_imports_import_the_standard_library_only(module: ModuleType) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text())
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            if node.module in {
                each.__name__ for each in (boundaries, branch, description, integers, keywords, pattern_svg, presets)
            }:
                continue
            roots.add((node.module or "").split(".")[0])
    assert roots <= sys.stdlib_module_names


def test_notebooks_show_every_branch_and_a_title_that_can_be_read_aloud() -> None:
    pattern = DilatedPattern((7, 13), (1, 3), offsets="interleaved", zero_padding=True)
    root = ElementTree.fromstring(pattern._repr_svg_())
    name = "{http://www.w3.org/2000/svg}"
    assert root.attrib["role"] == "img"
    assert [title.text for title in root.iter(f"{name}title")] == [repr(pattern)]
    words = ["interleaved offsets, zero_padding", "7 tokens, rate 1", "13 tokens, rate 3"]
    assert [text.text for text in root.iter(f"{name}text")] == words
    squares = [tuple(float(square.attrib[key]) for key in ("x", "y", "width")) for square in root.iter(f"{name}rect")]
    assert squares == [(0.0, 0.0, 160.0), (0.0, 0.0, 86.15), (86.15, 86.15, 73.85)]


@pytest.mark.parametrize(
    ("lengths", "rates", "options", "error", "message"),
    [
        ((), (), {}, ValueError, r"segment_lengths must hold at least one length without a window or global_tokens, got \(\)"),
        ((7, 13), (1,), {}, ValueError, r"dilation_rates must hold one rate per segment length \(2\), got \(1,\)"),
        ((7, 0), (1, 1), {}, ValueError, r"segment_lengths\[1\] must be at least 1, got 0"),
        ((7, 2**40 + 1), (1, 1), {}, ValueError, r"segment_lengths\[1\] must be at most 1099511627776, got 1099511627777"),
        ((7, 2**63), (1, 1), {}, ValueError, r"segment_lengths\[1\] must be at most 1099511627776, got 9223372036854775808"),
        ((7, 13), (1, 0), {}, ValueError, r"dilation_rates\[1\] must be in \[1, segment_lengths\[1\]=13\], got 0"),
        ((7, 13), (8, 1), {}, ValueError, r"dilation_rates\[0\] must be in \[1, segment_lengths\[0\]=7\], got 8"),
        ((7,), (1,), {"heads": "some"}, ValueError, r"heads must be one of \('all', 'grouped'\), got 'some'"),
        ((7,), (1,), {"offsets": "odd"}, ValueError, r"offsets must be one of \('blocked', 'interleaved'\), got 'odd'"),
        ((7,), (1,), {"zero_padding": 1}, TypeError, r"zero_padding must be a bool, got 1"),
        ((7,), (1,), {"detach_weights": None}, TypeError, r"detach_weights must be a bool, got None"),
        (7, (1,), {}, TypeError, r"segment_lengths must be a sequence of integers, got 7"),
        ((7,), "1", {}, TypeError, r"dilation_rates must be a sequence of integers, got '1'"),
        ((8,) * 257, (1,) * 257, {}, ValueError, "segment_lengths must hold at most 256 lengths, one for each branch, got 257"),
        ((7.0,), (1,), {}, TypeError, r"segment_lengths\[0\] must be an integer, got 7.0"),
        ((7,), (True,), {}, TypeError, r"dilation_rates\[0\] must be an integer, got True"),
    ],
)
def test_pattern_rejects(lengths: object, rates: object, options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        DilatedPattern(lengths, rates, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_pattern_accepts_the_longest_segment_and_rate(backend: str) -> None:
    q = torch.randn(1, 13, 5, 3)
    out = dilated_attention(q, q, q, DilatedPattern((7, 2**40, 2**40), (1, 1, 2**40)), backend=backend)
    torch.testing.assert_close(out, dilated_attention(q, q, q, DilatedPattern((7, 13, 13), (1, 1, 13)), backend="reference"))


ALL, GROUPED = DilatedPattern((7, 13), (1, 3)), DilatedPattern.grouped((7, 13), (1, 3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *(
            (lambda method=method, given=given, pattern=pattern: getattr(pattern, method)(*given), error, f"{message}$")
            for pattern in (ALL, GROUPED)
            for method, given, error, message in (
                ("head_range", (2, 5), ValueError, r"branch must be in \[0, 2\), got 2"),
                ("head_range", (-1, 5), ValueError, r"branch must be in \[0, 2\), got -1"),
                ("head_range", (0.0, 5), TypeError, "branch must be an integer, got 0.0"),
                ("head_range", (1, 0), ValueError, "num_kv_heads must be at least 1, got 0"),
                ("head_range", (1, True), TypeError, "num_kv_heads must be an integer, got True"),
                ("offset", (2, 0, 5), ValueError, r"branch must be in \[0, 2\), got 2"),
                ("offset", (1, 5, 5), ValueError, r"head must be in \[0, 5\), got 5"),
                ("offset", (1, -1, 5), ValueError, r"head must be in \[0, 5\), got -1"),
                ("offset", (1, 0, 0), ValueError, r"head must be in \[0, 0\), got 0"),
                ("head_runs", (2, 5), ValueError, r"branch must be in \[0, 2\), got 2"),
                ("head_runs", (1, 5, range(2, 6)), ValueError, r"within must hold consecutive heads in \[0, 5\), got range.*"),
                ("head_runs", (1, 5, range(0, 4, 2)), ValueError, r"within must hold consecutive heads in \[0, 5\), got range.*"),
                ("check_heads", (0,), ValueError, "num_kv_heads must be at least 1, got 0"),
                ("count_pairs", (9, 0), ValueError, "num_kv_heads must be at least 1, got 0"),
            )
        ),
        (lambda: ALL.count_pairs(9, 5, is_causal="no"), TypeError, "is_causal must be a bool, got 'no'"),
        (lambda: DilatedPattern.grouped(5, (1,)), TypeError, "segment_lengths must be a sequence of integers, got 5"),
        (lambda: DilatedPattern.torchscale((7,), 1), TypeError, "dilation_rates must be a sequence of integers, got 1"),
        (lambda: DilatedPattern.gigapath(2.0**18), TypeError, "max_wsi_size must be an integer, got 262144.0"),
        (lambda: DilatedPattern.gigapath(2**29, 1), ValueError, r"segment_lengths\[3\] must be at most 1099511627776, got 70368"),
        (lambda: DilatedPattern.gigapath(16391, 0), ValueError, r"tile_size must be in \[1, 4097\], a quarter of .*, got 0$"),
        (lambda: DilatedPattern.gigapath(16391, 4098), ValueError, r"tile_size must be in \[1, 4097\], a quarter of .*, got 4098$"),
        (lambda: DilatedPattern.from_dict({1: 7, "window": 3}), ValueError, r"pattern keys must be among \["),
        (
            lambda: DilatedPattern.from_dict({"segment_lengths": (7,)}),
            ValueError,
            r"pattern keys must include segment_lengths and dilation_rates, \['dilation_rates'\] missing",
        ),
    ],
)
def test_methods_and_presets_reject(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call()


def test_operations_per_pair_are_those_of_the_products_of_matrices() -> None:
    rows, dim = 7, 13
    q, k, v = (torch.randn(rows, dim, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as forward:
        out = (q @ k.T).softmax(dim=-1) @ v
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
        q @ k.T  # kernels keep no scores: they compute them again
    counted = [mode.get_total_flops() for mode in (forward, backward)]
    assert counted == [FORWARD * rows**2 * dim, BACKWARD * rows**2 * dim]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 5, 7, 12, 13])
@pytest.mark.parametrize("rate", [1, 2, 3, 5, 11])
def test_offset_follows_the_literal_formula(num_kv_heads: int, rate: int) -> None:
    blocked = DilatedPattern((11,), (rate,))
    interleaved = DilatedPattern((11,), (rate,), offsets="interleaved")
    block = (num_kv_heads + rate - 1) // rate
    heads = range(num_kv_heads)
    assert [blocked.offset(0, h, num_kv_heads) for h in heads] == [h // block for h in heads]
    assert [interleaved.offset(0, h, num_kv_heads) for h in heads] == [h % rate for h in heads]
    assert all(0 <= pattern.offset(0, h, num_kv_heads) < rate for pattern in (blocked, interleaved) for h in heads)


@pytest.mark.parametrize(("num_kv_heads", "sizes"), [(11, (4, 4, 3)), (12, (4, 4, 4)), (13, (5, 4, 4)), (3, (1, 1, 1))])
def test_grouped_heads_split_in_contiguous_groups_the_first_larger(num_kv_heads: int, sizes: tuple[int, ...]) -> None:
    pattern = DilatedPattern.grouped((7, 11, 13), (1, 2, 3))
    ranges = [pattern.head_range(i, num_kv_heads) for i in range(3)]
    assert tuple(len(r) for r in ranges) == sizes
    assert [h for r in ranges for h in r] == list(range(num_kv_heads))


@given(patterns(), st.integers(1, 13), st.data())
def test_head_runs_hold_every_head_once_under_its_offset(pattern: DilatedPattern, num_kv_heads: int, data: st.DataObject) -> None:
    num_kv_heads = max(num_kv_heads, least_heads(pattern))
    first = data.draw(st.integers(0, num_kv_heads - 1))
    within = data.draw(st.sampled_from((None, range(first, data.draw(st.integers(first + 1, num_kv_heads))))))
    held = within or range(num_kv_heads)
    for i in range(len(pattern.branches)):
        runs = pattern.head_runs(i, num_kv_heads, within)
        found = {held[run.start + j * run.step]: run.offset for run in runs for j in range(run.heads)}
        assert found == {h: pattern.offset(i, h, num_kv_heads) for h in pattern.head_range(i, num_kv_heads) if h in held}
        assert sum(run.heads for run in runs) == len(found)
        assert [run.offset for run in runs] == sorted({run.offset for run in runs})


@given(patterns(), st.integers(1, 31), st.integers(1, 5), st.booleans())
def test_count_pairs_equals_the_count_by_loops(
    pattern: DilatedPattern, num_tokens: int, num_kv_heads: int, is_causal: bool
) -> None:
    num_kv_heads = max(num_kv_heads, least_heads(pattern))
    count = 0
    for i, (w, r) in enumerate(pattern.branches):
        for h in pattern.head_range(i, num_kv_heads):
            kept = [p for p in range(num_tokens) if p % w % r == pattern.offset(i, h, num_kv_heads)]
            count += sum(p // w == other // w and (other <= p or not is_causal) for p in kept for other in kept)
    assert pattern.count_pairs(num_tokens, num_kv_heads, is_causal=is_causal) == count
    if not is_causal:
        assert pattern.count_pairs(num_tokens, num_kv_heads) == count
