"""The training command: what it writes, and how it refuses."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM, __version__
from flexdilated.training import checkpoint
from tests.commands import invoke
from tests.training import runs

RESUMED = "give the options and text of that run, or begin another in another --output with --weights"


def train(output: Path, text: Path, *more: str) -> tuple[int, str, str]:
    return invoke(*runs.arguments(output, text, *more))


def test_version_and_help() -> None:
    assert invoke("--version") == (0, __version__ + "\n", "")
    code, out, _ = invoke("train", "--help")
    assert code == 0
    assert "--tokens" in out


def test_train_writes_model_picture_and_sample(tmp_path: Path, text: Path) -> None:
    code, out, _ = train(tmp_path / "run", text, "--dense")
    assert code == 0
    assert "bits per held-out byte" in out
    for name in ("dilated", "dense"):
        assert LongNetLM.from_pretrained(tmp_path / "run" / name).config.embed_dim == 24
    assert LongNetLM.from_pretrained(tmp_path / "run" / "dense").config.pattern.dilation_rates == (1,)
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000
    assert len((tmp_path / "run" / "sample.txt").read_bytes()) == 64 + 240


@pytest.mark.slow
def test_sequences_longer_than_the_default_decay_of_positions_allows_are_learnt(tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_bytes(b"abc " * 350_000)
    sizes = [
        "--tokens=66000",
        "--segment-lengths=66000",
        "--dilation-rates=64",
        "--batch-size=1",
        "--steps=1",
        "--eval-sequences=1",
    ]
    code, _, err = train(tmp_path / "run", text, *sizes)
    assert code == 0, err
    assert LongNetLM.from_pretrained(tmp_path / "run" / "dilated").config.scale_base == 66000 / 64


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_another(tmp_path: Path, text: Path) -> None:
    """Of other text, longer sequences and another pattern; held out at once what the other run ended with."""
    assert train(tmp_path / "first", text)[0] == 0
    weights = f"--weights={tmp_path / 'first' / 'dilated'}"
    code, out, err = train(tmp_path / "same", text, weights, "--learning-rate=0", "--steps=1")
    assert code == 0, err
    history = checkpoint.read(checkpoint.latest(tmp_path / "same" / "dilated"))[0]["history"]  # type: ignore[arg-type]
    assert f"the weights that it begins with give {history[-1]['held_out']:.3f} bits per held-out byte" in out
    before, after = (LongNetLM.from_pretrained(tmp_path / name / "dilated") for name in ("first", "same"))
    for a, b in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(a, b)

    longer = ["--tokens=80", "--segment-lengths=13,80", "--dilation-rates=1,2", weights]
    code, _, err = train(tmp_path / "longer", text, *longer, "--dense")
    assert code == 0, err
    model = LongNetLM.from_pretrained(tmp_path / "longer" / "dilated")
    assert model.config.pattern.segment_lengths == (13, 80)
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), model.parameters(), strict=True))

    code, _, err = train(tmp_path / "longer", text, *longer[:-1], "--resume")
    assert (code, err) == (
        2,
        f"error: --resume must begin as the run in {tmp_path / 'longer' / 'dilated'} did, with --weights; give the same command\n",
    )
    assert train(tmp_path / "longer", text, *longer, "--dense", "--resume")[0] == 0


def test_a_run_keeps_the_decay_of_positions_that_its_weights_learnt(tmp_path: Path, text: Path) -> None:
    config = LongNetConfig(
        vocab_size=256, embed_dim=24, num_layers=1, num_heads=2, pattern=DilatedPattern((8,), (1,)), scale_base=2048.0
    )
    LongNetLM(config).save_pretrained(tmp_path / "weights")
    code, _, err = train(tmp_path / "run", text, f"--weights={tmp_path / 'weights'}", "--steps=1")
    assert code == 0, err
    assert LongNetLM.from_pretrained(tmp_path / "run" / "dilated").config.scale_base == 2048.0
    LongNetLM(dataclasses.replace(config, scale_base=0.75)).save_pretrained(tmp_path / "weights")
    code, out, err = train(tmp_path / "other", text, f"--weights={tmp_path / 'weights'}", "--steps=1", "--tokens=48")
    assert (code, "positions decay" in out) == (0, False), err
    assert LongNetLM.from_pretrained(tmp_path / "other" / "dilated").config.scale_base == 0.75
    code, out, err = train(tmp_path / "longer", text, f"--weights={tmp_path / 'weights'}", "--steps=1", "--tokens=64")
    assert code == 0, err
    assert "positions decay over 1 tokens, not 0.75 as in --weights: sequences are longer" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, "--layers=1, got 3; use --layers 3"),
        ({"embed_dim": 48}, "--embed-dim=24, got 48; use --embed-dim 48"),
        ({"num_heads": 4, "num_kv_heads": 2}, "--heads=2, got 4; use --heads 4"),
        ({"num_kv_heads": 1}, "num_kv_heads=2, got 1; this command trains no other models"),
        ({"position": "rotary"}, "position=xpos, got rotary; this command trains no other models"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, text: Path, change: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 256, "embed_dim": 24, "num_layers": 1, "num_heads": 2}
    LongNetLM(LongNetConfig(**{**sizes, "pattern": DilatedPattern((8,), (1,)), **change})).save_pretrained(tmp_path / "weights")
    code, _, err = train(tmp_path / "run", text, f"--weights={tmp_path / 'weights'}")
    assert (code, err) == (2, f"error: --weights must hold a model of {message}\n")


def test_rates_that_the_heads_cannot_keep_are_told(tmp_path: Path, text: Path) -> None:
    code, out, err = train(tmp_path / "run", text, "--steps=1", "--segment-lengths=8,16,16", "--dilation-rates=1,5,8", "--heads=2")
    assert code == 0, err
    assert "no head keeps some rows of branches of rate 5, 8: there are 2 heads\n" in out
    assert "not connected: not all information from tokens 0 to 7 reaches the tokens from 8 on; " in out
    assert "no head keeps" not in train(tmp_path / "other", text, "--steps=1", "--heads=2")[1]


def test_weights_must_be_whole_and_outside_of_the_run(tmp_path: Path, text: Path) -> None:
    config = LongNetConfig(vocab_size=256, embed_dim=24, num_layers=1, num_heads=2, pattern=DilatedPattern((8,), (1,)))
    LongNetLM(config).save_pretrained(tmp_path / "run" / "dilated")
    within = f"--weights={tmp_path / 'run' / 'dilated'}"
    code, _, err = train(tmp_path / "run", text, within, "--overwrite")
    assert (code, "--weights must lie outside of the run in --output" in err) == (2, True), err
    assert (tmp_path / "run" / "dilated" / "model.safetensors").is_file()
    (tmp_path / "run" / "dilated" / "model.safetensors").write_bytes(b"1234567890")
    for folder in (tmp_path / "run" / "dilated", tmp_path / "nothing"):
        code, _, err = train(tmp_path / "other", text, f"--weights={folder}")
        assert (code, err.startswith("error: --weights must be the folder of a saved model, got ")) == (2, True), err
        assert len(err.splitlines()) == 1


def test_what_stands_where_weights_should_is_told(tmp_path: Path, text: Path) -> None:
    trainer = runs.make_trainer(tmp_path / "begun" / "dilated", text)
    trainer.run(lambda now: os.kill(os.getpid(), signal.SIGINT) if now.step == 1 else None)
    trainer.model.save_pretrained(tmp_path / "done" / "dilated")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "begun": f"the run in {tmp_path / 'begun' / 'dilated'} is not finished; go on with it by --resume first",
        "begun/dilated": f"the run in {tmp_path / 'begun' / 'dilated'} is not finished; go on with it by --resume first",
        "done": f"{tmp_path / 'done' / 'dilated'} holds one",
        "done/dilated/config.json": "a file; give the folder that it is in",
        "empty": "it holds no config.json",
        "nothing": "no such folder",
    }.items():
        code, _, err = train(tmp_path / "run", text, f"--weights={tmp_path / name}")
        assert (code, err) == (2, f"error: --weights must be the folder of a saved model, got {tmp_path / name}: {message}\n")


def test_a_run_does_not_learn_what_it_writes(tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.txt").write_bytes(text.read_bytes())
    for output in (folder / "runs", folder):  # what else is in the folder is text
        assert train(output, folder)[0] == 0
        assert (output / "sample.txt").is_file()
        assert train(output, folder, "--resume")[0] == 0
    (tmp_path / "empty").mkdir()
    code, _, err = train(tmp_path / "run", tmp_path / "empty")
    assert (code, err) == (2, f"error: --text must hold files, found none in {tmp_path / 'empty'}\n")


@pytest.mark.slow
def test_earlier_run_is_neither_overwritten_nor_ignored(tmp_path: Path, text: Path) -> None:
    assert train(tmp_path / "run", text)[0] == 0
    code, _, err = train(tmp_path / "run", text)
    assert code == 2
    assert err.startswith("error: --output must hold no earlier run, got ")
    assert train(tmp_path / "run", text, "--resume")[0] == 0
    assert train(tmp_path / "run", text, "--overwrite")[0] == 0
    code, _, err = train(tmp_path / "run", text, "--resume", "--seed=3")
    assert (code, err) == (2, f"error: --resume must use the checkpoint's seed=0, got 3; {RESUMED}\n")


@pytest.mark.slow
def test_overwrite_empties_a_folder_behind_a_link(tmp_path: Path, text: Path) -> None:
    assert train(tmp_path / "run", text)[0] == 0
    (tmp_path / "run" / "dilated").rename(tmp_path / "disk")
    (tmp_path / "run" / "dilated").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "checkpoint-99").mkdir()
    assert train(tmp_path / "run", text, "--overwrite")[0] == 0
    assert (tmp_path / "run" / "dilated").is_symlink()
    assert checkpoint.latest(tmp_path / "disk") == tmp_path / "disk" / "checkpoint-4"


@pytest.mark.slow
def test_resume_if_any_starts_and_goes_on(tmp_path: Path, text: Path) -> None:
    assert "step 0 of 4" in train(tmp_path / "run", text, "--resume-if-any")[1]
    assert "step 4 of 4" in train(tmp_path / "run", text, "--resume-if-any", "--dense")[1]
    code, _, err = train(tmp_path / "run", text, "--resume-if-any", "--seed=3")
    assert (code, err) == (2, f"error: --resume must use the checkpoint's seed=0, got 3; {RESUMED}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume-if-any", "--overwrite"], "--resume-if-any must come without --overwrite, got both"),
        (["--resume-if-any", "--resume"], "--resume must come without --resume-if-any, got both"),
        (["--resume"], "--resume must find a checkpoint, none in"),
        (["--resume", "--overwrite"], "--resume must come without --overwrite, got both"),
        (["--segment-lengths=13,x"], "--segment-lengths must be integers separated by commas, got '13,x'"),
        (["--dilation-rates=1"], "--dilation-rates must hold one rate per segment length=2, got (1,)"),
        (["--dilation-rates=1,0"], "--dilation-rates[1] must be in [1, --segment-lengths[1]=26], got 0"),
        (["--embed-dim=25"], "--embed-dim must be a multiple of 2 * --heads=4, got 25"),
        (["--dtype=float8"], "--dtype must be 'auto', 'float32' or 'bfloat16', got 'float8'"),
        (["--device=nothing"], "--device must be a device that torch can use here, got 'nothing'"),
        (["--tokens=5000"], "--text must hold at least 10002 bytes for --tokens 5000, got 4545"),
        (["--text=/nowhere"], "--text must be a file or folder that exists, got /nowhere"),
    ],
)
def test_train_refuses_with_one_line_and_exit_code_2(tmp_path: Path, text: Path, arguments: list[str], message: str) -> None:
    code, _, err = train(tmp_path / "run", text, *arguments)
    assert code == 2
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert checkpoint.latest(tmp_path / "run" / "dilated") is None


def test_train_refuses_a_folder_it_cannot_write(tmp_path: Path, text: Path) -> None:
    code, _, err = train(text / "run", text)
    assert code == 2
    assert err.startswith("error: --output must be a folder that can be written, got ")
