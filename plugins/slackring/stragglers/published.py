"""The stragglers of the Anytime Minibatch papers, besides the shifted exponential.

A paper's worker draws once for each of its minibatches. Here a draw is for a local step, so that a window of several steps has as
many draws.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from typing import ClassVar, Literal

from slackring.stragglers.base import Drawn, joined

__all__ = ["Bernoulli", "Cedar", "Mixture", "Niagara", "Pauses", "SciNet"]


@dataclasses.dataclass(frozen=True)
class Mixture(Drawn):
    """``mixture``: a sleep before each step, ``step_time + min(|N(mean, std)|, cap)``, of a component drawn by weight.

    The cap is the largest ``mean + 5 * std`` of the components.

    Parameters
    ----------
    means, stds
        Mean and standard deviation of each component's normal distribution; at least 0.
    weights
        How likely each component is, relative to the others; above 0.
    unit
        What `means` and `stds` are measured in: ``"seconds"`` or ``"steps"`` (multiples of the step time).
    seed
        At least 0; None means that :meth:`seeded` may still set it, and draws like 0 until then.

    Raises
    ------
    StragglerError
        For values the model cannot have.

    Examples
    --------
    >>> straggler = Mixture(means=(0, 2), stds=(0, 0.5), weights=(0.9, 0.1), seed=1)
    >>> str(straggler)
    'mixture:means=0+2,stds=0+0.5,weights=0.9+0.1,seed=1'
    >>> [round(straggler.step_seconds(0, step, 0.1), 1) for step in range(8)]
    [0.1, 0.1, 0.1, 1.5, 0.1, 0.1, 0.1, 0.1]
    """

    name: ClassVar[str] = "mixture"

    means: tuple[float, ...]
    stds: tuple[float, ...]
    weights: tuple[float, ...]
    unit: Literal["seconds", "steps"] = "seconds"
    seed: int | None = None

    def __post_init__(self) -> None:
        for option in ("means", "stds", "weights"):
            object.__setattr__(self, option, tuple(getattr(self, option)))
            for value in getattr(self, option):
                self._require(option, value, zero=option != "weights")
        if not self.means or not len(self.means) == len(self.stds) == len(self.weights):
            self._refuse(
                f"means={joined(self.means)}, stds={joined(self.stds)} and weights={joined(self.weights)} differ in length; "
                "give one of each for every component"
            )
        self._require_unit(self.unit)
        self._require_seed()

    def step_seconds(self, rank: int, step: int, step_time: float) -> float:
        """Tell the step time plus this step's sleep; in seconds."""
        generator = self._generator(rank, step)
        bounds = list(itertools.accumulate(self.weights))
        component = bisect.bisect_right(bounds, generator.random() * bounds[-1], hi=len(bounds) - 1)
        draw = abs(self.means[component] + self.stds[component] * float(generator.standard_normal()))
        cap = max(mean + 5 * std for mean, std in zip(self.means, self.stds, strict=True))
        return step_time + min(draw, cap) * (step_time if self.unit == "steps" else 1.0)


@dataclasses.dataclass(frozen=True)
class Niagara(Mixture):
    """``niagara``: a :class:`Mixture` of none, short, 2 s and 5 s, as Anytime Minibatch's authors injected it on EC2.

    From their code (github.com/thadikari/anytime); its runs have a compute time of 6.2 s.

    Examples
    --------
    >>> str(Niagara(seed=3))
    'niagara:seed=3'
    """

    name: ClassVar[str] = "niagara"

    means: tuple[float, ...] = (0.0, 0.0, 2.0, 5.0)
    stds: tuple[float, ...] = (0.0, 0.4, 0.3, 0.3)
    weights: tuple[float, ...] = (0.4, 0.3, 0.2, 0.1)


@dataclasses.dataclass(frozen=True)
class Cedar(Mixture):
    """``cedar``: a :class:`Mixture` of none, 0.05 s, 0.15 s and 0.25 s, of the same authors.

    From their code (github.com/StarkDraperLaboratory/asyncTimed); its workers have compute times of 0.29 s and 0.32 s.
    """

    name: ClassVar[str] = "cedar"

    means: tuple[float, ...] = (0.0, 0.05, 0.15, 0.25)
    stds: tuple[float, ...] = (0.0, 0.04, 0.03, 0.03)
    weights: tuple[float, ...] = (0.4, 0.3, 0.2, 0.1)


@dataclasses.dataclass(frozen=True)
class Pauses(Drawn):
    """``pauses``: a pause after each step, ``step_time + max(0, N(mean, std))``, of the rank's group.

    Rank r is in group r modulo the number of groups.

    Parameters
    ----------
    means, stds
        Mean and standard deviation of each group's pauses; at least 0.
    unit
        What they are measured in: ``"seconds"`` or ``"steps"`` (multiples of the step time).
    seed
        At least 0; None means that :meth:`seeded` may still set it, and draws like 0 until then.

    Raises
    ------
    StragglerError
        For values the model cannot have.

    Examples
    --------
    >>> straggler = Pauses(means=(0.01, 0.5), stds=(0, 0))
    >>> [round(straggler.step_seconds(rank, 0, 0.1), 2) for rank in range(4)]
    [0.11, 0.6, 0.11, 0.6]
    """

    name: ClassVar[str] = "pauses"

    means: tuple[float, ...]
    stds: tuple[float, ...]
    unit: Literal["seconds", "steps"] = "seconds"
    seed: int | None = None

    def __post_init__(self) -> None:
        for option in ("means", "stds"):
            object.__setattr__(self, option, tuple(getattr(self, option)))
            for value in getattr(self, option):
                self._require(option, value, zero=True)
        if not self.means or len(self.means) != len(self.stds):
            self._refuse(
                f"means={joined(self.means)} and stds={joined(self.stds)} differ in length; give one of each for every group"
            )
        self._require_unit(self.unit)
        self._require_seed()

    def step_seconds(self, rank: int, step: int, step_time: float) -> float:
        """Tell the step time plus this step's pause; in seconds."""
        group = rank % len(self.means)
        draw = self.means[group] + self.stds[group] * float(self._generator(rank, step).standard_normal())
        return step_time + max(draw, 0.0) * (step_time if self.unit == "steps" else 1.0)


@dataclasses.dataclass(frozen=True)
class SciNet(Pauses):
    """``scinet``: five groups of ranks that pause for 5, 10, 20, 35 and 55 ms after each step.

    After the experiment of "Anytime Minibatch" with 50 workers of the SciNet cluster, which pause after every gradient; a local
    step stands for one. The values have not been checked against the paper's text.
    """

    name: ClassVar[str] = "scinet"

    means: tuple[float, ...] = (0.005, 0.01, 0.02, 0.035, 0.055)
    stds: tuple[float, ...] = (0.001, 0.002, 0.003, 0.004, 0.005)


@dataclasses.dataclass(frozen=True)
class Bernoulli(Drawn):
    """``bernoulli``: a step takes ``factor * step_time`` with a probability, else the step time.

    The Anytime Minibatch authors' ICASSP 2020 paper has workers that finish 60 samples with probability 0.8 and 1 otherwise, in
    the same time: ``bernoulli:probability=0.2,factor=60``.

    Parameters
    ----------
    probability
        Of a slow step; from 0 to 1.
    factor
        How many times as long a slow step takes; above 0.
    seed
        At least 0; None means that :meth:`seeded` may still set it, and draws like 0 until then.

    Raises
    ------
    StragglerError
        For values the model cannot have.

    Examples
    --------
    >>> straggler = Bernoulli(probability=0.2, factor=60)
    >>> sorted({straggler.step_seconds(rank=0, step=step, step_time=0.5) for step in range(50)})
    [0.5, 30.0]
    """

    name: ClassVar[str] = "bernoulli"

    probability: float
    factor: float
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            self._refuse(f"probability={self.probability} must be from 0 to 1")
        self._require("factor", self.factor, zero=False)
        self._require_seed()

    def step_seconds(self, rank: int, step: int, step_time: float) -> float:
        """Tell the step time, on a slow step times the factor; in seconds."""
        return step_time * (self.factor if self._generator(rank, step).random() < self.probability else 1.0)
