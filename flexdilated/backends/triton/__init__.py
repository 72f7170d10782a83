"""Dilated flash attention kernels in Triton."""
