"""Pieces of any boxes and bands by the Triton kernels, run by triton's interpreter, in every form."""

from __future__ import annotations

import pytest
import torch

from tests.backends.interpreter import watch
from tests.backends.test_pieces import assert_as_the_oracle, by
from tests.backends.test_triton import groups, interpreted, launch, no_plans  # noqa: F401
from tests.tolerances import SINGLE

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")  # of pairs that do not see each other
TileConfig = launch.TileConfig
# Each with the queries and keys of its tiles, and the constant that marks it.
FORMS = {"": ((16, 16), "WINDOWED"), "LEAST": ((16, 16), "TABLED"), "described": ((16, 32), "DESCRIBED")}
FORMS |= {"HOSTS": ((16, 16), "HOST"), "AHEAD": ((16, 16), "AHEAD"), "SUMS": ((32, 16), "SUMS")}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_form_computes_any_piece(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (queries, keys), mark = FORMS[form]
    seeds = (201, 203) if form == "" else (203, 209)  # descriptors do not take the masks of 201
    described = form == "described"
    monkeypatch.setattr(launch, "tiles_of", lambda *arguments, **options: TileConfig(queries, keys, 4, 2, described))
    monkeypatch.setattr(launch, "unmeasured_tiles", lambda kernel, *_: TileConfig(queries, keys, 4, 2, True, kernel == "attend"))
    monkeypatch.setattr(launch, "ahead_tiles", lambda *_: TileConfig(queries, keys, 4, 2))
    monkeypatch.setattr(groups, "LEAST", 1 if form == "LEAST" else 8)
    if form in ("HOSTS", "AHEAD", "SUMS"):
        monkeypatch.setattr(launch, form, True)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)  # as poisoned memory asks for
    groups._groups.cache_clear()
    launched = watch(monkeypatch)
    assert_as_the_oracle(by("triton"), seeds, monkeypatch, **SINGLE)
    groups._groups.cache_clear()
    assert any(constants.get(mark) for _, constants in launched)
