"""The common models of stragglers, and how any model is written as text."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from slackring import spec
from slackring.errors import StragglerError
from slackring.stragglers.base import Drawn, Straggler, joined
from slackring.stragglers.published import Bernoulli, Cedar, Mixture, Niagara, Pauses, SciNet
from slackring.stragglers.traces import read_trace

__all__ = [
    "MODELS",
    "Constant",
    "NoStraggler",
    "Persistent",
    "ShiftedExponential",
    "Straggler",
    "Trace",
    "no_wait_limit",
    "parse",
]


@dataclasses.dataclass(frozen=True)
class NoStraggler(Straggler):
    """``none``: every local step takes the step time."""

    name: ClassVar[str] = "none"

    def step_seconds(self, rank: int, step: int, step_time: float) -> float:
        """Tell the step time."""
        return step_time


@dataclasses.dataclass(frozen=True)
class Constant(Straggler):
    """``constant``: a fixed delay is added; a step takes ``step_time + seconds``.

    Parameters
    ----------
    seconds
        Delay of one local step, in seconds; at least 0.
    ranks
        Which ranks are delayed; empty means all.

    Raises
    ------
    StragglerError
        For values the model cannot have.

    Examples
    --------
    >>> Constant(seconds=0.25, ranks=(1,)).step_seconds(rank=1, step=7, step_time=0.5)
    0.75
    """

    name: ClassVar[str] = "constant"

    seconds: float
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._require("seconds", self.seconds, zero=True)
        object.__setattr__(self, "ranks", self._valid_ranks(self.ranks))

    def step_seconds(self, rank: int, step: int, step_time: float) -> float:
        """Tell the step time, on the delayed ranks plus the delay; in seconds."""
        return step_time + self.seconds if not self.ranks or rank in self.ranks else step_time

    def _named_ranks(self) -> tuple[int, ...]:
        return self.ranks


@dataclasses.dataclass(frozen=True)
class Persistent(Straggler):
    """``persistent``: the same ranks are slow all the time; a step of theirs takes ``factor * step_time``.

    Parameters
    ----------
    ranks
        Which ranks are slowed; at least one.
    factor
        How many times as long their steps take: one number for all of `ranks`, or one for each; above 0.

    Raises
    ------
    StragglerError
        For values the model cannot have.

    Examples
    --------
    >>> straggler = parse("persistent:ranks=2+3,factor=1.3+4")
    >>> [straggler.step_seconds(rank, step=0, step_time=0.1) for rank in range(4)]
    [0.1, 0.1, 0.13, 0.4]
    """

    name: ClassVar[str] = "persistent"

    ranks: tuple[int, ...]
    factor: float | tuple[float, ...]

    def __post_init__(self) -> None:
        ranks = self._valid_ranks(self.ranks)
        if not ranks:
            self._refuse("it needs at least one rank in ranks=")
        factors = (self.factor,) if isinstance(self.factor, int | float) else tuple(self.factor)
        for factor in factors:
            self._require("factor", factor, zero=False)
        if len(factors) not in (1, len(ranks)):
            self._refuse(
                f"ranks={joined(ranks)} and factor={joined(factors)} differ in length; "
                "give one factor for all ranks, or one for each"
            )
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "factor", factors[0] if len(factors) == 1 else factors)

    def step_seconds(self, rank: int, step: int, step_time: float) -> float:
        """Tell the step time, on the slowed ranks times their factor; in seconds."""
        if rank not in self.ranks:
            return step_time
        factor = self.factor[self.ranks.index(rank)] if isinstance(self.factor, tuple) else self.factor
        return step_time * factor

    def _named_ranks(self) -> tuple[int, ...]:
        return self.ranks


@dataclasses.dataclass(frozen=True)
class ShiftedExponential(Drawn):
    """``shifted_exponential``: any step may be slow; it takes ``shift + min(Exp(mean), cap)``.

    The draw of a local step depends on seed, rank and step alone. Without a cap the mean step is ``shift + mean`` and
    the median step ``shift + mean * ln 2``, both in `unit`. "Anytime Minibatch" has ``mean=1.5,shift=1,unit=seconds``.

    Parameters
    ----------
    mean
        Mean of the exponential part; above 0.
    shift
        Shortest step; at least 0. None means the step time.
    cap
        Longest exponential part; above 0. None means that it has no limit.
    unit
        What `mean`, `shift` and `cap` are measured in: ``"steps"`` (multiples of the step time) or ``"seconds"``.
    ranks
        Which ranks draw; empty means all. The others take the step time.
    seed
        At least 0; None means that :meth:`seeded` may still set it, and draws like 0 until then.

    Raises
    ------
    StragglerError
        For values the model cannot have.

    Examples
    --------
    >>> straggler = parse("shifted_exponential:mean=0.5,cap=3", seed=7)
    >>> 0.1 <= straggler.step_seconds(rank=0, step=0, step_time=0.1) <= 0.4
    True
    """

    name: ClassVar[str] = "shifted_exponential"

    mean: float
    shift: float | None = None
    cap: float | None = None
    unit: Literal["steps", "seconds"] = "steps"
    ranks: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        self._require("mean", self.mean, zero=False)
        if self.shift is not None:
            self._require("shift", self.shift, zero=True)
        if self.cap is not None:
            self._require("cap", self.cap, zero=False)
        self._require_unit(self.unit)
        self._require_seed()
        object.__setattr__(self, "ranks", self._valid_ranks(self.ranks))

    def step_seconds(self, rank: int, step: int, step_time: float) -> float:
        """Tell the shift plus this step's draw; in seconds."""
        if self.ranks and rank not in self.ranks:
            return step_time
        scale = step_time if self.unit == "steps" else 1.0
        shift = step_time if self.shift is None else self.shift * scale
        draw = self.mean * float(self._generator(rank, step).standard_exponential())
        return shift + scale * (draw if self.cap is None else min(draw, self.cap))

    def _named_ranks(self) -> tuple[int, ...]:
        return self.ranks


@dataclasses.dataclass(frozen=True)
class Trace(Straggler):
    """``trace``: replays recorded steps; a step takes ``step_time * recorded / median``.

    `recorded` are the seconds of the same rank and step in the file, and `median` is the median of all seconds in the
    file, over ranks and steps together: a typical step takes the step time, and every ratio between steps is kept.
    Steps that were shorter than the median take less than the step time. Ranks and steps beyond the recorded ones start
    over from the first.

    Parameters
    ----------
    file
        What :func:`slackring.stragglers.traces.read_trace` reads: a CSV with columns ``rank,step,seconds``, or a
        parquet file with one row an operation of a pipeline. Read once, when the model is made. No comma in the path.

    Raises
    ------
    StragglerError
        If the path contains a comma.
    DataError
        If the file is missing or malformed; the message names the file, and the line of a CSV.
    """

    name: ClassVar[str] = "trace"

    file: str
    _seconds: tuple[tuple[float, ...], ...] = dataclasses.field(init=False, repr=False, compare=False)
    _median: float = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        file = os.fspath(self.file)
        if "," in file:
            self._refuse(f"the path {file!r} contains a comma, which separates options; rename the file")
        seconds = read_trace(file)
        object.__setattr__(self, "file", file)
        object.__setattr__(self, "_seconds", seconds)
        object.__setattr__(self, "_median", statistics.median(value for rank in seconds for value in rank))

    def step_seconds(self, rank: int, step: int, step_time: float) -> float:
        """Tell the recorded step, scaled to the step time; in seconds."""
        recorded = self._seconds[rank % len(self._seconds)]
        return step_time * (recorded[step % len(recorded)] / self._median)


MODELS: Mapping[str, type[Straggler]] = MappingProxyType(
    {
        model.name: model
        for model in (
            *(NoStraggler, Constant, Persistent, ShiftedExponential, Trace),
            *(Mixture, Niagara, Cedar, Pauses, SciNet, Bernoulli),
        )
    }
)
"""Every model by its name in ``--straggler``."""


def parse(text: str, seed: int | None = None) -> Straggler:
    """Read a straggler from a text such as ``persistent:ranks=3,factor=4``; ``str()`` of the model is the inverse.

    Parameters
    ----------
    text
        A name of :data:`MODELS`, and after a colon the model's parameters. Several values are joined by ``+``.
    seed
        Fixes the draws of a model whose text has no seed.

    Raises
    ------
    StragglerError
        For an unknown name or parameter (with the nearest valid one) or a malformed value.
    DataError
        For a trace that is missing or malformed.

    Examples
    --------
    >>> parse("persistent:ranks=3,factor=4")
    Persistent(ranks=(3,), factor=4.0)
    >>> str(parse("shifted_exponential:mean=0.5", seed=1))
    'shifted_exponential:mean=0.5,seed=1'
    """
    straggler = spec.parse(text, MODELS, kind="straggler", error=StragglerError)
    return straggler if seed is None else straggler.seeded(seed)


def no_wait_limit(straggler: Straggler, step_time: float, size: int, steps: int) -> float:
    """Local steps a second that `size` ranks make together if none ever waits: the sum over ranks of 1 / median step.

    Parameters
    ----------
    straggler
        What slows the ranks.
    step_time
        What an undisturbed step takes, in seconds; above 0.
    size
        Number of ranks; at least 1.
    steps
        Over how many local steps, from the first, a rank's median is taken; at least 1.

    Returns
    -------
    float
        Steps a second.

    Raises
    ------
    StragglerError
        For arguments out of range, or a named rank that does not exist.

    Examples
    --------
    >>> round(no_wait_limit(parse("persistent:ranks=2+3,factor=1.3+4"), step_time=0.1, size=4, steps=10), 2)
    30.19
    """
    if not step_time > 0 or size < 1 or steps < 1:
        raise StragglerError(
            f"the no-wait limit needs a step time above 0, a rank and a step; got {step_time} s, {size} and {steps}."
        )
    straggler.check(size)
    medians = (
        statistics.median(straggler.step_seconds(rank, step, step_time) for step in range(steps))
        for rank in range(size)
    )
    return sum(1 / median for median in medians)
