"""Save charts as PNG, and as SVG that shows the value under the pointer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
MOST_POINTS = 200  # points per line with a tooltip


def save_chart(figure: Figure, path: Path) -> None:
    """Write a PNG to `path`, and next to it an SVG with the value of every point and bar as its title."""
    figure.savefig(path, dpi=130)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    ElementTree.register_namespace("", SVG)
    # Inside HTML only this prefix is read. With another, markers and ticks are not drawn.
    ElementTree.register_namespace("xlink", XLINK)
    chart = ElementTree.parse(path.with_suffix(".svg"))
    root = chart.getroot()
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    for axes in figure.axes:
        for tag, geometry, title in (*_points(axes, figure), *_bars(axes, figure)):
            shape = ElementTree.SubElement(root, f"{{{SVG}}}{tag}", {**geometry, "fill": "transparent"})
            ElementTree.SubElement(shape, f"{{{SVG}}}title").text = title
    chart.write(path.with_suffix(".svg"), encoding="unicode")


def _points(axes: Axes, figure: Figure) -> Iterator[tuple[str, dict[str, str], str]]:
    for line in axes.lines:
        shown = list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        if line.get_transform() != axes.transData or len(shown) < 2:
            continue  # a reference line across the full width or height
        for x, y in shown[:: -(-len(shown) // MOST_POINTS)]:
            left, top = _at(axes, figure, x, y)
            yield "circle", {"cx": f"{left:.1f}", "cy": f"{top:.1f}", "r": "5"}, _title(axes, line, y, x)


def _bars(axes: Axes, figure: Figure) -> Iterator[tuple[str, dict[str, str], str]]:
    for bars in axes.containers:
        if not isinstance(bars, BarContainer):
            continue
        for bar in bars:
            left, top = _at(axes, figure, bar.get_x(), bar.get_y() + bar.get_height())
            right, bottom = _at(axes, figure, bar.get_x() + bar.get_width(), bar.get_y())
            geometry = {"x": left, "y": top, "width": right - left, "height": bottom - top}
            yield (
                "rect",
                {name: f"{value:.1f}" for name, value in geometry.items()},
                _title(axes, bars, bar.get_height()),
            )


def _title(axes: Axes, artist: object, y: float, x: float | None = None) -> str:
    label = str(artist.get_label())  # type: ignore[attr-defined]
    name = axes.get_ylabel() if label.startswith("_") else label
    return f"{name}: {y:.5g}" + (f" at {axes.get_xlabel()} {x:g}" if x is not None else "")


def _at(axes: Axes, figure: Figure, x: float, y: float) -> tuple[float, float]:
    """Return the SVG coordinates of a data point, in points from the upper left corner."""
    left, bottom = axes.transData.transform((x, y)) * 72 / figure.dpi
    return left, figure.get_figheight() * 72 - bottom
