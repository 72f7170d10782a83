"""The contract of a kernel: dense attention on one box of rows, forward and backward, and what kernels share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexdilated.backends.dropout import Dropout
from flexdilated.core.bounded_cache import recent
from flexdilated.core.dispatch_key import DispatchKey
from flexdilated.core.functorch import in_no_mode
from flexdilated.core.pieces import Piece

# Kernels hold the scale in float32: what is smaller may be 0 to them. Those for GPUs do so in base 2, where what is larger may be
# infinite.
LEAST_SCALE = torch.finfo(torch.float32).tiny
MOST_SCALE = torch.finfo(torch.float32).max * math.log(2)

GRID_LIMIT = 65535  # CUDA's for the batch and head dims of a launch
NO_FUNCTIONS = "it has no score_mod or mask_mod"
ALIGNMENT = 16  # bytes per load of kernels on CUDA, which assume that every row begins aligned


class Options(NamedTuple):
    """What a kernel call needs besides its tensors.

    `ignored` is `(batch, keys)` bool, True for a key that no query may see. Ignored keys and values hold zeros.
    `band` is the smallest and the largest `key row - query row` of joined pairs; None: `is_causal` decides.
    """

    is_causal: bool
    scale: float
    ignored: Tensor | None = None
    dropout: Dropout | None = None
    band: tuple[int, int] | None = None

    def within(self, piece: Piece) -> Options:
        """The options, with the joined pairs of a piece."""
        if not piece.is_banded:
            return self._replace(is_causal=piece.high == 0)
        return self._replace(is_causal=False, band=(piece.low, piece.high))


Forward = Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, options)
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]  # (dout, q, k, v, out, lse, options)


# How a kernel takes the band of a window: as bounds of its loops, as a mask, or not at all.
Windows = Literal["bounds", "mask", "none"]


@dataclass(frozen=True)
class Kernel:
    """Dense attention on `(batch, heads, rows, D)` tensors; as many queries as keys where it is causal.

    `forward` gives `out` and `lse`, `backward` the gradients for a given `out` and `lse`: these may be the mixture's instead of
    the kernel's own, which makes the sum over all pieces the exact gradient of the mixture.
    """

    name: str
    why_not: Callable[[DispatchKey], str | None]
    run_forward: Forward
    run_backward: Backward
    head_dim_multiple: int = 1
    shares_kv: bool = True  # whether k and v may have fewer heads than q
    takes_dlse: bool = False  # whether `run_backward` takes `dlse=`, the gradient of lse or None; others get a column for it
    windows: Windows = "none"
    writes: bool = False  # whether both take `into=`, memory of any strides for out, or for `(dq, dk, dv)`
    # Imports a module whose `forward` and `backward` merge or add pieces in place, in whole `(B, N, H, D)` tensors, as
    # those of `backends/triton/launch.py`. Its `options.ignored` is `(B, N)`, and ignored keys and values are not zeroed.
    in_place: Callable[[], Any] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`out` `(batch, heads, rows, D)`; `lse` `(batch, heads, rows)`, -inf where no key reaches.

        `into`: the memory that out is written to and returned as.
        """
        if options.band is not None and options.band[0] == 0 and self._turns(q, k, options):
            (q, k, v), options = (x.flip(2) for x in (q, k, v)), _turned(options)
            out, lse = (x.flip(2) for x in self.forward(q, k, v, options))
            return out if into is None else into.copy_(out), lse
        head_dim = q.shape[-1]
        if not LEAST_SCALE <= options.scale <= MOST_SCALE:
            q, options, _ = with_positive_scale(q, options)
        writes = self.writes and into is not None and options.ignored is None and self._can_write(head_dim, into)
        if q.shape[-1] % self.head_dim_multiple or (q.shape[1] != k.shape[1] and not self.shares_kv):
            q, k, v = self._adapted(q, k, v)
        out, lse = self.run_forward(q, k, v, options, **({"into": into} if writes else {}))
        out = out if out.shape[-1] == head_dim else out[..., :head_dim]
        if options.ignored is not None:
            # Kernels disagree about rows that a mask empties (aten's CPU flash returns lse = 0): say it ourselves.
            empty = _empty_rows(options, q.shape[2])
            lse = lse.masked_fill(empty[:, None], -math.inf)
            out = out.masked_fill(empty[:, None, :, None], 0.0)
        return out if into is None or writes else into.copy_(out), lse

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        options: Options,
        into: tuple[Tensor, ...] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`dq, dk, dv` for `dout` and, where given, `dlse`; `into`: the memory that they are written to and returned as.

        In a row that no key reaches, `lse` must be +inf and `dlse` 0, as `for_backward` makes them.

        The gradient of lse needs no kernel of its own: `ds = p (dout v^T - (rowsum(dout out) - dlse))` is the usual formula with
        one more column: `dlse` in dout, -1 in out, 0 in q, k and v.
        """
        if options.band is not None and options.band[0] == 0 and self._turns(q, k, options):
            dout, q, k, v, out, lse = (x.flip(2) for x in (dout, q, k, v, out, lse))
            dlse = None if dlse is None else dlse.flip(2)
            grads = self.backward(dout, dlse, q, k, v, out=out, lse=lse, options=_turned(options))
            dq, dk, dv = (x.flip(2) for x in grads)
            return dq, dk, dv
        head_dim, kv_heads, factor = q.shape[-1], k.shape[1], 1.0
        if not LEAST_SCALE <= options.scale <= MOST_SCALE:
            q, options, factor = with_positive_scale(q, options)
        plain = factor == 1.0 and (self.shares_kv or q.shape[1] == kv_heads)
        writes = self.writes and into is not None and plain and self._can_write(head_dim, *into)
        keywords: dict[str, Any] = {**({"into": into} if writes else {}), **({"dlse": dlse} if self.takes_dlse else {})}
        if dlse is not None and not self.takes_dlse:
            q, k, v = (F.pad(x, (0, 1)) for x in (q, k, v))
            out = F.pad(out, (0, 1), value=-1.0)
            dout = torch.cat([dout, dlse[..., None].to(dout.dtype)], dim=-1)
        if q.shape[-1] % self.head_dim_multiple or (q.shape[1] != k.shape[1] and not self.shares_kv):
            q, k, v, dout, out = self._adapted(q, k, v, dout, out)
        grads = self.run_backward(dout, q, k, v, out, lse, options=options, **keywords)
        dq, dk, dv = grads if q.shape[-1] == head_dim else (x[..., :head_dim] for x in grads)
        if dk.shape[1] != kv_heads:
            dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(dim=2) for x in (dk, dv))
        dq = dq if factor == 1.0 else dq * factor
        if into is not None and not writes:
            for target, grad in zip(into, (dq, dk, dv)):
                target.copy_(grad)
            return into[0], into[1], into[2]
        return dq, dk, dv

    def _turns(self, q: Tensor, k: Tensor, options: Options) -> bool:
        """Whether a band is computed as a causal mask in reverse row order, by kernels that take no band or take it as a mask.

        A mask of 2,048 rows takes 2.7 times as long forward and 1.9 times backward (CPU, torch 2.13, float32, head dim 64).
        """
        assert options.band is not None
        return self.windows != "bounds" and is_mirrored(options.band, q.shape[2], k.shape[2])

    def _can_write(self, head_dim: int, *into: Tensor) -> bool:
        """Whether the kernel can write its results into these tensors of any strides."""
        return head_dim % self.head_dim_multiple == 0 and all(aligned(x) is x for x in into)

    def _adapted(self, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors with repeated key heads and a padded head dim, if the kernel needs either."""
        group, missing = q.shape[1] // k.shape[1], -q.shape[-1] % self.head_dim_multiple
        if group > 1 and not self.shares_kv:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        tensors = (q, k, v, *tensors)
        return tuple(F.pad(x, (0, missing)) for x in tensors) if missing else tensors


def with_positive_scale(q: Tensor, options: Options) -> tuple[Tensor, Options, float]:
    """`(q * factor, options, factor)` with equal scores and a scale that every kernel takes; the factor is 1 for a usual scale.

    aten's kernels mask scores before they scale them, or look for the largest before: a scale that is not above 0 gives NaN there.
    """
    if LEAST_SCALE <= options.scale <= MOST_SCALE:
        return q, options, 1.0
    size = abs(options.scale)
    factor = options.scale if size < LEAST_SCALE else math.copysign(1.0 if size <= MOST_SCALE else 2.0, options.scale)
    scale = 1.0 if size < LEAST_SCALE else options.scale / factor
    return q * factor, options._replace(scale=scale), factor


def is_mirrored(band: tuple[int, int], queries: int, keys: int) -> bool:
    """Whether each row sees the keys from its own row on, with as many keys as queries: a causal mask in reverse row order."""
    return band[0] == 0 and band[1] >= keys - 1 and queries == keys


def _turned(options: Options) -> Options:
    """The options of a mirrored band, for rows in reverse order."""
    ignored = None if options.ignored is None else options.ignored.flip(1)
    return options._replace(is_causal=True, band=None, ignored=ignored)


def _empty_rows(options: Options, rows: int) -> Tensor:
    """The queries that see no key: `(batch, rows)`, or `(batch, 1)` where all see the same keys."""
    assert options.ignored is not None
    visible = ~options.ignored
    if options.is_causal:
        return visible.cumsum(dim=1) == 0
    if options.band is None:
        return ~visible.any(dim=1, keepdim=True)
    before = F.pad(visible.cumsum(dim=1), (1, 0))  # (batch, keys + 1): the visible keys before each
    row = torch.arange(rows, device=visible.device)
    first, end = ((row + bound).clamp(0, visible.shape[1]) for bound in (options.band[0], options.band[1] + 1))
    return before[:, end] <= before[:, first]


def bias_of(options: Options, q: Tensor, keys: int) -> Tensor | None:
    """Ignored keys and the band as an additive mask `(batch or 1, 1, rows or 1, keys)` in the dtype of the queries."""
    if options.band is not None:
        make = _band_bias if q.device.type == "cpu" else _band_bias.function  # memory of a CUDA graph must not be kept
        bias = make(options.band, q.shape[2], keys, q.dtype, q.device)
    elif options.ignored is not None:
        bias = torch.zeros((1, 1, 1, keys), dtype=q.dtype, device=q.device)
    else:
        return None
    # Contiguous whatever the strides of `ignored`: the CPU kernel of older torch reads a mask as if its last stride were 1.
    return bias if options.ignored is None else bias.masked_fill(options.ignored[:, None, None, :], -math.inf)


@recent(size=lambda bias, *arguments: bias.nbytes)
@in_no_mode
def _band_bias(band: tuple[int, int], rows: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`(1, 1, rows, keys)`: 0 for the pairs of a band, -inf for others."""
    apart = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None]
    outside = (apart < band[0]) | (apart > band[1])
    return torch.zeros((1, 1, rows, keys), dtype=dtype, device=device).masked_fill_(outside, -math.inf)


def aligned(x: Tensor) -> Tensor:
    """x itself where all of its rows begin aligned, else a copy."""
    steps = (x.data_ptr(), *(stride * x.element_size() for size, stride in zip(x.shape[:-1], x.stride()[:-1]) if size > 1))
    if x.stride(-1) == 1 and all(step % ALIGNMENT == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def disabled(flag: str) -> str | None:
    """Why the user has switched a kernel off (`torch.nn.attention.sdpa_kernel`), or None."""
    if torch.compiler.is_compiling():  # the switches cannot be traced; the kernel is chosen when the compiled graph runs
        return None
    if getattr(torch.backends.cuda, flag)():
        return None
    return "it is switched off (torch.nn.attention.sdpa_kernel)"
