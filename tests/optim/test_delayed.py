"""The reference for stale gradients against the numbers in the notes on the Anytime Minibatch papers."""

from __future__ import annotations

import math

import pytest
from tests.optim.delayed import delayed_descent, version


@pytest.mark.parametrize(
    ("staleness", "models"),
    [(0, [1, 0.9, 0.81, 0.729, 0.6561]), (1, [1, 0.9, 0.8, 0.71, 0.63]), (2, [1, 0.9, 0.8, 0.7, 0.61])],
)
def test_oracle_9_delayed_recursion(staleness: int, models: list[float]) -> None:
    assert delayed_descent(lambda w: w, 1.0, 0.1, staleness, updates=4) == pytest.approx(models, rel=1e-12)


@pytest.mark.parametrize("staleness", range(5))
def test_oracle_10_versions(staleness: int) -> None:
    versions = [version(update, staleness) for update in range(1, 20)]
    assert versions[: staleness + 1] == [1] * (staleness + 1)
    assert all(update - tag == staleness for update, tag in enumerate(versions[staleness:], start=staleness + 1))


@pytest.mark.parametrize("staleness", range(5))
def test_the_largest_stable_rate(staleness: int) -> None:
    """``2 sin(pi / (2 (2 tau + 1)))``: 2, 1, 0.618, 0.445, 0.347."""
    limit = 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))
    below, above = (delayed_descent(lambda w: w, 1.0, rate * limit, staleness, 2000)[-1] for rate in (0.95, 1.05))
    assert abs(below) < 1e-6
    assert abs(above) > 1e3
