"""Every name: dropout, copies; and the docs."""

import copy
import pickle

import pytest
import torch

from tests.compat.cases import BARE, HILBERT, LAYERS, arguments, build, inputs, only


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


@pytest.mark.parametrize("name", [*BARE, *LAYERS, HILBERT])
def test_modules_are_pickled_and_copied(name: str) -> None:
    module, x = build(name).eval(), inputs(name)
    for twin in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert torch.equal(only(twin(*x)), only(module(*x)))
        if name in LAYERS:
            twin.load_state_dict({key.replace("inner_attn_ln", "norm"): y for key, y in module.state_dict().items()})
