"""The arguments of the earlier packages: what each one does here, or why it has no effect."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

PACKAGE = os.path.dirname(__file__) + os.sep

T = TypeVar("T", bound=Callable[..., Any])


class Argument(NamedTuple):
    """What an argument does, or why it has no effect; and which classes warn when they receive it."""

    meaning: str
    warns: Literal["never", "always", "without parameters"] = "never"


KERNEL = "the kernel is chosen by device, dtype and mask; to name one, use flexdilated.dilated_attention(backend=...)"

#: Every argument, with the text of the warnings and of the table in docs/migration.md.
ARGUMENTS: dict[str, Argument] = {
    "segment_lengths": Argument("tokens per segment, one length per branch; the sequence may have any length"),
    "dilation_rates": Argument("one rate r per branch: every r-th token of a segment is kept"),
    "softmax_scale": Argument("multiplies the scores; None: head_dim ** -0.5"),
    "attention_dropout": Argument("probability of dropping an attention weight in training"),
    "dropout": Argument("probability of dropping an attention weight in training; transformer layers also drop activations"),
    "bias": Argument("whether the four projections have a bias"),
    "layer_norm": Argument("whether the output projection has a LayerNorm before it; weights named `norm` load too"),
    "layer_norm_eps": Argument("epsilon of every LayerNorm"),
    "gamma_init": Argument("gain of the initial weights of value, output and feed-forward projections"),
    "ring_size": Argument("number of ranks that share the work on a whole sequence: 1, or all ranks of `group` (default)"),
    "group": Argument("process group of the ring; None: the default group, if there is one; new here"),
    "d_model": Argument("elements of a token"),
    "nhead": Argument("heads; must divide `d_model`"),
    "num_encoder_layers": Argument("layers of the encoder"),
    "num_decoder_layers": Argument("layers of the decoder"),
    "dim_feedforward": Argument("elements inside the feed-forward networks"),
    "activation": Argument("activation of the feed-forward networks: 'relu', 'gelu' or a function of a tensor"),
    "attention_type": Argument("which class is built; all compute the same attention, 'ring' over several ranks"),
    "use_checkpointing": Argument("whether the backward pass recomputes the layer instead of storing its tensors; default False"),
    "use_hilbert": Argument("whether queries, keys and values are reordered along a Hilbert curve, and outputs restored"),
    "grid": Argument("(height, width) of the 2-D tokens that a Hilbert curve orders; new here"),
    "device": Argument("device of the parameters; attention without parameters runs where its inputs are", "without parameters"),
    "dtype": Argument("dtype of the parameters; attention without parameters uses that of its inputs", "without parameters"),
    "op": Argument(KERNEL, "always"),
    "use_flash_attention": Argument(KERNEL, "always"),
    "use_tf32": Argument("a layer changes no global setting; call torch.set_float32_matmul_precision", "always"),
    "enable_memory_pool": Argument("there is nothing to pool: branches are views, only q, k, v, out and lse are kept", "always"),
    "lightweight_pool": Argument("there is no memory pool", "always"),
    "enable_profiling": Argument("a layer does not profile itself; use torch.profiler", "always"),
    "use_pattern_cache": Argument("the plan of a pattern is always cached", "always"),
    "block_size": Argument("the kernel chooses its own blocks", "always"),
    "hilbert_chunk_size": Argument("one curve covers the whole grid", "always"),
}


def ignores(*keywords: str, last: str | None = None) -> Callable[[T], T]:
    """Let a class or function accept arguments that have no effect, with a warning for each one that is not None.

    `inspect.signature` shows these arguments. Type checkers see only the arguments that have an effect.

    Args:
        *keywords: Names in `ARGUMENTS`, accepted by keyword.
        last: One more name, accepted by keyword and as the last positional argument.
    """
    ignored = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation="object") for name in keywords]
    if last is not None:
        ignored.append(inspect.Parameter(last, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation="object"))

    def decorate(target: T) -> T:
        call: Callable[..., Any] = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        own = inspect.signature(call)
        signature = own.replace(parameters=sorted([*own.parameters.values(), *ignored], key=lambda parameter: parameter.kind))

        @functools.wraps(call)
        def warned(*args: Any, **options: Any) -> Any:
            try:
                given = signature.bind(*args, **options)
            except TypeError as error:
                raise TypeError(f"{target.__name__}() {error}") from None
            names = [x.name for x in ignored if given.arguments.pop(x.name, None) is not None]
            result = call(*given.args, **given.kwargs)
            for name in names:
                warnings.warn(f"{name} has no effect: {ARGUMENTS[name].meaning}", stacklevel=_level_of_user())
            return result

        warned.__signature__ = signature  # type: ignore[attr-defined]
        if not isinstance(target, type):
            return warned  # type: ignore[return-value]
        target.__init__ = warned  # type: ignore[misc]
        return target

    return decorate


def _level_of_user() -> int:
    """The `stacklevel` of the first frame outside of this package, for a warning by the caller."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
