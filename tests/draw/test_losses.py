"""The picture of training runs."""

from pathlib import Path

from flexdilated.draw.figure import write
from flexdilated.draw.losses import draw_losses


def test_picture_shows_every_loss_against_bytes_seen(tmp_path: Path) -> None:
    history = [{"step": 1, "train": 7.5}, {"step": 2, "train": 6.25, "held_out": 6.5}, {"step": 3, "train": 5.0, "held_out": 5.5}]
    figure = draw_losses({"dilated": history, "dense": history[:2]}, bytes_per_step=500_000)
    (axes,) = figure.axes
    drawn = [[x.tolist() for x in line.get_data()] for line in axes.lines]
    assert drawn == [[[0.5, 1.0, 1.5], [7.5, 6.25, 5.0]], [[1.0, 1.5], [6.5, 5.5]], [[0.5, 1.0], [7.5, 6.25]], [[1.0], [6.5]]]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == [
        "dilated: training batches",
        "dilated: 5.50 bits per held-out byte",
        "dense: training batches",
        "dense: 6.50 bits per held-out byte",
    ]
    write(figure, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
