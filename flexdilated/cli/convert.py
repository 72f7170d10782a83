"""`flexdilated convert`: a saved model of the transformers library in, the same weights under a dilated pattern out."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flexdilated.cli import options
from flexdilated.cli.refusal import first_line, refuse
from flexdilated.core.pattern import DilatedPattern


def convert(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", exists=True, file_okay=False, help="A model that `save_pretrained` of transformers wrote."
        ),
    ],
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of the longest sequence.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write, which must not exist.")],
    budget: options.BudgetOption = 0.1,
) -> None:
    """Give a saved model of the transformers library dilated attention, by the first pattern of `flexdilated choose`.

    The weights are copied as they are: train the model further, since each token sees fewer keys than before.
    """
    if find_spec("transformers") is None:
        refuse("transformers must be installed to convert its models, got none; pip install 'flexdilated[transformers]'")
    if output.exists():
        refuse(f"--output must not exist, got '{output}'; use another name")
    if folder.resolve() in output.resolve().parents:
        refuse(f"--output must be outside FOLDER, got '{output}'")
    from transformers import AutoConfig  # an extra

    from flexdilated.hub.transformers import set_pattern

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        refuse(f"FOLDER must hold a model of the transformers library, got '{folder}': {first_line(error)}")
    set_pattern(config, "auto", tokens=tokens, budget=budget)
    shutil.copytree(folder, output)
    config.save_pretrained(output)
    typer.echo(f"wrote '{output}' with {DilatedPattern.from_dict(config.dilated_pattern)!r}; load it by")
    typer.echo("    import flexdilated.hub.transformers")
    typer.echo(f"    AutoModel.from_pretrained({str(output)!r}, attn_implementation='flexdilated')  # or another auto class")
