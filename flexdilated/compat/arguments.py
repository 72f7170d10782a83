"""What every argument of the earlier packages means here; those that have no effect warn."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Literal, NamedTuple, ParamSpec, TypeVar

PACKAGE = os.path.dirname(__file__) + os.sep

Warns = Literal["never", "always", "without parameters"]


class Argument(NamedTuple):
    """What an argument of the earlier packages means here, or why it is no longer needed; and which classes warn of it."""

    meaning: str
    warns: Warns = "never"


#: Every argument, with the text of the warnings and of the table in docs/migration.md.
ARGUMENTS: dict[str, Argument] = {
    "segment_lengths": Argument("tokens per segment, one per branch; the sequence need not be a multiple of them"),
    "dilation_rates": Argument("every r-th token of a segment is kept, one rate per branch"),
    "softmax_scale": Argument("multiplies the scores; None: head_dim ** -0.5"),
    "attention_dropout": Argument("probability of dropping an attention weight in training"),
    "dropout": Argument(
        "probability of dropping an attention weight in training, and in transformer layers an element of what a branch adds too"
    ),
    "bias": Argument("whether the four projections have a bias"),
    "layer_norm": Argument(
        "whether a LayerNorm stands before the output projection; its weights load under their earlier name `norm` too"
    ),
    "layer_norm_eps": Argument("epsilon of that LayerNorm"),
    "gamma_init": Argument("gain of the initial value and output projections"),
    "ring_size": Argument(
        "ranks that share the work on a whole sequence, which all of them hold: 1, or all ranks of `group`, as by default"
    ),
    "group": Argument(
        "process group whose ranks are the ring; None: the default group, where there is one; "
        "the earlier packages had no such argument"
    ),
    "d_model": Argument("elements of a token"),
    "nhead": Argument("heads; must divide `d_model`"),
    "num_encoder_layers": Argument("layers of the encoder"),
    "num_decoder_layers": Argument("layers of the decoder"),
    "dim_feedforward": Argument("elements inside the feed-forward networks"),
    "activation": Argument("of the feed-forward networks: 'relu', 'gelu' or a function of a tensor"),
    "attention_type": Argument("which of the classes is built; all compute the same, 'ring' over the ranks of a ring"),
    "use_checkpointing": Argument("computes the layer again in the backward pass instead of keeping it; off unless given"),
    "use_hilbert": Argument("whether queries, keys and values are reordered along a Hilbert curve, and outputs put back"),
    "grid": Argument("(height, width) of the 2-D tokens that a Hilbert curve orders; the earlier packages had no such argument"),
    "device": Argument(
        "where the parameters live; attention without parameters computes where its inputs are", "without parameters"
    ),
    "dtype": Argument("of the parameters; attention without parameters computes in the dtype of its inputs", "without parameters"),
    "op": Argument(
        "the kernel is chosen by device, dtype and mask; to name one, use flexdilated.dilated_attention(backend=...)", "always"
    ),
    "use_flash_attention": Argument(
        "the kernel is chosen by device, dtype and mask; to name one, use flexdilated.dilated_attention(backend=...)", "always"
    ),
    "use_tf32": Argument("a layer changes no global setting; call torch.set_float32_matmul_precision", "always"),
    "enable_memory_pool": Argument(
        "there is nothing to pool: branches are views, and only q, k, v, out and lse are kept", "always"
    ),
    "lightweight_pool": Argument("there is no memory pool", "always"),
    "enable_profiling": Argument("a layer does not profile itself; use torch.profiler", "always"),
    "use_pattern_cache": Argument("the plan of a pattern is plain integers and always cached", "always"),
    "block_size": Argument("the kernel chooses its own blocks", "always"),
    "hilbert_chunk_size": Argument("one curve covers the whole grid", "always"),
}


P = ParamSpec("P")
R = TypeVar("R")


def warns(*when: Warns) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """One warning for each argument that a call was given though it has no effect, at the line that gave it.

    Python shows a warning once per such line, so a loop that builds layers warns once.

    Args:
        *when: Which arguments of the call have none, by what the table says of them.
    """

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(call)

        @functools.wraps(call)
        def warned(*args: P.args, **options: P.kwargs) -> R:
            result = call(*args, **options)
            for name, value in signature.bind(*args, **options).arguments.items():
                if value is not None and name in ARGUMENTS and ARGUMENTS[name].warns in when:
                    warnings.warn(f"{name} has no effect: {ARGUMENTS[name].meaning}", stacklevel=_level_of_user())
            return result

        return warned

    return decorate


def _level_of_user() -> int:
    """The `stacklevel` of the first frame outside of this package, for a warning by the function that asks."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
