"""The calls that every door is asked, what the definition answers, and the one rule of tolerance.

A door is a way in which a user runs a pattern: a backend, a layout, ranks, a cache, a picture. `KINDS` x `VARIANTS` are the cases.
A kind of branch enters here, and meets every door.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexdilated import DilatedPattern, reference
from tests.backends.mods import Mods
from tests.cases import Case
from tests.tolerances import EXACT, HALF_LSE, NAIVE_FACTOR, SINGLE

TOKENS, HEADS = 29, 3
KINDS: dict[str, DilatedPattern] = {
    "segments": DilatedPattern((13, 29), (1, 3)),
    "LongNet's": DilatedPattern((8, 16, 32), (1, 2, 4)),
    "interleaved": DilatedPattern((7, 17), (2, 3), offsets="interleaved"),
    "grouped": DilatedPattern((5, 11, 29), (1, 2, 3), heads="grouped"),
    "torchscale's": DilatedPattern.torchscale((8, 18), (2, 3)),
    "torchscale's, shifted": DilatedPattern.torchscale((7, 29), (2, 3)),
    "window": DilatedPattern(window=6),
    "window + far": DilatedPattern.causal(TOKENS, HEADS, window=5),
    "window + two segments": DilatedPattern((7, 23), (1, 3), window=4),
    "detached": DilatedPattern((13, 29), (1, 3), detach_weights=True),
    "window, grouped": DilatedPattern((11, 29), (2, 3), window=3, heads="grouped"),
    "residues without heads": DilatedPattern((29,), (5,), window=7),
    "window + far + first tokens": DilatedPattern((29,), (3,), window=5, global_tokens=2),
    "window + two segments + first tokens": DilatedPattern((7, 23), (1, 3), window=4, global_tokens=9),
    "first tokens, grouped": DilatedPattern((11, 29), (2, 3), global_tokens=4, heads="grouped"),
    "window + first tokens": DilatedPattern(window=6, global_tokens=3),
}


class Comet(NamedTuple):
    """A kind of branch that no code knows."""

    tail: int


@dataclass(frozen=True)
class PatternWithComet(DilatedPattern):
    @property
    def branches(self) -> Any:
        own = DilatedPattern(self.segment_lengths, self.dilation_rates, window=self.window)
        return (*own.branches, Comet(3))


COMET = PatternWithComet((5, 13), (1, 2))


@dataclass(frozen=True)
class Question(Case):
    """A call, with functions, sinks and a dtype."""

    num_tokens: int = TOKENS
    kv_heads: int = HEADS
    head_dim: int = 16
    dtype: torch.dtype = torch.float64
    mods: Mods = field(default_factory=Mods)
    has_sinks: bool = False

    @property
    def has_functions(self) -> bool:
        return self.mods != Mods()

    @property
    def adds_zero_keys(self) -> bool:
        """Whether torchscale's zero keys may take part in a softmax."""
        return self.pattern.zero_padding and not self.is_causal and self.num_tokens > 1

    @property
    def is_shifted(self) -> bool:
        """Whether torchscale shifts outputs."""
        longest = max(b - a for a, b in pairwise(self.borders or (0, self.num_tokens)))
        branches = zip(self.pattern.segment_lengths, self.pattern.dilation_rates)
        return self.pattern.zero_padding and any(w % r and longest > w for w, r in branches)

    def learned(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The table of the score function and the sinks, where the call has any."""
        heads = self.kv_heads * self.group
        found = {"table": self.mods.table(heads).detach()} if self.mods.score == "table" else {}
        if self.has_sinks:
            found["sinks"] = torch.linspace(-1.0, 2.0, heads, dtype=torch.float64)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return {name: x.to(wide).requires_grad_() for name, x in found.items()}

    def keywords(self, learned: dict[str, Tensor]) -> dict[str, Any]:
        """The keyword arguments of `dilated_attention`."""
        functions = self.mods.functions(learned.get("table", torch.zeros(0)))
        given = {**self.options(), **functions, "sinks": learned.get("sinks")}
        return {name: value for name, value in given.items() if value is not None}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"batch": 2, "group": 2},
    "causal": {"is_causal": True, "strided": True, "scale": 0.4},
    "one token": {"num_tokens": 1, "lse_gradient": False},
    "padded": {"batch": 2, "ignored": 0.3},
    "padded, causal": {"batch": 2, "group": 2, "ignored": 0.3, "is_causal": True, "lse_gradient": False},
    "packed": {"borders": (0, 1, 1, 12, 23, 29), "group": 2},
    "packed, causal": {"borders": (0, 9, 20, 29), "is_causal": True, "lse_gradient": False},
    "sinks": {"is_causal": True, "has_sinks": True, "group": 2},
    "functions": {"is_causal": True, "mods": Mods("table", "thirds", 3), "group": 2},
    "float32": {"dtype": torch.float32, "is_causal": True},
    "bfloat16": {"dtype": torch.bfloat16, "batch": 2, "lse_gradient": False},
}
CASES = {(kind, name): Question(pattern, **options) for kind, pattern in KINDS.items() for name, options in VARIANTS.items()}

Attend = Callable[..., tuple[Tensor, Tensor]]
Results = dict[str, Tensor]


def results(attend: Attend, case: Question, dtype: torch.dtype | None = None) -> Results:
    """`out`, `lse` and all gradients of `attend(q, k, v, **keywords)`; `lse` has a gradient where it is finite."""
    dtype = case.dtype if dtype is None else dtype
    q, k, v, dout, dlse = case.tensors(case.dtype)
    learned = case.learned(dtype)
    inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in (("q", q), ("k", k), ("v", v))}
    if case.strided:
        inputs = {
            name: x.detach().permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1).requires_grad_() for name, x in inputs.items()
        }
    out, lse = attend(*inputs.values(), **case.keywords(learned))
    total = (out.double() * dout.double()).sum()
    if dlse is not None:
        total = total + torch.where(lse > -torch.inf, lse.double() * dlse, 0.0).sum()
    everything = inputs | learned
    grads = torch.autograd.grad(total, list(everything.values()), allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach()} | {f"d{name}": grad for name, grad in zip(everything, grads)}


def definition(case: Question) -> Attend:
    return lambda q, k, v, **keywords: reference.dilated_attention(q, k, v, case.pattern, **keywords)


@cache
def expected(case: Question) -> Results:
    """What the definition gives, in float64."""
    return results(definition(case), case, torch.float64)


@cache
def multiplicities(pattern: DilatedPattern, num_tokens: int, heads: int, *, is_causal: bool) -> Tensor:
    """`(heads, N, N)`: how often the definition counts each pair, read from its weights where all scores are 0."""
    zero = torch.zeros(1, num_tokens, heads, 1, dtype=torch.float64)
    plain = dataclasses.replace(pattern, zero_padding=False)
    q, one_hot = zero.expand(-1, -1, -1, num_tokens), torch.eye(num_tokens, dtype=torch.float64)[None, :, None]
    out, lse = reference.dilated_attention(q, q, one_hot.expand(-1, -1, heads, -1), plain, is_causal=is_causal)
    return (out.transpose(1, 2) * lse.exp()[..., None])[0].round().long()


@cache
def plain(case: Question) -> Results:
    """What plain PyTorch gives in the dtype of the case: dense scores, and the logarithm of how often each pair counts."""
    times = multiplicities(case.pattern, case.num_tokens, case.kv_heads, is_causal=case.is_causal).repeat_interleave(case.group, 0)

    def attend(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(case.group, dim=2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * keywords.get("scale", q.shape[3] ** -0.5) + times.log().to(q.dtype)
        weights = torch.softmax(scores.masked_fill((times == 0).all(-1, keepdim=True), 0.0), dim=-1) * (times > 0)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v), torch.logsumexp(scores.float(), dim=-1)

    return results(attend, case)


def of_rows(name: str, x: Tensor, rows: slice) -> Tensor:
    """Some tokens of a result."""
    return x[:, :, rows] if name == "lse" else x[:, rows] if x.dim() == 4 else x


def assert_near(found: Results, case: Question, dtype: torch.dtype, rows: slice = slice(None)) -> None:
    """The one rule of tolerance: exact in float64, 1e-5 in float32, and in half precision twice the error of plain PyTorch.

    `rows`: the tokens to compare.
    """
    exact = {name: of_rows(name, x, rows) for name, x in expected(case).items()}
    assert found
    for name, value in found.items():
        value = of_rows(name, value, rows)
        if value.dtype == torch.float64 or dtype == torch.float64:
            torch.testing.assert_close(value.double(), exact[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")
        elif dtype == torch.float32:
            torch.testing.assert_close(value.double(), exact[name], **SINGLE, msg=lambda text, name=name: f"{name}: {text}")
        elif name == "lse":
            torch.testing.assert_close(value.double(), exact[name], **HALF_LSE)
        else:
            alike = dataclasses.replace(case, pattern=dataclasses.replace(case.pattern, zero_padding=False, detach_weights=False))
            error = plain(alike)[name].double() - expected(alike)[name]  # of all rows
            allowed = NAIVE_FACTOR * error.abs().max().item()
            torch.testing.assert_close(value.double(), exact[name], atol=allowed, rtol=0.0)
