"""Plot layouts: a square of blocks for each head that differs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zero_ext.attention.block_layout import BlockLayout
from zero_ext.config.plot_colors import BLUE

_MOST_CELLS = 256  # blocks a side beyond which several are drawn as one
_GAMMA = 0.5  # so that a cell with few of its blocks is seen
_MOST_HEADS = 16
_TICKS = 4


def plot_layout(layout: BlockLayout, path: Path, title: str = "") -> Path:
    """Plot `layout`: queries downwards, keys to the right.

    Beyond 256 blocks a side, a cell stands for several and is the darker, the more of them there are. Of more
    than 16 heads the first 16 are plotted.

    Args:
        layout: the blocks.
        path: the image file, PNG, SVG or PDF by its suffix.
        title: of the plot.

    Returns:
        `path`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "plot_layout: expected matplotlib, which is not installed. Install it with pip install "
            "matplotlib."
        ) from None
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    shown = min(layout.heads, _MOST_HEADS)
    across = min(4, math.ceil(math.sqrt(shown)))
    down = math.ceil(shown / across)
    side = 5.0 if shown == 1 else 3.2
    colors = LinearSegmentedColormap.from_list("blocks", ["#ffffff", BLUE])
    extent = (0, layout.key_length, layout.query_length, 0)
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(side * across + 0.6, side * down + 0.7), layout="constrained")
        panels = figure.subplots(down, across, squeeze=False)
        for head, axes in enumerate(panels.flat):
            if head >= shown:
                axes.set_axis_off()
                continue
            cells = density_cells(layout, head)
            axes.imshow(cells**_GAMMA, cmap=colors, vmin=0, vmax=1, extent=extent, interpolation="nearest")
            axes.tick_params(labelsize=8)
            for ticks, length in ((axes.xaxis, layout.key_length), (axes.yaxis, layout.query_length)):
                positions = [length * tick // _TICKS for tick in range(_TICKS + 1)]
                ticks.set_ticks(positions, [f"{tokens:,}" for tokens in positions])
            if layout.heads > 1:
                axes.set_title(f"head {head}", fontsize=9)
            if head % across == 0:
                axes.set_ylabel("query, tokens")
            if head // across == down - 1:
                axes.set_xlabel("key, tokens")
        facts = f"{layout.blocks:,} blocks of {layout.block} × {layout.block}, {layout.density:.2%} of all"
        figure.suptitle(f"{title}\n{facts}" if title else facts, fontsize=10)
        figure.savefig(path, dpi=130)
    return path


def density_cells(layout: BlockLayout, head: int) -> npt.NDArray[np.float64]:
    """Return the density of each cell of one head, at most 256 cells per side, without the full mask."""
    step = max(1, -(-max(layout.row_blocks, layout.column_blocks) // _MOST_CELLS))
    shape = (-(-layout.row_blocks // step), -(-layout.column_blocks // step))
    pointers = layout.row_pointers[head].cpu().numpy().astype(np.int64)
    rows = np.repeat(np.arange(layout.row_blocks) // step, np.diff(pointers))
    columns = layout.columns[pointers[0] : pointers[-1]].cpu().numpy() // step
    counts = np.bincount(rows * shape[1] + columns, minlength=shape[0] * shape[1]).reshape(shape)
    heights = np.bincount(np.arange(layout.row_blocks) // step)
    widths = np.bincount(np.arange(layout.column_blocks) // step)
    return np.asarray(counts / np.outer(heights, widths), dtype=np.float64)
