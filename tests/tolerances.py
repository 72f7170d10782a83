"""The one table of tolerances."""

import torch
from torch import Tensor

# float64 against float64 computed in another order.
EXACT = {"atol": 1e-10, "rtol": 1e-10}
# float32 against float64, logits and values of order 1.
SINGLE = {"atol": 1e-5, "rtol": 1e-5}
# The lse of half-precision inputs: aten's CPU flash kernel itself errs by up to 7e-5 there, by 5e-7 in float32.
HALF_LSE = {"atol": 2e-4, "rtol": 2e-4}
# float64 against numbers stored in float32.
GOLDEN = {"atol": 1e-6, "rtol": 0.0}
# Low precision: the error may be this many times that of plain PyTorch in the same dtype (the rule of flash-attention's tests).
NAIVE_FACTOR = 2.0


def assert_twice_naive(actual: Tensor, naive: Tensor, expected: Tensor) -> None:
    """The largest error of `actual` is at most `NAIVE_FACTOR` times that of `naive`, both against the float64 `expected`."""
    actual, naive = actual.double(), naive.double()
    allowed = NAIVE_FACTOR * (naive - expected).abs().max().item()
    torch.testing.assert_close(actual, expected, atol=allowed, rtol=0.0)
