"""`flexdilated generate`: a prompt continued, and what it refuses."""

from pathlib import Path

import pytest
import torch

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM
from tests.commands import invoke, refused


def model(vocab_size: int) -> LongNetLM:
    pattern = DilatedPattern((4, 8), (1, 2))
    return LongNetLM(LongNetConfig(vocab_size=vocab_size, embed_dim=24, num_layers=2, num_heads=4, pattern=pattern)).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model(vocab_size=256).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_command_prints_prompt_and_continuation(folder: Path, tmp_path: Path) -> None:
    prompt, drawing = "naïve ", ("--bytes", 19, "--seed", 3, "--top-k", 40, "--top-p", 0.9)
    code, out, err = invoke("generate", "--model", folder, "--prompt", prompt, *drawing)
    assert (code, err) == (0, "")
    options = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "generator": torch.Generator().manual_seed(3)}
    drawn = LongNetLM.from_pretrained(folder).generate(torch.tensor([list(prompt.encode())]), max_new_tokens=19, **options)
    text = bytes(drawn[0].tolist()).decode("utf-8", "replace")
    assert any(not each.isprintable() for each in text)  # which a terminal could obey
    shown = "".join(each if each.isprintable() or each in "\t\n" else "\ufffd" for each in text)
    assert out == prompt + shown + "\n"
    (tmp_path / "prompt.txt").write_text(prompt, encoding="utf-8")
    assert invoke("generate", "--model", folder, "--prompt-file", tmp_path / "prompt.txt", *drawing) == (code, out, err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--prompt or --prompt-file must be given, one of them and with at least one byte"),
        (("--prompt", "a", "--top-p", "1.5"), "--top-p must be in (0, 1], got 1.5"),
        (("--prompt", "a", "--temperature", "0", "--top-k", "3"), "--top-k must be None with temperature=0"),
        (("--prompt", "a", "--device", "abacus"), "--device must be a device that torch can use here, got 'abacus'"),
        (("--prompt", "a", "--model", "words"), "--model must be a model of bytes, with vocab_size=256, got vocab_size=17"),
        *(
            (("--prompt", "a", "--model", name), "--model must be the folder of a saved model, as <output>/dilated of a finished ")
            for name in ("none", "half")
        ),
    ],
)
def test_command_refuses_in_one_line(folder: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    for name in ("words", "half"):
        model(vocab_size=17).save_pretrained(tmp_path / name)
    (tmp_path / "half" / "model.safetensors").write_bytes(b"half")
    named = {"words": tmp_path / "words", "half": tmp_path / "half"}
    assert refused("generate", "--model", folder, *(named.get(argument, argument) for argument in arguments)).startswith(message)
