"""What a call asks of an engine, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexdilated.hardware import Hardware, detect
from flexdilated.transforms import is_transformed

__all__ = ["Request", "request_of"]


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


def request_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    dropout_p: float,
    *,
    modified: bool = False,
    learns: bool = False,
    wants_lse: bool = False,
) -> Request:
    """What a call with these tensors asks: q `(B, N, H, D)`, k and v `(B, N, Hkv, D)`; `learns`: its score function may too."""
    return Request(
        hardware=detect(q.device),
        dtype=q.dtype,
        head_dim=q.shape[3],
        group=q.shape[2] // k.shape[2],
        masked=key_padding_mask is not None,
        dropout=dropout_p > 0.0,
        modified=modified,
        differentiable=torch.is_grad_enabled() and (learns or q.requires_grad or k.requires_grad or v.requires_grad),
        transformed=is_transformed(q, k, v),
        wants_lse=wants_lse,
        num_tokens=q.shape[1],
    )
