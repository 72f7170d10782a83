"""Calls for the flex backend on a GPU, and for its printed kernels in an interpreter."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flexdilated.backends.flex.backend
from flexdilated import DilatedPattern, dilated_attention, reference
from tests.backends.mods import LONGEST, Mods
from tests.backends.mods import run as run_mods
from tests.cases import Case

DEVICE = "cuda"
LAYOUTS = ("packed", "fused")

# Rates that divide segments (one long sequence of kept rows), rates that do not (one sequence per segment), more than one block.
EVEN = DilatedPattern((31, 201, 235), (1, 3, 5))
FULL = DilatedPattern((256, 1024), (1, 4))
UNEVEN = DilatedPattern((31, 101, 257), (1, 3, 7))


def grouped_heads(case: Case) -> Case:
    return replace(case, pattern=replace(case.pattern, heads="grouped"))


PLAIN = Case(EVEN, num_tokens=331, kv_heads=2, head_dim=64)
NONE = Mods()
CASES = {
    "plain": (PLAIN, NONE),
    "causal": (replace(PLAIN, pattern=UNEVEN, is_causal=True), NONE),
    "gqa": (replace(PLAIN, group=3, head_dim=48, is_causal=True), NONE),
    "head_dim_24": (replace(PLAIN, pattern=UNEVEN, head_dim=24), NONE),
    "head_dim_128": (replace(PLAIN, head_dim=128, is_causal=True), NONE),
    "strided": (replace(PLAIN, batch=2, strided=True), NONE),
    "padding": (replace(PLAIN, batch=3, pattern=UNEVEN, ignored=0.3), NONE),
    "padding_everywhere": (replace(PLAIN, batch=2, num_tokens=131, ignored=1.0), NONE),
    "documents": (replace(PLAIN, borders=(0, 1, 1, 130, 331), is_causal=True), NONE),
    "grouped": (grouped_heads(replace(PLAIN, kv_heads=5)), NONE),
    "zero_padding": (replace(PLAIN, pattern=DilatedPattern((60, 66, 340), (1, 3, 5), zero_padding=True)), NONE),
    "detach_weights": (replace(PLAIN, pattern=replace(EVEN, detach_weights=True), lse_gradient=False), NONE),
    "short": (replace(PLAIN, num_tokens=67, is_causal=True), NONE),
    "score_mod": (replace(PLAIN, batch=2), Mods("table")),
    "mask_mod": (replace(PLAIN, group=2, pattern=UNEVEN, is_causal=True), Mods(None, "thirds")),
    # Blocks that are seen whole, more or fewer of them in a row than of the others: lists of both kinds.
    "full_blocks": (replace(PLAIN, pattern=FULL, num_tokens=LONGEST), NONE),
    "full_blocks_causal": (replace(PLAIN, pattern=FULL, num_tokens=LONGEST, kv_heads=4, is_causal=True), NONE),
    "both_mods": (replace(PLAIN, borders=(0, 130, 331), pattern=UNEVEN), Mods("table", "thirds")),
}
ALWAYS_PACKED = ("zero_padding", "detach_weights")  # what a single softmax does not express
CALLS = [(name, layout) for name in CASES for layout in LAYOUTS if layout == "packed" or name not in ALWAYS_PACKED]


def force(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(flexdilated.backends.flex.backend, "choose_layout", lambda pattern, call: layout)


def run(case: Case, mods: Mods, dtype: torch.dtype) -> list[Tensor]:
    """The results of the flex backend."""
    return run_mods(dilated_attention, case, mods, dtype=dtype, device=DEVICE, return_lse=True, backend="flex")


def run_definition(case: Case, mods: Mods, dtype: torch.dtype) -> list[Tensor]:
    return run_mods(reference.dilated_attention, case, mods, dtype=dtype, in_float64=True)
