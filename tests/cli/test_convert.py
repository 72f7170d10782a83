"""`flexdilated convert`: the same weights under a chosen pattern."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from flexdilated import DilatedPattern, choose_pattern
from tests.commands import invoke

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install flexdilated[transformers]")

from flexdilated.hub.transformers import set_pattern  # noqa: E402


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    sizes = {"vocab_size": 31, "hidden_size": 64, "intermediate_size": 19, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=8)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")
    return tmp_path / "dense"


def test_a_converted_model_has_the_weights_and_the_chosen_pattern(saved: Path) -> None:
    output = saved.with_name("dilated")
    code, out, err = invoke("convert", saved, "--tokens", 331, "--budget=20%", "--output", output)
    assert (code, err) == (0, "")
    pattern = choose_pattern(331, 8, budget=0.2, is_causal=True).shown[0].pattern
    assert out.splitlines() == [
        f"wrote '{output}' with {pattern!r}; load it by",
        "    import flexdilated.hub.transformers",
        f"    AutoModel.from_pretrained('{output}', attn_implementation='flexdilated')  # or another auto class",
    ]
    assert {path.name for path in saved.iterdir()} == {path.name for path in output.iterdir()}
    load = transformers.AutoModelForCausalLM.from_pretrained
    dense, converted = load(saved).eval(), load(output, attn_implementation="flexdilated").eval()
    assert DilatedPattern.from_dict(converted.config.dilated_pattern) == pattern
    tokens = torch.randint(31, (1, 331))
    before = dense(tokens).logits
    set_pattern(dense, pattern)
    torch.testing.assert_close(converted(tokens).logits, dense(tokens).logits, rtol=0, atol=0)
    assert not torch.allclose(before, dense(tokens).logits)


def test_convert_refuses_in_one_line(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, new = saved.with_name("empty"), saved.with_name("new")
    empty.mkdir()
    for arguments, message in (
        ((saved, f"--output={empty}"), f"--output must not exist, got '{empty}'; use another name"),
        ((saved, f"--output={saved / 'new'}"), f"--output must be outside FOLDER, got '{saved / 'new'}'"),
        ((empty, f"--output={new}"), f"FOLDER must hold a model of the transformers library, got '{empty}': "),
        (
            (saved, f"--output={new}", "--budget=1%"),
            "budget must be at least 0.0837 for 331 tokens and 8 key/value heads, got 0.01",
        ),
    ):
        code, out, err = invoke("convert", *arguments, "--tokens=331")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"error: {message}")
        assert not new.exists()
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("flexdilated.cli.convert.find_spec", lambda name: None)
    assert invoke("convert", saved, "--tokens=331", f"--output={new}")[2].startswith(
        "error: transformers must be installed to convert "
    )
