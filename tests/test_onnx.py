"""Models in onnxruntime: the numbers of eager, for every length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from flexdilated.export import portable
from tests.exported import MASKED, MODELS, Attention, Masked, assert_serves_every_shape, build, draw, export, masked_inputs
from tests.tolerances import SINGLE

onnx = pytest.importorskip("onnx", reason="needs onnx: nox -s tests_export")
pytest.importorskip("onnxscript", reason="needs onnxscript: nox -s tests_export")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: nox -s tests_export")

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::torch.jit.TracerWarning"
)


def serve(program: Any, folder: Path) -> Callable[..., Tensor]:
    """An ONNX program as a function of tensors."""
    program.save(folder / "model.onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    names = [x.name for x in session.get_inputs()]
    return lambda *xs: torch.from_numpy(session.run(None, {name: x.numpy() for name, x in zip(names, xs)})[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_onnx_serves_every_shape(name: str, tmp_path: Path) -> None:
    model, shapes = build(name), ({0: Dim("batch"), 1: Dim("length")},)
    program = torch.onnx.export(model, (draw(name),), dynamic_shapes=shapes, dynamo=True, verbose=False)
    assert_serves_every_shape(serve(program, tmp_path), name, model)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_a_portable_program_becomes_onnx(strict: bool, tmp_path: Path) -> None:
    model = build("model")
    program = torch.onnx.export(portable(export("model", model, strict=strict)), (), dynamo=True, verbose=False)
    assert_serves_every_shape(serve(program, tmp_path), "model", model)


@pytest.mark.slow
def test_a_program_that_is_not_portable_names_the_operator() -> None:
    with pytest.raises(Exception, match=r"No ONNX function found for .*flexdilated\.mixture"):
        torch.onnx.export(export("function", build("function")), (), dynamo=True, verbose=False)


@pytest.mark.slow
def test_zero_keys_and_a_padding_mask_up_to_the_longest_segment(tmp_path: Path) -> None:
    program = torch.onnx.export(Masked(), masked_inputs(43), dynamic_shapes=MASKED, dynamo=True, verbose=False)
    served = serve(program, tmp_path)
    for num_tokens in (1, 8, 29, 61):
        torch.testing.assert_close(served(*masked_inputs(num_tokens)), Masked()(*masked_inputs(num_tokens)), **SINGLE)


@pytest.mark.slow
@torch.no_grad()
def test_a_backend_of_this_library_gives_way_to_the_portable_form(tmp_path: Path) -> None:
    model = Attention(backend="flex").eval()
    expected = Attention().eval()
    expected.load_state_dict(model.state_dict())
    program = torch.onnx.export(model, (draw("layer"),), dynamo=True, verbose=False)
    torch.testing.assert_close(serve(program, tmp_path)(draw("layer")), expected(draw("layer")), **SINGLE)


def test_the_exporter_over_torchscript_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.onnx\.export must be called with dynamo=True for dilated.*dynamo=False"):
        torch.onnx.export(build("layer"), (draw("layer"),), tmp_path / "model.onnx", dynamo=False)
