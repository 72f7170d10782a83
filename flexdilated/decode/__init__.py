"""Decoding: the bounded key/value cache."""

from flexdilated.decode.cache import DilatedKVCache as DilatedKVCache

__all__ = ["DilatedKVCache"]
