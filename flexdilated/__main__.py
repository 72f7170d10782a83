"""The entry point of `flexdilated`, and `python -m flexdilated`: the commands, or which extra they lack."""

import sys


def main() -> None:
    """Run the command line; exit code 2 and one line if the extra `cli` is not installed."""
    try:
        from flexdilated.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"error: {error.name} must be installed for commands, got none; pip install 'flexdilated[cli]'", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
