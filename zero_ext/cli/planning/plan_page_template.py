"""The parts of the page of ``zero-ext plan --html``."""

from string import Template

BODY = Template("""\
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
$charts""")

CHART = Template("""\
<h2>$title</h2>
<p>$legend</p>
<div class="scroll">
<svg viewBox="0 0 $width $height" role="img" aria-label="$title">
$bars
</svg>
</div>
""")
