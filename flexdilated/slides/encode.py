"""Slides in packs through the encoder: read ahead, encoded together, given one by one in their order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexdilated.core.hardware import dtype_name
from flexdilated.slides.formats import SlideError, Tiles
from flexdilated.slides.grid import Reading, grid_step
from flexdilated.slides.model import LongNetViT
from flexdilated.slides.source import Source, source_of

SPARSE = 1.5  # sides of a tile between neighbours, from which a note asks whether the size of a tile is right


@dataclass(frozen=True)
class EncodedSlide:
    """A slide's embeddings, on the CPU.

    Args:
        name: As in the mapping.
        path: Of its file.
        embedding: `(embed_dim,)`, or for all layers `(depth + 1, embed_dim)`.
        coords: Of its tiles, `(N, 2)` pixels of level 0.
        source: What its file held.
        tiles: `(N, embed_dim)`, the tiles in their context behind the last layer and its LayerNorm; None where not asked for.
        note: What a user may want to check.
    """

    name: str
    path: Path
    embedding: Tensor
    coords: Tensor
    source: Source
    tiles: Tensor | None = None
    note: str | None = None


@dataclass(frozen=True)
class FailedSlide:
    """A slide that could not be encoded, and why, as the end of a sentence that begins with its path."""

    name: str
    path: Path
    reason: str


@dataclass
class Clock:
    """Where the seconds went: waiting for files, and encoding."""

    reading: float = 0.0
    encoding: float = 0.0


class _ReadSlide(NamedTuple):
    name: str
    path: Path
    tiles: Tiles
    cells: Tensor
    source: Source
    note: str | None


def encode_slides(
    model: LongNetViT,
    slides: Mapping[str, Path],
    *,
    reading: Reading | None = None,
    token_budget: int = 4096,
    all_layers: bool = False,
    tiles: bool = False,
    storage: torch.dtype = torch.float32,
    clock: Clock | None = None,
) -> Iterator[EncodedSlide | FailedSlide]:
    """Encode slides of any sizes, several in one call of the model; each embedding equals that of the slide alone.

    The next pack is read while one is encoded. A slide that cannot be read or encoded becomes a `FailedSlide`, and the rest goes
    on. A pack holds slides in their order, as many as the budget takes, and at least one.

    Args:
        model: The encoder, in evaluation mode, on its device and in its dtype, without a mesh.
        slides: Paths by name, as `list_slides` gives them.
        reading: What is asked of files.
        token_budget: Most tiles in a pack of several slides.
        all_layers: Whether embeddings are those of every layer, the embedded tiles first, as in `LongNetViT.forward`.
        tiles: Whether the tiles' embeddings are given too.
        storage: Of what is given, float32 or float16.
        clock: Is told the seconds.

    Yields:
        A result per slide, in their order.

    Raises:
        ValueError: If the model is in training mode, the budget is below 1, or the dtype is another.
        NotImplementedError: If the model has a mesh.
    """
    if model.mesh is not None:
        raise NotImplementedError("model must come without mesh, got one; share out slides over ranks, or call the model itself")
    if model.training:
        raise ValueError("model must be in evaluation mode, got training mode, in which dropout is active; call model.eval()")
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    if storage not in (torch.float32, torch.float16):
        raise ValueError(f"storage must be float32 or float16, got {storage}")
    clock = Clock() if clock is None else clock
    reads = (_read_slide(model, name, path, reading or Reading()) for name, path in slides.items())
    packs = _packs(reads, token_budget)
    with ThreadPoolExecutor(1, thread_name_prefix="slides") as reader:
        next_pack: Future[list[_ReadSlide | FailedSlide] | None] = reader.submit(next, packs, None)
        while True:
            start = time.perf_counter()
            pack = next_pack.result()
            clock.reading += time.perf_counter() - start
            if pack is None:
                return
            next_pack = reader.submit(next, packs, None)
            start = time.perf_counter()
            results = _results(model, pack, all_layers, tiles, storage)
            del pack  # its tiles need not wait for the consumer
            clock.encoding += time.perf_counter() - start
            yield from results


def _read_slide(model: LongNetViT, name: str, path: Path, reading: Reading) -> _ReadSlide | FailedSlide:
    try:
        tiles, cells = reading.read(name, path, slide_ngrids=model.slide_ngrids)
        if tiles.x.shape[1] != model.in_chans:
            raise SlideError(f"must have embeddings of {model.in_chans} elements as the weights, got {tiles.x.shape[1]}")
        source = source_of(path, reading.files_beside(name, path))
    except SlideError as error:
        return FailedSlide(name, path, str(error))
    except OSError as error:
        return FailedSlide(name, path, f"must stay readable, got: {error.strerror}")
    note = None
    side = tiles.tile_size_level0 or reading.tile_size_level0
    assert side is not None  # or there would be no cells
    step = grid_step(tiles.coords)
    if step is not None and step > SPARSE * side:
        note = f"neighbours are {step} apart: is a tile {side:g} pixels wide at level 0?"
    return _ReadSlide(name, path, tiles, cells, source, note)


def _packs(reads: Iterator[_ReadSlide | FailedSlide], token_budget: int) -> Iterator[list[_ReadSlide | FailedSlide]]:
    """Packs of slides up to the token budget; failed slides are reported immediately."""
    pack: list[_ReadSlide | FailedSlide] = []
    filled = 0
    for slide in reads:
        size = len(slide.cells) if isinstance(slide, _ReadSlide) else 0
        if filled and filled + size > token_budget:
            yield pack
            pack, filled = [], 0
        pack.append(slide)
        filled += size
        if filled == 0 or filled >= token_budget:
            yield pack
            pack, filled = [], 0
    if pack:
        yield pack


def _results(
    model: LongNetViT, pack: list[_ReadSlide | FailedSlide], all_layers: bool, tiles: bool, storage: torch.dtype
) -> list[EncodedSlide | FailedSlide]:
    """In the order of the pack."""
    slides = [slide for slide in pack if isinstance(slide, _ReadSlide)]
    encoded = iter(_encoded(model, slides, all_layers, tiles, storage))
    return [next(encoded) if isinstance(slide, _ReadSlide) else slide for slide in pack]


def _encoded(
    model: LongNetViT, pack: list[_ReadSlide], all_layers: bool, tiles: bool, storage: torch.dtype
) -> list[EncodedSlide | FailedSlide]:
    """One result per slide."""
    if not pack:
        return []
    try:
        layers, contexts = _forward(model, pack, all_layers, tiles)
    except (MemoryError, RuntimeError) as error:  # torch's own are RuntimeErrors
        message = f"{type(error).__name__} {error}".splitlines()[0]
        if "memory" not in message.lower():
            raise
        reason = f"needs more memory than there is for the {sum(len(slide.cells) for slide in pack):,} tiles of its pack: {message}"
        return [FailedSlide(slide.name, slide.path, f"{reason}; lower --token-budget") for slide in pack]
    results: list[EncodedSlide | FailedSlide] = []
    for slide, computed, context in zip(pack, layers if all_layers else layers[:, 0], contexts):
        embedding, rows = computed.to(storage).cpu(), None if context is None else context.to(storage).cpu()
        if bool(embedding.isfinite().all()) and (rows is None or bool(rows.isfinite().all())):
            name, path, coords = slide.name, slide.path, slide.tiles.coords
            results.append(EncodedSlide(name, path, embedding, coords, slide.source, tiles=rows, note=slide.note))
            continue
        step, dtype = ("stored", storage) if bool(computed.isfinite().all()) else ("computed", model.cls_token.dtype)
        reason = f"gives embeddings that are not finite, {step} in {dtype_name(dtype)}; use another dtype"
        results.append(FailedSlide(slide.name, slide.path, reason))
    return results


@torch.inference_mode()
def _forward(model: LongNetViT, pack: list[_ReadSlide], all_layers: bool, tiles: bool) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Embeddings `(S, 1 or layers, embed_dim)`, and with `tiles` the output tokens of each slide's tiles, `(N, embed_dim)`."""
    weight = model.cls_token
    sizes = [len(slide.cells) for slide in pack]
    coords = torch.cat([slide.cells for slide in pack])[None] * model.tile_size
    x = torch.cat([slide.tiles.x.to(weight.dtype) for slide in pack])[None]
    x, coords = x.to(weight.device), coords.to(weight.device)
    cu_seqlens = torch.tensor([0, *sizes]).cumsum(0) if len(pack) > 1 else None
    pooled = []
    for state in model.hidden_states(x, coords, cu_seqlens=cu_seqlens):
        if all_layers:
            pooled.append(model.pool(state, cu_seqlens=cu_seqlens))
    last = model.encoder.layer_norm(state)
    if not all_layers:
        pooled.append(model.pool(last, cu_seqlens=cu_seqlens))
    slides = last[0].split([1 + size for size in sizes])  # a class token, then the tiles
    return torch.stack(pooled, dim=1), [slide[1:] if tiles else None for slide in slides]
