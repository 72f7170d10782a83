"""Exported programs: `import flexdilated.export` registers the operators that they call; `portable` replaces them."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.nn.functional import gelu

import flexdilated.ordering  # noqa: F401  registers its operator
from flexdilated.backends.autograd.portable import mixture
from flexdilated.nn.padding import refuse_float_mask
from flexdilated.nn.position import rotary_angles, xpos_decay

__all__ = ["portable"]

FORMULAS = {
    "mixture": mixture,
    "mixture_by_values": mixture,  # which refuses them
    "rotary_angles": rotary_angles,
    "xpos_decay": xpos_decay,
    "gelu": gelu,
    "ignored_keys": refuse_float_mask,
}

WAYS_OUT = "use backend='sdpa', no mesh and no cache"


def portable(program: ExportedProgram) -> ExportedProgram:
    """The same program in core aten operators alone, for runtimes without Python or without this library.

    Each branch is then one dense attention, whose scores exist all at once: `B H N w / r^2` for a segment length w and a rate r,
    `1.5 B H N w` for a window of w tokens, `2.5 B H N w` if it is not causal; `B H N g` for g global tokens, twice as many if it
    is not causal. If N may exceed w, sequences are padded to a multiple of w: give `torch.export.Dim` its `max`.

    Args:
        program: What `torch.export.export` made of a model in evaluation mode.

    Raises:
        NotImplementedError: For packed documents (`cu_seqlens`), dropout, float masks, patterns with `zero_padding` whose rates do
            not divide their segments, and this library's other operators, such as those over a mesh.
    """
    table = torch.export.default_decompositions()
    table.update({getattr(torch.ops.flexdilated, name).default: formula for name, formula in FORMULAS.items()})
    decomposed = program.run_decompositions(table)
    targets = {str(node.target) for node in decomposed.graph.nodes}
    remaining = sorted(target for target in targets if target.startswith(("flexdilated.", "flex_attention")))
    if "flexdilated.grids.default" in remaining:
        raise NotImplementedError(
            "program must hold operators that have a portable form, got score_mod or mask_mod with a dynamic number of tokens; "
            "export it with a static one"
        )
    if remaining:
        raise NotImplementedError(f"program must hold operators that have a portable form, got {', '.join(remaining)}; {WAYS_OUT}")
    return decomposed
