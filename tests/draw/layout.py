"""Where the parts of a figure lie."""

from collections.abc import Iterable
from itertools import combinations

from matplotlib.artist import Artist
from matplotlib.figure import Figure


def assert_apart(figure: Figure, texts: Iterable[Artist]) -> None:
    """No text and no panel lies on another or outside."""
    extents = [text.get_window_extent() for text in texts] + [axes.bbox for axes in figure.axes]
    for a, b in combinations(extents, 2):
        assert a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0, (a, b)
    for extent in extents:
        assert 0 <= extent.x0 < extent.x1 <= figure.bbox.width
        assert 0 <= extent.y0 < extent.y1 <= figure.bbox.height


def texts_of_panels(figure: Figure) -> list[Artist]:
    """Titles, legends and the names of the axes that have one."""
    labels = [axis.label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    titles = [axes.title for axes in figure.axes]
    return [*figure.texts, *figure.legends, *titles, *(label for label in labels if label.get_text())]
