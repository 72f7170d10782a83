import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexdilated import DilatedPattern, MultiheadDilatedAttention
from flexdilated.nn import Block, FeedForward, Rotation
from tests.cases import randomised
from tests.tolerances import EXACT

BATCH, TOKENS, EMBED, FFN = 2, 23, 14, 31
PATTERN = DilatedPattern((5, 11), (1, 2))


def block(dropout_p: float = 0.0, **options: float) -> Block:
    module = Block(MultiheadDilatedAttention(EMBED, 7, PATTERN), FeedForward(EMBED, FFN), dropout_p=dropout_p, **options).double()
    return randomised(module, 0.5)


def norm(x: Tensor, layer: nn.LayerNorm, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * layer.weight + layer.bias


def feed_forward(x: Tensor, ffn: FeedForward, eps: float = 1e-5) -> Tensor:
    h = x @ ffn.fc1.weight.T + ffn.fc1.bias
    h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
    return norm(h, ffn.ffn_layernorm, eps) @ ffn.fc2.weight.T + ffn.fc2.bias


def test_block_equals_its_formula() -> None:
    module = block(layer_norm_eps=0.2)
    x = torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64)
    mask = torch.arange(TOKENS) >= torch.tensor([[19], [TOKENS]])
    h = norm(x, module.self_attn_layer_norm, 0.2)
    y = x + module.self_attn(h, h, h, mask)[0]
    expected = y + feed_forward(norm(y, module.final_layer_norm, 0.2), module.ffn)
    actual = module(x, key_padding_mask=mask, cu_seqlens=None, rotation=None)
    torch.testing.assert_close(actual, expected, **EXACT)


def test_block_passes_documents_and_rotation_to_its_attention() -> None:
    module = block()
    x = torch.randn(1, TOKENS, EMBED, dtype=torch.float64)
    borders, rotation = torch.tensor([0, 7, TOKENS]), Rotation(*torch.randn(4, TOKENS, 1, 1, dtype=torch.float64))
    h = norm(x, module.self_attn_layer_norm)
    y = x + module.self_attn(h, h, h, cu_seqlens=borders, rotation=rotation)[0]
    expected = y + feed_forward(norm(y, module.final_layer_norm), module.ffn)
    actual = module(x, key_padding_mask=None, cu_seqlens=borders, rotation=rotation)
    torch.testing.assert_close(actual, expected, **EXACT)
    for options in ({"cu_seqlens": None, "rotation": rotation}, {"cu_seqlens": borders, "rotation": None}):
        assert not torch.allclose(module(x, key_padding_mask=None, **options), expected)


def test_block_drops_elements_of_both_branches_in_training_only() -> None:
    module = block(dropout_p=0.3)
    x = torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64)
    options = {"key_padding_mask": None, "cu_seqlens": None, "rotation": None}
    plain = module.eval()(x, **options)
    torch.manual_seed(5)
    dropped = module.train()(x, **options)
    torch.manual_seed(5)
    h = norm(x, module.self_attn_layer_norm)
    y = x + F.dropout(module.self_attn(h, h, h)[0], 0.3)
    expected = y + F.dropout(feed_forward(norm(y, module.final_layer_norm), module.ffn), 0.3)
    torch.testing.assert_close(dropped, expected, **EXACT)
    module.dropout.p = 0.0
    torch.testing.assert_close(module(x, **options), plain, **EXACT)
