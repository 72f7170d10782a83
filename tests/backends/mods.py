"""Score and mask functions as models have them, one that learns among them, and what a call under them gives."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdilated import DilatedPattern, dilated_attention
from flexdilated.backends.autograd import functions
from flexdilated.core.call import Call
from flexdilated.core.tracing import TRACES_UNKNOWN_SIZES
from tests.cases import Case

LONGEST = 1043  # tokens of a case, for the table
needs_unknown_sizes = pytest.mark.skipif(not TRACES_UNKNOWN_SIZES, reason="needs torch 2.11: the functions are refused before")


@dataclass(frozen=True)
class Mods:
    """Names of a score and a mask function."""

    score: str | None = None
    mask: str | None = None
    seed: int = 0

    def table(self, heads: int) -> Tensor:
        """In float64, exact in float32."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(heads, 2 * LONGEST, generator=generator).double().requires_grad_()

    def functions(self, table: Tensor) -> dict[str, Any]:
        scores: dict[str | None, Any] = {
            None: None,
            "table": lambda s, b, h, i, j: s + table[h, i - j + LONGEST].to(s.dtype),
            "alibi": lambda s, b, h, i, j: s - torch.exp2(-(h + 1.0)) * (i - j).abs(),
            "softcap": lambda s, b, h, i, j: 2 * torch.tanh(s / 2),
            "window": lambda s, b, h, i, j: torch.where(i - j > 5, -math.inf, s + 0.1 * b),
        }
        masks: dict[str | None, Any] = {
            None: None,
            "prefix": lambda b, h, i, j: (j <= i) | (j < 9),
            "thirds": lambda b, h, i, j: (i + 2 * j + h + b) % 3 > 0,
            "one_token": lambda b, h, i, j: j == 5,
        }
        return {"score_mod": scores[self.score], "mask_mod": masks[self.mask]}


def run(
    attend: Callable[..., tuple[Tensor, Tensor]],
    case: Case,
    mods: Mods,
    *,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    in_float64: bool = False,
    **options: Any,
) -> list[Tensor]:
    """`out`, `lse` and the gradients of `q`, `k`, `v` and the table, on the CPU; `lse` has a gradient where it is finite.

    `in_float64` widens the inputs after rounding them to `dtype`.
    """
    q, k, v, dout, dlse = (x if x is None or not in_float64 else x.double() for x in case.tensors(dtype, device))
    assert q is not None
    table = mods.table(q.shape[2]).detach().to(device, torch.float64 if q.dtype == torch.float64 else torch.float32)
    inputs = [x.requires_grad_() for x in (q, k, v, table)]
    out, lse = attend(*inputs[:3], case.pattern, **case.options(device), **mods.functions(table), **options)
    total = (out * dout).sum()
    if dlse is not None:
        total = total + torch.where(lse > -math.inf, lse * dlse, 0.0).sum()
    grads = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    return [x.detach().cpu() for x in (out, lse, *grads)]


def with_lse(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return dilated_attention(*args, return_lse=True, **options)


def padded(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, **options: Any) -> tuple[Tensor, Tensor]:
    """What is traced for a symbolic number of tokens."""
    return functions._padded(q, k, v, Call(pattern, scale=0.3)._replace(**options))


@contextmanager
def at_most(scores: int) -> Iterator[None]:
    """The sdpa backend holds so many scores at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "SCORES", scores)
        yield
