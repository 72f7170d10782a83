"""What a call asks of an engine, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexdilated.hardware import Hardware

__all__ = ["Request"]


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
    """

    hardware: Hardware
    dtype: torch.dtype
    head_dim: int
    group: int = 1
    masked: bool = False
    dropout: bool = False
