"""Dilated attention (LongNet) for PyTorch: exact and differentiable, on CPUs and NVIDIA GPUs."""

from flexdilated._version import __version__ as __version__
from flexdilated.analysis import choose_pattern as choose_pattern
from flexdilated.attention import dilated_attention as dilated_attention
from flexdilated.convert import convert as convert
from flexdilated.core.lse import merge_attentions as merge_attentions
from flexdilated.core.pattern import DilatedPattern as DilatedPattern
from flexdilated.decode import DilatedKVCache as DilatedKVCache
from flexdilated.draw.map import draw_attention_map as draw_attention_map
from flexdilated.draw.pattern import draw as draw_pattern
from flexdilated.maps import attention_map as attention_map
from flexdilated.masks import create_dilated_block_mask as create_dilated_block_mask
from flexdilated.masks import dilated_mask_mod as dilated_mask_mod
from flexdilated.masks import dilated_score_mod as dilated_score_mod
from flexdilated.nn import DilatedAttention as DilatedAttention
from flexdilated.nn import LongNet as LongNet
from flexdilated.nn import LongNetConfig as LongNetConfig
from flexdilated.nn import LongNetLM as LongNetLM
from flexdilated.nn import MultiheadDilatedAttention as MultiheadDilatedAttention
from flexdilated.tuning import tune as tune

# Without the sub-modules: `from flexdilated import *` must not hide `torch.nn`.
__all__ = [
    "DilatedAttention",
    "DilatedKVCache",
    "DilatedPattern",
    "LongNet",
    "LongNetConfig",
    "LongNetLM",
    "MultiheadDilatedAttention",
    "attention_map",
    "choose_pattern",
    "convert",
    "create_dilated_block_mask",
    "dilated_attention",
    "dilated_mask_mod",
    "dilated_score_mod",
    "draw_attention_map",
    "draw_pattern",
    "merge_attentions",
    "tune",
]
