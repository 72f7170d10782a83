"""Files of `flexdilated tune` on a pretended H100."""

from pathlib import Path
from typing import Any

import pytest

from flexdilated import backends
from flexdilated.tuning import run as tuning_run
from tests.hardware import simulate

NAME, LEVEL, HOPPER = "NVIDIA H100 80GB HBM3", (9, 0), simulate("sm_90")
FORMS = tuple(f"{way}{heads}" for heads in ("", ", grouped heads") for way in ("forward", "backward"))


def forget() -> None:
    """As a process that has read nothing."""
    backends.measured.loaded.cache_clear()
    backends.measured._advise.cache_clear()


def ship_checks(monkeypatch: pytest.MonkeyPatch, *forms: str) -> None:
    """As if triton had run on an sm_90 in these forms since its code changed."""
    right = {("triton", form, dtype): True for form in forms for dtype in ("bfloat16", "float16", "float32")}
    shipped = backends.measured.SHIPPED
    monkeypatch.setitem(shipped, "sm_90", shipped["sm_90"]._replace(checked=right))


def check(
    form: str, found: str = "right", candidate: str = "triton", dtype: str = "bfloat16", head_dim: int = 64
) -> dict[str, Any]:
    return {"candidate": candidate, "form": form, "case": "", "dtype": dtype, "head_dim": head_dim, "found": found}


def write(folder: Path, **changes: Any) -> Path:
    """Keep measurements of bfloat16 at head dim 64, in which triton takes half of the time of sdpa."""
    found = backends.measured.environment(NAME, LEVEL) | changes.pop("environment", {})
    about = {"dtype": "bfloat16", "head_dim": 64, "tokens": 1024, "triton_over_sdpa": 0.5}
    measured = [{**about, "training": training} for training in (False, True)]
    kept = {"environment": found, "date": "2026-11-28", "measured": measured, "forms": [], "checks": list(map(check, FORMS))}
    path = backends.measured.path_of(folder, found)
    tuning_run.save(kept | changes, path)
    return path
