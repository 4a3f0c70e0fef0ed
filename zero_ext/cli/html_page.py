"""HTML pages that load nothing from elsewhere, light or dark, with tables that can be sorted."""

from __future__ import annotations

from html import escape
from string import Template

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid #8884; white-space: nowrap; }
.number { text-align: right; }
th button { all: unset; cursor: pointer; font-weight: bold; }
th button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.chosen { font-weight: bold; background: #55a86833; }
.short { opacity: .55; }
.scroll { overflow-x: auto; }
pre { overflow-x: auto; }
svg { width: 100%; min-width: 44rem; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: currentColor; }
.chart, .chart svg { background: white; color: black; }
.chart img { max-width: 100%; }
</style>
</head>
<body>
$body
<script>
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const heading = button.parentElement, body = heading.closest("table").tBodies[0];
  const down = heading.getAttribute("aria-sort") === "ascending", column = heading.cellIndex;
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = row => row.cells[column].dataset.key ?? row.cells[column].textContent;
  const order = (a, b) => key(a).localeCompare(key(b), "en", {numeric: true});
  body.append(...[...body.rows].sort((a, b) => down ? order(b, a) : order(a, b)));
};
</script>
</body>
</html>
""")


def html_page(title: str, body: str) -> str:
    """Return a page.

    Args:
        title: plain text.
        body: HTML. A heading cell with a ``<button>`` sorts its table, by the ``data-key`` of the cells or
            else by their text. Wide tables and charts go into a ``<div class="scroll">``.
    """
    return _PAGE.substitute(title=escape(title), body=body)
