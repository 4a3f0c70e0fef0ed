"""The README's features have tests on the strict stand-in, and the page that lists them is up to date."""

from __future__ import annotations

from collections import Counter

from tests.features import table
from tests.features.cases import CASES


def test_every_feature_of_the_readme_has_a_test() -> None:
    named = table.features_of_readme()
    assert len(named) > 10
    assert sorted(named) == sorted({case.feature for case in CASES})


def test_cases_have_names_of_their_own() -> None:
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []


def test_the_page_is_up_to_date() -> None:
    assert table.PAGE.read_text() == table.page(), "run 'python -m tests.features.table'"
