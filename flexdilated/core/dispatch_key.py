"""What a call asks of a backend, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexdilated.core.hardware import Hardware, detect
from flexdilated.core.pattern import DilatedPattern


@dataclass(frozen=True)
class DispatchKey:
    """One attention call, by everything that a backend's choice depends on.

    The backend's operator chooses its kernel when it runs, by a second key that `of` makes from the tensors alone. The last fields
    are no arguments of operators: a graph would then be valid for one grad mode only.
    """

    hardware: Hardware
    dtype: torch.dtype  # of q, k and v
    head_dim: int
    group: int = 1  # query heads per key/value head
    key_padding_mask: bool = False
    dropout: bool = False
    packed: bool = False  # documents, whose lengths change from call to call
    num_tokens: int = 0  # per sequence, or of all packed documents
    window: bool = False  # the pattern has a window
    dlse: bool = False  # a backward is asked for, with a gradient of lse
    # What the caller wants.
    modified: bool = False  # by a score or mask function
    differentiable: bool = False  # a gradient may be asked for
    transformed: bool = False  # torch.func or forward-mode differentiation is at work
    wants_lse: bool = False
    dynamic: bool = False  # that number of tokens is a symbol, in compiled code that is to hold for several

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        pattern: DilatedPattern,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        dropout_p: float,
        **options: bool,
    ) -> DispatchKey:
        """What a call with queries `(B, N, H, D)` and keys `(B, N, Hkv, D)` asks; `options`: what the caller wants."""
        return cls(
            detect(q.device),
            q.dtype,
            head_dim=q.shape[3],
            group=q.shape[2] // k.shape[2],
            key_padding_mask=key_padding_mask is not None,
            dropout=dropout_p > 0.0,
            packed=cu_seqlens is not None,
            num_tokens=q.shape[1],
            window=pattern.window is not None,
            **options,
        )
