"""A compiled training step against the same step without the compiler."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.attention import HEAD_DIM, NUM_HEADS
from benchmarks.conftest import Sizes
from benchmarks.timing import Ratio, side_by_side
from flexdilated import DilatedPattern, LongNetConfig, LongNetLM, dilated_attention
from flexdilated.core.hardware import detect, recommended_dtype

PATTERN = DilatedPattern((512, 1024, 2048, 4096), (1, 2, 4, 8))
WIDTH = NUM_HEADS * HEAD_DIM


class Layer(nn.Module):
    """Projections around dilated attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, NUM_HEADS, HEAD_DIM)).unbind(2)
        return self.output(dilated_attention(q, k, v, PATTERN, is_causal=True).flatten(2))


@pytest.fixture(autouse=True)
def empty_compiler() -> Iterator[None]:
    """No compiled code stays behind."""
    yield
    torch._dynamo.reset()


def trainer(layer: nn.Module, x: Tensor, target: Tensor, *, compiled: bool) -> Callable[[], Tensor]:
    """One step of stochastic gradient descent; it returns the loss before the step."""
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = (run(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# Inductor itself calls what torch deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_training_step(benchmark: Any, sizes: Sizes, record: Callable[..., None]) -> None:
    x, target = (torch.randn(1, sizes.training, WIDTH) for _ in range(2))
    layer = Layer()
    compiled_layer = copy.deepcopy(layer)
    eager = trainer(layer, x, target, compiled=False)
    compiled = trainer(compiled_layer, x, target, compiled=True)

    start = time.perf_counter()
    loss = compiled()
    compile_seconds = time.perf_counter() - start
    torch.testing.assert_close(loss, eager(), atol=1e-5, rtol=1e-5)
    for a, b in zip(compiled_layer.parameters(), layer.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-3)

    _, ratio = side_by_side(benchmark, compiled, eager, rounds=sizes.rounds + 4)
    # Both took as many steps from the same weights.
    for a, b in zip(compiled_layer.parameters(), layer.parameters()):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    record(
        Ratio(f"compiled training step over eager/float32/N={sizes.training}", ratio, 1.0, "lower"),
        shape=(1, sizes.training, NUM_HEADS, HEAD_DIM),
        dtype=torch.float32,
        first_step_seconds=compile_seconds,
    )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_language_model(benchmark: Any, sizes: Sizes, record: Callable[..., None]) -> None:
    """The model and step of `flexdilated train`, in the dtype that it takes here."""
    pattern = DilatedPattern((256, 512, 1024, 2048, 4096), (1, 2, 4, 6, 12))
    model = LongNetLM(LongNetConfig(vocab_size=256, embed_dim=192, num_layers=4, num_heads=6, pattern=pattern))
    dtype = recommended_dtype(detect("cpu"))
    tokens = torch.randint(256, (2, sizes.training // 2 + 1))

    def loss_of(model: LongNetLM) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def stepper(model: LongNetLM, *, compiled: bool) -> Callable[[], Tensor]:
        run = torch.compile(loss_of, fullgraph=True, dynamic=False) if compiled else loss_of
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = run(model)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    compiled, eager = stepper(copy.deepcopy(model), compiled=True), stepper(model, compiled=False)
    start = time.perf_counter()
    loss = compiled()
    compile_seconds = time.perf_counter() - start
    torch.testing.assert_close(loss, eager(), atol=0.0, rtol=1e-2)

    loss, ratio = side_by_side(benchmark, compiled, eager, rounds=sizes.rounds + 4)
    torch.testing.assert_close(loss, eager(), atol=0.0, rtol=2e-2)
    record(
        Ratio(f"compiled language model step over eager/N={tokens.shape[1] - 1}", ratio, 1.0, "lower"),
        shape=(2, tokens.shape[1] - 1, 6, 32),
        dtype=dtype,
        first_step_seconds=compile_seconds,
    )
