"""flex_attention by dense operations that autograd differentiates; its lists of blocks are taken at their word.

A pair is scored when its block is listed; in a block listed as full the mask function is not asked, as in the kernels.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexdilated import DilatedPattern
from flexdilated.backends import BACKENDS
from flexdilated.backends.flex import backend, kernel
from flexdilated.core.call import Call
from flexdilated.core.lse import accumulated


def visited(block_mask: BlockMask, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Whether a pair lies in a partial and in a full block: `(1 or heads, rows, columns)` bool each."""
    size = block_mask.BLOCK_SIZE[0]
    found = []
    for counts, indices in (
        (block_mask.kv_num_blocks, block_mask.kv_indices),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        assert counts is not None
        assert indices is not None
        assert counts.dtype == indices.dtype == torch.int32
        blocks = torch.zeros(counts.shape[1], counts.shape[2], -(-columns // size), dtype=torch.bool)
        for h in range(counts.shape[1]):
            for i in range(counts.shape[2]):
                blocks[h, i, indices[0, h, i, : counts[0, h, i]].long()] = True
        found.append(blocks.repeat_interleave(size, 1)[:, :rows].repeat_interleave(size, 2)[:, :, :columns])
    assert not (found[0] & found[1]).any()
    return found[0], found[1]


def call(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, block_mask: BlockMask, scale: float, want_lse: bool, kind: object
) -> tuple[Tensor, Tensor | None]:
    """Takes the place of `flexdilated.backends.flex.call`."""
    hash(kind)
    group = q.shape[1] // k.shape[1]
    dtype, wide = q.dtype, accumulated(q.dtype)
    q, k, v = q.to(wide), *(x.repeat_interleave(group, dim=1).to(wide) for x in (k, v))
    b = torch.arange(q.shape[0])[:, None, None, None]
    h = torch.arange(q.shape[1])[:, None, None]
    q_idx, kv_idx = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    assert block_mask.seq_lengths == (q.shape[2], k.shape[2])
    scores = q @ k.transpose(-1, -2) * scale
    if score_mod is not None:
        scores = score_mod(scores, b, h, q_idx, kv_idx)
    partial, full = visited(block_mask, q.shape[2], k.shape[2])
    seen = full | (partial & block_mask.mask_mod(b, h, q_idx, kv_idx))
    scores = torch.where(seen, scores, -math.inf)
    reached = (scores != -math.inf).any(dim=-1, keepdim=True)
    lse = torch.logsumexp(scores.masked_fill(~reached, 0.0), dim=-1, keepdim=True)
    out = (torch.exp(scores - lse) * reached) @ v
    return out.to(dtype), lse.masked_fill(~reached, -math.inf)[..., 0] if want_lse else None


def emulate(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Every call takes a layout, and the kernel is the emulation: only the kernel itself needs a GPU."""
    monkeypatch.setattr(kernel, "call", call)
    monkeypatch.setitem(BACKENDS, "flex", lambda request: None)
    monkeypatch.setattr(backend, "_on_cpu", lambda q: False)
    monkeypatch.setattr(backend, "choose_layout", lambda pattern, call: layout)


def flex_backend(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, **options: Any) -> tuple[Tensor, Tensor]:
    call = Call(pattern, scale=q.shape[3] ** -0.5, return_lse=True)._replace(**options)
    out, lse = backend.attend_flex(q, k, v, call)
    assert lse is not None
    return out, lse
