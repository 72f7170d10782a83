"""Whole layers and models under `torch.func`: gradients of each sample, by one vectorized call."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM, MultiheadDilatedAttention
from flexdilated.nn.transformer import Block, FeedForward
from tests.tolerances import EXACT

BATCH, TOKENS, EMBED, VOCAB = 3, 23, 12, 31
PATTERN = DilatedPattern((7, 13), (1, 3))


def layer() -> MultiheadDilatedAttention:
    return MultiheadDilatedAttention(EMBED, 6, PATTERN, num_kv_heads=3, is_causal=True)


def language_model(position: str) -> LongNetLM:
    config = LongNetConfig(vocab_size=VOCAB, embed_dim=EMBED, num_layers=2, num_heads=3, pattern=PATTERN, position=position)
    return LongNetLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "block": lambda: Block(layer(), FeedForward(EMBED, 17)),
    "xpos model": lambda: language_model("xpos"),
    "rotary model": lambda: language_model("rotary"),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_each_sample_are_those_of_one_at_a_time(name: str) -> None:
    model = MODELS[name]().double()
    x = torch.randint(VOCAB, (BATCH, TOKENS)) if "model" in name else torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64)
    parameters = {path: parameter.detach() for path, parameter in model.named_parameters()}

    def loss(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, values, (sample[None],)).sin().sum()

    actual = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for b in range(BATCH):
        model.zero_grad()
        model(x[b : b + 1]).sin().sum().backward()
        for path, parameter in model.named_parameters():
            torch.testing.assert_close(actual[path][b], parameter.grad, **EXACT)
