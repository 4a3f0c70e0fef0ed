"""Colors of every plot: those of Okabe and Ito, which people with a color vision deficiency distinguish."""

from __future__ import annotations

BLUE, ORANGE, GREEN = "#0072b2", "#e69f00", "#009e73"
PINK, SKY, VERMILION = "#cc79a7", "#56b4e9", "#d55e00"
GRAY = "#9aa5b1"

SERIES = (BLUE, ORANGE, GREEN, PINK, SKY)
"""Colors of the lines of a plot, in order."""
LIMIT = VERMILION
"""Color of a capacity or a cap."""
KINDS = {
    "params": BLUE,
    "grads": ORANGE,
    "optimizer": GREEN,
    "activations": PINK,
    "buffers": GRAY,
    "autograd": SKY,
    "NCCL": "#a0703c",
}
"""Colors of what is in memory, by kind."""
