"""The loop: schedule, losses, exact resumption, stops, what ends a run."""

import math
import os
import signal
from pathlib import Path

import pytest
import torch

from flexdilated.training.options import UserError
from flexdilated.training.trainer import Trainer
from tests.training.runs import losses, make_trainer


def test_learning_rate_warms_up_and_ends_at_a_tenth(tmp_path: Path, text: Path) -> None:
    trainer = make_trainer(tmp_path / "run", text, steps=11)
    rates = [trainer._learning_rate(step) for step in range(11)]
    assert rates[:3] == pytest.approx([1.5e-3, 3e-3, 3e-3])
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert 0.1 * 3e-3 <= rates[-1] < 0.15 * 3e-3


@pytest.mark.slow
def test_loss_falls_and_is_in_bits_per_byte(tmp_path: Path, text: Path) -> None:
    trainer = make_trainer(tmp_path / "run", text, steps=25, eval_every=25, learning_rate=1e-2)
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


@pytest.mark.parametrize("is_stopped", [True, False])
def test_signal_that_ends_the_compiler_too_stops_with_a_checkpoint(is_stopped: bool, tmp_path: Path, text: Path) -> None:
    trainer = make_trainer(tmp_path / "run", text)

    def fail(_: torch.Tensor) -> torch.Tensor:
        if is_stopped:
            os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("C++ compile error")

    trainer.loss = fail
    if is_stopped:
        assert not trainer.run(lambda _: None)
    else:
        with pytest.raises(RuntimeError, match=r"C\+\+ compile error"):
            trainer.run(lambda _: None)
    assert (tmp_path / "run" / "checkpoint-0").is_dir() == is_stopped


def test_second_signal_stops_at_once(tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path / "run", text)

    def twice(_: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert "stopping after this step" in capfd.readouterr().err  # the first is answered as it comes
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(twice)
    assert signal.getsignal(signal.SIGINT) is before


def test_gradient_that_is_not_finite_ends_the_run_before_the_update(tmp_path: Path, text: Path) -> None:
    trainer = make_trainer(tmp_path / "run", text)
    trainer.model.embedding.weight.register_hook(lambda grad: grad * math.inf)
    weights = trainer.model.layer_norm.weight.clone()
    with pytest.raises(UserError, match=r"^the gradient must stay finite, got another at step 0 with a loss of .*; start again"):
        trainer.run(lambda _: None)
    assert torch.equal(trainer.model.layer_norm.weight, weights)
