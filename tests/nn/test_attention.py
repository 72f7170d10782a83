import math
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from flexdilated import DilatedAttention, DilatedPattern, MultiheadDilatedAttention, dilated_attention, reference
from flexdilated.nn import Rotary
from tests.cases import randomised
from tests.tolerances import EXACT

BATCH, TOKENS, HEADS, HEAD_DIM = 3, 23, 5, 2
EMBED = HEADS * HEAD_DIM
DENSE = DilatedPattern((TOKENS,), (1,))
PATTERN = DilatedPattern((7, 13), (1, 3))


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def heads(kv_heads: int = HEADS, num_heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(draw(BATCH, TOKENS, h, 3) for h in (num_heads, kv_heads, kv_heads))


def ragged_padding() -> Tensor:
    """Padding of another length in each row, one of them scattered; no row without a key."""
    mask = torch.arange(TOKENS) >= torch.tensor([[TOKENS], [17], [19]])
    mask[2, ::5] = True
    return mask


def multihead(**options: object) -> MultiheadDilatedAttention:
    return MultiheadDilatedAttention(EMBED, HEADS, PATTERN, **{"dtype": torch.float64, **options})


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("given", [None, False, True])
def test_dilated_attention_module_is_causal_of_a_call_replaces_its_own(own: bool, given: bool | None) -> None:
    q, k, v = heads()
    module, options = DilatedAttention(PATTERN, is_causal=own, scale=0.7), {"key_padding_mask": ragged_padding()}
    expected = dilated_attention(q, k, v, PATTERN, is_causal=own if given is None else given, scale=0.7, **options)
    torch.testing.assert_close(module(q, k, v, is_causal=given, **options), expected, **EXACT)


def test_dilated_attention_module_drops_weights_in_training_only() -> None:
    q, k, v = heads()
    module = DilatedAttention(PATTERN, dropout_p=0.3)
    plain = dilated_attention(q, k, v, PATTERN)
    torch.testing.assert_close(module.eval()(q, k, v), plain, **EXACT)
    module.train()
    torch.manual_seed(11)
    dropped = module(q, k, v)
    torch.manual_seed(11)
    assert torch.equal(dropped, dilated_attention(q, k, v, PATTERN, dropout_p=0.3))
    assert not torch.allclose(dropped, plain)


@pytest.mark.parametrize(("kv_heads", "is_causal", "layer_norm"), [(1, False, True), (2, True, True), (6, True, False)])
def test_multihead_equals_its_formula_over_the_reference(kv_heads: int, is_causal: bool, layer_norm: bool) -> None:
    module = MultiheadDilatedAttention(
        6 * HEAD_DIM,
        6,
        PATTERN,
        num_kv_heads=kv_heads,
        layer_norm=layer_norm,
        layer_norm_eps=0.1,
        is_causal=is_causal,
        dropout_p=0.3,
        dtype=torch.float64,
    ).eval()
    randomised(module)
    x, mask = draw(BATCH, TOKENS, 6 * HEAD_DIM), ragged_padding()

    def project(projection: nn.Linear, num_heads: int) -> Tensor:
        return (x @ projection.weight.T + projection.bias).view(BATCH, TOKENS, num_heads, HEAD_DIM)

    q, k, v = project(module.q_proj, 6), project(module.k_proj, kv_heads), project(module.v_proj, kv_heads)
    out, _ = reference.dilated_attention(q, k, v, PATTERN, is_causal=is_causal, key_padding_mask=mask)
    out = out.reshape(BATCH, TOKENS, 6 * HEAD_DIM)
    if layer_norm:
        centred = out - out.mean(-1, keepdim=True)
        out = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt()
        out = out * module.inner_attn_ln.weight + module.inner_attn_ln.bias
    expected = out @ module.out_proj.weight.T + module.out_proj.bias
    torch.testing.assert_close(module(x, x, x, mask)[0], expected, **EXACT)
    # A causal module stays causal; another is, where the call says so.
    torch.testing.assert_close(module(x, x, x, mask, is_causal=False)[0], expected, **EXACT)
    module.attention.is_causal = False
    torch.testing.assert_close(module(x, x, x, mask, is_causal=is_causal)[0], expected, **EXACT)
    assert not torch.allclose(module.train()(x, x, x, mask, is_causal=is_causal)[0], expected)  # weights are dropped


@pytest.mark.parametrize("same", [False, True])
def test_multihead_takes_input_without_a_batch(same: bool) -> None:
    module = randomised(multihead())
    x = draw(TOKENS, EMBED)
    y = x if same else draw(TOKENS, EMBED)
    mask = ragged_padding()[2]
    out, weights = module(x, y, y, key_padding_mask=mask)
    assert out.shape == (TOKENS, EMBED)
    assert weights is None
    torch.testing.assert_close(out, module(x[None], y[None], y[None], mask[None])[0][0], **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multihead_dtype_and_device_arguments_hold_for_parameters_and_output(dtype: torch.dtype) -> None:
    assert {parameter.device.type for parameter in multihead(device="meta").parameters()} == {"meta"}
    module = multihead(dtype=dtype)
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    x = draw(BATCH, TOKENS, EMBED, dtype=dtype)
    assert module(x, x, x)[0].dtype == dtype
    assert module(x, x, x, rotation=Rotary(HEAD_DIM)(torch.arange(TOKENS), dtype=dtype))[0].dtype == dtype


def pair(bias: bool = True, **options: object) -> tuple[nn.MultiheadAttention, MultiheadDilatedAttention]:
    dense = randomised(nn.MultiheadAttention(EMBED, HEADS, bias=bias, batch_first=True, dtype=torch.float64, **options))
    return dense, MultiheadDilatedAttention.from_torch(dense, DENSE)


def torch_gradients(module: nn.MultiheadAttention) -> Iterator[tuple[str, Tensor]]:
    for name, part in zip(("q_proj", "k_proj", "v_proj"), module.in_proj_weight.grad.chunk(3)):
        yield f"{name}.weight", part
    yield "out_proj.weight", module.out_proj.weight.grad
    if module.in_proj_bias is not None:
        for name, part in zip(("q_proj", "k_proj", "v_proj"), module.in_proj_bias.grad.chunk(3)):
            yield f"{name}.bias", part
        yield "out_proj.bias", module.out_proj.bias.grad


@pytest.mark.parametrize(
    ("bias", "mask", "is_causal", "self_attention"),
    [
        (False, "none", False, True),
        (True, "none", True, False),
        (True, "bool", False, True),
        (False, "bool", True, False),
        (True, "float", False, False),
        (False, "float", True, True),
    ],
)
def test_from_torch_with_dense_pattern_equals_torch(bias: bool, mask: str, is_causal: bool, self_attention: bool) -> None:
    dense, dilated = pair(bias)
    x = draw(BATCH, TOKENS, EMBED)
    y, z = (x, x) if self_attention else (draw(BATCH, TOKENS, EMBED), draw(BATCH, TOKENS, EMBED))
    inputs = [[t.clone().requires_grad_() for t in (x, y, z)] for _ in range(2)]
    padding = ragged_padding()
    if is_causal:
        padding[:, 0] = False  # torch gives NaN to a row without a key
    if mask == "float":
        padding = torch.zeros(BATCH, TOKENS, dtype=torch.float64).masked_fill(padding, -math.inf)
    padding = None if mask == "none" else padding
    # torch wants both masks of one type.
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1) if is_causal else None
    if is_causal and mask == "float":
        causal = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(causal, -math.inf)
    dout = draw(BATCH, TOKENS, EMBED)
    outs = []
    for module, given in zip((dense, dilated), inputs):
        out, weights = module(*given, padding, False, causal, True, is_causal)  # by place, in the order of torch
        assert weights is None
        out.backward(dout)
        outs.append(out)
    torch.testing.assert_close(outs[1], outs[0], **EXACT)
    for actual, expected in zip(inputs[1], inputs[0]):
        torch.testing.assert_close(actual.grad, expected.grad, **EXACT)
    gradients = {name: parameter.grad for name, parameter in dilated.named_parameters()}
    expected_gradients = dict(torch_gradients(dense))
    assert gradients.keys() == expected_gradients.keys()
    torch.testing.assert_close(gradients, expected_gradients, **EXACT)


def test_from_torch_keeps_mode_dropout_dtype_and_copies_weights() -> None:
    dense, dilated = pair(dropout=0.2)
    assert dilated.training
    assert dilated.attention.dropout_p == 0.2
    assert dilated.q_proj.weight.dtype == torch.float64
    assert isinstance(dilated.inner_attn_ln, nn.Identity)
    assert not MultiheadDilatedAttention.from_torch(dense.eval(), DENSE).training
    options = MultiheadDilatedAttention.from_torch(dense, PATTERN, dropout_p=0.0, is_causal=True, backend="reference")
    assert (options.attention.dropout_p, options.attention.is_causal) == (0.0, True)
    assert (options.attention.backend, options.attention.pattern) == ("reference", PATTERN)
    before = dilated.k_proj.weight.detach().clone()
    with torch.no_grad():
        dense.in_proj_weight.zero_()
    assert torch.equal(dilated.k_proj.weight, before)
    assert all(parameter.requires_grad for parameter in dilated.parameters())
    on_meta = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, device="meta")
    assert MultiheadDilatedAttention.from_torch(on_meta, DENSE).out_proj.weight.device.type == "meta"


REFUSED = [
    ({"batch_first": False}, "batch_first=True, got batch_first=False"),
    ({"kdim": 3}, "project from one width=10, got kdim=3, vdim=10"),
    ({"vdim": 7}, "project from one width=10, got kdim=10, vdim=7"),
    *(({name: True}, "not add keys of its own, got add_bias_kv or add_zero_attn") for name in ("add_bias_kv", "add_zero_attn")),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_from_torch_rejects_what_it_cannot_reproduce(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^module must (have )?{message}$"):
        MultiheadDilatedAttention.from_torch(nn.MultiheadAttention(EMBED, HEADS, **{"batch_first": True, **options}), DENSE)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_multihead_swapped_into_an_encoder_evaluates_padded_batches_unless_nested(nested: bool) -> None:
    # An even number of heads: the fused path refuses odd ones.
    dense = randomised(nn.TransformerEncoderLayer(12, 4, 17, dropout=0.0, activation="gelu", batch_first=True, dtype=torch.float64))
    encoder = nn.TransformerEncoder(dense, 2, enable_nested_tensor=nested).eval()
    x, mask = draw(BATCH, TOKENS, 12), torch.arange(TOKENS) >= torch.tensor([[TOKENS], [17], [19]])
    expected = nn.TransformerEncoder(dense, 2, enable_nested_tensor=False).eval()(x, src_key_padding_mask=mask)
    for layer in encoder.layers:
        layer.self_attn = MultiheadDilatedAttention.from_torch(layer.self_attn, DENSE)
    torch.testing.assert_close(encoder(x, src_key_padding_mask=mask)[~mask], expected[~mask], **EXACT)
    with torch.no_grad():
        if nested:  # the encoder decided at its construction to nest what it gives its layers
            with pytest.raises(NotImplementedError, match="query must be a dense tensor, got a nested one; build"):
                encoder(x, src_key_padding_mask=mask)
        else:
            torch.testing.assert_close(encoder(x, src_key_padding_mask=mask)[~mask], expected[~mask], **EXACT)


REJECTED: list[tuple[dict[str, object], type[Exception], str]] = [
    *(({"num_heads": n}, ValueError, f"num_heads must divide embed_dim=12, got {n}") for n in (0, -1, 5, 13)),
    *(({"num_kv_heads": n}, ValueError, f"num_kv_heads must divide num_heads=4, got {n}") for n in (0, -2, 3, 8)),
    *(({"gamma_init": gamma}, ValueError, f"gamma_init must be above 0, got {gamma}") for gamma in (0.0, -1.0, math.nan)),
    ({"num_heads": 2.0}, TypeError, "num_heads must be an integer, got 2.0"),
    ({"embed_dim": "8"}, TypeError, "embed_dim must be an integer, got '8'"),
    ({"num_kv_heads": True}, TypeError, "num_kv_heads must be an integer, got True"),
    ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
    ({"scale": "x"}, TypeError, "scale must be a number or None, got 'x'"),
    ({"scale": math.inf}, ValueError, "scale must be finite, got inf"),
    ({"dropout_p": "x"}, TypeError, "dropout_p must be a number, got 'x'"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p must be in [0, 1), got 1.0"),
    ({"pattern": ((7,), (1,))}, TypeError, "pattern must be a DilatedPattern, got tuple"),
    ({"exchange": "ring"}, ValueError, "exchange must come with mesh, got 'ring' and no mesh"),
    ({"mesh": "cp"}, TypeError, "mesh must be a DeviceMesh, got str"),
]


@pytest.mark.parametrize(("options", "error", "message"), REJECTED, ids=str)
def test_modules_reject_options_that_no_call_can_use(options: dict[str, object], error: type[Exception], message: str) -> None:
    sizes = {"embed_dim": 12, "num_heads": 4, "num_kv_heads": 2, "gamma_init": 1.0}
    if not options.keys() & sizes.keys():
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            DilatedAttention(**{"pattern": PATTERN, **options})
    if "scale" not in options:
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            MultiheadDilatedAttention(**{"pattern": PATTERN, **sizes, **options})


def test_multihead_accepts_heads_that_divide() -> None:
    for num_heads, kv_heads in ((1, 1), (2, 2), (4, 1), (4, 2), (4, 4), (12, 3)):
        module = MultiheadDilatedAttention(12, num_heads, PATTERN, num_kv_heads=kv_heads, gamma_init=1e-3)
        width = 12 // num_heads * kv_heads
        assert (module.q_proj.out_features, module.k_proj.out_features, module.v_proj.out_features) == (12, width, width)
    module = MultiheadDilatedAttention(np.int64(8), np.int32(4), PATTERN, num_kv_heads=np.int8(2))
    assert [type(size) for size in (module.embed_dim, module.num_heads, module.num_kv_heads, module.head_dim)] == [int] * 4


CALLS: list[tuple[dict[str, object], type[Exception], str]] = [
    (
        {"need_weights": True},
        NotImplementedError,
        "need_weights must be False, got True: dilated attention never forms its weights; flexdilated.attention_map computes",
    ),
    ({"attn_mask": torch.ones(TOKENS, TOKENS).triu(1) > 0}, NotImplementedError, "attn_mask must be None unless is_causal=True"),
    ({"shard_lengths": [TOKENS]}, ValueError, "shard_lengths must come with mesh, got [23] and no mesh"),
    *(
        ({name: torch.ones(shape)}, ValueError, f"{name} must have shape (B, N, 10) or (N, 10), got ({shape[0]},")
        for name in ("query", "key", "value")
        for shape in ((BATCH, TOKENS, EMBED + 1), (EMBED,), (1, BATCH, TOKENS, EMBED))
    ),
    *(
        ({name: torch.ones(BATCH, 9, EMBED)}, ValueError, f"{name} must have the shape of query=(3, 23, 10), got (3, 9, 10); ")
        for name in ("key", "value")
    ),
    *(
        (
            {"key_padding_mask": torch.zeros(BATCH, TOKENS).index_fill(1, torch.tensor(2), value)},
            ValueError,
            "key_padding_mask must be bool, or float with only 0 and -inf, got other values; ",
        )
        for value in (-1.0, math.nan)
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), CALLS, ids=[message[:40] for *_, message in CALLS])
def test_multihead_rejects_calls(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        multihead()(**{**dict.fromkeys(("query", "key", "value"), draw(BATCH, TOKENS, EMBED)), **options})


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks of a fake group, of which this process is number 1."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()


def test_modules_reject_meshes_and_exchanges_that_cannot_be_used(mesh: DeviceMesh) -> None:
    for build in (lambda **o: DilatedAttention(PATTERN, **o), multihead):
        with pytest.raises(ValueError, match=r"^mesh must hold this rank, got rank 1 and ranks \[0\]$"):
            build(mesh=DeviceMesh("cpu", [0]))
        with pytest.raises(
            ValueError, match=r"^mesh must be 1-D, got dims \('dp', 'cp'\) of sizes \(2, 1\); give one axis, as mesh\['cp'\]$"
        ):
            build(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp")))
        with pytest.raises(ValueError, match=r"^exchange must be one of \('auto', 'gather', 'ring', 'heads'\), got 'rings'$"):
            build(mesh=mesh, exchange="rings")
        for exchange in ("auto", "gather", "ring", "heads"):
            build(mesh=mesh, exchange=exchange)


def test_a_mesh_of_one_rank_is_the_plain_path(mesh: DeviceMesh) -> None:
    alone, x = DeviceMesh("cpu", [1]), draw(BATCH, TOKENS, EMBED)
    whole = multihead()
    module = multihead(mesh=alone, exchange="ring")
    module.load_state_dict(whole.state_dict())
    assert torch.equal(module(x, x, x, shard_lengths=[TOKENS])[0], whole(x, x, x)[0])
    assert module(x, x, x)[0].grad_fn is not None
