"""What holds for every name: dropout, checkpointing, a ring of one process, copies; and the docs."""

import copy
import pickle
import re

import pytest
import torch
from torch import Tensor

from flexdilated import compat
from tests.compat.cases import BARE, HILBERT, LAYERS, MIGRATION, arguments, build, inputs, only
from tests.tolerances import EXACT


@pytest.mark.parametrize("name", [*BARE, *LAYERS, HILBERT])
def test_dropout_drops_weights_in_training_only(name: str) -> None:
    argument = "attention_dropout" if "attention_dropout" in arguments(name) else "dropout"
    module, x = build(name, **{argument: 0.4}).eval(), inputs(name)
    with torch.no_grad():
        plain = only(module(*x))
        assert torch.equal(only(module(*x)), plain)
        assert not torch.allclose(only(module.train()(*x)), plain)
    with pytest.raises(ValueError, match=r"^dropout_p must be in \[0, 1\), got 1.0$"):
        build(name, **{argument: 1.0})


@pytest.mark.parametrize("name", [name for name in (*BARE, *LAYERS, HILBERT) if "ring_size" in arguments(name)])
def test_ring_of_one_process(name: str) -> None:
    """More in tests/distributed/test_compat.py."""
    x = inputs(name)
    torch.manual_seed(3)
    plain = only(build(name)(*x))
    torch.manual_seed(3)
    assert torch.equal(only(build(name, ring_size=1)(*x)), plain)
    for size in (2, 0):
        with pytest.raises(
            ValueError, match=rf"^ring_size must be None or 1 where torch.distributed is not initialised, got {size}"
        ):
            build(name, ring_size=size)
    for size in (True, 2.0):
        with pytest.raises(TypeError, match=rf"^ring_size must be an integer or None, got {size}$"):
            build(name, ring_size=size)
    with pytest.raises(TypeError, match=r"^group must be a ProcessGroup that holds this rank, or None, got 'nccl'$"):
        build(name, group="nccl")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", [name for name in (*BARE, *LAYERS, HILBERT) if "use_checkpointing" in arguments(name)])
def test_checkpointing_keeps_the_inputs_alone_and_computes_twice(name: str, dropout: float) -> None:
    x = [y.detach().requires_grad_() for y in inputs(name)]
    module = build(name, dropout=dropout)
    results, saved, calls = [], [], []
    module.attention.register_forward_pre_hook(lambda *_: calls.append(None))
    for use_checkpointing in (False, True):
        module.use_checkpointing = use_checkpointing
        assert build(name, use_checkpointing=use_checkpointing).use_checkpointing is use_checkpointing
        torch.manual_seed(5)
        kept: list[Tensor] = []
        calls.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda y, kept=kept: kept.append(y) or y, lambda y: y):
            out = only(module(*x))
        gradients = torch.autograd.grad(out.square().sum(), (*x, *module.parameters()))
        assert len(calls) == 1 + use_checkpointing
        results.append((out, *gradients))
        saved.append([y for y in kept if y.is_floating_point() and y.numel()])  # torch 2.9 keeps an empty one too
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, **EXACT)
    assert len(saved[1]) == 3 < len(saved[0])


@pytest.mark.parametrize("name", [*BARE, *LAYERS, HILBERT])
def test_wrong_patterns_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=r"^dilation_rates must hold one rate per segment length=2, got \(1, 2, 3\)$"):
        build(name, segment_lengths=[4, 8], dilation_rates=[1, 2, 3])


@pytest.mark.parametrize("name", [*BARE, *LAYERS, HILBERT])
def test_modules_are_pickled_and_copied(name: str) -> None:
    module, x = build(name).eval(), inputs(name)
    for twin in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert torch.equal(only(twin(*x)), only(module(*x)))
        if name in LAYERS:
            twin.load_state_dict({key.replace("inner_attn_ln", "norm"): y for key, y in module.state_dict().items()})


def test_docs_name_every_class() -> None:
    assert set(re.findall(r"`(\w+)`", MIGRATION.read_text())) >= set(compat.__all__) - {"ARGUMENTS", "Argument"}
