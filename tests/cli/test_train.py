"""The training command: what it writes, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexdilated import LongNetLM, __version__
from flexdilated.training import checkpoint
from tests.commands import invoke
from tests.training import runs

RESUMED = "give the options and text of that run, or start another in another --output"


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
