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

    A ring begins with this rank, then `rank - 1`, `rank - 2`, and so on. `meanwhile` is called once, while the first messages
    travel. `received`: whether the keys have been received before, which a ring ignores.
    """
    if not work.is_ring:
        wait = (lambda: None) if received else exchange_keys(work.buffers, transport)
        meanwhile()
        wait()
        yield None
        return
    rank, num_ranks, via, buffers = work.rank, work.plan.num_ranks, work.schedule.kv, work.buffers

    def longest(places: Mapping[int, slice]) -> Tensor:
        rows = max((place.stop - place.start for place in places.values()), default=0)
        return buffers.k.new_empty(rows, buffers.batch, buffers.kv_width)

    outgoing = longest(via.sends)  # is sent before the next message is packed
    incoming = [longest(via.receives) for _ in range(2)]
    for step in range(num_ranks):
        source, target = (rank - step - 1) % num_ranks, (rank + step + 1) % num_ranks
        sends, receives = {}, {}
        if target in via.sends:
            sends[target] = buffers.kv_message(target, outgoing[: via.sends[target].stop - via.sends[target].start])
        if source in via.receives:
            receives[source] = incoming[step % 2][: via.receives[source].stop - via.receives[source].start]
        buffers.kv_rows.update(receives)
        wait = transport.swap(sends, receives)  # of the last step, nothing: a rank has no rows for itself
        if step == 0:
            meanwhile()
        yield (rank - step) % num_ranks
        wait()
