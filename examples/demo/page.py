"""Write the report of a demonstration as Markdown, and as one self-contained HTML page."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import markdown

from zero_ext.cli.html_page import html_page

PAGE = "report.html"


def write_page(folder: Path, lines: Sequence[str]) -> Path:
    """Write `report.md` and `report.html` to `folder`, which has the plots.

    Returns:
        The path of `report.html`.
    """
    text = "\n".join(lines)
    (folder / "report.md").write_text(text, encoding="utf-8")
    body = markdown.markdown(text, extensions=["tables", "fenced_code"])
    body = re.sub(r"<th([^>]*)>(.*?)</th>", r'<th scope="col"\1><button type="button">\2</button></th>', body)
    body = body.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
    body = re.sub(
        r'<img alt="([^"]*)" src="([^"]*)" ?/>',
        lambda found: _embedded(folder / found[2], found[1]),
        body,
    )
    page = folder / PAGE
    page.write_text(html_page(lines[0].lstrip("# "), body), encoding="utf-8")
    return page


def _embedded(path: Path, name: str) -> str:
    """Return the HTML of the SVG chart if there is one, otherwise of the PNG."""
    chart = path.with_suffix(".svg")
    if chart.exists():
        return f'<div class="scroll chart">{chart.read_text(encoding="utf-8")}</div>'
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<div class="chart"><img alt="{escape(name)}" src="data:image/png;base64,{data}"></div>'
