"""`flexdilated tune` on a pretended GPU: what it keeps, what reads it, and what is never read or kept."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import flexdilated
from flexdilated import DilatedPattern, backends
from flexdilated.backends import DispatchKey, measured
from flexdilated.backends.triton import backend as triton_backend
from flexdilated.cli import diagnosis
from flexdilated.core import dispatch_key
from flexdilated.core.hardware import Hardware
from flexdilated.core.tracing import is_symbolic
from flexdilated.tuning import run as tuning_run
from flexdilated.tuning.candidates import CANDIDATES
from flexdilated.tuning.checks import ENDED
from tests.backends.interpreter import mend
from tests.cases import Case, run_backend, run_reference
from tests.commands import invoke
from tests.hardware import simulate
from tests.measured import FORMS, HOPPER, LEVEL, NAME, check, forget, ship_checks, write
from tests.tolerances import SINGLE

RIGHT = {"forward": "right", "backward": "right"}
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One H100 that is not there, and the folder of its measurements."""
    monkeypatch.setenv("FLEXDILATED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measured, "device_name", lambda capability: NAME if capability == LEVEL else None)
    monkeypatch.setattr(measured, "driver", lambda: "580.95")
    monkeypatch.setattr(triton_backend, "UNBUILT", None)
    forget()
    yield tmp_path / "cache"
    forget()


def auto(**changes: Any) -> str:
    return backends.choose("auto", DispatchKey(**{"hardware": HOPPER, "dtype": torch.bfloat16, "head_dim": 64, **changes}))


# -- reading --------------------------------------------------------------------------------------------------------------------


def test_auto_takes_what_was_measured_here_and_reads_it_once(cache: Path) -> None:
    path = write(cache)
    assert auto() == auto(differentiable=True, group=3) == auto(head_dim=40) == auto(dynamic=True) == "triton"
    path.unlink()
    assert auto() == "triton"
    others = ({"dtype": torch.float16}, {"head_dim": 72}, {"head_dim": 32}, {"dropout": True}, {"hardware": simulate("cpu")})
    assert {auto(**changes) for changes in others} == {"sdpa"}  # kernels hold rows of 32 elements in other tiles than 40
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forget()
        assert auto(hardware=simulate("sm_80")) == "sdpa"  # no such GPU is here: nothing to advise


@pytest.mark.parametrize("form", FORMS)
def test_auto_takes_no_form_that_was_wrong_once(form: str, cache: Path) -> None:
    write(cache, checks=[*map(check, FORMS), check(form, "wrong: dq", head_dim=128)])
    calls = {name: {"differentiable": "backward" in name, "group": 1 + ("," in name)} for name in FORMS}
    taken = {name for name, changes in calls.items() if auto(**changes) == "triton"}
    assert taken == {name for name in FORMS if name not in (form, form.replace("forward", "backward"))}


def test_measurements_come_before_those_of_the_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ship_checks(monkeypatch, *FORMS)
    assert auto() == "triton"
    forget()
    entry = {"dtype": "bfloat16", "head_dim": 64, "tokens": 1024, "training": False, "triton_over_sdpa": 2.0}
    write(cache, measured=[entry])
    assert (auto(), auto(differentiable=True), auto(head_dim=128)) == ("sdpa", "triton", "triton")
    forget()
    write(cache, checks=[check("forward", "wrong: out")], measured=[])
    assert (auto(), auto(differentiable=True), auto(head_dim=128), auto(group=3)) == ("sdpa", "sdpa", "sdpa", "triton")


def test_flex_that_was_wrong_for_grouped_heads_is_not_taken_for_them(cache: Path) -> None:
    entry = {"dtype": "bfloat16", "head_dim": 64, "tokens": 1024, "training": False, "flex_over_sdpa": 0.5}
    write(
        cache, measured=[entry], checks=[check("forward", "right", "flex"), check("forward, grouped heads", "wrong: out", "flex")]
    )
    assert (auto(), auto(group=3)) == ("flex", "sdpa")


VALUES = (math.inf, math.nan, -1, 10**400, 1.5, "words", None, True, [[]], {"a": [1]})
TAKEN: dict[tuple[Any, ...], tuple[Any, ...]] = {  # a place in the file: the values that fit there
    (): (),
    ("environment",): (),
    ("date",): ("words",),
    ("measured",): (),
    ("measured", 0): (),
    ("measured", 0, "dtype"): ("words",),
    ("measured", 0, "head_dim"): (),
    ("measured", 0, "tokens"): (),
    ("measured", 0, "training"): (True,),
    ("measured", 0, "triton_over_sdpa"): (None, 1.5, 10**400),
    ("forms",): (),
    ("forms", 0, "head_dim"): (),
    ("forms", 0, "constants"): (),
    ("forms", 0, "constants", 0): ("words",),
    ("checks", 0, "candidate"): ("words",),
    ("checks", 0, "found"): ("words",),
}


def call_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The messages of warnings in two calls with `backend="auto"`, on tensors without data of a pretended GPU."""
    forget()
    monkeypatch.setattr(dispatch_key, "detect", lambda device: HOPPER)
    q, k, v = torch.randn(3, 1, 8, 1, 64, dtype=torch.bfloat16, device="meta")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            flexdilated.dilated_attention(q, k, v, DilatedPattern((8,), (1,)))
    return tuple(str(warning.message) for warning in caught)


@pytest.mark.parametrize("place", TAKEN, ids=lambda place: ".".join(map(str, place)))
def test_a_value_of_the_wrong_kind_is_one_warning_in_a_call(
    place: tuple[Any, ...], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(cache, forms=[{"dtype": "bfloat16", "head_dim": 64, "constants": ["SUMS"]}])
    text = path.read_text()
    for value in VALUES:
        if value in TAKEN[place]:
            continue
        whole = {"": json.loads(text)}
        part, key = whole, ""
        for name in place:
            part, key = part[key], name
        part[key] = value
        path.write_text(json.dumps(whole[""]))
        (message,) = call_on_a_gpu(monkeypatch)
        assert message.startswith(f"{path} is ignored (ValueError: "), (value, message)


def test_a_file_that_cannot_be_read_is_one_warning_in_a_call(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, environment = write(cache), measured.environment(NAME, LEVEL)
    whole = path.read_bytes()
    damaged = {b"\xff" + whole: "UnicodeDecodeError", whole[: len(whole) // 2]: "JSONDecodeError", b"[" * 100_000: "RecursionError"}
    damaged[whole.replace(b'"head_dim": 64', b'"head_dim": Infinity', 1)] = (
        r"ValueError: file.measured[0].head_dim must be an integer"
    )
    for content, error in damaged.items():
        path.write_bytes(content)
        (message,) = call_on_a_gpu(monkeypatch)
        assert message.startswith(f"{path} is ignored ({error}")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
        patch.setattr(measured, "environment", lambda *about: environment)
        (message,) = call_on_a_gpu(patch)
    assert message.startswith(f"{path} is ignored (PermissionError: ")
    path.unlink()
    path.mkdir()
    (message,) = call_on_a_gpu(monkeypatch)
    assert message.startswith(f"{path} is ignored (IsADirectoryError: ")


@pytest.mark.parametrize("name", ["torch", "triton", "flash-attn-4", "driver", "kernels", "device"])
def test_measurements_with_another_version_are_not_read(name: str, cache: Path) -> None:
    path = write(cache, environment={name: "another"})
    with pytest.warns(
        UserWarning, match="backend='auto' takes 'sdpa' on NVIDIA H100 80GB HBM3: .*Run `flexdilated tune`"
    ) as caught:
        assert {auto(), auto(differentiable=True)} == {"sdpa"}
    assert len(caught) == 1
    assert (f"damaged or measured with other versions: {path}" in diagnosis._preference(HOPPER)) == (name != "device")


def test_a_cache_that_is_off_is_neither_read_nor_advised_nor_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(cache)
    monkeypatch.setenv("FLEXDILATED_CACHE", "off")
    assert auto() == "sdpa"
    assert "Measurements of flexdilated tune are not read: FLEXDILATED_CACHE=off, or" in diagnosis._preference(HOPPER)
    monkeypatch.setattr(tuning_run, "detect", lambda device: HOPPER)
    with pytest.raises(ValueError, match="FLEXDILATED_CACHE must be a folder for results to be kept, got 'off'"):
        flexdilated.tune("cpu")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FLEXDILATED_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/flexdilated"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/u/.cache/flexdilated"),
        ({"FLEXDILATED_CACHE": ""}, "/home/u/.cache/flexdilated"),
        ({"FLEXDILATED_CACHE": "~/c"}, "/home/u/c"),
        ({"FLEXDILATED_CACHE": "~nobody-has-this-name/c"}, "None"),
    ],
)
def test_the_folder_is_named_or_that_of_caches(variables: dict[str, str], expected: str) -> None:
    with mock.patch.dict(os.environ, {**variables, "HOME": "/home/u"}):
        for name in {"FLEXDILATED_CACHE", "XDG_CACHE_HOME"} - variables.keys():
            os.environ.pop(name, None)
        assert str(measured.folder()) == expected


@pytest.mark.filterwarnings("ignore:backend='auto' takes 'sdpa'")
@pytest.mark.parametrize("name", ["file", "file/x", "x" * 300])
def test_a_folder_that_cannot_be_read_or_made_fails_no_call_and_ends_tune_early(
    name: str, pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLEXDILATED_CACHE", str(tmp_path / name))
    assert auto() == "sdpa"
    pretend({}, FAST)
    monkeypatch.setattr(tuning_run, "examined", None)
    with pytest.raises(OSError, match=name):
        flexdilated.tune("cpu")


def test_advice_is_given_once_and_only_where_triton_could_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for changes in ({"dtype": torch.float64}, {"modified": True}, {"dropout": True}, {"hardware": simulate("cpu")}):
            auto(**changes)
        with monkeypatch.context() as patch:
            patch.setattr(triton_backend, "UNBUILT", "triton needs a C compiler")
            auto()
    with pytest.warns(UserWarning, match="an estimated 2 to 4 minutes") as caught:
        assert auto() == auto(differentiable=True) == "sdpa"
    assert len(caught) == 1


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("is_kept", [True, False])
def test_compiled_code_reads_what_is_kept_while_it_is_traced(is_kept: bool, dynamic: bool | None, cache: Path) -> None:
    """Sizes are symbols in the second graph, or in the first."""
    if is_kept:
        write(cache)

    def add(x: Tensor) -> Tensor:
        is_dynamic = torch.compiler.is_compiling() and is_symbolic(x.shape[0])
        sizes = {"num_tokens": x.shape[0], "head_dim": x.shape[2], "group": x.shape[1] // 2, "dynamic": is_dynamic}
        return x + (1 if auto(differentiable=True, **sizes) == "triton" else 2)

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(add, fullgraph=True, backend="eager", dynamic=dynamic)
        found = [compiled(torch.zeros(*size))[0, 0, 0].item() for size in ((3, 2, 64), (5, 2, 64), (7, 4, 64), (7, 4, 65))]
    assert found == ([1, 1, 1, 2] if is_kept else [2] * 4)


def test_kept_forms_of_triton_run_for_their_dtype_and_head_dim_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("flexdilated.backends.triton.launch")
    mend(monkeypatch)
    write(cache, forms=[{"dtype": "float32", "head_dim": 16, "constants": ["HOSTS", "SUMS"]}])
    monkeypatch.setattr(measured, "detect", lambda device: HOPPER)
    launched: list[tuple[str, bool]] = []
    plain = launch._launch

    def watch(kernel: Any, programs: int, arguments: Any, constants: dict[str, Any], *more: Any) -> None:
        launched.append((kernel.__name__, bool(constants.get("HOST"))))
        plain(kernel, programs, arguments, constants, *more)

    monkeypatch.setattr(launch, "_launch", watch)
    monkeypatch.setattr(launch, "PLANS", {})
    for head_dim in (16, 20):
        launched.clear()
        case = Case(DilatedPattern((11,), (1,)), num_tokens=11, kv_heads=1, head_dim=head_dim)
        torch.testing.assert_close(
            [x.double() for x in run_backend(case, "triton", torch.float32)], run_reference(case, torch.float32), **SINGLE
        )
        assert (("attend", True) in launched) == ("differentiate_queries" not in dict(launched)) == (head_dim == 16)


# -- measuring ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device on which checks and times are what a test says: verdicts by candidate and form, milliseconds by candidate."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAME)
    monkeypatch.setattr(tuning_run, "detect", lambda device: HOPPER)

    def to(verdicts: dict[tuple[str, str], str], times: dict[str, float], interrupt: int | None = None) -> None:
        timed: list[str] = []

        def examined(jobs: Any, *more: Any) -> list[dict[str, str]]:
            return [{way: verdicts.get((job.candidate, job.form(way)), "right") for way in RIGHT} for job in jobs]

        def in_turns(calls: dict[str, Any], device: Any, rounds: int) -> dict[str, float]:
            timed.append("")
            if len(timed) == interrupt:
                raise KeyboardInterrupt
            return {name: times.get(name, 1.0) for name in calls}

        def calls(able: Any, *more: Any, **options: Any) -> Any:
            return dict.fromkeys(("sdpa", *(c.name for c in able), "dense")).items()

        monkeypatch.setattr(tuning_run, "examined", examined)
        monkeypatch.setattr(tuning_run, "in_turns", in_turns)
        monkeypatch.setattr(tuning_run, "_calls", calls)
        monkeypatch.setattr(tuning_run, "inputs", lambda *sizes: None)

    return to


LONG, AHEAD, HOSTS, SUMS = (c.name for c in CANDIDATES if c.is_form)
FAST = {"triton": 0.8, LONG: 0.1, HOSTS: 0.5, SUMS: 0.6}


@pytest.mark.parametrize(
    ("verdicts", "constants", "taken"),
    [
        ({}, {"LONG", "SUMS"}, "triton"),
        ({(LONG, "forward"): "wrong: out"}, {"HOSTS", "SUMS"}, "triton"),
        ({(LONG, "forward, grouped heads"): "failed: OutOfResources"}, {"HOSTS", "SUMS"}, "triton"),
        ({(LONG, "forward"): "wrong: out", (HOSTS, "forward"): "wrong: lse", (SUMS, "backward"): "wrong: dq"}, set(), "triton"),
        ({("triton", "forward"): "wrong: out"}, set(), "sdpa"),
        ({("triton", "backward"): "wrong: dk"}, {"LONG"}, "triton"),
    ],
)
def test_the_fastest_right_form_is_kept(
    verdicts: dict[tuple[str, str], str], constants: set[str], taken: str, pretend: Any, cache: Path
) -> None:
    pretend(verdicts, FAST)
    found = flexdilated.tune("cpu", head_dims=[64], processes=0)
    assert [path.parent for path in cache.iterdir()] == [cache] == [found.path.parent]
    loaded = measured.loaded(LEVEL)
    assert loaded.constants == {("bfloat16", 64): constants}
    assert (auto(), auto(dtype=torch.float16)) == (taken, "sdpa")


def test_forms_must_gain_and_backends_must_too(pretend: Any) -> None:
    pretend({}, {"triton": 0.97, LONG: 0.96, HOSTS: 0.97, SUMS: 0.97})
    flexdilated.tune("cpu", head_dims=[64], processes=0)
    assert (auto(), measured.loaded(LEVEL).constants) == ("sdpa", {("bfloat16", 64): frozenset()})


@pytest.mark.slow
def test_an_interrupt_keeps_what_is_done_and_later_runs_add_to_it(pretend: Any, cache: Path) -> None:
    lengths = len(tuning_run.LENGTHS)
    pretend({}, FAST, interrupt=2 * lengths + 2)  # the first head dim is done
    code, text, _ = invoke("tune", "--json")
    report = json.loads(text)
    assert (code, report["is_complete"]) == (130, False)
    kinds = lambda: [(m["dtype"], m["head_dim"], m["training"]) for m in json.loads(Path(report["path"]).read_text())["measured"]]  # noqa: E731
    first = [("bfloat16", 64, training) for training in (False, True) for _ in range(lengths)]
    assert kinds() == first
    pretend({}, FAST)
    code, text, _ = invoke("tune", "--dtype", "float16", "--head-dim", "128")
    assert (code, "kept in " in text, "triton, longer tiles" in text) == (0, True, True)
    assert kinds() == first + [("float16", 128, training) for training in (False, True) for _ in range(lengths)]
    pretend({}, FAST, interrupt=1)
    forget()
    assert not flexdilated.tune("cpu", head_dims=[256], processes=0).is_complete
    assert (auto(), auto(dtype=torch.float16, head_dim=128), len(list(cache.iterdir()))) == ("triton", "triton", 1)


@pytest.mark.slow
def test_doctor_says_where_auto_was_measured(pretend: Any) -> None:
    pretend({}, FAST)
    path = flexdilated.tune("cpu", head_dims=[64], processes=0).path
    text = diagnosis._preferences(HOPPER)["cuda sm_90"]
    date = json.loads(path.read_text())["date"]
    measured = (
        "cuda sm_90: auto takes at head dim 64: sdpa in float32, float16, float64; triton in bfloat16, by flexdilated tune on "
    )
    assert text == f"{measured}{date} ({path}); {LONG} in bfloat16, head dim 64; {SUMS} in bfloat16, head dim 64"
    write(path.parent, checks=[check("backward", "wrong: dq")])
    forget()
    assert diagnosis._preference(HOPPER).endswith(
        f"({path}). It leaves out what did not pass all checks: triton, backward, bfloat16"
    )
    forget()
    path.unlink()
    with pytest.warns(UserWarning, match="Run `flexdilated tune`"):
        text = diagnosis._preference(HOPPER)
    assert "by measurements shipped with flexdilated (NVIDIA H200" in text
    assert text.endswith("run flexdilated tune (an estimated 2 to 4 minutes)")


def test_processes_that_end_are_an_error(pretend: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend({}, FAST)
    monkeypatch.setattr(tuning_run, "examined", lambda jobs, *more: [dict.fromkeys(RIGHT, ENDED)] * len(jobs))
    with pytest.raises(RuntimeError, match="no check ran: its processes ended; call tune"):
        flexdilated.tune("cpu")
    assert not list(cache.iterdir())


def test_another_process_may_add_to_the_file_and_lengths_out_of_memory_are_left_out(
    pretend: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend({}, FAST)

    def inputs(tokens: int, *more: Any) -> None:
        write(cache)  # of bfloat16
        if tokens > 8192:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(tuning_run, "inputs", inputs)
    found = flexdilated.tune("cpu", dtypes=[torch.float16], head_dims=[64])
    assert {m["tokens"] for m in found.content["measured"] if m["dtype"] == "float16"} == {1024, 8192}
    assert {auto(), auto(dtype=torch.float16)} == {"triton"}


def test_the_command_says_in_one_sentence_that_there_is_nothing_to_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("tune", "--device", "cpu") == (0, "nothing to tune on cpu: backend='auto' takes 'sdpa' there\n", "")
    assert json.loads(invoke("tune", "--device", "cpu", "--json")[1])["reason"].startswith("nothing to tune on cpu")
    monkeypatch.setattr(tuning_run, "detect", lambda device: Hardware("cuda", (7, 5)))
    code, text, _ = invoke("tune", "--device", "cpu")
    assert (code, text.count("\n")) == (0, 1)
    assert "on cuda sm_75: backend='auto' takes 'sdpa' there (triton: the Triton kernels need sm_80 or newer" in text
