"""What a call asks of an engine, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexdilated.core.hardware import Hardware, detect


@dataclass(frozen=True)
class Request:
    """One attention call, by everything that an engine's choice depends on."""

    hardware: Hardware
    dtype: torch.dtype  # of q, k and v
    head_dim: int
    group: int = 1  # query heads per key/value head
    masked: bool = False  # by a key padding mask
    dropout: bool = False
    modified: bool = False  # by a score or mask function
    differentiable: bool = False  # a gradient may be asked for
    transformed: bool = False  # torch.func or forward-mode differentiation is at work
    wants_lse: bool = False
    dlse: bool = False  # a backward is asked for, with a gradient of lse
    packed: bool = False  # documents, whose lengths change from call to call
    num_tokens: int = 0  # per sequence, or of all packed documents
    dynamic: bool = False  # that number is a symbol, in compiled code that is to hold for several

    @classmethod
    def of(cls, q: Tensor, k: Tensor, **asked: bool) -> Request:
        """What a call with queries `(B, N, H, D)` and keys `(B, N, Hkv, D)` asks, beside their sizes."""
        return cls(detect(q.device), q.dtype, q.shape[3], q.shape[2] // k.shape[2], num_tokens=q.shape[1], **asked)
