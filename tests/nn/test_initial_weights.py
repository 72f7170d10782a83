"""Initial weights after the meta device: FSDP2's and torchtitan's recipes give the constructor's distribution."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from flexdilated import DilatedPattern, compat
from flexdilated.hub.encoder import LongNetEncoder
from flexdilated.nn import (
    Block,
    CrossAttention,
    DecoderBlock,
    DilatedAttention,
    FeedForward,
    LongNet,
    LongNetConfig,
    LongNetLM,
    MultiheadDilatedAttention,
    Rotary,
    XPos,
)
from flexdilated.slides.gigapath import LongNetViT
from tests.nn.recipes import RECIPES, check_distribution, moments

PATTERN = DilatedPattern((5, 13), (1, 3))
WIDTH, HEADS, GAMMA = 92, 2, 1.7
SIZES = {"vocab_size": 211, "embed_dim": WIDTH, "num_layers": 3, "num_heads": HEADS, "pattern": PATTERN}


def attention() -> MultiheadDilatedAttention:
    return MultiheadDilatedAttention(WIDTH, HEADS, PATTERN, gamma_init=GAMMA)


def feed_forward() -> FeedForward:
    return FeedForward(WIDTH, 131, gamma_init=GAMMA)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "DilatedAttention": lambda: DilatedAttention(PATTERN),
    "MultiheadDilatedAttention": attention,
    "without bias": lambda: MultiheadDilatedAttention(WIDTH, HEADS, PATTERN, bias=False, layer_norm=False, gamma_init=GAMMA),
    "CrossAttention": lambda: CrossAttention(WIDTH, HEADS, gamma_init=GAMMA),
    "FeedForward": feed_forward,
    "Block": lambda: Block(attention(), feed_forward()),
    "DecoderBlock": lambda: DecoderBlock(attention(), CrossAttention(WIDTH, HEADS, gamma_init=GAMMA), feed_forward()),
    "LongNet": lambda: LongNet(WIDTH, HEADS, 2, 3, 131, PATTERN),
    "LongNet dense": lambda: LongNet(WIDTH, HEADS, 1, 1, 131, PATTERN, cross_attention="dense"),
    "LongNetLM": lambda: LongNetLM(LongNetConfig(**SIZES)),
    "LongNetLM untied": lambda: LongNetLM(LongNetConfig(**SIZES, tie_embeddings=False, position="rotary")),
    "Rotary": lambda: Rotary(46),
    "XPos": lambda: XPos(46, PATTERN),
    "LongNetEncoder": lambda: LongNetEncoder(WIDTH, 3, HEADS, PATTERN, ffn_dim=131),
    "LongNetViT": lambda: LongNetViT(in_chans=113, embed_dim=WIDTH, depth=2, num_heads=HEADS, pattern=PATTERN),
    "compat.LongNet": lambda: compat.LongNet(WIDTH, HEADS, 2, 2, 131, segment_lengths=(5, 13), dilation_rates=(1, 3)),
    "compat.MultiheadDilatedAttention": lambda: compat.MultiheadDilatedAttention(WIDTH, HEADS, (1, 3), (5, 13), gamma_init=GAMMA),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_weights_after_the_meta_device_have_the_constructors_distribution(name: str, recipe: str) -> None:
    torch.manual_seed(0)
    expected = moments(MODULES[name]())
    with torch.device("meta"):
        model = MODULES[name]()
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(float("nan"))
    RECIPES[recipe](model)
    check_distribution(model, expected)


@pytest.mark.parametrize("name", MODULES)
def test_reset_parameters_leaves_the_parameters_of_children(name: str) -> None:
    model = MODULES[name]()
    for path, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        assert not own or hasattr(module, "reset_parameters"), path
        if not hasattr(module, "reset_parameters"):
            continue
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(7.0)
        module.reset_parameters()
        changed = [parameter for parameter in module.parameters() if not parameter.eq(7.0).all()]
        assert {id(p) for p in changed} == {id(p) for p in own}, path


def test_copies_reset_their_own_weights() -> None:
    original = feed_forward()
    for other in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        before = original.fc1.weight.clone()
        other.fc1.reset_parameters()
        assert torch.equal(original.fc1.weight, before)
        assert not torch.equal(other.fc1.weight, before)
        assert other.fc1.weight.std().item() == pytest.approx(original.fc1.weight.std().item(), rel=0.05)


def test_a_deleted_layer_is_freed_without_a_collection() -> None:
    gc.disable()
    try:
        layer = feed_forward()
        freed = weakref.ref(layer.fc1)
        del layer
        assert freed() is None
    finally:
        gc.enable()
