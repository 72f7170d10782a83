"""Ring attention: each step, a rank attends to one rank's keys while the next rank's keys arrive.

Source: Ring Attention, arXiv 2310.01889, section 3. Here each rank sends to each other rank,
directly, only the rows that the receiver needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from flexdilated.distributed.runtime.task_attention import TaskAttention
from flexdilated.distributed.runtime.transport import Pending, Transport


def ring(work: TaskAttention, transport: Transport, attend_and_merge: Callable[[int], None]) -> None:
    """Call `attend_and_merge(source)` for the keys of each rank, this rank first, then `rank - 1`, `rank - 2`, and so on.

    During the call the rows of the source are in `work.buffers.kv_rows`. Two ranks' rows are held at a time.
    """
    num_ranks, messages = work.plan.num_ranks, _RingMessages(work, transport)
    for step in range(num_ranks):
        if step + 1 < num_ranks:
            arrival = messages.send_and_receive(step + 1)
        attend_and_merge((work.rank - step) % num_ranks)
        if step + 1 < num_ranks:
            arrival.wait()


class _RingMessages:
    """The messages of each step, in three buffers: one that is sent, and two that are received in turn."""

    def __init__(self, work: TaskAttention, transport: Transport) -> None:
        self._work, self._transport = work, transport
        via = work.schedule.kv
        self._packed = self._buffer(via.sends)  # has left when the next message is packed
        self._received = [self._buffer(via.receives) for _ in range(2)]

    def _buffer(self, places: Mapping[int, slice]) -> Tensor:
        longest = max((place.stop - place.start for place in places.values()), default=0)
        buffers = self._work.buffers
        return buffers.k.new_empty(longest, buffers.batch, buffers.kv_width)

    def send_and_receive(self, step: int) -> Pending:
        """Begin to send this rank's keys to `rank + step`, and to receive those of `rank - step`."""
        rank, num_ranks, via = self._work.rank, self._work.plan.num_ranks, self._work.schedule.kv
        source, target = (rank - step) % num_ranks, (rank + step) % num_ranks
        sends, receives = {}, {}
        if target in via.sends:
            place = via.sends[target]
            sends[target] = self._work.buffers.kv_message(target, self._packed[: place.stop - place.start])
        if source in via.receives:
            place = via.receives[source]
            receives[source] = self._received[step % 2][: place.stop - place.start]
        self._work.buffers.kv_rows.update(receives)
        return self._transport.swap(sends, receives)
