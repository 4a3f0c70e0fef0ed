"""Writes docs/reference/features.md from the cases: ``python -m tests.features.table``."""

from __future__ import annotations

import re
from pathlib import Path

from tests.features.cases import CASES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "features.md"
TEST_FILES = {
    False: "tests/features/test_features.py",
    True: "tests/integrations/transformers/test_stand_in.py",
}
INTRODUCTION = """\
# Features on the strict stand-in

Each test trains on two or four ranks of the stand-in accelerator (`tests/accelerator`). Its own process-group
backend `stand_in_ccl` is the only one of the world, as NCCL is after
`torch.distributed.init_process_group("nccl")`. The backend refuses host tensors. It completes works late, at
random times, on streams of their own. It raises where ranks launch different works, or works of two
communicators in different orders. Every test asserts the bits of the same run on the CPU over gloo.

`python -m tests.features.table` writes this page from `tests/features/cases.py`. A test fails where the page
is not up to date, and where the README names a feature that has no test.

| feature | test | case |
| --- | --- | --- |
"""


def features_of_readme() -> list[str]:
    """The first column of the README's table of features."""
    text = (ROOT / "README.md").read_text()
    section = re.search(r"^## Features\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| (.*?) \|", section[1] if section else "", re.MULTILINE)
    return [row for row in rows if row != "feature" and not row.startswith("---")]


def page() -> str:
    """The text of the page."""
    rows, before = [], ""
    for case in sorted(CASES, key=lambda case: features_of_readme().index(case.feature)):
        feature = case.feature if case.feature != before else ""
        before = case.feature
        rows.append(f"| {feature} | `{TEST_FILES[case.needs_transformers]}` | {case.name} |")
    return INTRODUCTION + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
