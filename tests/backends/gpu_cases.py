"""Calls for kernels on a CUDA device: longer than those of tests/doors, so that they take several tiles and descriptors."""

from dataclasses import replace

from flexdilated import DilatedPattern
from tests.cases import Case

PATTERN = DilatedPattern((31, 101, 257), (1, 3, 7))
LONG = DilatedPattern((1024, 2100), (1, 3))
BORDERS = (0, 7, 560, 565, 565, 1165, 1230, 1800, 2300)
SHORT = {
    "plain": Case(PATTERN, batch=2, num_tokens=263, kv_heads=7, head_dim=24),
    "gqa": Case(PATTERN, num_tokens=263, kv_heads=3, group=2, head_dim=48),
    "odd_head_dim": Case(PATTERN, num_tokens=263, kv_heads=3, head_dim=17),
    "head_dim_1": Case(PATTERN, batch=2, num_tokens=263, kv_heads=7, head_dim=1),
    "head_dim_64": Case(PATTERN, num_tokens=263, kv_heads=2, head_dim=64),
    "grouped": Case(DilatedPattern((31, 101), (2, 3), heads="grouped"), batch=2, num_tokens=263, kv_heads=5, head_dim=24),
    "mask": Case(PATTERN, batch=3, num_tokens=263, kv_heads=3, head_dim=24, ignored=0.3),
    "mask_gqa": Case(PATTERN, batch=2, num_tokens=131, kv_heads=2, group=3, head_dim=13, ignored=0.7),
    "mask_all": Case(PATTERN, batch=2, num_tokens=67, kv_heads=3, head_dim=24, ignored=1.0),
    "documents": Case(PATTERN, num_tokens=263, kv_heads=3, head_dim=24, borders=(0, 1, 1, 130, 263)),
    "strided": Case(PATTERN, batch=2, num_tokens=131, kv_heads=3, head_dim=24, strided=True),
    "zero_padding": Case(DilatedPattern.torchscale((29, 11, 17), (1, 3, 5)), num_tokens=41, kv_heads=7, head_dim=24),
    "detached": Case(replace(PATTERN, detach_weights=True), num_tokens=263, kv_heads=3, group=2, head_dim=48),
    "window": Case(replace(PATTERN, window=300), num_tokens=1301, kv_heads=2, group=2, head_dim=64),
    "head_dim_256": Case(PATTERN, num_tokens=263, kv_heads=2, head_dim=256),
}
CASES = {
    **SHORT,
    "negative_scale": replace(SHORT["gqa"], scale=-0.4),
    "head_dim_128": replace(SHORT["head_dim_64"], head_dim=128),
    # Segments of as many rows as tensor descriptors are made for: ragged, shared, at every size of tiles.
    "described": Case(LONG, num_tokens=2300, kv_heads=2, group=2, head_dim=128),
    "described_96": Case(LONG, num_tokens=2300, kv_heads=2, head_dim=96),
    "described_128": Case(LONG, num_tokens=2300, kv_heads=1, group=3, head_dim=128, borders=(0, 7, 1500, 2300)),
    "described_detached": Case(replace(LONG, detach_weights=True), num_tokens=2300, kv_heads=2, head_dim=128),
    "described_zero_keys": Case(DilatedPattern.torchscale((1024, 2100), (1, 3)), num_tokens=2300, kv_heads=2, head_dim=128),
    "described_256": Case(LONG, num_tokens=2300, kv_heads=1, group=2, head_dim=256),
    "many_documents": Case(LONG, num_tokens=2300, kv_heads=2, group=2, head_dim=64, borders=BORDERS),
    "described_documents": Case(LONG, num_tokens=2300, kv_heads=2, head_dim=128, borders=BORDERS),
    "window_mask": Case(DilatedPattern(window=5), num_tokens=571, kv_heads=2, head_dim=64, ignored=0.3),
    "described_window": Case(replace(LONG, window=700), num_tokens=2300, kv_heads=2, head_dim=128),
    "window_documents": Case(DilatedPattern(window=64), num_tokens=2300, kv_heads=2, head_dim=64, borders=BORDERS),
    "full_tiles": Case(DilatedPattern((256, 512), (1, 2)), num_tokens=1024, kv_heads=2, group=2, head_dim=64),
}
