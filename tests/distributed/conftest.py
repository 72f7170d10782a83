"""Processes that the tests of all files share: a start takes seconds."""

from collections.abc import Iterator

import pytest

from tests.distributed.processes import WORLD_SIZES, Ranks, each_size


@pytest.fixture(scope="session", params=[each_size(size) for size in WORLD_SIZES])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.kill()
