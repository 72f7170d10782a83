"""Which backend `backend="auto"` prefers: as `flexdilated tune` measured on this machine, else as measured for the package.

Shipped measurements are in `measured.json`, those of this machine in one file per device name, level of CUDA, versions and code of
the kernels, in the same format. A process reads each file once. Nothing is timed here.

`nox -s bench -- --crossover` measures the machine at hand and rewrites its part of `measured.json`. Where nothing is kept for a
device and dtype, the order is that of `DEFAULT`. Kernels of this project's own and private entry points are chosen only in forms
that a GPU has run since their code last changed: an entry of `checks` has the form, the commit and a hash of the code.
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
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexdilated.core.dispatch_key import DispatchKey
from flexdilated.core.hardware import cuda_level, detect, dtype_name
from flexdilated.core.integers import is_integer
from flexdilated.core.tracing import answers_while_traced

FILE = Path(__file__).with_name("measured.json")
DEFAULT = ("sdpa", "flex")  # `reference`, which takes O(N^2) memory, is never chosen automatically
PROVEN = ("triton", "flash")  # chosen only if every form has passed a check
CHALLENGERS = (*PROVEN, "flex")  # compared with sdpa; without a ratio in an entry, a backend was not measured there
LARGEST_RATIO = 0.95  # a challenger is chosen if it takes at most this share of sdpa's time; smaller differences are noise
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
    "measured": [ABOUT | {"training": FLAG, "tokens": SIZE} | {f"{backend}_over_sdpa": RATIO for backend in CHALLENGERS}],
    "forms": [ABOUT | {"constants": [TEXT]}],
    "checks": [{"candidate": TEXT, "form": TEXT, "dtype": TEXT, "found": TEXT}],
}


class Crossover(NamedTuple):
    """The backend that is fastest from `tokens` tokens on, up to the next entry of equal dtype, training and head dim."""

    dtype: str
    training: bool  # forward and backward, or forward alone
    head_dim: int
    tokens: int
    backend: str


class Measurements(NamedTuple):
    """The content of a kept file; `constants` are those of `triton/launch.py` that are on, by dtype and head dim."""

    crossovers: tuple[Crossover, ...] = ()
    checked: dict[tuple[str, str, str], bool] = {}  # noqa: RUF012
    constants: dict[tuple[str, int], frozenset[str]] = {}  # noqa: RUF012
    digest: str | None = None  # hash of the choices that follow from the file, without its times
    date: str = ""
    path: Path | None = None  # the file, if this machine wrote it
    is_ignored: bool = False  # a file was there, and a warning said why it is not used


# -- the choice -----------------------------------------------------------------------------------------------------------------


def prefer(request: DispatchKey) -> tuple[str, ...]:
    """The backends for `backend="auto"`, the fastest first: as measured here, else on this class of device at the nearest head dim.

    Above the largest measured head dim, the result is `DEFAULT`. If one graph serves every length, the first is the backend that is
    fastest for the longest measured one.

    With `score_mod` or `mask_mod`, sdpa stores all scores several times, and flex on a GPU stores none. flex sums gradients of
    tensors that the functions read in any order, so it is not preferred under deterministic algorithms.
    """
    capability, kind = request.hardware.capability, (dtype_name(request.dtype), request.differentiable)
    if request.modified and (capability or (0, 0)) >= (8, 0) and not torch.are_deterministic_algorithms_enabled():
        return ("flex", "sdpa")
    measured = [] if capability is None or request.modified else _measured_here(capability, request)
    measured = measured or [c for c in SHIPPED.get(request.hardware.device_class, NOTHING).crossovers if c[:2] == kind]
    if not measured:
        return DEFAULT
    nearest = largest = measured[0].head_dim
    for c in measured[1:]:  # the compiler traces a loop, but no `min` with a key
        largest = max(largest, c.head_dim)
        if _is_nearer(c.head_dim, nearest, request.head_dim):
            nearest = c.head_dim
    if request.head_dim > largest:
        return DEFAULT
    points = [c for c in measured if c.head_dim == nearest]
    fastest = points[0].backend
    for point in points[1:]:
        if request.dynamic or request.num_tokens >= point.tokens:  # one graph for every length does not depend on the length
            fastest = point.backend
    return (fastest, *(backend for backend in DEFAULT if backend != fastest))


def _is_nearer(a: int, b: int, target: int) -> bool:
    """Whether the ratio of `a` to the target is closer to 1 than that of `b`, in integers."""
    return max(a, target) * min(b, target) < max(b, target) * min(a, target)


def unproven(backend: str, request: DispatchKey) -> str | None:
    """Why `backend="auto"` leaves a backend out, or None: wrong on this machine, or changed since a GPU last ran it."""
    capability, dtype, device = request.hardware.capability, dtype_name(request.dtype), request.hardware.device_class
    suffix = ", grouped heads" if request.group > 1 else ""
    forms = [form + suffix for form in ("forward", "backward")[: 1 + request.differentiable]]
    if capability is not None and not request.modified:
        verdicts = [_is_right(capability, backend, form, dtype) for form in forms]
        if False in verdicts:
            return f"flexdilated tune has not found its {forms[verdicts.index(False)]} right in {dtype}"
        if all(verdicts) and _measured_here(capability, request):
            return None
    for form in forms if backend in PROVEN else ():
        if not SHIPPED.get(device, NOTHING).checked.get((backend, form, dtype)):
            return f"the code of its {form} has changed, and has not run on {device} since"
    return None


def _measured_here(capability: Capability, request: DispatchKey) -> list[Crossover]:
    """The crossovers measured on this machine whose head dim kernels pad to the same power of two as the head dim of a request."""
    crossovers = []
    for least, c in _known(capability, request.dtype, request.differentiable):
        if least < request.head_dim <= c.head_dim:  # sizes may be symbols of a compiler, which can only be compared
            crossovers.append(c)
    return crossovers


@answers_while_traced
def _known(capability: Capability, dtype: torch.dtype, differentiable: bool) -> tuple[tuple[int, Crossover], ...]:
    kind = (dtype_name(dtype), differentiable)
    return tuple(
        ((1 << (c.head_dim - 1).bit_length()) // 2, c) for c in loaded(capability).crossovers if (c.dtype, c.training) == kind
    )


@answers_while_traced
def _is_right(capability: Capability, backend: str, form: str, dtype: str) -> bool | None:
    return loaded(capability).checked.get((backend, form, dtype))


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
    if name is None or folder() is None or SHIPPED.get(cuda_level(capability).device_class, NOTHING).checked:
        return
    if loaded(capability).path is not None or loaded(capability).is_ignored:
        return
    warnings.warn(
        f"backend='auto' takes 'sdpa' on {name}: no measurements cover the other backends there. Run `flexdilated tune` "
        f"({ESTIMATE}) to let 'auto' use 'triton' where it is right and faster, or set {VARIABLE}={OFF}",
        stacklevel=2,
    )


# -- a file ---------------------------------------------------------------------------------------------------------------------


def read(content: dict[str, Any], path: Path | None = None) -> Measurements:
    """The content of a kept file, from its JSON."""
    points, verdicts = _crossovers(content["measured"]), checked(content["checks"])
    forms = {(e["dtype"], e["head_dim"]): frozenset(e["constants"]) for e in content["forms"]}
    digest = _hash([points, sorted(verdicts.items()), sorted((*key, *sorted(names)) for key, names in forms.items())])
    return Measurements(points, verdicts, forms, digest, content["date"], path)


def _crossovers(measured: Iterable[dict[str, Any]]) -> tuple[Crossover, ...]:
    """One entry where the faster backend changes, the first at 0 tokens.

    Between two lengths with different fastest backends, the choice changes at their geometric mean.
    """
    crossovers: list[Crossover] = []
    kinds: dict[tuple[str, bool, int], list[tuple[int, str]]] = {}
    for entry in measured:
        kind = (entry["dtype"], entry["training"], entry["head_dim"])
        kinds.setdefault(kind, []).append((entry["tokens"], faster(entry)))
    for kind, points in kinds.items():
        last_tokens, last_backend = 0, None
        for tokens, backend in sorted(points):
            if backend != last_backend:
                crossovers.append(Crossover(*kind, isqrt(last_tokens * tokens), backend))
            last_tokens, last_backend = tokens, backend
    return tuple(crossovers)


def faster(entry: dict[str, Any]) -> str:
    """The backend that the measurements favour; a null ratio means that a backend could not run."""
    best, least = "sdpa", LARGEST_RATIO
    for backend in CHALLENGERS:
        ratio = entry.get(f"{backend}_over_sdpa")
        if ratio is not None and (ratio < least or (best == "sdpa" and ratio <= least)):
            best, least = backend, ratio
    return best


def checked(checks: Iterable[dict[str, str]]) -> dict[tuple[str, str, str], bool]:
    """Whether a form was right in a check and wrong in none, by candidate, form as `unproven` spells it, and dtype."""
    verdicts: dict[tuple[str, str, str], list[str]] = {}
    for check in checks:
        verdicts.setdefault((check["candidate"], check["form"], check["dtype"]), []).append(check["found"])
    return {key: "right" in texts and not any(text.startswith(WRONG) for text in texts) for key, texts in verdicts.items()}


# -- the file of this machine ---------------------------------------------------------------------------------------------------


def folder() -> Path | None:
    """The folder of kept files; None if the cache is off, or if the user has no home folder."""
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
        "level": cuda_level(capability).device_class,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{package: _version(package) for package in PACKAGES},
        "driver": driver(),
        "kernels": _hash([file.read_text() for file in sorted(Path(__file__).parent.rglob("*.py"))]),
    }


def path_of(place: Path, facts: dict[str, Any]) -> Path:
    """The file for an environment."""
    return place / f"{_stem(facts['device'], facts['level'])}-{_hash(facts)}.json"


def files_of_device(capability: Capability) -> list[Path]:
    """Files of this device, of any versions."""
    place, name = folder(), device_name(capability)
    if place is None or name is None or not os.access(place, os.R_OK | os.X_OK):
        return []
    return sorted(place.glob(f"{_stem(name, cuda_level(capability).device_class)}-*.json"))


@lru_cache(maxsize=8)
def loaded(capability: Capability) -> Measurements:
    """What is kept for the GPUs of a level; empty without a file, and where the file is damaged or of another machine."""
    place, name = folder(), device_name(capability)
    if place is None or name is None or not files_of_device(capability):
        return NOTHING
    return parsed(path_of(place, facts := environment(name, capability)), facts)


def parsed(path: Path, expected: dict[str, Any]) -> Measurements:
    """The content of a file, if it was measured in an environment; else a warning and nothing."""
    try:
        content = json.loads(path.read_text())
        _check_shape(content, SHAPE, "file")
        differing = [name for name in expected if content["environment"].get(name) != expected[name]]
        if differing:
            raise ValueError(f"it was measured with another {', '.join(differing)}")
        return read(content, path)
    except FileNotFoundError:
        return NOTHING
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(f"{path} is ignored ({type(error).__name__}: {error}); run `flexdilated tune` again", stacklevel=2)
        return Measurements(is_ignored=True)


def _check_shape(value: Any, shape: Any, name: str) -> None:
    """Raise ValueError if a value of JSON has not the shape of `SHAPE`, or of a part of it."""
    requirement, fits = shape if isinstance(shape, tuple) else (f"a {type(shape).__name__}", lambda x: isinstance(x, type(shape)))
    if not fits(value):
        raise ValueError(f"{name} must be {requirement}, got {value!r:.40}")
    for key, part in shape.items() if isinstance(shape, dict) else ():
        _check_shape(value.get(key), part, f"{name}.{key}")
    for i, item in enumerate(value) if isinstance(shape, list) else ():
        _check_shape(item, shape[0], f"{name}[{i}]")


# -- what it depends on ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def driver() -> str:
    """The version of the NVIDIA driver, or `unknown`."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _stem(name: str, level: str) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{level}"


def _hash(values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


NOTHING = Measurements()
SHIPPED = {device: read(content) for device, content in json.loads(FILE.read_text()).items()}
