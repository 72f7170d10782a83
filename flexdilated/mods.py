"""Users' score and mask functions, FlexAttention's `score_mod` and `mask_mod`: checked, and called with token positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexdilated.merge import accumulated

__all__ = ["MaskMod", "ScoreMod", "check_mods", "modify", "refuse_zero_keys"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def check_mods(score_mod: ScoreMod | None, mask_mod: MaskMod | None, q: Tensor) -> bool:
    """Refuse what is not a score or mask function, by calling it for the first pair of q `(B, N, H, D)`.

    Returns:
        Whether a gradient may be asked of what the score function holds; not told of traced functions.

    Raises:
        TypeError: If it is not callable, takes other arguments, or returns something other than a score or a bool.
        ValueError: If it does not give one value per pair, or needs tensors on another device than q.
    """
    learns = False
    if not torch.compiler.is_compiling():  # then the functions are traced, and the tracer says what is wrong with them
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=q.device)
        if score_mod is not None:
            score = torch.zeros(zero.shape, dtype=accumulated(q.dtype), device=q.device)
            result = _call("score_mod", score_mod, ("score", "b", "h", "q_idx", "kv_idx"), score, zero, zero, zero, zero)
            if not result.is_floating_point():
                raise TypeError(f"score_mod must return a floating-point score, got {result.dtype}")
            learns = result.requires_grad
        if mask_mod is not None:
            result = _call("mask_mod", mask_mod, ("b", "h", "q_idx", "kv_idx"), zero, zero, zero, zero)
            if result.dtype != torch.bool:
                raise TypeError(f"mask_mod must return a bool, True where the query sees the key, got {result.dtype}")
    return learns


def _call(name: str, function: Any, parameters: tuple[str, ...], *arguments: Tensor) -> Tensor:
    if not callable(function):
        raise TypeError(f"{name} must be a function of ({', '.join(parameters)}), got {type(function).__name__}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        raise TypeError(f"{name} must take ({', '.join(parameters)}), got {inspect.signature(function)}") from None
    except ValueError:  # a builtin without a signature: calling it tells
        pass
    try:
        result = function(*arguments)
    except RuntimeError as error:
        if "device" not in str(error):
            raise
        device = arguments[0].device
        raise ValueError(f"{name} must use tensors on the device of q={device}, got: {str(error).splitlines()[0]}") from None
    if not isinstance(result, Tensor):
        raise TypeError(f"{name} must return a tensor, got {type(result).__name__}")
    if result.device != arguments[0].device:
        raise ValueError(f"{name} must use tensors on the device of q={arguments[0].device}, got a result on {result.device}")
    if result.numel() != 1 or result.dim() > len(arguments[0].shape):
        raise ValueError(f"{name} must return one value per pair, got shape {tuple(result.shape)} for one pair")
    return result


def refuse_zero_keys(num_tokens: int) -> NoReturn:
    """Refuse torchscale's zero keys: they have no position to tell the functions."""
    raise NotImplementedError(
        f"score_mod and mask_mod must come with a pattern that adds no zero keys at N={num_tokens}, got zero_padding=True: those "
        "keys have no token position; use dataclasses.replace(pattern, zero_padding=False)"
    )


def modify(
    scores: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, score_mod: ScoreMod | None, mask_mod: MaskMod | None
) -> tuple[Tensor, Tensor | None]:
    """The scores after `score_mod`, and what `mask_mod` lets be seen (None: everything).

    The functions see tensors that broadcast to the scores instead of one pair: being pointwise, with tables indexed by positions,
    they cannot tell.
    """
    if score_mod is not None:
        scores = score_mod(scores, b, h, q_idx, kv_idx).to(scores.dtype).expand_as(scores)
    return scores, None if mask_mod is None else mask_mod(b, h, q_idx, kv_idx)
