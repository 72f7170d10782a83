"""What a call asks of an engine, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexdilated.backends.hardware import Hardware, detect


@dataclass(frozen=True)
class Request:
    """One attention call, by everything that an engine's choice depends on.

    Args:
        hardware: Where it runs.
        dtype: Of q, k and v.
        head_dim: Elements per head.
        group: Query heads per key/value head.
        masked: Whether a key padding mask is given.
        dropout: Whether attention dropout is active.
        modified: Whether a score or mask function is given.
        differentiable: Whether a gradient may be asked for.
        transformed: Whether torch.func or forward-mode differentiation is at work.
        wants_lse: Whether lse is returned.
        num_tokens: Tokens per sequence, or of all packed documents.
        dynamic: Whether that number is a symbol, in compiled code that is to hold for several.
    """

    hardware: Hardware
    dtype: torch.dtype
    head_dim: int
    group: int = 1
    masked: bool = False
    dropout: bool = False
    modified: bool = False
    differentiable: bool = False
    transformed: bool = False
    wants_lse: bool = False
    num_tokens: int = 0
    dynamic: bool = False

    @classmethod
    def of(cls, q: Tensor, k: Tensor, **asked: bool) -> Request:
        """What a call with queries `(B, N, H, D)` and keys `(B, N, Hkv, D)` asks, beside their sizes."""
        return cls(detect(q.device), q.dtype, q.shape[3], q.shape[2] // k.shape[2], num_tokens=q.shape[1], **asked)
