"""Dilated attention (LongNet) for PyTorch: exact, differentiable, on any device."""

from flexdilated.attention import dilated_attention as dilated_attention
from flexdilated.nn import DilatedAttention as DilatedAttention
from flexdilated.nn import LongNetConfig as LongNetConfig
from flexdilated.nn import LongNetLM as LongNetLM
from flexdilated.nn import MultiheadDilatedAttention as MultiheadDilatedAttention
from flexdilated.pattern import DilatedPattern as DilatedPattern

__version__ = "0.1.0"
