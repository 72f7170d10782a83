"""The processes of tests/distributed, for the tests of this folder that need some."""

from tests.distributed.conftest import ranks  # noqa: F401
