"""A small slide encoder in float64, and its formula."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexdilated import DilatedPattern, reference
from flexdilated.slides.gigapath import LongNetViT

IN_CHANS, EMBED, HEADS, DEPTH = 7, 24, 3, 3
# Segments of 1024, 362, 128, 45 and 16 tokens: at 53 tiles most are ragged, and 8 does not divide 45.
WSI_SIZE, TILE_SIZE, GRIDS = 1024, 256, 29
TILES = 53


def encoder_model(**options: object) -> LongNetViT:
    """In float64 and evaluation mode, with biases and gains that differ from zeros and ones."""
    sizes = {"in_chans": IN_CHANS, "embed_dim": EMBED, "depth": DEPTH, "num_heads": HEADS}
    grid = {"slide_ngrids": GRIDS, "tile_size": TILE_SIZE, "max_wsi_size": WSI_SIZE}
    model = LongNetViT(**{**sizes, **grid, "norm_eps": 0.1, **options}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def draw_slides(batch: int = 1, num_tiles: int = TILES) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, num_tiles, IN_CHANS, dtype=torch.float64), torch.randint(GRIDS * TILE_SIZE, (batch, num_tiles, 2))


def position(column: int, row: int, embed_dim: int) -> list[float]:
    """MAE's sin-cos position of a cell, one number at a time; the row of the original's table is `column * slide_ngrids + row`."""
    quarter = embed_dim // 4
    frequencies = [1 / 10000 ** (i / quarter) for i in range(quarter)]
    return [f(cell * frequency) for cell in (row, column) for f in (math.sin, math.cos) for frequency in frequencies]


def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    return F.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)


def hidden_states(model: LongNetViT, x: Tensor, coords: Tensor) -> list[Tensor]:
    """The encoder written out, with attention as the dense definition computes it."""
    cells = [[position(c // TILE_SIZE, r // TILE_SIZE, EMBED) for c, r in slide] for slide in coords.tolist()]
    # Positions are held in float32, as in the original's table.
    x = x @ model.patch_embed.proj.weight.T + model.patch_embed.proj.bias + torch.tensor(cells, dtype=torch.float32)
    x = torch.cat([model.cls_token.expand(x.shape[0], 1, EMBED), x], dim=1)
    states = [x]
    for layer in model.encoder.layers:
        attention, h = layer.self_attn, norm(x, layer.self_attn_layer_norm)
        q, k, v = (p(h).unflatten(-1, (HEADS, -1)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        pattern = DilatedPattern.gigapath(WSI_SIZE, TILE_SIZE)
        h, _ = reference.dilated_attention(q, k, v, pattern, is_causal=False, scale=(EMBED // HEADS) ** -0.5)
        x = x + attention.out_proj(norm(h.flatten(2), attention.inner_attn_ln))
        h = F.gelu(layer.ffn.fc1(norm(x, layer.final_layer_norm)))
        x = x + layer.ffn.fc2(norm(h, layer.ffn.ffn_layernorm))
        states.append(x)
    return states
