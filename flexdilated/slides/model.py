"""Prov-GigaPath's slide encoder: tile embeddings and coordinates in, slide embedding out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.core.integers import is_integer
from flexdilated.core.pattern import DilatedPattern
from flexdilated.core.tracing import TRACES_UNKNOWN_SIZES
from flexdilated.distributed.mesh import canonical_mesh
from flexdilated.distributed.sharding import local_shard_lengths
from flexdilated.distributed.unsharding import unshard_sequence
from flexdilated.hub.encoder import LongNetEncoder
from flexdilated.nn.initial_weights import reset_modules, set_initial_weights
from flexdilated.ordering import ORDERS, Curve, coordinate_order


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
        pattern: Which tokens attend to which, in place of that pattern.
        order: The curve along which the tiles of a slide become a sequence: one of `flexdilated.ordering.ORDERS`. None: as they
            are given, which is the order of the published weights. It changes what the model computes: weights belong to an order.
        mlp_ratio: Elements inside the feed-forward networks, per element of a token.
        global_pool: Whether the tiles are averaged, instead of taking the class token.
        dropout: Probability, in training, of dropping an element of the tokens and of every branch.
        drop_path_rate: Probability, in training, that the last layer's branches are dropped for a whole slide.
        norm_eps: Epsilon of `norm`; those of the encoder are 1e-5.
        backend: Backend of the attention: `"auto"` or a name.
        mesh: A 1-D `DeviceMesh` over which the tiles of one slide are sharded. Default: slides are whole.

    Raises:
        ValueError: If a number is below 1 or does not divide, a probability is outside [0, 1), or the order is unknown.
        TypeError: If the pattern is no `DilatedPattern`, or the mesh no `DeviceMesh`.
        NotImplementedError: If an order comes with a mesh.
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
        pattern: DilatedPattern | None = None,
        order: Curve | None = None,
        mlp_ratio: float = 4.0,
        global_pool: bool = False,
        dropout: float = 0.25,
        drop_path_rate: float = 0.1,
        norm_eps: float = 1e-6,
        backend: str = "auto",
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        sizes = {"in_chans": in_chans, "embed_dim": embed_dim, "depth": depth, "slide_ngrids": slide_ngrids}
        for name, value in {**sizes, "tile_size": tile_size, "max_wsi_size": max_wsi_size}.items():
            if not is_integer(value) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if embed_dim % 4:
            raise ValueError(f"embed_dim must be a multiple of 4, got {embed_dim}")
        if order is not None and order not in ORDERS:
            raise ValueError(f"order must be None or one of {ORDERS}, got {order!r}")
        if order is not None and mesh is not None:
            raise NotImplementedError(f"order must be None with mesh, got {order!r}: a rank holds a part of the slide alone")
        self.order, self.mesh, self.drop_path_rate = order, canonical_mesh(mesh), drop_path_rate
        self.in_chans, self.embed_dim, self.global_pool = in_chans, embed_dim, global_pool
        self.slide_ngrids, self.tile_size = slide_ngrids, tile_size
        self.patch_embed = nn.Sequential(OrderedDict(proj=nn.Linear(in_chans, embed_dim)))
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.encoder = LongNetEncoder(
            embed_dim,
            depth,
            num_heads,
            DilatedPattern.gigapath(max_wsi_size, tile_size) if pattern is None else pattern,
            ffn_dim=int(embed_dim * mlp_ratio),
            dropout_p=dropout,
            drop_path_rate=drop_path_rate,
            backend=backend,
            mesh=mesh,
        )
        self.norm = nn.LayerNorm(embed_dim, eps=norm_eps)
        self.reset_parameters()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                set_initial_weights(module, "xavier_uniform_")

    def reset_parameters(self) -> None:
        """Draw the class token, of standard deviation 0.02."""
        nn.init.normal_(self.cls_token, std=0.02)

    init_weights = reset_modules

    @property
    def pattern(self) -> DilatedPattern:
        """Which tokens attend to which."""
        return self.encoder.pattern

    def forward(
        self,
        x: Tensor,
        coords: Tensor,
        all_layer_embed: bool = False,
        *,
        padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_tokens: bool = False,
        shard_lengths: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Embeddings of a batch of slides.

        Args:
            x: Tile embeddings, `(B, N, in_chans)`, in the dtype of the parameters; under autocast float32, bfloat16 or float16.
            coords: Upper left corners of the tiles in pixels, `(B, N, 2)`, integer, float32 or float64 whatever the dtype of the
                model. Each lies in `[0, slide_ngrids * tile_size)`.
            all_layer_embed: Whether to return one entry per layer, the embedded tiles first: `depth + 1`.
            padding_mask: `(B, N)` bool, True where there is no tile. What x and coords hold there has no effect: slides with
                padding are encoded without it, packed as by `cu_seqlens`. (The zero keys of the pattern follow the number of
                tiles, so a mask on the keys would not give what each slide gives alone.)
            cu_seqlens: `(S + 1,)` integers, for B = 1: the tiles are those of S slides, one after another, which begin and end at
                these tiles. Each slide gets a class token and gives what it gives alone.
            return_tokens: Whether to return the tokens that are pooled, instead of the pooled embedding.
            shard_lengths: With a mesh, where x and coords are this rank's tiles of one slide: the tiles of each rank, the same on
                every rank. Default: equally many. Each rank gets the result of the whole slide, and must call backward in training.
                Gradients, those of `norm` and of a head behind it too, are to be averaged over ranks, as DDP and FSDP2 do, if each
                has the loss of the whole slide; they are those of the sum of the ranks' losses.

        Returns:
            One tensor, or `depth + 1`, in a list: `(B, embed_dim)`, or with `return_tokens` `(B, 1 + N, embed_dim)`, the class
            token first, zero at padding. With `cu_seqlens`, `(S, embed_dim)`, or `(1, S + N, embed_dim)`, where each slide's tiles
            follow its class token. The single one has passed the encoder's `layer_norm`, those of the layers have not; `pool` makes
            the embedding of either.

        Raises:
            ValueError: If a shape is wrong, a coordinate lies outside the grid, or a slide has no tile.
            TypeError: If a dtype is wrong.
            NotImplementedError: If packed or padded slides come with a mesh.
        """
        self._check(x, coords)
        if padding_mask is not None:
            self._check_padding(x, padding_mask, cu_seqlens)
            padding_mask = padding_mask if bool(padding_mask.any()) else None
        if padding_mask is not None:
            real = ~padding_mask
            x, coords, cu_seqlens = x[real][None], coords[real][None], F.pad(real.sum(dim=1).cumsum(0), (1, 0))
        states = self._states(x, coords, cu_seqlens, shard_lengths, all_layers=all_layer_embed)
        if not return_tokens:
            return [self.pool(state, cu_seqlens=cu_seqlens) for state in states]
        if padding_mask is None:
            return list(states)
        is_token = F.pad(real, (1, 0), value=True)[..., None]  # (B, 1 + N, 1)
        return [state.new_zeros(*is_token.shape[:2], self.embed_dim).masked_scatter(is_token, state[0]) for state in states]

    def hidden_states(
        self, x: Tensor, coords: Tensor, *, cu_seqlens: Tensor | None = None, shard_lengths: Sequence[int] | None = None
    ) -> Iterator[Tensor]:
        """The tokens of every layer, as the call gives them with `all_layer_embed` and `return_tokens`, computed one by one.

        Who keeps none of them needs no memory for all. The arguments are those of the call.
        """
        self._check(x, coords)
        return self._states(x, coords, cu_seqlens, shard_lengths, all_layers=True)

    def pool(self, tokens: Tensor, padding_mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """The slide embeddings `(B, embed_dim)` from tokens `(B, 1 + N, embed_dim)`, without tiles in `padding_mask` `(B, N)`.

        With `cu_seqlens` `(S + 1,)`, in tiles: `(S, embed_dim)` of packed slides from tokens `(1, S + N, embed_dim)`.
        """
        if cu_seqlens is not None:
            limits = [num_tiles + slide for slide, num_tiles in enumerate(cu_seqlens.tolist())]
            if not self.global_pool:
                return self.norm(tokens[0, limits[:-1]])
            return self.norm(torch.stack([tokens[0, start + 1 : end].mean(dim=0) for start, end in pairwise(limits)]))
        if not self.global_pool:
            return self.norm(tokens[:, 0])
        if padding_mask is None:
            return self.norm(tokens[:, 1:].mean(dim=1))
        return self.norm(torch.stack([slide[1:][is_tile].mean(dim=0) for slide, is_tile in zip(tokens, ~padding_mask)]))

    def _embed(self, x: Tensor, cells: Tensor) -> Tensor:
        return self.patch_embed(x) + tile_positions(cells, self.embed_dim).to(self.cls_token.dtype)

    def _states(
        self, x: Tensor, coords: Tensor, cu_seqlens: Tensor | None, shard_lengths: Sequence[int] | None, *, all_layers: bool
    ) -> Iterator[Tensor]:
        """The tokens after every layer, or after the encoder."""
        if self.mesh is not None and self.training and self.drop_path_rate:
            raise NotImplementedError("drop_path_rate must be 0 in training with mesh, got more: ranks would drop different layers")
        if self.mesh is None and shard_lengths is not None:
            raise ValueError(f"shard_lengths must come with mesh, got no mesh and {tuple(shard_lengths)}")
        cells = self._cells(coords)
        if cu_seqlens is not None:
            cu_seqlens = self._checked_cu_seqlens(x, cu_seqlens)
        if self.mesh is not None:
            return self._shard_states(x, cells, shard_lengths, all_layers=all_layers)
        return self._slide_states(x, cells, cu_seqlens, all_layers=all_layers)

    def _slide_states(self, x: Tensor, cells: Tensor, cu_seqlens: Tensor | None, *, all_layers: bool) -> Iterator[Tensor]:
        batch, num_tiles, _ = x.shape
        limits = [0, num_tiles] if cu_seqlens is None else cu_seqlens.tolist()
        inverse = None
        if self.order is not None:
            parts = [(start, slide[start:end]) for slide in cells for start, end in pairwise(limits)]
            orders = [coordinate_order(part.flip(-1), order=self.order).permutation + start for start, part in parts]
            places = torch.cat(orders).reshape(batch, num_tiles, 1)
            x, cells, inverse = _rows_at(x, places), _rows_at(cells, places), places.argsort(dim=1)
        class_token = self.cls_token.expand(batch, -1, -1)
        slides = self._embed(x, cells).split([end - start for start, end in pairwise(limits)], dim=1)
        x = torch.cat([part for slide in slides for part in (class_token, slide)], dim=1)
        options: dict[str, Any] = {}
        if cu_seqlens is not None:
            options["cu_seqlens"] = cu_seqlens + torch.arange(len(cu_seqlens), device=cu_seqlens.device)
        # Where each tile is, after the class tokens of its slide and of those before it.
        tiles = [torch.arange(start, end, device=x.device) + i for i, (start, end) in enumerate(pairwise(limits), 1)]
        index = torch.cat(tiles)
        for state in self.encoder.hidden_states(x, **options) if all_layers else (self.encoder(x, **options),):
            yield state if inverse is None else state.index_copy(1, index, _rows_at(state[:, index], inverse))

    def _shard_states(self, x: Tensor, cells: Tensor, shard_lengths: Sequence[int] | None, *, all_layers: bool) -> Iterator[Tensor]:
        """The states of the whole slide, on every rank."""
        assert self.mesh is not None
        rank, lengths = local_shard_lengths(self.mesh, x.shape[1], shard_lengths)
        tokens = self._embed(x, cells)
        # No token of the class token's on the others, where it has a gradient too, of zeros: DDP and FSDP2 would wait for one.
        class_token = self.cls_token.expand(x.shape[0], -1, -1)[:, : int(rank == 0)]
        tokens = torch.cat([class_token, tokens], dim=1)
        lengths = (lengths[0] + 1, *lengths[1:])
        encoder = self.encoder
        states = encoder.hidden_states(tokens, shard_lengths=lengths) if all_layers else (encoder(tokens, shard_lengths=lengths),)
        for state in states:
            yield unshard_sequence(state, self.mesh, shard_lengths=lengths, reduce_gradients=True)

    def _checked_cu_seqlens(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """The checked boundaries of packed slides, int64."""
        if self.mesh is not None:
            raise NotImplementedError("cu_seqlens must be None with mesh, got a tensor; encode slides one by one")
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cu_seqlens must be a tensor of int32 or int64, got {cu_seqlens.dtype}")
        if x.shape[0] != 1 or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
            got_shapes = f"{tuple(cu_seqlens.shape)} and x of shape {tuple(x.shape)}"
            raise ValueError(f"cu_seqlens must have shape (S + 1,) with S at least 1, and x B = 1, got {got_shapes}")
        limits = cu_seqlens.tolist()
        if limits[0] != 0 or limits[-1] != x.shape[1] or any(a >= b for a, b in pairwise(limits)):
            raise ValueError(f"cu_seqlens must rise from 0 to N={x.shape[1]}, with a tile for every slide, got {limits}")
        return cu_seqlens.long()

    def _cells(self, coords: Tensor) -> Tensor:
        """The grid cells of the tiles, `(B, N, 2)` int64, computed in integers so that no dtype can move a tile."""
        # NaN and numbers too large for int64 have no defined conversion: they become numbers outside the grid.
        floored = coords.nan_to_num(nan=-1.0).clamp(-1.0, 2.0**62).floor() if coords.is_floating_point() else coords
        pixels = floored.to(torch.int64)
        limit = self.slide_ngrids * self.tile_size
        outside = (pixels < 0) | (pixels >= limit)
        if torch.compiler.is_compiling():  # which cannot say where
            torch._assert_async(~outside.any(), f"coords must lie in [0, slide_ngrids * tile_size={limit}), got others")
        elif bool(outside.any()):
            b, n, axis = outside.nonzero()[0].tolist()
            raise ValueError(
                f"coords must lie in [0, slide_ngrids * tile_size={limit}), got {coords[b, n, axis].item()} at "
                f"coords[{b}, {n}, {axis}]; subtract the origin of the slide, or raise slide_ngrids"
            )
        return pixels // self.tile_size

    def _check(self, x: Tensor, coords: Tensor) -> None:
        if x.dim() != 3 or x.shape[2] != self.in_chans or x.shape[0] < 1 or x.shape[1] < 1:
            remedy = ""
            if self.mesh is not None and x.dim() == 3 and x.shape[1] == 0:
                remedy = "; a slide of fewer tiles than ranks has none for this one: encode it on each by a model without mesh"
            raise ValueError(
                f"x must have shape (B, N, in_chans={self.in_chans}) with B and N at least 1, got {tuple(x.shape)}{remedy}"
            )
        if coords.shape != (*x.shape[:2], 2):
            raise ValueError(f"coords must have shape (B, N, 2)={(*x.shape[:2], 2)}, got {tuple(coords.shape)}")
        half = coords.dtype.itemsize < 4 and coords.is_floating_point()
        if half or coords.is_complex() or coords.dtype == torch.bool:
            raise TypeError(f"coords must be integer, float32 or float64, whatever the dtype of the model, got {coords.dtype}")

    def _check_padding(self, x: Tensor, padding_mask: Tensor, cu_seqlens: Tensor | None) -> None:
        if self.mesh is not None:
            raise NotImplementedError("padding_mask must be None with mesh, got a tensor; encode slides one by one")
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens must come without padding_mask, got both")
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
    frequencies = 10000.0 ** (torch.arange(embed_dim // 4, dtype=exact, device=cells.device) / (-embed_dim / 4))

    def halves_of(values: Tensor) -> Tensor:  # (..., embed_dim / 2)
        angles = values.to(exact)[..., None] * frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=-1).float()

    if torch.compiler.is_compiling() and not TRACES_UNKNOWN_SIZES:
        return halves_of(cells.flip(-1)).flatten(-2)
    values, index = cells.unique(return_inverse=True)
    return halves_of(values)[index.flip(-1)].flatten(-2)


def _rows_at(x: Tensor, places: Tensor) -> Tensor:
    """The rows of `x` `(B, N, C)` at `places` `(B, N, 1)`; `take_along_dim` would make a graph for every N."""
    return x.gather(1, places.expand(-1, -1, x.shape[2]))
