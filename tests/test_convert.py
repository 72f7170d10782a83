import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexdilated import DilatedPattern, MultiheadDilatedAttention, convert
from tests.tolerances import EXACT

BATCH, TOKENS, HEADS, EMBED = 3, 23, 5, 10
DENSE = DilatedPattern((TOKENS,), (1,))
PATTERN = DilatedPattern((7, 13), (1, 3))


def draw() -> Tensor:
    return torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64)


def attention(**options: object) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(EMBED, HEADS, **{"batch_first": True, "dtype": torch.float64, **options})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return module


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
    torch.testing.assert_close(model(x), expected, **EXACT)


def test_convert_keeps_shared_modules_shared() -> None:
    model = convert(Model(), PATTERN)
    assert model.again is model.layers[0]
    assert sum(isinstance(module, MultiheadDilatedAttention) for module in model.modules()) == 3


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
    visible = ~padding() if padded else torch.ones(BATCH, TOKENS, dtype=torch.bool)
    converted = convert(copy.deepcopy(model), DENSE)
    assert not converted.use_nested_tensor
    for context in (torch.no_grad(), torch.enable_grad()):  # without gradients torch takes its fused path
        with context:
            torch.testing.assert_close(converted(x, **options)[visible], model(x, **options)[visible], **EXACT)


class Lora(nn.Module):
    """An adapter that shows no weight of what it wraps."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.more = base, nn.Linear(base.in_features, base.out_features, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.more(x)


@pytest.mark.parametrize("is_training", [False, True])
def test_converted_transformer_encoder_takes_adapters_in_evaluation_too(is_training: bool) -> None:
    model, x = convert(encoder(dropout=0.0), DENSE).train(is_training), draw()
    plain = copy.deepcopy(model)
    for layer, other in zip(model.layers, plain.layers):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            projection, adapter = getattr(other.self_attn, name), Lora(getattr(layer.self_attn, name))
            setattr(layer.self_attn, name, adapter)
            with torch.no_grad():
                for parameter, more in zip((projection.weight, projection.bias), adapter.more.parameters()):
                    parameter += more
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            torch.testing.assert_close(model(x), plain(x), **EXACT)
            torch.testing.assert_close(model(x, src_key_padding_mask=padding()), plain(x, src_key_padding_mask=padding()), **EXACT)


def test_converted_transformer_encoder_is_causal_under_a_causal_mask() -> None:
    model, x = encoder(dropout=0.0).eval(), draw()
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64)
    expected = model(x, mask=mask, is_causal=True)
    torch.testing.assert_close(convert(model, DENSE)(x, mask=mask, is_causal=True), expected, **EXACT)


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


class SameForward(nn.MultiheadAttention):
    pass


def hooked() -> nn.MultiheadAttention:
    module = attention()
    module.register_forward_hook(lambda *_: None)
    return module


def parametrized() -> nn.MultiheadAttention:
    module = attention()
    nn.utils.parametrizations.weight_norm(module.out_proj)
    return module


def watched() -> nn.MultiheadAttention:
    module = attention()
    module.register_state_dict_post_hook(lambda *_: None)
    return module


class Adapted(nn.Linear):
    """As adapters wrap the output projection."""


def adapted() -> nn.MultiheadAttention:
    module = attention()
    module.out_proj = Adapted(EMBED, EMBED)
    return module


class Packed(nn.Parameter):
    """As quantized and sharded weights are."""


def packed() -> nn.MultiheadAttention:
    module = attention()
    module.in_proj_weight = Packed(module.in_proj_weight.detach())
    return module


def quantizable() -> nn.MultiheadAttention:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = pytest.importorskip("torch.ao.nn.quantizable", reason="torch has left quantization to torchao")
    return quantized.MultiheadAttention(EMBED, HEADS, batch_first=True)


class OwnCall(nn.MultiheadAttention):
    def __call__(self, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        return super().__call__(*args, **kwargs)[0] * 2, None


def wrapped() -> nn.MultiheadAttention:
    """As accelerate's hooks wrap the forward of one module."""
    module = attention()
    forward = module.forward
    module.forward = lambda *args, **kwargs: (forward(*args, **kwargs)[0] * 3, None)
    return module


def projected(**options: object) -> nn.MultiheadAttention:
    module = attention(bias=False) if "bias" not in options else attention()
    module.out_proj = nn.Linear(EMBED, **{"out_features": EMBED, "dtype": torch.float64, **options})
    return module


REFUSED = {
    "wrapped forward": (wrapped, "must have no forward of its own, got some"),
    "own call": (lambda: OwnCall(EMBED, HEADS, batch_first=True), "must have no forward of its own, got some"),
    "bias of one": (
        projected,
        r"must have an out_proj like its in_proj, of shape \(10, 10\) in float64 on cpu without bias, got .* with bias",
    ),
    "bias of the other": (
        lambda: projected(bias=False),
        r"must have an out_proj like its in_proj, of .* with bias, got .* without bias",
    ),
    "narrow": (
        lambda: projected(bias=True, out_features=1),
        r"must have an out_proj like its in_proj, of .*, got shape \(1, 10\) in float64",
    ),
    "other dtype": (
        lambda: projected(bias=True, dtype=torch.float32),
        r"must have an out_proj like its in_proj, of .*, got .* in float32",
    ),
    "state dict hooks": (watched, "must have no hooks of its own, got some; take that away"),
    "adapter": (adapted, r"must have a plain out_proj, got \S*\.Adapted; convert before adapters or quantization are added"),
    "weights": (packed, "must have plain weights, got a Packed; convert before they are sharded or quantized"),
    "quantizable": (quantizable, r"must have the forward of nn.MultiheadAttention, got that of torch\.ao\.nn\.quantizable\S+"),
    "keys of another width": (lambda: attention(kdim=7, vdim=11), "must project from one width=10, got kdim=7, vdim=11"),
    "own forward": (
        lambda: OwnForward(EMBED, HEADS, batch_first=True),
        r"must have the forward of nn.MultiheadAttention, got that of \S*\.OwnForward",
    ),
    "hooks": (hooked, "must have no hooks of its own, got some; take that away"),
    "parametrization": (parametrized, "must have no parametrized weights of its own, got some; take that away"),
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


def test_convert_accepts_a_subclass_with_torch_s_forward() -> None:
    model = nn.Sequential(SameForward(EMBED, HEADS, batch_first=True))
    assert isinstance(convert(model, PATTERN)[0], MultiheadDilatedAttention)


def test_convert_rejects_the_cross_attention_of_a_decoder_layer() -> None:
    model = nn.Transformer(EMBED, 2, 1, 1, 17, batch_first=True)
    with pytest.raises(
        ValueError, match=r"^'decoder.layers.0.multihead_attn': module must be self-attention, got the cross-attention"
    ):
        convert(model, PATTERN)
    assert isinstance(model.encoder.layers[0].self_attn, nn.MultiheadAttention)


@pytest.mark.parametrize("name", ["in_proj_weight", "out_proj.bias"])
def test_convert_rejects_weights_tied_between_layers(name: str) -> None:
    model = Model()
    owner, _, leaf = name.rpartition(".")
    shared = model.layers[0].get_parameter(name)
    setattr(model.layers[1].get_submodule(owner), leaf, shared)
    holder = f"layers.1.{owner}" if owner else "layers.1"
    with pytest.raises(ValueError, match=rf"^'layers.0': module must not share weights, got weights that \['{holder}'\] hold too"):
        convert(model, PATTERN)


def test_convert_rejects_a_model_itself_by_saying_so() -> None:
    with pytest.raises(ValueError, match=r"^the model itself: module must have batch_first=True, got batch_first=False"):
        convert(attention(batch_first=False), PATTERN)


LOOKED_FOR = r"an nn.MultiheadAttention, or timm's Attention, AttentionRope, EvaAttention, RelPosAttention or BEiT's,"
REMEDY = "where a model calls scaled_dot_product_attention itself, call flexdilated.dilated_attention in its place"


class OtherAttention(nn.Module):
    """What convert knows nothing of."""


def test_convert_rejects_models_without_attention_and_unknown_paths() -> None:
    with pytest.raises(ValueError, match=rf"^model must hold {LOOKED_FOR} not skipped, got none; {REMEDY}$"):
        convert(nn.Linear(2, 3), PATTERN)
    with pytest.raises(ValueError, match=rf"^model must hold {LOOKED_FOR} not skipped, got none; {REMEDY}$"):
        convert(nn.Sequential(attention()), PATTERN, skip=["0"])
    with pytest.raises(ValueError, match=r"^skip must hold paths of attention layers, \['0'\], got '1'$"):
        convert(nn.Sequential(attention()), PATTERN, skip=["1"])


def test_convert_names_what_looks_like_attention_and_is_not_known() -> None:
    model = nn.Sequential(*(nn.ModuleDict({"attn": OtherAttention()}) for _ in range(5)))
    seen = r", ".join(rf"'{i}.attn' of \S+\.OtherAttention" for i in range(3))
    with pytest.raises(ValueError, match=rf"^model must hold {LOOKED_FOR} not skipped, got none but {seen}, \.\.\.; {REMEDY}$"):
        convert(model, PATTERN)
    model.append(attention())
    convert(model, PATTERN)  # what is not torch's or timm's is left
    assert isinstance(model[5], MultiheadDilatedAttention)


def test_convert_rejects_arguments_of_another_type() -> None:
    with pytest.raises(TypeError, match=r"^model must be an nn.Module, got int$"):
        convert(3, PATTERN)
    with pytest.raises(TypeError, match=r"^pattern must be a DilatedPattern, got tuple$"):
        convert(Model(), (7, 13))
    with pytest.raises(TypeError, match=r"^skip must be a collection of paths, got the string 'again'$"):
        convert(Model(), PATTERN, skip="again")
    with pytest.raises(ValueError, match=r"dropout_p must be in \[0, 1\), got 1.0"):
        convert(Model(), PATTERN, dropout_p=1.0)


def test_a_converted_model_is_not_converted_again() -> None:
    model = convert(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3), PATTERN)
    with pytest.raises(
        ValueError, match=r"^model must hold attention that is not dilated yet, got 'layers.0.self_attn': it is already"
    ):
        convert(model, PATTERN)
