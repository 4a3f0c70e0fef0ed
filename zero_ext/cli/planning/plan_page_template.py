"""The HTML of the page that ``zero-ext plan --html`` writes. It loads nothing from elsewhere."""

from string import Template

PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
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
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: currentColor; }
</style>
</head>
<body>
<h1>$headline</h1>
<p>$summary</p>
$reasons
<p>$assumptions</p>
<h2>Placements</h2>
<p>A click on a heading sorts the table. Bytes are those of one GPU, and of all GPUs of a host.</p>
<div class="scroll">
<table>
<thead><tr>$headings</tr></thead>
<tbody>
$rows
</tbody>
</table>
</div>
$charts
<script>
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const heading = button.parentElement, body = heading.closest("table").tBodies[0];
  const down = heading.getAttribute("aria-sort") === "ascending", column = heading.cellIndex;
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = row => row.cells[column].dataset.key;
  const order = (a, b) => key(a).localeCompare(key(b), "en", {numeric: true});
  body.append(...[...body.rows].sort((a, b) => down ? order(b, a) : order(a, b)));
};
</script>
</body>
</html>
""")

CHART = Template("""\
<h2>$title</h2>
<p>$legend</p>
<svg viewBox="0 0 $width $height" role="img" aria-label="$title">
$bars
</svg>
""")
