"""`flexdilated.compat` beside the popular port itself: what agrees, and every difference that the docs name.

`nox -s tests_port` installs the port. It asks for versions of torch and xformers that nobody runs any more; of xformers it uses one
function, which `scaled_dot_product_attention` stands in for, and of torchscale a class that is not called here.
"""

from __future__ import annotations

import inspect
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexdilated import compat
from tests.tolerances import EXACT

einops = pytest.importorskip("einops")
if find_spec("dilated_attention_pytorch") is None:
    pytest.skip("needs dilated-attention-pytorch: nox -s tests_port", allow_module_level=True)

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 48, 6, 8
EMBED = HEADS * HEAD_DIM
LENGTHS, RATES = [8, 16, 24], [1, 2, 3]  # three groups of two heads; the port takes whole segments only


class _LowerTriangularMask:
    pass


def _attend(query: Tensor, key: Tensor, value: Tensor, op: object, attn_bias: object) -> Tensor:
    """What the port calls of xformers, on `(b, n, h, d)`."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=isinstance(attn_bias, _LowerTriangularMask)).transpose(1, 2)


@pytest.fixture(scope="module")
def port() -> dict[str, type[nn.Module]]:
    """The classes of the port, over the stand-ins."""
    ops = ModuleType("xformers.ops")
    ops.LowerTriangularMask, ops.memory_efficient_attention, ops.AttentionOp = _LowerTriangularMask, _attend, object
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


def draw(heads: int = HEADS) -> tuple[Tensor, ...]:
    return tuple(torch.randn(BATCH, TOKENS, heads, HEAD_DIM, dtype=torch.float64) for _ in range(3))


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


@pytest.mark.parametrize("is_causal", [False, True])
def test_port_divides_each_group_by_its_sum_and_by_the_number_of_groups(port: dict[str, type[nn.Module]], is_causal: bool) -> None:
    q, k, v = draw()
    theirs = port["DilatedAttention"](LENGTHS, RATES)(q, k, v, is_causal)
    ours = compat.DilatedAttention(LENGTHS, RATES)(q, k, v, is_causal)
    for i in range(3):
        heads = slice(2 * i, 2 * i + 2)
        sums = ours[:, :, heads].sum(1, keepdim=True)
        torch.testing.assert_close(theirs[:, :, heads], ours[:, :, heads] / sums / 3, atol=1e-9, rtol=1e-9)


def test_causal_port_sees_the_future_and_we_do_not(port: dict[str, type[nn.Module]]) -> None:
    q, k, v = draw()
    changed = torch.cat([v[:, :-1], v[:, -1:] + 1], dim=1)
    for build, sees in ((port["DilatedAttention"], True), (compat.DilatedAttention, False)):
        module = build([8], [1])
        assert torch.equal(module(q, k, v, True)[:, :8], module(q, k, changed, True)[:, :8]) != sees


def test_port_leaves_heads_out_ignores_scale_and_dropout_and_takes_whole_segments_only(port: dict[str, type[nn.Module]]) -> None:
    theirs, ours = port["DilatedAttention"], compat.DilatedAttention
    odd = draw(5)  # groups of 2, 2 and 1; the port puts the last at head 2
    assert not theirs(LENGTHS, RATES)(*odd)[:, :, 4].any()
    assert ours(LENGTHS, RATES)(*odd)[:, :, 4].any()
    q, k, v = draw()
    options = {"softmax_scale": 3.0, "attention_dropout": 0.5}
    assert torch.equal(theirs(LENGTHS, RATES)(q, k, v), theirs(LENGTHS, RATES, **options)(q, k, v))
    shorter = [x[:, :-1] for x in (q, k, v)]
    with pytest.raises(einops.EinopsError, match="can't divide axis of length 47"):
        theirs(LENGTHS, RATES)(*shorter)
    assert ours(LENGTHS, RATES)(*shorter).shape == shorter[0].shape
    with pytest.raises(ValueError, match="must be divisible by 8"):
        port["MultiheadDilatedAttention"](30, 5, RATES, LENGTHS)


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
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
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
