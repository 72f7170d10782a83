"""Prov-GigaPath's slide encoder: tile embeddings and coordinates in, slide embedding out."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from flexdilated.backends.hardware import autocast_dtype
from flexdilated.hub.encoder import LongNetEncoder
from flexdilated.pattern import DilatedPattern, is_integer


class LongNetViT(nn.Module):
    """Prov-GigaPath's slide encoder: `pool(encoder([cls_token, patch_embed(x) + position(coords)]))`.

    Pooling is `norm(mean over the tiles)` with `global_pool`, else `norm(cls token)`. As the original, a new model is in training
    mode, where dropout is active: call `.eval()` before encoding. Positions are computed for the tiles at hand; there is no table.
    Source: Prov-GigaPath, Nature 630 (2024), and its published code, whose names these are. Sizes default to those published.

    Args:
        in_chans: Elements of a tile embedding.
        embed_dim: Elements of a token, a multiple of 4.
        depth: Layers.
        num_heads: Must divide `embed_dim`.
        slide_ngrids: Cells along each side of the grid that coordinates must lie in. The positions do not depend on it.
        tile_size: Side of a cell, in the pixels of the coordinates.
        max_wsi_size: Side of the largest slide, in pixels; with `tile_size` it sets the segments, `DilatedPattern.gigapath`.
        global_pool: Whether the tiles are averaged, instead of taking the class token.
        dropout: Probability, in training, of dropping an element of the tokens and of every branch.
        drop_path_rate: Probability, in training, that the last layer's branches are dropped for a whole slide.
        norm_eps: Epsilon of `norm`; those of the encoder are 1e-5.
        backend: Engine of the attention: `"auto"` or a name.

    Raises:
        ValueError: If a number is below 1 or does not divide, or a probability is outside [0, 1).
    """

    def __init__(
        self,
        *,
        in_chans: int = 1536,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 16,
        slide_ngrids: int = 1000,
        tile_size: int = 256,
        max_wsi_size: int = 262144,
        global_pool: bool = False,
        dropout: float = 0.25,
        drop_path_rate: float = 0.1,
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        sizes = {"in_chans": in_chans, "depth": depth, "slide_ngrids": slide_ngrids}
        for name, value in {**sizes, "tile_size": tile_size, "max_wsi_size": max_wsi_size}.items():
            if not is_integer(value) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if embed_dim < 4 or embed_dim % 4:
            raise ValueError(f"embed_dim must be a multiple of 4, got {embed_dim}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.in_chans, self.embed_dim, self.global_pool = in_chans, embed_dim, global_pool
        self.slide_ngrids, self.tile_size = slide_ngrids, tile_size
        self.patch_embed = nn.Sequential(OrderedDict(proj=nn.Linear(in_chans, embed_dim)))
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.encoder = LongNetEncoder(
            embed_dim,
            depth,
            num_heads,
            DilatedPattern.gigapath(max_wsi_size, tile_size),
            dropout_p=dropout,
            drop_path_rate=drop_path_rate,
            backend=backend,
        )
        self.norm = nn.LayerNorm(embed_dim, eps=norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform matrices of gain 1, zero biases, a class token of deviation 0.02: the original's start."""
        nn.init.normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(
        self,
        x: Tensor,
        coords: Tensor,
        all_layer_embed: bool = False,
        *,
        padding_mask: Tensor | None = None,
        return_tokens: bool = False,
    ) -> list[Tensor]:
        """Embeddings of a batch of slides.

        Args:
            x: Tile embeddings, `(B, N, in_chans)`, in the dtype of the parameters, or any under autocast.
            coords: Upper left corners of the tiles in pixels, `(B, N, 2)`, integer, float32 or float64 whatever the dtype of the
                model. Each lies in `[0, slide_ngrids * tile_size)`.
            all_layer_embed: Whether to return one entry per layer, the embedded tiles first: `depth + 1`.
            padding_mask: `(B, N)` bool, True where there is no tile. What x and coords hold there has no effect: a slide with
                padding is encoded without it, by itself, so it gives what it gives alone. (The zero keys of the pattern follow
                the number of tiles, so a mask on the keys would not.)
            return_tokens: Whether to return the tokens that are pooled, instead of the pooled embedding.

        Returns:
            One tensor, or `depth + 1`, in a list: `(B, embed_dim)`, or with `return_tokens` `(B, 1 + N, embed_dim)`, the class
            token first, zero at padding. The single one has passed the encoder's `layer_norm`, those of the layers have not;
            `pool` makes the embedding of either.

        Raises:
            ValueError: If a shape or device is wrong, a coordinate lies outside the grid, or a slide has no tile.
            TypeError: If a dtype is wrong.
        """
        self._check(x, coords, padding_mask)
        cells = self._cells(coords, padding_mask)
        if padding_mask is None or not bool(padding_mask.any()):
            return self._encode(x, cells, all_layer_embed, return_tokens)
        real = ~padding_mask
        slides = [
            self._encode(x[b, kept][None], cells[b, kept][None], all_layer_embed, return_tokens) for b, kept in enumerate(real)
        ]
        layers = list(zip(*slides))
        if not return_tokens:
            return [torch.cat(layer) for layer in layers]
        kept = torch.cat([real.new_ones(x.shape[0], 1), real], dim=1)  # (B, 1 + N)
        return [_spread(torch.cat(layer, dim=1)[0], kept) for layer in layers]

    def pool(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The slide embeddings `(B, embed_dim)` of tokens `(B, 1 + N, embed_dim)`, of the tiles that are no padding `(B, N)`."""
        if not self.global_pool:
            return self.norm(tokens[:, 0])
        if padding_mask is None:
            return self.norm(tokens[:, 1:].mean(dim=1))
        return self.norm(torch.stack([slide[1:][kept].mean(dim=0) for slide, kept in zip(tokens, ~padding_mask)]))

    def _encode(self, x: Tensor, cells: Tensor, all_layer_embed: bool, return_tokens: bool) -> list[Tensor]:
        x = self.patch_embed(x) + tile_positions(cells, self.embed_dim).to(self.cls_token.dtype)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        states = self.encoder.hidden_states(x) if all_layer_embed else (self.encoder(x),)
        return [state if return_tokens else self.pool(state) for state in states]

    def _cells(self, coords: Tensor, padding_mask: Tensor | None) -> Tensor:
        """The grid cells of the tiles, `(B, N, 2)` int64, computed in integers so that no dtype can move a tile; 0 at padding."""
        # NaN and numbers too large for int64 have no defined conversion: they become numbers outside the grid.
        floored = coords.nan_to_num(nan=-1.0).clamp(-1.0, 2.0**62).floor() if coords.is_floating_point() else coords
        pixels = floored.to(torch.int64)
        if padding_mask is not None:
            pixels = pixels.masked_fill(padding_mask[..., None], 0)
        limit = self.slide_ngrids * self.tile_size
        outside = (pixels < 0) | (pixels >= limit)
        if bool(outside.any()):
            b, n, axis = outside.nonzero()[0].tolist()
            raise ValueError(
                f"coords must lie in [0, slide_ngrids * tile_size={limit}), got {coords[b, n, axis].item()} at "
                f"coords[{b}, {n}, {axis}]; subtract the origin of the slide, or raise slide_ngrids"
            )
        return pixels // self.tile_size

    def _check(self, x: Tensor, coords: Tensor, padding_mask: Tensor | None) -> None:
        for name, value in (("x", x), ("coords", coords), ("padding_mask", padding_mask)):
            if not isinstance(value, Tensor) and not (name == "padding_mask" and value is None):
                raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
        if x.dim() != 3 or x.shape[2] != self.in_chans or x.shape[0] < 1 or x.shape[1] < 1:
            raise ValueError(f"x must have shape (B, N, in_chans={self.in_chans}) with B and N at least 1, got {tuple(x.shape)}")
        if coords.shape != (*x.shape[:2], 2):
            raise ValueError(f"coords must have shape (B, N, 2)={(*x.shape[:2], 2)}, got {tuple(coords.shape)}")
        weight = self.cls_token
        if x.dtype != weight.dtype and autocast_dtype(x.device) is None:
            raise TypeError(f"x must have the dtype of the model={weight.dtype} outside autocast, got {x.dtype}")
        half = coords.dtype.itemsize < 4 and coords.is_floating_point()
        if half or coords.is_complex() or coords.dtype == torch.bool:
            raise TypeError(f"coords must be integer, float32 or float64, whatever the dtype of the model, got {coords.dtype}")
        for name, value in (("x", x), ("coords", coords), ("padding_mask", padding_mask)):
            if value is not None and value.device != weight.device:
                raise ValueError(f"{name} must be on the device of the model={weight.device}, got {value.device}")
        if padding_mask is None:
            return
        if padding_mask.dtype != torch.bool:
            raise TypeError(f"padding_mask must be bool, True where there is no tile, got {padding_mask.dtype}")
        if padding_mask.shape != x.shape[:2]:
            raise ValueError(f"padding_mask must have shape (B, N)={tuple(x.shape[:2])}, got {tuple(padding_mask.shape)}")
        empty = padding_mask.all(dim=1)
        if bool(empty.any()):
            raise ValueError(f"padding_mask must leave every slide a tile, got none for slide {empty.nonzero()[0].item()}")


def tile_positions(cells: Tensor, embed_dim: int) -> Tensor:
    """2-D sin-cos positions of grid cells, `(..., embed_dim)` float32.

    The first half encodes `cells[..., 1]`, the second `cells[..., 0]`; a half is `[sin(c f), cos(c f)]` with the `embed_dim / 4`
    frequencies `f_i = 10000 ** (-4 i / embed_dim)`. Computed in float64, once for each coordinate that occurs.
    Source: MAE, arXiv 2111.06377, published code; the order of the axes is Prov-GigaPath's.

    Args:
        cells: `(..., 2)` integers.
        embed_dim: A multiple of 4.
    """
    exact = torch.float32 if cells.device.type == "mps" else torch.float64  # MPS has no float64
    values, index = cells.unique(return_inverse=True)
    frequencies = 10000.0 ** (torch.arange(embed_dim // 4, dtype=exact, device=cells.device) / (-embed_dim / 4))
    angles = values.to(exact)[:, None] * frequencies
    halves = torch.cat([angles.sin(), angles.cos()], dim=-1).float()  # (values, embed_dim / 2)
    return halves[index.flip(-1)].flatten(-2)


def _spread(tokens: Tensor, kept: Tensor) -> Tensor:
    """Tokens `(K, C)` at the K places of `kept` `(B, N)`, zeros elsewhere: `(B, N, C)`."""
    return tokens.new_zeros(*kept.shape, tokens.shape[-1]).masked_scatter(kept[..., None], tokens)
