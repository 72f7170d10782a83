"""The flex backend's GPU kernels without a GPU: the cases of flex_cases.py through what inductor prints, in the interpreter.

`nox -s emulated` runs them, with a torch that was built for CUDA.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

import flexdilated.backends.flex.backend
from flexdilated.backends.flex import kernel
from flexdilated.core import dispatch_key
from flexdilated.masks import block_mask
from tests.backends import flex_cases
from tests.backends.flex_cases import CALLS, CASES, run, run_definition
from tests.backends.printed_kernels import Printer, backend, printing
from tests.hardware import simulate
from tests.tolerances import SINGLE

pytestmark = [
    pytest.mark.skipif(os.environ.get("FLEXDILATED_EMULATED") != "1", reason="is for nox -s emulated"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # inductor's, about a device that is not there
]

LEVEL = 90

# As large as those of 16-bit elements: of float32 the backward's are 16 x 16, and an interpreter takes its time by tiles.
TILES = {f"{way}_BLOCK_{name}": 64 for way, names in (("fwd", ("M", "N")), ("bwd", ("M1", "N1", "M2", "N2"))) for name in names}


@pytest.fixture
def printer(tmp_path: Path) -> Iterator[Printer]:
    with printing(LEVEL, tmp_path) as printer:
        yield printer


def narrow(flat: Tensor, heads: int, rows: int, width: int, columns: int) -> Tensor:
    """Lists of blocks as a GPU gets them, no wider than they must be."""
    return flat[: heads * rows * width].view(heads, rows, width)


def call_by(printer: Printer, given: list[bool]) -> Callable[..., Any]:
    """`kernel.call` on a GPU, with CPU tensors; notes whether the keys came contiguous."""

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        score_mod: Any,
        block_mask: BlockMask,
        scale: float,
        want_lse: bool,
        kind: object,
        dynamic: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        torch._dynamo.reset()
        q, k, v = (kernel._readable(x) for x in (q, k, v))
        if not kernel.TRUST_STRIDED_GRADIENTS:
            k, v = k.contiguous(), v.contiguous()
        given.append(k.is_contiguous())
        attend = torch.compile(lambda *x, **y: flex_attention(*x, **y), fullgraph=True, backend=backend(printer), dynamic=dynamic)
        out, aux = attend(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options={**TILES, **kernel.options_of(q, scored=score_mod is not None)},
            return_aux=AuxRequest(lse=True),
        )
        return out, aux.lse if want_lse else None

    return call


@pytest.fixture
def contiguous_keys(printer: Printer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """The flex backend as on a GPU; says of each call whether its keys were contiguous."""
    given: list[bool] = []
    monkeypatch.setattr(flex_cases, "DEVICE", "cpu")
    monkeypatch.setattr(flexdilated.backends.flex.backend, "_on_cpu", lambda q: False)
    monkeypatch.setattr(kernel, "call", call_by(printer, given))
    monkeypatch.setattr(dispatch_key, "detect", lambda device: simulate(f"sm_{LEVEL}"))
    monkeypatch.setattr(block_mask, "_full_width", narrow)
    block_mask._find_lists.cache_clear()
    yield given
    block_mask._find_lists.cache_clear()


@pytest.mark.parametrize(("name", "layout"), CALLS)
def test_printed_kernels_equal_the_reference(
    name: str, layout: str, printer: Printer, contiguous_keys: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    flex_cases.force(monkeypatch, layout)
    actual, expected = (f(*CASES[name], torch.float32) for f in (run, run_definition))
    torch.testing.assert_close([a.double() for a in actual], expected, **SINGLE)
    kernels = [name for name in printer.launches.names if name.startswith("triton_tem")]
    assert len(kernels) == 2 * len(contiguous_keys) > 0


def test_gradients_of_strided_keys(contiguous_keys: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `TRUST_STRIDED_GRADIENTS` says: the backward was given strided keys, and is right."""
    flex_cases.force(monkeypatch, "packed")
    monkeypatch.setattr(kernel, "TRUST_STRIDED_GRADIENTS", True)
    actual, expected = (f(*CASES["short"], torch.float32) for f in (run, run_definition))
    assert not any(contiguous_keys[:3])
    torch.testing.assert_close([a.double() for a in actual], expected, **SINGLE)
