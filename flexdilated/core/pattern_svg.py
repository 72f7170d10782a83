"""A small picture of branches as SVG text, for notebooks: integers in, text out. It imports nothing, so patterns may use it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["WINDOW_COLOR", "branches_svg"]

SIDE = 160  # of the square, in pixels
MOST_SQUARES = 64  # of a branch; more are a band
MOST_LINES = 8
LINE = 17
WINDOW_COLOR = "#c51b8a"  # in every picture; safe for colour-blind readers beside blue
FONT = 'font-size="12" font-family="sans-serif" fill="currentColor"'  # as the page writes, light or dark


def branches_svg(branches: Sequence[tuple[int, int]], window: int, global_tokens: int, title: str, words: Sequence[str]) -> str:
    """Queries down, keys across: the segments of every branch on the diagonal of the longest one, darker where more pairs attend.

    A window is a band along the diagonal, and global tokens are the first rows and columns.
    `title`: what a screen reader says. `words`: lines beside the picture.
    """
    longest = max((length for length, _ in branches), default=4 * max(window, global_tokens))
    shapes = []
    for length, rate in sorted(set(branches), reverse=True):
        side = SIDE * length / longest
        # Of a segment a head keeps one key in `rate`.
        style = f'fill="#1d91c0" fill-opacity="{0.15 + 0.6 / rate:.3f}" stroke="#225ea8" stroke-width="0.5"'
        if longest > MOST_SQUARES * length:
            shapes.append(f'<path d="M0 0 L{SIDE} {SIDE}" stroke="#225ea8" stroke-width="{max(1.0, side):.2f}"/>')
            continue
        for start in range(0, longest, length):
            corner, size = SIDE * start / longest, SIDE * min(length, longest - start) / longest
            shapes.append(f'<rect x="{corner:.2f}" y="{corner:.2f}" width="{size:.2f}" height="{size:.2f}" {style}/>')
    if window:
        edge = SIDE * min(window, longest) / longest
        points = ((0, 0), (edge, 0), (SIDE, SIDE - edge), (SIDE, SIDE), (SIDE - edge, SIDE), (0, edge))
        corners = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        shapes.append(f'<polygon points="{corners}" fill="{WINDOW_COLOR}" fill-opacity="0.6" stroke="{WINDOW_COLOR}"/>')
    if global_tokens:
        edge = SIDE * min(global_tokens, longest) / longest
        path = f"M0 0 H{SIDE} V{edge:.2f} H{edge:.2f} V{SIDE} H0 Z"
        shapes.append(f'<path d="{path}" fill="{WINDOW_COLOR}" fill-opacity="0.6" stroke="{WINDOW_COLOR}"/>')
    lines = [*words[:MOST_LINES], *(["..."] if len(words) > MOST_LINES else [])]
    texts = [f'<text x="{SIDE + 14}" y="{LINE * (i + 1)}" {FONT}>{_escaped(line)}</text>' for i, line in enumerate(lines)]
    width, height = SIDE + 24 + 7 * max(map(len, lines)), max(SIDE, LINE * len(lines)) + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="-3 -3 {width} {height}" role="img">'
        f"<title>{_escaped(title)}</title>{''.join(shapes)}{''.join(texts)}</svg>"
    )


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
