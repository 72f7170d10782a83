"""Dilated flash attention of our own, in Triton; holds nothing."""
