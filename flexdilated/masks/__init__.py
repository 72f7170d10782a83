"""A pattern as FlexAttention parts: mask function, score function, block mask."""

from flexdilated.masks.block_mask import create_dilated_block_mask as create_dilated_block_mask
from flexdilated.masks.functions import dilated_mask_mod as dilated_mask_mod
from flexdilated.masks.functions import dilated_score_mod as dilated_score_mod

__all__ = [
    "create_dilated_block_mask",
    "dilated_mask_mod",
    "dilated_score_mod",
]
