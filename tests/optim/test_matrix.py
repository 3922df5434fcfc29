"""Every rule x every feature, and the page that lists them."""

from __future__ import annotations

import pytest
from tests.optim.matrix import FEATURES, PAGE, RULES, Feature, outcome, page


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tried", FEATURES, ids=lambda tried: tried.title)
def test_feature(tried: Feature, rule: str) -> None:
    found = outcome(tried, rule)
    if rule in tried.refused_by:
        assert found.startswith("refused: ")
        assert found.endswith(".")
    else:
        assert found == "works"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "write it anew: python -m tests.optim.matrix"
