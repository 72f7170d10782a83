"""Modules: dilated attention, its multi-head layer, positions, and LongNet."""

from flexdilated.nn.attention import DilatedAttention as DilatedAttention
from flexdilated.nn.attention import MultiheadDilatedAttention as MultiheadDilatedAttention
from flexdilated.nn.config import LongNetConfig as LongNetConfig
from flexdilated.nn.longnet import LongNetLM as LongNetLM
from flexdilated.nn.position import Rotary as Rotary
from flexdilated.nn.position import Rotation as Rotation
from flexdilated.nn.position import XPos as XPos
from flexdilated.nn.seq2seq import CrossAttention as CrossAttention
from flexdilated.nn.seq2seq import DecoderBlock as DecoderBlock
from flexdilated.nn.seq2seq import LongNet as LongNet
from flexdilated.nn.transformer import Block as Block
from flexdilated.nn.transformer import FeedForward as FeedForward

__all__ = [
    "Block",
    "CrossAttention",
    "DecoderBlock",
    "DilatedAttention",
    "FeedForward",
    "LongNet",
    "LongNetConfig",
    "LongNetLM",
    "MultiheadDilatedAttention",
    "Rotary",
    "Rotation",
    "XPos",
]
