"""Names of earlier packages that are not here, and what to use instead."""

from __future__ import annotations

MESH = "flexdilated.DilatedAttention(mesh=...) or flexdilated.MultiheadDilatedAttention(mesh=...)"
MASK_MOD = "flexdilated.dilated_attention(mask_mod=...), which drops pairs by a function of their positions"
ARGUMENTS = "the arguments of the classes themselves, such as RingDilatedAttention(segment_lengths, dilation_rates, dropout)"
RING = "RingDilatedAttention(segment_lengths, dilation_rates, dropout, ring_size=...)"

# The text of the errors and of the table in docs/migration.md.
ABSENT: dict[str, str] = {
    "LongNetLM": "flexdilated.LongNetLM(flexdilated.LongNetConfig(...)), which is decoder-only; weights do not carry over",
    "DilatedAttentionConfig": ARGUMENTS,
    "MultiheadConfig": ARGUMENTS,
    "RingAttentionConfig": ARGUMENTS,
    "StandardizedRingConfig": ARGUMENTS,
    "RingDilatedAttentionProduction": RING,
    "RingDilatedAttentionV2": RING,
    "create_production_ring_attention": RING,
    "DistributedImprovedDilatedAttention": MESH,
    "DistributedImprovedMultiheadDilatedAttention": MESH,
    "DistributedConfig": MESH,
    "BlockSparseRingDilatedAttention": MASK_MOD,
    "BlockSparseRingDistributedDilatedAttention": MASK_MOD,
    "BlockSparseRingMultiheadDilatedAttention": MASK_MOD,
    "BlockSparseOptimized": MASK_MOD,
    "BlockSparseTorchSparse": MASK_MOD,
    "SparseAttentionConfig": MASK_MOD,
    "SparsePatternConfig": MASK_MOD,
    "SparsePatternGenerator": MASK_MOD,
    "DistributedSparseConfig": MASK_MOD,
    "DistributedSparsePattern": MASK_MOD,
    "PatternConfig": MASK_MOD,
    "PatternOptimizer": MASK_MOD,
    "PatternQualityAnalyzer": MASK_MOD,
    "PatternType": MASK_MOD,
    "create_adaptive_sparse_attention": MASK_MOD,
    "create_block_sparse_attention": MASK_MOD,
    "MemoryPoolConfig": "nothing: there is no memory pool",
}
