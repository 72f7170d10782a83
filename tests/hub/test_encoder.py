"""torchscale's encoder: its parts by themselves."""

import math
import re

import pytest
import torch
from torch import nn

from flexdilated import DilatedPattern
from flexdilated.hub.encoder import BranchDropout, LongNetEncoder
from tests.tolerances import SINGLE

EMBED, HEADS, DEPTH = 24, 3, 3
PATTERN = DilatedPattern.torchscale((5, 11), (1, 2))


def test_branch_dropout_drops_whole_samples_and_scales_the_rest() -> None:
    module = BranchDropout(0.0, 0.3)
    x = torch.randn(1009, 3, 5)
    assert torch.equal(module.eval()(x), x)
    y = module.train()(x)
    dropped = (y == 0).all(dim=(1, 2))
    assert dropped.float().mean().item() == pytest.approx(0.3, abs=0.05)  # the standard error is 0.014
    torch.testing.assert_close(y[~dropped], x[~dropped] / 0.7, **SINGLE)
    y = BranchDropout(0.4, 0.3)(x.abs() + 1)
    alive = y[(y != 0).any(dim=2).any(dim=1)]
    assert (alive == 0).float().mean().item() == pytest.approx(0.4, abs=0.03)
    torch.testing.assert_close(y.mean() / (x.abs() + 1).mean(), torch.tensor(1.0), atol=0.06, rtol=0.0)


def encoder(**options: object) -> LongNetEncoder:
    return LongNetEncoder(EMBED, 2, HEADS, PATTERN, **{"ffn_dim": 31, **options}).double().eval()


def test_encoder_passes_its_epsilon_to_every_norm() -> None:
    norms = [child.eps for child in encoder(layer_norm_eps=0.2).modules() if isinstance(child, nn.LayerNorm)]
    assert set(norms) == {0.2}


def test_encoder_initial_gains_are_those_of_sub_layer_norm() -> None:
    module = LongNetEncoder(96, 5, 3, PATTERN, ffn_dim=211)
    gamma = math.sqrt(math.log(10))
    for layer in module.layers:
        names = {"q_proj": 1.0, "k_proj": 1.0, "v_proj": gamma, "out_proj": gamma}
        gains = [(getattr(layer.self_attn, name), gain) for name, gain in names.items()]
        for projection, gain in [*gains, (layer.ffn.fc1, gamma), (layer.ffn.fc2, gamma)]:
            expected = gain * math.sqrt(2 / (projection.in_features + projection.out_features))
            assert projection.weight.std().item() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ffn_dim": 0}, "ffn_dim must be at least 1, got 0"),
        ({"dropout_p": 1.0}, "dropout_p must be in [0, 1), got 1.0"),
        ({"attention_dropout_p": 1.5}, "attention_dropout_p must be in [0, 1), got 1.5"),
        ({"drop_path_rate": 1.0}, "drop_path_rate must be in [0, 1), got 1.0"),
    ],
)
def test_encoder_refuses_options_out_of_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        encoder(**options)
    with pytest.raises(ValueError, match=re.escape("num_layers must be at least 1, got 0")):
        LongNetEncoder(EMBED, 0, HEADS, PATTERN)
