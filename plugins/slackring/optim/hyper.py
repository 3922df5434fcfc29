"""An optimizer's numeric hyper-parameters as one vector, so that ranks can use those of one of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.optim import Optimizer

__all__ = ["HyperParameters"]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _like(old: float | Tensor, number: float) -> float | Tensor:
    return torch.full_like(old, number) if isinstance(old, Tensor) else number


class HyperParameters:
    """Reads and sets the numbers in an optimizer's parameter groups (lr, momentum, betas, ...), those in tensors, too.

    Parameters
    ----------
    optimizer
        Its groups may change values later, and be replaced by ``load_state_dict``, but keep their keys.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._places: list[tuple[int, str, int | None]] = []
        for at, group in enumerate(self._groups):
            for key, value in group.items():
                if _is_number(value):
                    self._places.append((at, key, None))
                elif isinstance(value, tuple) and all(map(_is_number, value)):
                    self._places.extend((at, key, position) for position in range(len(value)))

    @property
    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.param_groups

    def __len__(self) -> int:
        return len(self._places)

    def read(self) -> list[float]:
        """The numbers, in a fixed order."""
        groups = self._groups
        return [
            float(groups[at][key] if position is None else groups[at][key][position])
            for at, key, position in self._places
        ]

    @contextmanager
    def using(self, numbers: NDArray[np.float64]) -> Iterator[None]:
        """Have the optimizer use other numbers for a while; those that are equal are left alone."""
        saved = []
        groups = self._groups
        for (at, key, position), mine, theirs in zip(self._places, self.read(), numbers.tolist(), strict=True):
            if mine != theirs:
                group = groups[at]
                saved.append((group, key, group[key]))
                if position is None:
                    group[key] = _like(group[key], theirs)
                else:
                    old = group[key]
                    group[key] = (*old[:position], _like(old[position], theirs), *old[position + 1 :])
        try:
            yield
        finally:
            for group, key, value in reversed(saved):
                group[key] = value
