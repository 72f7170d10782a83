"""Training: data, schedule, exact resumption, checkpoints."""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM
from flexdilated import train as training
from flexdilated.train import STATE_FILE, Trainer, TrainOptions, UserError, draw_losses, latest_checkpoint, load_corpus, sample

CONFIG = LongNetConfig(
    vocab_size=256,
    embed_dim=24,
    num_layers=2,
    num_heads=2,
    pattern=DilatedPattern((13, 26), (1, 2)),
    dropout_p=0.1,
    attention_dropout_p=0.1,
)


def make_options(**changes: object) -> TrainOptions:
    values: dict[str, object] = {
        "sequence_length": 37,
        "batch_size": 3,
        "steps": 7,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "clip": 1.0,
        "seed": 5,
        "eval_every": 3,
        "eval_sequences": 5,
        "checkpoint_every": 2,
        "dtype": "float32",
        "compile": False,
    }
    return TrainOptions(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 101)
    return path


def make_trainer(folder: Path, text: Path, **changes: object) -> Trainer:
    options = make_options(**changes)
    return Trainer(CONFIG, options, load_corpus([text], options.sequence_length), folder, torch.device("cpu"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def losses(trainer: Trainer) -> list[tuple[float, ...]]:
    return [tuple(value for name, value in entry.items() if name != "seconds") for entry in trainer.history]


def test_corpus_holds_out_the_end_and_nothing_overlaps(text: Path) -> None:
    corpus = load_corpus([text], 37)
    assert corpus.held_out.numel() == int(text.stat().st_size * 0.05)
    assert bytes(corpus.train.tolist()) + bytes(corpus.held_out.tolist()) == text.read_bytes()
    short = load_corpus([text], 1009)
    assert short.held_out.numel() == 1010


def test_corpus_reads_folders_and_several_paths(tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"a" * 211)
    (folder / ".hidden").write_bytes(b"h" * 223)
    corpus = load_corpus([folder, text], 37)
    assert corpus.train.numel() + corpus.held_out.numel() == 211 + text.stat().st_size


def test_text_is_the_same_in_whatever_order_the_filesystem_lists_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{folder}/{name}.txt" for folder in ("a", "b/c", "d") for name in ("same", "other")]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name * 31)
    expected = load_corpus([tmp_path], 37).digest
    listed = Path.rglob
    for order in (sorted, lambda found: sorted(found, reverse=True)):
        monkeypatch.setattr(Path, "rglob", lambda self, pattern, order=order: order(listed(self, pattern)))
        assert load_corpus([tmp_path], 37).digest == expected


def test_only_what_is_hidden_below_the_given_folder_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ".cache" / "text"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"a" * 211)
    (folder / ".b.txt").write_bytes(b"b" * 223)
    (folder / os.fsdecode(b"\xff.txt")).write_bytes(b"c" * 227)  # a name that is no UTF-8
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for path in (folder, Path("../.cache/text")):
        corpus = load_corpus([path], 37)
        assert corpus.train.numel() + corpus.held_out.numel() == 211 + 227


def test_default_corpus_is_the_standard_library() -> None:
    corpus = load_corpus([], 4096)
    assert corpus.train.numel() > 3_000_000
    assert corpus.digest == load_corpus([], 4096).digest


def test_batches_are_a_function_of_seed_and_step(text: Path) -> None:
    corpus = load_corpus([text], 37)
    assert corpus.batch(3, make_options()).shape == (3, 38)
    assert torch.equal(corpus.batch(3, make_options()), corpus.batch(3, make_options()))
    assert not torch.equal(corpus.batch(3, make_options()), corpus.batch(4, make_options()))
    assert not torch.equal(corpus.batch(3, make_options()), corpus.batch(3, make_options(seed=6)))


@pytest.mark.parametrize("eval_sequences", [1, 2, 5, 1000])
def test_held_out_sequences_do_not_overlap(text: Path, eval_sequences: int) -> None:
    options = make_options(eval_sequences=eval_sequences)
    corpus = load_corpus([text], 37)
    batches = list(corpus.held_out_batches(options))
    rows = torch.cat(batches)
    assert 1 <= rows.shape[0] <= eval_sequences
    assert torch.equal(rows[:, :-1].flatten(), corpus.held_out[: 37 * rows.shape[0]].long())


def test_missing_empty_and_short_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--text must be a file or folder that exists, got .*nowhere"):
        load_corpus([tmp_path / "nowhere"], 37)
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(UserError, match=r"--text must hold some bytes, got 1 empty file"):
        load_corpus([empty], 37)
    short = tmp_path / "short"
    short.write_bytes(b"x" * 75)
    with pytest.raises(UserError, match=r"--text must hold at least 76 bytes for --tokens 37, got 75"):
        load_corpus([short], 37)
    short.write_bytes(b"x" * 76)
    assert load_corpus([short], 37).train.numel() == 38


def test_learning_rate_warms_up_and_ends_at_a_tenth(tmp_path: Path, text: Path) -> None:
    trainer = make_trainer(tmp_path / "run", text, steps=11)
    rates = [trainer._learning_rate(step) for step in range(11)]
    assert rates[:3] == pytest.approx([1.5e-3, 3e-3, 3e-3])
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert 0.1 * 3e-3 <= rates[-1] < 0.15 * 3e-3


def test_loss_falls_and_is_in_bits_per_byte(tmp_path: Path, text: Path) -> None:
    trainer = make_trainer(tmp_path / "run", text, steps=40, eval_every=40, learning_rate=1e-2)
    assert trainer.run(lambda _: None)
    assert trainer.history[0]["train"] > 6.0
    assert trainer.held_out is not None
    assert trainer.held_out < 4.0
    with torch.no_grad():
        trainer.model.eval()
        nats = [trainer._loss(tokens).item() for tokens in trainer.corpus.held_out_batches(trainer.options)]
    assert trainer.held_out == pytest.approx(sum(nats) / len(nats) / math.log(2))


def test_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path, text: Path) -> None:
    whole = make_trainer(tmp_path / "whole", text)
    assert whole.run(lambda _: None)

    first = make_trainer(tmp_path / "parts", text)
    assert not first.run(lambda trainer: os.kill(os.getpid(), signal.SIGINT) if trainer.step == 3 else None)
    assert first.step == 3
    second = make_trainer(tmp_path / "parts", text)
    second.resume()
    assert second.step == 3
    assert second.run(lambda _: None)
    assert losses(second) == losses(whole)
    for a, b in zip(second.model.parameters(), whole.model.parameters()):
        assert torch.equal(a, b)


def test_second_signal_stops_at_once(tmp_path: Path, text: Path) -> None:
    trainer = make_trainer(tmp_path / "run", text)

    def twice(_: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(twice)
    assert signal.getsignal(signal.SIGINT) is before


def test_resume_refuses_another_configuration(tmp_path: Path, text: Path) -> None:
    make_trainer(tmp_path / "run", text).save()
    with pytest.raises(UserError, match=r"--resume must use the checkpoint's seed=5, got 6"):
        make_trainer(tmp_path / "run", text, seed=6).resume()
    text.write_bytes(text.read_bytes() + b"!")
    with pytest.raises(UserError, match=r"--resume must use the checkpoint's text="):
        make_trainer(tmp_path / "run", text).resume()


def test_resume_refuses_a_missing_or_damaged_checkpoint(tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path / "run", text)
    with pytest.raises(UserError, match=r"--resume must find a checkpoint, none in"):
        trainer.resume()
    trainer.run(lambda _: None)
    checkpoint = contents(trainer.folder)
    state, tensors = (next(name for name in checkpoint if name.endswith(end)) for end in (STATE_FILE, ".safetensors"))

    def damaged(name: str, content: bytes | None) -> None:
        path = trainer.folder / name
        path.unlink() if content is None else path.write_bytes(content)
        again = make_trainer(tmp_path / "run", text)
        with pytest.raises(UserError, match=r"--resume must find a whole checkpoint, got .*checkpoint-7: [^\n]+$"):
            again.resume()
        assert again.step == 0
        path.write_bytes(checkpoint[name])

    for content in (None, b"", checkpoint[tensors][:999], checkpoint[tensors][:-1]):
        damaged(tensors, content)
    for content in (None, b"", checkpoint[state][:-1], b"[]", b"{}", b'{"identity": 3}', b"\xff"):
        damaged(state, content)
    assert not [record for record in caplog.records if "NullHandler" not in record.name and record.levelno >= logging.WARNING]
    make_trainer(tmp_path / "run", text).resume()


def test_resume_refuses_the_tensors_of_another_model(tmp_path: Path, text: Path) -> None:
    trainer = make_trainer(tmp_path / "run", text)
    trainer.save()
    checkpoint = latest_checkpoint(trainer.folder)
    assert checkpoint is not None
    (tensors,) = checkpoint.glob("*.safetensors")
    whole = {name: value.clone() for name, value in load_file(tensors).items()}  # the file, which changes, is mapped
    bias = next(name for name in whole if name.endswith("bias"))
    save_file({name: value for name, value in whole.items() if name != bias}, tensors)
    with pytest.raises(UserError, match=rf"--resume must find a whole checkpoint, got .*{bias}"):
        trainer.resume()
    save_file(whole | {bias: whole[bias][:-1].clone()}, tensors)
    with pytest.raises(UserError, match=rf"--resume must find a whole checkpoint, got .*{bias}"):
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
    latest = latest_checkpoint(trainer.folder)
    assert latest is not None
    assert latest.name == "checkpoint-9"
    latest.rename(trainer.folder / "checkpoint-10")
    trainer.save()
    assert latest_checkpoint(trainer.folder) == trainer.folder / "checkpoint-9"
    trainer.save()  # of the same step again
    assert sorted(path.name for path in trainer.folder.iterdir()) == ["checkpoint-9", "checkpoint-eleven"]


def test_saving_before_the_first_step_changes_nothing(tmp_path: Path, text: Path) -> None:
    plain, saved = make_trainer(tmp_path / "plain", text), make_trainer(tmp_path / "saved", text)
    saved.save()
    resumed = make_trainer(tmp_path / "saved", text)
    resumed.resume()
    for trainer in (plain, saved, resumed):
        trainer.run(lambda _: None)
    assert losses(saved) == losses(resumed) == losses(plain)


def test_failed_save_keeps_the_old_checkpoint(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path / "run", text)
    trainer.save()
    before = contents(trainer.folder)

    def broken(tensors: dict[str, torch.Tensor], folder: Path) -> None:
        written(tensors, folder)
        raise OSError("No space left on device")

    written = training._write_tensors
    monkeypatch.setattr(training, "_write_tensors", broken)
    for trainer.step in (0, 1):
        with pytest.raises(UserError, match=r"the checkpoint must be writable, got .*No space left"):
            trainer.save()
        assert contents(trainer.folder) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_told_in_one_line(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path / "run", text)
    written = training._write_tensors

    def full(tensors: dict[str, torch.Tensor], folder: Path) -> None:
        (folder / "model-00001-of-00001.safetensors").symlink_to("/dev/full")
        written(tensors, folder)

    monkeypatch.setattr(training, "_write_tensors", full)
    with pytest.raises(UserError, match=r"^the checkpoint must be writable, got .*checkpoint-0: [^\n]*No space left[^\n]*$"):
        trainer.save()
    assert contents(trainer.folder) == {}


def test_unwritable_folder_is_refused(tmp_path: Path, text: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output must be a folder that can be written, got .*file"):
        make_trainer(tmp_path / "file" / "run", text)


def test_infinite_loss_ends_the_run_before_the_update(tmp_path: Path, text: Path) -> None:
    trainer = make_trainer(tmp_path / "run", text)
    with torch.no_grad():
        trainer.model.layer_norm.weight.fill_(math.nan)
    weights = trainer.model.embedding.weight.clone()
    with pytest.raises(UserError, match=r"the loss must stay finite, got nan at step 0"):
        trainer.run(lambda _: None)
    assert torch.equal(trainer.model.embedding.weight, weights)


def test_gradient_that_is_not_finite_ends_the_run_before_the_update(tmp_path: Path, text: Path) -> None:
    trainer = make_trainer(tmp_path / "run", text)
    trainer.model.embedding.weight.register_hook(lambda grad: grad * math.inf)
    weights = trainer.model.layer_norm.weight.clone()
    with pytest.raises(UserError, match=r"^the gradient's norm must stay finite, got (nan|inf) at step 0; start anew with a lower"):
        trainer.run(lambda _: None)
    assert torch.equal(trainer.model.layer_norm.weight, weights)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_diverged_run_keeps_the_last_checkpoint_that_can_go_on(tmp_path: Path, text: Path, is_stopped: bool) -> None:
    trainer = make_trainer(tmp_path / "run", text)

    def diverge(now: Trainer) -> None:
        if now.step == 4:  # when a checkpoint is due
            with torch.no_grad():
                now.model.layer_norm.weight.fill_(math.nan)
            if is_stopped:
                os.kill(os.getpid(), signal.SIGINT)

    advice = r"start anew with a lower --learning-rate, by --overwrite or in another --output"
    kept = r"\(the checkpoint of step 2, of finite losses, is kept\)"
    with pytest.raises(UserError, match=rf"^the loss must stay finite, got nan at step 4; {advice} {kept}$"):
        trainer.run(diverge)
    again = make_trainer(tmp_path / "run", text)
    again.resume()
    assert again.step == 2
    assert again.run(lambda _: None)


def test_bfloat16_and_compiled_steps_follow_the_plain_ones(tmp_path: Path, text: Path) -> None:
    plain = make_trainer(tmp_path / "plain", text, steps=3)
    low = make_trainer(tmp_path / "low", text, steps=3, dtype="bfloat16", compile=True)
    plain.run(lambda _: None)
    low.run(lambda _: None)
    for a, b in zip(plain.history, low.history):
        assert a["train"] == pytest.approx(b["train"], rel=0.05)  # dropout differs under compilation


def test_sample_continues_the_prompt_reproducibly() -> None:
    torch.manual_seed(0)
    model = LongNetLM(CONFIG)
    written = sample(model, b"import ", num_bytes=11, temperature=0.7, seed=3)
    assert written.startswith(b"import ")
    assert len(written) == 18
    assert written == sample(model, b"import ", num_bytes=11, temperature=0.7, seed=3)


def test_picture_of_the_losses_is_written(tmp_path: Path, text: Path) -> None:
    trainer = make_trainer(tmp_path / "run", text)
    trainer.run(lambda _: None)
    draw_losses({"dilated": trainer, "dense": trainer}, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "loss.png.part").exists()
