"""Every module inside a model is called: hooks, parametrizations, pruning, adapters and quantization act, compiled or not."""

import copy
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize, prune

from flexdilated import DilatedPattern, LongNet, LongNetConfig, LongNetLM, MultiheadDilatedAttention, convert, reference
from flexdilated.compat import RingMultiheadDilatedAttention
from flexdilated.hub.encoder import LongNetEncoder
from flexdilated.slides.gigapath import LongNetViT
from tests.cases import randomised
from tests.tolerances import EXACT

BATCH, TOKENS, HEADS, EMBED = 2, 23, 6, 12
PATTERN = DilatedPattern((7, 13), (1, 3))
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch._dynamo.reset()  # every test compiles modules of the same classes


def layer(kv_heads: int = 3, dtype: torch.dtype = torch.float64) -> MultiheadDilatedAttention:
    module = MultiheadDilatedAttention(EMBED, HEADS, PATTERN, num_kv_heads=kv_heads, is_causal=True, dtype=dtype)
    return randomised(module)


def called(module: MultiheadDilatedAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The layer's formula, its modules called one by one around the reference."""
    head_dim = EMBED // HEADS
    q, k, v = (
        p(x).unflatten(-1, (-1, head_dim)) for p, x in zip((module.q_proj, module.k_proj, module.v_proj), (query, key, value))
    )
    out, _ = reference.dilated_attention(q, k, v, PATTERN, is_causal=True)
    return module.out_proj(module.inner_attn_ln(out.flatten(2).to(q.dtype)))


def first(output: object) -> Tensor:
    return first(output[0]) if isinstance(output, (tuple, list)) else output


def uneven(output: object) -> object:
    """Another number for each element, so that no LayerNorm takes the change away."""
    if isinstance(output, tuple):
        return (uneven(output[0]), *output[1:])
    return output * torch.linspace(0.2, 2.0, output.shape[-1], dtype=output.dtype)


class Adapter(nn.Module):
    """A wrapper without a weight, as low-rank adapters are."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Uneven(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return uneven(weight)


class Counted(nn.Parameter):
    """A parameter that rewrites the product it takes part in, as quantized tensors do."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with torch._C.DisableTorchFunctionSubclass():
            out = function(*args, **(kwargs or {}))
        return uneven(out) if function is F.linear else out


def hook(owner: nn.Module, name: str) -> None:
    owner.get_submodule(name).register_forward_hook(lambda module, inputs, output: uneven(output))


def pre_hook(owner: nn.Module, name: str) -> None:
    owner.get_submodule(name).register_forward_pre_hook(lambda module, inputs: (uneven(inputs[0]),))


def weight_norm(owner: nn.Module, name: str) -> None:
    module = parametrizations.weight_norm(owner.get_submodule(name))
    with torch.no_grad():
        module.parametrizations.weight.original0.mul_(1.7)


def uneven_weight(owner: nn.Module, name: str) -> None:
    parametrize.register_parametrization(owner.get_submodule(name), "weight", Uneven())


def pruned(owner: nn.Module, name: str) -> None:
    prune.l1_unstructured(owner.get_submodule(name), "weight", amount=0.5)


def adapter(owner: nn.Module, name: str) -> None:
    setattr(owner, name, Adapter(owner.get_submodule(name)))


def tensor_subclass(owner: nn.Module, name: str) -> None:
    module = owner.get_submodule(name)
    module.weight = Counted(module.weight.detach().clone())


CHANGES: dict[str, Callable[[nn.Module, str], None]] = {
    change.__name__: change for change in (hook, pre_hook, weight_norm, uneven_weight, pruned, adapter, tensor_subclass)
}


@given(
    changes=st.dictionaries(st.sampled_from(PROJECTIONS), st.sampled_from(sorted(CHANGES)), min_size=1),
    kv_heads=st.sampled_from((1, 3, 6)),
    self_attention=st.booleans(),
)
@settings(max_examples=25)
def test_changes_of_projections_act_and_are_trained(changes: dict[str, str], kv_heads: int, self_attention: bool) -> None:
    torch.manual_seed(2307)
    plain = layer(kv_heads)
    module = copy.deepcopy(plain)
    for name, change in changes.items():
        CHANGES[change](module, name)
    x = torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64, requires_grad=True)
    inputs = (x, x, x) if self_attention else (x, x.flip(0), x.flip(1))
    actual, expected = module(*inputs)[0], called(module, *inputs)
    torch.testing.assert_close(actual, expected, **EXACT)
    assert (actual - plain(*inputs)[0]).abs().max() > 1e-4
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
    dout = torch.randn_like(actual)
    torch.testing.assert_close(torch.autograd.grad(actual, leaves, dout), torch.autograd.grad(expected, leaves, dout), **EXACT)


@pytest.mark.parametrize("change", ["weight_norm", pytest.param("adapter", marks=pytest.mark.slow)])
def test_changes_after_compilation_compile_again(change: str) -> None:
    module = layer()
    x = torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    before = compiled(x, x, x)[0]
    CHANGES[change](module, "q_proj")
    after = compiled(x, x, x)[0]
    torch.testing.assert_close(after, called(module, x, x, x), **EXACT)
    assert (after - before).abs().max() > 1e-4


def language_model(**options: object) -> LongNetLM:
    sizes = {"vocab_size": 31, "embed_dim": EMBED, "num_layers": 2, "num_heads": 3, "pattern": PATTERN}
    return LongNetLM(LongNetConfig(**{**sizes, **options}))


def converted() -> nn.Module:
    inner = nn.TransformerEncoderLayer(EMBED, 2, 17, dropout=0.0, batch_first=True)
    return convert(nn.TransformerEncoder(inner, 2, enable_nested_tensor=False), PATTERN)


def tokens() -> Tensor:
    return torch.randint(31, (BATCH, TOKENS))


def rows() -> Tensor:
    return torch.randn(BATCH, TOKENS, EMBED)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "language model": (language_model, lambda: (tokens(),)),
    "own head, rotary": (lambda: language_model(tie_embeddings=False, position="rotary"), lambda: (tokens(),)),
    "encoder and decoder": (
        lambda: LongNet(EMBED, 3, 1, 2, 17, PATTERN),
        lambda: (rows(), rows()),
    ),
    "torchscale's encoder": (lambda: LongNetEncoder(EMBED, 2, 3, PATTERN), lambda: (rows(),)),
    "slide encoder": (
        lambda: LongNetViT(in_chans=5, embed_dim=EMBED, depth=2, num_heads=3, slide_ngrids=29, dropout=0.0, drop_path_rate=0.0),
        lambda: (torch.randn(1, TOKENS, 5), torch.randint(29 * 256, (1, TOKENS, 2))),
    ),
    "converted": (converted, lambda: (rows(),)),
    "ring layer": (
        lambda: RingMultiheadDilatedAttention(EMBED, 3, PATTERN.segment_lengths, PATTERN.dilation_rates),
        lambda: (rows(),),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_module_of_a_model_is_called(name: str) -> None:
    build, draw = MODELS[name]
    model, seen = build().eval(), set()
    if name == "slide encoder":
        model.global_pool = False
    for path, module in model.named_modules():
        module.register_forward_hook(lambda m, inputs, output, path=path: seen.add(path))
    for grad in (True, False):
        seen.clear()
        with torch.set_grad_enabled(grad):
            model(*draw())
        lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
        assert {path for path, _ in model.named_modules()} - seen - lists == set()


@given(data=st.data(), name=st.sampled_from(sorted(MODELS)))
@settings(max_examples=20)
def test_a_hook_on_any_module_changes_the_output(data: st.DataObject, name: str) -> None:
    build, draw = MODELS[name]
    torch.manual_seed(2307)
    model, inputs = build().eval(), draw()
    randomised(model)
    before = first(model(*inputs))
    places = [path for path, module in model.named_modules() if path and not isinstance(module, nn.ModuleList)]
    places = [path for path in places if not path.endswith("position")]  # gives no tensor
    place = data.draw(st.sampled_from(places))
    model.get_submodule(place).register_forward_hook(lambda m, i, output: uneven(output))
    hooked = first(model(*inputs))
    assert (hooked - before).abs().max() > 1e-4


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")  # as every nn.Linear does
def test_weights_that_are_sharded_by_their_module_are_gathered() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        lm, x, x64 = language_model().eval(), tokens(), torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64)
        for plain, names, inputs in ((layer(), (*PROJECTIONS, "inner_attn_ln"), (x64, x64, x64)), (lm, ("embedding",), (x,))):
            model = copy.deepcopy(plain)
            for name in names:
                fully_shard(model.get_submodule(name), reshard_after_forward=True)
            actual, expected = first(model(*inputs)), first(plain(*inputs))
            torch.testing.assert_close(actual, expected, **EXACT)
            actual.square().sum().backward()
            expected.square().sum().backward()
            for name in names:
                grad = model.get_submodule(name).weight.grad.full_tensor()
                torch.testing.assert_close(grad, plain.get_submodule(name).weight.grad, **EXACT)
        assert torch.equal(*(each.generate(x, max_new_tokens=5, temperature=0.0) for each in (model, lm)))
    finally:
        dist.destroy_process_group()
