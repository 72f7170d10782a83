"""`flexdilated generate`: a prompt continued, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM
from flexdilated.cli.generate import continued
from tests.commands import invoke


def model(vocab_size: int) -> LongNetLM:
    pattern = DilatedPattern((4, 8), (1, 2))
    return LongNetLM(LongNetConfig(vocab_size=vocab_size, embed_dim=24, num_layers=2, num_heads=4, pattern=pattern)).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model(vocab_size=256).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def generate(*arguments: object) -> tuple[int, str, str]:
    return invoke("generate", *arguments)


def test_command_prints_prompt_and_continuation(folder: Path, tmp_path: Path) -> None:
    prompt = "naïve "
    code, out, err = generate("--model", folder, "--prompt", prompt, "--bytes", 19, "--seed", 3, "--top-k", 40, "--top-p", 0.9)
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
    again = generate(
        "--model", folder, "--prompt-file", tmp_path / "prompt.txt", "--bytes", 19, "--seed=3", "--top-k=40", "--top-p=0.9"
    )
    assert again == (code, out, err)
    assert generate("--model", folder, "--prompt", prompt, "--bytes", 19, "--seed", 4)[1] != out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--prompt must come, or else --prompt-file, got neither"),
        (("--prompt", "a", "--prompt-file", "b"), "--prompt must come, or else --prompt-file, got both"),
        (("--prompt", ""), "--prompt must hold at least one byte, got none"),
        (("--prompt-file", "/nowhere"), "--prompt-file must be readable, got /nowhere: No such file or directory"),
        (("--prompt", "a", "--top-p", "1.5"), "--top-p must be in (0, 1], got 1.5"),
        (("--prompt", "a", "--temperature", "0", "--top-k", "3"), "--top-k must be None with temperature=0"),
        (("--prompt", "a", "--device", "abacus"), "--device must be a device that torch can use here, got 'abacus'"),
    ],
)
def test_command_refuses_in_one_line(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = generate("--model", folder, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_command_refuses_models_it_cannot_read(folder: Path, tmp_path: Path) -> None:
    model(vocab_size=17).save_pretrained(tmp_path / "words")
    for where, message in (
        (tmp_path, f"--model must be a folder that `flexdilated train` wrote, got {tmp_path}: "),
        (tmp_path / "none", f"--model must be a folder that `flexdilated train` wrote, got {tmp_path / 'none'}: no such folder\n"),
        (tmp_path / "words", "--model must be a model of bytes, with vocab_size=256, got vocab_size=17"),
    ):
        code, _, err = generate("--model", where, "--prompt", "a")
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"error: {message}")
        assert err.endswith(f": {folder} holds one\n") == (where == tmp_path)
    config = (folder / "config.json").read_text()
    for text in ("{", config.replace('"num_layers": 2', '"num_layers": 3')):
        (folder / "config.json").write_text(text)
        code, _, err = generate("--model", folder, "--prompt", "a")
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"error: --model must hold a whole model, got {folder}: ")
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(b"half")
    assert generate("--model", folder, "--prompt", "a")[2].startswith("error: --model must hold a whole model")


def test_text_is_continued_reproducibly() -> None:
    options = {"num_bytes": 11, "temperature": 0.7, "seed": 3}
    written = continued(model(vocab_size=256), b"import ", **options)
    assert written.startswith(b"import ")
    assert len(written) == 18
    torch.manual_seed(2307)
    assert written == continued(model(vocab_size=256), b"import ", **options)
