"""Commands as a user runs them, and as torchrun starts them."""

import os
from collections.abc import Callable, Collection
from pathlib import Path

import torch.distributed as dist
from typer.testing import CliRunner

from flexdilated.cli import app
from tests.distributed.processes import Ranks


def invoke(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `flexdilated` with these arguments."""
    result = CliRunner(env={"TERMINAL_WIDTH": "160"}).invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: object) -> str:
    """The one line by which a command refuses, without `error: `."""
    code, out, err = invoke(*arguments)
    assert (code, out, err.count("\n"), err[:7]) == (2, "", 1, "error: "), err
    return err[7:]


def invoke_ranks(
    num_ranks: int, folder: Path, *arguments: object, prepare: Callable[[int], None] | None = None, ending: Collection[int] = ()
) -> list[tuple[int, str, str]]:
    """What `invoke` gives on each rank of one start.

    The ranks find in their environment what torchrun puts there, but are processes of ours, which need not import torch one by
    one. The ends of their processes are not those of the command; what torchrun itself does, tests/training/test_ranks.py shows.

    `folder` is the working directory. `prepare(rank)` is called first. The processes of ranks in `ending` must end, and give None.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # torchrun's, which no rank takes with it
    with Ranks(num_ranks, folder, timeout=None) as ranks:
        return ranks.run(_invoke, store.port, num_ranks, folder, prepare, arguments, ending=ending)


def _invoke(
    rank: int,
    _: None,
    port: int,
    num_ranks: int,
    folder: Path,
    prepare: Callable[[int], None] | None,
    arguments: tuple[object, ...],
) -> tuple[int, str, str]:
    found = {"WORLD_SIZE": num_ranks, "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in {**found, **agent}.items()})
    os.chdir(folder)
    if prepare is not None:
        prepare(rank)
    return invoke(*arguments)
