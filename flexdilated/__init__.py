"""Dilated attention (LongNet) for PyTorch: exact, differentiable, on any device."""

from flexdilated.attention import dilated_attention as dilated_attention
from flexdilated.pattern import DilatedPattern as DilatedPattern

__version__ = "0.1.0"
