"""A plan as one HTML page that needs no network: the answer, a table that can be sorted, and charts."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import Template

from zero_ext.cli.html_page import html_page
from zero_ext.cli.plan_report import assumptions, best_first, headline, speed, three_digits
from zero_ext.config.plot_colors import KINDS as COLORS
from zero_ext.config.plot_colors import LIMIT
from zero_ext.config.tiers import CAPACITIES, TIERS, Tier
from zero_ext.plan.parse_sizes import short_bytes
from zero_ext.plan.plan_entry import PlanEntry
from zero_ext.plan.planner import Plan, why_nothing_fits

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


_NUMBERS = ("GPU", "host", "NVMe", "s/step", "tokens/s")
_HEADINGS = ("placement", *_NUMBERS[:3], "fits", *_NUMBERS[3:], "bound by", "activations", "micro-batch")
_WIDTH, _LABEL_WIDTH, _FIGURE_WIDTH = 960, 190, 80
_ROW_HEIGHT, _BAR_HEIGHT = 24, 16
_NUMBER_CELL = ' class="number"'
_MOST_SHOWN = 1.6  # times the capacity; longer bars are cut, with their figure next to them


def write_plan_page(plan: Plan, path: Path) -> None:
    """Write the page. Values are escaped: a model's name may come from a file of others."""
    path.write_text(plan_page(plan), encoding="utf-8")


def plan_page(plan: Plan) -> str:
    """Return the page as text."""
    if plan.recommendation is None:
        summary, reasons = why_nothing_fits(plan), ""
    else:
        summary = speed(plan, plan.recommendation.entry)
        items = "".join(f"<li>{escape(reason)}</li>" for reason in plan.recommendation.reasons)
        reasons = f"<ul>{items}</ul>"
    body = BODY.substitute(
        headline=escape(headline(plan)),
        summary=escape(summary),
        reasons=reasons,
        assumptions="<br>".join(map(escape, assumptions(plan))),
        headings="".join(_heading(name) for name in _HEADINGS),
        rows="\n".join(_row(plan, row) for row in best_first(plan)),
        charts="".join(_chart(plan, tier) for tier in CAPACITIES if _capacity(plan, tier) > 1),
    )
    return html_page(f"{plan.model.name} on {plan.gpus} GPUs of {plan.hardware.name}", body)


def _heading(name: str) -> str:
    kind = _NUMBER_CELL if name in _NUMBERS else ""
    return f'<th scope="col"{kind}><button type="button">{name}</button></th>'


def _row(plan: Plan, row: PlanEntry) -> str:
    totals = [row.needs.total(tier) for tier in CAPACITIES]
    short = ", ".join(TIERS[shortfall.tier].short for shortfall in row.shortfalls)
    training = row.training
    # What is shown, and what the table is sorted by.
    cells: list[tuple[str, object]] = [
        (str(row.candidate), row.candidate),
        *((short_bytes(nbytes) if nbytes else "-", nbytes) for nbytes in totals),
        (f"no: {short}" if short else "yes", f"{row.excess[0]:.6f}"),
        (three_digits(row.step.seconds), f"{row.step.seconds:.6f}"),
        (f"{row.tokens_per_second:,.0f}", round(row.tokens_per_second)),
        (row.step.busiest, row.step.busiest),
        (training.activations.replace("_", ", "), training.activations),
        (f"{training.micro_batch} x {training.accumulation_steps}", training.micro_batch),
    ]
    style = ' class="chosen"' if plan.recommends(row) else "" if row.fits else ' class="short"'
    shown = (
        f'<td{_NUMBER_CELL if name in _NUMBERS else ""} data-key="{escape(str(key))}">{escape(text)}</td>'
        for name, (text, key) in zip(_HEADINGS, cells, strict=True)
    )
    return f"<tr{style}>{''.join(shown)}</tr>"


def _capacity(plan: Plan, tier: Tier) -> int:
    capacity: int = getattr(plan.hardware, f"{tier}_bytes")
    return capacity


def _chart(plan: Plan, tier: Tier) -> str:
    """Stacked bars of every placement by kind of memory, with the capacity as a line."""
    rows, capacity = best_first(plan), _capacity(plan, tier)
    used = [kind for kind in COLORS if any(row.by_kind(tier)[kind] for row in rows)]
    swatches = [f'<span style="color:{COLORS[kind]}">&#9632;</span> {escape(kind)}' for kind in used]
    swatches.append(f'<span style="color:{LIMIT}">&#9478;</span> capacity {short_bytes(capacity)}')
    scale = (_WIDTH - _LABEL_WIDTH - _FIGURE_WIDTH) / (_MOST_SHOWN * capacity)
    height = _ROW_HEIGHT * len(rows)
    bars = [line for number, row in enumerate(rows) for line in _bar(row, tier, number, scale)]
    edge = f"{_LABEL_WIDTH + capacity * scale:.1f}"
    bars.append(
        f'<line x1="{edge}" x2="{edge}" y1="0" y2="{height}" stroke="{LIMIT}" stroke-width="2" '
        f'stroke-dasharray="6 4"><title>capacity: {short_bytes(capacity)}</title></line>'
    )
    return CHART.substitute(
        title=f"Bytes per {TIERS[tier].short}" if tier != "nvme" else "Bytes on the NVMe of a host",
        legend=" &nbsp; ".join(swatches),
        width=_WIDTH,
        height=height,
        bars="\n".join(bars),
    )


def _bar(row: PlanEntry, tier: Tier, number: int, scale: float) -> Iterator[str]:
    """Yield one row of a chart: its label, a rectangle for each kind of memory, and the sum."""
    top, text_y = _ROW_HEIGHT * number + 4, _ROW_HEIGHT * number + _BAR_HEIGHT
    name, right = escape(str(row.candidate)), float(_WIDTH - _FIGURE_WIDTH)
    opacity = 1 if row.fits else 0.4
    yield f'<text x="0" y="{text_y}">{name}</text>'
    left = float(_LABEL_WIDTH)
    for kind, nbytes in row.by_kind(tier).items():
        width = min(nbytes * scale, right - left)
        if width > 0:
            yield (
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR_HEIGHT}" '
                f'fill="{COLORS[kind]}" opacity="{opacity}">'
                f"<title>{name}: {escape(kind)} {short_bytes(nbytes)}</title></rect>"
            )
            left += width
    total = row.needs.total(tier)
    if total:
        yield f'<text x="{left + 4:.1f}" y="{text_y}">{short_bytes(total)}</text>'
