"""The table of backends and kernels, the choice, and the two CPU kernels against each other."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import environment
from flexdilated import DilatedPattern, backends, dilated_attention, reference
from flexdilated.backends import BACKENDS, KERNEL_BACKENDS, Choice, DispatchKey, choose_kernel, dispatch, measured
from flexdilated.backends.dense import sdpa
from flexdilated.backends.dense.sdpa import KERNELS
from flexdilated.backends.dropout import Dropout
from flexdilated.backends.kernel import Options
from flexdilated.backends.measured import DEFAULT
from flexdilated.backends.triton import backend as triton_backend
from flexdilated.core import custom_op
from tests.cases import Case, run_backend, run_reference
from tests.hardware import simulate
from tests.measured import ship_checks
from tests.tolerances import EXACT

PATTERN = DilatedPattern((11, 23, 47), (1, 3, 5))
CPU, MPS = simulate("cpu"), simulate("mps")
KERNEL = {kernel.name: kernel for kernel in KERNELS}
HALF = {"hardware": simulate("sm_80"), "dtype": torch.float16}


def request(**changes: object) -> DispatchKey:
    return DispatchKey(**{"hardware": CPU, "dtype": torch.float32, "head_dim": 7, **changes})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that can build triton's launcher, and forms of triton that have run on an sm_90."""
    monkeypatch.setattr(triton_backend, "UNBUILT", None)
    ship_checks(monkeypatch, "forward", "backward", "forward, grouped heads")


@pytest.mark.parametrize(
    ("level", "changes", "backend"),
    [
        ("sm_80", {}, "flex"),
        ("sm_90", {"dtype": torch.bfloat16, "differentiable": True, "key_padding_mask": True}, "flex"),
        ("sm_80", {"modified": False, "dtype": torch.bfloat16}, "sdpa"),  # nothing has measured one
        ("sm_90", {"modified": False, "dtype": torch.bfloat16}, "triton"),
        ("sm_90", {"modified": False, "dtype": torch.bfloat16, "group": 2}, "triton"),
        ("sm_90", {"modified": False, "dtype": torch.bfloat16, "group": 2, "differentiable": True}, "sdpa"),  # has not run
        ("sm_90", {"modified": False, "dtype": torch.bfloat16, "dropout": True}, "sdpa"),
        ("sm_90", {"modified": False, "dtype": torch.float32, "num_tokens": 65536}, "sdpa"),
        ("sm_90", {"modified": False, "dtype": torch.float32, "dynamic": True}, "sdpa"),
        ("sm_90", {"modified": False, "dtype": torch.bfloat16, "dynamic": True}, "triton"),
        ("sm_90", {"modified": False, "dtype": torch.bfloat16, "head_dim": 100}, "sdpa"),  # 200 bytes a row
        ("sm_90", {"modified": False, "dtype": torch.bfloat16, "head_dim": 136}, "sdpa"),  # more than was measured
        ("sm_90", {"dropout": True}, "sdpa"),
        ("sm_90", {"dynamic": True}, "sdpa"),
        ("sm_90", {"dtype": torch.float64}, "sdpa"),
        ("sm_90", {"head_dim": 15}, "sdpa"),
        ("sm_75", {}, "sdpa"),
        ("cpu", {}, "sdpa"),
        ("mps", {}, "sdpa"),
    ],
)
def test_auto_takes_what_is_fastest_on_a_gpu_and_flex_for_functions(level: str, changes: dict[str, object], backend: str) -> None:
    asked = request(**{"hardware": simulate(level), "head_dim": 16, "modified": True, **changes})
    assert backends.choose("auto", asked) == backend


def test_auto_leaves_triton_out_where_it_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(hardware=simulate("sm_90"), head_dim=64, dtype=torch.bfloat16)
    assert backends.choose("auto", asked) == "triton"
    monkeypatch.setattr(triton_backend, "UNBUILT", "triton needs a C compiler")
    assert backends.choose("auto", asked) == "sdpa"
    assert backends.choose("triton", asked) == "triton"  # its cache may hold what was built elsewhere


def test_auto_takes_no_form_that_changed_since_a_gpu_ran_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(hardware=simulate("sm_90"), head_dim=64, dtype=torch.bfloat16, group=2, differentiable=True)
    reason = "the code of its backward, grouped heads has changed, and has not run on sm_90 since"
    assert measured.unproven("triton", asked) == reason
    monkeypatch.setattr(backends, "prefer", lambda request: ("triton",))
    with pytest.raises(NotImplementedError, match=f"triton: {reason}"):
        backends.choose("auto", asked)
    assert backends.choose("triton", asked) == "triton"


def test_kept_forms_are_those_of_this_code() -> None:
    shipped = json.loads(measured.FILE.read_text())
    for device, entry in ((device, entry) for device, kept in shipped.items() for entry in kept["checks"]):
        assert entry["source"] == environment.source_of(entry["candidate"], entry["form"]), (
            f"{entry['candidate']}, {entry['form']} has changed since {entry['commit']} ran on {device}; remove the entry: "
            "backend='auto' takes another backend until python -m benchmarks.gpu --all has run there"
        )


def test_a_form_is_known_by_its_code_alone() -> None:
    code = 'def f(x):\n    """A text."""\n    return x + 1\n'
    same, other = "# new\ndef f(x):\n    return x  +  1\n", code.replace("1", "2")
    assert environment.digest(code) == environment.digest(same) != environment.digest(other)
    sources = {environment.source_of(*form) for form in (("triton", "forward"), ("triton", "backward"), ("flash", "forward"))}
    assert len(sources) == 3


def test_what_triton_is_built_with_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "C compiler" in str(triton_backend._unbuilt())
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(triton_backend.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "headers" in str(triton_backend._unbuilt())
    (tmp_path / "Python.h").touch()
    assert triton_backend._unbuilt() is None


def test_auto_keeps_to_deterministic_algorithms() -> None:
    asked = request(hardware=simulate("sm_90"), head_dim=64, modified=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert backends.choose("auto", asked) == "sdpa"
        assert backends.choose("flex", asked) == "flex"
    finally:
        torch.use_deterministic_algorithms(False)


def test_auto_computes_what_flex_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise NotImplementedError("score_mod and mask_mod must be functions that flex_attention compiles")

    monkeypatch.setattr(dispatch, "select", lambda backend, request, **options: Choice("flex", request, None))
    monkeypatch.setattr(dispatch.flex, "attend_flex", refuse)
    q, k, v, _, _ = Case(PATTERN).tensors()
    functions = {"score_mod": lambda s, b, h, i, j: s - 0.1 * (i - j).abs()}
    out = dilated_attention(q, k, v, PATTERN, **functions)
    torch.testing.assert_close(out, reference.dilated_attention(q, k, v, PATTERN, **functions)[0], **EXACT)
    for named in ({"backend": "flex", **functions}, {"backend": "flex"}):
        with pytest.raises(NotImplementedError, match="score_mod and mask_mod must be functions that flex_attention compiles"):
            dilated_attention(q, k, v, PATTERN, **named)


def test_auto_never_takes_the_oracle() -> None:
    asked = request(differentiable=True)
    assert backends.why_not("reference", asked) is None
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(NotImplementedError, match="no backend can run this on cpu: sdpa"):
        backends.choose("auto", asked)


def test_auto_gives_every_reason_where_no_backend_can() -> None:
    asked = request(hardware=MPS, dtype=torch.float64, dropout=True)
    with pytest.raises(NotImplementedError, match="no backend can run this on mps: ") as error:
        backends.choose("auto", asked)
    for name in DEFAULT:
        reason = backends.why_not(name, asked)
        assert reason is not None
        assert f"{name}: {reason}" in str(error.value)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_named_backend_runs_or_raises_its_own_reason(name: str) -> None:
    asked = request(hardware=MPS, dtype=torch.float64, dropout=True)
    reason = backends.why_not(name, asked)
    with pytest.raises(NotImplementedError) as error:
        backends.choose(name, asked)
    assert str(error.value) == f"backend {name!r} cannot run this on mps: {reason}"


def test_unknown_backends_are_rejected() -> None:
    for ask in (backends.choose, backends.why_not):
        with pytest.raises(ValueError, match=r"backend must be one of \('auto', 'sdpa', .*\), got 'fast'"):
            ask("fast", request())


@pytest.mark.parametrize("mods", [{"score_mod": lambda s, *_: s}, {"mask_mod": lambda b, h, i, j: i >= j}])
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_no_switch_of_kernels_reaches_functions(mods: dict[str, Any], backend: str) -> None:
    q, k, v, _, _ = Case(PATTERN).tensors()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = dilated_attention(q, k, v, PATTERN, backend=backend, **mods)
    torch.testing.assert_close(out, reference.dilated_attention(q, k, v, PATTERN, **mods)[0], **EXACT)


@pytest.mark.parametrize("asked", [{"modified": True}, {"transformed": True}], ids=str)
def test_functions_and_transforms_have_rows_of_their_own(asked: dict[str, object]) -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert backends.why_not("sdpa", request(**asked)) is None
    assert backends.why_not("sdpa", request(hardware=MPS, dtype=torch.float64, **asked)) == "MPS has no float64"
    hopper = request(hardware=simulate("sm_90"), dtype=torch.bfloat16, head_dim=64, **asked)
    for name in ("flash", "triton"):
        assert re.search("no (score_mod|transform of torch.func)", str(backends.why_not(name, hopper)))
    assert backends.choose("auto", replace(hopper, modified=False, transformed=True)) == "sdpa"


@pytest.mark.parametrize(
    ("level", "version", "changes", "kernel"),
    [
        ("sm_90", 91501, {}, "cudnn"),
        ("sm_100", 92000, {"head_dim": 128, "group": 4}, "cudnn"),
        ("sm_90", 91500, {}, "flash"),
        ("sm_90", None, {}, "flash"),
        ("sm_80", 92000, {}, "flash"),
        ("sm_120", 92000, {}, "flash"),
        ("sm_90", 92000, {"head_dim": 129}, "flash"),
        ("sm_90", 92000, {"head_dim": 127, "dlse": True}, "cudnn"),
        ("sm_90", 92000, {"head_dim": 128, "dlse": True}, "flash"),
        ("sm_90", 92000, {"key_padding_mask": True}, "efficient"),
        ("sm_90", 92000, {"packed": True}, "flash"),
    ],
)
def test_cudnn_comes_first_where_torch_prefers_it(
    level: str, version: int | None, changes: dict[str, object], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    asked = request(hardware=simulate(level), dtype=torch.bfloat16, **changes)
    assert choose_kernel("sdpa", asked).name == kernel
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)  # cuDNN's backward does not repeat
    assert choose_kernel("sdpa", asked).name == kernel.replace("cudnn", "flash")


def test_kernel_refusal_is_the_text_of_why_not() -> None:
    asked = request(hardware=MPS, dtype=torch.float64)
    reason = sdpa.why_not(asked)
    assert reason == "; ".join(f"{kernel.name}: {kernel.why_not(asked)}" for kernel in KERNELS)
    with pytest.raises(NotImplementedError) as error:
        choose_kernel("sdpa", asked)
    assert str(error.value) == f"backend 'sdpa' cannot run this on mps: {reason}"


@pytest.mark.parametrize(
    ("kernel", "changes", "message"),
    [
        ("cpu_flash", {"hardware": simulate("sm_80")}, "it runs on CPU only"),
        ("cpu_flash", {"dropout": True}, "it has no dropout"),
        ("flash", {}, "it runs on CUDA only"),
        ("flash", {"hardware": simulate("sm_75"), "dtype": torch.float16}, "it needs sm_80 or newer"),
        ("flash", {"hardware": simulate("sm_80")}, "it has no float32 kernel there"),
        ("flash", {"hardware": simulate("sm_80"), "dtype": torch.float16, "key_padding_mask": True}, "it has no key padding mask"),
        ("flash", {**HALF, "head_dim": 256, "dlse": True}, "head_dim must be at most 256, got 257"),
        ("cudnn", {**HALF, "head_dim": 128, "dlse": True}, "head_dim must be at most 128, got 129"),
        ("cudnn", {**HALF, "key_padding_mask": True}, "cuDNN is not used with a key padding mask"),
        ("efficient", {"hardware": simulate("sm_75"), "dtype": torch.bfloat16}, "it has no bfloat16 kernel there"),
        ("efficient", {"hardware": simulate("sm_80"), "dtype": torch.float64}, "it has no float64 kernel there"),
        ("efficient", {"hardware": simulate("sm_80"), "dropout": True}, "attention dropout runs on the math kernel only"),
        ("math", {"hardware": MPS, "dtype": torch.float64}, "MPS has no float64"),
        ("cpu_flash", {"key_padding_mask": True}, "None"),
        ("flash", {"hardware": simulate("sm_80"), "dtype": torch.float16, "head_dim": 256}, "None"),
        ("cudnn", {"hardware": simulate("sm_80"), "dtype": torch.float16, "head_dim": 128}, "None"),
        ("efficient", {"hardware": simulate("sm_60"), "dtype": torch.float16, "key_padding_mask": True}, "None"),
        ("math", {"hardware": MPS, "dropout": True}, "None"),
    ],
)
def test_kernel_says_why_not(kernel: str, changes: dict[str, object], message: str) -> None:
    assert str(KERNEL[kernel].why_not(request(**changes))).startswith(message)


def test_sdpa_kernel_switches_kernels_off() -> None:
    assert choose_kernel("sdpa", request()).name == "cpu_flash"
    with sdpa_kernel(SDPBackend.MATH):
        assert choose_kernel("sdpa", request()).name == "math"
        assert KERNEL["cpu_flash"].why_not(request()) == "it is switched off (torch.nn.attention.sdpa_kernel)"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert choose_kernel("sdpa", request()).name == "cpu_flash"
        assert KERNEL["math"].why_not(request()) == "it is switched off (torch.nn.attention.sdpa_kernel)"
    assert choose_kernel("sdpa", request()).name == "cpu_flash"


@pytest.mark.parametrize("math_scores", [1, 1000])
def test_math_equals_the_reference_in_chunks(math_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexdilated.backends.dense.math.SCORES", math_scores)
    case = Case(PATTERN, batch=2, kv_heads=2, group=3, is_causal=True, ignored=0.4)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(run_backend(case, "auto"), run_reference(case), **EXACT)


def test_math_dropout_scales_what_it_keeps_by_its_seed() -> None:
    q, k = torch.zeros(1, 1, 31, 5), torch.zeros(1, 1, 31, 5)
    v = torch.eye(31)[None, None]
    out, lse = KERNEL["math"].forward(q, k, v, Options(False, 1.0, dropout=Dropout(0.25, 3)))
    values = out.unique()
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / 31 / 0.75]))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(31)))
    again, _ = KERNEL["math"].forward(q, k, v, Options(False, 1.0, dropout=Dropout(0.25, 3)))
    assert torch.equal(again, out)


@pytest.mark.parametrize("backend", ["flex", "flash"])
def test_a_refusal_in_compiled_code_names_the_device(backend: str) -> None:
    q = torch.randn(1, 40, 2, 16)

    def attention(q: torch.Tensor) -> torch.Tensor:
        return dilated_attention(q, q, q, DilatedPattern((8, 16), (1, 2)), backend=backend)

    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match=f"backend '{backend}' cannot run this on cpu: "):
        torch.compile(attention, fullgraph=True, dynamic=True, backend="eager")(q)


def test_an_eager_call_chooses_its_kernel_once_for_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[DispatchKey] = []
    kernel = replace(sdpa.KERNELS[0], why_not=asked.append)
    monkeypatch.setitem(KERNEL_BACKENDS, "sdpa", lambda request: (kernel,))
    x = torch.randn(1, 13, 2, 8, requires_grad=True)
    dilated_attention(x, x, x, DilatedPattern((5, 13), (1, 2))).sum().backward()
    assert len(asked) == 1


def test_an_eager_call_on_a_cpu_neither_encodes_its_pattern_nor_reads_what_tune_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((custom_op, "_encoded"), (measured, "loaded"), (measured, "_known")):
        monkeypatch.setattr(module, name, None)  # a call would raise
    x = torch.randn(1, 13, 2, 8, requires_grad=True)
    dilated_attention(x, x, x, DilatedPattern((5, 13), (1, 2))).sum().backward()
