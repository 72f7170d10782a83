"""The ranks whose keys a rank attends to: all after one exchange, or in a ring one after another while the next keys arrive.

Source of the ring: Ring Attention, arXiv 2310.01889, section 3. Here each rank sends to each other rank,
directly, only the rows that the receiver needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from flexdilated.distributed.runtime.messages import exchange_keys
from flexdilated.distributed.runtime.task_attention import TaskAttention
from flexdilated.distributed.runtime.transport import Transport


def sources(
    work: TaskAttention, transport: Transport, meanwhile: Callable[[], object] = lambda: None, *, received: bool = False
) -> Iterator[int | None]:
    """The ranks whose keys can be read now in `work.buffers.kv_rows`; None: all. In a ring two ranks' rows are held at a time.

    A ring begins with this rank, then `rank - 1`, `rank - 2`, and so on.

    Args:
        work: The call.
        transport: Of the keys.
        meanwhile: Called once, while the first messages travel.
        received: Whether keys are there already, unless in a ring.
    """
    if not work.is_ring:
        wait = (lambda: None) if received else exchange_keys(work.buffers, transport)
        meanwhile()
        wait()
        yield None
        return
    num_ranks, messages = work.plan.num_ranks, _RingMessages(work, transport)
    for step in range(num_ranks):
        arrival = messages.send_and_receive(step + 1) if step + 1 < num_ranks else None
        if step == 0:
            meanwhile()
        yield (work.rank - step) % num_ranks
        if arrival is not None:
            arrival()


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

    def send_and_receive(self, step: int) -> Callable[[], None]:
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
