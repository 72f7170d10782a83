"""Causal decoding in memory that does not grow with the context."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexdilated.attention import attend
from flexdilated.core.call import Call
from flexdilated.core.checks import check_exchange, check_scale
from flexdilated.core.hardware import without_autocast
from flexdilated.core.integers import as_integer
from flexdilated.core.pattern import DilatedPattern
from flexdilated.decode.arguments import (
    Sizes,
    check_cache_sinks,
    check_lengths,
    check_new,
    check_sizes,
    checked_indices,
    checked_length,
    count_seen,
)
from flexdilated.decode.layout import layouts_of
from flexdilated.decode.store import Past, Store, restored_on_error, with_marks
from flexdilated.decode.tokens import BLOCK, Tokens, read_new

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from flexdilated.decode.ranks import Ranks


class DilatedKVCache:
    """A bounded key/value cache: of each head, the keys and values of the current segments, the window and the global tokens.

    >>> cache = DilatedKVCache(DilatedPattern((8, 64), (1, 4)), batch_size=1, num_kv_heads=4, head_dim=16)
    >>> cache.rows_per_head, cache.nbytes
    ((24, 24, 24, 24), 12288)

    Row `(p % w) // r` of a branch holds the key of position `p` until the next segment overwrites it: `sum_i ceil(w_i / r_i)` rows
    per head (under `heads="grouped"`, of its own branch), allocated once, for any length of the context. A window of w tokens has
    w rows: row `p % w` holds position `p` until position `p + w` overwrites it. Global tokens have a row each, for good. A token
    attends to what its segments, the window and the global tokens join it with, in one softmax over all branches. A token that no
    branch of a head keeps gives 0 there. A new prompt continues after the tokens seen, like a chunk: call `reset()` before it.

    Where a key or value is not finite, the tokens that see it give NaN in that head; no other output changes. Attention runs in
    the dtype of the cache, without autocast and without gradients. Under `torch.compile(fullgraph=True)` a step compiles once.
    With `mesh`, row `j` of a branch lies on rank `j % P`. A prompt may come in shards; later tokens go to every rank. Each rank
    attends to its rows, one all-gather merges the parts, and every rank gets the same bits. All ranks make the same calls.
    Source: LongNet, arXiv 2307.02486, section 2; the mixture as one softmax over the multiset union of the branches' keys.

    Args:
        pattern: Which positions attend to which.
        batch_size: Sequences, each at its own length.
        num_kv_heads: Key/value heads.
        head_dim: Elements per head.
        max_length: Largest number of positions; longer branches then take no more rows than that. Default: no limit.
        first_head: Index in the model of the first key/value head in this cache.
        total_kv_heads: Key/value heads of the whole model, which determine offsets. Default: `num_kv_heads`.
        dtype: Of keys and values. Default: torch's default dtype.
        device: Of keys and values.
        mesh: A 1-D `DeviceMesh` that shares the rows. Default: this process holds all rows.
        exchange: With `mesh`: how rows travel in the attention of a prompt in shards, as in `flexdilated.dilated_attention`.

    Raises:
        ValueError: If a size is below 1, the pattern has more groups of heads than there are heads, or the mesh does not fit.
        TypeError: If the pattern, a size, the dtype or the mesh has the wrong type.
        NotImplementedError: If the pattern has torchscale's shifted positions, where an output depends on the sequence's end.
    """

    def __init__(
        self,
        pattern: DilatedPattern,
        *,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        max_length: int | None = None,
        first_head: int = 0,
        total_kv_heads: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        mesh: DeviceMesh | None = None,
        exchange: str = "auto",
    ) -> None:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        total = num_kv_heads if total_kv_heads is None else total_kv_heads
        check_sizes(pattern, Sizes(batch_size, num_kv_heads, head_dim, dtype), max_length, first_head, total)
        self.pattern, self.max_length, self.first_head, self.total_kv_heads = pattern, max_length, first_head, total
        self.batch_size, self.num_kv_heads, self.head_dim, self.dtype = batch_size, num_kv_heads, head_dim, dtype
        self.records_past = False  # whether `crop` can go back to before the calls that follow, whatever they overwrite
        self._past, self._is_empty, self._most_seen = list[Past](), True, 0.0
        check_exchange(exchange, mesh)
        self._ranks = None if mesh is None else self._ranks_of(mesh, exchange)
        rank, num_ranks = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.size)
        with torch.inference_mode(False):  # a tensor allocated in that mode cannot be written to outside of it
            self._lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
            # A sequence whose length is the first number was cut: its rows are those after as many tokens as the second says.
            self._cut = torch.full((batch_size, 2), -1, dtype=torch.int64, device=device)
            self._order = torch.zeros_like(self._lengths)  # by which sequences they came to be, as ranks compare it
            template = torch.empty(batch_size, 0, head_dim, dtype=dtype, device=self.device)
            heads = range(first_head, first_head + num_kv_heads)
            layouts = layouts_of(pattern, heads, total, max_length, like=template, rank=rank, num_ranks=num_ranks)
            self._stores = tuple(Store(layout, batch_size) for layout in layouts)
        self._tokens: Tensor | None = None  # hashes of the tokens of the next call, which ranks compare
        if self._ranks is not None and self.device.type != self._ranks.mesh.device_type:
            raise ValueError(f"device must be that of mesh={self._ranks.mesh.device_type}, got {self.device}")

    def _ranks_of(self, mesh: DeviceMesh, exchange: str) -> Ranks:
        from flexdilated.decode.ranks import Ranks  # one process needs no torch.distributed

        names = ("max_length", "num_kv_heads", "head_dim", "first_head", "total_kv_heads")
        described = {name: getattr(self, name) for name in names} | {"pattern": self.pattern.to_dict(), "dtype": str(self.dtype)}
        return Ranks(mesh, exchange, described)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks over which rows are distributed."""
        return None if self._ranks is None else self._ranks.mesh

    @property
    def lengths(self) -> Tensor:
        """`(B,)` int64: the tokens seen of each sequence, which is the position of the next one."""
        return self._lengths.clone()

    @property
    def device(self) -> torch.device:
        """The device of the keys and values."""
        return self._lengths.device

    @property
    def rows_per_head(self) -> tuple[int, ...]:
        """The rows allocated for each key/value head, on this rank."""
        return tuple(sum(store.rows) for store in self._stores for _ in store.heads)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values allocated, on this rank, those recorded for `crop` among them."""
        recorded = (x for past in self._past for x in (past.new.k, past.new.v, *(row for copy in past.stores for row in copy.rows)))
        return sum(store.k.nbytes + store.v.nbytes for store in self._stores) + sum(x.nbytes for x in recorded)

    def new_positions(self, num_tokens: int, *, shard_lengths: Sequence[int] | None = None) -> Tensor:
        """`(B, T)` int64: positions of the next T=`num_tokens` of each sequence; with `shard_lengths`, T of this rank alone.

        >>> cache = DilatedKVCache(DilatedPattern.causal(64, 4), batch_size=2, num_kv_heads=4, head_dim=8)
        >>> cache.new_positions(3).tolist()
        [[0, 1, 2], [0, 1, 2]]

        Raises:
            ValueError: If `num_tokens` is below 0, or `shard_lengths` do not fit or come without mesh.
            TypeError: If a length is no integer.
        """
        if as_integer("num_tokens", num_tokens) < 0:
            raise ValueError(f"num_tokens must be at least 0, got {num_tokens}")
        shards = self._shards(num_tokens, shard_lengths)
        start = 0 if shards is None or self._ranks is None else sum(shards[: self._ranks.rank])
        return self._lengths[:, None] + torch.arange(start, start + num_tokens, device=self.device)

    def expect(self, tokens: Tensor | None) -> None:
        """Announce the tokens `(B, T)` of the next call, which ranks compare if each of them receives all tokens."""
        self._tokens = None if tokens is None or self._ranks is None else self._ranks.hashes(tokens)

    def _shards(self, num_tokens: int, shard_lengths: Sequence[int] | None) -> tuple[int, ...] | None:
        """The shard lengths of all ranks, or None if every rank has the same tokens."""
        if shard_lengths is None:
            return None
        if self._ranks is None:
            raise ValueError(f"shard_lengths must come with mesh, got {shard_lengths} and no mesh")
        lengths = self._ranks.lengths(num_tokens, shard_lengths)
        return lengths if self._ranks.size > 1 else None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lengths: Tensor | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        backend: str = "auto",
        shard_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """The causal attention of the next tokens of each sequence, whose keys and values are then stored.

        >>> cache = DilatedKVCache(DilatedPattern.causal(64, 4), batch_size=2, num_kv_heads=4, head_dim=8)
        >>> cache.attend(*torch.randn(3, 2, 5, 4, 8)).shape, cache.lengths.tolist()  # q, k, v of 5 tokens
        (torch.Size([2, 5, 4, 8]), [5, 5])

        Row `t` equals row `lengths + t` of causal `dilated_attention` over the whole sequence, to rounding. Chunks have any size.

        Args:
            q: Queries of the new tokens, `(B, T, H, D)`, `H` a multiple of `num_kv_heads`.
            k: Their keys, `(B, T, num_kv_heads, D)`, in the dtype of the cache, as are q and v.
            v: Their values, the shape of k.
            lengths: `(B,)` int64, in `[0, T]`: tokens of each sequence; the rest is padding, which gives 0. Default: T.
            scale: Multiplies `q @ k^T`. Default: `D ** -0.5`.
            sinks: `(H,)`: score of one more key, of value 0, per head; equal on all ranks. Default: none.
            backend: For the first chunk, if longer than one token; later chunks use `scaled_dot_product_attention`.
            shard_lengths: With a mesh: q, k and v are this rank's shard of the new tokens, of which each rank has this many, 0
                allowed; T is their sum. Later chunks are gathered on every rank. Default: every rank has all T.

        Returns:
            `out` `(B, T, H, D)` in the dtype of q; with `shard_lengths` of this rank's shard.

        Raises:
            ValueError: If a shape, a device, the scale or the name of the backend is wrong; if ranks make different calls.
            TypeError: If a dtype is wrong.
            NotImplementedError: If a gradient is asked for, or shards come with `records_past`.
            RuntimeError: If a sequence grows beyond `max_length`.
        """
        scale = check_scale(scale, self.dtype)
        part: dict[str, Any] = {"first_head": self.first_head, "num_kv_heads": self.total_kv_heads}
        call = Call(pattern=self.pattern, is_causal=True, scale=scale, backend=backend, sinks=sinks, **part)
        sizes = Sizes(self.batch_size, self.num_kv_heads, self.head_dim, self.dtype)
        check_new(sizes, q, k, v, backend, is_shard=shard_lengths is not None)
        check_cache_sinks(sinks, q)
        shards = self._shards(q.shape[1], shard_lengths)
        num_tokens = q.shape[1] if shards is None else sum(shards)
        check_lengths(lengths, self._lengths, num_tokens)
        with without_autocast(q.device):  # the dtype is that of the cache
            out = self._attend(q, k, v, lengths, call) if shards is None else self._attend_shards(q, k, v, lengths, call, shards)
        if not torch.compiler.is_compiling():  # a number that changes would compile every step again
            self._most_seen = count_seen(self._most_seen + num_tokens, self._lengths, self.pattern, self.total_kv_heads)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, call: Call) -> Tensor:
        new, added, is_real = read_new(self._lengths, self.max_length, k, v, lengths)
        past = self._state_before(new, added) if self.records_past else None
        if past is None and self._past:
            self._past.clear()  # what it knows is no longer what came last
        try:
            out = self._attend_new(q, new, added, call)
        finally:  # a call that fails may have stored rows, which `crop` must know of
            if past is not None:
                self._past.append(past._replace(added=self._lengths - past.lengths))
        self._is_empty = False
        return out if is_real is None else out.masked_fill(~is_real[..., None, None], 0.0)

    def _attend_new(self, q: Tensor, new: Tokens, added: Tensor, call: Call) -> Tensor:
        if q.shape[1] == 1:
            return self._attend_one(q, new, added, call)
        if not self._is_empty:
            return self._attend_blocks(q, new, added, call)
        if self._tokens is not None:  # ranks with equal tokens have exchanged no message yet: compare the tokens
            _, added = self._merged(q.new_empty(q.shape[0], 0, q.shape[2], self.head_dim + 1), added, call)
        out, _ = attend(q, new.k, new.v, call)
        self._store(new, added)
        return out if new.is_marked is None else with_marks(self._stores, out, new.is_marked)

    def _attend_shards(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, call: Call, shards: tuple[int, ...]
    ) -> Tensor:
        """`attend` for new tokens in shards, one shard on each rank."""
        ranks, num_local = self._ranks, q.shape[1]
        assert ranks is not None
        start = sum(shards[: ranks.rank])
        if self.records_past:
            raise NotImplementedError("records_past must be False with shard_lengths, got True: set it after the prompt")
        if not torch.compiler.is_compiling():
            ranks.agree(q, call, shards)
        if not self._is_empty:
            q, k, v = ranks.whole(torch.cat([q, k, v], dim=2), shards).split([x.shape[2] for x in (q, k, v)], dim=2)
            return self._attend(q, k, v, lengths, call)[:, start : start + num_local]
        if torch.compiler.is_compiling():  # the messages depend on the positions
            return torch.compiler.disable(self._attend_shards)(q, k, v, lengths, call, shards)
        new, added, is_real = read_new(self._lengths, self.max_length, k, v=v, lengths=lengths, start=start, num_tokens=sum(shards))
        out = ranks.attend(q, new.k, new.v, call.replaced(shard_lengths=shards))
        marks = ranks.marks(new, added, shards)
        if marks is not None:
            out = with_marks(self._stores, out, marks, start)
        ranks.distribute(self._stores, new, added, shards)
        self._lengths += added
        self._is_empty = False
        self._past.clear()
        return out if is_real is None else out.masked_fill(~is_real[..., None, None], 0.0)

    def _state_before(self, new: Tokens, added: Tensor) -> Past:
        if torch.compiler.is_compiling():
            raise NotImplementedError("records_past must be False under torch.compile, got True: its list grows with every call")
        positions = self.new_positions(new.k.shape[1])
        return Past(self.lengths, tuple(store.overwritten(positions) for store in self._stores), new, added)

    def _attend_one(self, q: Tensor, new: Tokens, added: Tensor, call: Call) -> Tensor:
        """Attention of one token per sequence. The token is stored first, so that no copy of the other rows is needed."""
        can_be_refused = self._ranks is not None and not torch.compiler.is_compiling()
        try:
            with restored_on_error(self._stores, self._lengths[:, None]) if can_be_refused else nullcontext():
                # Where nothing was added the output is padding, whatever is seen.
                parts = [store.attend_one(q, new, store.layout.next_plan(self._lengths, added), call) for store in self._stores]
                out, added = self._merged(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2), added, call)
        except Exception:
            if not can_be_refused:  # the rows stay, as after `crop`
                self._cut.copy_(torch.stack([self._lengths, self._lengths + added], dim=1))
            raise
        self._lengths += added  # last: what a kernel refuses has not been seen
        return out

    def _merged(self, parts: Tensor, added: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """The outputs, merged over ranks; `added` comes from the operator, so that tokens are counted only after ranks agree."""
        if self._ranks is None or self._ranks.size == 1:
            return parts, added
        tokens, self._tokens = torch.zeros_like(self._order) if self._tokens is None else self._tokens, None
        out, lengths = self._ranks.merged(parts, torch.cat([self._lengths, added, self._order, tokens]), call)
        return out.to(self.dtype), lengths[self.batch_size : 2 * self.batch_size]

    def _attend_blocks(self, q: Tensor, new: Tokens, added: Tensor, call: Call) -> Tensor:
        """Several tokens after stored ones, in blocks: a later token may overwrite rows that an earlier one sees."""
        outs = []
        for start in range(0, q.shape[1], BLOCK):
            q_b, new_b = q[:, start : start + BLOCK], new.block(start)
            positions = self.new_positions(q_b.shape[1])
            parts = [store.attend(q_b, positions, self._lengths, call, new_b) for store in self._stores]
            out, added = self._merged(torch.cat(parts, dim=2), added, call)
            outs.append(out)
            self._store(new_b, (added - start).clamp(0, q_b.shape[1]))
        return torch.cat(outs, dim=1)

    def _store(self, new: Tokens, added: Tensor) -> None:
        for store in self._stores:
            store.put_last(new, self._lengths, added)
        self._lengths += added

    def reorder(self, indices: Tensor) -> None:
        """Let sequence `b` go on from what sequence `indices[b]` holds, as beam search does.

        >>> cache = DilatedKVCache(DilatedPattern.causal(64, 4), batch_size=2, num_kv_heads=4, head_dim=8)
        >>> _ = cache.attend(*torch.randn(3, 2, 5, 4, 8), lengths=torch.tensor([5, 2]))
        >>> cache.reorder(torch.tensor([1, 1]))
        >>> cache.lengths.tolist()
        [2, 2]

        Raises:
            ValueError: If the shape is not `(B,)`, or an index is not in `[0, B)`.
            TypeError: If the dtype is not int64.
        """
        indices = checked_indices(indices, self._lengths)
        if indices.shape != (self.batch_size,):
            raise ValueError(f"indices must have shape (B,)=({self.batch_size},), got {tuple(indices.shape)}")
        for x in (self._lengths, self._cut, *(x for store in self._stores for x in store.rows_held)):
            x.copy_(x.index_select(0, indices))
        self._order.copy_(self._reordered(indices))
        self._past.clear()

    def select(self, indices: Tensor) -> None:
        """Go on with the sequences `indices` alone, in that order, each as often as it occurs; their number is the new batch size.

        >>> cache = DilatedKVCache(DilatedPattern.causal(64, 4), batch_size=2, num_kv_heads=4, head_dim=8)
        >>> cache.select(torch.tensor([0, 0, 1]))
        >>> cache.batch_size
        3

        Raises:
            ValueError: If the shape is not `(new batch size,)`, or an index is not in `[0, B)`.
            TypeError: If the dtype is not int64.
        """
        indices = checked_indices(indices, self._lengths)
        if indices.dim() != 1 or indices.shape[0] < 1:
            raise ValueError(f"indices must have shape (new batch size,), at least (1,), got {tuple(indices.shape)}")
        with torch.inference_mode(False):
            self._lengths, self._cut = (x.index_select(0, indices) for x in (self._lengths, self._cut))
            self._order = self._reordered(indices)
            for store in self._stores:
                store.select(indices)
        self.batch_size = indices.shape[0]
        self._past.clear()

    def _reordered(self, indices: Tensor) -> Tensor:
        return 1_000_003 * self._order.index_select(0, indices) + indices + 1  # a hash, modulo 2 ** 64

    def crop(self, length: int | Tensor) -> None:
        """Forget the tokens of each sequence from position `length` on; a shorter sequence stays as it is.

        >>> cache = DilatedKVCache(DilatedPattern.causal(64, 4), batch_size=2, num_kv_heads=4, head_dim=8)
        >>> _ = cache.attend(*torch.randn(3, 2, 5, 4, 8))
        >>> cache.crop(3)
        >>> cache.lengths.tolist()
        [3, 3]

        The new end must be in the current segment of each branch, at the start of a segment, or among the tokens since the last
        `crop` with `records_past` set: other rows are overwritten. With a window of w tokens and g global tokens, a sequence of at
        most g + w tokens can be cut anywhere; a longer one only to g tokens or fewer, or by its last token. Every sequence is cut,
        or none. Waits for the device.

        Args:
            length: Tokens that stay: one number, or `(B,)` integers.

        Raises:
            ValueError: If a length is below 0, has the wrong shape, or ends in a segment or window that is no longer stored.
            TypeError: If it is no integer.
            NotImplementedError: If the cache holds no values, as on the meta device.
        """
        ends = checked_length(length, self._lengths)
        cut_to, cut_from = self._cut.unbind(1)
        stored = torch.where(self._lengths == cut_to, cut_from, self._lengths)
        numbers = zip(ends, self._lengths.tolist(), stored.tolist(), range(self.batch_size))
        cuts = [cut for cut in numbers if cut[0] < cut[1]]
        refusal = next(filter(None, (store.layout.why_lost(*cut) for cut in cuts for store in self._stores)), None)
        new_lengths = torch.minimum(self._lengths, torch.tensor(ends, device=self.device))
        if refusal is None:
            self._cut.copy_(torch.stack([new_lengths, stored], dim=1))
        else:
            if not self._past or bool((new_lengths < self._past[0].lengths).any()):
                raise ValueError(refusal)
            self._go_back(new_lengths)
        self._lengths.copy_(new_lengths)
        self._past.clear()

    def forget_past(self, num_tokens: int) -> None:
        """Keep only the last recorded calls that together have at least `num_tokens` tokens."""
        num_kept = 0
        for i in range(len(self._past) - 1, -1, -1):
            if num_kept >= num_tokens:
                del self._past[: i + 1]
                return
            num_kept += self._past[i].new.k.shape[1]

    def _go_back(self, new_lengths: Tensor) -> None:
        """Return to the state before the recorded calls, then store their tokens again up to `new_lengths` `(B,)`."""
        for past in reversed(self._past):
            for store, overwritten in zip(self._stores, past.stores):
                store.put_back(overwritten)
        self._lengths.copy_(self._past[0].lengths)
        for past in self._past:
            self._store(past.new, (new_lengths - self._lengths).clamp(min=0).minimum(past.added))

    def reset(self) -> None:
        """Forget everything; the memory stays allocated.

        >>> cache = DilatedKVCache(DilatedPattern.causal(64, 4), batch_size=2, num_kv_heads=4, head_dim=8)
        >>> cache.reset()
        >>> cache.lengths.tolist()
        [0, 0]
        """
        self._lengths.zero_()
        self._order.zero_()
        self._cut.fill_(-1)
        for store in self._stores:
            store.clear()
        self._past.clear()
        self._is_empty = True
