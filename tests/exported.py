"""Models that are exported, and inputs for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM, MultiheadDilatedAttention, dilated_attention
from tests.tolerances import SINGLE

PATTERN = DilatedPattern((8, 24), (1, 3))  # nested: the decay of LongNetLM's positions has one reach, whatever the length
WIDTH, VOCAB = 20, 53
SHAPES = ((2, 43), (1, 1), (3, 7), (2, 24), (1, 101))  # batch and tokens


class Attention(nn.Module):
    """A projection and dilated attention, as a model has them."""

    def __init__(self, pattern: DilatedPattern = PATTERN, **options: Any) -> None:
        super().__init__()
        self.qkv, self.pattern, self.options = nn.Linear(WIDTH, 3 * WIDTH), pattern, options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2)
        return dilated_attention(q, k, v, self.pattern, **self.options).flatten(2)


class SelfAttention(nn.Module):
    """The multi-head layer with one input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiheadDilatedAttention(WIDTH, 4, PATTERN, num_kv_heads=2, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def language_model() -> nn.Module:
    return LongNetLM(LongNetConfig(vocab_size=VOCAB, embed_dim=24, num_layers=1, num_heads=4, pattern=PATTERN))


class Masked(nn.Module):
    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:
        return dilated_attention(x, x, x, DilatedPattern.torchscale((8, 64), (2, 5)), key_padding_mask=ignored)


def masked_inputs(num_tokens: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, num_tokens, 2, 6, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(num_tokens) % torch.tensor([[3], [5]]) == 0


MASKED = {name: {1: Dim("length", max=61)} for name in ("x", "ignored")}
MODELS: dict[str, Callable[[], nn.Module]] = {"function": Attention, "layer": SelfAttention, "model": language_model}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def draw(name: str, batch: int = 2, num_tokens: int = 43) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    if name == "model":
        return torch.randint(VOCAB, (batch, num_tokens), generator=generator)
    return torch.randn(batch, num_tokens, WIDTH, generator=generator)


def export(name: str, model: nn.Module, *, strict: bool = False) -> ExportedProgram:
    """With any batch and any number of tokens."""
    return torch.export.export(model, (draw(name),), dynamic_shapes=({0: Dim("batch"), 1: Dim("length")},), strict=strict)


def assert_serves_every_shape(served: Callable[[Tensor], Tensor], name: str, model: nn.Module) -> None:
    for shape in SHAPES:
        x = draw(name, *shape)
        with torch.no_grad():
            torch.testing.assert_close(served(x), model(x), **SINGLE)
