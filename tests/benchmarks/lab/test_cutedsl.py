"""flash-attn-4 compiled for a GPU that is not here: one compilation for all views of a form, no spills; and what is a fault."""

import os
from collections import Counter
from importlib.util import find_spec

import pytest

pytest.importorskip("triton")

from benchmarks.lab import cutedsl
from benchmarks.lab.cutedsl import Cost, Form, calls, faults
from flexdilated.backends.dense import flash

pytestmark = pytest.mark.lab

PLAIN = Cost(90, 64, "bf16", "plain", "forward", 128, 0)


@pytest.mark.slow
@pytest.mark.skipif(flash.INSTALLED_4 is None or find_spec("cutlass") is None, reason="needs flash-attn-4")
def test_views_of_all_pieces_share_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    found = cutedsl.costs(90, [64], forms=["causal, group of 3"])
    assert not list(faults(found))
    assert Counter(cost.kernel for cost in found) == {"forward": 1, "preprocess": 2, "backward": 1, "postprocess": 1}


@pytest.mark.parametrize(("form", "count"), [(Form(), 13), (Form(group=3), 16)])
def test_calls_are_views_of_the_whole_and_of_every_piece(form: Form, count: int) -> None:
    (whole, _), *views = calls(form, 8)
    assert len(views) + 1 == count
    assert all(q.shape[1] == k.shape[1] * form.group and q.stride(-1) == k.stride(-1) == 1 for q, k in views)
    read = sum(q.numel() for q, _ in views)
    assert read / whole.numel() == pytest.approx(1 + 1 / 2 + 1 / 4 + 1 / 6 + 1 / 12, rel=1e-4)


def test_faults_are_named() -> None:
    found = [PLAIN, *[PLAIN._replace(kernel="postprocess")] * 2, PLAIN._replace(level=100, spills=4)]
    assert list(faults(found)) == []
    assert list(faults([*found, PLAIN, PLAIN._replace(kernel="backward", spills=3)])) == [
        "backward (sm_90, D = 64, bf16, plain) spills 3 stores, more than 0",
        "forward (sm_90, D = 64, bf16, plain) is compiled 2 times",
    ]
