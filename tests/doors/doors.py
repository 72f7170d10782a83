"""The doors: each answers a case with results, or says by name why it cannot.

`Door.accepts(case)` is None, or what the error must say. `Door.lacks(case)` names what the door has no argument for: then there is
nothing to ask.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexdilated import (
    DilatedAttention,
    DilatedKVCache,
    DilatedPattern,
    MultiheadDilatedAttention,
    analysis,
    attention_map,
    compat,
    create_dilated_block_mask,
    dilated_attention,
    dilated_mask_mod,
    dilated_score_mod,
)
from flexdilated.backends.autograd.portable import attend_portable
from flexdilated.core.call import Call
from flexdilated.core.checks import check
from flexdilated.core.custom_op import decode, encode
from flexdilated.core.lse import accumulated
from flexdilated.draw.pattern import multiplicity
from tests.backends import flash_stand_ins, flex_emulation
from tests.doors.cases import VARIANTS, Question, Results, multiplicities, results

Run = Callable[[Question, pytest.MonkeyPatch], Results]
Rule = Callable[[Question], str | None]

ZERO_KEYS = "score_mod and mask_mod must come with a pattern that adds no zero keys"
EXCHANGES = ("auto", "gather", "ring", "heads")


def nothing(case: Question) -> None:
    """Accept every case, or lack nothing."""


@dataclass(frozen=True)
class Door:
    """A way to run a pattern.

    `variants`: names in `VARIANTS`; None: all.
    """

    run: Run
    accepts: Rule = nothing
    lacks: Rule = nothing
    variants: Sequence[str] | None = None

    def asked(self) -> list[str]:
        return list(VARIANTS if self.variants is None else self.variants)


def first(*rules: Rule) -> Rule:
    """What the first of some rules says that says something."""
    return lambda case: next((reason for rule in rules if (reason := rule(case)) is not None), None)


def only(*names: str) -> Rule:
    """The first of the named options that a case has, for a door that has no argument for it."""

    def lacks(case: Question) -> str | None:
        has = {
            "cu_seqlens": case.borders is not None,
            "key_padding_mask": case.ignored is not None,
            "functions": case.has_functions,
            "sinks": case.has_sinks,
            "is_causal=False": not case.is_causal,
            "is_causal=True": case.is_causal,
            "detach_weights": case.pattern.detach_weights,
            "zero keys": case.adds_zero_keys,
            "shifts": case.is_shifted,
        }
        return next((name for name in names if has[name]), None)

    return lacks


def attends(backend: str, **options: Any) -> Callable[[Question], Any]:
    given = {"return_lse": True, "backend": backend, **options}
    return lambda case: lambda q, k, v, **keywords: dilated_attention(q, k, v, case.pattern, **keywords, **given)


def by_backend(backend: str, *kernels: SDPBackend) -> Run:
    def run(case: Question, patch: pytest.MonkeyPatch) -> Results:
        with sdpa_kernel(list(kernels)) if kernels else nullcontext():
            return results(attends(backend)(case), case)

    return run


def identity(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + 0.0


def by_functions(case: Question, patch: pytest.MonkeyPatch) -> Results:
    attend = lambda q, k, v, score_mod=identity, **keywords: attends("sdpa", score_mod=score_mod)(case)(q, k, v, **keywords)  # noqa: E731
    return results(attend, case)


def by_flash(kernel: str) -> Run:
    def run(case: Question, patch: pytest.MonkeyPatch) -> Results:
        flash_stand_ins.stand_in(patch)
        flash_stand_ins.place(kernel, patch)
        return results(attends("flash")(case), case)

    return run


def by_flex(layout: str) -> Run:
    def run(case: Question, patch: pytest.MonkeyPatch) -> Results:
        flex_emulation.emulate(patch, layout)
        return results(attends("flex")(case), case)

    return run


def by_triton(case: Question, patch: pytest.MonkeyPatch) -> Results:
    from tests.backends import interpreter

    interpreter.mend(patch)
    return results(attends("triton")(case), case, torch.float32 if case.dtype == torch.float64 else None)


def by_portable(case: Question, patch: pytest.MonkeyPatch) -> Results:
    attend = lambda q, k, v, **keywords: attend_portable(*check(q, k, v, Call(case.pattern, **keywords)))  # noqa: E731
    return results(attend, case)


class _Attention(nn.Module):
    def __init__(self, case: Question) -> None:
        super().__init__()
        self.pattern, self.keywords = case.pattern, case.keywords({})

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dilated_attention(q, k, v, self.pattern, return_lse=True, **self.keywords)


def by_export(case: Question, patch: pytest.MonkeyPatch) -> Results:
    q, k, v, _, _ = case.tensors(case.dtype)
    shapes = None if case.is_shifted else ({1: torch.export.Dim("length")},) * 3  # torchscale's shifts depend on the length
    with torch.no_grad():
        program = torch.export.export(_Attention(case).eval(), (q, k, v), dynamic_shapes=shapes)
        out, lse = program.module()(q, k, v)
    return {"out": out, "lse": lse}


def by_vjp(case: Question, patch: pytest.MonkeyPatch) -> Results:
    q, k, v, dout, dlse = case.tensors(case.dtype)
    (out, lse), back = torch.func.vjp(lambda q, k, v: attends("auto")(case)(q, k, v, **case.keywords({})), q, k, v)
    dlse = torch.zeros_like(lse) if dlse is None else dlse.masked_fill(lse == -torch.inf, 0.0)
    return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), back((dout, dlse))))


def by_vmap(case: Question, patch: pytest.MonkeyPatch) -> Results:
    q, k, v, _, _ = case.tensors(case.dtype)
    one = lambda q, k, v: attends("auto")(case)(q[None], k[None], v[None], **case.keywords({}))  # noqa: E731
    out, lse = torch.func.vmap(one)(q, k, v)
    return {"out": out[:, 0], "lse": lse[:, 0]}


def by_compiler(case: Question, patch: pytest.MonkeyPatch) -> Results:
    torch.compiler.reset()
    compiled = torch.compile(attends("auto")(case), fullgraph=True, backend="aot_eager")
    return results(compiled, case)


def by_cache(case: Question, patch: pytest.MonkeyPatch) -> Results:
    """A prompt, single tokens and chunks."""
    q, k, v, _, _ = case.tensors(case.dtype)
    cache = DilatedKVCache(case.pattern, batch_size=q.shape[0], num_kv_heads=k.shape[2], head_dim=q.shape[3], dtype=q.dtype)
    borders = sorted({0, *range(11, 15), 20, case.num_tokens} & set(range(case.num_tokens + 1)))
    sinks = case.learned(q.dtype).get("sinks")
    keywords = {} if sinks is None else {"sinks": sinks.detach()}
    with torch.no_grad():
        parts = [cache.attend(*(x[:, a:b] for x in (q, k, v)), scale=case.scale, **keywords) for a, b in pairwise(borders)]
    return {"out": torch.cat(parts, dim=1)}


def by_maps(case: Question, patch: pytest.MonkeyPatch) -> Results:
    q, k, v, _, _ = case.tensors(case.dtype)
    v = v.masked_fill(case.options().get("key_padding_mask", torch.zeros(1, 1, dtype=torch.bool))[..., None, None], 0.0)
    weights = attention_map(q, k, case.pattern, queries=range(case.num_tokens), **case.options())
    return {"out": torch.einsum("bhqk,bkhd->bqhd", weights, v.to(weights.dtype).repeat_interleave(case.group, dim=2))}


def by_mask_functions(case: Question, patch: pytest.MonkeyPatch) -> Results:
    """As `flex_attention` uses them, but on all pairs."""
    sizes = {"seq_len": case.num_tokens, "is_causal": case.is_causal, "num_kv_heads": case.kv_heads}
    heads = case.kv_heads * case.group
    joined, count = (make(case.pattern, heads, **sizes) for make in (dilated_mask_mod, dilated_score_mod))

    def attend(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, key_padding_mask: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.to(accumulated(x.dtype)) for x in (q, *(x.repeat_interleave(case.group, dim=2) for x in (k, v))))
        b, h = torch.arange(q.shape[0])[:, None, None, None], torch.arange(heads)[:, None, None]
        i = torch.arange(case.num_tokens)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
        seen = joined(b, h, i[:, None], i) & (
            ~torch.zeros_like(b).bool() if key_padding_mask is None else ~key_padding_mask[:, None, None]
        )
        scores = scores if count is None else count(scores, b, h, i[:, None], i)
        scores = scores.masked_fill(~seen, -torch.inf)
        reached = seen.any(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(~reached, 0.0), -1) * reached
        lse = torch.logsumexp(scores.masked_fill(~reached, 0.0), -1).masked_fill(~reached[..., 0], -torch.inf)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse

    return results(attend, case)


def by_block_mask(case: Question, patch: pytest.MonkeyPatch) -> Results:
    """The lists of blocks, taken at their word."""
    sizes = {"seq_len": case.num_tokens, "is_causal": case.is_causal, "num_kv_heads": case.kv_heads}
    heads = case.kv_heads * case.group
    mask = create_dilated_block_mask(case.pattern, heads, device="cpu", BLOCK_SIZE=8, **sizes)
    count = dilated_score_mod(case.pattern, heads, **sizes)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, is_causal: bool = False) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scale = q.shape[3] ** -0.5 if scale is None else scale
        out, lse = flex_emulation.call(q, k, v, score_mod=count, block_mask=mask, scale=scale, want_lse=True, kind=None)
        return out.transpose(1, 2), lse

    return results(attend, case)


def by_counts(case: Question, patch: pytest.MonkeyPatch) -> Results:
    """Pairs, distinct pairs, reach, coverage and layers against a look at every pair. Raises AssertionError itself."""
    pattern, n, heads, is_causal = case.pattern, case.num_tokens, case.kv_heads, case.is_causal
    times = multiplicities(pattern, n, heads, is_causal=is_causal).numpy()
    assert pattern.count_pairs(n, heads, is_causal=is_causal) == times.sum()
    by_branch = analysis.count_pairs(pattern, n, heads, is_causal=is_causal)
    assert np.sum(by_branch, axis=0).tolist() == times.sum(axis=(1, 2)).tolist()
    counted = analysis.count_multiplicities(pattern, n, heads, is_causal=is_causal)
    assert [dict(c) for c in counted] == [dict(zip(*(x.tolist() for x in np.unique(t[t > 0], return_counts=True)))) for t in times]
    both = multiplicities(pattern, n, heads, is_causal=False).numpy() > 0
    position = np.arange(n)
    distance = np.where(both, abs(position[:, None] - position), -1)
    assert analysis.longest_reach(pattern, n, heads) == tuple(distance.max(axis=(1, 2)).tolist())
    assert analysis.count_uncovered(pattern, n, heads) == int((~both.any(axis=(0, 2))).sum())
    step, everything = (times > 0).any(axis=0), np.tri(n, dtype=bool) if is_causal else np.ones((n, n), dtype=bool)
    assert (
        analysis.keys_seen(pattern, n, heads, query=n - 1, is_causal=is_causal).tolist()
        == np.flatnonzero(step[-1] | (position == n - 1)).tolist()
    )
    reach = [np.eye(n, dtype=bool)]
    while len(reach) == 1 or (reach[-1] != reach[-2]).any():
        reach.append(reach[-1].astype(int) @ step > 0)
    layers = next((i for i, seen in enumerate(reach) if (seen == everything).all()), None)
    assert analysis.layers_to_cover(pattern, n, heads, is_causal=is_causal) == layers
    return {}


def by_pictures(case: Question, patch: pytest.MonkeyPatch) -> Results:
    found = multiplicity(case.pattern, case.num_tokens, case.kv_heads, is_causal=case.is_causal)
    expected = multiplicities(case.pattern, case.num_tokens, case.kv_heads, is_causal=case.is_causal)
    assert found.tolist() == expected.tolist()
    case.pattern._repr_svg_()
    return {}


def by_saved(case: Question, patch: pytest.MonkeyPatch) -> Results:
    """A pattern that was saved, pickled, and passed to an operator."""
    encoded = encode(case.pattern)
    saved = DilatedPattern.from_dict(case.pattern.to_dict())
    assert saved == pickle.loads(pickle.dumps(case.pattern)) == decode(encoded) == case.pattern
    assert eval(repr(saved), {"DilatedPattern": DilatedPattern}) == saved
    return {}


def with_no_lse(out: Tensor) -> tuple[Tensor, Tensor]:
    return out, torch.full((), -torch.inf)


def by_module(case: Question, patch: pytest.MonkeyPatch) -> Results:
    module = DilatedAttention(case.pattern, scale=case.scale)
    attend = lambda q, k, v, scale=None, **keywords: with_no_lse(module(q, k, v, **keywords))  # noqa: E731
    return without_lse(results(attend, case))


def by_layer(case: Question, patch: pytest.MonkeyPatch) -> Results:
    """The multi-head layer, whose projections keep what they read; queries, keys and values are different tokens."""
    heads, width = case.kv_heads * case.group, case.kv_heads * case.group * case.head_dim
    options: dict[str, Any] = {"num_kv_heads": case.kv_heads, "scale": case.scale, "bias": False, "layer_norm": False}
    layer = MultiheadDilatedAttention(width, heads, case.pattern, **options).to(case.dtype)
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
            projection.weight.copy_(torch.eye(*projection.weight.shape))

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **keywords: Any) -> tuple[Tensor, Tensor]:
        tokens = (F.pad(x.flatten(2), (0, width - x.shape[2] * x.shape[3])) for x in (q, k, v))
        return with_no_lse(layer(*tokens, **keywords)[0].unflatten(2, (heads, -1)))

    return without_lse(results(attend, case))


def by_earlier_name(case: Question, patch: pytest.MonkeyPatch) -> Results:
    lengths, rates = case.pattern.segment_lengths, case.pattern.dilation_rates
    module = compat.DilatedAttention(lengths, rates, softmax_scale=case.scale)
    attend = lambda q, k, v, scale=None, **keywords: with_no_lse(module(q, k, v, **keywords))  # noqa: E731
    return without_lse(results(attend, case))


def without_lse(found: Results) -> Results:
    return {name: value for name, value in found.items() if name != "lse"}


def other_patterns(case: Question) -> str | None:
    """The earlier name takes grouped segments alone."""
    p = case.pattern
    is_its_own = p.segment_lengths and p == DilatedPattern.grouped(p.segment_lengths, p.dilation_rates)
    return None if is_its_own else "another pattern than grouped segments"


def when(is_so: Callable[[Question], bool], text: str) -> Rule:
    return lambda case: text if is_so(case) else None


SHORT = ("plain", "causal", "padded")
SHIFTS = "pattern must not shift positions"
shifts = when(lambda case: case.is_shifted, SHIFTS)
functions_without_zero_keys = when(lambda case: case.has_functions and case.is_shifted, ZERO_KEYS)
in_masks = first(
    when(lambda case: case.adds_zero_keys or case.is_shifted, "pattern must add no zero keys at seq_len=29"),
    when(lambda case: case.pattern.detaches, "pattern must have detach_weights=False, got True"),
)
in_programs = first(
    when(lambda case: case.borders is not None, "cu_seqlens must be None in a portable program"),
    when(lambda case: case.is_shifted, "pattern must have rates that divide its segments"),
)
by_flash_alone = first(
    when(lambda case: case.ignored is not None, "flash-attn has no key padding mask"),
    when(lambda case: case.has_functions, "flash-attn has no score_mod or mask_mod"),
)
DOORS: dict[str, Door] = {
    "auto": Door(by_backend("auto"), functions_without_zero_keys),
    "sdpa, the kernel for CPUs": Door(by_backend("sdpa"), functions_without_zero_keys),
    "sdpa, products of matrices": Door(by_backend("sdpa", SDPBackend.MATH), functions_without_zero_keys),
    "reference": Door(
        by_backend("reference"),
        when(lambda case: case.has_functions and case.is_shifted, "score_mod and mask_mod must come without zero keys"),
    ),
    "flash-attn 2": Door(by_flash("flash_attn"), by_flash_alone),
    "flash-attn 4": Door(by_flash("flash_attn_4"), by_flash_alone),
    "triton": Door(by_triton, variants=("padded, causal", "packed")),
    "flex, packed": Door(by_flex("packed"), functions_without_zero_keys),
    "flex, fused": Door(by_flex("fused"), functions_without_zero_keys),
    "functions": Door(by_functions, when(lambda case: case.adds_zero_keys or case.is_shifted, ZERO_KEYS)),
    "portable": Door(by_portable, in_programs, only("functions", "sinks")),
    "torch.export": Door(by_export, variants=("plain", "causal")),
    "torch.func.vjp": Door(by_vjp, lacks=only("functions", "sinks")),
    "torch.func.vmap": Door(by_vmap, lacks=only("cu_seqlens", "key_padding_mask", "functions", "sinks")),
    "torch.compile": Door(by_compiler, variants=SHORT),
    "DilatedKVCache": Door(by_cache, shifts, only("is_causal=False", "key_padding_mask", "cu_seqlens", "functions")),
    "attention_map": Door(by_maps, lacks=only("cu_seqlens", "functions", "sinks")),
    "mask functions": Door(by_mask_functions, in_masks, only("cu_seqlens", "functions", "sinks")),
    "block masks": Door(by_block_mask, in_masks, only("cu_seqlens", "key_padding_mask", "functions", "sinks")),
    "counts": Door(by_counts, variants=SHORT),
    "pictures": Door(by_pictures, variants=SHORT),
    "saved patterns": Door(by_saved, variants=("plain",)),
    "DilatedAttention": Door(by_module, functions_without_zero_keys),
    "MultiheadDilatedAttention": Door(by_layer, functions_without_zero_keys, only("sinks")),
    "compat": Door(by_earlier_name, lacks=first(only("cu_seqlens", "key_padding_mask", "functions", "sinks"), other_patterns)),
}
