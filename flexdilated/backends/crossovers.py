"""Which backend `backend="auto"` prefers, from measurements kept beside this file with their provenance.

`nox -s bench -- --crossover` measures the machine at hand and rewrites its part of `crossovers.json`. Where nothing is kept for a
device and dtype, the order is that of `DEFAULT`. Kernels of this project's own and private entry points are chosen only in forms
that a GPU has run since their code last changed: the file's `ran` has the form, the device, the commit and a hash of the code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexdilated.core.dispatch_key import DispatchKey
from flexdilated.core.hardware import Hardware, dtype_name

FILE = Path(__file__).with_name("crossovers.json")
DEFAULT = ("sdpa", "flex")  # the oracle, which takes O(N^2) memory, is never chosen unasked
PROVEN = ("triton", "flash")  # these need an entry of `ran`
CHALLENGERS = (*PROVEN, "flex")  # measured against sdpa; an entry without a ratio of a backend has not measured it
ENOUGH = 0.95  # one of them is chosen when it takes at most this share of sdpa's time: less is noise


class Crossover(NamedTuple):
    """The backend that is fastest from `tokens` tokens on, up to the next entry of equal device, dtype, training and head dim."""

    device: str  # as `device_class` spells it
    dtype: str
    training: bool  # forward and backward, or forward alone
    head_dim: int
    tokens: int
    backend: str


def device_class(hardware: Hardware) -> str:
    """`"cpu"`, `"mps"`, or a CUDA level such as `"sm_90"`: what measurements are kept by."""
    if hardware.capability is None:
        return hardware.device_type
    major, minor = hardware.capability
    return f"sm_{major}{minor}"


def load(text: str) -> tuple[Crossover, ...]:
    """The crossovers of the kept measurements: one entry where the faster backend changes, the first at 0 tokens.

    Between two lengths with different fastest backends, the choice changes at their geometric mean.
    """
    crossovers: list[Crossover] = []
    kinds: dict[tuple[str, str, bool, int], list[tuple[int, str]]] = {}
    for entry in json.loads(text)["measured"]:
        kind = (entry["device"], entry["dtype"], entry["training"], entry["head_dim"])
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
    best, least = "sdpa", ENOUGH
    for backend in CHALLENGERS:
        ratio = entry.get(f"{backend}_over_sdpa")
        if ratio is not None and (ratio < least or (best == "sdpa" and ratio <= least)):
            best, least = backend, ratio
    return best


def is_measured(hardware: Hardware) -> bool:
    """Whether anything is kept for a class of device."""
    return any(c.device == device_class(hardware) for c in KEPT)


def unproven(backend: str, request: DispatchKey) -> str | None:
    """Why `backend="auto"` leaves a backend out that has not run on a GPU since it changed, or None."""
    if backend not in PROVEN:
        return None
    device, suffix = device_class(request.hardware), ", grouped heads" if request.group > 1 else ""
    for form in ("forward", "backward") if request.differentiable else ("forward",):
        if (backend, form + suffix, device) not in RAN:
            return f"the code of its {form}{suffix} has changed, and has not run on {device} since"
    return None


def prefer(request: DispatchKey, crossovers: Iterable[Crossover] | None = None) -> tuple[str, ...]:
    """The backends for `backend="auto"`, the fastest first: as measured on this class of device at the nearest head dim.

    Above all measured head dims it is `DEFAULT`, and where one graph is to hold for every length what is fastest on the longest.

    Under users' functions sdpa forms all scores, several times over, where flex on a GPU forms none. But there gradients of tensors
    that the functions hold are summed in any order.
    """
    if request.modified and (request.hardware.capability or (0, 0)) >= (8, 0) and not torch.are_deterministic_algorithms_enabled():
        return ("flex", "sdpa")
    kind = (device_class(request.hardware), dtype_name(request.dtype), request.differentiable)
    measured = [c for c in (KEPT if crossovers is None else crossovers) if c[:3] == kind]
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
    first = points[0].backend
    for point in points[1:]:
        if request.dynamic or request.num_tokens >= point.tokens:  # one graph for every length asks of none
            first = point.backend
    return (first, *(backend for backend in DEFAULT if backend != first))


def _is_nearer(a: int, b: int, target: int) -> bool:
    """Whether `a` is closer to the target than `b`, by ratio. In integers."""
    return max(a, target) * min(b, target) < max(b, target) * min(a, target)


KEPT = load(TEXT := FILE.read_text())
RAN = tuple((entry["backend"], entry["form"], entry["device"]) for entry in json.loads(TEXT)["ran"])
