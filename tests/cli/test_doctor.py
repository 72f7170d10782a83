"""The doctor: what it says of this machine, and that it notices wrong numbers."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from flexdilated.backends import BACKENDS
from flexdilated.backends.dense import flash
from flexdilated.backends.dense.sdpa import KERNELS
from flexdilated.backends.triton import backend as triton_backend
from flexdilated.cli import diagnosis, selfcheck
from flexdilated.cli.selfcheck import DTYPES, BackendKernel
from flexdilated.core.hardware import detect
from flexdilated.tuning.checks import QUANTITIES
from tests.commands import invoke
from tests.hardware import simulate
from tests.measured import ship_checks


def run(*arguments: str) -> tuple[int, str, str]:
    return invoke("doctor", *arguments)


@pytest.fixture(scope="module", autouse=True)
def no_interpreter() -> Iterator[None]:
    """As on a user's machine: checking what triton interprets takes minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "INTERPRETED", False)
        yield


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    cases = [dataclasses.replace(case, num_tokens=min(case.num_tokens, 97)) for case in selfcheck._cases()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selfcheck, "_cases", lambda: cases)
        code, text, _ = run("--device", "cpu", "--json")
    assert code == 0
    return json.loads(text)


@pytest.fixture
def no_long_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [case for case in selfcheck._cases() if case.num_tokens < 100]
    monkeypatch.setattr(selfcheck, "_cases", lambda: short)


def test_doctor_lists_every_backend_in_every_dtype(report: dict[str, Any]) -> None:
    listed = {(row["backend"], row["kernel"], row["dtype"]) for row in report["backends"]}
    kernels = [("sdpa", kernel.name) for kernel in KERNELS] + [(name, None) for name in BACKENDS if name != "sdpa"]
    assert listed == {(*kernel, dtype) for kernel in kernels for dtype in DTYPES}
    flash = next(row for row in report["backends"] if row["kernel"] == "cpu_flash")
    functions = "it has no score_mod or mask_mod"
    assert flash["why_not"] == {"plain": None, "masked": None, "dropout": "it has no dropout", "functions": functions}


def test_doctor_passes_every_check_on_cpu(report: dict[str, Any]) -> None:
    assert report["passed"] is True
    assert (report["machine"]["torch"], report["machine"]["device"]) == (torch.__version__, "cpu")
    assert torch.get_num_threads() == report["machine"]["threads"]  # as before
    ran = {(row["kernel"], row["dtype"]) for row in report["checks"]}
    for kernel in ("cpu_flash", "math"):
        assert {(kernel, dtype) for dtype in ("float64", "float32", "bfloat16", "float16")} <= ran
    for row in report["checks"]:
        assert row["passed"] is True
        assert set(row["worst"]) == set(QUANTITIES)
        assert all(0.0 <= error <= row["tolerance"] for error in row["worst"].values())


def test_doctor_checks_every_kind_of_call(report: dict[str, Any]) -> None:
    names = [case["case"] for case in report["checks"][0]["cases"]]
    assert len(set(names)) == len(names) == 11
    for kind in ("plain", "grouped-query", "grouped by branch", "key padding", "documents", "torchscale", "long"):
        assert any(kind in name for name in names)
    cases = selfcheck._cases()
    for some in (cases, cases[: selfcheck.COMPILED["triton"]]):
        assert {case.is_causal for case in some} == {True, False}
        assert {case.pattern.offsets for case in some} == {"blocked", "interleaved"}
        assert some[0].num_tokens > 1000


@pytest.mark.usefixtures("no_long_cases")
def test_doctor_prints_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "DTYPES", {"float64": torch.float64})
    code, text, _ = run("--device", "cpu")
    assert code == 0
    assert text.startswith("cpu: auto takes sdpa")
    assert torch.__version__ in text
    assert "it runs on CUDA only" in text
    assert "sdpa cpu_flash float64" in text
    assert text.rstrip().endswith("checks pass")
    assert max(map(len, text.splitlines())) <= 80


def test_doctor_says_what_auto_goes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "UNBUILT", None)  # whatever this machine lacks
    measured, hopper, unmeasured = (diagnosis._preference(simulate(name)) for name in ("cpu", "sm_90", "sm_80"))
    where = "by measurements shipped with flexdilated ({})"
    cpu = where.format("cpu-avx512-amx-2threads, torch 2.13.0+cpu, 2026-11-20")
    assert measured == f"auto takes sdpa in float32, bfloat16, float16, float64, {cpu}"
    gpu = where.format("NVIDIA H200, torch 2.11.0+cu130, 2026-11-26")
    left_out = ". It leaves triton out: the code of its {} has changed"
    assert hopper.startswith(f"auto takes sdpa in float32, bfloat16, float16, float64, {gpu}{left_out.format('forward')}")
    unknown = "auto takes sdpa, then flex: nothing has been measured on this class of device"
    assert unmeasured.startswith(unknown + left_out.format("forward"))
    ship_checks(monkeypatch, "forward", "backward")
    chosen = "triton, from 2,896 tokens sdpa in float32; triton in bfloat16, float16; sdpa in float64"
    ran = diagnosis._preference(simulate("sm_90"))
    assert ran.startswith(f"auto takes {chosen}, {gpu}{left_out.format('forward, grouped heads')}")
    assert diagnosis._preference(simulate("sm_70")).startswith(f"{unknown}. Measurements of flexdilated tune are not read: ")


def test_doctor_says_what_fails_with_the_installed_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "candidates", list)
    monkeypatch.setattr(flash, "INSTALLED_4", None)
    _, text, _ = run("--device", "cpu", "--json")
    assert json.loads(text)["faults"] == []
    monkeypatch.setattr(flash, "INSTALLED_4", (4, 0, 0, 19))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.1"))
    fault = "activate_flash_attention_impl('FA4') raises ValueError in every call with torch 2.13.1 and flash-attn-4 4.0.0b19"
    _, text, _ = run("--device", "cpu", "--json")
    assert json.loads(text)["faults"] == [f"torch.nn.attention.{fault}; use backend='flash'"]


@pytest.mark.usefixtures("no_long_cases")
def test_backends_that_compile_take_some_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "DTYPES", {"float32": torch.float32})
    monkeypatch.setattr(selfcheck, "candidates", lambda: [BackendKernel("sdpa", "cpu_flash"), BackendKernel("sdpa", "math")])
    hardware, told = detect("cpu"), []

    def numbers(**options: Any) -> list[tuple[int, int]]:
        reports = selfcheck.self_check(torch.device("cpu"), hardware, **options)
        assert selfcheck.all_passed(reports)
        return [(len(report.checks), report.accepted) for report in reports]

    (flash, accepted), (_, cases) = numbers()
    assert flash == accepted > 4
    monkeypatch.setattr(selfcheck, "COMPILED", {"sdpa": 3})
    assert numbers(report_progress=told.append) == [(3, accepted), (3, cases)]
    assert told[2:4] == ["sdpa cpu_flash in float32: 3 of 3", "sdpa math in float32: 1 of 3"]


@pytest.mark.gpu
def test_doctor_passes_its_checks_on_cuda() -> None:
    code, text, _ = run("--device", "cuda", "--json")
    assert code == 0, text
    assert {"efficient", "math"} <= {row["kernel"] for row in json.loads(text)["checks"]}


def plant(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    attend = selfcheck.dilated_attention
    monkeypatch.setattr(selfcheck, "DTYPES", {"float32": torch.float32})
    monkeypatch.setattr(selfcheck, "dilated_attention", lambda *args, **kwargs: change(attend, *args, **kwargs))


def constant_keys(attend: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return attend(q, k.detach() + 0.0 * k, v, *args, **kwargs)


def changed(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    return lambda attend, *args, **kwargs: change(*attend(*args, **kwargs))


scaled_output = changed(lambda out, lse: (out * 1.001, lse))
empty_rows_of_zero = changed(lambda out, lse: (out, lse.masked_fill(lse == -math.inf, 0.0)))
nan = changed(lambda out, lse: (out * math.nan, lse))


@pytest.mark.usefixtures("no_long_cases")
@pytest.mark.parametrize(
    ("change", "quantity"), [(scaled_output, "out"), (empty_rows_of_zero, "lse"), (constant_keys, "dk"), (nan, "out")]
)
def test_doctor_fails_on_a_wrong_result(monkeypatch: pytest.MonkeyPatch, change: Any, quantity: str) -> None:
    plant(monkeypatch, change)
    code, text, _ = run("--device", "cpu", "--json")
    assert code == 1
    report = json.loads(text)
    assert report["passed"] is False
    assert {row["kernel"] for row in report["checks"] if not row["passed"]} == {"cpu_flash", "math"}
    for row in report["checks"]:
        worst = row["worst"][quantity]
        assert worst is None or worst > row["tolerance"]
    if change is scaled_output:
        _, text, _ = run("--device", "cpu")
        assert "FAIL sdpa math float32, packed documents, causal: out 1.0e-03" in text
        assert "0 of 18 checks pass, 18 FAIL" in text


@pytest.mark.usefixtures("no_long_cases")
def test_doctor_reports_a_kernel_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(attend: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel image is available\nfor this device")

    plant(monkeypatch, fail)
    code, text, _ = run("--device", "cpu")
    assert code == 1
    assert "plain: RuntimeError: no kernel image is available\n" in text


def test_reasons_are_told_once_with_what_they_hold_for() -> None:
    flash = BackendKernel("sdpa", "flash")
    assert diagnosis._why(diagnosis._reasons(flash, simulate("cpu"))) == "it runs on CUDA only"
    assert diagnosis._why(diagnosis._reasons(flash, simulate("sm_80"))).splitlines() == [
        "float32: it has no float32 kernel there",
        "bfloat16, float16 masked: it has no key padding mask",
        "bfloat16, float16 dropout: attention dropout runs on the math kernel only",
        "bfloat16, float16 functions: it has no score_mod or mask_mod",
        "float64: it has no float64 kernel there",
    ]
