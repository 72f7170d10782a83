"""Drawing tokens, generation by the model, and the command."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from typer.testing import CliRunner

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM
from flexdilated.cli import app
from flexdilated.generate import Sampler
from flexdilated.nn.position import XPos
from tests.tolerances import SINGLE

NESTED = DilatedPattern((4, 8), (1, 2))
RAGGED = DilatedPattern((5, 7), (1, 2), offsets="interleaved")
GROUPED = DilatedPattern((3, 6), (1, 2), heads="grouped")
TOKENS, VOCAB = 29, 17
LOGITS = torch.tensor([[0.0, 3.0, 2.0, 1.0], [1.0, -2.0, 1.5, 0.5]])


def model(**options: object) -> LongNetLM:
    torch.manual_seed(5)
    defaults = {"vocab_size": VOCAB, "embed_dim": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "pattern": NESTED}
    return LongNetLM(LongNetConfig(**(defaults | options))).eval()


def draw_tokens(batch: int = 3, tokens: int = TOKENS) -> Tensor:
    return torch.randint(VOCAB, (batch, tokens))


def frequencies(sampler: Sampler, draws: int = 4000) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    tokens = sampler.draw(LOGITS[:1].expand(draws, -1), generator=generator)
    return torch.bincount(tokens, minlength=4) / draws


# -- drawing ------------------------------------------------------------------------------------------------------------------


def test_probabilities_are_those_of_the_scaled_logits() -> None:
    torch.testing.assert_close(Sampler(temperature=0.5).probabilities(LOGITS), torch.softmax(LOGITS * 2, -1), **SINGLE)


def test_top_k_keeps_the_k_likeliest() -> None:
    expected = torch.softmax(torch.tensor([[-math.inf, 3.0, 2.0, -math.inf], [1.0, -math.inf, 1.5, -math.inf]]), -1)
    torch.testing.assert_close(Sampler(top_k=2).probabilities(LOGITS), expected, **SINGLE)
    torch.testing.assert_close(Sampler(top_k=9).probabilities(LOGITS), torch.softmax(LOGITS, -1), **SINGLE)


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    weights = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    for top_p, kept in ((0.01, [1]), (0.49, [1]), (0.51, [1, 3]), (0.74, [1, 3]), (0.76, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
        expected = torch.zeros(1, 4)
        expected[0, kept] = weights[0, kept] / weights[0, kept].sum()
        torch.testing.assert_close(Sampler(top_p=top_p).probabilities(weights.log()), expected, **SINGLE)


def test_top_p_counts_what_top_k_leaves() -> None:
    weights = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    # 0.5 of the 0.75 that top_k leaves is 0.67.
    kept = Sampler(top_k=2, top_p=0.6).probabilities(weights.log())
    torch.testing.assert_close(kept, torch.tensor([[0.0, 1.0, 0.0, 0.0]]), **SINGLE)


def test_draw_follows_the_probabilities() -> None:
    sampler = Sampler(temperature=1.3, top_k=3)
    torch.testing.assert_close(frequencies(sampler), sampler.probabilities(LOGITS)[0], atol=0.03, rtol=0.0)
    assert torch.equal(frequencies(sampler), frequencies(sampler))


def test_temperature_zero_takes_the_likeliest_and_tiny_ones_do_not_overflow() -> None:
    for temperature in (0, 1e-30):
        assert Sampler(temperature=temperature).draw(LOGITS).tolist() == [1, 2]
    assert Sampler(temperature=1e-30).draw(LOGITS.bfloat16()).dtype == torch.int64


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": -0.1}, ValueError, "temperature must be finite and at least 0, got -0.1"),
        ({"temperature": math.nan}, ValueError, "temperature must be finite and at least 0, got nan"),
        ({"temperature": None}, TypeError, "temperature must be a number, got None"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": 1.5}, TypeError, "top_k must be an integer, got 1.5"),
        ({"top_p": 0.0}, ValueError, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.1}, ValueError, "top_p must be in (0, 1], got 1.1"),
        (
            {"temperature": 0, "top_k": 2},
            ValueError,
            "top_k must be None with temperature=0, which takes the likeliest token, got 2",
        ),
    ],
)
def test_sampler_rejects_wrong_numbers(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        Sampler(**options)


def test_sampler_has_no_probabilities_without_temperature() -> None:
    with pytest.raises(ValueError, match=r"^temperature must be above 0 for probabilities, got 0$"):
        Sampler(temperature=0).probabilities(LOGITS)


# -- the model with caches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [NESTED, RAGGED, GROUPED], ids=str)
@pytest.mark.parametrize("position", ["xpos", "rotary"])
@pytest.mark.parametrize("max_length", [None, TOKENS])
@torch.no_grad()
def test_logits_with_caches_equal_the_full_forward(pattern: DilatedPattern, position: str, max_length: int | None) -> None:
    lm, tokens = model(pattern=pattern, position=position), draw_tokens()
    caches = lm.make_caches(3, max_length=max_length)
    parts = [
        lm(tokens[:, a:b], caches=caches) for a, b in ((0, 9), (9, 10), (10, 11), (11, 23), *((t, t + 1) for t in range(23, 29)))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), lm(tokens), **SINGLE)


@torch.no_grad()
def test_xpos_centre_is_the_same_in_every_chunk_far_from_the_beginning() -> None:
    # Short reach of each chunk, strong decay: with a centre per chunk the scores would be off by orders of magnitude.
    for pattern, max_length in ((DilatedPattern((96,), (1,)), None), (DilatedPattern((64, 96), (1, 1)), 200)):
        lm, tokens = model(pattern=pattern, num_layers=1), draw_tokens(1, 200)
        lm.position = XPos(6, pattern, scale_base=8.0)
        caches = lm.make_caches(1, max_length=max_length)
        parts = [lm(tokens[:, t : t + 5], caches=caches) for t in range(0, 200, 5)]
        torch.testing.assert_close(torch.cat(parts, dim=1), lm(tokens), **SINGLE)


@torch.no_grad()
def test_xpos_without_a_common_period_needs_a_length() -> None:
    lm = model(pattern=DilatedPattern((1009, 1013), (1, 1)))
    message = (
        "max_length must be at most 65391 in decoding with scale_base=512.0 and segment lengths whose least common multiple is "
        "1022117, got None; use rotary positions"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        lm.make_caches(1)
    with pytest.raises(ValueError, match=r"got 65392; use rotary"):
        lm.make_caches(1, max_length=65392)
    lm.make_caches(1, max_length=65391)


@torch.no_grad()
def test_caches_hold_the_dtype_of_the_keys_under_autocast() -> None:
    lm, tokens = model(), draw_tokens()
    with torch.autocast("cpu", torch.bfloat16):
        caches = lm.make_caches(3)
        parts = [lm(tokens[:, a:b], caches=caches) for a, b in ((0, 9), (9, 10), (10, 29))]
        expected = lm(tokens)
    assert caches[0].dtype == torch.bfloat16
    # Eight bits of mantissa, through two layers.
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=0.05 * expected.abs().max().item(), rtol=0.0)
    assert model().double().make_caches(1)[0].dtype == torch.float64


@torch.no_grad()
def test_model_step_compiles_once() -> None:
    lm, tokens = model(), draw_tokens()
    compilations = torch._dynamo.testing.CompileCounter()
    torch.compiler.reset()
    caches = lm.make_caches(3)
    lm(tokens[:, :9], caches=caches)
    step = torch.compile(lambda token: lm(token, caches=caches), fullgraph=True, backend=compilations, dynamic=False)
    logits = torch.cat([step(tokens[:, t : t + 1].clone()) for t in range(9, TOKENS)], dim=1)
    torch.testing.assert_close(logits, lm(tokens)[:, 9:], **SINGLE)
    assert compilations.frame_count == 1


@torch.no_grad()
def test_model_rejects_what_does_not_go_with_caches() -> None:
    lm, tokens = model(attention_dropout_p=0.1), draw_tokens()
    caches, padding = lm.make_caches(3), torch.zeros(3, TOKENS, dtype=torch.bool)
    foreign = model(pattern=RAGGED).make_caches(3)
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: lm(tokens, lengths=torch.tensor([1, 2, 3])), ValueError, "lengths must come with caches, got no caches"),
        (lambda: lm(tokens, caches=caches[:1]), ValueError, "caches must be one per layer=2, got 1"),
        (
            lambda: lm(tokens, caches=caches[:1] * 2),
            ValueError,
            "caches must be different objects, got one for two",
        ),
        (lambda: lm(tokens[:2], caches=caches), ValueError, "tokens must have the batch size of caches=3, got 2"),
        (
            lambda: lm(tokens, caches=caches, key_padding_mask=padding),
            NotImplementedError,
            "key_padding_mask must be None with cache",
        ),
        (lambda: lm(tokens, caches=foreign), ValueError, "cache must be for the layer's pattern="),
        (lambda: lm.train()(tokens, caches=caches), NotImplementedError, "cache must come without dropout, got 0.1; call eval"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=f"^{re.escape(message)}"):
            call()
    layer, x = model().layers[0].self_attn, torch.randn(3, 5, 24)
    layer.attention.is_causal = False
    with pytest.raises(NotImplementedError, match=r"^cache must come with is_causal=True, got is_causal=False"):
        layer(x, x, x, cache=caches[0])
    with pytest.raises(ValueError, match=r"^lengths must come with cache, got no cache"):
        layer(x, x, x, lengths=torch.tensor([1, 2, 3]))


# -- generate -----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def reread(lm: LongNetLM, tokens: Tensor, count: int, sampler: Sampler, generator: torch.Generator | None) -> Tensor:
    """Generation without a cache: the whole prefix is read for each token."""
    for _ in range(count):
        tokens = torch.cat([tokens, sampler.draw(lm(tokens)[:, -1], generator=generator)[:, None]], dim=1)
    return tokens[:, -count:]


@pytest.mark.parametrize("pattern", [NESTED, RAGGED, GROUPED], ids=str)
@pytest.mark.parametrize("prompt", [1, 7, 19])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}], ids=str)
def test_generate_gives_what_rereading_gives(pattern: DilatedPattern, prompt: int, options: dict[str, float]) -> None:
    lm, tokens = model(pattern=pattern, tie_embeddings=False), draw_tokens(2, prompt)
    drawn = lm.generate(tokens, max_new_tokens=31, generator=torch.Generator().manual_seed(7), **options)
    expected = reread(lm, tokens, 31, Sampler(**options), torch.Generator().manual_seed(7))
    assert torch.equal(drawn, expected)


def test_generate_takes_prompts_of_different_lengths() -> None:
    lm, tokens = model(), draw_tokens(3, 13)
    lengths = torch.tensor([13, 1, 6])
    drawn = lm.generate(tokens, max_new_tokens=11, lengths=lengths, temperature=0)
    for b, n in enumerate(lengths.tolist()):
        assert torch.equal(drawn[b : b + 1], lm.generate(tokens[b : b + 1, :n], max_new_tokens=11, temperature=0))


def test_generate_stops_each_sequence_at_a_stop_token_and_ends_early() -> None:
    lm, tokens = model(tie_embeddings=False), draw_tokens(2, 5)
    options = {"max_new_tokens": 40, "temperature": 1.0}
    free = lm.generate(tokens, generator=torch.Generator().manual_seed(1), **options)
    stops = (int(free[0, 3]), int(free[1, 8]))
    ends = [min(row.tolist().index(stop) for stop in stops if stop in row.tolist()) for row in free]
    assert ends[0] != ends[1]
    drawn = lm.generate(tokens, generator=torch.Generator().manual_seed(1), stop_tokens=stops, pad_token=VOCAB - 1, **options)
    assert drawn.shape == (2, max(ends) + 1)
    for row, whole, end in zip(drawn, free, ends):
        assert torch.equal(row[: end + 1], whole[: end + 1])
        assert (row[end + 1 :] == VOCAB - 1).all()


@pytest.mark.parametrize("training", [False, True])
def test_generate_has_no_dropout_and_leaves_the_mode(training: bool) -> None:
    lm, tokens = model(dropout_p=0.5, attention_dropout_p=0.5), draw_tokens()
    expected = lm.generate(tokens, max_new_tokens=7, temperature=0)
    lm.train(training)
    drawn = lm.generate(tokens, max_new_tokens=7, temperature=0)
    assert torch.equal(drawn, expected)
    assert lm.training is training
    assert not drawn.requires_grad


class AlwaysTraining(nn.Module):
    """A part that a user keeps in one mode by a `train` of its own."""

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(True)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_generate_leaves_the_mode_of_every_module(seed: int, fails: bool) -> None:
    lm = model(dropout_p=0.5)
    lm.probe = AlwaysTraining()
    modules = [module for module in lm.modules() if not isinstance(module, AlwaysTraining)]
    modes = (torch.rand(len(modules), generator=torch.Generator().manual_seed(seed)) < 0.5).tolist()
    modes[:2] = [True, False]
    for module, mode in zip(modules, modes):
        module.training = mode
    seen = []

    def look(*_: object) -> None:
        seen.append([module.training for module in modules])
        if fails and len(seen) == 3:
            raise KeyboardInterrupt

    lm.layers[1].ffn.fc2.register_forward_hook(look)
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        lm.generate(draw_tokens(), max_new_tokens=5)
    assert not any(any(row) for row in seen)
    assert [module.training for module in modules] == modes
    assert lm.probe.training


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, ValueError, "tokens must have shape (B, N), B and N at least 1, got (3,)"),
        (
            {"tokens": torch.zeros(3, 0, dtype=torch.int64)},
            ValueError,
            "tokens must have shape (B, N), B and N at least 1, got (3, 0)",
        ),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be an integer of at least 1, got 0"),
        ({"stop_tokens": (1, 17)}, ValueError, "stop_tokens[1] must be in [0, vocab_size=17), got 17"),
        ({"pad_token": -1}, ValueError, "pad_token must be in [0, vocab_size=17), got -1"),
        ({"lengths": torch.tensor([1, 2])}, ValueError, "lengths must have shape (B,)=(3,), got (2,)"),
        ({"lengths": torch.tensor([1, 0, 5])}, ValueError, "lengths must be in [1, N=5], got [1, 0, 5]"),
        ({"lengths": torch.tensor([1, 6, 5])}, ValueError, "lengths must be in [1, N=5], got [1, 6, 5]"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
    ],
)
def test_generate_rejects_wrong_arguments(options: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"tokens": torch.zeros(3, 5, dtype=torch.int64), "max_new_tokens": 2}
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        model().generate(**(arguments | options))


def test_generate_rejects_shifted_positions() -> None:
    lm = model(pattern=DilatedPattern.torchscale((7,), (2,)))
    with pytest.raises(NotImplementedError, match=r"^pattern must not shift positions in decoding"):
        lm.generate(draw_tokens(), max_new_tokens=2)
    lm.generate(draw_tokens(tokens=3), max_new_tokens=5)


# -- the command --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model(vocab_size=256).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["generate", *(str(argument) for argument in arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_command_prints_prompt_and_continuation(folder: Path, tmp_path: Path) -> None:
    prompt = "naïve "
    code, out, err = run("--model", folder, "--prompt", prompt, "--bytes", 19, "--seed", 3, "--top-k", 40, "--top-p", 0.9)
    assert (code, err) == (0, "")
    drawn = LongNetLM.from_pretrained(folder).generate(
        torch.tensor([list(prompt.encode())]),
        max_new_tokens=19,
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        generator=torch.Generator().manual_seed(3),
    )
    assert out == prompt + bytes(drawn[0].tolist()).decode("utf-8", "replace") + "\n"
    (tmp_path / "prompt.txt").write_text(prompt, encoding="utf-8")
    again = run("--model", folder, "--prompt-file", tmp_path / "prompt.txt", "--bytes", 19, "--seed=3", "--top-k=40", "--top-p=0.9")
    assert again == (code, out, err)
    assert run("--model", folder, "--prompt", prompt, "--bytes", 19, "--seed", 4)[1] != out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--prompt must come, or else --prompt-file, got neither"),
        (("--prompt", "a", "--prompt-file", "b"), "--prompt must come, or else --prompt-file, got both"),
        (("--prompt", ""), "--prompt must hold at least one byte, got none"),
        (("--prompt-file", "/nowhere"), "--prompt-file must be readable, got /nowhere: No such file or directory"),
        (("--prompt", "a", "--top-p", "1.5"), "--top-p must be in (0, 1], got 1.5"),
        (("--prompt", "a", "--temperature", "0", "--top-k", "3"), "--top-k must be None with temperature=0"),
        (("--prompt", "a", "--device", "abacus"), "--device must be one that torch can use here, got abacus"),
    ],
)
def test_command_refuses_in_one_line(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run("--model", folder, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_command_refuses_models_it_cannot_read(folder: Path, tmp_path: Path) -> None:
    model(vocab_size=17).save_pretrained(tmp_path / "words")
    for where, message in (
        (tmp_path, "--model must be a folder that `flexdilated train` wrote: "),
        (tmp_path / "words", "--model must be a model of bytes, with vocab_size=256, got vocab_size=17"),
    ):
        code, _, err = run("--model", where, "--prompt", "a")
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"error: {message}")
    config = (folder / "config.json").read_text()
    for text in ("{", config.replace('"num_layers": 2', '"num_layers": 3')):
        (folder / "config.json").write_text(text)
        code, _, err = run("--model", folder, "--prompt", "a")
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"error: --model must hold a whole model, got {folder}: ")
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(b"half")
    assert run("--model", folder, "--prompt", "a")[2].startswith("error: --model must hold a whole model")
