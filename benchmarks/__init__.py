"""Benchmarks: ratios of two measurements of one run, kept per class of machine. Not part of the package."""

import os

os.environ["FLEXDILATED_CACHE"] = "off"  # measurements are of the usual forms, whatever `flexdilated tune` kept here
