"""The scripts of docs/slide_training: what they read, train, save and refuse."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from docs.slide_training import finetune as finetuning
from docs.slide_training import pretrain as pretraining
from docs.slide_training.data import IN_CHANS, Slide, make_slides, make_smooth_slides, packs, read_slides, split
from docs.slide_training.finetune import SlideClassifier, accuracy, fit
from docs.slide_training.pretrain import MaskedTiles, hide, pretrain
from flexdilated import DilatedPattern
from flexdilated.slides.gigapath import ARCHITECTURES, Architecture, LongNetViT, create_model
from tests.commands import invoke
from tests.slides.tools import draw_tiles, write_trident
from tests.tolerances import SINGLE

SIDE = 6
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")


def encoder(pattern: DilatedPattern, depth: int = 1, **options: object) -> LongNetViT:
    sizes = {"in_chans": IN_CHANS, "embed_dim": 32, "depth": depth, "num_heads": 2, "slide_ngrids": SIDE}
    return LongNetViT(**{**sizes, "pattern": pattern, "dropout": 0.0, "drop_path_rate": 0.0, **options})


LONG = DilatedPattern((SIDE, 2 * SIDE**2), (1, 1))


def write_cohort(folder: Path, count: int = 6) -> Path:
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


def test_a_slide_that_cannot_be_read_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_cohort(tmp_path)
    (folder / "y" / "s1.h5").write_bytes(b"")
    write_trident(folder, "x/s2", torch.full((11, 7), torch.nan), draw_tiles(11)[1])
    write_trident(folder, "x/s4", torch.randn(11, 5), draw_tiles(11)[1])
    slides, classes = read_slides(folder, tmp_path / "labels.csv")
    assert classes == ["normal", "tumour"]
    assert [len(slide.x) for slide in slides] == [23, 25]
    err = capsys.readouterr().err
    assert f"error: '{folder / 'y' / 's1.h5'}' is damaged or no whole .h5 file: " in err
    assert f"error: '{folder / 'x' / 's2.h5'}' embeddings must be finite, got nan in tile 0" in err
    assert f"error: '{folder / 'x' / 's4.h5'}' must have as wide embeddings as the first slide=7, got 5" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,label\nx/s0,a\n", "labels must have the columns slide and label, got name, label"),
        ("slide,label\nx/s0,a\nx/s0,b\n", "labels must have one label for each slide, got line 3 of 'x/s0'"),
        ("slide,label\nx/s0,\n", "labels must have one label for each slide, got line 2 of 'x/s0'"),
    ],
)
def test_labels_that_are_none_are_refused(tmp_path: Path, text: str, message: str) -> None:
    folder = write_cohort(tmp_path)
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_slides(folder, tmp_path / "labels.csv")


def test_slides_of_one_patient_are_never_on_both_sides() -> None:
    slides = [slide._replace(patient=f"p{i % 13}") for i, slide in enumerate(make_slides(100, side=SIDE))]
    train, test = split(slides)
    assert len(train) + len(test) == 100
    assert not {slide.patient for slide in train} & {slide.patient for slide in test}
    assert 20 <= len(test) < 20 + 8  # a patient has 7 or 8
    assert [len(part) for part in split(slides[:2])] == [1, 1]
    other: Sequence[Slide] = [slide._replace(patient="p") for slide in slides]
    with pytest.raises(ValueError, match="slides must be of at least two patients, to train on one and hold out the other, got 1"):
        split(other)


def test_a_table_of_excel_with_patients_is_read(tmp_path: Path) -> None:
    folder = write_cohort(tmp_path)
    (tmp_path / "labels.csv").write_text("slide,label,patient\nx/s0,a,p\nx/s2,b,p\nx/s4,b,\n", encoding="utf-8-sig")
    slides, classes = read_slides(folder, tmp_path / "labels.csv")
    assert [(classes[slide.label], slide.patient) for slide in slides] == [("a", "p"), ("b", "p"), ("b", "x/s4")]


def test_the_scripts_take_a_cohort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
    printed = capsys.readouterr().out
    assert "accuracy on 1 slides that it has not seen" in printed
    assert re.findall(r"(\w+): (\d) slides to train on, (\d) held out", printed)[0][0] == "normal"
    model, classes = finetuning.load(classifier)
    assert (classes, model.training) == (["normal", "tumour"], False)
    assert all(torch.equal(a, b) for a, b in zip(model.encoder.parameters(), found.parameters()))
    for options, message in (
        (["--epochs=0"], "--epochs, --token-budget and --accumulate must be at least 1"),
        ([f"--labels={classifier.with_name('none.csv')}"], "No such file or directory"),
        (["--magnification=40"], "no slide of '"),
    ):
        monkeypatch.setattr("sys.argv", ["finetune", str(folder), labels, "--tune=head", *fixed, *options])
        with pytest.raises(SystemExit, match="2"):
            finetuning.main()
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_fine_tuning_learns() -> None:
    slides = make_slides(420, side=SIDE)
    test, train = slides[:120], slides[120:]
    model = SlideClassifier(encoder(LONG), 2, tune="all").train()
    losses = fit(model, train, epochs=3, learning_rate=6e-3, token_budget=128)
    assert losses[-1] < 0.8 * losses[0]
    assert accuracy(model, test) > 0.75  # 120 coins show 0.75 once in 10 million times


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


@needs_peft
@pytest.mark.slow
def test_adapters_alone_are_trained() -> None:
    model = SlideClassifier(encoder(LONG), 2, tune="lora").train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fit(model, make_slides(8, side=SIDE), epochs=2)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}
    assert changed
    assert all("lora" in name or name.startswith("head") for name in changed)


@pytest.mark.slow
@pytest.mark.parametrize("tune", [pytest.param("lora", marks=needs_peft), "all"])
def test_a_saved_classifier_classifies_as_before_and_commands_draw_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tune: finetuning.Tune
) -> None:
    monkeypatch.setitem(ARCHITECTURES, "tiny", Architecture(32, 1, 2))
    model = SlideClassifier(create_model(None, "tiny", 7), 3, tune=tune).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    path, classes = tmp_path / "all.pth", ("benign", "grey $", "malignant")
    finetuning.save(model, classes, "tiny", path)
    x, coords = draw_tiles(23)
    (pack,) = packs([Slide(x, coords // 2, 0, "")], 100)
    logits = model(pack)
    again, named = finetuning.load(path)
    torch.testing.assert_close(again(pack), logits, **SINGLE)
    assert named == list(classes)
    tiles = write_trident(tmp_path, "slide", x, coords)
    fixed = (tiles, f"--weights={path}", "--device=cpu")  # the file says the architecture and the width of a tile
    for name, share in zip(classes, logits.softmax(-1)[0].tolist()):
        code, out, err = invoke("slides", "map", *fixed, "--class", name, f"--output={tmp_path / 'map.csv'}", "--overwrite")
        assert (code, err) == (0, "")
        assert out == f"wrote 1 map of 23 tiles to '{tmp_path / 'map.csv'}'; probability of '{name}': {share:.1%}\n"
    assert invoke("slides", "map", *fixed, "--class", "grey $", f"--output={tmp_path / 'map.png'}")[::2] == (0, "")
    assert invoke("slides", "encode", *fixed, f"--output={tmp_path / 'e.pt'}")[::2] == (0, "")
    expected = model.encoder(pack.x, pack.coords)[0]
    torch.testing.assert_close(torch.load(tmp_path / "e.pt")["slide_embed"], expected, **SINGLE)
    for more, message in (
        (["--class=x"], "--class must be one of the classes in --weights, benign, grey $, malignant, got 'x'"),
        (["--class=benign", "--tile=1"], "--class must come without --tile, got --tile 1"),
    ):
        assert invoke("slides", "map", *fixed, *more, "--output=a.csv") == (2, "", f"error: {message}\n")


def test_hidden_tiles_do_not_see_themselves() -> None:
    """What is hidden is in the target alone: another embedding of a hidden tile moves no prediction."""
    slides = make_smooth_slides(3, side=SIDE)
    (pack,) = packs(slides, 10_000)
    hidden = hide(pack.x.shape[1], 0.5, torch.Generator().manual_seed(1))
    model = MaskedTiles(encoder(LONG)).eval()
    nn.init.normal_(model.mask_token)
    found: list[torch.Tensor] = []
    model.decoder.register_forward_hook(lambda module, args, out: found.append(out))
    for x in (pack.x, torch.where(hidden[None, :, None], torch.randn_like(pack.x), pack.x)):
        model(pack._replace(x=x), hidden)
    assert found[0].shape == (int(hidden.sum()), IN_CHANS)
    assert torch.equal(*found)


def test_a_pack_of_one_tile_has_a_hidden_one() -> None:
    """A mean over none is NaN, and so would be every weight after one step."""
    generator = torch.Generator().manual_seed(0)
    assert [int(hide(count, 0.3, generator).sum()) for count in (1, 2, 10, 100)] == [1, 1, 3, 30]
    model = MaskedTiles(encoder(LONG)).train()
    slides = [slide._replace(x=slide.x[:1], coords=slide.coords[:1]) for slide in make_smooth_slides(9, side=SIDE)]
    assert all(loss < 100 for loss in pretrain(model, slides, epochs=2, learning_rate=1e-3, token_budget=1))
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
