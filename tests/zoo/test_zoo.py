"""A slice of the handwritten models of the zoo against plain torch. ``make zoo`` runs all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.zoo.case import Case
from tests.zoo.catalog import own_modules
from tests.zoo.comparison import Comparison
from tests.zoo.slice import check, comparisons, parameters

MODULES = own_modules()


@pytest.fixture(scope="module")
def zoo() -> Iterator[Comparison]:
    yield from comparisons()


# Workers take classes as a whole, so the families are divided over two of them.
class TestFirstFamilies:
    @pytest.mark.parametrize(("case", "variant"), parameters(MODULES[::2]))
    def test_case(self, zoo: Comparison, case: Case, variant: str) -> None:
        check(zoo, case, variant)


class TestOtherFamilies:
    @pytest.mark.parametrize(("case", "variant"), parameters(MODULES[1::2]))
    def test_case(self, zoo: Comparison, case: Case, variant: str) -> None:
        check(zoo, case, variant)
