"""The text of a training run: bytes to train on, and bytes held out."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from flexdilated.training.options import TrainOptions, UserError

BYTES = 256  # the vocabulary
HELD_OUT_FRACTION = 0.05


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, `uint8`, and a hash of both."""

    train: Tensor
    held_out: Tensor
    digest: str

    def batch(self, step: int, options: TrainOptions) -> Tensor:
        """`(batch_size, sequence_length + 1)` bytes at random places: a function of the seed and the step alone."""
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
        last = self.train.numel() - options.sequence_length
        starts = torch.randint(last, (options.batch_size,), generator=generator).tolist()
        return torch.stack([self.train[s : s + options.sequence_length + 1] for s in starts]).long()

    def held_out_batches(self, options: TrainOptions) -> Iterator[Tensor]:
        """Up to `eval_sequences` held-out sequences, one after another, `batch_size` at a time."""
        length = options.sequence_length
        count = min(options.eval_sequences, (self.held_out.numel() - 1) // length)
        rows = [self.held_out[i * length : (i + 1) * length + 1] for i in range(count)]
        for i in range(0, len(rows) - len(rows) % options.batch_size or len(rows), options.batch_size):
            yield torch.stack(rows[i : i + options.batch_size]).long()


def load_corpus(paths: Sequence[Path], sequence_length: int, *, without: Sequence[Path] = ()) -> Corpus:
    """The bytes of files and of all files below folders; by default the sources of Python's standard library.

    Below folders, names that begin with a dot are left out, and the files and folders `without`: what a run writes is not its text.

    Files come in the order of a hash of their names, so that the held-out end of the text is not one corner of it; those of one
    name in the order of their places below the given folders, whatever order the filesystem lists them in.

    Raises:
        UserError: If a path is missing, unreadable or empty, or the text is too short for the sequence length.
    """
    files = sorted(_files(paths, [path.resolve() for path in without]), key=_order)
    if not files:
        raise UserError(f"--text must hold files, found none in {', '.join(map(str, paths))}")
    parts = []
    for _, path in files:
        try:
            parts.append(path.read_bytes())
        except OSError as error:
            raise UserError(f"--text must be readable, got {path}: {error.strerror}") from None
    text = b"".join(parts)
    if not text:
        raise UserError(f"--text must hold some bytes, got {len(files)} empty file(s)")
    held_out = max(int(len(text) * HELD_OUT_FRACTION), sequence_length + 1)
    if len(text) - held_out < sequence_length + 1:
        raise UserError(
            f"--text must hold at least {2 * (sequence_length + 1)} bytes for --tokens {sequence_length}, got {len(text)}"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(data[:-held_out], data[-held_out:], sha256(text).hexdigest())


def _order(file: tuple[Path, Path]) -> tuple[bytes, bytes]:
    place, _ = file
    return sha256(os.fsencode(place.name)).digest(), os.fsencode(place.as_posix())


def _files(paths: Sequence[Path], without: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """Each file, path by path: its place below the path, and where it is."""
    if not paths:
        root = Path(sysconfig.get_paths()["stdlib"])
        for path in root.rglob("*.py"):
            place = path.relative_to(root)
            if not {"site-packages", "test", "tests", "idlelib"} & set(place.parts):
                yield place, path
        return
    for given in paths:
        if given.is_dir():
            for path in given.rglob("*"):
                place = path.relative_to(given)
                if any(part.startswith(".") for part in place.parts) or not path.is_file():
                    continue
                if not any(path.resolve().is_relative_to(each) for each in without):
                    yield place, path
        elif given.is_file():
            yield Path(given.name), given
        else:
            raise UserError(f"--text must be a file or folder that exists, got {given}")
