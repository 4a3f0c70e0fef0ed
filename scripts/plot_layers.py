"""Draw docs/images/layers.svg: the packages of ``zero_ext`` by layer, and which packages import which.

``python -m scripts.plot_layers`` redraws it. The SVG file lists the imports that it shows in its metadata, so
a test can compare them with the imports of the code.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from scripts.import_graph import LAYERS, LEVEL, ROOT, module_graph, package_of

FILE = ROOT / "docs" / "images" / "layers.svg"
_WIDTH, _ROW = 9.0, 0.62
_INK, _ZERO, _OTHER, _LINE = "#1f2a37", "#dbeafe", "#eef2f7", "#94a3b8"
_HIDDEN = {"zero"}  # a package that only re-exports


def package_imports(graph: Mapping[str, Iterable[str]]) -> set[tuple[str, str]]:
    """The importing and the imported package of all imports between packages."""
    found = set()
    for module, imports in graph.items():
        own = package_of(module)
        for other in {package_of(each) for each in imports} - {own, None}:
            if own is not None and other is not None and not {own, other} & _HIDDEN:
                found.add((own, other))
    return found


def direct(imports: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The imports that follow from no others: the transitive reduction."""
    targets: dict[str, set[str]] = defaultdict(set)
    for own, other in imports:
        targets[own].add(other)

    def below(package: str) -> set[str]:
        return targets[package].union(*map(below, targets[package]))

    return [
        (own, other)
        for own in sorted(targets)
        for other in sorted(targets[own])
        if not any(other in below(between) for between in targets[own])
    ]


def describe(imports: Iterable[tuple[str, str]]) -> str:
    """The imports as text: one ``importing -> imported`` per pair of packages."""
    return "; ".join(f"{own} -> {other}" for own, other in sorted(imports))


def shown_in(file: Path) -> str:
    """Return :func:`describe` of the imports that a plot shows."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", file.read_text(), re.DOTALL)
    return "" if found is None else " ".join(found[1].replace("&gt;", ">").split())


def plot(file: Path = FILE) -> None:
    """Draw the layers into ``file``."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "layers", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    rows = [[package for package in layer if package not in _HIDDEN] for layer in LAYERS][::-1]
    rows = [row for row in rows if row]
    imports = direct(package_imports(module_graph()))
    figure, axes = pyplot.subplots(figsize=(_WIDTH, _ROW * len(rows)))
    positions: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        for index, package in enumerate(row):
            positions[package] = ((index + 1) / (len(row) + 1) * _WIDTH, -number * _ROW)
    for own, other in imports:
        (x0, y0), (x1, y1) = positions[own], positions[other]
        straight = LEVEL[own] - LEVEL[other] == 1 or x0 != x1
        axes.annotate(
            "",
            xy=(x1, y1 + 0.2),
            xytext=(x0, y0 - 0.2),
            arrowprops={
                "arrowstyle": "-|>",
                "color": _LINE,
                "linewidth": 1.1,
                "connectionstyle": f"arc3,rad={0 if straight else 0.35}",
            },
        )
    for package, (x, y) in positions.items():
        color = _ZERO if package.startswith("zero.") else _OTHER
        label = package.replace("zero.", "zero / ")
        box = {"boxstyle": "round,pad=0.35", "facecolor": color, "edgecolor": _INK, "linewidth": 0.8}
        axes.text(x, y, label, ha="center", va="center", color=_INK, bbox=box, zorder=3)
    axes.set_xlim(0, _WIDTH)
    axes.set_ylim(-len(rows) * _ROW + 0.3, 0.5)
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    metadata = {
        "Description": describe(imports),
        "Date": None,
        "Creator": None,
        "Title": "Layers of zero_ext",
    }
    figure.savefig(file, metadata=metadata)
    pyplot.close(figure)


if __name__ == "__main__":
    plot()
