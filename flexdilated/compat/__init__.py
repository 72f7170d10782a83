"""Names and arguments of earlier dilated-attention packages over the one implementation (docs/migration.md).

Every class and function accepts the arguments of the earlier one of that name, in their order. Arguments without effect warn, with
the reason that `ARGUMENTS` gives.
"""

from __future__ import annotations

from typing import NoReturn

from flexdilated.compat.arguments import ABSENT
from flexdilated.compat.arguments import ARGUMENTS as ARGUMENTS
from flexdilated.compat.attention import DilatedAttention as DilatedAttention
from flexdilated.compat.attention import ImprovedDilatedAttention as ImprovedDilatedAttention
from flexdilated.compat.attention import RingDilatedAttention as RingDilatedAttention
from flexdilated.compat.attention import RingDilatedAttentionHybridHilbert as RingDilatedAttentionHybridHilbert
from flexdilated.compat.factory import create_dilated_attention as create_dilated_attention
from flexdilated.compat.factory import create_multihead_dilated_attention as create_multihead_dilated_attention
from flexdilated.compat.multihead import ImprovedMultiheadDilatedAttention as ImprovedMultiheadDilatedAttention
from flexdilated.compat.multihead import MultiheadDilatedAttention as MultiheadDilatedAttention
from flexdilated.compat.multihead import RingMultiheadDilatedAttention as RingMultiheadDilatedAttention
from flexdilated.compat.multihead import RingMultiheadDilatedAttentionHybrid as RingMultiheadDilatedAttentionHybrid
from flexdilated.compat.transformer import DilatedTransformerDecoderLayer as DilatedTransformerDecoderLayer
from flexdilated.compat.transformer import DilatedTransformerEncoderLayer as DilatedTransformerEncoderLayer
from flexdilated.compat.transformer import LongNet as LongNet

# Other names of one class.
RingDilatedAttentionHybrid = RingDilatedAttention
RingDilatedAttentionHybridFixed = RingDilatedAttention
RingDilatedAttentionV2Collective = RingDilatedAttention
RingDilatedAttentionV3 = RingDilatedAttention
RingAdvancedDistributedDilatedAttention = RingMultiheadDilatedAttention


def __getattr__(name: str) -> NoReturn:
    if name in ABSENT:  # an AttributeError would lose its text on the way through "from ... import"
        raise ImportError(f"{name} is not in flexdilated.compat; use {ABSENT[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
