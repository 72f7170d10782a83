"""Masks of padding in floating point, as torch's own layers pass them."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from flexdilated.core.tracing import writes_onnx


def ignored_keys(mask: Tensor | None) -> Tensor | None:
    """A key padding mask as bool. Raises ValueError for a float mask with values other than 0 and -inf."""
    if mask is None or not mask.is_floating_point():
        return mask
    return (refuse_float_mask if writes_onnx() else _ignored)(mask)


# An operator, because the compiler cannot trace code that reads values, and an exported or compiled program must check them too. A
# CUDA graph cannot read values.


@torch.library.custom_op("flexdilated::ignored_keys", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _ignored(mask: Tensor) -> Tensor:
    """The bool mask of a float mask of 0 and -inf."""
    ignored = mask == -math.inf
    if bool((~ignored & (mask != 0)).any()):
        raise ValueError(
            "key_padding_mask must be bool, or float with only 0 and -inf, got other values; give mask < 0 for keys to ignore, or "
            "add it to the scores by score_mod=lambda score, b, h, q_idx, kv_idx: score + mask[b, kv_idx]"
        )
    return ignored


def refuse_float_mask(mask: Tensor) -> NoReturn:
    """Raise NotImplementedError: the values of a float mask cannot be read here."""
    raise NotImplementedError(
        f"key_padding_mask must be bool in a portable program, got {mask.dtype}, whose values nothing would check; give mask < 0"
    )


@_ignored.register_fake
def _(mask: Tensor) -> Tensor:
    return torch.empty_like(mask, dtype=torch.bool)
