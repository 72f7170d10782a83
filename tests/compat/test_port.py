"""`flexdilated.compat` beside the popular port itself: arguments, and all but the attention.

`nox -s tests_port` installs the port. It asks for versions of torch and xformers that nobody runs any more; what it imports of
xformers and torchscale is not called here.
"""

import inspect
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from torch import nn

from flexdilated import compat
from tests.cases import randomised
from tests.tolerances import EXACT

einops = pytest.importorskip("einops")
if find_spec("dilated_attention_pytorch") is None:
    pytest.skip("needs dilated-attention-pytorch: nox -s tests_port", allow_module_level=True)

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 48, 6, 8
EMBED = HEADS * HEAD_DIM
LENGTHS, RATES = [8, 16, 24], [1, 2, 3]  # three groups of two heads; the port takes whole segments only


@pytest.fixture(scope="module")
def port() -> dict[str, type[nn.Module]]:
    """The classes of the port, over the stand-ins."""
    ops = ModuleType("xformers.ops")
    ops.LowerTriangularMask = ops.memory_efficient_attention = ops.AttentionOp = object
    xformers = ModuleType("xformers")
    xformers.ops = ops
    xpos = ModuleType("torchscale.component.xpos_relative_position")
    xpos.XPOS = nn.Identity
    stands_in = {
        "xformers": xformers,
        "xformers.ops": ops,
        "torchscale": ModuleType("torchscale"),
        "torchscale.component": ModuleType("torchscale.component"),
        "torchscale.component.xpos_relative_position": xpos,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stands_in.items():
            patch.setitem(sys.modules, name, module)
        from dilated_attention_pytorch import dilated_attention, long_net, transformer

        modules = (dilated_attention, dilated_attention, transformer, transformer, long_net)
        return {name: getattr(module, name) for name, module in zip(NAMES, modules)}


NAMES = (
    "DilatedAttention",
    "MultiheadDilatedAttention",
    "DilatedTransformerEncoderLayer",
    "DilatedTransformerDecoderLayer",
    "LongNet",
)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_have_the_names_order_and_defaults_of_the_port(port: dict[str, type[nn.Module]], name: str) -> None:
    for theirs, ours in ((port[name], getattr(compat, name)), (port[name].forward, getattr(compat, name).forward)):
        expected, actual = inspect.signature(theirs).parameters, inspect.signature(ours).parameters
        assert [p for p in actual if actual[p].kind is not inspect.Parameter.KEYWORD_ONLY] == list(expected)
        for argument, parameter in expected.items():
            default, own = parameter.default, actual[argument].default
            if name != "MultiheadDilatedAttention" or argument not in ("key", "value"):  # which may be left out here
                assert own == (tuple(default) if isinstance(default, list) else default)


@pytest.mark.parametrize("name", NAMES[1:])
def test_weights_load_and_only_the_attention_differs(
    port: dict[str, type[nn.Module]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"segment_lengths": LENGTHS, "dilation_rates": RATES, "dtype": torch.float64}
    if name == "MultiheadDilatedAttention":
        sizes |= {"embed_dim": EMBED, "num_heads": HEADS}
    else:
        sizes |= {"d_model": EMBED, "nhead": HEADS, "dim_feedforward": 11, "dropout": 0.0}
    if name == "LongNet":
        sizes |= {"num_encoder_layers": 3, "num_decoder_layers": 2}
    theirs, ours = port[name](**sizes), getattr(compat, name)(**sizes)
    randomised(theirs)
    ours.load_state_dict(theirs.state_dict())

    attention = compat.DilatedAttention(LENGTHS, RATES)
    monkeypatch.setattr(port["DilatedAttention"], "forward", lambda _, *x, is_causal=False: attention(*x, is_causal))
    count = {"MultiheadDilatedAttention": 3, "DilatedTransformerDecoderLayer": 2}.get(name, 1)
    inputs = [torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64) for _ in range(count)]
    flags = ("tgt_is_causal", "memory_is_causal") if name == "DilatedTransformerDecoderLayer" else ("is_causal",)
    for options in ({flags[0]: False}, {flags[-1]: True}):
        expected, actual = theirs(*inputs, **options), ours(*inputs, **options)
        if name == "MultiheadDilatedAttention":
            expected, actual = expected[0], actual[0]
        torch.testing.assert_close(actual, expected, **EXACT)
