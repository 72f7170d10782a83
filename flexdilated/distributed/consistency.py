"""What the ranks of a process group compare before they exchange rows, and the numbers of their calls.

A plan and its options are compared the first time that a group uses them, by one small collective. Later calls are not compared.
The tag of their messages is made of the plan's digest and the number of the call. So a call that other ranks do not make never
matches one of theirs: it waits until the timeout of the group.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from flexdilated._version import __version__
from flexdilated.core.functorch import in_no_mode

TAGS = 1 << 30  # half of the tags of gloo, which are non-negative C ints
MOST_PLANS = 1 << 14  # remembered per group; new documents are a new plan
MOST_ITEMS, MOST_CHARACTERS = 8, 120  # of one value in a message
COUNTED = "the number of the call over this mesh", "the number of the forward"


class Fields:
    """What all ranks must share in a call, by name, and its digest.

    Args:
        values: JSON types: numbers, strings, bools, None, lists or tuples of them, and dicts of fields.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = {"the version of flexdilated": __version__, **values}
        self.digest = hashlib.sha256(json.dumps(self._values, sort_keys=True).encode()).digest()

    def tag(self, number: int, *, backward: bool = False) -> int:
        """The tag of the messages of a call, in [0, 2 ** 31)."""
        return 2 * ((int.from_bytes(self.digest[:8], "big") + number) % TAGS) + backward

    def shown(self) -> bytes:
        """The fields as JSON, each value as the function `shown` writes it; the fields of a dict as `name.key`."""
        texts: dict[str, str] = {}
        for name, value in self._values.items():
            fields_of_value = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
            texts |= {key: shown(item) for key, item in fields_of_value.items()}
        return json.dumps(texts).encode()


class _Calls:
    """The calls of one process group on this rank."""

    def __init__(self) -> None:
        self.count = 0
        self.compared: dict[tuple[str, bytes], None] = {}  # oldest first, in the same order on all ranks
        self.lock = threading.RLock()


# Facts about a group, which torch gives no place to keep. They live as long as the group.
_groups: WeakKeyDictionary[dist.ProcessGroup, _Calls] = WeakKeyDictionary()


@contextmanager
def one_call(group: dist.ProcessGroup) -> Iterator[int]:
    """One call over a group, and its number: every rank must make the same calls in the same order.

    A call that raises counts too, so that the next call of this rank does not match the one in which other ranks wait. Raises
    RuntimeError if another thread of this process is inside of a call: ranks cannot share an order of threads.
    """
    calls = _groups.get(group) or _groups.setdefault(group, _Calls())
    if not calls.lock.acquire(blocking=False):
        calls.count += 1
        raise RuntimeError(
            "dilated_attention must run in one thread at a time over one mesh, got a call during another; "
            "give each thread its own mesh"
        )
    try:
        calls.count += 1
        yield calls.count
    finally:
        calls.lock.release()


def miss_call(group: dist.ProcessGroup) -> None:
    """Count a call that this rank refuses before it begins, as `one_call` counts those that raise."""
    _groups.setdefault(group, _Calls()).count += 1


def compare(
    group: dist.ProcessGroup, device: torch.device, fields: Fields, numbers: Sequence[int] = (), *, each_time: bool = False
) -> None:
    """Compare fields over the ranks of a group; return immediately if these fields have been compared before.

    This collective is the first operation of the group on this device: NCCL makes its communicator there, which needs all ranks.
    If ranks differ, every rank raises the same ValueError, with the fields and the ranks of each value.

    Args:
        group: The ranks. All of them must call.
        device: Where the group's collectives run.
        fields: What to compare.
        numbers: Of this call and, in a backward, of its forward; compared whenever fields are.
        each_time: Whether to compare fields that have been compared before. Not read then on other devices than a CPU, where an
            assertion on the device fails instead of an error: to read would wait for the device.
    """
    if group.size() == 1:
        return
    calls = _groups.get(group) or _groups.setdefault(group, _Calls())
    compared, key = calls.compared, (device.type, fields.digest)
    if key in compared and not each_time:
        return
    text = fields.shown()
    digest = [int.from_bytes(fields.digest[byte : byte + 8], "big", signed=True) for byte in range(0, 32, 8)]
    rows = _gathered(group, device, (*numbers, *[0] * (2 - len(numbers)), len(text), *digest))
    if key in compared and device.type != "cpu":
        torch._assert_async((rows == rows[0]).all(), "ranks must make the same calls in the same order over a mesh")
        return
    rows_of_ranks: list[list[int]] = rows.tolist()
    if any(row != rows_of_ranks[0] for row in rows_of_ranks):
        texts = _gathered(group, device, text.ljust(max(row[2] for row in rows_of_ranks)))
        plans = [json.loads(bytes(encoded)) for encoded in texts.tolist()]
        for column, name in enumerate(COUNTED):
            plans = [{**plan, name: str(row[column])} for plan, row in zip(plans, rows_of_ranks)]
        raise ValueError(f"ranks must agree on {'; on '.join(differences(dist.get_process_group_ranks(group), plans))}")
    compared[key] = None
    if len(compared) > MOST_PLANS:
        del compared[next(iter(compared))]


@in_no_mode
def _gathered(group: dist.ProcessGroup, device: torch.device, row: Sequence[int]) -> Tensor:
    """The integers of all ranks, `(ranks, n)`; n must be the same on all."""
    row_local = torch.tensor(list(row), dtype=torch.uint8 if isinstance(row, bytes) else torch.int64, device=device)
    rows = row_local.repeat(group.size(), 1)  # a group that moves nothing, as torch's fake one, leaves what is here
    dist.all_gather(list(rows.unbind()), row_local, group=group)
    return rows


def differences(ranks: Sequence[int], plans: Sequence[Mapping[str, str]]) -> list[str]:
    """Each field that differs, and its values with their ranks: `batch, got 1 on ranks 0, 2 and 2 on rank 1`."""
    differing = []
    for name in dict.fromkeys(name for plan in plans for name in plan):
        holders: dict[str, list[int]] = {}
        for rank, plan in zip(ranks, plans):
            holders.setdefault(plan.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            values = [f"{value} on {named(value_ranks)}" for value, value_ranks in holders.items()]
            differing.append(f"{name}, got {short(values, ' and ', 'values')}")
    return differing


def named(ranks: Sequence[int]) -> str:
    """Ranks as text: `rank 3`, or `ranks 0, 2`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {short([str(rank) for rank in ranks], ', ', 'ranks')}"


def short(items: Sequence[str], separator: str, unit: str) -> str:
    """The first items, and how many there are if more."""
    text = separator.join(items[:MOST_ITEMS])
    return text if len(items) <= MOST_ITEMS else f"{text}, ... ({len(items)} {unit})"


def shown(value: object) -> str:
    """A value as a message shows it. What is cut ends in a digest, so that two values that differ look different."""
    text = f"[{', '.join(repr(item) for item in value)}]" if isinstance(value, (list, tuple)) else repr(value)
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}... sha256 {hashlib.sha256(text.encode()).hexdigest()[:8]}"
