"""Files of `flexdilated tune` on a pretended H100."""

from pathlib import Path
from typing import Any

from flexdilated.backends import tuned
from flexdilated.tuning import run as tuning_run
from tests.hardware import simulate

NAME, LEVEL, HOPPER = "NVIDIA H100 80GB HBM3", (9, 0), simulate("sm_90")
FORMS = tuple(f"{way}{heads}" for heads in ("", ", grouped heads") for way in ("forward", "backward"))


def forget() -> None:
    """As a process that has read nothing."""
    tuned.loaded.cache_clear()
    tuned._advise.cache_clear()


def check(
    form: str, found: str = "right", candidate: str = "triton", dtype: str = "bfloat16", head_dim: int = 64
) -> dict[str, Any]:
    return {"candidate": candidate, "form": form, "case": "", "dtype": dtype, "head_dim": head_dim, "found": found}


def write(folder: Path, **changes: Any) -> Path:
    """Keep measurements of bfloat16 at head dim 64, in which triton takes half of the time of sdpa."""
    found = tuned.environment(NAME, LEVEL) | changes.pop("environment", {})
    about = {"device": "sm_90", "dtype": "bfloat16", "head_dim": 64, "tokens": 1024, "triton_over_sdpa": 0.5}
    measured = [{**about, "training": training} for training in (False, True)]
    kept = {"environment": found, "date": "2026-11-28", "measured": measured, "forms": [], "checks": list(map(check, FORMS))}
    path = tuned.path_of(folder, found)
    tuning_run.save(kept | changes, path)
    return path
