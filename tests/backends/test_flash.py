"""The flash-attn engine: what it refuses, and on a stand-in for the package every call against the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import flexdilated.core.request
from flexdilated import DilatedPattern, backends, dilated_attention
from flexdilated.backends import BACKENDS, Request, choose_kernel, flash
from flexdilated.backends.crossovers import DEFAULT
from flexdilated.backends.kernel import Options
from flexdilated.core.hardware import detect
from tests.cases import Case, differentiate, run_engine, run_plain, run_reference
from tests.hardware import simulate
from tests.tolerances import EXACT, assert_twice_naive

PATTERN = DilatedPattern((11, 23, 47), (1, 3, 5))
SHIFTED = DilatedPattern.torchscale((29, 11, 17), (1, 3, 5))
CASES = {
    "plain": Case(PATTERN, batch=2),
    "gqa": Case(PATTERN, batch=2, kv_heads=3, group=2),
    "causal_gqa": Case(PATTERN, kv_heads=3, group=2, is_causal=True),
    "head_dim_8_and_lse": Case(PATTERN, head_dim=8, is_causal=True),
    "head_dim_16_in_place": Case(PATTERN, head_dim=16, group=2, lse_gradient=False),
    "head_dim_1": Case(PATTERN, head_dim=1),
    "head_dim_248": Case(PATTERN, kv_heads=1, head_dim=248),
    "documents": Case(PATTERN, is_causal=True, borders=(0, 1, 1, 13, 43)),
    "shorter_than_a_segment": Case(PATTERN, num_tokens=7),
    "strided": Case(PATTERN, head_dim=8, strided=True, lse_gradient=False),
    "grouped": Case(DilatedPattern((5, 11), (2, 3), heads="grouped"), batch=3),
    "detached": Case(replace(PATTERN, detach_weights=True), batch=2, group=2),
    "zero_padding": Case(replace(PATTERN, zero_padding=True), num_tokens=41),
    "torchscale": Case(SHIFTED, num_tokens=41, kv_heads=7, group=2),
    "torchscale_causal": Case(SHIFTED, num_tokens=41, kv_heads=7, is_causal=True),
}


def request(**changes: object) -> Request:
    return Request(**{"hardware": simulate("sm_80"), "dtype": torch.float16, "head_dim": 64, **changes})  # type: ignore[arg-type]


# -- a stand-in ---------------------------------------------------------------------------------------------------------------
#
# The entry points of flash-attn 2.7.0 to 2.8.3 by name and order, and the checks of its csrc/flash_attn/flash_api.cpp.


def _check(q: Tensor, k: Tensor, v: Tensor, *like_q: Tensor) -> None:
    batch, rows, heads, head_dim = q.shape
    assert batch > 0
    assert head_dim % 8 == 0
    assert head_dim <= 256
    assert k.shape == v.shape == (batch, rows, k.shape[2], head_dim)
    assert heads % k.shape[2] == 0
    for x in (q, k, v, *like_q):
        assert x.dtype == q.dtype
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        assert all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
    assert all(x.shape == q.shape for x in like_q)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """`(batch, kv heads, group, rows, rows)`."""
    scores = torch.einsum("bqhgd,bkhd->bhgqk", q.unflatten(2, (k.shape[2], -1)), k) * scale
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool)
    return scores.masked_fill(~(seen.tril() if causal else seen), -torch.inf)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(q, k, v)
    assert isinstance(softmax_scale, float)
    assert isinstance(causal, bool)
    assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
    assert return_softmax is False  # the package gives it under dropout only
    q_a, k_a, v_a = (x.to(_accumulated(x)) for x in (q, k, v))
    scores = _scores(q_a, k_a, softmax_scale, causal)
    out = torch.einsum("bhgqk,bkhd->bqhgd", scores.softmax(-1), v_a).flatten(2, 3)
    lse = scores.logsumexp(-1).flatten(1, 2)
    return torch.empty_like(q).copy_(out), lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    _check(q, k, v, dout, out)
    assert dq is not None
    assert dk is not None
    assert dv is not None
    for grad, x in ((dq, q), (dk, k), (dv, v)):
        assert grad.shape == x.shape
        assert grad.dtype == x.dtype
        assert grad.stride(-1) == 1
    assert softmax_lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert softmax_lse.is_contiguous()
    assert softmax_lse.dtype == _accumulated(q)
    assert isinstance(softmax_scale, float)
    assert isinstance(causal, bool)
    assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
    assert deterministic is torch.are_deterministic_algorithms_enabled()
    assert rng_state is None
    dtype, kv_heads = _accumulated(q), k.shape[2]
    dout, q, k, v, out = (x.to(dtype) for x in (dout, q, k, v, out))
    weights = torch.exp(_scores(q, k, softmax_scale, causal) - softmax_lse.unflatten(1, (kv_heads, -1))[..., None])
    softmax_d = (dout * out).sum(-1).transpose(1, 2)  # (batch, heads, rows)
    dout, q = (x.unflatten(2, (kv_heads, -1)) for x in (dout, q))
    dweights = torch.einsum("bqhgd,bkhd->bhgqk", dout, v) - softmax_d.unflatten(1, (kv_heads, -1))[..., None]
    dscores = weights * dweights * softmax_scale
    dq.copy_(torch.einsum("bhgqk,bkhd->bqhgd", dscores, k).flatten(2, 3))
    dk.copy_(torch.einsum("bhgqk,bqhgd->bkhd", dscores, q))
    dv.copy_(torch.einsum("bhgqk,bqhgd->bkhd", weights, dout))
    return softmax_d


def _accumulated(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stand-in as the package `flash_attn`; gives the names of the entry points in the order of their calls."""
    calls: list[str] = []
    interface = ModuleType("flash_attn.flash_attn_interface")
    for function in (_flash_attn_forward, _flash_attn_backward):

        def record(*args: object, function: object = function, **kwargs: object) -> object:
            calls.append(function.__name__)  # type: ignore[attr-defined]
            return function(*args, **kwargs)  # type: ignore[operator]

        setattr(interface, function.__name__, record)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    return calls


@pytest.fixture
def anywhere(package: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stand-in on this CPU in every dtype."""
    monkeypatch.setitem(backends.KERNEL_ENGINES, "flash", lambda request: (replace(flash.KERNEL, why_not=lambda request: None),))
    monkeypatch.setitem(BACKENDS, "flash", lambda request: None)
    return package


# -- refusals -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware": simulate("cpu")}, "flash-attn runs on CUDA only; use backend='sdpa'"),
        ({"hardware": simulate("mps")}, "flash-attn runs on CUDA only; use backend='sdpa'"),
        ({"hardware": simulate("sm_75")}, "flash-attn needs sm_80 or newer; use backend='sdpa'"),
        ({"dtype": torch.float32}, "flash-attn has no float32 kernel; use backend='sdpa'"),
        ({"dtype": torch.float64}, "flash-attn has no float64 kernel; use backend='sdpa'"),
        ({"masked": True}, "flash-attn has no key padding mask; use backend='sdpa'"),
        ({"dropout": True}, "flash-attn's dropout is not used here: the math kernel's is; use backend='sdpa'"),
        ({"modified": True}, "flash-attn has no score_mod or mask_mod; use backend='flex' or backend='sdpa'"),
        ({"head_dim": 249}, "head_dim must be at most 248 for flash-attn, got 249; use backend='sdpa'"),
    ],
)
def test_flash_says_why_not(changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in (None, (2, 8, 3)):
        monkeypatch.setattr(flash, "INSTALLED", installed)
        assert backends.why_not("flash", request(**changes)) == message


@pytest.mark.parametrize(
    ("level", "installed", "message"),
    [
        ("sm_80", None, "flash-attn is not installed; pip install flash-attn"),
        ("sm_80", (2, 6, 3), "flash-attn must be 2.7 or newer on cuda sm_80, got 2.6.3"),
        ("sm_90", (1, 0, 9), "flash-attn must be 2.7 or newer on cuda sm_90, got 1.0.9"),
        ("sm_100", (2, 7, 2), "flash-attn must be 2.7.3 or newer on cuda sm_100, got 2.7.2"),
    ],
)
def test_flash_needs_the_package(
    level: str, installed: tuple[int, ...] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "INSTALLED", installed)
    assert backends.why_not("flash", request(hardware=simulate(level))) == message


@pytest.mark.parametrize(
    ("changes", "installed"),
    [
        ({}, (2, 7)),
        ({"dtype": torch.bfloat16, "head_dim": 248, "group": 4}, (2, 7, 0)),
        ({"hardware": simulate("sm_90"), "head_dim": 1}, (2, 8, 3)),
        ({"hardware": simulate("sm_120")}, (2, 7, 3)),
    ],
)
def test_flash_accepts_at_the_boundary(
    changes: dict[str, object], installed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "INSTALLED", installed)
    assert backends.choose("flash", request(**changes)) == "flash"
    assert choose_kernel("flash", request(**changes)) is flash.KERNEL


@pytest.mark.parametrize(
    ("found", "numbers"), [("2.7.0.post2", (2, 7, 0)), ("2.8.3+cu12torch2.9", (2, 8, 3)), ("2.10", (2, 10)), (None, None)]
)
def test_version_is_read_as_numbers(found: str | None, numbers: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        assert name == "flash-attn"
        if found is None:
            raise flash.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(flash, "version", version)
    assert flash._installed() == numbers


def test_attention_refuses_with_the_reason() -> None:
    q, k, v, _, _ = Case(PATTERN).tensors(torch.float16)
    with pytest.raises(NotImplementedError, match=r"^backend 'flash' cannot run this on cpu: flash-attn runs on CUDA only; use"):
        dilated_attention(q, k, v, PATTERN, backend="flash")
    with pytest.raises(NotImplementedError, match=r"^backend 'flash' cannot run this on cuda sm_75: flash-attn needs sm_80"):
        choose_kernel("flash", request(hardware=simulate("sm_75")))


def test_auto_never_takes_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "INSTALLED", (2, 8, 3))
    assert "flash" not in DEFAULT
    for level in ("sm_80", "sm_90", "sm_100"):
        assert backends.choose("auto", request(hardware=simulate(level))) != "flash"


@pytest.mark.slow
def test_import_of_the_library_leaves_the_package_alone(tmp_path: Path) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise AssertionError('imported')\n")
    paths = [str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    code = "import sys, flexdilated.cli; assert 'flash_attn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


# -- numerics on the stand-in -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_flash_equals_the_reference(name: str, anywhere: list[str]) -> None:
    case = CASES[name]
    for a, e in zip(run_engine(case, "flash"), run_reference(case)):
        torch.testing.assert_close(a, e, **EXACT)
    assert anywhere.count("_flash_attn_backward") > 0


def test_only_the_named_engine_runs_forward_and_backward(anywhere: list[str]) -> None:
    q, k, v, dout, dlse = CASES["gqa"].tensors()

    def attend(backend: str) -> None:
        differentiate(lambda q, k, v: dilated_attention(q, k, v, PATTERN, return_lse=True, backend=backend), q, k, v, dout, dlse)

    attend("sdpa")
    assert anywhere == []
    attend("flash")
    forwards = anywhere.count("_flash_attn_forward")
    assert forwards > 0
    assert anywhere == ["_flash_attn_forward"] * forwards + ["_flash_attn_backward"] * forwards


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_flash_runs_by_its_own_word_in_low_precision(
    dtype: torch.dtype, is_causal: bool, package: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "INSTALLED", (2, 7, 3))
    monkeypatch.setattr(flexdilated.core.request, "detect", lambda device: simulate("sm_80"))
    case = Case(PATTERN, kv_heads=3, group=2, head_dim=24, is_causal=is_causal, lse_gradient=False)
    actual, naive, expected = run_engine(case, "flash", dtype), run_plain(case, dtype), run_reference(case, dtype)
    for i in (0, 2, 3, 4):
        assert actual[i].dtype == dtype
        assert_twice_naive(actual[i], naive[i], expected[i])
    assert actual[1].dtype == torch.float32
    assert len(package) > 0
    q, k, v = case.tensors(dtype)[:3]
    with pytest.raises(NotImplementedError, match="flash-attn has no key padding mask"):
        dilated_attention(q, k, v, PATTERN, key_padding_mask=torch.zeros(1, 43, dtype=torch.bool), backend="flash")


def test_deterministic_algorithms_are_asked_of_the_backward(anywhere: list[str]) -> None:
    q, k, v, dout, _ = CASES["plain"].tensors()
    torch.use_deterministic_algorithms(True)  # the stand-in compares
    try:
        differentiate(lambda q, k, v: (dilated_attention(q, k, v, PATTERN, backend="flash"), q), q, k, v, dout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "_flash_attn_backward" in anywhere


def test_aligned_rows_are_read_in_place_and_others_copied() -> None:
    x = torch.randn(2, 29, 3, 24, dtype=torch.float16).transpose(1, 2)
    kept = x[:, :, 1::5]
    for view in (x, kept, kept[:, 1:]):
        assert flash._readable(view).data_ptr() == view.data_ptr()
    for view in (x[..., 1:9], x[..., ::3], torch.randn(2, 3, 29, 25, dtype=torch.float16)[..., :24]):
        copy = flash._readable(view)
        assert torch.equal(copy, view.transpose(1, 2))
        assert copy.is_contiguous()
        assert copy.data_ptr() != view.data_ptr()


def test_kernel_takes_what_an_offset_head_dim_misaligns(anywhere: list[str]) -> None:
    q, k, v = (torch.randn(2, heads, 11, 9, dtype=torch.float64)[..., 1:] for heads in (6, 3, 3))
    out, lse = flash.KERNEL.forward(q, k, v, Options(True, 0.4))
    scores = (q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) * 0.4).masked_fill(~torch.ones(11, 11).tril().bool(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), **EXACT)
    torch.testing.assert_close(out, scores.softmax(-1) @ v.repeat_interleave(2, dim=1), **EXACT)


def test_kernel_takes_an_lse_of_any_strides(anywhere: list[str]) -> None:
    q, k, v, dout = (torch.randn(2, heads, 11, 8, dtype=torch.float64) for heads in (6, 3, 3, 6))
    out, lse = flash.KERNEL.forward(q, k, v, Options(False, 0.4))
    turned = lse.transpose(1, 2).contiguous().transpose(1, 2)
    expected = flash.KERNEL.run_backward(dout, q, k, v, out, lse, Options(False, 0.4))
    for a, e in zip(flash.KERNEL.run_backward(dout, q, k, v, out, turned, Options(False, 0.4)), expected):
        assert torch.equal(a, e)


# -- compile ------------------------------------------------------------------------------------------------------------------


def test_compiled_flash_equals_eager(anywhere: list[str]) -> None:
    torch._dynamo.reset()
    case = CASES["causal_gqa"]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dilated_attention(q, k, v, PATTERN, is_causal=True, return_lse=True, backend="flash")

    expected = differentiate(attend, *case.tensors())
    seen = len(anywhere)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for a, e in zip(differentiate(compiled, *case.tensors()), expected):
        torch.testing.assert_close(a, e, **EXACT)
    assert anywhere[seen:] == anywhere[:seen]


def test_compiled_flash_refuses_as_eager_does() -> None:
    torch._dynamo.reset()
    q, k, v, _, _ = Case(PATTERN).tensors(torch.float16)
    compiled = torch.compile(lambda *x: dilated_attention(*x, PATTERN, backend="flash"), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="flash-attn runs on CUDA only"):
        compiled(q, k, v)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # opcheck's own, torch 2.15
def test_operator_keeps_pytorch_s_contract_under_flash(anywhere: list[str]) -> None:
    q, k, v, _, _ = CASES["gqa"].tensors(torch.float32)
    rules = (PATTERN.heads, PATTERN.offsets, PATTERN.zero_padding, PATTERN.detach_weights)
    torch.library.opcheck(
        torch.ops.flexdilated.mixture.default,
        (
            *(x.requires_grad_() for x in (q, k, v)),
            None,
            None,
            None,
            PATTERN.segment_lengths,
            PATTERN.dilation_rates,
            *rules,
            False,
            0.5,
            0.0,
            "flash",
            0,
            k.shape[2],
        ),
    )
    assert "_flash_attn_backward" in anywhere


# -- the package --------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_package_errs_at_most_twice_as_much_as_plain_pytorch(name: str, dtype: torch.dtype) -> None:
    case = replace(CASES[name], lse_gradient=False)
    reason = backends.why_not("flash", Request(detect("cuda"), dtype, case.head_dim, case.group))
    if reason is not None:
        pytest.skip(reason)
    actual = run_engine(case, "flash", dtype, "cuda")
    whole = replace(case, pattern=PATTERN, borders=None)  # plain PyTorch's error: of the unmasked whole, as in test_gpu.py
    expected, exact, naive = run_reference(case, dtype), run_reference(whole, dtype), run_plain(whole, dtype)
    for i in (0, 2, 3, 4):
        assert actual[i].dtype == dtype
        error = actual[i].cpu().double() - expected[i]
        assert_twice_naive(error, naive[i].double() - exact[i], torch.zeros_like(error))
