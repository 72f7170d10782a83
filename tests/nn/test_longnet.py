import copy
import dataclasses
import json
import math
import pickle
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM, reference
from flexdilated.nn import XPos, longnet
from tests.cases import randomised
from tests.tolerances import EXACT, SINGLE

VOCAB, EMBED, HEADS, TOKENS, BATCH = 29, 24, 4, 23, 3
NESTED = DilatedPattern((4, 8, 16), (1, 2, 4))
RAGGED = DilatedPattern((5, 13), (1, 3), offsets="interleaved")
GROUPED = DilatedPattern.grouped((5, 11), (1, 2))
POSITIONS = ("rotary", "xpos")


def config(**options: object) -> LongNetConfig:
    sizes = {"vocab_size": VOCAB, "embed_dim": EMBED, "num_layers": 2, "num_heads": HEADS, "ffn_dim": 31, "pattern": NESTED}
    return LongNetConfig(**{**sizes, **options})


def model(**options: object) -> LongNetLM:
    """In evaluation mode, with biases and gains that differ from zeros and ones."""
    result = LongNetLM(config(**options))
    return randomised(result, 0.1).eval()


def draw_tokens(batch: int = BATCH, num_tokens: int = TOKENS) -> Tensor:
    return torch.randint(VOCAB, (batch, num_tokens))


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*module.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, parameters)))


def exact_logits(lm: LongNetLM, tokens: Tensor) -> Tensor:
    """The formula in float64, its positions by complex numbers and its attention by the reference."""
    head_dim = EMBED // HEADS
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64)
    place = torch.arange(tokens.shape[1], dtype=torch.float64)[:, None, None]
    turn = torch.exp(1j * place * 10000.0 ** (-pairs / head_dim))
    # Counted from the middle, where the decay of both sides is smallest: only distances count.
    decay = ((pairs / head_dim + 0.4) / 1.4) ** ((place - tokens.shape[1] // 2) / 512.0)
    decay = decay if isinstance(lm.position, XPos) else torch.ones_like(decay)

    def turned(x: Tensor, factor: Tensor) -> Tensor:
        z = torch.complex(*x.chunk(2, dim=-1)) * turn * factor
        return torch.cat([z.real, z.imag], dim=-1)

    x = lm.embedding.weight[tokens]
    for layer in lm.layers:
        h, attention = layer.self_attn_layer_norm(x), layer.self_attn
        q, k, v = (p(h).unflatten(-1, (-1, head_dim)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        out, _ = reference.dilated_attention(turned(q, decay), turned(k, 1 / decay), v, lm.config.pattern, is_causal=True)
        x = x + attention.out_proj(attention.inner_attn_ln(out.flatten(2)))
        x = x + layer.ffn(layer.final_layer_norm(x))
    x = lm.layer_norm(x)
    return x @ (lm.embedding.weight if lm.head is None else lm.head.weight).T


@pytest.mark.parametrize(("position", "tied"), [("xpos", True), ("rotary", False)])
def test_longnet_in_float64_is_exact(position: str, tied: bool) -> None:
    lm = copy.deepcopy(model(position=position, num_kv_heads=2, tie_embeddings=tied).half().double())
    tokens = draw_tokens()
    assert lm.embedding.weight.dtype == torch.float64
    expected = exact_logits(lm, tokens)
    torch.testing.assert_close(lm(tokens), expected, **EXACT)
    caches = lm.make_caches(BATCH, max_length=TOKENS)
    with torch.no_grad():
        decoded = [lm(part, caches=caches) for part in tokens.split((5, 1, TOKENS - 6), dim=1)]
    torch.testing.assert_close(torch.cat(decoded, dim=1), expected, **EXACT)


@pytest.mark.parametrize("position", POSITIONS)
def test_longnet_in_other_dtypes_turns_in_float32(position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, tokens, tables = model(position=position), draw_tokens(), []
    kind = type(lm.position)
    monkeypatch.setattr(kind, "forward", lambda self, *a, f=kind.forward, **o: tables.append(f(self, *a, **o)) or tables[-1])
    lm(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        lm(tokens)
    lm.bfloat16()(tokens)
    lm.half()(tokens)
    assert [rotation.q_cos.dtype for rotation in tables] == [torch.float32] * 4
    assert all(torch.equal(rotation.k_sin, tables[0].k_sin) for rotation in tables)


@pytest.mark.parametrize(("pattern", "position"), [(NESTED, "xpos"), (RAGGED, "xpos"), (GROUPED, "rotary")], ids=str)
def test_longnet_takes_any_length_and_a_prefix_gives_the_same(pattern: DilatedPattern, position: str) -> None:
    lm = model(pattern=pattern, position=position)
    tokens = draw_tokens(num_tokens=37)
    logits = lm(tokens)
    for n in (1, 2, 3, 4, 5, 13, 16, 17, 31):
        torch.testing.assert_close(lm(tokens[:, :n]), logits[:, :n], **SINGLE)


@pytest.mark.parametrize("borders", [(0, 1, TOKENS), (0, 7, 7, 7, 18, TOKENS, TOKENS)], ids=str)
@pytest.mark.parametrize(("pattern", "position"), [(NESTED, "rotary"), (RAGGED, "xpos")], ids=str)
def test_longnet_packed_documents_equal_each_alone(borders: tuple[int, ...], position: str, pattern: DilatedPattern) -> None:
    lm = model(position=position, pattern=pattern)
    tokens = draw_tokens(batch=1)
    alone = torch.cat([lm(tokens[:, a:b]) for a, b in pairwise(borders) if a < b], dim=1)
    for dtype in (torch.int32, torch.int64):
        torch.testing.assert_close(lm(tokens, cu_seqlens=torch.tensor(borders, dtype=dtype)), alone, **SINGLE)


@pytest.mark.parametrize("position", POSITIONS)
def test_longnet_positions_begin_anew_in_every_document(position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The logits of rotary positions cannot show it: scores depend on distances, and documents do not see each other.
    lm = model(position=position)
    seen = []
    monkeypatch.setattr(lm.position, "forward", lambda p, **o: seen.append(p) or type(lm.position).forward(lm.position, p, **o))
    lm(draw_tokens(batch=1), cu_seqlens=torch.tensor([0, 7, 18, TOKENS]))
    lm(draw_tokens())
    assert torch.equal(seen[0], torch.tensor([*range(7), *range(11), *range(5)]))
    assert torch.equal(seen[1], torch.arange(TOKENS))
    assert len(seen) == 2


def test_longnet_padding_is_not_read() -> None:
    lm = model()
    tokens = draw_tokens()
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[0, :5], padding[1, 9:13], padding[2, 19:] = True, True, True
    other = torch.where(padding, (tokens + 1) % VOCAB, tokens)
    torch.testing.assert_close(
        lm(other, key_padding_mask=padding)[~padding], lm(tokens, key_padding_mask=padding)[~padding], **SINGLE
    )
    assert not torch.allclose(lm(other)[~padding], lm(tokens)[~padding])
    torch.testing.assert_close(lm(tokens[2:, :19]), lm(tokens, key_padding_mask=padding)[2:, :19], **SINGLE)


def test_longnet_initial_weights_have_the_gains_of_magneto() -> None:
    width, layers = 198, 3
    lm = LongNetLM(config(embed_dim=width, num_heads=9, num_layers=layers, ffn_dim=211))
    gamma = math.sqrt(math.log(2 * layers))
    for layer in lm.layers:
        attention = layer.self_attn
        gains = [(attention.q_proj, 1.0), (attention.k_proj, 1.0), (attention.v_proj, gamma), (attention.out_proj, gamma)]
        for projection, gain in [*gains, (layer.ffn.fc1, gamma), (layer.ffn.fc2, gamma)]:
            expected = gain * math.sqrt(2 / sum(projection.weight.shape))
            # At least 39,204 samples: the standard error is 0.4 %.
            assert projection.weight.std().item() == pytest.approx(expected, rel=0.02)
    assert lm.embedding.weight.std().item() == pytest.approx(width**-0.5, rel=0.04)


@pytest.mark.parametrize("name", ["dropout_p", "attention_dropout_p"])
def test_longnet_drops_in_training_only(name: str) -> None:
    lm = model(**{name: 0.4})
    plain = LongNetLM(config()).eval()
    plain.load_state_dict(lm.state_dict())
    tokens = draw_tokens()
    torch.testing.assert_close(lm(tokens), plain(tokens), **SINGLE)
    assert not torch.allclose(lm.train()(tokens), plain(tokens), atol=1e-3)


@pytest.mark.parametrize("autocast", [True, False])
def test_longnet_in_bfloat16_is_near_float32(autocast: bool) -> None:
    lm, tokens = model().bfloat16().float(), draw_tokens()
    expected = lm(tokens)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = (lm if autocast else lm.bfloat16())(tokens)
    assert logits.dtype == torch.bfloat16
    # Eight bits of mantissa, through two layers.
    torch.testing.assert_close(logits.float(), expected, atol=0.05 * expected.abs().max().item(), rtol=0.0)
    for name, grad in gradients(lm, logits.float().square().mean()).items():
        assert grad.dtype == (torch.float32 if autocast else torch.bfloat16), name
        assert grad.isfinite().all(), name
        assert grad.any() or name.endswith("k_proj.bias"), name


def test_longnet_copies_and_pickles() -> None:
    lm, tokens = model(), draw_tokens()
    logits = lm(tokens)
    for twin in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        assert twin.config == lm.config
        assert torch.equal(twin(tokens), logits)
        with torch.no_grad():
            twin.embedding.weight.zero_()
        assert torch.equal(lm(tokens), logits)


@pytest.mark.parametrize(("tied", "pattern"), [(False, GROUPED), (True, DilatedPattern((5,), (2,), detach_weights=True))], ids=str)
def test_save_pretrained_and_from_pretrained_round_trip(tied: bool, pattern: DilatedPattern, tmp_path: Path) -> None:
    lm = model(tie_embeddings=tied, pattern=pattern, position="rotary", num_kv_heads=2, dropout_p=0.1, backend="sdpa").train()
    folder = tmp_path / "made" / "anew"
    lm.save_pretrained(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    loaded = LongNetLM.from_pretrained(str(folder))
    assert loaded.config == lm.config
    assert loaded.layers[0].self_attn.attention.pattern == pattern
    assert not loaded.training
    assert loaded.state_dict().keys() == lm.state_dict().keys()
    for name, value in lm.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    tokens = draw_tokens()
    assert torch.equal(loaded(tokens), lm.eval()(tokens))
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_from_pretrained_keeps_the_saved_dtype_unless_another_is_given(tmp_path: Path) -> None:
    lm = model().double()
    lm.save_pretrained(tmp_path)
    loaded = LongNetLM.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float64}
    assert torch.equal(loaded.embedding.weight, lm.embedding.weight)
    narrow = LongNetLM.from_pretrained(tmp_path, device="cpu", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("where", ["weights", "config"])
def test_save_pretrained_that_fails_leaves_the_old_files_as_they_were(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = model()
    lm.save_pretrained(tmp_path)
    before = contents(tmp_path)
    break_saving(monkeypatch, where)
    with pytest.raises(OSError, match="no space left"):
        model(num_layers=1).save_pretrained(tmp_path)
    assert contents(tmp_path) == before
    tokens = draw_tokens()
    assert torch.equal(LongNetLM.from_pretrained(tmp_path)(tokens), lm(tokens))
    with pytest.raises(OSError, match="no space left"):
        lm.save_pretrained(tmp_path / "empty")
    assert not contents(tmp_path / "empty")


def break_saving(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Half of a file is written, then the disk is full."""

    def fail_weights(values: dict[str, Tensor], path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    def fail_config(path: Path, text: str) -> int:
        path.write_bytes(text[:7].encode())
        raise OSError("no space left")

    if where == "weights":
        monkeypatch.setattr(longnet, "save_file", fail_weights)
    else:
        monkeypatch.setattr(Path, "write_text", fail_config)


def changed_config(**changes: object) -> bytes:
    return json.dumps(config().to_dict() | changes).encode()


WRITTEN = r"^config\.json must hold what save_pretrained writes, got another in .*: "
# A file, and its new content, how many of its bytes are left, or None where it is gone.
DAMAGED: list[tuple[str, bytes | int | None, type[Exception], str]] = [
    *(
        (name, None, FileNotFoundError, f"^folder must hold config.json and model.safetensors, no {name} in ")
        for name in ("config.json", "model.safetensors")
    ),
    *(("config.json", content, ValueError, WRITTEN) for content in (b"3", b"{", b"", b'"\xff"', changed_config(pattern=None))),
    ("config.json", changed_config(depth=1), ValueError, WRITTEN + "configuration keys must include .* got .*'depth'"),
    ("config.json", changed_config(num_layers=3), RuntimeError, r"layers\.2\.self_attn\.q_proj\.weight"),
    *(("model.safetensors", kept, RuntimeError, r"^model\.safetensors must be whole, got another in ") for kept in (0, 99, -1)),
]


@pytest.mark.parametrize(("name", "content", "error", "message"), DAMAGED, ids=str)
def test_from_pretrained_names_what_is_damaged(
    name: str, content: bytes | int | None, error: type[Exception], message: str, tmp_path: Path
) -> None:
    model().save_pretrained(tmp_path)
    file = tmp_path / name
    whole = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else whole[:content])
    with pytest.raises(error, match=message):
        LongNetLM.from_pretrained(tmp_path)


def test_models_that_share_weights_are_saved(tmp_path: Path) -> None:
    lm, tokens = model(tie_embeddings=False), torch.randint(VOCAB, (BATCH, TOKENS))
    lm.layers[1], lm.head.weight = lm.layers[0], lm.embedding.weight
    lm.save_pretrained(tmp_path)
    torch.testing.assert_close(LongNetLM.from_pretrained(tmp_path)(tokens), lm(tokens), rtol=0, atol=0)


def test_config_goes_through_json_unchanged() -> None:
    rotary = {"num_kv_heads": 2, "ffn_dim": None, "position": "rotary", "tie_embeddings": False, "backend": "reference"}
    before = config(**rotary, pattern=DilatedPattern.torchscale((5, 7), (1, 2)), dropout_p=np.float32(0.25))
    after = LongNetConfig.from_dict(json.loads(json.dumps(before.to_dict())))
    assert after == before
    assert hash(after) == hash(before)
    assert isinstance(after.pattern, DilatedPattern)
    assert set(before.to_dict()) == {f.name for f in dataclasses.fields(LongNetConfig)}


def test_config_from_dict_accepts_defaults_and_rejects_missing_or_unknown_keys() -> None:
    values = {"vocab_size": 7, "embed_dim": 4, "num_layers": 1, "num_heads": 2, "pattern": NESTED.to_dict()}
    assert LongNetConfig.from_dict(values) == LongNetConfig(vocab_size=7, embed_dim=4, num_layers=1, num_heads=2, pattern=NESTED)
    for name in values:
        with pytest.raises(ValueError, match=r"^configuration keys must include \[.*\] and lie in \[.*\], got \[") as caught:
            LongNetConfig.from_dict({key: value for key, value in values.items() if key != name})
        assert f"'{name}'" not in str(caught.value).partition(", got ")[2]
    with pytest.raises(ValueError, match=r"got \[.*'rope'.*\]$"):
        LongNetConfig.from_dict(values | {"rope": True})


SIZES = ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")
PROBABILITIES = ("dropout_p", "attention_dropout_p")
REJECTED: list[tuple[dict[str, object], type[Exception], str]] = [
    *(({name: x}, ValueError, f"{name} must be an integer of at least 1, got {x!r}") for name in SIZES for x in (0, 24.0, True)),
    *(({name: x}, TypeError, f"{name} must be a number, got {x!r}") for name in PROBABILITIES for x in ("0.1", False, None)),
    *(({name: x}, ValueError, f"{name} must be in [0, 1), got {x}") for name in PROBABILITIES for x in (1.0, -0.1, math.nan)),
    *(({"num_kv_heads": heads}, ValueError, f"num_kv_heads must divide num_heads=4, got {heads}") for heads in (3, 8)),
    *(({"position": x}, ValueError, f"position must be 'xpos' or 'rotary', got {x!r}") for x in ("absolute", None)),
    *(({"scale_base": x}, ValueError, f"scale_base must be above 0, got {x}") for x in (0.0, -1.0, math.nan)),
    ({"scale_base": "x"}, TypeError, "scale_base must be a number, got 'x'"),
    ({"embed_dim": 12}, ValueError, "embed_dim must be a multiple of 2 * num_heads=8, got 12"),
    ({"embed_dim": 21, "num_heads": 3}, ValueError, "embed_dim must be a multiple of 2 * num_heads=6, got 21"),
    ({"tie_embeddings": "no"}, TypeError, "tie_embeddings must be a bool, got 'no'"),
    ({"pattern": NESTED.to_dict()}, TypeError, "pattern must be a DilatedPattern, got dict"),
]


@pytest.mark.parametrize(("options", "error", "message"), REJECTED, ids=str)
def test_config_rejects_values_out_of_range(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        config(**options)


def test_config_accepts_values_at_the_boundaries() -> None:
    for options in ({"dropout_p": 0.99}, {"attention_dropout_p": 0.0}, *({"num_kv_heads": heads} for heads in (1, 2, 4, None))):
        config(**options)
    lm = LongNetLM(config(vocab_size=1, embed_dim=2, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=1))
    assert lm(torch.zeros(1, 1, dtype=torch.long)).shape == (1, 1, 1)
    assert LongNetLM(config(ffn_dim=None)).layers[1].ffn.fc1.weight.shape == (4 * EMBED, EMBED)


def test_segments_of_any_length_have_a_scale_base() -> None:
    """The default's decay over a segment of 131,072 tokens leaves float32."""
    long: dict[str, object] = {"pattern": DilatedPattern((131072,), (64,)), "num_layers": 1}
    tokens = torch.zeros(1, 131072, dtype=torch.int64)
    with torch.no_grad():
        with pytest.raises(
            ValueError, match=r"^scale_base must be at least 1027 where segments reach over 131072 tokens, got 512.0$"
        ):
            LongNetLM(config(**long))(tokens)
        model = LongNetLM(config(**long, scale_base=1027.0))
        assert model(tokens).isfinite().all()
    assert LongNetConfig.from_dict(model.config.to_dict()) == model.config


REFUSED: list[tuple[tuple[int, ...], tuple[int, ...] | None, str]] = [
    *((shape, None, f"tokens must have shape (B, N), got {shape}") for shape in ((TOKENS,), (1, BATCH, TOKENS))),
    ((2, 0), None, "tokens must have N of at least 1, got (2, 0)"),
    ((BATCH, TOKENS), (0, 7, TOKENS), "cu_seqlens must come with q of batch size 1, got batch size 3"),
    *(
        ((1, TOKENS), borders, f"cu_seqlens must rise from 0 to the number of tokens={TOKENS}, got [")
        for borders in ((0, 7), (1, TOKENS), (0, 11, 7, TOKENS))
    ),
]


@pytest.mark.parametrize(("shape", "borders", "message"), REFUSED, ids=str)
def test_longnet_rejects_tokens_and_borders(shape: tuple[int, ...], borders: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        model()(torch.zeros(shape, dtype=torch.int64), cu_seqlens=None if borders is None else torch.tensor(borders))
    assert model()(draw_tokens(0, 3)).shape == (0, 3, VOCAB)
