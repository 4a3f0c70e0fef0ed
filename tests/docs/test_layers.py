"""The plot of the layers shows the imports of today."""

from __future__ import annotations

from scripts.import_graph import module_graph
from scripts.plot_layers import FILE, describe, direct, package_imports, shown_in


def test_the_plot_is_of_today() -> None:
    shown = describe(direct(package_imports(module_graph())))
    assert "zero.engine -> zero.step" in shown
    assert shown_in(FILE) == shown, "redraw it by `python -m scripts.plot_layers`"


def test_imports_that_follow_from_others_are_left_out() -> None:
    assert direct({("c", "b"), ("b", "a"), ("c", "a")}) == [("b", "a"), ("c", "b")]
