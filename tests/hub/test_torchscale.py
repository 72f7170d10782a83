import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flexdilated import DilatedPattern, reference
from flexdilated.hub.torchscale import TorchscaleAttention, replace_attention
from tests.tolerances import EXACT, GOLDEN

BATCH, HEADS, HEAD_DIM = 3, 5, 4
EMBED = HEADS * HEAD_DIM
GOLDEN_FILE = Path(__file__).parents[1] / "golden" / "torchscale.npz"


def options(**changes: Any) -> SimpleNamespace:
    """torchscale's `args`, as far as its attention reads them."""
    values = {"segment_length": [7, 13], "dilated_ratio": [1, 3], "flash_attention": True, "multiway": False}
    values |= {"layernorm_eps": 1e-5, "xpos_rel_pos": False, "xpos_scale_base": 512, "seq_parallel": False}
    return SimpleNamespace(**{**values, **changes})


class Multiway(nn.Module):
    """Two copies of a module: the first tokens go through A, those from `split_position` on through B."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.A, self.B = module, copy.deepcopy(module)
        self.B.reset_parameters()
        self.split_position = -1

    def forward(self, x: Tensor) -> Tensor:
        border = x.shape[1] if self.split_position == -1 else self.split_position
        return torch.cat([self.A(x[:, :border]), self.B(x[:, border:])], dim=1)


class Growth(nn.Module):
    """In the place of torchscale's xPos: queries grow with their position, and keys shrink."""

    def __init__(self, scale_base: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0 / scale_base))

    def forward(self, x: Tensor, offset: int = 0, downscale: bool = False) -> Tensor:
        growth = (1 + torch.arange(x.shape[1]) * self.scale)[:, None]
        return x / growth if downscale else x * growth


class PlainAttention(nn.Module):
    """The attributes of torchscale's attention, and ordinary softmax attention."""

    def __init__(
        self, args: SimpleNamespace, embed_dim: int, num_heads: int, *, is_cross: bool = False, subln: bool = True
    ) -> None:
        super().__init__()
        self.args, self.embed_dim, self.num_heads, self.head_dim = args, embed_dim, num_heads, embed_dim // num_heads
        self.scaling, self.dropout = self.head_dim**-0.5, 0.0
        self.self_attention, self.encoder_decoder_attention = not is_cross, is_cross
        wrap = Multiway if args.multiway else lambda module: module
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (wrap(nn.Linear(embed_dim, embed_dim)) for _ in range(4))
        self.inner_attn_ln = wrap(nn.LayerNorm(embed_dim, eps=args.layernorm_eps)) if subln else None
        self.dropout_module = nn.Dropout(0.0)
        self.xpos = Growth(args.xpos_scale_base) if args.xpos_rel_pos else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.scaling
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: dict[str, Any] | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        rel_pos: Tensor | None = None,
        is_first_step: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        projected = [projection(x) for projection, x in zip((self.q_proj, self.k_proj, self.v_proj), (query, key, value))]
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in projected)
        if self.xpos is not None:
            turned = [
                self.xpos(x.transpose(1, 2).flatten(0, 1), offset=0, downscale=x is k).unflatten(0, (-1, self.num_heads))
                for x in (q, k)
            ]
            q, k = (x.transpose(1, 2) for x in turned)
        out = self.attend(q, k, v, is_causal).flatten(2)
        return self.out_proj(out if self.inner_attn_ln is None else self.inner_attn_ln(out)), None


class Rows(PlainAttention):
    """Dilated as torchscale is, by the definition; golden files hold what torchscale gives."""

    def dense_to_sparse(self) -> None: ...

    def sparse_to_dense(self) -> None: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        pattern = DilatedPattern.torchscale(self.args.segment_length, self.args.dilated_ratio)
        return reference.dilated_attention(q, k, v, pattern, is_causal=is_causal)[0]


class DilatedAttention(PlainAttention):
    attend = Rows.attend


class Model(nn.Module):
    def __init__(self, args: SimpleNamespace, **changes: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"self_attn": Rows(args, EMBED, HEADS, **changes)}) for _ in range(2))
        self.cross = PlainAttention(args, EMBED, HEADS, is_cross=True, subln=False)
        self.again = self.layers[0]["self_attn"]

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        for module in (*(layer["self_attn"] for layer in self.layers), self.cross, self.again):
            x = x + module(query=x, key=x, value=x, **call)[0]
        return x


def build(args: SimpleNamespace | None = None, **changes: Any) -> Model:
    model = Model(options() if args is None else args, **changes).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def tokens(num_tokens: int = 23) -> Tensor:
    return torch.randn(BATCH, num_tokens, EMBED, dtype=torch.float64)


def gradients(model: Model, x: Tensor, **call: Any) -> tuple[Tensor, ...]:
    x = x.detach().clone().requires_grad_()
    out = model(x, **call)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), (x, *model.parameters()))


@pytest.mark.parametrize("name", ["pow2_noncausal", "ragged_noncausal", "ragged_causal", "heads_not_multiple", "rate_not_dividing"])
def test_stand_in_and_replacement_compute_what_torchscale_does(name: str) -> None:
    with np.load(GOLDEN_FILE) as golden:
        stored = {k: torch.from_numpy(golden[f"{name}/{k}"]).double() for k in (*"qkv", "out", "grad_out", "dq", "dk", "dv")}
        meta = json.loads(str(golden[f"{name}/meta"]))
    heads, head_dim = stored["q"].shape[2:]
    args = options(segment_length=meta["segment_lengths"], dilated_ratio=meta["dilation_rates"])
    model = nn.ModuleList([Rows(args, heads * head_dim, heads, subln=False)])
    for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(model[0], projection, nn.Identity())
    stand_in = model[0]
    assert replace_attention(model) == 1
    for module in (stand_in, model[0]):
        leaves = [stored[key].flatten(2).requires_grad_() for key in ("q", "k", "v")]
        out, weights = module(*leaves, is_causal=meta["is_causal"])
        assert weights is None
        grads = torch.autograd.grad(out, leaves, stored["grad_out"].flatten(2))
        for actual, key in zip((out, *grads), ("out", "dq", "dk", "dv")):
            torch.testing.assert_close(actual, stored[key].flatten(2), **GOLDEN)


@pytest.mark.parametrize(
    ("changes", "num_tokens", "is_causal"),
    [
        ({}, 1, True),
        ({"segment_length": [6, 24], "dilated_ratio": [1, 4]}, 26, False),
        ({"segment_length": "[7, 13]", "dilated_ratio": "[1, 3]"}, 26, True),
        ({"xpos_rel_pos": True, "xpos_scale_base": 7}, 6, False),
        ({"xpos_rel_pos": True, "xpos_scale_base": 7}, 23, True),
        ({"multiway": True}, 26, True),
    ],
)
def test_replacement_equals_torchscale_with_gradients(changes: dict[str, Any], num_tokens: int, is_causal: bool) -> None:
    args = options(**changes)
    original, x = build(options(**{**changes, "segment_length": [7, 13], "dilated_ratio": [1, 3]})), tokens(num_tokens)
    if changes.get("segment_length") == [6, 24]:
        original = build(args)
    model = copy.deepcopy(original)
    for module in model.modules():
        if isinstance(module, Rows):
            module.args = args
    for each in (original, model):
        each.apply(lambda module: setattr(module, "split_position", num_tokens // 2) if isinstance(module, Multiway) else None)
    assert replace_attention(model) == 2
    for actual, expected in zip(gradients(model, x, is_causal=is_causal), gradients(original, x, is_causal=is_causal)):
        torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize("changes", [{"subln": False}, {"subln": True}])
def test_replacement_keeps_the_parameters_their_names_and_their_order(changes: dict[str, Any]) -> None:
    model = build(options(xpos_rel_pos=True), **changes)
    before = dict(model.named_parameters(remove_duplicate=False))
    state, cross = model.state_dict(), model.cross
    model.layers[0].eval()
    replace_attention(model, backend="reference")
    assert (model.cross, model.again.backend) == (cross, "reference")
    assert isinstance(model.again, TorchscaleAttention)
    assert model.again is model.layers[0]["self_attn"]
    assert [layer["self_attn"].training for layer in model.layers] == [False, True]
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)


@pytest.mark.slow
def test_replacement_compiles_as_one_graph() -> None:
    model, x = build(options(xpos_rel_pos=True)).eval(), tokens()
    replace_attention(model)
    module = model.again
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x, x, x), module(x, x, x), **EXACT)


def test_padding_masks_are_ignored_as_in_torchscale_unless_asked_for() -> None:
    original, x = build(), tokens()
    mask = torch.zeros(BATCH, 23, dtype=torch.uint8)
    mask[1, 17:] = 1
    faithful, padded = copy.deepcopy(original), copy.deepcopy(original)
    replace_attention(faithful)
    replace_attention(padded, apply_padding_mask=True)
    expected = original(x, key_padding_mask=mask)
    torch.testing.assert_close(faithful(x, key_padding_mask=mask), expected, **EXACT)
    torch.testing.assert_close(padded(x, key_padding_mask=mask * 0), expected, **EXACT)
    attention, changed = padded.layers[0]["self_attn"], x.clone()
    changed[1, 17:] = 5.0
    outs = [attention(each, each, each, key_padding_mask=mask)[0][1, :17] for each in (x, changed)]
    torch.testing.assert_close(*outs, **EXACT)
    assert not torch.equal(*(attention(each, each, each)[0][1, :17] for each in (x, changed)))


@pytest.mark.parametrize("where", ["dropout", "dropout_module"])
def test_dropout_is_taken_over_and_active_in_training_only(where: str) -> None:
    model, x = build(), tokens()
    for module in model.modules():
        if isinstance(module, Rows):
            module.dropout_module.p = 0.5
            if where == "dropout":
                module.dropout = 0.25
            else:
                del module.dropout  # torchscale's first versions have none
    expected = copy.deepcopy(model)(x)
    replace_attention(model)
    attention = model.layers[0]["self_attn"]
    assert attention.dropout == (0.25 if where == "dropout" else 0.5)
    assert (model.train()(x) - expected).abs().max() > 0.01
    torch.testing.assert_close(model.eval()(x), expected, **EXACT)


@pytest.mark.parametrize("name", ["incremental_state", "attn_mask", "rel_pos", "query", "key", "value"])
def test_replacement_rejects_calls_that_dilated_attention_cannot_take(name: str) -> None:
    model, x = nn.Sequential(DilatedAttention(options(), EMBED, HEADS)).double(), tokens()
    assert replace_attention(model) == 1  # known by its name
    given = dict.fromkeys(("query", "key", "value"), x)
    if name in given:
        for wrong in (x[:, 1:], x[..., 1:], x[0])[name == "query" :]:
            with pytest.raises(ValueError, match=rf"^{name} must have shape \(B, N, 20\), the same for all three, got \("):
                model[0](**given | {name: wrong})
        return
    with pytest.raises(NotImplementedError, match=rf"^{name} must be None, got a"):
        model[0](**given, **{name: {} if name == "incremental_state" else torch.zeros(23, 23)})
    model[0](**given, is_first_step=True, **{name: None})


def test_replacement_rejects_a_model_without_dilated_attention() -> None:
    model = nn.Sequential(PlainAttention(options(), EMBED, HEADS), nn.MultiheadAttention(EMBED, HEADS))
    with pytest.raises(ValueError, match=r"^model must hold a DilatedAttention of torchscale, got none in Sequential$"):
        replace_attention(model)
    model = build()
    replace_attention(model)
    with pytest.raises(ValueError, match=r"^model must hold a DilatedAttention of torchscale, got none in Model$"):
        replace_attention(model)


def test_replacement_rejects_an_attention_itself_and_says_what_to_do() -> None:
    module, x = Rows(options(), EMBED, HEADS).double(), tokens()
    with pytest.raises(ValueError, match=r"^model must hold the .*, got one itself; use TorchscaleAttention\(module\)$"):
        replace_attention(module)
    torch.testing.assert_close(TorchscaleAttention(module)(x, x, x)[0], module(x, x, x)[0], **EXACT)


def change_args(**changes: Any) -> Callable[[nn.Module], None]:
    return lambda module: setattr(module, "args", options(**changes))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "cross": (lambda module: setattr(module, "self_attention", False), "module must be self-attention, got"),
    "decoder": (lambda module: setattr(module, "encoder_decoder_attention", True), "module must be self-attention, got"),
    "forward": (lambda module: setattr(module, "forward", print), "module must have no forward of its own, got some"),
    "hooks": (lambda module: module.register_forward_pre_hook(lambda *_: None), "module must have no hooks of its own, got some"),
    "rates": (change_args(dilated_ratio=[1, 17]), r"dilation_rates\[1\] must be in \[1, segment"),
    "lengths": (change_args(segment_length=[7.5, 13]), r"segment_lengths\[0\] must be an integer"),
    "none": (change_args(segment_length=None), "args.segment_length must be a list of integers, got None"),
    "sharded": (change_args(seq_parallel=True), "args.seq_parallel must be False, got True: it would read keys of other ranks"),
    "text": (change_args(segment_length="seven"), "args.segment_length must be a list of integers, got 'seven'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_replacement_rejects_a_module_by_its_path_and_changes_nothing(case: str) -> None:
    change, reason = REFUSED[case]
    model = build()
    change(model.layers[1]["self_attn"])
    before = dict(model.named_modules(remove_duplicate=False))
    with pytest.raises(ValueError, match=rf"^'layers.1.self_attn': {reason}"):
        replace_attention(model)
    after = dict(model.named_modules(remove_duplicate=False))
    assert all(before[path] is after[path] for path in before)
