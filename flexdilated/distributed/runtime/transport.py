"""Messages between the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Transport(Protocol):
    """How messages travel. Between two ranks, in one direction, they arrive in the order in which they were swapped."""

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[], None]:
        """Begin to send and to fill contiguous tensors, one for each peer; empty ones do not travel.

        Returns:
            A function that returns when what was sent may be overwritten and what was received may be read.
        """


@contextmanager
def explained(call: str) -> Iterator[None]:
    """Name the call of this library in errors of the transport.

    Raises:
        RuntimeError: If a message does not come within the timeout of the group, or a connection is closed.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"ranks must exchange rows in {call}, got an error of the transport: a rank has ended, is late or has made other calls "
            f'(see the guide "Ranks that fail"); {error}'
        ) from error


def has_tags(device: torch.device) -> bool:
    """Whether the messages of a device are matched by their tags: NCCL has none."""
    return device.type == "cpu"


class GroupTransport:
    """Messages by the point-to-point operations of a process group, all of one swap in one batch.

    Ranks without rows for each other do not communicate. All ranks have made a collective before (`consistency.compare`): NCCL
    makes its communicator at the first operation, which needs all of them.

    Args:
        group: The ranks of the sequence, in the order of the shards.
        device: Device of the tensors.
        tag: Tag of the plan, the number of the call and the direction, in [0, 2 ** 31). gloo matches messages by their tags: a
            message of another call never matches, and the wait for it ends by the timeout of the group. NCCL has no tags: there the
            tag follows each message, and an assertion on the device ends the process if another tag arrives.
        call: Name of the call in errors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, tag: int, call: str) -> None:
        self._group, self._tag, self._device, self._call = group, tag, device, call
        self._is_tagged = has_tags(device)

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[], None]:
        """As `Transport.swap`."""
        messages = [(peer, message, True) for peer, message in sends.items() if message.numel()]
        messages += [(peer, message, False) for peer, message in receives.items() if message.numel()]
        assert all(message.is_contiguous() for _, message, _ in messages)
        operations, headers = [], []
        for peer, message, is_sent in messages:
            make, rank = dist.isend if is_sent else dist.irecv, dist.get_global_rank(self._group, peer)
            operations.append(dist.P2POp(make, message, rank, self._group, self._tag))
            if not self._is_tagged:
                headers.append(torch.full((1,), self._tag if is_sent else -1, device=self._device))
                operations.append(dist.P2POp(make, headers[-1], rank, self._group, self._tag))
        with explained(self._call):
            works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in works:
                with explained(self._call):
                    work.wait()
            messages.clear()  # the tensors had to live until here
            if headers:
                is_same = (torch.cat(headers) == self._tag).all()
                text = "ranks must make the same calls of dilated_attention in the same order, got rows of another call"
                torch._assert_async(is_same, text)

        return wait
