"""Pieces that share a launch: many of one branch, by a table from which each program reads where it works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexdilated.backends.triton.tiles import LEAST_DESCRIBED_ROWS
from flexdilated.core.bounded_cache import PIECE_BYTES, recent
from flexdilated.core.pieces import Piece

# Pieces of a branch, for a table that takes the host as long as some launches. One document of a published pattern has fewer.
LEAST = 8


class PieceGroup(NamedTuple):
    """Pieces of one part of a branch that one launch computes. Their rows are disjoint, so their order is free."""

    sample: Piece  # a piece of the group: a kernel is compiled for fields that are equal in all pieces of a group
    stacked: Piece  # `sample` if the group has one piece, else a `Piece` whose fields are `(P,)` arrays over the P pieces


def groups(pieces: tuple[Piece, ...], device: torch.device) -> tuple[PieceGroup, ...]:
    """The launches of pieces, branch after branch.

    While a CUDA graph is captured each piece has its own: replays would copy a table again from where it was in the host's memory.
    Without a table another kernel runs, so a warm-up launches the shortest piece of each table alone: no capture has to compile.
    """
    stage = graph_stage(device)
    return tuple(PieceGroup(piece, piece) for piece in pieces) if stage == "capture" else _groups(pieces, stage == "warm-up")


def graph_stage(device: torch.device) -> Literal["none", "warm-up", "capture"]:
    """Whether the current stream captures a CUDA graph, or may warm one up: torch asks for warm-ups on a side stream."""
    if device.type != "cuda":
        return "none"
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return "capture"
        return "none" if torch.cuda.current_stream() == torch.cuda.default_stream() else "warm-up"


@recent(size=lambda groups, pieces, warms: 2 * PIECE_BYTES * len(pieces))
def _groups(pieces: tuple[Piece, ...], warms: bool) -> tuple[PieceGroup, ...]:
    launches = together(pieces)
    if warms:
        launches = [part for launch in launches for part in (launch[-1:], launch[:-1]) if part]
    return tuple(_group(launch) for launch in launches)


def together(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces of each launch, those of the longest segments first, so that no long piece is left for the end."""
    by_kernel: dict[tuple[Any, ...], list[Piece]] = {}
    for piece in pieces:
        described = (rows >= LEAST_DESCRIBED_ROWS for rows in (piece.rows, piece.keys))
        by_kernel.setdefault((piece.branch, piece.part, piece.is_banded, piece.high == 0, *described), []).append(piece)
    launches: list[list[Piece]] = []
    for group in by_kernel.values():
        launches += [sorted(group, key=lambda piece: -piece.rows)] if len(group) >= LEAST else [[piece] for piece in group]
    return launches


def _group(pieces: list[Piece]) -> PieceGroup:
    if len(pieces) == 1:
        return PieceGroup(pieces[0], pieces[0])
    columns: Any = np.array(pieces, dtype=np.int64).T
    return PieceGroup(pieces[0], Piece(*columns))


def table_of(numbers: Sequence[Any], programs: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """The table of many pieces, one row each with `numbers` and its first program; and the index of the row of each program.

    Made for each launch, in its stream, so that its memory is not reused too early. The host does not wait for the copy, since it
    would wait for all earlier launches. `numbers` are arrays `(P,)`; `programs` `(P,)`: the number of programs of each piece.
    """
    rows = torch.from_numpy(np.stack([*numbers, np.cumsum(programs) - programs, programs], axis=1))
    table = (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)
    return table, torch.repeat_interleave(table[:, -1], output_size=int(programs.sum()))
