"""What `flexdilated tune` kept on this machine, which `backend="auto"` reads before the shipped `crossovers.json`.

One file per device name, level of CUDA, versions and code of the kernels. A process reads it once. Nothing is timed here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import warnings
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexdilated.backends import crossovers
from flexdilated.backends.crossovers import Crossover, device_class
from flexdilated.core.dispatch_key import DispatchKey
from flexdilated.core.hardware import cuda_level, detect, dtype_name
from flexdilated.core.integers import is_integer
from flexdilated.core.tracing import answers_while_traced

VARIABLE = "FLEXDILATED_CACHE"  # a folder, or OFF
OFF = "off"
PACKAGES = ("triton", "pytorch-triton", "triton-windows", "flash-attn", "flash-attn-4")
WRONG = ("wrong", "failed")  # first words of a check's result that exclude a form
ESTIMATE = "an estimated 2 to 4 minutes"

Capability = tuple[int, int]

# The shape of a kept file: an object by key, a list of one shape, or a requirement with its predicate.
TEXT = ("a string", lambda x: isinstance(x, str))
FLAG = ("true or false", lambda x: isinstance(x, bool))
SIZE = ("an integer from 1 to 2**31 - 1", lambda x: is_integer(x) and 0 < x < 1 << 31)
RATIO = ("null or a finite number of at least 0", lambda x: x is None or (type(x) in (int, float) and 0 <= x < math.inf))
ABOUT = {"dtype": TEXT, "head_dim": SIZE}
SHAPE = {
    "environment": {},
    "date": TEXT,
    "measured": [
        ABOUT | {"training": FLAG, "tokens": SIZE} | {f"{backend}_over_sdpa": RATIO for backend in crossovers.CHALLENGERS}
    ],
    "forms": [ABOUT | {"constants": [TEXT]}],
    "checks": [{"candidate": TEXT, "form": TEXT, "dtype": TEXT, "found": TEXT}],
}


class Tuned(NamedTuple):
    """The content of a kept file; `constants` are those of `triton/launch.py` that are on, by dtype and head dim."""

    path: Path | None = None
    date: str = ""
    crossovers: tuple[Crossover, ...] = ()
    checked: dict[tuple[str, str, str], bool] = {}  # noqa: RUF012
    constants: dict[tuple[str, int], frozenset[str]] = {}  # noqa: RUF012
    digest: str | None = None  # of the choices that follow from the file, without its times
    is_ignored: bool = False  # a file was there, and a warning said why it is not used


# -- the choice -----------------------------------------------------------------------------------------------------------------


def prefer(request: DispatchKey) -> tuple[str, ...]:
    """The backends for `backend="auto"`, the fastest first: as measured on this machine, else as `crossovers.prefer` says."""
    return crossovers.prefer(request, _measured(request) or None)


def unproven(backend: str, request: DispatchKey) -> str | None:
    """Why `backend="auto"` leaves a backend out, or None: wrong on this machine, or changed since a GPU last ran it."""
    capability = request.hardware.capability
    if capability is None or request.modified:
        return crossovers.unproven(backend, request)
    suffix, is_right = ", grouped heads" if request.group > 1 else "", True
    for way in ("forward", "backward")[: 1 + request.differentiable]:
        found = _is_right(capability, backend, way + suffix, request.dtype)
        if found is False:
            return f"flexdilated tune has not found its {way}{suffix} right in {dtype_name(request.dtype)}"
        is_right = is_right and found is True
    return None if is_right and _measured(request) else crossovers.unproven(backend, request)


def _measured(request: DispatchKey) -> list[Crossover]:
    """What was measured on this machine with rows that kernels hold as those of a request: padded to equal powers of two."""
    found, capability = [], request.hardware.capability
    if capability is not None and not request.modified:
        for least, c in _known(capability, request.dtype, request.differentiable):
            if least < request.head_dim <= c.head_dim:  # sizes may be symbols of a compiler, which can only be compared
                found.append(c)
    return found


@answers_while_traced
def _known(capability: Capability, dtype: torch.dtype, differentiable: bool) -> tuple[tuple[int, Crossover], ...]:
    kind = (dtype_name(dtype), differentiable)
    return tuple(
        ((1 << (c.head_dim - 1).bit_length()) // 2, c) for c in loaded(capability).crossovers if (c.dtype, c.training) == kind
    )


@answers_while_traced
def _is_right(capability: Capability, backend: str, form: str, dtype: torch.dtype) -> bool | None:
    return loaded(capability).checked.get((backend, form, dtype_name(dtype)))


def constants(device: torch.device, dtype: torch.dtype, head_dim: int) -> frozenset[str]:
    """The constants of `triton/launch.py` that are on for a dtype and head dim: forms that were right and faster here."""
    capability = detect(device).capability
    return frozenset() if capability is None else loaded(capability).constants.get((dtype_name(dtype), head_dim), frozenset())


def digest_of(device: torch.device) -> str | None:
    """A hash of what this process reads for a device: ranks compare it."""
    capability = detect(device).capability
    return None if capability is None else loaded(capability).digest


@answers_while_traced
def advise(capability: Capability) -> None:
    """Warn once per process on a GPU without measurements."""
    _advise(capability)


@lru_cache(maxsize=8)
def _advise(capability: Capability) -> None:
    name = device_name(capability)
    if name is None or folder() is None or any(device == level_name(capability) for *_, device in crossovers.RAN):
        return
    if loaded(capability).path is not None or loaded(capability).is_ignored:
        return
    warnings.warn(
        f"backend='auto' takes 'sdpa' on {name}: no measurements cover the other backends there. Run `flexdilated tune` "
        f"({ESTIMATE}) to let 'auto' use 'triton' where it is right and faster, or set {VARIABLE}={OFF}",
        stacklevel=2,
    )


# -- the file -------------------------------------------------------------------------------------------------------------------


def folder() -> Path | None:
    """The folder of kept files; None where the cache is off, and for users without a home."""
    named, base = os.environ.get(VARIABLE, ""), os.environ.get("XDG_CACHE_HOME", "")
    default = os.path.join(base if os.path.isabs(base) else "~/.cache", "flexdilated")
    place = os.path.expanduser(named or default)
    return None if named.lower() == OFF or place.startswith("~") else Path(place)


def device_name(capability: Capability) -> str | None:
    """The name of the current GPU, or of the first one that has this level; None without one."""
    if not torch.cuda.is_available():
        return None
    order = (torch.cuda.current_device(), *range(torch.cuda.device_count()))
    return next((torch.cuda.get_device_name(i) for i in order if torch.cuda.get_device_capability(i) == capability), None)


def environment(name: str, capability: Capability) -> dict[str, Any]:
    """All that measurements of a device depend on, as JSON types."""
    return {
        "device": name,
        "level": level_name(capability),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{package: _version(package) for package in PACKAGES},
        "driver": driver(),
        "kernels": _hash([file.read_text() for file in sorted(Path(__file__).parent.rglob("*.py"))]),
    }


def path_of(place: Path, found: dict[str, Any]) -> Path:
    """The file for an environment."""
    return place / f"{_stem(found['device'], found['level'])}-{_hash(found)}.json"


def others(capability: Capability) -> list[Path]:
    """Files of this device, of any versions."""
    place, name = folder(), device_name(capability)
    if place is None or name is None or not os.access(place, os.R_OK | os.X_OK):
        return []
    return sorted(place.glob(f"{_stem(name, level_name(capability))}-*.json"))


@lru_cache(maxsize=8)
def loaded(capability: Capability) -> Tuned:
    """What is kept for the GPUs of a level; empty without a file, and where the file is damaged or of another machine."""
    place, name = folder(), device_name(capability)
    if place is None or name is None or not others(capability):
        return Tuned()
    return parsed(path_of(place, found := environment(name, capability)), found)


def parsed(path: Path, expected: dict[str, Any]) -> Tuned:
    """The content of a file, if it was measured in an environment; else a warning and nothing."""
    try:
        kept = json.loads(path.read_text())
        _check_shape(kept, SHAPE, "file")
        differing = [name for name in expected if kept["environment"].get(name) != expected[name]]
        if differing:
            raise ValueError(f"it was measured with another {', '.join(differing)}")
        measured = [{**e, "device": expected["level"]} for e in kept["measured"]]
        forms = {(e["dtype"], e["head_dim"]): frozenset(e["constants"]) for e in kept["forms"]}
        points, forms_checked = crossovers.load(json.dumps({"measured": measured})), checked(kept["checks"])
        digest = _hash([points, sorted(forms_checked.items()), sorted((*key, *sorted(names)) for key, names in forms.items())])
        return Tuned(path, kept["date"], points, forms_checked, forms, digest)
    except FileNotFoundError:
        return Tuned()
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(f"{path} is ignored ({type(error).__name__}: {error}); run `flexdilated tune` again", stacklevel=2)
        return Tuned(is_ignored=True)


def _check_shape(value: Any, shape: Any, name: str) -> None:
    """Compare a value of JSON with `SHAPE`, or with a part of it.

    Raises:
        ValueError: If a part is missing or of another kind.
    """
    requirement, fits = shape if isinstance(shape, tuple) else (f"a {type(shape).__name__}", lambda x: isinstance(x, type(shape)))
    if not fits(value):
        raise ValueError(f"{name} must be {requirement}, got {value!r:.40}")
    for key, part in shape.items() if isinstance(shape, dict) else ():
        _check_shape(value.get(key), part, f"{name}.{key}")
    for i, each in enumerate(value) if isinstance(shape, list) else ():
        _check_shape(each, shape[0], f"{name}[{i}]")


def checked(checks: Iterable[dict[str, str]]) -> dict[tuple[str, str, str], bool]:
    """Whether a form was right in a check and wrong in none, by candidate, form as `crossovers.unproven` spells it, and dtype."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for check in checks:
        found.setdefault((check["candidate"], check["form"], check["dtype"]), []).append(check["found"])
    return {key: "right" in texts and not any(text.startswith(WRONG) for text in texts) for key, texts in found.items()}


# -- what it depends on ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def driver() -> str:
    """The version of the NVIDIA driver, or `unknown`."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def level_name(capability: Capability) -> str:
    """For example `sm_90`."""
    return device_class(cuda_level(capability))


def _stem(name: str, level: str) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{level}"


def _hash(values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
