"""Names and arguments of the earlier packages that are not here, or have no effect."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flexdilated.core.pattern import DilatedPattern

Lengths = Sequence[int] | DilatedPattern  # in place of `segment_lengths`, with `dilation_rates=()`: a whole pattern, as it is
T = TypeVar("T", bound=Callable[..., Any])

KERNEL = "the kernel is chosen by device, dtype and mask; to name one, use flexdilated.dilated_attention(backend=...)"

#: Why arguments of the earlier packages have no effect in some classes, by name, as warnings and docs/migration.md say it.
ARGUMENTS: dict[str, str] = {
    "device": "device of the parameters; attention without parameters runs where its inputs are",
    "dtype": "dtype of the parameters; attention without parameters uses that of its inputs",
    "op": KERNEL,
    "use_flash_attention": KERNEL,
    "use_tf32": "a layer changes no global setting; call torch.set_float32_matmul_precision",
    "enable_memory_pool": "there is nothing to pool: branches are views, only q, k, v, out and lse are kept",
    "lightweight_pool": "there is no memory pool",
    "enable_profiling": "a layer does not profile itself; use torch.profiler",
    "use_pattern_cache": "the plan of a pattern is always cached",
    "use_checkpointing": "call the layer by torch.utils.checkpoint.checkpoint",
    "block_size": "the kernel chooses its own blocks",
    "ring_size": "each process computes the whole output; to share a sequence, use flexdilated.DilatedAttention(mesh=...)",
    "hilbert_chunk_size": "one curve covers the whole grid",
}

CLASSES = "the arguments of the classes themselves, such as RingDilatedAttention(segment_lengths, dilation_rates, dropout)"
RING = "RingDilatedAttention(segment_lengths, dilation_rates, dropout)"
MESH = "flexdilated.DilatedAttention(mesh=...) or flexdilated.MultiheadDilatedAttention(mesh=...)"
MASK_MOD = "flexdilated.dilated_attention(mask_mod=...), which drops pairs by a function of their positions"

_NAMES = {
    "flexdilated.LongNetLM(flexdilated.LongNetConfig(...)), which is decoder-only; weights do not carry over": "LongNetLM",
    CLASSES: "DilatedAttentionConfig MultiheadConfig RingAttentionConfig StandardizedRingConfig",
    RING: "RingDilatedAttentionProduction RingDilatedAttentionV2 create_production_ring_attention",
    MESH: "DistributedImprovedDilatedAttention DistributedImprovedMultiheadDilatedAttention DistributedConfig",
    MASK_MOD: (
        "BlockSparseRingDilatedAttention BlockSparseRingDistributedDilatedAttention BlockSparseRingMultiheadDilatedAttention "
        "BlockSparseOptimized BlockSparseTorchSparse SparseAttentionConfig SparsePatternConfig SparsePatternGenerator "
        "DistributedSparseConfig DistributedSparsePattern PatternConfig PatternOptimizer PatternQualityAnalyzer PatternType "
        "create_adaptive_sparse_attention create_block_sparse_attention"
    ),
    "nothing: there is no memory pool": "MemoryPoolConfig",
}

# Absent name to replacement: the text of the errors and of the table in docs/migration.md.
ABSENT: dict[str, str] = {name: use for use, names in _NAMES.items() for name in names.split()}


def pattern_of(segment_lengths: Lengths, dilation_rates: Sequence[int]) -> DilatedPattern:
    """The grouped pattern of these lengths and rates, or the pattern that is in place of the lengths.

    Raises:
        ValueError: If rates come with a pattern.
    """
    if not isinstance(segment_lengths, DilatedPattern):
        return DilatedPattern.grouped(segment_lengths, dilation_rates)
    if len(dilation_rates) > 0:
        raise ValueError(f"dilation_rates must be () with a pattern as segment_lengths, got {dilation_rates}")
    return segment_lengths


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
        accepted = inspect.signature(call)
        signature = accepted.replace(
            parameters=sorted([*accepted.parameters.values(), *ignored], key=lambda parameter: parameter.kind)
        )

        @functools.wraps(call)
        def warned(*args: Any, **options: Any) -> Any:
            try:
                bound = signature.bind(*args, **options)
            except TypeError as error:
                raise TypeError(f"{target.__name__}() {error}") from None
            names = [x.name for x in ignored if bound.arguments.pop(x.name, None) is not None]
            result = call(*bound.args, **bound.kwargs)
            for name in names:
                warnings.warn(f"{name} has no effect: {ARGUMENTS[name]}", stacklevel=2)
            return result

        warned.__signature__ = signature  # type: ignore[attr-defined]
        del warned.__wrapped__  # autodoc would look for the defaults of these arguments in its source
        if not isinstance(target, type):
            return warned  # type: ignore[return-value]
        target.__init__ = warned  # type: ignore[misc]
        return target

    return decorate
