"""Every wrong argument of `dilated_attention` is refused by name, and its nearest right twin is accepted."""

import inspect
import re
import sys
import warnings
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from flexdilated import DilatedAttention, DilatedKVCache, DilatedPattern, attention_map, dilated_attention
from flexdilated.attention import OPTIONS_ELSEWHERE, _warn_of_layout
from flexdilated.core.checks import LAYOUT

PATTERN = DilatedPattern((7, 13), (1, 3))


def call(**changes: Any) -> torch.Tensor:
    """A valid call on 2 rows of 17 tokens, 6 query and 3 key/value heads of 5, with changes."""
    arguments = {
        "q": torch.ones(2, 17, 6, 5),
        "k": torch.ones(2, 17, 3, 5),
        "v": torch.ones(2, 17, 3, 5),
        "pattern": PATTERN,
        **changes,
    }
    return dilated_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), arguments.pop("pattern"), **arguments)


def one_row(cu_seqlens: object) -> dict[str, object]:
    x = torch.ones(1, 17, 3, 5)
    return {"q": x, "k": x, "v": x, "cu_seqlens": cu_seqlens}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="meta")


def mask(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bool)


REFUSED = [
    # tensors
    ({"q": [1.0]}, TypeError, r"q must be a tensor, got list"),
    ({"v": None}, TypeError, r"v must be a tensor, got NoneType"),
    ({"q": torch.ones(17, 6, 5)}, ValueError, r"q must have shape \(B, N, H, D\), got \(17, 6, 5\)"),
    ({"k": torch.ones(1, 2, 17, 3, 5)}, ValueError, r"k must have shape \(B, N, H, D\), got \(1, 2, 17, 3, 5\)"),
    ({"q": torch.ones(2, 17, 6, 5).int()}, TypeError, r"q must be float64, float32, bfloat16 or float16, got torch.int32"),
    ({"v": torch.ones(2, 17, 3, 5, dtype=torch.complex64)}, TypeError, r"v must be float64, .* got torch.complex64"),
    ({"k": torch.ones(2, 17, 3, 5).double()}, TypeError, r"k must have the dtype of q=torch.float32, got torch.float64"),
    ({"v": torch.ones(2, 17, 3, 5).half()}, TypeError, r"v must have the dtype of q=torch.float32, got torch.float16"),
    ({"k": meta(2, 17, 3, 5)}, ValueError, r"k must be on the device of q=cpu, got meta"),
    # shapes
    ({x: torch.ones(2, 0, 3, 5) for x in "qkv"}, ValueError, r"q must have at least one token, .* got shape \(2, 0, 3, 5\)"),
    ({"q": torch.ones(2, 17, 0, 5)}, ValueError, r"q must have at least one token, head .* got shape \(2, 17, 0, 5\)"),
    ({x: torch.ones(2, 17, 3, 0) for x in "qkv"}, ValueError, r"q must have .* element per head, got shape \(2, 17, 3, 0\)"),
    ({"k": torch.ones(1, 17, 3, 5)}, ValueError, r"k must match q in B, N and D, q=\(2, 17, 6, 5\), got \(1, 17, 3, 5\)"),
    ({"k": torch.ones(2, 16, 3, 5)}, ValueError, r"k must match q in B, N and D, q=\(2, 17, 6, 5\), got \(2, 16, 3, 5\)$"),
    (
        {"k": torch.ones(2, 19, 3, 5)},
        ValueError,
        r"k must match q in .* got \(2, 19, 3, 5\); use DilatedKVCache.attend for queries that",
    ),
    ({"v": torch.ones(2, 17, 3, 4)}, ValueError, r"v must match q in B, N and D, q=\(2, 17, 6, 5\), got \(2, 17, 3, 4\)"),
    ({"v": torch.ones(2, 17, 2, 5)}, ValueError, r"v must have as many heads as k=3, got 2"),
    ({x: torch.ones(2, 17, 4, 5) for x in "kv"}, ValueError, r"k must have a number of heads that divides that of q=6, got 4"),
    ({x: torch.ones(2, 17, 12, 5) for x in "kv"}, ValueError, r"k must have a number of heads that divides that of q=6, got 12"),
    ({x: torch.ones(2, 17, 0, 5) for x in "kv"}, ValueError, r"k must have a number of heads that divides that of q=6, got 0"),
    # options
    ({"pattern": (7, 1)}, TypeError, r"pattern must be a DilatedPattern, got tuple"),
    ({"is_causal": 1}, TypeError, r"is_causal must be a bool, got 1"),
    ({"scale": "1"}, TypeError, r"scale must be a number or None, got '1'"),
    ({"scale": True}, TypeError, r"scale must be a number or None, got True"),
    ({"scale": float("inf")}, ValueError, r"scale must be finite, got inf"),
    ({"scale": float("nan")}, ValueError, r"scale must be finite, got nan"),
    ({"scale": 1e39}, ValueError, r"scale must be finite in torch.float32, in which torch.float32 is scored, got 1e\+39"),
    ({"scale": -(10**39)}, ValueError, r"scale must be finite in torch.float32, in which torch.float32 is scored, got -10+"),
    (
        {"scale": 1e39, **{x: torch.ones(2, 17, 3, 5).bfloat16() for x in "qkv"}},
        ValueError,
        r"scale must be finite in torch.float32, in which torch.bfloat16 is scored, got 1e\+39",
    ),
    ({"scale": 10**400, **{x: torch.ones(2, 17, 3, 5).double() for x in "qkv"}}, ValueError, "scale must be finite in"),
    ({"scale": np.float32("nan")}, ValueError, r"scale must be finite, got nan"),
    ({"scale": np.True_}, TypeError, f"scale must be a number or None, got {np.True_!r}"),
    (
        {"scale": torch.tensor(0.1)},
        TypeError,
        r"scale must be a number or None, got a tensor; use scale.item\(\), or multiply q by it",
    ),
    ({"dropout_p": torch.tensor(0.1)}, TypeError, r"dropout_p must be a number, got tensor\(0.1000\)"),
    ({"dropout_p": None}, TypeError, r"dropout_p must be a number, got None"),
    ({"dropout_p": False}, TypeError, r"dropout_p must be a number, got False"),
    ({"dropout_p": -0.1}, ValueError, r"dropout_p must be in \[0, 1\), got -0.1"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
    ({"dropout_p": float("nan")}, ValueError, r"dropout_p must be in \[0, 1\), got nan"),
    ({"backend": "fast"}, ValueError, r"backend must be one of \('auto', .*\), got 'fast'"),
    # key_padding_mask
    ({"key_padding_mask": [[True]]}, TypeError, r"key_padding_mask must be a tensor, got list"),
    ({"key_padding_mask": torch.ones(2, 17)}, TypeError, r"key_padding_mask must be bool, .* got torch.float32"),
    (
        {"key_padding_mask": torch.ones(2, 17).long()},
        TypeError,
        r"key_padding_mask must be bool, .* got torch.int64; use mask.bool\(\), or mask == 0 where 1 is",
    ),
    ({"key_padding_mask": mask(2, 16)}, ValueError, r"key_padding_mask must have shape \(B, N\)=\(2, 17\), got \(2, 16\)"),
    ({"key_padding_mask": mask(17)}, ValueError, r"key_padding_mask must have shape \(B, N\)=\(2, 17\), got \(17,\)"),
    ({"key_padding_mask": meta(2, 17, dtype=torch.bool)}, ValueError, r"key_padding_mask must be on the device of q=cpu, got meta"),
    # cu_seqlens
    (one_row([0, 17]), TypeError, r"cu_seqlens must be a tensor, got list"),
    (one_row(torch.tensor([0.0, 17.0])), TypeError, r"cu_seqlens must be int32 or int64, got torch.float32"),
    (one_row(torch.tensor([17])), ValueError, r"cu_seqlens must have shape \(num_documents \+ 1,\), got \(1,\)"),
    (one_row(torch.tensor([[0, 17]])), ValueError, r"cu_seqlens must have shape \(num_documents \+ 1,\), got \(1, 2\)"),
    ({"cu_seqlens": torch.tensor([0, 17])}, ValueError, r"cu_seqlens must come with q of batch size 1, got batch size 2; pack"),
    (one_row(torch.tensor([1, 17])), ValueError, r"cu_seqlens must rise from 0 to the number of tokens=17, got \[1, 17\]"),
    (one_row(torch.tensor([0, 16])), ValueError, r"cu_seqlens must rise from 0 to the number of tokens=17, got \[0, 16\]"),
    (one_row(torch.tensor([0, 18])), ValueError, r"cu_seqlens must rise from 0 to the number of tokens=17, got \[0, 18\]"),
    (one_row(torch.tensor([0, 9, 8, 17])), ValueError, r"cu_seqlens must rise .*, got \[0, 9, 8, 17\]"),
    (one_row(torch.tensor([0, *range(9, 0, -1), 17])), ValueError, r"got \[0, 9, 8, 7, '...', 2, 1, 17\]"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=[message[:60] for _, _, message in REFUSED])
def test_attention_rejects(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {x: torch.ones(1, 1, 1, 1) for x in "qkv"},
        {x: torch.ones(2, 17, 6, 5) for x in "kv"},
        {x: torch.ones(2, 17, 1, 5) for x in "kv"},
        {"scale": 0},
        {"scale": -1.5},
        {"scale": 3e38, "q": torch.zeros(2, 17, 6, 5)},
        {"scale": 1e39, "q": torch.zeros(2, 17, 6, 5).double(), **{x: torch.ones(2, 17, 3, 5).double() for x in "kv"}},
        {"dropout_p": 0.999},
        one_row(torch.tensor([0, 17])),
        one_row(torch.tensor([0, 0, 9, 9, 17, 17], dtype=torch.int32)),
    ],
    ids=lambda changes: ",".join(changes) or "nothing",
)
def test_attention_accepts(changes: dict[str, Any]) -> None:
    out = call(**changes)
    assert out.shape == changes.get("q", torch.empty(2, 17, 6, 5)).shape
    assert out.isfinite().all()


@pytest.mark.parametrize("layer", [partial(dilated_attention, pattern=PATTERN), DilatedAttention(PATTERN)])
def test_more_heads_than_tokens_warn_once(layer: Any) -> None:
    _warn_of_layout.cache_clear()
    found = []
    for tokens, heads in ((65, 65), (63, 64), (64, 65), (64, 65)):
        x = torch.ones(1, tokens, heads, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer(x, x, x)
        found.append([str(warning.message) for warning in caught])
    assert found == [[], [], [f"q has more heads than tokens{LAYOUT}"], []]


def test_more_heads_than_tokens_compile_in_one_graph() -> None:
    torch._dynamo.reset()  # other tests may have left as many graphs as one function may have
    _warn_of_layout.cache_clear()
    x = torch.ones(1, 2, 65, 2)
    torch.compile(dilated_attention, fullgraph=True, backend="eager")(x, x, x, PATTERN)


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(5, 2, 3), torch.randn(7, 2, 3)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_refuses_nested_tensors(layout: torch.layout) -> None:
    x, message = nested(layout), r"^q must be a dense tensor, got a nested one; pack .* as cu_seqlens$"
    with pytest.raises(NotImplementedError, match=message):
        dilated_attention(x, x, x, PATTERN)
    with pytest.raises(NotImplementedError, match=message):
        attention_map(x, x, PATTERN, queries=0)
    cache = DilatedKVCache(PATTERN, batch_size=2, num_kv_heads=2, head_dim=3)
    with pytest.raises(NotImplementedError, match=r"^q must be a dense tensor, got a nested one; pad .* give their lengths$"):
        cache.attend(x, x, x)


@pytest.mark.parametrize("name", ["q", "k", "v", "key_padding_mask", "cu_seqlens"])
def test_refuses_sparse_tensors(name: str) -> None:
    x = torch.randn(1, 5, 2, 3)
    given: dict[str, Any] = {
        "q": x,
        "k": x,
        "v": x,
        "key_padding_mask": torch.zeros(1, 5, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 5]),
    }
    given[name] = given[name].to_sparse()
    message = rf"^{name} must be a dense tensor, got layout torch.sparse_coo; use to_dense\(\)$"
    with pytest.raises(NotImplementedError, match=message):
        dilated_attention(pattern=PATTERN, **given)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, Fraction], ids=str)
def test_numbers_of_other_kinds_are_taken_as_their_floats(kind: Any) -> None:
    q, k, v = (torch.randn(1, 17, 2, 5, generator=torch.Generator().manual_seed(i)) for i in range(3))
    pattern = DilatedPattern((7,), (2,))

    def attend(number: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        cache = DilatedKVCache(pattern, batch_size=1, num_kv_heads=2, head_dim=5)
        decoded = [cache.attend(*(x[:, a:b] for x in (q, k, v)), scale=number) for a, b in ((0, 9), (9, 10))]
        layer = DilatedAttention(pattern, scale=number, dropout_p=number)
        return [dilated_attention(q, k, v, pattern, scale=number, dropout_p=number), layer(q, k, v), *decoded]

    for a, e in zip(attend(kind(0.3)), attend(float(kind(0.3))), strict=True):
        assert torch.equal(a, e)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from Python 3.11")
@pytest.mark.parametrize(
    ("name", "function", "error"),
    [
        ("score_mod", lambda s, b, h, i, j: s if i > j else s - 1, RuntimeError),
        ("score_mod", lambda s, b, h, i, j: s + torch.zeros(16)[i], IndexError),
        ("score_mod", lambda s, b, h, i, j: s + {}["slope"], KeyError),
        ("mask_mod", lambda b, h, i, j: torch.ones(16, dtype=torch.bool)[i], IndexError),
        ("mask_mod", lambda b, h, i, j: i.window > 3, AttributeError),
    ],
)
def test_errors_of_a_function_name_it(name: str, function: Any, error: type[Exception]) -> None:
    x = torch.ones(1, 17, 2, 5)
    with pytest.raises(error) as raised:
        dilated_attention(x, x, x, DilatedPattern((7,), (2,)), **{name: function})
    assert [note for note in raised.value.__notes__ if note.startswith(f"This was raised by {name}. ")]


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*OPTIONS_ELSEWHERE, "mask"])
def test_options_of_other_functions_are_answered_with_ours(name: str, is_compiled: bool) -> None:
    advice = "" if name == "mask" else f"; use {OPTIONS_ELSEWHERE[name]}"
    function = torch.compile(call, fullgraph=True, backend="eager") if is_compiled else call
    error = Exception if is_compiled else TypeError  # the compiler has its own around it
    with pytest.raises(error, match=re.escape(f"dilated_attention() got an unexpected keyword argument '{name}'{advice}")):
        function(**{name: 1.0})


@pytest.mark.parametrize("page", ["flash-attn", "flexattention"])
def test_options_that_a_page_translates_are_ours_or_named_in_an_error(page: str) -> None:
    text = (Path(__file__).parents[1] / "docs" / "coming-from" / f"{page}.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", text, re.M)
    names = {name for row in rows for name in re.findall(r"\b(\w+)=|\b((?:cu|max)_seqlens?_[qk])\b", row) for name in name if name}
    assert len(names) >= 3
    names |= inspect.signature(flex_attention).parameters.keys() - {"query", "key", "value"}
    assert names <= {*inspect.signature(dilated_attention).parameters, *OPTIONS_ELSEWHERE}


@pytest.mark.parametrize("name", ["softcap", "alibi_slopes"])
def test_functions_in_the_advice_run(name: str) -> None:
    function = eval(
        "lambda" + OPTIONS_ELSEWHERE[name].rpartition("lambda")[2],
        {"torch": torch, "softcap": 5.0, "alibi_slopes": torch.arange(6)},
    )
    tensors = {name: draw(2, 17, heads, 5) for name, heads in (("q", 6), ("k", 3), ("v", 3))}
    changed = call(**tensors, score_mod=function)
    assert changed.isfinite().all()
    assert not torch.allclose(changed, call(**tensors))


def draw(*shape: int) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
