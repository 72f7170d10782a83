"""Benchmarks: ratios of two measurements of one run, kept per class of machine. Not part of the package."""
