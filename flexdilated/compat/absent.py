"""Names of earlier packages that are not here, and what to use instead."""

from __future__ import annotations

ARGUMENTS = "the arguments of the classes themselves, such as RingDilatedAttention(segment_lengths, dilation_rates, dropout)"
RING = "RingDilatedAttention(segment_lengths, dilation_rates, dropout)"
MESH = "flexdilated.DilatedAttention(mesh=...) or flexdilated.MultiheadDilatedAttention(mesh=...)"
MASK_MOD = "flexdilated.dilated_attention(mask_mod=...), which drops pairs by a function of their positions"

_NAMES = {
    "flexdilated.LongNetLM(flexdilated.LongNetConfig(...)), which is decoder-only; weights do not carry over": "LongNetLM",
    ARGUMENTS: "DilatedAttentionConfig MultiheadConfig RingAttentionConfig StandardizedRingConfig",
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
