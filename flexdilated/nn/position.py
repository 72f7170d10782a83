"""Relative positions for queries and keys: rotary, and xPos, which adds a decay with distance."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flexdilated.core.pattern import MAX_LENGTH, DilatedPattern
from flexdilated.core.tracing import writes_onnx
from flexdilated.distributed.sharding import replicated_like

# Leaves room for queries and keys of up to 160 in float16, whose largest number is 65504.
FLOAT16_LOG_GROWTH = 6.0
# Of float32, whose largest number is exp(88).
MAX_LOG_GROWTH = 80.0
# -log(zeta) of the pair that decays fastest, the first.
LOG_LARGEST_DECAY = math.log(1.4 / 0.4)
SCALE_BASE = 512.0  # the default of xPos, which serves segments of up to some 65,000 tokens


def scale_base_for(num_tokens: int, scale_base: float = SCALE_BASE) -> float:
    """The one that is wanted, or the slower decay that segments as long as a longer sequence need."""
    return max(scale_base, num_tokens / 64)


class Rotation(NamedTuple):
    """What to multiply queries and keys with at each position: `(N, 1, D / 2)` each, computed once for all layers, float64 for
    queries and keys in float64 and else float32; `(B, N, 1, D / 2)` where the rows of a batch stand at different positions.

    >>> q, k = Rotary(8)(torch.arange(64)).apply(*torch.randn(2, 1, 64, 4, 8))
    >>> q.shape
    torch.Size([1, 64, 4, 8])

    `log_growth` bounds the natural log of the largest factor.
    """

    q_cos: Tensor
    q_sin: Tensor
    k_cos: Tensor
    k_sin: Tensor
    log_growth: float = 0.0

    def apply(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q `(B, N, H, D)` and k `(B, N, Hkv, D)`, turned in the dtype of the rotation and returned in their own.

        Raises:
            ValueError: If the rotation is for another number of tokens or head dim, would leave the range of float16, or is in
                float32 where q is in float64.
        """
        expected = (self.q_cos.shape[-3], 2 * self.q_cos.shape[-1])
        if (q.shape[1], q.shape[3]) != expected:
            raise ValueError(f"rotation must be for the N and D of q={(q.shape[1], q.shape[3])}, got {expected}")
        if q.dtype == torch.float64 and self.q_cos.dtype != torch.float64:
            raise ValueError(
                f"rotation must be in float64 for q.dtype=float64, got {str(self.q_cos.dtype).removeprefix('torch.')}; "
                "give dtype=torch.float64 to the position module's call"
            )
        if q.dtype == torch.float16 and self.log_growth > FLOAT16_LOG_GROWTH:
            raise ValueError(
                f"rotation must stay in the range of q.dtype=float16, got factors up to exp({self.log_growth:.0f}); "
                "use bfloat16, float32, or rotary positions"
            )
        # No-ops on plain tensors; DTensors, whose heads may be sharded, mix with nothing else.
        q_cos, q_sin = replicated_like(q, self.q_cos, self.q_sin)
        k_cos, k_sin = replicated_like(k, self.k_cos, self.k_sin)
        return _turn(q, q_cos, q_sin), _turn(k, k_cos, k_sin)


class Rotary(nn.Module):
    """Rotary positions: elements `i` and `i + D / 2` are turned together by `position * base ** (-2 i / D)`.

    >>> Rotary(8)(torch.arange(64)).q_cos.shape
    torch.Size([64, 1, 4])

    The score of a query and a key depends on their distance alone. Angles are computed in float64, for any length.
    Source: RoFormer, arXiv 2104.09864, section 3.2; pairs of elements as in GPT-NeoX and Llama.

    Args:
        head_dim: Elements per head, even.
        base: The longest wavelength is about `2 pi base` tokens.

    Raises:
        ValueError: If the head dim is odd or the base is not above 1.
    """

    def __init__(self, head_dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim must be even and at least 2, got {head_dim}")
        if not base > 1.0:
            raise ValueError(f"base must be above 1, got {base}")
        self.head_dim, self.base = head_dim, base

    def forward(self, positions: Tensor, *, dtype: torch.dtype | None = None) -> Rotation:
        """The rotation of `(N,)` or `(B, N)` positions, for queries and keys in `dtype`, by default torch's default dtype."""
        angles = rotary_angles if writes_onnx() else _angles_op
        cos, sin = angles(positions, self.head_dim, self.base, _is_double(dtype))
        return Rotation(cos, sin, cos, sin)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={self.base}"


class XPos(Rotary):
    """Rotary positions whose scores also decay with distance: pair `i` by `zeta_i ** (distance / scale_base)`.

    >>> q, k = XPos(8, DilatedPattern.causal(64, 4))(torch.arange(64)).apply(*torch.randn(2, 1, 64, 4, 8))
    >>> q.shape
    torch.Size([1, 64, 4, 8])

    `zeta_i = (2 i / D + 0.4) / 1.4`. Queries are multiplied by `zeta ** (p / scale_base)`, keys divided by it. To avoid overflow,
    positions are counted from the middle of the longest segment if the other segments divide it and there is neither window nor
    global tokens. Otherwise the decay over the whole sequence must be in the range of float32.
    Source: xPos, arXiv 2212.10554, section 3.2.

    Args:
        head_dim: Elements per head, even.
        pattern: The pattern that the scores are used under.
        base: As in `Rotary`.
        scale_base: Tokens over which the decay is `zeta`.

    Raises:
        ValueError: As `Rotary`, or if `scale_base` is not above 0.
        TypeError: If the pattern is no `DilatedPattern`.
    """

    def __init__(self, head_dim: int, pattern: DilatedPattern, *, base: float = 10000.0, scale_base: float = SCALE_BASE) -> None:
        super().__init__(head_dim, base=base)
        if not isinstance(pattern, DilatedPattern):
            raise TypeError(f"pattern must be a DilatedPattern, got {type(pattern).__name__}")
        if not scale_base > 0.0:
            raise ValueError(f"scale_base must be above 0, got {scale_base}")
        segments, near = pattern.split("XPos")
        lengths = [length for length, _ in segments]
        longest = max(lengths, default=1)
        nested = not near and all(longest % length == 0 for length in lengths)
        self.scale_base, self.period = scale_base, longest if nested else None
        # No segment crosses a multiple of `common_period`. Pairs of windows and global tokens cross every position, so the period
        # then exceeds any sequence.
        self.common_period = MAX_LENGTH if near else math.lcm(*lengths)
        self._has_near = bool(near)

    def forward(
        self, positions: Tensor, *, length: int | None = None, cu_seqlens: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Rotation:
        """The rotation of `(N,)` positions, with the decay in it.

        A shard has the rotation of the whole sequence if `length`, and `cu_seqlens` of packed documents, describe the whole.

        Args:
            positions: Counted from the beginning of the sequence, or of each document.
            length: Tokens of the whole sequence, from position 0. Default: these positions are the whole.
            cu_seqlens: `(num_documents + 1,)` boundaries of documents packed in the whole sequence; comes with `length`.
            dtype: Of the queries and keys. Default: torch's default dtype.

        Raises:
            ValueError: If the decay over the reach of the positions leaves float32, or the whole is described in part.
        """
        if length is None and cu_seqlens is not None:
            raise ValueError("cu_seqlens must come with length, got no length; positions alone are taken as the whole")
        if length is not None and length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        num_tokens = positions.shape[0] if length is None else length
        reach = num_tokens if self.period is None else min(num_tokens, self.period)
        log_growth = self._log_growth(reach)
        if log_growth > MAX_LOG_GROWTH:
            least = math.ceil(reach / (2 * MAX_LOG_GROWTH) * LOG_LARGEST_DECAY)
            where = "with a window or global tokens in a sequence of" if self._has_near else "where segments reach over"
            raise ValueError(f"scale_base must be at least {least} {where} {reach} tokens, got {self.scale_base}")
        within = positions if self.period is None else positions % self.period
        if length is None:
            return self._rotation(positions, within - (within.min() + within.max()) // 2, log_growth, dtype)
        last_position: Tensor | int = reach - 1
        if cu_seqlens is not None and cu_seqlens.numel() > 1:  # fewer are refused where they are used
            last_position = cu_seqlens.to(positions.device).diff().max().clamp(max=reach) - 1
        return self._rotation(positions, within - last_position // 2, log_growth, dtype)

    def decode(self, positions: Tensor, *, max_length: int | None = None, dtype: torch.dtype | None = None) -> Rotation:
        """The rotation of `(B, N)` positions, such that keys rotated in one call meet queries rotated in any other.

        Positions are counted from the middle of the least common multiple of the segment lengths, or of `max_length` if less.

        Args:
            positions: Below `max_length`.
            max_length: Largest number of positions. Default: no limit.
            dtype: Of the queries and keys. Default: torch's default dtype.

        Raises:
            ValueError: If the decay over that many positions leaves float32.
        """
        reach = self.common_period if max_length is None else min(self.common_period, max_length)
        log_growth = self._log_growth(reach)
        if log_growth > MAX_LOG_GROWTH:
            limit = int(2 * MAX_LOG_GROWTH * self.scale_base / LOG_LARGEST_DECAY)
            lengths = (
                "a window or global tokens"
                if self._has_near
                else f"segment lengths whose least common multiple is {self.common_period}"
            )
            raise ValueError(
                f"max_length must be at most {limit} in decoding with scale_base={self.scale_base} and {lengths}, got "
                f"{max_length}; use rotary positions"
            )
        within = positions % reach if reach == self.common_period else positions
        return self._rotation(positions, within - reach // 2, log_growth, dtype)

    def _log_growth(self, reach: int) -> float:
        return reach / 2 / self.scale_base * LOG_LARGEST_DECAY

    def _rotation(self, positions: Tensor, centred: Tensor, log_growth: float, dtype: torch.dtype | None) -> Rotation:
        cos, sin, *_ = super().forward(positions, dtype=dtype)
        decay = (xpos_decay if writes_onnx() else _decay_op)(centred, self.head_dim, self.scale_base, cos.dtype == torch.float64)
        return Rotation(cos * decay, sin * decay, cos / decay, sin / decay, log_growth)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale_base={self.scale_base}"


def token_positions(num_tokens: int, cu_seqlens: Tensor | None, device: torch.device, start: int = 0) -> Tensor:
    """`(N,)` positions of the tokens `start .. start + num_tokens`, counted from the beginning of their document.

    `cu_seqlens` are the borders of the documents packed in the whole sequence; None: it is one.
    """
    positions = torch.arange(start, start + num_tokens, device=device)
    if cu_seqlens is None or cu_seqlens.numel() == 0 or (cu_seqlens.is_meta and device.type != "meta"):
        return positions  # an empty tensor, or one without values, is refused where it is used
    starts = cu_seqlens.to(device)
    return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]


def _is_double(dtype: torch.dtype | None) -> bool:
    """Whether queries and keys of a dtype are turned in float64, not float32, which holds any narrower one with room to spare.

    Operators take this and no dtype: packages that AOTInductor of torch 2.9 makes hand another dtype on than they were given.
    """
    return (torch.get_default_dtype() if dtype is None else dtype) == torch.float64


def _dtype_of(is_double: bool) -> torch.dtype:
    return torch.float64 if is_double else torch.float32


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    lower, upper = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([lower * cos - upper * sin, lower * sin + upper * cos], dim=-1).to(x.dtype)


# Opaque operators: inductor would otherwise inline these tables where they are read, and compute a cosine for every element of
# every head of every layer, forward and backward (a ninth of a small model's training step).


def rotary_angles(positions: Tensor, head_dim: int, base: float, is_double: bool) -> tuple[Tensor, Tensor]:
    """Cosine and sine, `(..., N, 1, D / 2)`, of `positions` `(..., N)` times the frequencies."""
    positions = positions.contiguous()  # and so what becomes of them, as compilers are told
    exact = torch.float32 if positions.device.type == "mps" else torch.float64  # MPS has no float64
    pairs = torch.arange(0, head_dim, 2, dtype=exact, device=positions.device)
    angle = positions.to(exact)[..., None, None] * base ** (-pairs / head_dim)
    dtype = _dtype_of(is_double)
    return torch.cos(angle).to(dtype), torch.sin(angle).to(dtype)


def xpos_decay(positions: Tensor, head_dim: int, scale_base: float, is_double: bool) -> Tensor:
    """`zeta ** (positions / scale_base)`, `(..., N, 1, D / 2)`."""
    positions, dtype = positions.contiguous(), _dtype_of(is_double)
    pairs = torch.arange(0, head_dim, 2, dtype=dtype, device=positions.device)
    zeta = (pairs / head_dim + 0.4) / 1.4
    return zeta ** (positions.to(dtype)[..., None, None] / scale_base)


_angles_op = torch.library.custom_op("flexdilated::rotary_angles", rotary_angles, mutates_args=())
_decay_op = torch.library.custom_op("flexdilated::xpos_decay", xpos_decay, mutates_args=())


@_angles_op.register_fake
def _(positions: Tensor, head_dim: int, base: float, is_double: bool) -> tuple[Tensor, Tensor]:
    shape, dtype = (*positions.shape, 1, head_dim // 2), _dtype_of(is_double)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


@_decay_op.register_fake
def _(positions: Tensor, head_dim: int, scale_base: float, is_double: bool) -> Tensor:
    return positions.new_empty((*positions.shape, 1, head_dim // 2), dtype=_dtype_of(is_double))
