"""Vision transformers of timm and torchvision under dilated attention: `nox -s tests_timm` installs both."""

import copy
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from flexdilated import DilatedPattern, MultiheadDilatedAttention, convert, reference
from flexdilated.hub.timm import TimmAttention
from flexdilated.ordering import grid_order
from tests.tolerances import EXACT

pytest.importorskip("docs.vision", reason="needs torchvision: nox -s tests_timm", exc_type=ImportError)
timm = pytest.importorskip("timm", reason="needs timm: nox -s tests_timm")

import torchvision  # noqa: E402
from timm.layers import Attention, AttentionRope, RelPosBias, RelPosMlp  # noqa: E402
from timm.models import beit  # noqa: E402
from timm.models._manipulate import reinit_non_persistent_buffers  # noqa: E402
from timm.models.eva import EvaAttention  # noqa: E402
from timm.models.vision_transformer_relpos import RelPosAttention, VisionTransformerRelPos  # noqa: E402

BATCH, TOKENS, DIM, HEADS = 2, 23, 24, 3
DENSE = DilatedPattern((4096,), (1,))
PATTERN = DilatedPattern((7, 13), (1, 3))
Norm = nn.LayerNorm
WINDOW = (2, 11)  # of which one token more has the place of a class token
TABLES = {cls: partial(cls, window_size=WINDOW, prefix_tokens=1) for cls in (RelPosBias, RelPosMlp)}


def rows() -> Tensor:
    return torch.randn(BATCH, TOKENS, DIM, dtype=torch.float64)


def randomize(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return module.double()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Attention(DIM, HEADS),
    "bias": lambda: Attention(DIM, HEADS, qkv_bias=True, proj_bias=False),
    "norms": lambda: Attention(DIM, HEADS, qkv_bias=True, qk_norm=True, scale_norm=True, norm_layer=Norm),
    "gate": lambda: Attention(DIM, HEADS, gated=True),
    "narrow": lambda: Attention(DIM, HEADS, attn_head_dim=5, dim_out=11),
    "rope": lambda: AttentionRope(DIM, HEADS, num_prefix_tokens=2, qk_norm=True, norm_layer=Norm),
    "rope, half": lambda: AttentionRope(DIM, HEADS, rotate_half=True, gated=True),
    "rope, grouped": lambda: AttentionRope(DIM, 6, num_kv_heads=2, qkv_fused=False),
    "eva": lambda: EvaAttention(DIM, HEADS, norm_layer=Norm),
    "eva, separate bias": lambda: EvaAttention(DIM, HEADS, qkv_bias_separate=True, scale_norm=False, num_prefix_tokens=4),
    "eva, three projections": lambda: EvaAttention(DIM, HEADS, qkv_fused=False, qk_norm=True, gated=True, norm_layer=Norm),
    "eva, no bias": lambda: EvaAttention(DIM, HEADS, qkv_bias=False, rotate_half=True, norm_layer=Norm),
    "relative, table": lambda: RelPosAttention(DIM, HEADS, rel_pos_cls=TABLES[RelPosBias]),
    "relative, network": lambda: RelPosAttention(DIM, HEADS, qk_norm=True, rel_pos_cls=TABLES[RelPosMlp]),
    "relative, shared": lambda: RelPosAttention(DIM, HEADS, qkv_bias=True),
    "beit": lambda: beit.Attention(DIM, HEADS, qkv_bias=True, window_size=WINDOW),
    "beit, shared": lambda: beit.Attention(DIM, HEADS),
}


def options_of(module: nn.Module) -> dict[str, Any]:
    if isinstance(module, Attention):
        return {}
    if isinstance(module, RelPosAttention):
        return {} if module.rel_pos else {"shared_rel_pos": torch.randn(1, HEADS, TOKENS, TOKENS, dtype=torch.float64)}
    if isinstance(module, beit.Attention):
        return {"shared_rel_pos_bias": torch.randn(HEADS, TOKENS, TOKENS, dtype=torch.float64)}
    width = DIM // module.num_heads
    return {"rope": torch.randn(TOKENS - module.num_prefix_tokens, 2 * width, dtype=torch.float64)}


@pytest.mark.parametrize(("is_fused", "is_causal"), [(True, False), (False, True)])
@pytest.mark.parametrize("name", MODULES)
def test_dense_pattern_equals_timm_with_gradients(name: str, is_fused: bool, is_causal: bool) -> None:
    module = randomize(MODULES[name]())
    module.fused_attn = is_fused
    if not is_fused:
        module.scale *= 0.7  # acts there only
    x, options = rows().requires_grad_(), options_of(module)
    if "is_causal" in inspect.signature(module.forward).parameters:
        options["is_causal"] = is_causal
    module.eval()  # the network of relative positions has a dropout of its own
    leaves = [x, *module.parameters(), *(each.requires_grad_() for name, each in options.items() if name.startswith("shared"))]
    expected = module(x, **options)
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, dout)
    dilated = TimmAttention(module, DENSE)
    assert [name for name, _ in dilated.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert dilated.state_dict().keys() == module.state_dict().keys()
    actual = dilated(x, **options)
    torch.testing.assert_close(actual, expected, **EXACT)
    torch.testing.assert_close(torch.autograd.grad(actual, leaves, dout), gradients, **EXACT)


SIZES = {"img_size": 20, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
SHAPE = (3, 20, 20)
OTHER_NAMES = {"image_size": 20, "patch_size": 4, "num_layers": 2, "num_heads": 3, "hidden_dim": 24, "mlp_dim": 37}
ViT, Eva = timm.models.VisionTransformer, timm.models.Eva
MODELS: dict[str, Callable[[], nn.Module]] = {
    "vit": partial(ViT, reg_tokens=2, class_token=True, **SIZES),
    "vit, pooled by its mean": partial(ViT, class_token=False, global_pool="avg", qk_norm=True, **SIZES),
    "eva": partial(Eva, use_rot_pos_emb=True, **SIZES),
    "rope": partial(Eva, use_rot_pos_emb=True, attn_type="rope", num_reg_tokens=4, **SIZES),
    "relative": partial(VisionTransformerRelPos, rel_pos_type="bias", class_token=True, **SIZES),
    "relative, shared": partial(VisionTransformerRelPos, shared_rel_pos=True, **SIZES),
    "beit": partial(beit.Beit, use_rel_pos_bias=True, use_shared_rel_pos_bias=True, **SIZES),
    "torchvision": partial(torchvision.models.VisionTransformer, **OTHER_NAMES),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_converted_model_equals_the_model_under_a_dense_pattern(name: str) -> None:
    model = randomize(MODELS[name]()).eval()
    x = torch.randn(BATCH, *SHAPE, dtype=torch.float64)
    dense, dilated, expected = convert(copy.deepcopy(model), DENSE), convert(copy.deepcopy(model), PATTERN), model(x)
    kind = MultiheadDilatedAttention if name == "torchvision" else TimmAttention
    assert sum(isinstance(module, kind) for module in dense.modules()) == 2
    torch.testing.assert_close(dense(x), expected, **EXACT)
    assert (dilated(x) - expected).abs().max() > 1e-6


def test_converted_model_keeps_its_optimizer_hooks_names_and_mode() -> None:
    model = randomize(MODELS["vit"]())
    model.blocks[1].attn.eval()
    names, seen = list(model.state_dict()), []
    model.blocks[0].attn.qkv.register_forward_hook(lambda *_: seen.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model, PATTERN, dropout_p=0.0)
    assert list(model.state_dict()) == names
    assert (model.blocks[0].attn.training, model.blocks[1].attn.training) == (True, False)
    before = model.blocks[1].attn.qkv.weight.detach().clone()
    model(torch.randn(BATCH, 3, 20, 20, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    assert seen == [1]
    assert not torch.equal(model.blocks[1].attn.qkv.weight, before)


@pytest.mark.parametrize("name", ["eva", "relative", "beit"])
def test_converted_model_compiles(name: str) -> None:
    model = convert(randomize(MODELS[name]()).eval(), PATTERN)
    x = torch.randn(BATCH, 3, 20, 20, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x), **EXACT)


def test_dropout_and_causality_are_those_that_are_asked_for() -> None:
    module, x = randomize(Attention(DIM, HEADS, attn_drop=0.5)), rows()
    dilated = TimmAttention(module, PATTERN)
    assert not torch.equal(dilated(x), dilated(x))
    assert torch.equal(dilated.eval()(x), TimmAttention(module, PATTERN, dropout_p=0.0).train()(x))
    causal = TimmAttention(module, PATTERN, is_causal=True).eval()
    assert torch.equal(causal(x), dilated(x, is_causal=True))
    assert torch.equal(causal(x), dilated(x, None, True))


@pytest.mark.parametrize("name", ["vit", "rope", "relative"])
def test_order_counts_patches_along_the_curve_and_leaves_the_tokens_before_them(name: str) -> None:
    model, images = randomize(MODELS[name]()).eval(), torch.randn(BATCH, *SHAPE, dtype=torch.float64)
    order, start = grid_order((5, 5)), model.num_prefix_tokens
    assert start == {"vit": 3, "rope": 5, "relative": 1}[name]
    dense = convert(copy.deepcopy(model), DENSE, order=order)
    torch.testing.assert_close(dense(images), model(images), **EXACT)
    ordered, plain = convert(copy.deepcopy(model), PATTERN, order=order), convert(copy.deepcopy(model), PATTERN)
    assert ordered.state_dict().keys() == model.state_dict().keys()
    places = [*range(start), *(start + place for place in order.permutation.tolist())]

    def along(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, **options: Any) -> Tensor:
        """The formula, by the list of places."""
        curve = [torch.stack([x[:, place] for place in places], dim=1) for x in (q, k, v)]
        table, score_mod = torch.tensor(places), options["score_mod"]
        back = score_mod and (lambda score, b, h, q_idx, kv_idx: score_mod(score, b, h, table[q_idx], table[kv_idx]))
        out, _ = reference.dilated_attention(*curve, pattern, scale=options["scale"], score_mod=back)
        return torch.stack([out[:, places.index(token)] for token in range(len(places))], dim=1)

    actual = ordered(images)
    with mock.patch("flexdilated.hub.timm.dilated_attention", along):
        torch.testing.assert_close(actual, plain(images), **EXACT)
    assert (actual - plain(images)).abs().max() > 1e-6


class Renamed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_convert_rejects_a_module_by_its_path() -> None:
    model = nn.Sequential(Renamed(DIM, HEADS), Attention(DIM, HEADS))
    message = r"module must have the forward of timm's attention, got that of \S*\.Renamed"
    with pytest.raises(ValueError, match=rf"^'0': {message}.*; name its path in skip to leave it as it is$"):
        convert(model, PATTERN)
    assert isinstance(model[1], Attention)
    assert isinstance(convert(model, PATTERN, skip=["0"])[1], TimmAttention)


def test_convert_rejects_other_attention_of_timm_by_its_path() -> None:
    model = timm.models.VisionTransformer(img_size=20, patch_size=4, embed_dim=24, depth=1, num_heads=3, global_pool="map")
    with pytest.raises(
        ValueError,
        match=r"^'attn_pool': module must be an nn.MultiheadAttention, or .*, got timm\.layers\.\S+\.AttentionPoolLatent; "
        r"name its path in skip to leave it as it is$",
    ):
        convert(model, PATTERN)
    assert isinstance(convert(model, PATTERN, skip=["attn_pool"]).blocks[0].attn, TimmAttention)


def test_convert_rejects_a_mesh() -> None:
    model = nn.Sequential(Attention(DIM, HEADS))
    with pytest.raises(NotImplementedError, match=r"^mesh must be None where '0' is a timm\.\S+\.Attention, got one: its"):
        convert(model, PATTERN, mesh="a mesh")
    assert isinstance(model[0], Attention)


def test_convert_rejects_orders_that_no_layer_can_follow() -> None:
    model = MODELS["torchvision"]()
    with pytest.raises(NotImplementedError, match=r"^order must be None where '\S+' is an nn.MultiheadAttention, got an order;"):
        convert(model, PATTERN, order=grid_order((5, 5)))
    assert not any(isinstance(module, MultiheadDilatedAttention) for module in model.modules())
    module = Attention(DIM, HEADS)
    with pytest.raises(TypeError, match=r"^order must be an Order of flexdilated.ordering, got str$"):
        convert(nn.Sequential(module), PATTERN, order="hilbert")
    with pytest.raises(ValueError, match=r"^order_start must be at least 0, got -1$"):
        TimmAttention(module, PATTERN, order=grid_order((4, 5)), order_start=-1)
    ordered = TimmAttention(module, PATTERN, order=grid_order((4, 5)), order_start=2)
    with pytest.raises(ValueError, match=r"^x must hold the 22 tokens of the order, got 23$"):
        ordered(rows().float())


RESIZED: dict[str, Callable[..., nn.Module]] = {
    "vit": partial(ViT, **SIZES),
    "eva": MODELS["eva"],
    "beit, own tables": partial(beit.Beit, use_rel_pos_bias=True, **SIZES),
    "beit, shared table": partial(beit.Beit, use_shared_rel_pos_bias=True, **SIZES),
    "relpos, own tables": partial(VisionTransformerRelPos, rel_pos_type="bias", **SIZES),
    "relpos, shared table": partial(VisionTransformerRelPos, rel_pos_type="bias", shared_rel_pos=True, **SIZES),
}


@pytest.mark.parametrize("name", RESIZED)
def test_converted_model_is_filled_by_timm_after_the_meta_device(name: str) -> None:
    whole = randomize(RESIZED[name]()).eval()
    x = torch.randn(2, 3, 20, 20, dtype=torch.float64)
    with torch.device("meta"):
        model = RESIZED[name]()
    tokens = (20 // 4) ** 2

    model = convert(model, DENSE, order=grid_order((5, 5))).to_empty(device="cpu").double().eval()
    with torch.no_grad():
        for buffer in model.buffers():  # what memory that nobody has written to may hold
            buffer.fill_(tokens - 1 if buffer.dtype == torch.int64 else 1e3)
    model.load_state_dict(whole.state_dict())
    reinit_non_persistent_buffers(model)
    torch.testing.assert_close(model(x), whole(x), **EXACT)


@pytest.mark.filterwarnings("ignore::UserWarning:timm")  # of its own interpolation
@pytest.mark.parametrize("name", RESIZED)
def test_converted_model_is_resized_by_timm(name: str) -> None:
    whole = randomize(RESIZED[name]()).eval()
    model = convert(copy.deepcopy(whole), DENSE)
    x = torch.randn(2, 3, 28, 24, dtype=torch.float64)
    for each in (whole, model):
        each.set_input_size((28, 24))
    torch.testing.assert_close(model(x), whole(x), **EXACT)
    assert model.state_dict().keys() == whole.state_dict().keys()
    for each in (whole, model):  # timm's initial values, drawn alike
        torch.manual_seed(2)
        each.init_weights() if name != "eva" else each.fix_init_weight()
    for (key, a), b in zip(whole.state_dict().items(), model.state_dict().values()):
        assert torch.equal(a, b), key


def test_tokens_must_be_those_of_the_table() -> None:
    module = TimmAttention(randomize(MODULES["beit"]()), PATTERN)
    with pytest.raises(ValueError, match=r"^x must hold the 23 tokens of the table of relative positions, got 22$"):
        module(rows()[:, 1:])


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_convert_names_windowed_attention_that_it_does_not_know(package: str) -> None:
    sizes = {"embed_dim": 24, "depths": [1, 1], "num_heads": [2, 2]}
    if package == "timm":
        model = timm.models.SwinTransformer(img_size=32, window_size=4, **sizes)
    else:
        model = torchvision.models.SwinTransformer(patch_size=[4, 4], window_size=[4, 4], **sizes)
    with pytest.raises(ValueError, match=r"^model must hold an nn.MultiheadAttention, or .*, got none but '\S+' of"):
        convert(model, PATTERN)


@pytest.mark.parametrize("kind", ["bool", "added", "keys alone"])
def test_padded_tokens_change_nothing(kind: str) -> None:
    """Under a pattern, the tokens before the padding give what they give without it."""
    real, module = 17, TimmAttention(randomize(Attention(DIM, HEADS)), PATTERN)
    x = rows()
    valid = (torch.arange(TOKENS) < real).expand(BATCH, -1)
    seen = valid[:, None, None, :] if kind == "keys alone" else (valid[:, :, None] & valid[:, None, :])[:, None]
    mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = module(x[:, :real])
    x[:, real:] = 1e3
    torch.testing.assert_close(module(x, attn_mask=mask)[:, :real], expected, **EXACT)


@pytest.mark.parametrize("keys_alone", [False, True])
def test_naflex_with_padded_patches_equals_timm(keys_alone: bool) -> None:
    options = {"pos_embed": "learned", "use_key_only_attn_mask": keys_alone}
    model = timm.models.naflexvit.NaFlexVit(
        timm.models.naflexvit.NaFlexVitCfg(patch_size=4, embed_dim=DIM, depth=2, num_heads=HEADS, **options), num_classes=5
    )
    randomize(model).eval()
    lengths, grid = (20, 12), (4, 5)
    places = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).expand(2, -1, -1)
    batch = {
        "patches": torch.randn(2, 20, 4 * 4 * 3, dtype=torch.float64),
        "patch_coord": places,
        "patch_valid": torch.arange(20) < torch.tensor(lengths)[:, None],
    }
    expected = model(batch)
    dilated = copy.deepcopy(model)
    convert(dilated, DENSE, skip=["attn_pool"])
    assert sum(isinstance(module, TimmAttention) for module in dilated.modules()) == 2
    torch.testing.assert_close(dilated(batch), expected, **EXACT)
    batch["patches"][1, lengths[1] :] = 7.0
    torch.testing.assert_close(dilated(batch), expected, **EXACT)


def test_module_rejects_masks_and_unknown_arguments() -> None:
    module, x = TimmAttention(randomize(Attention(DIM, HEADS)), PATTERN), rows()
    seen = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)
    bias = torch.zeros(BATCH, 1, 1, TOKENS)
    bias[0, 0, 0, 3] = -0.5
    blind = seen.clone()
    blind[1, 0, 4] = False  # a query without keys whose own key is seen
    for mask, found in ((seen[0, 0], "shape (23, 23)"), *((other, "another mask") for other in (seen.tril(), bias, blind))):
        message = rf"^attn_mask must hide padded tokens alone, .* got {re.escape(found)}; the pattern says what is seen$"
        with pytest.raises(NotImplementedError, match=message):
            module(x, attn_mask=mask)
    with pytest.raises(TypeError, match="rope"):
        module(x, rope=None)
    with (
        mock.patch.object(Attention, "forward", lambda self, x: x),
        pytest.raises(NotImplementedError, match=r"^Attention must call F.scaled_dot_product_attention once, got 0 calls; use"),
    ):
        module(x)
    with pytest.raises(ValueError, match=r"^dropout_p must be in \[0, 1\), got 1.0$"):
        TimmAttention(Attention(DIM, HEADS), PATTERN, dropout_p=1.0)
