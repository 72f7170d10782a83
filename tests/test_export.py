"""Models exported, saved, loaded by another process and compiled ahead of time: the numbers of eager, for every length."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from flexdilated import DilatedAttention, DilatedPattern, MultiheadDilatedAttention, dilated_attention
from flexdilated.core import dispatch_key
from flexdilated.export import portable
from tests.exported import (
    MASKED,
    PATTERN,
    WIDTH,
    Attention,
    Masked,
    SelfAttention,
    assert_serves_every_shape,
    build,
    draw,
    export,
    language_model,
    masked_inputs,
)
from tests.hardware import simulate
from tests.tolerances import SINGLE

# torch's own, in run_decompositions.
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")


class Unprojected(nn.Module):
    """Attention of a tensor with itself, heads of 64."""

    def forward(self, q: Tensor) -> Tensor:
        return dilated_attention(q, q, q, PATTERN, is_causal=True)


def test_one_program_holds_where_the_fastest_backend_changes_with_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does in float32 on sm_90: the choice must not look at a number that is a symbol."""
    monkeypatch.setattr(dispatch_key, "detect", lambda device: simulate("sm_90"))
    shapes = ({1: Dim("length", min=2, max=65536)},)
    program = torch.export.export(Unprojected(), (torch.randn(1, 256, 2, 64),), dynamic_shapes=shapes, strict=True)
    assert [(r.lower, r.upper) for r in program.range_constraints.values()] == [(2, 65536)]


def python(code: str, folder: Path) -> str:
    """What another process prints."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused_before_import(code: str) -> str:
    """A program that prints why `code` is refused until this library is imported."""
    attempt = f"try:\n    {code}\nexcept RuntimeError as error:\n    print(error)\nelse:\n    sys.exit('it ran')"
    return f"import sys, torch\n{attempt}\nimport flexdilated.export\n{code}"


def operators(program: ExportedProgram) -> set[str]:
    return {str(node.target).split(".")[1] for node in program.graph.nodes if str(node.target).startswith("flexdilated.")}


@pytest.mark.slow
def test_one_import_registers_the_operators_of_one_process() -> None:
    schemas = "{each.name for each in torch._C._jit_get_all_schemas() if each.name.startswith('flexdilated::')}"
    load = "import flexdilated.export, torch\nfound = {}\nfrom flexdilated import *\nprint(len(found), sorted({} - found))"
    assert python(load.format(schemas, schemas), Path.cwd()) == "18 []\n"


def test_no_operator_takes_a_dtype() -> None:
    """Packages that AOTInductor of torch 2.9 makes hand another dtype on than they were given, and read memory by the wrong one."""
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("flexdilated::")]
    assert len(schemas) > 8
    assert [str(schema) for schema in schemas if "ScalarType" in str(schema)] == []


def test_a_program_holds_the_operator_and_serves_every_shape() -> None:
    model = build("layer")
    program = export("layer", model)
    assert "mixture" in operators(program)
    assert_serves_every_shape(program.module(), "layer", model)


@pytest.mark.slow
def test_another_process_loads_a_program_after_importing_this_library(tmp_path: Path) -> None:
    model, x = build("model"), draw("model", 3, 29)
    torch.export.save(export("model", model), tmp_path / "model.pt2")
    torch.save(x, tmp_path / "x.pt")
    serve = "torch.save(torch.export.load('model.pt2').module()(torch.load('x.pt')), 'y.pt')"
    refused = python(refused_before_import(serve), tmp_path)
    assert "error when deserializing the saved file" in refused
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "y.pt"), model(x), **SINGLE)


@pytest.mark.slow
def test_a_portable_program_holds_no_operator_of_ours_and_serves_every_shape() -> None:
    model = build("model")
    program = portable(export("model", model, strict=True))
    assert not operators(program)
    assert {node.target.namespace for node in program.graph.nodes if hasattr(node.target, "namespace")} == {"aten"}
    assert_serves_every_shape(program.module(), "model", model)


@pytest.mark.slow
def test_a_segment_longer_than_any_sequence_is_not_padded_and_a_padding_mask_is_an_input() -> None:
    """A segment longer than `max` is one segment, of as many tokens as there are; also where torchscale's positions would shift."""
    program = portable(torch.export.export(Masked(), masked_inputs(43), dynamic_shapes=MASKED))
    assert "64" not in re.findall(r"\b\d+\b", program.graph_module.code)
    for num_tokens in (1, 2, 8, 29, 61):
        torch.testing.assert_close(program.module()(*masked_inputs(num_tokens)), Masked()(*masked_inputs(num_tokens)), **SINGLE)


@pytest.mark.slow
def test_a_sequence_may_end_before_a_segment_or_behind() -> None:
    model = Attention(DilatedPattern.torchscale((8, 40), (2, 4))).eval()
    program = portable(torch.export.export(model, (draw("layer"),), dynamic_shapes=({1: Dim("length")},)))
    for num_tokens in (1, 2, 8, 29, 40, 43, 80, 101):
        x = draw("layer", 2, num_tokens)
        torch.testing.assert_close(program.module()(x), model(x), **SINGLE)


@pytest.mark.slow
@torch.no_grad()  # without activation checkpoints: the graph is half as large
def test_shifted_positions_and_users_functions_are_portable_for_a_static_length() -> None:
    functions = {"score_mod": lambda score, b, h, q_idx, kv_idx: score - 0.1 * (q_idx - kv_idx).abs()}
    for model, x in (
        (Attention(DilatedPattern.torchscale((11,), (4,))), draw("layer", 1)),
        (Attention(DilatedPattern((8,), (2,)), **functions), draw("layer", 2, 7)),
    ):
        program = portable(torch.export.export(model.eval(), (x,)))
        torch.testing.assert_close(program.module()(x), model(x), **SINGLE)


class FloatMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiheadDilatedAttention(WIDTH, 4, PATTERN)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=torch.zeros_like(x[..., 0]))[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (FloatMask(), r"key_padding_mask must be bool in a portable program, got torch.float32.*mask < 0"),
        (Attention(dropout_p=0.5), "dropout_p must be 0"),
        (Attention(cu_seqlens=torch.tensor([0, 5, 43])), "cu_seqlens must be None"),
        (Attention(backend="flex"), r"program must hold operators that have a portable form, got flex_attention.*sdpa"),
    ],
    ids=["float mask", "dropout", "documents", "flex"],
)
def test_what_has_no_portable_form_is_refused(model: nn.Module, message: str) -> None:
    with torch.set_grad_enabled(getattr(model, "options", {}).get("backend") != "flex"):
        program = torch.export.export(model.eval(), (draw("layer", 1),))
    with pytest.raises(NotImplementedError, match=message):
        portable(program)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.*is deprecated:DeprecationWarning")
def test_a_trace_serves_every_shape() -> None:
    model = build("function")
    assert_serves_every_shape(torch.jit.trace(model, (draw("function"),)), "function", model)


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("model", [DilatedAttention(PATTERN), SelfAttention(), language_model()], ids=lambda m: type(m).__name__)
def test_script_is_refused(model: nn.Module) -> None:
    with pytest.raises(
        NotImplementedError, match=r"torch\.jit\.script must be given a model without dilated.*torch\.export\.export"
    ):
        torch.jit.script(model)
