"""The text of a run: what is read, what is held out, which batches are drawn."""

import os
from pathlib import Path

import pytest
import torch

from flexdilated.training.corpus import load_corpus
from flexdilated.training.options import UserError
from tests.training.runs import make_options


def test_corpus_holds_out_the_end_and_nothing_overlaps(text: Path) -> None:
    corpus = load_corpus([text], 37)
    assert corpus.held_out.numel() == int(text.stat().st_size * 0.05)
    assert bytes(corpus.train.tolist()) + bytes(corpus.held_out.tolist()) == text.read_bytes()
    short = load_corpus([text], 1009)
    assert short.held_out.numel() == 1010


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


def test_only_what_is_hidden_below_the_folder_is_left_out(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ".cache" / "text"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"a" * 211)
    (folder / ".b.txt").write_bytes(b"b" * 223)
    (folder / os.fsdecode(b"\xff.txt")).write_bytes(b"c" * 227)  # a name that is no UTF-8
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for path in (folder, Path("../.cache/text")):
        corpus = load_corpus([path, text], 37)
        assert corpus.train.numel() + corpus.held_out.numel() == 211 + 227 + text.stat().st_size


def test_batches_are_a_function_of_seed_and_step(text: Path) -> None:
    corpus = load_corpus([text], 37)
    assert corpus.batch(3, make_options()).shape == (3, 38)
    assert torch.equal(corpus.batch(3, make_options()), corpus.batch(3, make_options()))
    assert not torch.equal(corpus.batch(3, make_options()), corpus.batch(4, make_options()))
    assert not torch.equal(corpus.batch(3, make_options()), corpus.batch(3, make_options(seed=6)))


@pytest.mark.parametrize("eval_sequences", [1, 5, 1000])
def test_held_out_sequences_do_not_overlap(text: Path, eval_sequences: int) -> None:
    options = make_options(eval_sequences=eval_sequences)
    corpus = load_corpus([text], 37)
    batches = list(corpus.held_out_batches(options))
    rows = torch.cat(batches)
    assert 1 <= rows.shape[0] <= eval_sequences
    assert torch.equal(rows[:, :-1].flatten(), corpus.held_out[: 37 * rows.shape[0]].long())


def test_missing_and_short_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_corpus([tmp_path / "nowhere"], 37)
    short = tmp_path / "short"
    short.write_bytes(b"x" * 75)
    with pytest.raises(UserError, match=r"--text must hold at least 76 bytes for --tokens 37, got 75"):
        load_corpus([short], 37)
    short.write_bytes(b"x" * 76)
    assert load_corpus([short], 37).train.numel() == 38
