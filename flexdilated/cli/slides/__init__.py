"""`flexdilated slides`: the commands for slides."""

from __future__ import annotations

import typer

from flexdilated.cli.refusal import Command
from flexdilated.cli.slides import encode, encode_all, map

app = typer.Typer(name="slides", help="Encode slides, and draw what of a slide an encoder looks at.")
app.command(cls=Command)(encode.encode)
app.command(cls=Command)(encode_all.encode_all)
app.command("map", cls=Command)(map.map_slide)
