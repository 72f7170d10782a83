"""Values and ranks as messages show them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value", bound=Hashable)

MAX_ITEMS = 8  # of a list, of the ranks that share a value, or of the fields and values of one message
MAX_CHARACTERS = 120  # of one value in a message


def global_ranks(group: dist.ProcessGroup) -> list[int]:
    """The ranks of a group by the numbers that torchrun gives them, under which a user finds their logs."""
    return dist.get_process_group_ranks(group)


def named(ranks: Sequence[int]) -> str:
    """For example `rank 3`, or `ranks 0, 2`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {short([str(rank) for rank in ranks], ', ', 'ranks')}"


def holders(values: Iterable[tuple[int, Value]]) -> list[tuple[Value, list[int]]]:
    """Each value of some ranks with all that hold it."""
    found: dict[Value, list[int]] = {}
    for rank, value in values:
        found.setdefault(value, []).append(rank)
    return list(found.items())


def short(items: Sequence[str], separator: str, what: str) -> str:
    """The first items, and how many there are of what, if more."""
    some = separator.join(items[:MAX_ITEMS])
    return some if len(items) <= MAX_ITEMS else f"{some}, ... ({len(items)} {what})"


def shown(value: object) -> str:
    """The value as a message shows it; what is cut is told apart by its digest."""
    if isinstance(value, (list, tuple)) and len(value) > MAX_ITEMS:
        text = f"[{short([repr(item) for item in value], ', ', 'values')}]"
    else:
        text = repr(list(value) if isinstance(value, tuple) else value)
        if len(text) <= MAX_CHARACTERS:
            return text
    return f"{text[:MAX_CHARACTERS]}... sha256 {digest(value).hex()[:8]}"


def digest(value: object) -> bytes:
    """Of a value of JSON types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
