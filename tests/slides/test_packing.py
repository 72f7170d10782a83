"""Packed slides, orders and patterns of Prov-GigaPath's slide encoder: each gives what a slide gives alone."""

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdilated.ordering import coordinate_order
from tests.slides.encoder import EMBED, GRIDS, TILE_SIZE, draw_slides, encoder_model
from tests.tolerances import EXACT

# Longer and shorter than every segment of 1024, 362, 128, 45 and 16 tokens but the first, the shortest possible among them.
COUNTS = (46, 1, 130, 17, 53)


def pack(counts: tuple[int, ...] = COUNTS) -> tuple[Tensor, Tensor, Tensor]:
    x, coords = draw_slides(1, sum(counts))
    return x, coords, torch.tensor([0, *counts]).cumsum(0)


@pytest.mark.parametrize("options", [{"global_pool": True}, {"order": "hilbert"}], ids=str)
def test_packed_slides_give_what_each_gives_alone(options: dict[str, Any]) -> None:
    model = encoder_model(**options)
    x, coords, borders = pack()
    (out,) = model(x, coords, cu_seqlens=borders)
    (tokens,) = model(x, coords, cu_seqlens=borders.int(), return_tokens=True)
    layers = model(x, coords, True, cu_seqlens=borders)
    layer_tokens = model(x, coords, True, cu_seqlens=borders, return_tokens=True)
    assert (out.shape, tokens.shape) == ((len(COUNTS), EMBED), (1, len(COUNTS) + sum(COUNTS), EMBED))
    starts = borders.tolist()
    for s, (start, end) in enumerate(pairwise(starts)):
        alone = x[:, start:end], coords[:, start:end]
        torch.testing.assert_close(out[s : s + 1], model(*alone)[0], **EXACT)
        span = slice(start + s, end + s + 1)
        torch.testing.assert_close(tokens[:, span], model(*alone, return_tokens=True)[0], **EXACT)
        for layer, expected in zip(layers, model(*alone, True)):
            torch.testing.assert_close(layer[s : s + 1], expected, **EXACT)
        for layer, expected in zip(layer_tokens, model(*alone, True, return_tokens=True)):
            torch.testing.assert_close(layer[:, span], expected, **EXACT)
    torch.testing.assert_close(model.pool(tokens, cu_seqlens=borders), out, **EXACT)


def test_gradients_of_packed_slides_are_those_of_each_alone() -> None:
    model = encoder_model()
    x, coords, borders = pack((13, 1, 47))
    weights = torch.randn(3, EMBED, dtype=torch.float64)

    def gradients(outs: Tensor, x: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((outs * weights).sum(), [x, *model.parameters()]))

    x.requires_grad_()
    packed = gradients(model(x, coords, cu_seqlens=borders)[0], x)
    starts = borders.tolist()
    alone = [model(x[:, start:end], coords[:, start:end])[0] for start, end in pairwise(starts)]
    for actual, expected in zip(packed, gradients(torch.cat(alone), x)):
        torch.testing.assert_close(actual, expected, **EXACT)


def test_order_is_that_of_the_curve_and_tokens_come_back_in_the_given_one() -> None:
    plain, curved = encoder_model(), encoder_model(order="hilbert")
    curved.load_state_dict(plain.state_dict())
    x, coords = draw_slides(2)
    (actual,), (pooled,) = curved(x, coords, return_tokens=True), curved(x, coords)
    for b in range(2):
        order = coordinate_order((coords[b] // TILE_SIZE).flip(-1))
        place = order.permutation
        (expected,) = plain(x[b : b + 1, place], coords[b : b + 1, place], return_tokens=True)
        torch.testing.assert_close(actual[b, 0], expected[0, 0], **EXACT)
        torch.testing.assert_close(actual[b, 1:], expected[0, 1:][order.inverse], **EXACT)
    assert not torch.allclose(pooled, plain(x, coords)[0])
    # Any order of the file gives the same where no two tiles share a cell.
    cells = torch.stack([torch.randperm(GRIDS**2)[: x.shape[1]] for _ in range(2)])
    coords = torch.stack([cells % GRIDS, cells // GRIDS], dim=-1) * TILE_SIZE
    shuffled = torch.randperm(x.shape[1])
    torch.testing.assert_close(curved(x[:, shuffled], coords[:, shuffled])[0], curved(x, coords)[0], **EXACT)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, "cu_seqlens must be a tensor of int32 or int64, got torch.float32"),
        ({"cu_seqlens": torch.tensor([0])}, ValueError, "cu_seqlens must have shape (S + 1,) with S at least 1, and x B = 1"),
        ({"cu_seqlens": torch.tensor([0, 2, 2, 5])}, ValueError, "cu_seqlens must rise from 0 to N=5, with a tile for every slide"),
        (
            {"cu_seqlens": torch.tensor([0, 5]), "padding_mask": torch.zeros(1, 5).bool()},
            ValueError,
            "cu_seqlens must come without",
        ),
        ({"shard_lengths": (5,)}, ValueError, "shard_lengths must come with mesh, got no mesh and (5,)"),
    ],
)
def test_packing_refuses_borders_that_are_none(change: dict[str, Any], error: type[Exception], message: str) -> None:
    x, coords = draw_slides(1, 5)
    with pytest.raises(error, match=re.escape(message)):
        encoder_model()(x, coords, **change)


def test_orders_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("order must be None or one of ('hilbert', 'serpentine', 'row_major'), got 'z'")):
        encoder_model(order="z")
    with pytest.raises(NotImplementedError, match=re.escape("order must be None with mesh, got 'hilbert'")):
        encoder_model(order="hilbert", mesh=object())
