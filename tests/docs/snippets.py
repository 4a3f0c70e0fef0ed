"""The Python blocks of a page: each is run once, with the names that the page takes for granted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.docs.run_page import ROOT

_BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


class Snippets:
    """The Python blocks of ``docs/<page>`` in order, which share one namespace."""

    def __init__(self, page: str) -> None:
        self._page = page
        self._left = [
            re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
            for indent, code in _BLOCK.findall((ROOT / "docs" / page).read_text())
        ]
        self.names: dict[str, Any] = {}

    def run_next(self, sizes: Mapping[str, str] | None = None, **names: Any) -> dict[str, Any]:
        """Run the next block with further ``names`` and return all names after it.

        ``sizes`` replace what belongs to a larger machine: numbers of devices, and folders.
        """
        code = self._left.pop(0)
        for size, own in (sizes or {}).items():
            assert size in code, f"{self._page}: expected {size} in\n{code}"
            code = code.replace(size, own)
        self.names |= names
        exec(compile(code, self._page, "exec"), self.names)
        return self.names

    def leave_next(self) -> None:
        """Skip the next block, which another test runs."""
        del self._left[0]

    def count_left(self) -> int:
        """Return how many blocks have not run."""
        return len(self._left)


@contextmanager
def snippets_of(page: str) -> Iterator[Snippets]:
    """Give the blocks of a page to a test, which must run all of them."""
    found = Snippets(page)
    yield found
    assert found.count_left() == 0, f"{page}: {found.count_left()} blocks were not run"


def pages_with_snippets() -> list[str]:
    """Return the pages that have Python blocks."""
    pages = (ROOT / "docs").rglob("*.md")
    return sorted(
        page.relative_to(ROOT / "docs").as_posix() for page in pages if _BLOCK.search(page.read_text())
    )
