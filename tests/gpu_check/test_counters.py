"""The table of what ncu counts, from a page in the form that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.gpu_check.counters import KERNEL, METRICS, command, rows_of


def page(values: dict[str, str]) -> str:
    """Words, a header, a line of units, a launch."""
    header = ["ID", KERNEL, *METRICS.values()]
    units = ["", "", *("unit" for _ in METRICS)]
    launch = ["0", "adam<float, bf16>", *(values.get(name, "1") for name in METRICS)]
    lines = [",".join(f'"{cell}"' for cell in line) for line in (header, units, launch)]
    return "==PROF== Connected to process 7\n" + "\n".join(lines) + "\n"


def test_a_launch_becomes_a_row_in_readable_units() -> None:
    found = rows_of(
        page({"µs": "1,234,567", "GB read": "2500000000", "registers": "40", "SM, % of peak": "n/a"})
    )
    columns = ["kernel", *METRICS]
    row = dict(zip(columns, found[0], strict=True))
    assert len(found) == 1 and row["kernel"] == "adam<float, bf16>"
    assert (row["µs"], row["GB read"], row["registers"]) == ("1235", "2.5", "40")
    assert row["SM, % of peak"] == "n/a"


def test_an_answer_without_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected a line of CSV"):
        rows_of("==ERROR== no permission\n")
    with pytest.raises(ValueError, match="expected the metrics"):
        rows_of(f'"ID","{KERNEL}"\n"",""\n"0","adam"\n')


def test_ncu_is_asked_for_every_metric_between_the_marks() -> None:
    call = command(Path("log"), ["--toy"])
    assert ",".join(METRICS.values()) in call and "benchmarks.gpu.launches" in call and call[-1] == "--toy"
    assert call[call.index("--profile-from-start") + 1] == "off"
