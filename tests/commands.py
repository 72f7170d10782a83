"""Commands as a user runs them."""

from __future__ import annotations

from typer.testing import CliRunner

from flexdilated.cli import app


def invoke(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `flexdilated` with these arguments."""
    result = CliRunner(env={"TERMINAL_WIDTH": "160"}).invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr
