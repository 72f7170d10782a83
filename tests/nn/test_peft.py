"""Adapters of the peft library: they train, change the output, merge, and come back from a file."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM, MultiheadDilatedAttention, convert
from flexdilated.slides.gigapath import LongNetViT
from tests.tolerances import EXACT

peft = pytest.importorskip("peft", reason="needs peft: nox -s tests_transformers")

BATCH, TOKENS, EMBED, VOCAB = 2, 23, 12, 31
PATTERN = DilatedPattern((7, 13), (1, 3))
ATTENTION = ["q_proj", "k_proj", "v_proj", "out_proj"]


def language_model(*, tie: bool) -> nn.Module:
    config = LongNetConfig(
        vocab_size=VOCAB, embed_dim=EMBED, num_layers=2, num_heads=6, num_kv_heads=3, pattern=PATTERN, tie_embeddings=tie
    )
    return LongNetLM(config).double()


def converted() -> nn.Module:
    inner = nn.TransformerEncoderLayer(EMBED, 2, 17, dropout=0.0, batch_first=True, dtype=torch.float64)
    return convert(nn.TransformerEncoder(inner, 2, enable_nested_tensor=False), PATTERN)


def tokens() -> Tensor:
    return torch.randint(VOCAB, (BATCH, TOKENS))


def rows() -> Tensor:
    return torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64)


def attention_layer() -> nn.Module:
    return Apart(MultiheadDilatedAttention(EMBED, 6, PATTERN, num_kv_heads=3, dtype=torch.float64))


class Apart(nn.Module):
    """Self-attention of one input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]


class Slides(nn.Module):
    """Prov-GigaPath's slide encoder, small, on tiles at fixed places; one row of class scores for each slide."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"in_chans": EMBED, "embed_dim": EMBED, "depth": 2, "num_heads": 3, "tile_size": 64, "slide_ngrids": 16}
        self.encoder = LongNetViT(**sizes, pattern=PATTERN, dropout=0.0, drop_path_rate=0.0, global_pool=True)

    def forward(self, x: Tensor) -> Tensor:
        places = 64 * torch.cartesian_prod(torch.arange(5), torch.arange(5))[:TOKENS]
        return self.encoder(x, places.expand(BATCH, -1, -1))[0][:, None].expand(-1, TOKENS, -1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], list[str]]] = {
    "own head": (lambda: language_model(tie=False), tokens, [*ATTENTION, "fc1", "embedding", "head"]),
    "tied head": (lambda: language_model(tie=True), tokens, [*ATTENTION, "fc2", "embedding"]),
    "converted": (converted, rows, [*ATTENTION, "linear1"]),
    "layer": (attention_layer, rows, ATTENTION),
    "slides": (lambda: Slides().double(), rows, [*ATTENTION, "fc1", "patch_embed.proj"]),
}


def train(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    target = torch.randint(VOCAB if x.dim() == 2 else EMBED, (BATCH * TOKENS,), generator=torch.Generator().manual_seed(3))
    for _ in range(4):
        F.cross_entropy(model(x).flatten(0, 1), target).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_low_rank_adapters_train_merge_and_load(name: str, use_dora: bool, tmp_path: Path) -> None:
    build, draw, places = MODELS[name]
    base, x = build(), draw()
    config = peft.LoraConfig(r=2, target_modules=places, use_dora=use_dora)
    model = peft.get_peft_model(copy.deepcopy(base), config).double()
    torch.testing.assert_close(model(x), base(x), **EXACT)  # adapters begin as zero
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    before = {path: p.detach().clone() for path, p in model.named_parameters()}
    train(model, x)
    for path, parameter in model.named_parameters():
        assert torch.equal(parameter, before[path]) == (id(parameter) not in trained), path
    model.eval()
    with torch.no_grad():
        expected = model(x)
        assert (expected - base.eval()(x)).abs().max() > 0.01
        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).double().eval()
        torch.testing.assert_close(loaded(x), expected, **EXACT)
        with model.disable_adapter():
            torch.testing.assert_close(model(x), base(x), **EXACT)
        merged = model.merge_and_unload()
        assert type(merged) is type(base)
        torch.testing.assert_close(merged(x), expected, **EXACT)
        assert merged.state_dict().keys() == base.state_dict().keys()


@pytest.mark.parametrize("tie", [False, True])
def test_generation_draws_from_the_adapted_model(tie: bool) -> None:
    x = tokens()
    config = peft.LoraConfig(r=2, target_modules=[*ATTENTION, "embedding"], init_lora_weights=False)
    model = peft.get_peft_model(language_model(tie=tie), config).double().eval()
    drawn = model.generate(x, max_new_tokens=3, temperature=0.0)
    for _ in range(3):
        x = torch.cat([x, model(x)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(drawn, x[:, TOKENS:])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_of_a_model_of_the_library_come_back_dilated_by_the_documented_route(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")
    from flexdilated.hub.transformers import set_pattern

    sizes = {"vocab_size": 97, "hidden_size": 24, "intermediate_size": 19, "num_hidden_layers": 1, "num_attention_heads": 3}
    pattern, x = DilatedPattern((8, 32), (1, 2)), torch.randint(97, (1, 71))
    load, options = transformers.AutoModelForCausalLM.from_pretrained, {"task_type": "CAUSAL_LM", "init_lora_weights": False}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "dense")
    config = set_pattern(transformers.AutoConfig.from_pretrained(tmp_path / "dense"), pattern)
    load(tmp_path / "dense", config=config).save_pretrained(tmp_path / "dilated")
    given = {"attn_implementation": "flexdilated"}
    model = peft.get_peft_model(load(str(tmp_path / "dilated"), **given), peft.LoraConfig(**options)).eval()
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", **given).eval()
    torch.testing.assert_close(loaded(x).logits, model(x).logits, rtol=0, atol=0)
    assert loaded.config._attn_implementation == "flexdilated"
