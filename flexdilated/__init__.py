"""Dilated attention (LongNet) for PyTorch: exact and differentiable, on CPUs and NVIDIA GPUs.

Public names are imported when they are first used, so that commands can answer without torch.
"""

import importlib.util
from typing import TYPE_CHECKING

from flexdilated._version import __version__ as __version__

if TYPE_CHECKING:
    from flexdilated.analysis import choose_pattern as choose_pattern
    from flexdilated.attention import dilated_attention as dilated_attention
    from flexdilated.conversion import convert as convert
    from flexdilated.core.lse import merge_attentions as merge_attentions
    from flexdilated.core.pattern import DilatedPattern as DilatedPattern
    from flexdilated.decode import DilatedKVCache as DilatedKVCache
    from flexdilated.draw.map import draw_attention_map as draw_attention_map
    from flexdilated.draw.pattern import draw as _draw
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

    draw_pattern = _draw
else:
    # Where running programs find the names above.
    _NAMES = {
        "analysis": "choose_pattern",
        "attention": "dilated_attention",
        "conversion": "convert",
        "core.lse": "merge_attentions",
        "core.pattern": "DilatedPattern",
        "decode": "DilatedKVCache",
        "draw.map": "draw_attention_map",
        "draw.pattern": "draw_pattern",
        "maps": "attention_map",
        "masks": "create_dilated_block_mask dilated_mask_mod dilated_score_mod",
        "nn": "DilatedAttention LongNet LongNetConfig LongNetLM MultiheadDilatedAttention",
        "tuning": "tune",
    }
    _MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

    __all__ = [*_MODULES]  # without the sub-modules: `from flexdilated import *` must not hide `torch.nn`

    def __getattr__(name):
        if name in _MODULES:
            module = importlib.import_module(f"flexdilated.{_MODULES[name]}")
            value = getattr(module, "draw" if name == "draw_pattern" else name)
        elif importlib.util.find_spec(f"flexdilated.{name}"):
            value = importlib.import_module(f"flexdilated.{name}")
        else:
            raise AttributeError(f"module 'flexdilated' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_MODULES})
