"""`flexdilated explorer`: the page that draws a pattern while its fields and sliders change, in the browser."""

from __future__ import annotations

import threading
import webbrowser
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

import typer

from flexdilated.cli.refusal import refuse

FILES = Path(__file__).parents[1] / "explorer"


class _Files(SimpleHTTPRequestHandler):
    """The files of the page, without a line on standard error for each request or connection that a browser drops."""

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


def explorer(
    state: Annotated[str, typer.Argument(metavar="[STATE]", help="A state of the page: the part of its address after #.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1. 0: a free port.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the browser, or print the address only.")] = True,
) -> None:
    """Serve the explorer on this machine until Ctrl-C, and open it in the browser. `flexdilated choose` prints states."""
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Files, directory=str(FILES)))
    except OSError as error:
        refuse(f"--port must be free on 127.0.0.1, got {port} ({error.strerror}); 0 takes a free port")
    with server:
        address = f"http://127.0.0.1:{server.server_port}/" + f"#{state.removeprefix('#')}" * bool(state)
        typer.echo(address)
        typer.echo("Ctrl-C ends the server.", err=True)
        if browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo(err=True)  # ends the line of ^C
