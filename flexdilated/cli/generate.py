"""`flexdilated generate`: a text continued by a trained model of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexdilated.cli.options import CudaDeviceOption, device_named
from flexdilated.cli.refusal import refuse

if TYPE_CHECKING:
    from flexdilated.nn.longnet import LongNetLM


def generate(
    model: Annotated[
        Path, typer.Option(help="Folder of a byte-level model, as `flexdilated train` writes it (runs/longnet/dilated).")
    ],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="File whose text to continue.")] = None,
    num_bytes: Annotated[int, typer.Option("--bytes", min=1, help="Bytes to write after the prompt.")] = 240,
    temperature: Annotated[float, typer.Option(min=0.0, help="Divides the logits; 0 takes the likeliest byte.")] = 0.7,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among the k likeliest bytes.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw among the likeliest bytes that together reach this probability.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the bytes drawn.")] = 0,
    device: CudaDeviceOption = "auto",
) -> None:
    """Continue a text with a trained model, and print both. Time and memory per byte do not grow with the length of the text."""
    from flexdilated.training.corpus import BYTES
    from flexdilated.training.weights import read_model

    prompt_bytes = prompt_file.read_bytes() if prompt_file is not None else (prompt or "").encode()
    if (prompt and prompt_file) or not prompt_bytes:
        refuse("--prompt or --prompt-file must be given, one of them and with at least one byte")
    loaded = read_model("--model", model, device_named(device, auto=["cuda"]))
    if loaded.config.vocab_size != BYTES:
        refuse(f"--model must be a model of bytes, with vocab_size={BYTES}, got vocab_size={loaded.config.vocab_size}")
    text = continued(loaded, prompt_bytes, num_bytes=num_bytes, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p)
    typer.echo(printable(text))


def printable(text: bytes) -> str:
    """The text for a terminal: any control character but a tab and a newline is replaced."""
    return "".join(
        character if character.isprintable() or character in "\t\n" else "\ufffd" for character in text.decode("utf-8", "replace")
    )


def continued(model: LongNetLM, prompt: bytes, *, num_bytes: int, seed: int, **options: Any) -> bytes:
    """`prompt` continued by `num_bytes` bytes drawn from the model, with the options of its `generate`."""
    import torch

    tokens = torch.tensor([list(prompt)], device=model.embedding.weight.device)
    drawn = model.generate(tokens, max_new_tokens=num_bytes, generator=torch.Generator().manual_seed(seed), **options)
    return prompt + bytes(drawn[0].tolist())
