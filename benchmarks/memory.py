"""Peak memory of one attention call, in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from benchmarks.attention import assert_rows_match_definition, forward, forward_backward, random_inputs
from flexdilated import DilatedPattern

Direction = Literal["forward", "forward+backward"]

WARM_UP_TOKENS = 1024


class Peak(NamedTuple):
    """Bytes.

    Args:
        peak: The highest resident size of the process during the call, less its resident size before the first tensor of the
            call existed. So it counts the inputs, the results and everything temporary, and neither libraries nor threads.
        tensors: What the call takes and returns: q, k, v and out, with a backward also dout, dq, dk and dv.
    """

    peak: int
    tensors: int


def peak_memory(num_tokens: int, dtype: torch.dtype, direction: Direction, pattern: DilatedPattern) -> Peak:
    """The peak of one call, measured in a fresh process with as many threads as this one.

    Raises:
        OSError: Without Linux's `/proc/self/status`.
        BrokenProcessPool: If the process was killed, for want of memory above all.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(_measure, num_tokens, dtype, direction, pattern, torch.get_num_threads()).result()


def _measure(num_tokens: int, dtype: torch.dtype, direction: Direction, pattern: DilatedPattern, threads: int) -> Peak:
    torch.set_num_threads(threads)
    # A small call loads libraries, starts threads and compiles what is compiled once; its tensors go back to the system.
    warm_up = random_inputs(WARM_UP_TOKENS, dtype)
    forward_backward(warm_up, pattern)
    del warm_up
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)

    before = _status("VmRSS")
    x = random_inputs(num_tokens, dtype, dout=direction == "forward+backward")
    results = (forward(x, pattern),) if x.dout is None else forward_backward(x, pattern)
    peak = _status("VmHWM") - before

    assert_rows_match_definition(x, pattern, *results[:2])
    return Peak(peak, sum(t.nbytes for t in (*x, *results) if t is not None))


def _status(field: str) -> int:
    """A size that the kernel keeps of this process, in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/self/status must have a line {field}, it has none")
    return int(match[1]) * 1024
