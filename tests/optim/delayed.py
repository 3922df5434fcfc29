"""Gradient descent with delayed gradients, as the papers on stale gradients write it: what rules are held against."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["delayed_descent", "version"]


def version(update: int, staleness: int) -> int:
    """Number of the model, from 1, that the gradient of an update, from 1, is taken at."""
    return max(1, update - staleness)


def delayed_descent(
    gradient: Callable[[float], float], start: float, lr: float, staleness: int, updates: int
) -> list[float]:
    """Models ``w(1), w(2), ...`` of ``w(k + 1) = w(k) - lr * gradient(w(max(1, k - staleness)))``."""
    models = [start]
    for update in range(1, updates + 1):
        models.append(models[-1] - lr * gradient(models[version(update, staleness) - 1]))
    return models
