"""How the next token is drawn from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flexdilated.core.integers import is_integer

LEAST = torch.finfo(torch.float32).tiny  # to divide by: what is less may count as 0
INDICES = (torch.int64, torch.int32)  # what an embedding takes


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """`softmax(logits / temperature)`, cut to the `top_k` likeliest tokens, then to the fewest whose probabilities reach `top_p`.

    Source: nucleus sampling, arXiv 1904.09751, section 3.1.

    Args:
        temperature: 0 takes the likeliest token, the first of equals.
        top_k: At least 1. Of equal tokens at the cut, all stay. Default: all tokens.
        top_p: In (0, 1]. The likeliest token always stays. Default: all tokens.

    Raises:
        ValueError: If a number is out of range, or a cut comes with `temperature=0`, where it would mean nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        for name in ("top_k", "top_p"):
            value = getattr(self, name)
            if self.temperature == 0 and value is not None:
                raise ValueError(f"{name} must be None with temperature=0, which takes the likeliest token, got {value}")

    def probabilities(self, logits: Tensor) -> Tensor:
        """`(B, V)` float32 of logits `(B, V)`: what `draw` draws from; a ValueError if `temperature` is 0."""
        if self.temperature == 0:
            raise ValueError("temperature must be above 0 for probabilities, got 0")
        # The largest logit becomes 0 first: however small the temperature, nothing overflows but to -inf.
        logits = logits.float()
        logits = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, LEAST)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        weights = torch.softmax(logits, dim=-1)
        if self.top_p is None or self.top_p == 1:
            return weights
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        # A token stays while those before it fall short of top_p.
        is_kept = _sums(ordered) - ordered < self.top_p
        nucleus = torch.zeros_like(weights).scatter_(-1, order, torch.where(is_kept, ordered, 0.0))
        return nucleus / nucleus.sum(-1, keepdim=True)

    def draw(self, logits: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """`(B,)` int64 tokens of logits `(B, V)`, on their device.

        `generator`, of any device, draws the random numbers; by default torch's global one of the device of the logits.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        weights = self.probabilities(logits)
        if generator is not None:
            weights = weights.to(generator.device)
        return torch.multinomial(weights, 1, generator=generator)[:, 0].to(logits.device)


def lengths_of_prompts(tokens: Tensor, max_new_tokens: int, lengths: Tensor | None, num_tokens: int) -> Tensor:
    """`(B,)` lengths of prompts of `num_tokens` tokens, padding included.

    Raises ValueError or TypeError for wrong lengths or a wrong number of new tokens.
    """
    if not is_integer(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be an integer of at least 1, got {max_new_tokens!r}")
    if lengths is None:
        return torch.full((tokens.shape[0],), num_tokens, device=tokens.device)
    if lengths.dtype not in INDICES:
        raise TypeError(f"lengths must be of int64 or int32, got {str(lengths.dtype).removeprefix('torch.')}")
    if lengths.shape != tokens.shape[:1]:
        raise ValueError(f"lengths must have shape (B,)=({tokens.shape[0]},), got {tuple(lengths.shape)}")
    if not bool(((lengths >= 1) & (lengths <= num_tokens)).all()):
        raise ValueError(f"lengths must be in [1, N={num_tokens}], got {lengths.tolist()}")
    return lengths.to(tokens.device, torch.int64)


def _sums(x: Tensor) -> Tensor:
    """`x.cumsum(-1)`, which CUDA refuses where deterministic algorithms are asked for."""
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return x.cpu().cumsum(-1).to(x.device)
    return x.cumsum(-1)
