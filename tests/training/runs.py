"""Small training runs."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern, LongNetConfig
from flexdilated.training.corpus import load_corpus
from flexdilated.training.options import TrainOptions
from flexdilated.training.trainer import Trainer

SIZES = {"vocab_size": 256, "embed_dim": 24, "num_layers": 2, "num_heads": 2, "dropout_p": 0.1, "attention_dropout_p": 0.1}
CONFIG = LongNetConfig(pattern=DilatedPattern((13, 26), (1, 2)), **SIZES)  # type: ignore[arg-type]


# Of the command.
SMALL = {"tokens": 37, "batch-size": 2, "steps": 4, "segment-lengths": "13,26", "dilation-rates": "1,2", "layers": 1}
SMALL |= {"embed-dim": 24, "heads": 2, "eval-every": 2, "eval-sequences": 2, "checkpoint-every": 2, "dtype": "float32"}
SMALL |= {"device": "cpu"}


def arguments(output: Path, text: Path, *more: str, **changes: object) -> list[str]:
    options = SMALL | {name.replace("_", "-"): value for name, value in changes.items()}
    values = (f"--{name}={value}" for name, value in options.items())
    return ["train", f"--text={text}", f"--output={output}", "--no-compile", *values, *more]


def make_options(**changes: object) -> TrainOptions:
    values: dict[str, object] = {"sequence_length": 37, "batch_size": 3, "steps": 7, "learning_rate": 3e-3, "warmup_steps": 2}
    values |= {"weight_decay": 0.1, "clip": 1.0, "seed": 5, "eval_every": 3, "eval_sequences": 5, "checkpoint_every": 2}
    values |= {"dtype": "float32", "compile": False}
    return TrainOptions(**{**values, **changes})  # type: ignore[arg-type]


def make_trainer(
    folder: Path, text: Path, *, config: LongNetConfig = CONFIG, mesh: DeviceMesh | None = None, **changes: object
) -> Trainer:
    options = make_options(**changes)
    return Trainer(config, options, load_corpus([text], options.sequence_length), folder, torch.device("cpu"), mesh=mesh)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def losses(trainer: Trainer) -> list[tuple[float, ...]]:
    return [tuple(value for name, value in entry.items() if name != "seconds") for entry in trainer.history]
