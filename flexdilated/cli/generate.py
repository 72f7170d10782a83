"""`flexdilated generate`: a text continued by a trained model of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors import SafetensorError

from flexdilated.cli.options import CudaDeviceOption, device_named
from flexdilated.cli.refusal import first_line, refuse
from flexdilated.nn.longnet import CONFIG_FILE, LongNetLM
from flexdilated.training.corpus import BYTES
from flexdilated.training.options import UserError
from flexdilated.training.weights import what_is


def generate(
    model: Annotated[
        Path, typer.Option(help="Folder of a byte-level model, as `flexdilated train` writes it (runs/longnet/dilated).")
    ],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File whose text to continue.")] = None,
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
    try:
        read = _prompt(prompt, prompt_file)
        loaded = _model(model, device_named(device, auto=["cuda"]))
        written = continued(loaded, read, num_bytes=num_bytes, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p)
    except (UserError, ValueError, TypeError, NotImplementedError) as error:
        refuse(error)
    typer.echo(written.decode("utf-8", "replace"))


def continued(model: LongNetLM, prompt: bytes, *, num_bytes: int, seed: int, **options: Any) -> bytes:
    """`prompt` continued by `num_bytes` bytes drawn from the model, with the options of its `generate`."""
    tokens = torch.tensor([list(prompt)], device=model.embedding.weight.device)
    drawn = model.generate(tokens, max_new_tokens=num_bytes, generator=torch.Generator().manual_seed(seed), **options)
    return prompt + bytes(drawn[0].tolist())


def _model(folder: Path, device: torch.device) -> LongNetLM:
    try:
        model = LongNetLM.from_pretrained(folder, device=device)
    except FileNotFoundError as error:
        why = error if (folder / CONFIG_FILE).is_file() else what_is(folder)
        raise UserError(f"--model must be a folder that `flexdilated train` wrote, got {folder}: {why}") from None
    except (OSError, ValueError, TypeError, SafetensorError, RuntimeError) as error:
        raise UserError(f"--model must hold a whole model, got {folder}: {first_line(error)}") from None
    if model.config.vocab_size != BYTES:
        raise UserError(f"--model must be a model of bytes, with vocab_size={BYTES}, got vocab_size={model.config.vocab_size}")
    return model


def _prompt(prompt: str | None, prompt_file: Path | None) -> bytes:
    if (prompt is None) == (prompt_file is None):
        raise UserError(f"--prompt must come, or else --prompt-file, got {'neither' if prompt is None else 'both'}")
    if prompt_file is None:
        read, name = (prompt or "").encode(), "--prompt"
    else:
        name = "--prompt-file"
        try:
            read = prompt_file.read_bytes()
        except OSError as error:
            raise UserError(f"--prompt-file must be readable, got {prompt_file}: {error.strerror}") from None
    if not read:
        raise UserError(f"{name} must hold at least one byte, got none")
    return read
