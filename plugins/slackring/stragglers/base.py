"""What a model of stragglers is: how long a local step takes, as a pure function of seed, rank, step and step time."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn, Self, cast

import numpy as np

from slackring import spec
from slackring.errors import StragglerError

__all__ = ["Drawn", "Straggler", "joined"]


@dataclasses.dataclass(frozen=True)
class Straggler(ABC):
    """How long each local step of each rank takes.

    A model is immutable, and ``str()`` of it is the text that :func:`parse` reads back.

    Attributes
    ----------
    name : str
        What ``--straggler`` calls the model.
    """

    name: ClassVar[str]

    @abstractmethod
    def step_seconds(self, rank: int, step: int, step_time: float) -> float:
        """Tell the full duration of a local step; equal arguments give equal answers, in any order of calls.

        Parameters
        ----------
        rank, step
            Which local step of which rank, both from 0.
        step_time
            What an undisturbed step takes, in seconds.

        Returns
        -------
        float
            Seconds, computing included.
        """

    def seeded(self, seed: int) -> Self:
        """Fix the draws of a model that has no seed yet; any other model is returned as it is.

        Parameters
        ----------
        seed
            At least 0.
        """
        return self

    def check(self, size: int) -> None:
        """Refuse a model that names ranks which do not exist.

        Parameters
        ----------
        size
            Number of ranks.

        Raises
        ------
        StragglerError
            If a named rank is not below `size`.
        """
        for rank in self._named_ranks():
            if rank >= size:
                raise StragglerError(
                    f"straggler '{self}' names rank {rank}, but the last rank is {size - 1}; name ranks from 0 to that."
                )

    def __str__(self) -> str:
        return spec.render(self.name, self)

    def _named_ranks(self) -> tuple[int, ...]:
        return ()

    def _refuse(self, problem: str) -> NoReturn:
        raise StragglerError(f"straggler {self.name!r}: {problem}.")

    def _require(self, option: str, value: float, *, zero: bool) -> None:
        """Refuse a value that is not finite, is negative, or is zero where that makes no sense."""
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            self._refuse(f"{option}={value} must be a finite number {'of at least' if zero else 'above'} 0")

    def _require_unit(self, unit: str) -> None:
        if unit not in ("steps", "seconds"):
            self._refuse(f"unit={unit!r} must be 'steps' or 'seconds'")

    def _valid_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        ranks = tuple(ranks)
        if any(rank < 0 for rank in ranks):
            self._refuse(f"ranks={joined(ranks)} has a negative rank; ranks count from 0")
        if len(set(ranks)) < len(ranks):
            self._refuse(f"ranks={joined(ranks)} names a rank twice")
        return ranks


class Drawn(Straggler):
    """A model that draws at random: each local step by itself, from seed, rank and step.

    Attributes
    ----------
    seed : int or None
        A field of the models themselves. None means that :meth:`seeded` may still set it, and draws like 0 until then.
    """

    seed: int | None

    def seeded(self, seed: int) -> Self:
        """Fix the draws, unless the model has a seed already."""
        return self if self.seed is not None else dataclasses.replace(cast(Any, self), seed=seed)

    def _generator(self, rank: int, step: int) -> np.random.Generator:
        # One for each step: no draw depends on which steps were asked for before.
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed or 0, spawn_key=(rank, step))))

    def _require_seed(self) -> None:
        if self.seed is not None and self.seed < 0:
            self._refuse(f"seed={self.seed} must be at least 0")


def joined(values: Iterable[float]) -> str:
    """Write several values as a model's text does."""
    return "+".join(map(str, values))
