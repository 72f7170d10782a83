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

    Files come in the order of a hash of their names, so that the held-out end of the text is not one corner of it.

    Raises:
        OSError: If a path is missing or cannot be read.
        UserError: If the text is too short for the sequence length.
    """
    files = list(_files(paths, [path.resolve() for path in without]))
    files.sort(key=lambda file: (sha256(os.fsencode(file[0].name)).digest(), os.fsencode(file[0])))
    text = b"".join(path.read_bytes() for _, path in files)
    held_out = max(int(len(text) * HELD_OUT_FRACTION), sequence_length + 1)
    if len(text) - held_out < sequence_length + 1:
        least = 2 * (sequence_length + 1)
        raise UserError(f"--text must hold at least {least} bytes for --tokens {sequence_length}, got {len(text)}")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(data[:-held_out], data[-held_out:], sha256(text).hexdigest())


def _files(paths: Sequence[Path], without: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """Each file, path by path: its place below the path, and where it is."""
    left_out = set() if paths else {"site-packages", "test", "tests", "idlelib"}
    for root in paths or [Path(sysconfig.get_paths()["stdlib"])]:
        if not root.is_dir():
            yield Path(root.name), root
            continue
        for path in root.rglob("*" if paths else "*.py"):
            place = path.relative_to(root)
            is_hidden = any(part.startswith(".") or part in left_out for part in place.parts)
            if not is_hidden and path.is_file() and not any(path.resolve().is_relative_to(excluded) for excluded in without):
                yield place, path
