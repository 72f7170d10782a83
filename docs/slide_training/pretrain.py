"""Pretrain a slide encoder on tile embeddings without labels, by masked tiles: `python -m docs.slide_training.pretrain`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from docs.slide_training.data import Pack, Slide, make_smooth_slides, packs, read_slides
from flexdilated.hub.gigapath import LongNetViT, create_model
from flexdilated.hub.slides import Reading


class MaskedTiles(nn.Module):
    """Predicts the embeddings of hidden tiles from those around them: `decoder(encoder(tiles, hidden ones replaced by a token))`.

    Source: masked image modeling as in SimMIM, arXiv 2111.09886, on tile embeddings.
    """

    def __init__(self, encoder: LongNetViT) -> None:
        super().__init__()
        self.encoder = encoder
        self.mask_token = nn.Parameter(torch.zeros(encoder.in_chans))
        self.decoder = nn.Linear(encoder.embed_dim, encoder.in_chans)

    def forward(self, pack: Pack, hidden: Tensor) -> Tensor:
        """The mean squared error over the hidden tiles, `hidden` `(N,)` bool."""
        x = torch.where(hidden[None, :, None], self.mask_token, pack.x)
        (tokens,) = self.encoder(x, pack.coords, cu_seqlens=pack.cu_seqlens, return_tokens=True)
        is_tile = torch.ones(tokens.shape[1], dtype=torch.bool)
        is_tile[pack.cu_seqlens[:-1] + torch.arange(len(pack.labels))] = False  # class tokens
        return (self.decoder(tokens[0, is_tile][hidden]) - pack.x[0, hidden]).square().mean()


def pretrain(
    model: MaskedTiles,
    slides: Sequence[Slide],
    *,
    epochs: int,
    learning_rate: float,
    token_budget: int,
    hidden: float = 0.5,
    seed: int = 0,
) -> list[float]:
    """Train, and give the mean loss of every epoch."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.05)
    losses = []
    for _ in range(epochs):
        order = torch.randperm(len(slides), generator=generator).tolist()
        found = []
        for pack in packs([slides[i] for i in order], token_budget):
            loss = model(pack, torch.rand(pack.x.shape[1], generator=generator) < hidden)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found.append(loss.item())
        losses.append(sum(found) / len(found))
    return losses


def save(encoder: LongNetViT, path: Path) -> None:
    """A checkpoint, which says the pattern and the order that it was trained under, and loads under those alone."""
    torch.save({"model": encoder.state_dict(), "order": encoder.order, "pattern": encoder.pattern.to_dict()}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="slides, as of encode-slides; default: made up ones")
    parser.add_argument("--tile-size-level0", type=float, help="side of a tile at level 0, where files do not say it")
    parser.add_argument("--coords", type=Path, help="folder of coordinates, where embeddings have none")
    parser.add_argument("--arch", default="LongNet_3_layers_384_dim")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("slide_encoder.pth"), help="read by create_model and encode-slides")
    options = parser.parse_args()
    slides = make_smooth_slides(64)
    if options.folder is not None:
        slides, _ = read_slides(options.folder, None, Reading(options.coords, tile_size_level0=options.tile_size_level0))
    encoder = create_model(None, options.arch, slides[0].x.shape[1])
    losses = pretrain(MaskedTiles(encoder).train(), slides, epochs=options.epochs, learning_rate=5e-4, token_budget=4096)
    print("losses", [round(loss, 3) for loss in losses])
    save(encoder, options.output)


if __name__ == "__main__":
    main()
