"""The training command: what it writes, how it goes on, and what it refuses."""

import dataclasses
import gzip
import lzma
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM
from flexdilated.cli import training
from flexdilated.training import checkpoint
from flexdilated.training.corpus import load_corpus
from tests.commands import invoke
from tests.training import runs

CONFIG = LongNetConfig(vocab_size=256, embed_dim=24, num_layers=1, num_heads=2, pattern=DilatedPattern((8,), (1,)))


def train(output: Path, text: Path, *more: str) -> tuple[int, str, str]:
    return invoke(*runs.arguments(output, text, *more))


@pytest.mark.slow
def test_train_writes_goes_on_and_begins_anew(tmp_path: Path, text: Path) -> None:
    """One run by each of the options that say what to do with an earlier one; its text lies beside what it writes."""
    (tmp_path / "a.txt").write_bytes(text.read_bytes())
    run = tmp_path / "run"
    code, out, _ = train(run, tmp_path, "--resume-if-any", "--dense")
    assert code == 0
    assert "bits per held-out byte" in out
    assert "step 0 of 4, 74 bytes each" in out
    assert re.search(r"dilated: the first step took \d+ s; 2 steps are left, about \d+ s\n", out)
    raw, dense, more = out.splitlines()[-3:]
    held_out = load_corpus([tmp_path], 37, without=[run]).held_out.numpy().tobytes()
    sizes = [8 * len(packed) / len(held_out) for packed in (gzip.compress(held_out), lzma.compress(held_out, preset=9))]
    assert raw == "bits per byte: raw bytes have 8; gzip compresses all held-out text to {:.2f}, xz to {:.2f}".format(*sizes)
    bits = checkpoint.read(checkpoint.latest(run / "dense"))[0]["history"][-1]["held_out"]  # type: ignore[arg-type]
    assert dense == f"a dense model of this size, trained for as many steps: {bits:.2f} bits per held-out byte"
    assert more.startswith(
        f"next: flexdilated generate --model {run / 'dilated'} --prompt 'def '; your own text, longer: flexdilated "
    )
    for name, rates in (("dilated", (1, 2)), ("dense", (1,))):
        assert LongNetLM.from_pretrained(run / name).config.pattern.dilation_rates == rates
    assert (run / "loss.png").stat().st_size > 1000
    assert len((run / "sample.txt").read_bytes()) == 64 + 240
    command = shlex.split(more.removeprefix("next: flexdilated ").split(";")[0])
    assert invoke(*command)[0] == 0
    code, _, err = train(run, tmp_path)
    assert (code, err.startswith("error: --output must hold no earlier run, got ")) == (2, True)
    for option in ("--resume", "--resume-if-any"):
        assert "step 4 of 4" in train(run, tmp_path, option)[1]
    code, _, err = train(run, tmp_path, "--resume", "--seed=3")
    assert (code, err.startswith("error: --resume must use the checkpoint's seed=0, got 3; give the options")) == (2, True)
    (run / "dilated" / "checkpoint-99").mkdir()
    assert "step 0 of 4" in train(run, tmp_path, "--overwrite")[1]
    assert checkpoint.latest(run / "dilated") == run / "dilated" / "checkpoint-4"


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_another(tmp_path: Path, text: Path) -> None:
    assert train(tmp_path / "first", text)[0] == 0
    weights = f"--weights={tmp_path / 'first' / 'dilated'}"
    code, out, err = train(tmp_path / "same", text, weights, "--learning-rate=0", "--steps=1")
    assert code == 0, err
    history = checkpoint.read(checkpoint.latest(tmp_path / "same" / "dilated"))[0]["history"]  # type: ignore[arg-type]
    assert f"the initial weights give {history[-1]['held_out']:.3f} bits per held-out byte" in out
    before, after = (LongNetLM.from_pretrained(tmp_path / name / "dilated") for name in ("first", "same"))
    for a, b in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(a, b)

    longer = ["--tokens=80", "--segment-lengths=13,80", "--dilation-rates=1,2", "--steps=1", weights]
    code, _, err = train(tmp_path / "longer", text, *longer)
    assert code == 0, err
    assert LongNetLM.from_pretrained(tmp_path / "longer" / "dilated").config.pattern.segment_lengths == (13, 80)
    code, _, err = train(tmp_path / "longer", text, *longer[:-1], "--resume")
    assert (code, err.startswith("error: --resume must use the checkpoint's weights='")) == (2, True), err


@pytest.mark.parametrize(("tokens", "used"), [(48, 0.75), (64, 1.0)])
def test_a_run_keeps_the_decay_of_its_weights_for_sequences_as_short(tmp_path: Path, text: Path, tokens: int, used: float) -> None:
    held = 0.75
    LongNetLM(dataclasses.replace(CONFIG, scale_base=held)).save_pretrained(tmp_path / "weights")
    code, out, err = train(tmp_path / "run", text, f"--weights={tmp_path / 'weights'}", "--steps=1", f"--tokens={tokens}")
    assert code == 0, err
    assert LongNetLM.from_pretrained(tmp_path / "run" / "dilated").config.scale_base == used
    assert (f"positions decay over {used:g} tokens, not {held:g} as in --weights: sequences are longer" in out) == (used != held)


def test_a_dense_model_is_named_beside_the_default_run_alone(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default options on another text, shorter: what is not measured for them is not shown."""
    parts: list[bool] = []
    monkeypatch.setattr("flexdilated.training.corpus.load_corpus", lambda *args, **options: load_corpus([text], 37))
    patterns: list[DilatedPattern] = []
    monkeypatch.setattr("flexdilated.cli.training.run_trainer", lambda trainer, *args: patterns.append(trainer.config.pattern))
    monkeypatch.setattr("flexdilated.cli.training.finish", lambda *args, is_default: parts.append(is_default))
    for i, more in enumerate(([], ["--no-compile", "--device=cpu"], ["--steps=101"], [f"--text={text}"], ["--dense"])):
        assert invoke("train", f"--output={tmp_path / str(i)}", *more)[0] == 0
    assert parts == [True, True, False, False, False]
    assert patterns == [*[DilatedPattern.causal(4096, 6)] * 5, DilatedPattern((4096,), (1,))]
    assert training.beside_dense({}, is_default=True).endswith(
        f": {training.DENSE_BITS:.2f} bits per held-out byte, measured once with the default options; --dense --overwrite "
        "measures it here"
    )
    assert training.beside_dense({}, is_default=False).endswith("add --dense --overwrite to the command")


def test_rates_that_the_heads_cannot_keep_are_reported(tmp_path: Path, text: Path) -> None:
    code, out, err = train(tmp_path / "run", text, "--steps=1", "--segment-lengths=8,16,16", "--dilation-rates=1,5,8", "--heads=2")
    assert code == 0, err
    assert "no head keeps some rows of branches of rate 5, 8: there are 2 heads\n" in out
    assert "not connected: not all information from tokens 0 to 7 reaches the tokens from 8 on; " in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, "--weights must hold a model of --layers=1, got 3"),
        ({"num_kv_heads": 1}, "--weights must hold a model of num_kv_heads=2, got 1"),
        ({"position": "rotary"}, "--weights must hold a model of position=xpos, got rotary"),
        (None, "--weights must be the folder of a saved model, as <output>/dilated of a finished run, got "),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, text: Path, change: dict[str, Any] | None, message: str) -> None:
    LongNetLM(dataclasses.replace(CONFIG, **(change or {}))).save_pretrained(tmp_path / "weights")
    if change is None:
        (tmp_path / "weights" / "model.safetensors").write_bytes(b"1234567890")
    code, _, err = train(tmp_path / "run", text, f"--weights={tmp_path / 'weights'}")
    assert (code, err.count("\n"), err.startswith(f"error: {message}")) == (2, 1, True), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume-if-any", "--overwrite"], "--resume-if-any must come without --overwrite, got both"),
        (["--resume"], "--resume must find a checkpoint, none in"),
        (["--dilation-rates=1"], "--dilation-rates must hold one rate per segment length (2), got (1,)"),
        (["--embed-dim=25"], "--embed-dim must be a multiple of 2 * --heads=4, got 25"),
        (["--tokens=5000"], "--text must hold at least 10002 bytes for --tokens 5000, got 4545"),
        (["--output=/dev/null/run"], "/dev/null/run/dilated must be a file that can be read or written, got: Not a directory"),
    ],
)
def test_train_refuses_with_one_line_and_exit_code_2(tmp_path: Path, text: Path, arguments: list[str], message: str) -> None:
    code, _, err = train(tmp_path / "run", text, *arguments)
    assert (code, err.count("\n"), err.startswith(f"error: {message}")) == (2, 1, True), err
    assert checkpoint.latest(tmp_path / "run" / "dilated") is None
