"""The flash backend: what it refuses, and its calls of stand-ins for both packages: head dims, strides, views, bands.

Every kind of branch goes through them in tests/doors.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

import flexdilated.core.dispatch_key
from flexdilated import DilatedPattern, backends, dilated_attention
from flexdilated.backends import DispatchKey, choose_kernel
from flexdilated.backends.dense import flash, flash_kernels, piece_loop
from flexdilated.backends.dense.math import MATH
from flexdilated.backends.kernel import Options
from flexdilated.backends.measured import DEFAULT
from tests.backends.flash_stand_ins import KERNEL, Calls, place, stand_in
from tests.cases import Case, assert_twice_plain, differentiate, run_backend, run_reference
from tests.doors.cases import CASES, KINDS, assert_near, results
from tests.doors.doors import attends
from tests.hardware import simulate
from tests.tolerances import EXACT

PATTERN = DilatedPattern((11, 23, 47), (1, 3, 5))
# flash-attn 2 needs a column of the head dim for the gradient of lse: at 16 it pads.
SIZED = {
    "head_dim_16": Case(PATTERN, head_dim=16, group=2),
    "head_dim_8_in_place": Case(PATTERN, head_dim=8, is_causal=True, lse_gradient=False),
    "head_dim_1": Case(PATTERN, head_dim=1),
    "head_dim_248": Case(PATTERN, kv_heads=1, head_dim=248),
    "strided": Case(PATTERN, head_dim=8, strided=True, lse_gradient=False),
    "one_head": Case(DilatedPattern((7, 13), (1, 7)), batch=3, kv_heads=1, head_dim=72),
    "window_documents": Case(
        DilatedPattern((11, 23), (2, 3), window=7), is_causal=True, borders=(0, 1, 8, 15, 15, 28, 41, 43), group=2
    ),
}


def request(**changes: object) -> DispatchKey:
    return DispatchKey(**{"hardware": simulate("sm_80"), "dtype": torch.float16, "head_dim": 64, **changes})  # type: ignore[arg-type]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return stand_in(monkeypatch)


@pytest.fixture(params=KERNEL)
def anywhere(request: pytest.FixtureRequest, package: Calls, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The stand-in of each package on this CPU in every dtype."""
    place(request.param, monkeypatch)
    return package


Version = tuple[int, ...] | None


def install(monkeypatch: pytest.MonkeyPatch, two: Version, four: Version) -> None:
    monkeypatch.setattr(flash, "INSTALLED", two)
    monkeypatch.setattr(flash, "INSTALLED_4", four)


TWO, FOUR = (2, 8, 3), (4, 0, 0, 36)
MISSING_2 = "flash-attn is not installed (pip install 'flexdilated[flash2]')"
MISSING_4 = "flash-attn-4 is not installed (pip install 'flexdilated[flash]')"
OTHER_LEVEL = "flash-attn-4 runs on sm_90, sm_100, sm_103, sm_110 only"


@pytest.mark.parametrize("installed", [(None, None), (TWO, None), (None, FOUR), (TWO, FOUR)])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware": simulate("cpu")}, "flash-attn runs on CUDA only; use backend='sdpa'"),
        ({"hardware": simulate("mps")}, "flash-attn runs on CUDA only; use backend='sdpa'"),
        ({"hardware": simulate("sm_75")}, "flash-attn needs sm_80 or newer; use backend='sdpa'"),
        ({"dtype": torch.float32}, "flash-attn has no float32 kernel; use backend='sdpa'"),
        ({"dtype": torch.float64}, "flash-attn has no float64 kernel; use backend='sdpa'"),
        ({"key_padding_mask": True}, "flash-attn has no key padding mask; use backend='sdpa'"),
        ({"dropout": True}, "flash-attn's dropout is not used here: the math kernel's is; use backend='sdpa'"),
        ({"modified": True}, "flash-attn has no score_mod or mask_mod; use backend='flex' or backend='sdpa'"),
    ],
)
def test_flash_says_why_not(
    changes: dict[str, object], message: str, installed: tuple[Version, Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *installed)
    for level in ("sm_80", "sm_90"):
        assert backends.why_not("flash", request(**{"hardware": simulate(level), **changes})) == message


SDPA = "use backend='sdpa'"
NO_GRADIENT = f"flash-attn-4 has no gradient of lse at head_dim 256 on cuda sm_100; {SDPA}"
WIDE = f"head_dim must be at most 255 for flash-attn, got 256; {SDPA}"
NARROW = "head_dim must be at most 128, or 256, for flash-attn-4 on cuda sm_100"
GRADIENT = {"wants_lse": True, "differentiable": True}


@pytest.mark.parametrize(
    ("level", "changes", "two", "four", "message"),
    [
        ("sm_80", {}, None, FOUR, f"{OTHER_LEVEL}; {MISSING_2}"),
        ("sm_80", {}, (2, 6, 3), FOUR, f"{OTHER_LEVEL}; flash-attn must be 2.7 or newer on cuda sm_80, got 2.6.3"),
        ("sm_80", {"head_dim": 257}, TWO, None, f"{OTHER_LEVEL}; head_dim must be at most 256 for flash-attn, got 257; {SDPA}"),
        ("sm_80", {"head_dim": 256, "dlse": True}, TWO, None, f"{OTHER_LEVEL}; {WIDE}"),
        ("sm_80", {"head_dim": 256, **GRADIENT}, TWO, None, f"{OTHER_LEVEL}; {WIDE}"),
        ("sm_90", {}, None, None, f"{MISSING_4}; {MISSING_2}"),
        ("sm_90", {}, (1, 0, 9), None, f"{MISSING_4}; flash-attn must be 2.7 or newer on cuda sm_90, got 1.0.9"),
        ("sm_100", {}, (2, 7, 2), None, f"{MISSING_4}; flash-attn must be 2.7.3 or newer on cuda sm_100, got 2.7.2"),
        ("sm_90", {}, None, (4, 0, 0, 12), "flash-attn-4 must be 4.0.0b13 to 4.0.0b36, got 4.0.0b12"),
        # An installed flash-attn-4 is not replaced silently.
        ("sm_90", {}, TWO, (4, 0, 0, 37), "flash-attn-4 must be 4.0.0b13 to 4.0.0b36, got 4.0.0b37"),
        ("sm_90", {}, TWO, (4, 0, 0), "flash-attn-4 must be 4.0.0b13 to 4.0.0b36, got 4.0.0"),
        ("sm_90", {"head_dim": 160}, TWO, (4, 0, 0, 30), "flash-attn-4 must be 4.0.0b31 to 4.0.0b36, got 4.0.0b30"),
        ("sm_100", {"head_dim": 33}, TWO, (4, 0, 0, 30), "flash-attn-4 must be 4.0.0b31 to 4.0.0b36, got 4.0.0b30"),
        ("sm_90", {"head_dim": 257}, TWO, FOUR, f"head_dim must be at most 256 for flash-attn-4, got 257; {SDPA}"),
        ("sm_100", {"head_dim": 129}, TWO, FOUR, f"{NARROW}, got 129; {SDPA}"),
        ("sm_100", {"head_dim": 256, **GRADIENT}, TWO, FOUR, NO_GRADIENT),
        ("sm_100", {"head_dim": 249, "dlse": True}, TWO, FOUR, NO_GRADIENT),
        (
            "sm_100",
            {"head_dim": 256, "window": True},
            TWO,
            FOUR,
            f"flash-attn-4 has no window at head_dim 256 on cuda sm_100; {SDPA}",
        ),
        ("sm_120", {}, None, FOUR, f"{OTHER_LEVEL}; {MISSING_2}"),
    ],
)
def test_each_package_says_why_not(
    level: str, changes: dict[str, object], two: Version, four: Version, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, two, four)
    assert backends.why_not("flash", request(hardware=simulate(level), **changes)) == message


@pytest.mark.parametrize(
    ("level", "changes", "two", "four", "kernel"),
    [
        ("sm_80", {}, (2, 7), None, "flash_attn"),
        ("sm_80", {"dtype": torch.bfloat16, "head_dim": 256, "group": 4}, (2, 7, 0), FOUR, "flash_attn"),
        ("sm_90", {"head_dim": 1}, TWO, None, "flash_attn"),
        ("sm_120", {}, (2, 7, 3), FOUR, "flash_attn"),
        ("sm_90", {"head_dim": 256, **GRADIENT}, TWO, (4, 0, 0, 13), "flash_attn_4"),
        ("sm_90", {"head_dim": 256, "window": True}, None, FOUR, "flash_attn_4"),
        ("sm_90", {"head_dim": 192}, None, (4, 0, 0, 30), "flash_attn_4"),
        ("sm_100", {"head_dim": 25}, None, (4, 0, 0, 30), "flash_attn_4"),
        ("sm_90", {"head_dim": 193, "group": 3}, None, (4, 0, 0, 31), "flash_attn_4"),
        ("sm_100", {"head_dim": 128, "dtype": torch.bfloat16, **GRADIENT}, None, FOUR, "flash_attn_4"),
        ("sm_100", {"head_dim": 256, "wants_lse": True}, None, FOUR, "flash_attn_4"),
        ("sm_110", {"head_dim": 249, "differentiable": True}, None, FOUR, "flash_attn_4"),
    ],
)
def test_flash_accepts_at_the_boundary(
    level: str, changes: dict[str, object], two: Version, four: Version, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, two, four)
    asked = request(hardware=simulate(level), **changes)
    assert backends.choose("flash", asked) == "flash"
    assert choose_kernel("flash", asked) is KERNEL[kernel]


@pytest.mark.parametrize(
    ("found", "numbers"),
    [
        ("2.7.0.post2", (2, 7, 0)),
        ("2.8.3+cu12torch2.9", (2, 8, 3)),
        ("2.10", (2, 10)),
        ("4.0.0b36", (4, 0, 0, 36)),
        ("4.0.0b37.dev2+g0123abc", (4, 0, 0, 37)),
        (None, None),
    ],
)
def test_version_is_read_as_numbers(found: str | None, numbers: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        assert name == "flash-attn"
        if found is None:
            raise flash.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(flash, "version", version)
    assert flash._installed("flash-attn") == numbers


def test_extra_installs_versions_that_the_backend_takes() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    least, newest = (flash._dotted(numbers) for numbers in flash.VERSIONS_4)
    assert f'flash = ["flash-attn-4>={least},<={newest}; ' in text
    assert f'flash2 = ["flash-attn>={flash._dotted(flash.LEAST_VERSION)}"]' in text


@pytest.mark.parametrize(
    ("torch_version", "four", "fails"),
    [
        ("2.10.0", FOUR, False),
        ("2.11.0+cu130", FOUR, True),
        ("2.13.1", (4, 0, 0, 19), True),
        ("2.13.1", (4, 0, 0, 18), False),
        ("2.13.1", None, False),
        ("2.14.0", FOUR, False),
    ],
)
def test_activation_of_fa4_in_torch_fails_with_some_versions(
    torch_version: str, four: tuple[int, ...] | None, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, None, four)
    monkeypatch.setattr(torch, "__version__", TorchVersion(torch_version))
    said = flash.activation_fault()
    if fails:
        assert four is not None
        assert said == (
            f"torch.nn.attention.activate_flash_attention_impl('FA4') raises ValueError in every call with torch {torch_version} "
            f"and flash-attn-4 4.0.0b{four[3]}; use backend='flash'"
        )
    else:
        assert said is None


def test_auto_never_takes_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, TWO, FOUR)
    assert "flash" not in DEFAULT
    for level in ("sm_80", "sm_90", "sm_100"):
        assert backends.choose("auto", request(hardware=simulate(level))) != "flash"


@pytest.mark.parametrize("views", [False, True], ids=["slabs", "views"])  # as on a CPU, as on a GPU
@pytest.mark.parametrize("name", SIZED)
def test_flash_takes_head_dims_and_strides(name: str, views: bool, anywhere: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    if views:
        monkeypatch.setattr(piece_loop, "packs", lambda device: False)
    torch.testing.assert_close(run_backend(SIZED[name], "flash"), run_reference(SIZED[name]), **EXACT)
    assert anywhere.count("backward") > 0


@pytest.mark.parametrize("kind", KINDS)
def test_views_as_on_a_gpu_equal_the_definition(kind: str, anywhere: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_loop, "packs", lambda device: False)
    for variant in ("plain", "packed, causal"):
        case = CASES[kind, variant]
        assert_near(results(attends("flash")(case), case), case, case.dtype)


@pytest.mark.parametrize(
    ("level", "dtype", "is_causal"), [("sm_80", torch.bfloat16, True), ("sm_90", torch.float16, False)], ids=str
)
def test_flash_runs_by_its_own_word_in_low_precision(
    level: str, dtype: torch.dtype, is_causal: bool, package: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, (2, 7, 3), FOUR)
    monkeypatch.setattr(flexdilated.core.dispatch_key, "detect", lambda device: simulate(level))
    case = Case(PATTERN, kv_heads=3, group=2, head_dim=24, is_causal=is_causal, lse_gradient=False)
    actual = run_backend(case, "flash", dtype)
    assert_twice_plain(actual, case, dtype)
    assert actual[1].dtype == torch.float32
    assert len(package) > 0
    assert ("dlse" in package.last) == (level == "sm_90")
    q, k, v = case.tensors(dtype)[:3]
    with pytest.raises(NotImplementedError, match="flash-attn has no key padding mask"):
        dilated_attention(q, k, v, PATTERN, key_padding_mask=torch.zeros(1, 43, dtype=torch.bool), backend="flash")


def test_deterministic_algorithms_are_asked_of_the_backward(anywhere: Calls) -> None:
    q, k, v, dout, _ = SIZED["head_dim_1"].tensors()
    torch.use_deterministic_algorithms(True)  # the stand-in compares
    try:
        differentiate(lambda q, k, v: (dilated_attention(q, k, v, PATTERN, backend="flash"), q), q, k, v, dout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "backward" in anywhere


def test_aligned_rows_are_read_in_place_and_others_copied() -> None:
    x = torch.randn(2, 29, 3, 24, dtype=torch.float16).transpose(1, 2)
    kept = x[:, :, 1::5]
    for view in (x, kept, kept[:, 1:]):
        assert flash_kernels._readable(view).data_ptr() == view.data_ptr()
    wide = torch.randn(2, 3, 29, 25, dtype=torch.float16)[..., :24]
    for view in (x[..., 1:9], x[..., ::3], wide, x[:, :1].expand(2, 3, 29, 24)):
        copy = flash_kernels._readable(view)
        assert torch.equal(copy, view.transpose(1, 2))
        assert copy.is_contiguous()
        assert copy.data_ptr() != view.data_ptr()


def test_kernel_takes_fewer_queries_than_keys(anywhere: Calls) -> None:
    """As between ranks."""
    kernel = choose_kernel("flash", request())
    q, k, v, dout = (torch.randn(2, heads, rows, 8, dtype=torch.float64) for heads, rows in ((6, 7), (3, 11), (3, 11), (6, 7)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scores = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) * 0.4
    expected, expected_lse = scores.softmax(-1) @ v.repeat_interleave(2, dim=1), scores.logsumexp(-1)
    dlse = torch.randn(2, 6, 7, dtype=torch.float64)
    with torch.no_grad():
        out, lse = kernel.forward(q, k, v, Options(False, 0.4))
        turned = lse.transpose(1, 2).contiguous().transpose(1, 2)
        grads = kernel.backward(dout, dlse, q, k, v, out, turned, Options(False, 0.4))
    for a, e in zip((out, *grads), (expected, *torch.autograd.grad((expected, expected_lse), leaves, (dout, dlse)))):
        torch.testing.assert_close(a, e, **EXACT)


BANDS = [(7, 7, -2, 0), (7, 7, 0, 1 << 40), (7, 11, 0, 4), (7, 11, -30, 6), (1, 1, 0, 0)]
MAY_EMPTY_A_ROW = [(7, 7, 1, 3), (7, 7, -3, -1), (7, 11, 0, 3), (7, 11, 5, 9), (11, 7, -9, 9)]


@pytest.mark.parametrize(("rows", "keys", "low", "high"), BANDS + MAY_EMPTY_A_ROW)
def test_bands_are_counted_from_the_last_row(rows: int, keys: int, low: int, high: int, anywhere: Calls) -> None:
    kernel, options = choose_kernel("flash", request()), Options(False, 0.4, band=(low, high))
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (rows, keys, keys))
    if (rows, keys, low, high) in MAY_EMPTY_A_ROW:
        with pytest.raises(NotImplementedError, match=rf"flash-attn, got \({low}, {high}\) of {rows} queries and {keys} keys"):
            kernel.forward(q, k, v, options)
        return
    out, lse = MATH.forward(q, k, v, options)
    torch.testing.assert_close(kernel.forward(q, k, v, options), (out, lse), **EXACT)
    actual, expected = (each.backward(out, None, q, k, v, out, lse, options) for each in (kernel, MATH))
    torch.testing.assert_close(actual, expected, **EXACT)


def strided(heads: int, fill: float, *, head_dim: int = 8) -> tuple[Tensor, Tensor]:
    """Whole memory `(B, N, H, D)` and every third row of it as `(batch, heads, rows, D)`."""
    whole = torch.full((2, 31, heads, head_dim), fill, dtype=torch.float64)
    return whole, whole[:, 1::3].transpose(1, 2)


def test_flash_attn_4_reads_and_writes_views_in_place(package: Calls) -> None:
    kernel, options = KERNEL["flash_attn_4"], Options(True, 0.4)
    inputs = [strided(heads, 0.0)[1].normal_(generator=torch.Generator().manual_seed(heads)) for heads in (6, 3, 3)]
    q, k, v = inputs
    dout, dlse = torch.randn_like(q), torch.randn(2, 10, 6, dtype=torch.float64).transpose(1, 2)
    out, lse = kernel.run_forward(q, k, v, options)
    whole_out, out_view = strided(6, torch.nan)
    written = kernel.run_forward(q, k, v, options, into=out_view)
    assert [package.last[name].data_ptr() for name in "qkv"] == [x.data_ptr() for x in inputs]
    assert package.last["out"].data_ptr() == out_view.data_ptr() == written[0].data_ptr()
    assert torch.equal(out_view, out)
    assert torch.equal(written[1], lse)
    assert int(whole_out.isnan().sum()) == whole_out.numel() - out.numel()

    expected = kernel.run_backward(dout, q, k, v, out, lse, options, dlse=dlse)
    memory = [strided(heads, torch.nan) for heads in (6, 3, 3)]
    grads = kernel.run_backward(dout, q, k, v, out_view, lse, options, dlse=dlse, into=tuple(view for _, view in memory))
    for name, x in zip(("q", "k", "v", "out"), (*inputs, out_view)):
        assert package.last[name].data_ptr() == x.data_ptr()
    for grad, e, (whole, view) in zip(grads, expected, memory):
        assert grad.data_ptr() == view.data_ptr()
        assert torch.equal(view, e)
        assert int(whole.isnan().sum()) == whole.numel() - e.numel()


def test_flash_attn_4_copies_into_views_that_it_cannot_write(package: Calls) -> None:
    kernel, options = KERNEL["flash_attn_4"], Options(False, 0.4)
    q, k, v = (strided(heads, 0.0)[1].normal_(generator=torch.Generator().manual_seed(heads)) for heads in (6, 3, 3))
    out, lse = kernel.forward(q, k, v, options)
    misaligned = [strided(heads, torch.nan, head_dim=9)[1][..., 1:] for heads in (6, 6, 3, 3)]
    assert kernel.forward(q, k, v, options, into=misaligned[0])[0] is misaligned[0]
    grads = kernel.backward(out, None, q, k, v, out, lse, options, into=tuple(misaligned[1:]))
    for view, given, expected in zip(
        misaligned, (misaligned[0], *grads), (out, *kernel.backward(out, None, q, k, v, out, lse, options))
    ):
        assert given is view
        assert torch.equal(view, expected)


@pytest.mark.parametrize(("level", "kernel"), [("sm_80", "flash_attn"), ("sm_90", "flash_attn_4")])
def test_compiler_traces_the_choice_of_a_package(level: str, kernel: str, package: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    hardware, case = simulate(level), Case(DilatedPattern((23, 47), (1, 3)), kv_heads=2, head_dim=8)
    install(monkeypatch, TWO, FOUR)
    monkeypatch.setattr(flexdilated.core.dispatch_key, "detect", lambda device: hardware)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dilated_attention(q, k, v, case.pattern, return_lse=True, backend="flash")

    tensors = case.tensors(torch.float16)
    expected = differentiate(attend, *tensors)
    torch.testing.assert_close(
        differentiate(torch.compile(attend, fullgraph=True, backend="aot_eager"), *tensors), expected, **EXACT
    )
    assert ("dlse" in package.last) == (kernel == "flash_attn_4")
