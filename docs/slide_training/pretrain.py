"""Pretrain a slide encoder on tile embeddings without labels, by masked tiles: `python -m docs.slide_training.pretrain`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from docs.slide_training.data import Pack, Slide, add_folder, make_smooth_slides, packs, read_slides, reading_of
from flexdilated.slides.gigapath import LongNetViT, create_model


class MaskedTiles(nn.Module):
    """Predicts the embeddings of hidden tiles from the other tiles; a learned token replaces hidden tiles in the encoder's input.

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


def hide(num_tiles: int, share: float, generator: torch.Generator) -> Tensor:
    """A random mask of hidden tiles, `(N,)` bool: `share` of the tiles, and at least one."""
    hidden = torch.zeros(num_tiles, dtype=torch.bool)
    hidden[torch.randperm(num_tiles, generator=generator)[: max(1, round(share * num_tiles))]] = True
    return hidden


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
    """Train; return the mean loss of every epoch."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.05)
    losses = []
    for _ in range(epochs):
        order = torch.randperm(len(slides), generator=generator).tolist()
        found = []
        for pack in packs([slides[i] for i in order], token_budget):
            loss = model(pack, hide(pack.x.shape[1], hidden, generator))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found.append(loss.item())
        losses.append(sum(found) / len(found))
    return losses


def save(encoder: LongNetViT, arch: str, path: Path) -> None:
    """Write a checkpoint with its architecture, pattern and order of tiles; it loads only with the same pattern and order."""
    layout = {"arch": arch, "order": encoder.order, "pattern": encoder.pattern.to_dict()}
    torch.save({"model": encoder.state_dict(), **layout}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_folder(parser)
    parser.add_argument("--arch", default="LongNet_3_layers_384_dim")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--output", type=Path, default=Path("slide_encoder.pth"), help="read by create_model and `slides encode-all`"
    )
    options = parser.parse_args()
    slides = make_smooth_slides(64)
    try:
        if options.folder is not None:
            slides, _ = read_slides(options.folder, None, reading_of(options))
        encoder = create_model(None, options.arch, slides[0].x.shape[1])
    except (ValueError, OSError) as error:
        parser.error(str(error))
    losses = pretrain(MaskedTiles(encoder).train(), slides, epochs=options.epochs, learning_rate=5e-4, token_budget=4096)
    print("losses", [round(loss, 3) for loss in losses])
    save(encoder, options.arch, options.output)


if __name__ == "__main__":
    main()
