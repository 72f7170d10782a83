"""The scripts of docs/slide_training: the encoder learns what a mean of tiles cannot, and finds masked tiles."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from docs.slide_training import finetune as finetuning
from docs.slide_training import pretrain as pretraining
from docs.slide_training.data import IN_CHANS, make_slides, make_smooth_slides, packs, read_slides
from docs.slide_training.finetune import SlideClassifier, accuracy, fit
from docs.slide_training.pretrain import MaskedTiles, pretrain
from flexdilated import DilatedPattern
from flexdilated.hub.gigapath import ARCHITECTURES, Architecture, LongNetViT, create_model
from tests.hub.slides.tools import draw_tiles, write_trident

SIDE = 6


def encoder(pattern: DilatedPattern, depth: int = 1, **options: object) -> LongNetViT:
    sizes = {"in_chans": IN_CHANS, "embed_dim": 32, "depth": depth, "num_heads": 2, "slide_ngrids": SIDE}
    return LongNetViT(**{**sizes, "pattern": pattern, "dropout": 0.0, "drop_path_rate": 0.0, **options})


LONG, SHORT = DilatedPattern((SIDE, 2 * SIDE**2), (1, 1)), DilatedPattern((SIDE,), (1,))


def write_cohort(folder: Path, count: int = 6) -> Path:
    """Slides as TRIDENT writes them, in two folders, and labels of all but the first."""
    names = [f"{'xy'[i % 2]}/s{i}" for i in range(count)]
    for i, name in enumerate(names):
        write_trident(folder / "slides", name, *draw_tiles(20 + i, seed=i, dtype=torch.float16))
    rows = [f"{name},{'normal' if i % 2 else 'tumour'}" for i, name in enumerate(names[1:])]
    (folder / "labels.csv").write_text("\n".join(["slide,label", *rows]))
    return folder / "slides"


def test_slides_are_read_with_their_labels_and_places(tmp_path: Path) -> None:
    folder = write_cohort(tmp_path)
    slides, classes = read_slides(folder, tmp_path / "labels.csv")
    assert classes == ["normal", "tumour"]
    assert [slide.label for slide in slides] == [1, 0, 1, 0, 1]
    for i, slide in enumerate(slides, 1):
        x, coords = draw_tiles(20 + i, seed=i, dtype=torch.float16)
        assert torch.equal(slide.x, x.float())
        assert torch.equal(slide.coords, coords // 512 * 256)
    unlabelled, _ = read_slides(folder)
    assert [len(slide.x) for slide in unlabelled] == [20, 22, 24, 21, 23, 25]
    (tmp_path / "labels.csv").write_text("slide,label\nx/s0,normal\nz/s9,normal\n")
    with pytest.raises(ValueError, match=r"labels must be of slides in '.*slides', got z/s9"):
        read_slides(folder, tmp_path / "labels.csv")


def test_the_scripts_take_a_cohort_and_what_they_write_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ARCHITECTURES, "tiny", Architecture(64, 1))
    folder, weights, classifier = write_cohort(tmp_path), tmp_path / "w.pth", tmp_path / "c.pth"
    fixed = ["--arch=tiny", "--epochs=1"]
    monkeypatch.setattr("sys.argv", ["pretrain", str(folder), f"--output={weights}", *fixed])
    pretraining.main()
    found = create_model(str(weights), "tiny", 7)
    assert any(bool((value != 0).any()) for name, value in found.state_dict().items() if "bias" in name)  # new ones have zeros
    labels = f"--labels={tmp_path / 'labels.csv'}"
    monkeypatch.setattr(
        "sys.argv", ["finetune", str(folder), labels, f"--weights={weights}", "--tune=head", f"--output={classifier}", *fixed]
    )
    finetuning.main()
    assert "accuracy on 1 slides that it has not seen" in capsys.readouterr().out
    said = torch.load(classifier)
    assert said["classes"] == ["normal", "tumour"]
    model = SlideClassifier(create_model(None, said["arch"], 7), 2, tune=said["tune"])
    model.load_state_dict(said["model"])
    assert all(torch.equal(a, b) for a, b in zip(model.encoder.parameters(), found.parameters()))


def test_pretraining_under_another_pattern_loads_under_that_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "tiny", Architecture(32, 1, 2))
    found = create_model(None, "tiny", IN_CHANS, pattern=LONG, order="hilbert", dropout=0.0, drop_path_rate=0.0)
    pretrain(MaskedTiles(found).train(), make_smooth_slides(4, side=SIDE), epochs=1, learning_rate=5e-3, token_budget=64)
    pretraining.save(found, tmp_path / "w.pth")
    again = create_model(str(tmp_path / "w.pth"), "tiny", IN_CHANS, pattern=LONG, order="hilbert").eval()
    (slide,) = make_smooth_slides(1, side=SIDE, seed=5)
    expected = found.eval()(slide.x[None], slide.coords[None])[0]
    assert torch.equal(again(slide.x[None], slide.coords[None])[0], expected)
    for options, message in (
        ({"order": "hilbert"}, "pattern must be that of the weights"),
        ({"pattern": LONG}, "order must be that"),
    ):
        with pytest.raises(ValueError, match=message):
            create_model(str(tmp_path / "w.pth"), "tiny", IN_CHANS, **options)


def test_packs_hold_every_slide_once_in_order() -> None:
    slides = make_slides(11, side=SIDE)
    found = list(packs(slides, 70))
    assert torch.equal(torch.cat([pack.x[0] for pack in found]), torch.cat([slide.x for slide in slides]))
    assert torch.cat([pack.labels for pack in found]).tolist() == [slide.label for slide in slides]
    assert all(pack.x.shape[1] == pack.cu_seqlens[-1] <= 70 for pack in found)


@pytest.mark.slow
def test_fine_tuning_learns_what_a_mean_of_tiles_cannot() -> None:
    slides = make_slides(600, side=SIDE)
    test, train = slides[:200], slides[200:]
    model = SlideClassifier(encoder(LONG), 2, tune="all").train()
    losses = fit(model, train, epochs=6, learning_rate=3e-3, token_budget=256)
    assert losses[-1] < 0.8 * losses[0]
    assert accuracy(model, test) > 0.65  # 200 coins show 0.65 once in 100,000 times
    # The best linear reader of the mean of tiles, and of their squares.
    means = torch.stack([torch.cat([slide.x.mean(0), slide.x.square().mean(0)]) for slide in slides])
    labels = torch.tensor([slide.label for slide in slides])
    reader = nn.Linear(2 * IN_CHANS, 2)
    optimizer = torch.optim.LBFGS(reader.parameters(), max_iter=50)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(reader(means[200:]), labels[200:]) + 1e-3 * reader.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert (reader(means[:200]).argmax(-1) == labels[:200]).double().mean() < 0.6


def test_the_label_lies_beyond_short_segments() -> None:
    """With short segments the class token sees the first rows alone: what is marked changes nothing."""
    (slide,) = make_slides(1, side=SIDE)
    marked = int(slide.x[:, 0].argmax())
    assert marked >= SIDE
    for pattern, is_seen in ((SHORT, False), (LONG, True)):
        model = encoder(pattern).eval()
        x = slide.x.clone()
        x[marked, 0] = 0.0
        same = torch.equal(model(slide.x[None], slide.coords[None])[0], model(x[None], slide.coords[None])[0])
        assert same is not is_seen


def test_accumulated_packs_give_the_gradient_of_one() -> None:
    slides = make_slides(9, side=SIDE)
    found = []
    for budget, accumulate in ((10_000, 1), (60, 100)):
        torch.manual_seed(1)
        model = SlideClassifier(encoder(LONG).double(), 2, tune="all").double().train()
        exact = [slide._replace(x=slide.x.double()) for slide in slides]
        fit(model, exact, epochs=1, learning_rate=1e-3, token_budget=budget, accumulate=accumulate)
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*found)


def test_a_frozen_encoder_stays_as_it_is() -> None:
    frozen = encoder(LONG, dropout=0.5)
    before = [parameter.clone() for parameter in frozen.parameters()]
    model = SlideClassifier(frozen, 2, tune="head").train()
    assert not frozen.training
    fit(model, make_slides(8, side=SIDE), epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(before, frozen.parameters()))


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_adapters_alone_are_trained() -> None:
    model = SlideClassifier(encoder(LONG), 2, tune="lora").train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fit(model, make_slides(8, side=SIDE), epochs=2)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}
    assert changed
    assert all("lora" in name or name.startswith("head") for name in changed)


def test_pretraining_finds_hidden_tiles_better_than_their_mean() -> None:
    slides = make_smooth_slides(24, side=SIDE)
    variance = torch.cat([slide.x for slide in slides]).var(dim=0).mean().item()
    model = MaskedTiles(encoder(LONG)).train()
    losses = pretrain(model, slides, epochs=25, learning_rate=5e-3, token_budget=256)
    assert losses[-1] < 0.9 * variance < losses[0]
