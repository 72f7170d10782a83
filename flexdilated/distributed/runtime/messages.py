"""The messages of one call: queries, keys with values, outputs, and their gradients on the way back.

Functions that begin an exchange return a function that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexdilated.distributed.runtime.buffers import Buffers, Gradients
from flexdilated.distributed.runtime.transport import Transport


def exchange_queries(buffers: Buffers, transport: Transport) -> Callable[[], None]:
    """Begin to send and receive queries."""
    via = buffers.schedule.q
    return transport.swap({peer: buffers.local_rows(buffers.q, via, peer) for peer in via.sends}, buffers.q_rows)


def exchange_keys(buffers: Buffers, transport: Transport) -> Callable[[], None]:
    """Begin to send and receive keys and values, of all ranks at the same time."""
    return transport.swap({peer: buffers.kv_message(peer) for peer in buffers.schedule.kv.sends}, buffers.kv_rows)


def exchange_outputs(buffers: Buffers, transport: Transport, out: Tensor, lse: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    """Send outputs `(E, B, group, D)` and lse `(E, B, group)` to the ranks of their tokens, or `back`; return those that arrive.

    Rows travel in the dtype of q, beside the bits of their lse in the dtype of sums.
    """
    via = buffers.schedule.out
    message = torch.cat([out.to(buffers.dtype).flatten(2), view_bits(lse, buffers.dtype)], dim=-1)
    received = message.new_empty(via.num_sent if back else via.num_received, buffers.batch, message.shape[-1])
    transport.swap(via.split(message, sent=not back), via.split(received, sent=back))()
    width = buffers.group * buffers.head_dim
    return received[..., :width].unflatten(-1, (buffers.group, buffers.head_dim)), view_bits(received[..., width:], buffers.sums)


def return_key_gradients(buffers: Buffers, transport: Transport, grads: Gradients, peers: Sequence[int]) -> Callable[[], None]:
    """Begin to return the gradients of received keys and values; then add those that come from some peers."""
    messages = {peer: grad.to(buffers.dtype) for peer, grad in grads.kv_rows.items()}
    grads.kv_rows = {}
    sent = {peer: buffers.schedule.kv.sends[peer] for peer in peers if peer in buffers.schedule.kv.sends}
    returned = {
        peer: buffers.k.new_empty(place.stop - place.start, buffers.batch, 2 * buffers.head_dim) for peer, place in sent.items()
    }
    wait = transport.swap(messages, returned)

    def wait_and_add() -> None:
        wait()
        for peer, grad in returned.items():  # one after another: several peers may return gradients of one row
            grads.add_returned_keys(peer, grad)

    return wait_and_add


def return_query_gradients(buffers: Buffers, transport: Transport, grads: Gradients) -> None:
    """Return the gradients of received queries, and add those that come."""
    via = buffers.schedule.q
    messages = {peer: grad.to(buffers.dtype) for peer, grad in grads.q_rows.items()}
    returned = via.split(buffers.q.new_empty(via.num_sent, buffers.batch, buffers.group, buffers.head_dim), sent=True)
    transport.swap(messages, returned)()
    for peer, grad in returned.items():
        grads.add_returned_queries(peer, grad)


def view_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of `(..., n)` as numbers of another dtype, so that they travel beside rows of that dtype."""
    # A fresh tensor: one that is contiguous by its sizes alone (1, or expanded) may have strides that cannot be viewed.
    return x.clone(memory_format=torch.contiguous_format).view(dtype)
