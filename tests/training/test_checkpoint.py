"""Checkpoints: whole or not there, never pickled, refused where they do not fit."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from flexdilated.training import checkpoint
from flexdilated.training.options import UserError
from tests.training.runs import contents, losses, make_trainer


def test_resume_refuses_another_configuration(tmp_path: Path, text: Path) -> None:
    make_trainer(tmp_path / "run", text).save()
    with pytest.raises(UserError, match=r"--resume must use the checkpoint's seed=5, got 6"):
        make_trainer(tmp_path / "run", text, seed=6).resume()
    text.write_bytes(text.read_bytes() + b"!")
    with pytest.raises(UserError, match=r"--resume must use the checkpoint's text="):
        make_trainer(tmp_path / "run", text).resume()


def test_resume_refuses_a_missing_or_damaged_checkpoint(tmp_path: Path, text: Path) -> None:
    trainer = make_trainer(tmp_path / "run", text, steps=1)
    with pytest.raises(UserError, match=r"--resume must find a checkpoint, none in"):
        trainer.resume()
    trainer.run(lambda _: None)
    whole = contents(trainer.folder)
    state, tensors = (next(name for name in whole if name.endswith(end)) for end in (checkpoint.STATE_FILE, ".safetensors"))
    for name, found in (
        (tensors, (None, b"", whole[tensors][:-1])),
        (state, (None, b"", whole[state][:-1], b"[]", b"{}", b'{"identity": 3}', b"\xff")),
    ):
        for content in found:
            path = trainer.folder / name
            path.unlink() if content is None else path.write_bytes(content)
            with pytest.raises(UserError, match=r"--resume must find a whole checkpoint, got .*checkpoint-1: "):
                trainer.resume()
            path.write_bytes(whole[name])
    trainer.resume()


def test_checkpoint_is_not_pickled(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path / "run", text, steps=2)
    trainer.run(lambda _: None)
    kinds = {Path(name).suffix for name in contents(trainer.folder)}
    assert kinds == {".json", ".safetensors"}
    for module in (pickle, torch):
        monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("a checkpoint was unpickled"))
    again = make_trainer(tmp_path / "run", text, steps=2)
    again.resume()
    assert losses(again) == losses(trainer)


def test_latest_checkpoint_is_the_whole_one_of_the_highest_step(tmp_path: Path, text: Path) -> None:
    trainer = make_trainer(tmp_path / "run", text)
    trainer.step = 9
    trainer.save()
    (trainer.folder / ".checkpoint-11.part").mkdir()  # of a process killed while it wrote
    (trainer.folder / "checkpoint-eleven").mkdir()
    path = checkpoint.latest(trainer.folder)
    assert path is not None
    assert path.name == "checkpoint-9"
    (trainer.folder / "checkpoint-10").mkdir()
    assert checkpoint.latest(trainer.folder) == trainer.folder / "checkpoint-10"
    path.rename(trainer.folder / "checkpoint-10")  # in place of the empty folder
    trainer.save()
    assert checkpoint.latest(trainer.folder) == trainer.folder / "checkpoint-9"
    assert sorted(path.name for path in trainer.folder.iterdir()) == ["checkpoint-9", "checkpoint-eleven"]


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_failed_save_keeps_the_old_one(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    trainer = make_trainer(tmp_path / "run", text)
    trainer.save()
    before = contents(trainer.folder)

    def broken(tensors: dict[str, torch.Tensor], path: Path) -> None:
        save_file(tensors, path)
        raise kind("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", broken)
    trainer.step = 1
    with pytest.raises(UserError, match=r"the checkpoint must be writable, got .*No space left"):
        trainer.save()
    assert {name: held for name, held in contents(trainer.folder).items() if not name.startswith(".")} == before
