"""Options, sizes, and the record that every benchmark leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

# The memory benchmarks start a process that imports its function by name, and importlib mode leaves the root out of sys.path.
# Last, so that an installed package wins.
sys.path.append(str(Path(__file__).parents[1]))


@dataclass(frozen=True)
class Sizes:
    """Token counts and repetitions; `NUM_HEADS` and `HEAD_DIM` of `benchmarks.attention` hold everywhere."""

    overhead: int
    growth: tuple[int, int]
    dense: tuple[int, ...]
    crossover: tuple[int, ...]
    documents: tuple[int, int]  # how many, tokens in all
    short_documents: int
    training: int
    steps: tuple[int, ...]  # tokens of a language model's training step
    rounds: int
    quick: bool


FULL = Sizes(
    overhead=32768,
    growth=(16384, 65536),
    dense=(16384, 32768),
    crossover=(1024, 2048, 4096, 8192, 16384, 32768),
    documents=(256, 65536),
    short_documents=4096,
    training=8192,
    steps=(2048, 8192, 32768),
    rounds=5,
    quick=False,
)
QUICK = Sizes(
    overhead=2048,
    growth=(1024, 4096),
    dense=(2048,),
    crossover=(1024, 2048),
    documents=(16, 4096),
    short_documents=256,
    training=1024,
    steps=(1024,),
    rounds=2,
    quick=True,
)
LONG = 65536


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flexdilated")
    group.addoption("--quick", action="store_true", help="small sizes: whether the benchmarks run, not what they say")
    group.addoption("--long", action="store_true", help=f"also compare with dense attention over {LONG} tokens, some minutes each")


def sizes_of(config: pytest.Config) -> Sizes:
    """The sizes that the command line asks for."""
    return QUICK if config.getoption("--quick") else FULL


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "dense_tokens" in metafunc.fixturenames:
        longest = (LONG,) if metafunc.config.getoption("--long") else ()
        metafunc.parametrize("dense_tokens", sizes_of(metafunc.config).dense + longest)
    if "step_tokens" in metafunc.fixturenames:
        metafunc.parametrize("step_tokens", sizes_of(metafunc.config).steps)


@pytest.fixture(scope="session")
def sizes(request: pytest.FixtureRequest) -> Sizes:
    """The sizes of this run."""
    return sizes_of(request.config)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every benchmark starts from the same random numbers."""
    torch.manual_seed(2307)


@pytest.fixture
def record(benchmark: Any, sizes: Sizes) -> Callable[..., None]:
    """Write a benchmark's ratios, and what they were measured on, to its extra_info. Call it last, after the assertions."""
    from benchmarks.environment import describe
    from benchmarks.timing import Ratio

    def write(*ratios: Ratio, shape: tuple[int, ...], dtype: torch.dtype, **details: Any) -> None:
        benchmark.extra_info.update(describe())
        benchmark.extra_info.update(shape=list(shape), dtype=str(dtype).removeprefix("torch."), quick=sizes.quick)
        benchmark.extra_info.update(details)
        benchmark.extra_info["ratios"] = [ratio._asdict() for ratio in ratios]

    return write
