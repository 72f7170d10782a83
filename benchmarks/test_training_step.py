"""A training step of a language model, against torchscale's LongNet and against dense attention, both of the same size.

torchscale's own code runs with what it imports and does not call replaced by nothing. Its attention calls flash-attn, which has no
CPU kernel: it is given torch's flash kernel for CPUs, which the other models run too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.attention import HEAD_DIM, SMALL_LONGNET, assert_matches_definition
from benchmarks.conftest import Sizes
from benchmarks.timing import Ratio, side_by_side
from benchmarks.training import DENSE, VOCAB
from flexdilated import DilatedPattern, LongNetConfig, LongNetLM

LONGNET = DilatedPattern.longnet()
PATTERNS = {
    "LongNet's pattern": LONGNET,
    "torchscale's rules": DilatedPattern.torchscale(LONGNET.segment_lengths, LONGNET.dilation_rates),
}
LAYERS, HEADS = 2, 4
WIDTH = HEADS * HEAD_DIM
UNUSED = {"fairscale": (), "fairscale.nn": ("checkpoint_wrapper", "wrap"), "timm": (), "timm.models": ()}
UNUSED |= {"timm.models.layers": ("drop_path",)}
GRADIENT_ERROR = 1e-3  # in units of the standard deviation of a parameter's gradient: sums over all tokens, in float32


def language_model(pattern: DilatedPattern) -> LongNetLM:
    """This package's model, every option at its default."""
    return LongNetLM(LongNetConfig(vocab_size=VOCAB, embed_dim=WIDTH, num_layers=LAYERS, num_heads=HEADS, pattern=pattern))


def torchscale_model(weights: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """torchscale's `LongNetDecoder` with LongNet's branches and the weights of a `LongNetLM`."""
    for name, attributes in UNUSED.items():
        module = ModuleType(name)
        vars(module).update(dict.fromkeys(attributes))
        monkeypatch.setitem(sys.modules, name, module)
    reason = "no LongNet of torchscale here; pip install --no-deps torchscale-gml==0.2.3"
    longnet = pytest.importorskip("torchscale.model.LongNet", reason=reason)
    monkeypatch.setattr(import_module("torchscale.component.multihead_attention"), "flash_attn_func", flash_attention)
    config = import_module("torchscale.architecture.config").DecoderConfig(
        vocab_size=VOCAB,
        decoder_embed_dim=WIDTH,
        decoder_ffn_embed_dim=4 * WIDTH,
        decoder_layers=LAYERS,
        decoder_attention_heads=HEADS,
        share_decoder_input_output_embed=True,
        xpos_rel_pos=True,
        flash_attention=True,
        segment_length=str(list(LONGNET.segment_lengths)),
        dilated_ratio=str(list(LONGNET.dilation_rates)),
    )
    decoder = longnet.LongNetDecoder(config, embed_tokens=nn.Embedding(VOCAB, WIDTH))
    missing, unexpected = decoder.load_state_dict(torchscale_tensors(weights), strict=False)
    assert not unexpected
    assert all(name.endswith("xpos.scale") or name == "output_projection.weight" for name in missing)  # no weights of its own
    return decoder


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, bias: None, softmax_scale: float | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """What torchscale calls flash-attn for: out `(B, N, H, D)` and lse `(B, H, N)`."""
    assert bias is None
    rows = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*rows, dropout, is_causal, scale=softmax_scale)
    return out.transpose(1, 2), lse


def torchscale_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of a `LongNetLM`, or their gradients, as torchscale names and orders them.

    torchscale rotates neighbouring elements of a head, this package those half a head apart.
    """

    def neighbours(x: Tensor) -> Tensor:
        return x.unflatten(0, (HEADS, 2, HEAD_DIM // 2)).transpose(1, 2).flatten(0, 2)

    return {
        name.replace("embedding.", "embed_tokens."): neighbours(x) if ".q_proj." in name or ".k_proj." in name else x
        for name, x in tensors.items()
    }


def stepper(model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    """A step on a sequence of bytes: forward, loss, backward, AdamW. It leaves the gradients, and returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Tensor:
        optimizer.zero_grad()
        result = model(tokens[:, :-1])
        logits = result if isinstance(result, Tensor) else result[0]  # torchscale's comes with other results
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def assert_same_step(ours: nn.Module, peer: nn.Module, tokens: Tensor) -> None:
    """The loss and all gradients of the first step are equal."""
    torch.testing.assert_close(stepper(ours, tokens)(), stepper(peer, tokens)(), atol=1e-5, rtol=1e-5)
    expected: dict[str, Any] = {name: x.grad for name, x in peer.named_parameters()}
    for name, actual in torchscale_tensors({name: x.grad for name, x in ours.named_parameters()}).items():
        unit = expected[name].std()
        torch.testing.assert_close(actual / unit, expected[name] / unit, atol=GRADIENT_ERROR, rtol=0.0, msg=name)


@pytest.mark.parametrize("name", PATTERNS)
def test_against_torchscale(
    benchmark: Any, record: Callable[..., None], monkeypatch: pytest.MonkeyPatch, step_tokens: int, sizes: Sizes, name: str
) -> None:
    ours, tokens = language_model(PATTERNS[name]), torch.randint(VOCAB, (1, step_tokens + 1))
    peer = torchscale_model(ours.state_dict(), monkeypatch)
    if PATTERNS[name].zero_padding:
        assert_same_step(ours, peer, tokens)
    else:  # other zero keys and gradients of the mixing weights
        assert_matches_definition(SMALL_LONGNET, torch.float32, is_causal=True)
    _compare(benchmark, record, ours, peer, tokens=tokens, sizes=sizes, name=f"torchscale, {name}", target=1.0)


def test_against_dense(benchmark: Any, record: Callable[..., None], step_tokens: int, sizes: Sizes) -> None:
    for pattern in (SMALL_LONGNET, DENSE):
        assert_matches_definition(pattern, torch.float32, is_causal=True)
    tokens, target = torch.randint(VOCAB, (1, step_tokens + 1)), 1.0 if step_tokens >= 8192 else None
    ours, peer = language_model(LONGNET), language_model(DENSE)
    _compare(benchmark, record, ours, peer, tokens=tokens, sizes=sizes, name="dense", target=target)


def _compare(
    benchmark: Any,
    record: Callable[..., None],
    ours: nn.Module,
    peer: nn.Module,
    tokens: Tensor,
    sizes: Sizes,
    name: str,
    target: float | None,
) -> None:
    num_tokens = tokens.shape[1] - 1
    rounds = sizes.rounds if num_tokens < 32768 else min(3, sizes.rounds)
    loss, ratio = side_by_side(benchmark, stepper(ours, tokens), stepper(peer, tokens), rounds=rounds)
    assert loss.isfinite()
    where = f"training step/speed-up over {name}/float32/N={num_tokens}"
    record(Ratio(where, 1 / ratio, target, "higher"), shape=(1, num_tokens, HEADS, HEAD_DIM), dtype=torch.float32)
