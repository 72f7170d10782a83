import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexdilated import DilatedPattern, MultiheadDilatedAttention, convert
from tests.cases import randomised
from tests.tolerances import EXACT

BATCH, TOKENS, HEADS, EMBED = 3, 23, 5, 10
DENSE = DilatedPattern((TOKENS,), (1,))
PATTERN = DilatedPattern((7, 13), (1, 3))


def draw() -> Tensor:
    return torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64)


def attention(**options: object) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(EMBED, HEADS, **{"batch_first": True, "dtype": torch.float64, **options})
    return randomised(module, 0.5)


def encoder(**options: object) -> nn.TransformerEncoder:
    # Two heads: torch's fused path and its nested tensors want an even number.
    layer = nn.TransformerEncoderLayer(EMBED, 2, 17, batch_first=True, dtype=torch.float64, **options)
    return nn.TransformerEncoder(layer, 2)


def padding() -> Tensor:
    return torch.arange(TOKENS) >= torch.tensor([[TOKENS], [17], [19]])


class Model(nn.Module):
    """Attention in a list, in a dictionary, and one module at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([attention(), attention()])
        self.named = nn.ModuleDict({"last": attention(bias=False)})
        self.again = self.layers[0]

    def forward(self, x: Tensor) -> Tensor:
        for module in (*self.layers, self.named["last"], self.again):
            x = x + module(x, x, x)[0]
        return x


def test_convert_replaces_everything_and_changes_nothing_under_a_dense_pattern() -> None:
    model, x = Model(), draw()
    expected, names = model(x), [name for name, _ in model.named_children()]
    assert convert(model, DENSE) is model
    assert not any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    assert [name for name, _ in model.named_children()] == names
    assert model.again is model.layers[0]
    torch.testing.assert_close(model(x), expected, **EXACT)


def test_convert_applies_the_pattern_and_the_options() -> None:
    model, x = Model(), draw()
    layer = copy.deepcopy(model.layers[1])
    convert(model, PATTERN, dropout_p=0.25, is_causal=True, backend="sdpa")
    converted = model.layers[1]
    assert (converted.attention.dropout_p, converted.attention.backend) == (0.25, "sdpa")
    expected = MultiheadDilatedAttention.from_torch(layer, PATTERN, is_causal=True)(x, x, x)[0]
    torch.testing.assert_close(converted.eval()(x, x, x)[0], expected, **EXACT)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # torch's own encoder makes some
def test_converted_transformer_encoder_equals_torch_s(is_training: bool, norm_first: bool, padded: bool) -> None:
    model, x = encoder(dropout=0.0, norm_first=norm_first).train(is_training), draw()
    options = {"src_key_padding_mask": padding()} if padded else {}
    if norm_first and not padded:  # a causal mask, which torch's fused path takes too
        options = {"mask": nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64), "is_causal": True}
    visible = ~padding() if padded else torch.ones(BATCH, TOKENS, dtype=torch.bool)
    converted = convert(copy.deepcopy(model), DENSE)
    assert not converted.use_nested_tensor
    for context in (torch.no_grad(), torch.enable_grad()):  # without gradients torch takes its fused path
        with context:
            torch.testing.assert_close(converted(x, **options)[visible], model(x, **options)[visible], **EXACT)


def test_convert_keeps_gradients_mode_and_frozen_weights() -> None:
    model = Model()
    model.layers[0].in_proj_weight.requires_grad_(False)
    model.layers[1].out_proj.requires_grad_(False)
    model.layers[1].in_proj_bias.requires_grad_(False)
    model.layers[1].eval()
    convert(model, DENSE)
    first, second = model.layers
    frozen = [name for name, parameter in first.named_parameters() if not parameter.requires_grad]
    assert frozen == ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    frozen = [name for name, parameter in second.named_parameters() if not parameter.requires_grad]
    assert sorted(frozen) == ["k_proj.bias", "out_proj.bias", "out_proj.weight", "q_proj.bias", "v_proj.bias"]
    assert (first.training, second.training, second.attention.training) == (True, False, False)


def test_convert_leaves_what_is_skipped() -> None:
    model = nn.TransformerDecoderLayer(EMBED, HEADS, 17, dropout=0.0, batch_first=True, dtype=torch.float64).eval()
    x, memory = draw(), draw()[:, :11]
    expected, cross = model(x, memory), model.multihead_attn
    convert(model, DENSE, skip=["multihead_attn"])
    assert model.multihead_attn is cross
    assert isinstance(model.self_attn, MultiheadDilatedAttention)
    torch.testing.assert_close(model(x, memory), expected, **EXACT)


class OwnForward(nn.MultiheadAttention):
    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        return super().forward(*args, **kwargs)[0] * 2, None


class OwnCall(nn.MultiheadAttention):
    def __call__(self, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        return super().__call__(*args, **kwargs)[0] * 2, None


def changed(change: Callable[[nn.MultiheadAttention], object], **options: object) -> nn.MultiheadAttention:
    module = attention(**options)
    change(module)
    return module


def projecting(is_biased: bool, **options: object) -> nn.MultiheadAttention:
    """With an out_proj of its own."""
    out_proj = nn.Linear(EMBED, **{"out_features": EMBED, "dtype": torch.float64, **options})
    return changed(lambda module: setattr(module, "out_proj", out_proj), bias=is_biased)


def quantizable() -> nn.MultiheadAttention:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = pytest.importorskip("torch.ao.nn.quantizable", reason="torch has left quantization to torchao")
    return quantized.MultiheadAttention(EMBED, HEADS, batch_first=True)


class Adapted(nn.Linear):
    """As adapters wrap the output projection."""


class Packed(nn.Parameter):
    """As quantized and sharded weights are."""


UNLIKE = "must have an out_proj like its in_proj, of "
OWN_HOOKS = "must have no hooks of its own, got some; take that away"
REFUSED: dict[str, tuple[Callable[[], nn.MultiheadAttention], str]] = {
    "wrapped forward": (  # as accelerate's hooks wrap the forward of one module
        lambda: changed(lambda module: setattr(module, "forward", lambda *args: module(*args))),
        "must have no forward of its own, got some",
    ),
    "own call": (lambda: OwnCall(EMBED, HEADS, batch_first=True), "must have no forward of its own, got some"),
    "bias of one": (lambda: projecting(False), UNLIKE + r"shape \(10, 10\) in float64 on cpu without bias, got .* with bias"),
    "other dtype": (lambda: projecting(True, dtype=torch.float32), UNLIKE + r".*, got .* in float32"),
    "state dict hooks": (lambda: changed(lambda module: module.register_state_dict_post_hook(lambda *_: None)), OWN_HOOKS),
    "adapter": (
        lambda: changed(lambda module: setattr(module, "out_proj", Adapted(EMBED, EMBED))),
        r"must have a plain out_proj, got \S*\.Adapted; convert before adapters or quantization are added",
    ),
    "weights": (
        lambda: changed(lambda module: setattr(module, "in_proj_weight", Packed(module.in_proj_weight.detach()))),
        "must have plain weights, got a Packed; convert before they are sharded or quantized",
    ),
    "quantizable": (quantizable, r"must have the forward of nn.MultiheadAttention, got that of torch\.ao\.nn\.quantizable\S+"),
    "keys of another width": (lambda: attention(kdim=7, vdim=11), "must project from one width=10, got kdim=7, vdim=11"),
    "own forward": (
        lambda: OwnForward(EMBED, HEADS, batch_first=True),
        r"must have the forward of nn.MultiheadAttention, got that of \S*\.OwnForward",
    ),
    "parametrization": (
        lambda: changed(lambda module: nn.utils.parametrizations.weight_norm(module.out_proj)),
        "must have no parametrized weights of its own, got some; take that away",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_convert_rejects_a_layer_by_its_path_and_changes_nothing(case: str) -> None:
    make, reason = REFUSED[case]
    model = Model()
    model.blocks = nn.Sequential(nn.ModuleDict({"attn": make()}))
    before = dict(model.named_modules(remove_duplicate=False))
    with pytest.raises(ValueError, match=rf"^'blocks.0.attn': module {reason}.*; name its path in skip to leave it as it is$"):
        convert(model, PATTERN)
    after = dict(model.named_modules(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(before[path] is after[path] for path in before)
    convert(model, PATTERN, skip={"blocks.0.attn"})
    assert model.blocks[0]["attn"] is before["blocks.0.attn"]
    assert isinstance(model.layers[1], MultiheadDilatedAttention)


@pytest.mark.parametrize("is_inner", [False, True])
def test_convert_rejects_what_has_taken_the_parameters_already(is_inner: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Model())
        model, where = (nn.Sequential(wrapped), "'0'") if is_inner else (wrapped, "the model itself")
        with pytest.raises(ValueError, match=rf"^{where}: must be no DistributedDataParallel, got one; convert the model before"):
            convert(model, PATTERN)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["in_proj_weight", "out_proj.bias"])
def test_convert_rejects_weights_tied_between_layers(name: str) -> None:
    model = Model()
    owner, _, leaf = name.rpartition(".")
    shared = model.layers[0].get_parameter(name)
    setattr(model.layers[1].get_submodule(owner), leaf, shared)
    holder = f"layers.1.{owner}" if owner else "layers.1"
    with pytest.raises(ValueError, match=rf"^'layers.0': module must not share weights, got weights that \['{holder}'\] hold too"):
        convert(model, PATTERN)


class OtherAttention(nn.Module):
    """What convert knows nothing of."""


def test_convert_leaves_what_it_does_not_know_and_accepts_a_subclass_with_torch_s_forward() -> None:
    same = type("SameForward", (nn.MultiheadAttention,), {})(EMBED, HEADS, batch_first=True)
    model = convert(nn.Sequential(OtherAttention(), same), PATTERN)
    assert [type(module) for module in model] == [OtherAttention, MultiheadDilatedAttention]


def others() -> nn.Module:
    return nn.Sequential(*(nn.ModuleDict({"attn": OtherAttention()}) for _ in range(5)))


def one(**options: object) -> nn.Module:
    return convert(nn.Sequential(attention()), PATTERN, **options)


def torch_s(kind: Callable[..., nn.Module] = nn.TransformerEncoderLayer, **options: object) -> nn.Module:
    return kind(EMBED, 2, batch_first=True, **options)


NONE = (
    r"^model must hold an nn.MultiheadAttention, or timm's Attention, AttentionRope, EvaAttention, RelPosAttention or BEiT's, "
    r"not skipped, got none%s; where a model calls scaled_dot_product_attention itself, call flexdilated.dilated_attention in its "
    "place$"
)
SEEN = r", ".join(rf"'{i}.attn' of \S+\.OtherAttention" for i in range(3))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: convert(nn.Linear(2, 3), PATTERN), ValueError, NONE % ""),
        (lambda: one(skip=["0"]), ValueError, NONE % ""),
        (lambda: convert(others(), PATTERN), ValueError, NONE % rf" but {SEEN}, \.\.\."),
        (lambda: one(skip=["1"]), ValueError, r"^skip must hold paths of attention layers, \['0'\], got '1'$"),
        (
            lambda: convert(attention(batch_first=False), PATTERN),
            ValueError,
            r"^the model itself: module must have batch_first=",
        ),
        (
            lambda: convert(torch_s(nn.Transformer, num_encoder_layers=1, num_decoder_layers=1), PATTERN),
            ValueError,
            r"^'decoder.layers.0.multihead_attn': module must be self-attention, got the cross-attention",
        ),
        (
            lambda: convert(convert(torch_s(), PATTERN), PATTERN),
            ValueError,
            r"^model must hold attention that is not dilated yet",
        ),
        (lambda: convert(3, PATTERN), TypeError, r"^model must be an nn.Module, got int$"),
        (lambda: convert(Model(), (7, 13)), TypeError, r"^pattern must be a DilatedPattern, got tuple$"),
        (lambda: one(skip="again"), TypeError, r"^skip must be a collection of paths, got the string 'again'$"),
        (lambda: convert(Model(), PATTERN, dropout_p=1.0), ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
    ],
)
def test_convert_rejects(call: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
