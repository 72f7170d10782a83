"""A cache whose rows are distributed over ranks: the messages between them."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.attention import attend
from flexdilated.core.call import Call
from flexdilated.core.collective_order import OVER_RANKS, keep_order, order_kernels
from flexdilated.core.tracing import holds_values
from flexdilated.decode.store import Store
from flexdilated.decode.tokens import Tokens
from flexdilated.distributed.consistency import Fields, compare, one_call
from flexdilated.distributed.mesh import group_of, process_group
from flexdilated.distributed.runtime.transport import GroupTransport
from flexdilated.distributed.sharding import declared_lengths
from flexdilated.distributed.unsharding import unshard_sequence


class Ranks:
    """The ranks of a 1-D mesh over which rows are distributed; all of them make the same calls.

    `exchange`: how rows travel in the attention of a prompt in shards. `described`: the cache, in JSON types: what ranks compare.
    """

    def __init__(self, mesh: DeviceMesh, exchange: str, described: Mapping[str, object]) -> None:
        self.group_name, self.rank, self.size = group_of(mesh)
        self.mesh, self.exchange = mesh, exchange
        self._described = json.dumps({"call": "DilatedKVCache.attend", **described})

    def __deepcopy__(self, memo: object) -> Ranks:
        return self  # groups of processes have no copies

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a cache must be pickled without mesh, got one over {self.size} ranks, a group of this process")

    @property
    def numbers(self) -> list[int]:
        """The global numbers of the ranks, for messages."""
        return dist.get_process_group_ranks(self.mesh.get_group())

    def hashes(self, tokens: Tensor) -> Tensor:
        """`(B,)` int64 of tokens `(B, T)`, as ranks compare them."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        mixed = (tokens.long() + 1) * 6_364_136_223_846_793_005 + (place + 1) * 1_442_695_040_888_963_407  # modulo 2 ** 64
        return ((mixed ^ (mixed >> 29)) * 1_181_783_497_276_652_981).sum(dim=1)

    def lengths(self, num_tokens: int, shard_lengths: Sequence[int]) -> tuple[int, ...]:
        """The number of tokens of each rank; this rank has `num_tokens`. Raises as `declared_lengths`, or if there is no token."""
        lengths = declared_lengths(self.rank, self.size, num_tokens, shard_lengths)
        if sum(lengths) < 1:
            raise ValueError(f"shard_lengths must hold at least 1 token in all, got {lengths}")
        return lengths

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Attention of a prompt in shards."""
        return attend(q, k, v, call.replaced(mesh=self.mesh, exchange=self.exchange))[0]

    def whole(self, x: Tensor, lengths: Sequence[int], dim: int = 1) -> Tensor:
        """The concatenated shards of all ranks, on every rank."""
        return unshard_sequence(x, self.mesh, dim=dim, shard_lengths=lengths)

    def marks(self, new: Tokens, added: Tensor, lengths: Sequence[int]) -> Tensor | None:
        """`(B, N, Hkv)`: which tokens of the whole sequence are marked; None: none.

        Raises ValueError if `added` `(B,)`, the number of new tokens per sequence, differs between ranks.
        """
        if not holds_values(new.k):
            raise NotImplementedError("shard_lengths must come with values, got meta or fake tensors: marks are read")
        has_marks = added.new_zeros(1) if new.is_marked is None else new.is_marked.any()[None].to(added.dtype)
        rows = self.whole(torch.cat([has_marks, added])[None], (1,) * self.size, 0)
        check_same(rows[:, 1:], self.numbers)
        if not bool(rows[:, 0].any()):
            return None
        return self.whole(new.marks(), lengths)

    def distribute(self, stores: Sequence[Store], new: Tokens, end: Tensor, lengths: Sequence[int]) -> None:
        """From the first `end` `(B,)` tokens of a sharded sequence, store the rows in the segment of the last token.

        `new` is this rank's shard; each row goes to the rank that stores it.
        """
        shards = [range(first, last) for first, last in pairwise(accumulate(lengths, initial=0))]

        def index_in(positions: Tensor, shard: range) -> Tensor:
            """The index in a shard of each position, -1 if it is in another one."""
            return torch.where((positions >= shard.start) & (positions < shard.stop), positions - shard.start, -1)

        shard_local, width = shards[self.rank], 2 * new.k.shape[3] + 1
        sends = {
            peer: torch.cat([store.rows_at(new, index_in(store.layout.last_positions(peer, end), shard_local)) for store in stores])
            for peer in range(self.size)
        }
        own_positions = [store.layout.last_positions(self.rank, end) for store in stores]
        # Computed twice: the indices of all peers together would be as large as all rows times the peers.
        rows = {
            peer: [int((index_in(positions, shard) >= 0).sum()) for positions in own_positions] for peer, shard in enumerate(shards)
        }
        receives = {peer: new.k.new_empty(sum(counts), width) for peer, counts in rows.items()}
        receives[self.rank] = sends.pop(self.rank)
        self.swap(sends, {peer: message for peer, message in receives.items() if peer != self.rank})
        for peer, message in receives.items():
            for store, positions, part in zip(stores, own_positions, message.split(rows[peer])):
                store.put_rows(part, index_in(positions, shards[peer]))

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send to each peer, and fill what comes from it."""
        group = self.mesh.get_group()
        with one_call(group) as number:
            _swap(group, self._described, number, sends, receives)

    def agree(self, q: Tensor, call: Call, shard_lengths: Sequence[int]) -> None:
        """Wait until all ranks have made the same call on shards."""
        shape = [q.shape[0], sum(shard_lengths), q.shape[2]]
        described = _call_of(self._description(call), shape, call.scale) | {"shard_lengths": shard_lengths}
        group = self.mesh.get_group()
        with one_call(group) as number:
            compare(group, q.device, Fields(described), (number,))

    def _description(self, call: Call) -> str:
        """The description of the cache, and whether there are sinks. Their scores are not compared."""
        return self._described if call.sinks is None else f'{self._described[:-1]}, "sinks": true}}'

    def merged(self, parts: Tensor, lengths: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Merge attention `(B, T, H, D)` of which every rank has a part, with its lse as the last element; `lengths` is returned.

        Raises ValueError if ranks differ in their calls, or in `lengths` `(4 * B,)`: cached tokens, new tokens, order of sequences,
        and a hash of the tokens.
        """
        return _merged(parts, lengths, call.scale, self.group_name, self._description(call))


def merge_parts(parts: Tensor) -> Tensor:
    """Merge partial results of one softmax, `(ranks, ..., D + 1)` with the lse last, into `(..., D)`; 0 where no key is seen."""
    out, lse = parts[..., :-1], parts[..., -1:]
    largest = lse.amax(dim=0)
    finite = largest.masked_fill(largest == -math.inf, 0.0)
    weights = torch.exp(lse - finite).masked_fill(lse == math.inf, 1.0)  # an infinite sink takes the whole softmax
    total = weights.sum(dim=0)
    return (weights * out).sum(dim=0) / total.masked_fill(total == 0.0, 1.0)


def draw_alike(mesh: DeviceMesh, following: Tensor, *settings: object) -> Tensor:
    """The tokens `(B,)` that rank 0 drew, on every rank.

    Raises ValueError if ranks have different settings: some would continue after others have ended.
    """
    row = torch.cat([following, following.new_tensor([zlib.crc32(repr(settings).encode())])])
    rows = unshard_sequence(row[None], mesh, dim=0)
    if not bool((rows[:, -1] == rows[0, -1]).all()):
        raise ValueError(f"max_new_tokens, stop_tokens and pad_token must be the same on all ranks, got {settings} here")
    return rows[0, :-1]


def check_same(
    rows: Tensor,
    ranks: Sequence[int],
    subject: str = "lengths of a cache and of a call",
    prefix: str = "",
    hint: str = "every rank makes the same calls",
) -> None:
    """Raise ValueError unless `rows` `(ranks, ...)`, lengths of caches and of new tokens, are equal. `ranks`: their numbers.

    On devices other than the CPU, an assertion fails on the device instead, since reading the rows would wait for it.
    """
    is_same = (rows == rows[0]).all(dim=1)
    if rows.device.type != "cpu":
        torch._assert_async(is_same.all(), f"{subject} must be the same on all ranks")
    elif not bool(is_same.all()):
        differing = int(is_same.int().argmin())
        raise ValueError(
            f"{subject} must be the same on all ranks, got {prefix}{rows[0].tolist()} on rank {ranks[0]} and "
            f"{rows[differing].tolist()} on rank {ranks[differing]}; {hint}"
        )


def _call_of(described: str, shape: Sequence[int], scale: float | None) -> dict[str, object]:
    """A call on new tokens `(B, T, H)`, as ranks compare it."""
    return {**json.loads(described), "shape": shape, "scale": scale, "shard_lengths": None}


def _swap(
    group: dist.ProcessGroup, described: str, number: int, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
) -> None:
    """Exchange messages whose tags cannot match those of another call."""
    device = next(iter(receives.values())).device
    tag = Fields(json.loads(described)).tag(number)
    GroupTransport(group, device, tag, f"call {number} over this mesh, of a cache").swap(sends, receives)()


def _gather(parts: Tensor, lengths: Tensor, scale: float | None, group_name: str, described: str) -> Tensor:
    group = process_group(group_name)
    rank, size = group.rank(), lengths.nbytes
    call = _call_of(described, list(parts.shape[:3]), scale)
    # Bytes, since gloo knows few dtypes.
    message = torch.cat([lengths.view(torch.uint8), parts.contiguous().view(-1).view(torch.uint8)])
    messages = message.new_empty(group.size(), len(message))
    messages[rank] = message
    peers = [peer for peer in range(group.size()) if peer != rank]
    with one_call(group) as number:
        compare(group, parts.device, Fields(call), (number,))
        _swap(group, json.dumps(call), number, dict.fromkeys(peers, message), {peer: messages[peer] for peer in peers})
    rows, num_lengths = messages[:, :size].contiguous().view(torch.int64), 2 * len(parts)
    ranks = dist.get_process_group_ranks(group)
    check_same(rows[:, :num_lengths], ranks)
    order, tokens = rows[:, num_lengths:].split(len(parts), dim=1)
    check_same(order, ranks, "the order of the sequences of a cache", "by hashes ")
    hint = "give shard_lengths if they are shards, and draw on one rank what all are to read"
    check_same(tokens, ranks, "the tokens of a call without shard_lengths", "by hashes ", hint)
    return torch.stack([message[size:].view(parts.dtype).view(parts.shape) for message in messages])


# An opaque operator: it looks at values, and it waits for other processes.


@torch.library.custom_op("flexdilated::merge_over_ranks", mutates_args=(), tags=OVER_RANKS)
def _merged(parts: Tensor, lengths: Tensor, scale: float | None, group_name: str, described: str) -> tuple[Tensor, Tensor]:
    return merge_parts(_gather(parts, lengths, scale, group_name, described)), lengths.clone()


@_merged.register_fake
def _(parts: Tensor, lengths: Tensor, scale: float | None, group_name: str, described: str) -> tuple[Tensor, Tensor]:
    order_kernels()
    return parts.new_empty(*parts.shape[:3], parts.shape[3] - 1), torch.empty_like(lengths)


keep_order(_merged)
