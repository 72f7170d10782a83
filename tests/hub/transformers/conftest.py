"""Two processes for all tests of this folder that need some."""

from collections.abc import Iterator

import pytest

from tests.distributed.processes import Ranks


@pytest.fixture(scope="session", params=["2_ranks"])
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks
