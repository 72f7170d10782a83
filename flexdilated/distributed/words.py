"""Values and ranks as messages show them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from flexdilated._version import __version__

Value = TypeVar("Value", bound=Hashable)

VERSION = "the version of flexdilated"  # what every round compares too: of another version plans, messages and results may differ
MAX_REASON = 2000  # characters
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


def fields_of(plan: Mapping[str, object]) -> dict[str, list[str]]:
    """Each field of a plan as messages show it, and a digest by which it is compared; the version too.

    Fields of a field, and the items of a long list among them, stand alone: messages cut long values, and say which differ.
    """
    found: dict[str, object] = {VERSION: __version__}
    for name, value in plan.items():
        for key, each in value.items() if isinstance(value, dict) and value else [("", value)]:
            of = f"{name}.{key}" if key else name
            if key and isinstance(each, (list, tuple)) and len(each) > MAX_ITEMS:
                found |= {f"{of}[{i}]": item for i, item in enumerate(each)}
            else:
                found[of] = each
    return {name: [shown(x), digest(x).hex()] for name, x in found.items()}


def called(fields: Mapping[str, Sequence[str]]) -> str:
    """What a rank that waits in a round calls, in words."""
    return fields["call"][0].strip("'") if "call" in fields else "a call whose plan is new to it"


def differing(ranks: Sequence[int], plans: Sequence[Mapping[str, Sequence[str]]]) -> list[str]:
    """For each field that is not the same in the plans of some ranks its name, and what each of them has."""
    differences = []
    for name in dict.fromkeys(name for plan in plans for name in plan):
        values = [plan.get(name, ["nothing", ""]) for plan in plans]
        if any(value[1] != values[0][1] for value in values):
            differences.append(f"{name}, got {listed(ranks, values)}")
    return differences


def listed(ranks: Sequence[int], values: Sequence[Sequence[str]]) -> str:
    """Each value with the ranks that hold it, for example `17 on ranks 0, 2 and 19 on rank 1`, from what is shown and a digest."""
    found = holders((rank, tuple(value)) for rank, value in zip(ranks, values))
    return short([f"{text} on {named(those)}" for (text, _), those in found], " and ", "values")


def cut(reason: str) -> str:
    """What a store takes of a text: so much of it, and where the name of a file is no UTF-8 its bytes."""
    reason = reason.encode("utf-8", "backslashreplace").decode()
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."
