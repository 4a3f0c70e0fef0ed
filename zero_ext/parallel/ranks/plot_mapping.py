"""Plot a mapping: the ranks of every node, colored by their group on one axis."""

from __future__ import annotations

from pathlib import Path

from zero_ext.parallel.ranks.rank_mapping import RankMapping


def plot_mapping(mapping: RankMapping, ranks_per_node: int, path: Path) -> Path:
    """Draw ``mapping`` to ``path`` (PNG, SVG or PDF by its suffix): a panel for every axis longer than 1,
    a box for every node, a cell for every rank with its coordinates; ranks of a group share a color.

    ModuleNotFoundError where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "plot_mapping: matplotlib is not installed. Run pip install matplotlib."
        ) from None
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    grid = mapping.grid()
    axes = [axis for axis, length in grid.sizes.items() if length > 1]
    nodes = -(-len(grid.ranks) // ranks_per_node)
    colors = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    figure = Figure(figsize=(1.4 + 3.4 * len(axes), 0.9 + 0.5 * nodes), layout="constrained")
    panels = figure.subplots(1, len(axes), squeeze=False)[0]
    for panel, axis in zip(panels, axes, strict=True):
        groups = {rank: number for number, group in enumerate(grid.groups(axis)) for rank in group}
        for rank in grid.ranks:
            node, column = divmod(rank, ranks_per_node)
            color = colors[groups[rank] % len(colors)]
            panel.add_patch(Rectangle((column, node), 0.94, 0.72, facecolor=color, edgecolor="none"))
            at = grid.coordinate(rank)
            text = " ".join(f"{name[0]}{at[name]}" for name in axes)
            panel.text(column + 0.47, node + 0.36, f"{rank}\n{text}", ha="center", va="center", fontsize=6)
        for node in range(nodes):
            box = (-0.06, node - 0.06), ranks_per_node + 0.06, 0.84
            panel.add_patch(Rectangle(*box, fill=False, linewidth=0.8, edgecolor="#555555"))
        panel.set(xlim=(-0.2, ranks_per_node + 0.2), ylim=(nodes - 0.1, -0.2))
        panel.set_xticks([])
        panel.set_yticks([node + 0.36 for node in range(nodes)], [f"node {node}" for node in range(nodes)])
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
        panel.set_title(f"groups of {axis} ({grid.sizes[axis]} ranks each)", fontsize=10)
    figure.suptitle(f"{mapping}, slowest to fastest; {ranks_per_node} ranks a node")
    figure.savefig(path, dpi=130)
    return path
