"""The bounded key/value cache. Long: one class, what it can do and what it refuses.

Causal decoding in memory that does not grow with the context.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.attention import attend
from flexdilated.backends import BACKENDS
from flexdilated.backends.hardware import holds_values, without_autocast
from flexdilated.backends.transforms import is_transformed
from flexdilated.call import DTYPES, Call, check_dense, check_scale
from flexdilated.decode.store import BLOCK, Overwritten, Store, Tokens, marked
from flexdilated.pattern import DilatedPattern, is_integer


class Past(NamedTuple):
    """One call of `attend`: the state before it, and what it stored. `lengths`, `added` `(B,)`."""

    lengths: Tensor
    stores: tuple[Overwritten, ...]
    new: Tokens
    added: Tensor


class DilatedKVCache:
    """The keys and values that causal dilated attention can still reach: of each branch and head, those of the current segment.

    The key of position `p` lies in row `(p % w) // r` of its branch, and the next segment overwrites it: `sum_i ceil(w_i / r_i)`
    rows per head (under `heads="grouped"` those of the head's own branch), allocated once, whatever the length of the context.
    A token attends, per branch and head that keeps it, to the rows of its own segment; all branches share one softmax, which is
    their mixture by log-sum-exp. A token that no branch of a head keeps gives 0 there, as in `dilated_attention`.

    A key or value that is not finite in some element is stored as a mark: the tokens that see it give NaN in that head, and no
    other output changes. Keys and values are attended to in the dtype of the cache, whatever autocast says.

    Positions live in tensors: under `torch.compile(fullgraph=True)` a step of one size compiles once. For inference: no gradients.
    Source: LongNet, arXiv 2307.02486, section 2; the mixture as one softmax over the multiset union of the branches' keys.

    Args:
        pattern: Which positions attend to which.
        batch_size: Sequences decoded side by side, each at its own length.
        num_kv_heads: Key/value heads.
        head_dim: Elements per head.
        max_length: Positions that will be reached at most; longer segments then take no more rows than that. Default: any number.
        first_head: Index in the model of the first key/value head held here, where heads are shared out over ranks.
        total_kv_heads: Key/value heads of the whole model, by which heads find their offsets. Default: all are held here.
        dtype: Of keys and values. Default: torch's default dtype.
        device: Where they lie.

    Raises:
        ValueError: If a size is below 1, or the pattern has more groups of heads than there are heads.
        TypeError: If the pattern, a size or the dtype has the wrong type.
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
    ) -> None:
        if not isinstance(pattern, DilatedPattern):
            raise TypeError(f"pattern must be a DilatedPattern, got {type(pattern).__name__}")
        sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, value in (sizes if max_length is None else sizes | {"max_length": max_length}).items():
            if not is_integer(value):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        total = num_kv_heads if total_kv_heads is None else total_kv_heads
        for name, value in (("first_head", first_head), ("total_kv_heads", total)):
            if not is_integer(value):
                raise TypeError(f"{name} must be an integer, got {value!r}")
        if not 0 <= first_head <= total - num_kv_heads:
            raise ValueError(
                f"first_head must leave room for num_kv_heads={num_kv_heads} of total_kv_heads={total} heads, got {first_head}"
            )
        pattern.check_heads(total)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be float64, float32, bfloat16 or float16, got {dtype}")
        refusal = cache_refusal(pattern, max_length)
        if refusal is not None:
            raise NotImplementedError(refusal)
        self.pattern, self.max_length = pattern, max_length
        self.batch_size, self.num_kv_heads, self.head_dim, self.dtype = batch_size, num_kv_heads, head_dim, dtype
        self.first_head, self.total_kv_heads = first_head, total
        self.records_past = False  # whether `crop` can go back to before the calls that follow, whatever they overwrite
        self._past: list[Past] = []
        self._is_empty = True
        branches = range(len(pattern.branches))
        runs = [(i,) for i in branches] if pattern.heads == "grouped" else [tuple(branches)]
        with torch.inference_mode(False):  # what is allocated inside could not be written to outside
            self._lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
            like = torch.empty(batch_size, 0, head_dim, dtype=dtype, device=self.device)
            heads = range(first_head, first_head + num_kv_heads)
            held = [branches for branches in runs if any(head in heads for head in pattern.head_range(branches[0], total))]
            self._stores = tuple(Store(pattern, branches, heads, total, max_length, like) for branches in held)

    @property
    def lengths(self) -> Tensor:
        """`(B,)` int64: the tokens seen of each sequence, which is the position of the next one."""
        return self._lengths.clone()

    @property
    def device(self) -> torch.device:
        """Where keys and values lie."""
        return self._lengths.device

    @property
    def rows_per_head(self) -> tuple[int, ...]:
        """The rows allocated for each key/value head."""
        return tuple(sum(store.rows) for store in self._stores for _ in store.heads)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values allocated."""
        return sum(store.k.nbytes + store.v.nbytes for store in self._stores)

    def new_positions(self, num_tokens: int) -> Tensor:
        """`(B, T)` int64: the positions of the next `num_tokens` tokens of each sequence."""
        return self._lengths[:, None] + torch.arange(num_tokens, device=self.device)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None, scale: float | None = None, backend: str = "auto"
    ) -> Tensor:
        """The causal attention of the next tokens of each sequence, whose keys and values are then stored.

        Row `t` equals row `lengths + t` of `dilated_attention(..., is_causal=True)` over the whole sequence, to rounding. Chunks
        may have any size and cross any border of segments.

        Args:
            q: Queries of the new tokens, `(B, T, H, D)`, `H` a multiple of `num_kv_heads`.
            k: Their keys, `(B, T, num_kv_heads, D)`, in the dtype of the cache, as are q and v.
            v: Their values, the shape of k.
            lengths: `(B,)` int64, in `[0, T]`: how many of the T tokens a sequence has; what follows is padding, which is not
                stored and gives 0. Default: all T.
            scale: Multiplies `q @ k^T`. Default: `D ** -0.5`.
            backend: Engine for the first chunk of an empty cache, if longer than one token; later chunks use
                `scaled_dot_product_attention`.

        Returns:
            `out` `(B, T, H, D)` in the dtype of q.

        Raises:
            ValueError: If a shape, a device, the scale or the name of the backend is wrong.
            TypeError: If a dtype is wrong.
            NotImplementedError: If a gradient is asked for.
            RuntimeError: If a sequence grows beyond `max_length`.
        """
        scale = check_scale(scale, self.dtype)
        self._check(q, k, v, lengths)
        if backend != "auto" and backend not in BACKENDS:
            raise ValueError(f"backend must be one of {('auto', *BACKENDS)}, got {backend!r}")
        with without_autocast(q.device):  # the dtype is that of the cache
            return self._attend(q, k, v, lengths, scale, backend)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: float | None, backend: str) -> Tensor:
        num_tokens = q.shape[1]
        added = torch.full_like(self._lengths, num_tokens) if lengths is None else lengths
        if self.max_length is not None:
            torch._assert_async(
                (self._lengths + added <= self.max_length).all(), f"lengths must stay within max_length={self.max_length}"
            )
        is_real = None
        if lengths is not None:
            is_real = torch.arange(num_tokens, device=q.device) < lengths[:, None]  # (B, T)
            k, v = (x.masked_fill(~is_real[..., None, None], 0.0) for x in (k, v))  # a NaN in the padding stays there
        new = marked(k, v)
        past = self._state_before(new, added) if self.records_past else None
        if past is None and self._past:
            self._past.clear()  # what it knows is no longer what came last
        if num_tokens == 1:
            out = self._attend_one(q, new, added, scale)
        elif self._is_empty:
            call = Call(self.pattern, True, scale, backend=backend, first_head=self.first_head, num_heads=self.total_kv_heads)
            out = attend(q, new.k, new.v, call)[0]
            if not new.is_plain:
                sees_mark = torch.cat([store.first_marks(new) for store in self._stores], dim=1)  # (B, Hkv, T)
                out = out.masked_fill(sees_mark.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 2)[..., None], math.nan)
            self._store(new, added)
        else:
            out = self._attend_blocks(q, new, added, scale)
        self._is_empty = False
        if past is not None:
            self._past.append(past)
        return out if is_real is None else out.masked_fill(~is_real[..., None, None], 0.0)

    def _state_before(self, new: Tokens, added: Tensor) -> Past:
        if torch.compiler.is_compiling():
            raise NotImplementedError("records_past must be False under torch.compile, got True: its list grows with every call")
        positions = self.new_positions(new.k.shape[1])
        return Past(self.lengths, tuple(store.overwritten(positions) for store in self._stores), new, added)

    def _attend_one(self, q: Tensor, new: Tokens, added: Tensor, scale: float | None) -> Tensor:
        """One token per sequence, stored first: its own row then needs no copy of the others to stand beside them."""
        positions = self.new_positions(1)  # (B, 1)
        for store in self._stores:
            store.put(new, positions[:, 0], added > 0)
        # Where nothing was added the output is padding, whatever is seen.
        parts = [store.attend(q, positions, self._lengths + added, scale) for store in self._stores]
        self._lengths += added  # last: what a kernel refuses has not been seen
        return torch.cat(parts, dim=2)

    def _attend_blocks(self, q: Tensor, new: Tokens, added: Tensor, scale: float | None) -> Tensor:
        """Several tokens behind stored ones, in blocks: a later token may overwrite what an earlier one sees."""
        outs = []
        for start in range(0, q.shape[1], BLOCK):
            q_b, new_b = q[:, start : start + BLOCK], new.block(start)
            positions = self.new_positions(q_b.shape[1])
            outs.append(torch.cat([store.attend(q_b, positions, self._lengths, scale, new_b) for store in self._stores], dim=2))
            self._store(new_b, (added - start).clamp(0, q_b.shape[1]))
        return torch.cat(outs, dim=1)

    def _store(self, new: Tokens, added: Tensor) -> None:
        for store in self._stores:
            store.put_last(new, self._lengths, added)
        self._lengths += added

    def reorder(self, indices: Tensor) -> None:
        """Let sequence `b` go on from what sequence `indices[b]` holds, as beam search does.

        Args:
            indices: `(B,)` int64 in `[0, B)`; one may occur several times.

        Raises:
            ValueError: If the shape is wrong or an index is out of range.
            TypeError: If the dtype is not int64.
        """
        if isinstance(indices, Tensor) and indices.dtype == torch.int64 and indices.shape != (self.batch_size,):
            raise ValueError(f"indices must have shape (B,)=({self.batch_size},), got {tuple(indices.shape)}")
        indices = self._checked(indices)
        tensors = [self._lengths, *(x for store in self._stores for x in (*store.rows_held, store.held))]
        for x in tensors:
            x.copy_(x.index_select(0, indices))
        self._past.clear()

    def select(self, indices: Tensor) -> None:
        """Go on with the sequences `indices` alone, in that order, each as often as it occurs; their number is the new batch size.

        Allocates anew; `reorder` does not.

        Args:
            indices: `(new batch size,)` int64 in `[0, B)`, at least one.

        Raises:
            ValueError: If the shape is wrong or an index is out of range.
            TypeError: If the dtype is not int64.
        """
        if isinstance(indices, Tensor) and (indices.dim() != 1 or indices.shape[0] < 1):
            raise ValueError(f"indices must have shape (new batch size,), at least (1,), got {tuple(indices.shape)}")
        indices = self._checked(indices)
        with torch.inference_mode(False):
            self._lengths = self._lengths.index_select(0, indices)
            for store in self._stores:
                store.select(indices)
        self.batch_size = indices.shape[0]
        self._past.clear()

    def _checked(self, indices: Tensor) -> Tensor:
        """Indices of sequences, on the cache's device."""
        if not isinstance(indices, Tensor) or indices.dtype != torch.int64:
            got = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
            raise TypeError(f"indices must be int64, got {got}")
        reads = not torch.compiler.is_compiling() and holds_values(indices)
        if reads and not bool(((indices >= 0) & (indices < self.batch_size)).all()):
            raise ValueError(f"indices must be in [0, B={self.batch_size}), got {indices.tolist()}")
        return indices.to(self.device)

    def crop(self, length: int | Tensor) -> None:
        """Forget the tokens of each sequence from position `length` on; a shorter sequence stays as it is.

        What a branch stored of an earlier segment is gone, so the new end must lie in the segment that each branch holds, or at
        the beginning of a segment, where nothing is needed; or at a token of the calls since `records_past` was set or the last
        `crop`, whichever is later: what those overwrote is kept until then. Either every sequence is cut or none. Waits for the
        device.

        Args:
            length: Tokens that stay: one number, or `(B,)` integers.

        Raises:
            ValueError: If a length is below 0, has the wrong shape, or ends in a segment that is no longer stored.
            TypeError: If it is no integer.
            NotImplementedError: If the cache holds no values, as on the meta device.
        """
        if not holds_values(self._lengths) or (isinstance(length, Tensor) and not holds_values(length)):
            raise NotImplementedError("length must be that of a cache with values, got a meta or fake tensor: its end is read")
        if isinstance(length, Tensor):
            if length.is_floating_point() or length.is_complex() or length.dtype == torch.bool:
                raise TypeError(f"length must hold integers, got {length.dtype}")
            if length.shape != (self.batch_size,):
                raise ValueError(f"length must have shape (B,)=({self.batch_size},), got {tuple(length.shape)}")
            wanted = length.tolist()
        else:
            if not is_integer(length):
                raise TypeError(f"length must be an integer or a tensor, got {length!r}")
            wanted = [length] * self.batch_size
        lengths = self._lengths.tolist()
        if min(wanted) < 0:
            raise ValueError(f"length must be at least 0, got {min(wanted)}")
        refusals = [self._why_lost(b, new, old) for b, (new, old) in enumerate(zip(wanted, lengths)) if new < old]
        refusal = next(filter(None, refusals), None)
        kept = torch.minimum(self._lengths, torch.tensor(wanted, device=self.device))
        if refusal is not None:
            if not self._past or bool((kept < self._past[0].lengths).any()):
                raise ValueError(refusal)
            self._go_back(kept)
        self._lengths.copy_(kept)
        self._past.clear()

    def forget_past(self, num_tokens: int) -> None:
        """Of the calls that are recorded, keep the last that together have `num_tokens` tokens, or more."""
        kept = 0
        for i in range(len(self._past) - 1, -1, -1):
            if kept >= num_tokens:
                del self._past[: i + 1]
                return
            kept += self._past[i].new.k.shape[1]

    def _go_back(self, kept: Tensor) -> None:
        """To before the calls that are recorded, and then to `kept` `(B,)` tokens, by storing theirs again."""
        for past in reversed(self._past):
            for store, overwritten in zip(self._stores, past.stores):
                store.put_back(overwritten)
        self._lengths.copy_(self._past[0].lengths)
        for past in self._past:
            self._store(past.new, (kept - self._lengths).clamp(min=0).minimum(past.added))

    def _why_lost(self, sequence: int, new: int, old: int) -> str | None:
        """Why a sequence cannot be cut to `new` tokens by its stored rows alone; None if it can."""
        for store in self._stores:
            for (w, _), held in zip(store.branches, store.held[sequence].tolist()):
                if new % w and held != new // w:
                    return (
                        f"length must end in the segment that is stored, or where one begins, got {new} of {old} tokens in "
                        f"sequence {sequence}: segment {new // w} of segment_length={w} is overwritten; decode that sequence anew"
                    )
        return None

    def reset(self) -> None:
        """Forget everything; the memory stays allocated."""
        self._lengths.zero_()
        for store in self._stores:
            for x in store.rows_held:
                x.zero_()
            store.held.fill_(-1)
        self._past.clear()
        self._is_empty = True

    def _check(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> None:
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_dense(name, x, nested="pad the sequences and give their lengths")
            if type(x).__name__ == "DTensor":
                raise NotImplementedError(
                    f"{name} must be a plain tensor, got a DTensor; a cache holds one rank's heads: use to_local()"
                )
            if x.dim() != 4:
                raise ValueError(f"{name} must have shape (B, T, H, D), got {tuple(x.shape)}")
            if (x.shape[0], x.shape[3]) != (self.batch_size, self.head_dim):
                raise ValueError(f"{name} must match the cache in B and D={(self.batch_size, self.head_dim)}, got {tuple(x.shape)}")
            if x.dtype != self.dtype:
                raise TypeError(f"{name} must have the dtype of the cache={self.dtype}, got {x.dtype}")
            if x.device != self.device:
                raise ValueError(f"{name} must be on the device of the cache={self.device}, got {x.device}")
            if x.requires_grad and torch.is_grad_enabled():
                raise NotImplementedError(f"{name} must not require a gradient: the cache is for inference; use torch.no_grad()")
        if is_transformed(q, k, v):
            raise NotImplementedError(
                "q, k and v must come without torch.func and forward-mode differentiation, got a call under one: the cache is for "
                "inference; use dilated_attention"
            )
        if q.shape[1] < 1:
            raise ValueError(f"q must have at least one token, got shape {tuple(q.shape)}")
        if q.shape[2] < 1 or q.shape[2] % self.num_kv_heads:
            raise ValueError(f"q must have a multiple of num_kv_heads={self.num_kv_heads} heads, got {q.shape[2]}")
        for name, x in (("k", k), ("v", v)):
            if (x.shape[1], x.shape[2]) != (q.shape[1], self.num_kv_heads):
                raise ValueError(f"{name} must have T={q.shape[1]} tokens of {self.num_kv_heads} heads, got {tuple(x.shape)}")
        if lengths is None:
            return
        if not isinstance(lengths, Tensor):
            raise TypeError(f"lengths must be a tensor, got {type(lengths).__name__}")
        if lengths.dtype != torch.int64:
            raise TypeError(f"lengths must be int64, got {lengths.dtype}")
        if lengths.shape != (self.batch_size,):
            raise ValueError(f"lengths must have shape (B,)=({self.batch_size},), got {tuple(lengths.shape)}")
        if lengths.device != self.device:
            raise ValueError(f"lengths must be on the device of the cache={self.device}, got {lengths.device}")
        inside = (lengths >= 0) & (lengths <= q.shape[1])
        if lengths.device.type != "cpu" or torch.compiler.is_compiling():  # to read it would wait for the device at every step
            torch._assert_async(inside.all(), f"lengths must be in [0, T={q.shape[1]}]")
        elif holds_values(lengths) and not bool(inside.all()):
            raise ValueError(f"lengths must be in [0, T={q.shape[1]}], got {lengths.tolist()}")


def cache_refusal(pattern: DilatedPattern, max_length: int | None) -> str | None:
    """Why a causal pattern cannot be decoded token by token; None if it can."""
    for w, r in pattern.branches:
        if pattern.zero_padding and w % r and (max_length is None or max_length > w):
            return (
                f"pattern must not shift positions in decoding, got zero_padding=True and dilation rate {r} of segment length {w}; "
                "use rates that divide their segments, or zero_padding=False"
            )
    return None
