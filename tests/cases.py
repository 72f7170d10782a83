"""One attention call as a plain value, drawn by hypothesis, and its outputs and gradients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

from flexdilated import DilatedPattern, dilated_attention, reference
from flexdilated.tuning.checks import dense_attention, differentiate
from tests.tolerances import assert_twice_naive

HEAD_DIMS = (1, 3, 24, 48)
SCALES = (None, 0.9, 0, 0.0, -0.4, 1e-42)  # the last is 0 to most kernels


@dataclass(frozen=True)
class Case:
    """Shapes and options of one call; `seed` fixes every number in its tensors."""

    pattern: DilatedPattern
    batch: int = 1
    num_tokens: int = 43
    kv_heads: int = 5
    group: int = 1
    head_dim: int = 3
    is_causal: bool = False
    scale: float | None = None
    ignored: float | None = None  # share of keys that key_padding_mask ignores
    borders: tuple[int, ...] | None = None  # cu_seqlens
    strided: bool = False
    lse_gradient: bool = True
    seed: int = 0

    def tensors(
        self, dtype: torch.dtype = torch.float64, device: str = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v, dout, dlse."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = self.kv_heads * self.group

        def draw(num_heads: int) -> Tensor:
            x = torch.randn(self.batch, self.num_tokens, num_heads, self.head_dim, generator=generator).to(device, dtype)
            return x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1) if self.strided else x

        q, k, v, dout = draw(heads), draw(self.kv_heads), draw(self.kv_heads), draw(heads)
        dlse = torch.randn(self.batch, heads, self.num_tokens, generator=generator).to(device)
        dlse = dlse.double() if dtype == torch.float64 else dlse
        return q, k, v, dout, dlse if self.lse_gradient else None

    def options(self, device: str = "cpu") -> dict[str, Any]:
        """The keyword arguments of the call."""
        options: dict[str, Any] = {"is_causal": self.is_causal}
        if self.scale is not None:
            options["scale"] = self.scale
        if self.ignored is not None:
            generator = torch.Generator().manual_seed(self.seed + 1)
            draw = torch.rand(self.batch, self.num_tokens, generator=generator)
            options["key_padding_mask"] = (draw < self.ignored).to(device)
        if self.borders is not None:
            options["cu_seqlens"] = torch.tensor(self.borders, dtype=torch.int32, device=device)
        return options


@st.composite
def patterns(draw: st.DrawFn) -> DilatedPattern:
    """One to three short branches under any rules."""
    lengths = draw(st.lists(st.integers(1, 19), min_size=1, max_size=3))
    return DilatedPattern(
        tuple(lengths),
        tuple(draw(st.integers(1, min(length, 7))) for length in lengths),
        heads=draw(st.sampled_from(("all", "grouped"))),
        offsets=draw(st.sampled_from(("blocked", "interleaved"))),
        zero_padding=draw(st.booleans()),
        detach_weights=draw(st.booleans()),
    )


def unshifted(pattern: DilatedPattern) -> DilatedPattern:
    """A pattern that ranks compute: with zero keys, each segment length is rounded up to a multiple of its rate."""
    lengths = tuple(w + -w % r if pattern.zero_padding else w for w, r in pattern.branches)
    return replace(pattern, segment_lengths=lengths)


def least_heads(pattern: DilatedPattern) -> int:
    """The fewest key/value heads that a pattern runs with."""
    return len(pattern.branches) if pattern.heads == "grouped" else 1


@st.composite
def calls(draw: st.DrawFn) -> Case:
    """A call of `dilated_attention` in which every option may meet every other."""
    batch = draw(st.integers(1, 3))
    num_tokens = draw(st.integers(1, 43))
    borders = None
    if batch == 1 and draw(st.booleans()):
        inner = draw(st.lists(st.integers(0, num_tokens), max_size=4))  # repeats are empty documents
        borders = (0, *sorted(inner), num_tokens)
    pattern = draw(patterns())
    return Case(
        pattern=pattern,
        batch=batch,
        num_tokens=num_tokens,
        kv_heads=draw(st.integers(least_heads(pattern), 7)),
        group=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from(SCALES)),
        ignored=draw(st.sampled_from((None, 0.2, 0.7, 1.0))),
        borders=borders,
        strided=draw(st.booleans()),
        lse_gradient=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def windowed_calls(draw: st.DrawFn) -> Case:
    """A call of `calls`, whose pattern may have a window and global tokens too."""
    case = draw(calls())
    window = draw(st.none() | st.integers(1, 50) | st.just(1 << 40))
    global_tokens = draw(st.sampled_from((0, 0, 1, 4, 23, 1 << 40)))
    rules = {} if window is None and not global_tokens else {"zero_padding": False, "detach_weights": False}
    return replace(case, pattern=replace(case.pattern, window=window, global_tokens=global_tokens, **rules))


def run_backend(case: Case, backend: str, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Tensor, ...]:
    """`out, lse, dq, dk, dv` by one backend."""
    options = {**case.options(device), "return_lse": True, "backend": backend}
    return differentiate(lambda q, k, v: dilated_attention(q, k, v, case.pattern, **options), *case.tensors(dtype, device))


def run_reference(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """`out, lse, dq, dk, dv` by the definition, in float64 from inputs rounded to a dtype."""
    tensors = [x if x is None else x.double() for x in case.tensors(dtype)]
    return differentiate(lambda q, k, v: reference.dilated_attention(q, k, v, case.pattern, **case.options()), *tensors)  # type: ignore[arg-type]


def run_plain(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """`out, out, dq, dk, dv` by plain PyTorch in a dtype: how much error that dtype costs anyone. No mask, no documents."""

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = dense_attention(q, k, v, case.pattern, is_causal=case.is_causal, scale=case.scale)
        return out, out

    q, k, v, dout, _ = case.tensors(dtype)
    return differentiate(plain, q, k, v, dout)


def assert_twice_plain(actual: Sequence[Tensor], case: Case, dtype: torch.dtype, whole: Case | None = None) -> tuple[Tensor, ...]:
    """Outputs and gradients err at most twice as much as plain PyTorch on `whole`, this shape without options that it lacks.

    Returns the exact results of the case.
    """
    whole, expected = whole or case, run_reference(case, dtype)
    naive, exact = run_plain(whole, dtype), run_reference(whole, dtype)
    for i in (0, 2, 3, 4):
        assert actual[i].dtype == dtype
        error = actual[i].cpu().double() - expected[i]
        assert_twice_naive(error, naive[i].double() - exact[i], torch.zeros_like(error))
    return expected


def randomised(module: Any, scale: float = 0.3) -> Any:
    """The module with biases and gains that differ from their initial zeros and ones."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return module


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` holds NaN inside: an output that is never written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
