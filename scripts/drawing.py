"""Figures of matplotlib that are equal byte for byte when they are drawn again: SVG with real text, or PNG.

Invariant: neither a date nor a random id enters a file. matplotlib is the optional extra `plot`; it is loaded when the first
figure is made, so that scripts that only read traces run without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and no font is embedded
    "svg.hashsalt": "jaxrl_post",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
INK = "#222222"
SUFFIXES = (".svg", ".png")


def figure(width: float, height: float) -> Any:
    """Returns an empty white figure, in inches.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("pictures need matplotlib, which is not installed: pip install -e '.[plot]'") from error
    matplotlib.rcParams.update(STYLE)
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def rectangles(axes: Any, shapes: Sequence[tuple[float, float, float, float]], color: str, label: str = "") -> None:
    """Fills rectangles (left, bottom, width, height), in the units of the axes, as one collection named `label`."""
    from matplotlib.collections import PolyCollection

    corners = [((x, y), (x + w, y), (x + w, y + h), (x, y + h)) for x, y, w, h in shapes]
    axes.add_collection(PolyCollection(corners, facecolors=color, edgecolors="none", linewidths=0, label=label))


def save(picture: Any, path: Path) -> None:
    """Writes a figure to a file that ends in .svg or .png."""
    picture.savefig(
        path, dpi=150, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
    )
