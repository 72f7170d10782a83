"""Every default that ships runs once as it is: presets, patterns of the docs, adapters, commands, and the file of measurements."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexdilated import (
    DilatedAttention,
    DilatedKVCache,
    DilatedPattern,
    LongNet,
    LongNetConfig,
    LongNetLM,
    MultiheadDilatedAttention,
    attention_map,
    choose_pattern,
    convert,
    create_dilated_block_mask,
    dilated_score_mod,
)
from flexdilated.backends import BACKENDS, DispatchKey, choose, measured
from flexdilated.cli.train import train
from flexdilated.hub.encoder import LongNetEncoder
from flexdilated.nn.sampling import Sampler
from flexdilated.slides.model import LongNetViT
from tests.backends import flex_emulation
from tests.cases import Case, least_heads, randomised, run_backend, run_reference
from tests.commands import invoke
from tests.hardware import simulate
from tests.tolerances import EXACT

pytestmark = pytest.mark.filterwarnings("ignore:pattern with segments:UserWarning")  # published patterns that lose information
ROOT = Path(__file__).parents[1]
TOKENS, HEADS, WIDTH, VOCAB = 67, 4, 16, 31
CAUSAL = DilatedPattern.causal(TOKENS, HEADS, window=13)
PRESETS = {
    "longnet": DilatedPattern.longnet(),
    "longnet, scaled": DilatedPattern((4, 8, 16, 32, 64), DilatedPattern.longnet().dilation_rates),
    "torchscale": DilatedPattern.torchscale((16, 33), (1, 2)),
    "grouped": DilatedPattern.grouped((16, 33), (1, 2)),
    "causal": CAUSAL,
    "causal, short": DilatedPattern.causal(TOKENS, HEADS),
    "gigapath": DilatedPattern.gigapath(),
    "gigapath, scaled": DilatedPattern.gigapath(1024, 256),
    "first proposal": choose_pattern(TOKENS, HEADS, is_causal=False).shown[0].pattern,
    "first causal proposal": choose_pattern(TOKENS, HEADS, is_causal=True).shown[0].pattern,
}


def code_of(path: Path) -> list[ast.Module]:
    """The blocks of Python of a page, without its directives."""
    blocks = re.findall(r"^( *)```(?:python|\{code-cell\}[^\n]*)\n(.*?)^\1```", path.read_text(), re.M | re.S)
    return [ast.parse(re.sub(r"\A(:.*\n( +.*\n)*)+|^%.*", "", textwrap.dedent(code), flags=re.M)) for _, code in blocks]


def snippets() -> dict[str, int]:
    """Each pattern that a page writes in numbers, and its key/value heads."""
    found = {}
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))):
        for node in (node for block in code_of(path) for node in ast.walk(block) if isinstance(node, ast.Call)):
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            if names == {"DilatedPattern"} and re.fullmatch(r"DilatedPattern(\.\w+)?", ast.unparse(node.func)):
                pattern = eval(source := ast.unparse(node), {"DilatedPattern": DilatedPattern})
                is_causal = source.startswith("DilatedPattern.causal")
                heads = [*node.args, *(word.value for word in node.keywords)][1] if is_causal else None
                found[source] = max(HEADS, least_heads(pattern)) if heads is None else ast.literal_eval(heads)
    return found


SNIPPETS = snippets()


def test_the_docs_write_patterns_in_numbers() -> None:
    assert "DilatedPattern.causal(8192, num_kv_heads=8)" in SNIPPETS
    assert len(SNIPPETS) > 40


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_equal_the_definition(name: str, is_causal: bool) -> None:
    pattern = PRESETS[name]
    case = Case(pattern, num_tokens=TOKENS, kv_heads=HEADS, group=2, is_causal=is_causal, lse_gradient=not pattern.detaches)
    torch.testing.assert_close(run_backend(case, "auto"), run_reference(case), **EXACT)


@pytest.mark.parametrize("source", SNIPPETS)
def test_patterns_of_the_docs_equal_the_definition(source: str) -> None:
    pattern = eval(source, {"DilatedPattern": DilatedPattern})
    case = Case(pattern, num_tokens=TOKENS, kv_heads=SNIPPETS[source], is_causal=True, lse_gradient=not pattern.detaches)
    torch.testing.assert_close(run_backend(case, "auto"), run_reference(case), **EXACT)


def config(backend: str = "auto", **options: Any) -> LongNetConfig:
    sizes = {"vocab_size": VOCAB, "embed_dim": WIDTH, "num_layers": 2, "num_heads": HEADS, "pattern": CAUSAL}
    return LongNetConfig(**{**sizes, **options}, backend=backend)


def trained(backend: str) -> LongNetLM:
    """The model that `flexdilated train` builds without options, of one layer."""
    given = {name: parameter.default for name, parameter in inspect.signature(train).parameters.items()}
    pattern = DilatedPattern.causal(given["sequence_length"], given["heads"])
    return LongNetLM(config(backend, embed_dim=given["embed_dim"], num_layers=1, num_heads=given["heads"], pattern=pattern))


def converted(backend: str) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 23, dropout=0.0, batch_first=True)
    return convert(layer, CAUSAL, is_causal=True, backend=backend)


def slide_encoder(backend: str) -> LongNetViT:
    return LongNetViT(in_chans=5, embed_dim=WIDTH, depth=2, num_heads=HEADS, slide_ngrids=29, backend=backend)


def rows() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)


def ids() -> Tensor:
    return torch.randint(VOCAB, (2, TOKENS))


def tiles() -> tuple[Tensor, Tensor]:
    return torch.randn(2, TOKENS, 5, dtype=torch.float64), torch.randint(29 * 256, (2, TOKENS, 2))


MODELS: dict[str, tuple[Callable[[str], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "DilatedAttention": (
        lambda backend: DilatedAttention(CAUSAL, is_causal=True, backend=backend),
        lambda: tuple(torch.randn(3, 2, TOKENS, HEADS, 3, dtype=torch.float64)),
    ),
    "MultiheadDilatedAttention": (
        lambda backend: MultiheadDilatedAttention(WIDTH, HEADS, CAUSAL, is_causal=True, backend=backend),
        lambda: (rows(), rows(), rows()),
    ),
    "LongNetLM": (lambda backend: LongNetLM(config(backend)), lambda: (ids(),)),
    "flexdilated train": (trained, lambda: (ids(),)),
    "LongNetEncoder": (lambda backend: LongNetEncoder(WIDTH, 2, HEADS, CAUSAL, backend=backend), lambda: (rows(),)),
    "LongNet": (lambda backend: LongNet(WIDTH, HEADS, 1, 1, 23, backend=backend), lambda: (rows(), rows())),
    "convert": (converted, lambda: (rows(),)),
    "LongNetViT": (slide_encoder, tiles),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_themselves_over_the_definition(name: str) -> None:
    build, draw = MODELS[name]
    models = [build(backend).double().eval() for backend in ("auto", "reference")]
    models[1].load_state_dict(randomised(models[0]).state_dict())
    inputs, found = draw(), []
    for model in models:
        leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()] + list(model.parameters())
        out = model(*inputs)
        out = out if isinstance(out, Tensor) else out[0]
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True)])
    torch.testing.assert_close(*found, **EXACT)


def test_generated_tokens_are_those_of_the_whole_forward() -> None:
    model = randomised(LongNetLM(config())).double().eval()
    prompt = ids()[:, :19]
    drawn = model.generate(prompt, max_new_tokens=TOKENS - 19, temperature=0.0)
    assert torch.equal(model(torch.cat([prompt, drawn], dim=1))[:, 18:-1].argmax(-1), drawn)


def test_caches_maps_and_block_masks_equal_the_definition() -> None:
    case = Case(CAUSAL, batch=2, num_tokens=TOKENS, kv_heads=HEADS, group=2, is_causal=True)
    q, k, v, _, _ = case.tensors()
    expected = run_reference(case)[0]
    cache = DilatedKVCache(CAUSAL, batch_size=2, num_kv_heads=HEADS, head_dim=3, dtype=torch.float64)
    steps = [slice(0, 19), *(slice(i, i + 1) for i in range(19, TOKENS))]
    torch.testing.assert_close(torch.cat([cache.attend(*(x[:, i] for x in (q, k, v))) for i in steps], dim=1), expected, **EXACT)
    weights = attention_map(q, k, CAUSAL, queries=range(TOKENS), is_causal=True)
    torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(2, dim=2)), expected, **EXACT)

    long = DilatedPattern.causal(701, HEADS)  # of 6 blocks
    case = Case(long, num_tokens=701, kv_heads=HEADS, is_causal=True)
    q, k, v = (x.transpose(1, 2) for x in case.tensors()[:3])
    make = [partial(each, long, HEADS, seq_len=701, is_causal=True) for each in (create_dilated_block_mask, dilated_score_mod)]
    functions = {"block_mask": make[0](device="cpu"), "score_mod": make[1]()}
    out, _ = flex_emulation.call(q, k, v, scale=3**-0.5, want_lse=True, kind=None, **functions)
    torch.testing.assert_close(out.transpose(1, 2), run_reference(case)[0], **EXACT)


def test_a_sampler_draws_from_the_softmax() -> None:
    logits = torch.randn(2, VOCAB)
    torch.testing.assert_close(Sampler().probabilities(logits), logits.softmax(-1))


SHIPPED = json.loads(measured.FILE.read_text())


def test_forms_that_have_run_on_a_gpu_exist() -> None:
    forms = {form + suffix for form in ("forward", "backward") for suffix in ("", ", grouped heads")}
    checks = [check for kept in SHIPPED.values() for check in kept["checks"]]
    assert {(check["candidate"], check["form"]) for check in checks} <= {(b, f) for b in measured.PROVEN for f in forms}


@pytest.mark.parametrize("device", sorted(SHIPPED))
def test_auto_answers_for_every_kept_measurement(device: str) -> None:
    measured._check_shape({"environment": {}, **SHIPPED[device]}, measured.SHAPE, "file")
    for entry in SHIPPED[device]["measured"]:
        timed = {name.removesuffix("_over_sdpa") for name in entry if name.endswith("_over_sdpa")}
        assert timed <= set(measured.CHALLENGERS) < set(BACKENDS)
        sizes = {"head_dim": entry["head_dim"], "num_tokens": entry["tokens"], "differentiable": entry["training"]}
        request = DispatchKey(simulate(device), getattr(torch, entry["dtype"]), **sizes)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*flexdilated tune", UserWarning)  # advice, once per process
            assert choose("auto", request) in ("sdpa", *timed)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("show",), "64 tokens · 4 heads"),
        (("show", "--blocks"), "tiles of 128 x 128 pairs"),
        (("plan", "--tokens", 4096, "--context-parallel", 2), "12 heads of 64"),
        (("choose", "--tokens", 512), "512 tokens, 12 heads, not causal; budget 10 % of dense attention"),
        (("choose", "--tokens", 4096, "--causal"), "1  DilatedPattern((4096,), "),
    ],
)
def test_commands_run_without_options(command: tuple[object, ...], expected: str) -> None:
    code, out, err = invoke(*command)
    assert (code, err) == (0, "")
    assert expected in out


def test_generate_writes_240_bytes(tmp_path: Path) -> None:
    LongNetLM(config(vocab_size=256, num_layers=1)).save_pretrained(tmp_path)
    code, out, _ = invoke("generate", "--model", tmp_path, "--prompt", "def ")
    assert code == 0
    assert out.startswith("def ")
