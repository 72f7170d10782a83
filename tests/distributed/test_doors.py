"""Every kind of branch over ranks, by each exchange."""

from itertools import product

import pytest

from tests.distributed.processes import Ranks, exactly
from tests.doors.cases import KINDS
from tests.doors.ranks import EXCHANGES, check_kind


@exactly(2, 3)
@pytest.mark.parametrize(("exchange", "kind"), list(product(EXCHANGES, KINDS)))
def test_ranks_give_what_the_definition_gives(ranks: Ranks, exchange: str, kind: str) -> None:
    ranks.run(check_kind, kind, exchange)
