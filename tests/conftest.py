"""Seeds, the markers, the hypothesis profile, and the threads of pytest-xdist's workers."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():  # read when triton is imported: the kernels of backend="triton" then run on CPU tensors
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["FLEXDILATED_CACHE"] = "off"  # what a user measured changes no test; tests/test_tuning.py has folders of its own

# Inductor's C++ takes a third of the time without trial programs for vector instructions, and without a precompiled header.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

# Spawned ranks import tests by name, and importlib mode leaves the root out of sys.path. Last, so that an installed package wins.
sys.path.append(str(Path(__file__).parents[1]))

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    torch.set_num_threads(1)

hypothesis.settings.register_profile("flexdilated", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("flexdilated")


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed that every test starts from."""
    torch.manual_seed(2307)
    return 2307


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file to train on."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 101)
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # a long test that begins last would leave the other workers without any
        items.sort(key=lambda item: "slow" not in item.keywords)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share processes or a slow fixture go to one worker, and first; others one by one to whichever is free.

    The place of a test is read from its name: xdist 3.8 loses the groups of its own marker under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            world_size = re.search(r"\b\d+_ranks\b", nodeid)
            file = nodeid.split("::")[0]
            return world_size[0] if world_size else file if "test_doctor" in file else nodeid

    return Scheduler(config, log)
