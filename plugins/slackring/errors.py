"""Every error that a user can cause: one sentence that says what was wrong, where, and what to do."""

from __future__ import annotations

__all__ = [
    "AgreementError",
    "DataError",
    "DivergedError",
    "HorovodMissingError",
    "OutputError",
    "PlanError",
    "PoolError",
    "RankError",
    "RingError",
    "RuleError",
    "SlackringError",
    "SpecError",
    "StoppedError",
    "StragglerError",
    "UnsupportedError",
]


class SlackringError(Exception):
    """Base of all errors that Slackring raises on purpose; the command line turns them into exit code 2."""


class SpecError(SlackringError, ValueError):
    """A text such as ``losp:k_max=64`` that names no known thing or carries a malformed value."""


class RuleError(SpecError):
    """An unknown rule, or a combination of choices that no rule can have."""


class StragglerError(SpecError):
    """An unknown straggler model, or values it cannot have."""


class UnsupportedError(SlackringError, ValueError):
    """An optimizer, argument or parameter type that Slackring refuses; the message names the replacement."""


class AgreementError(SlackringError, RuntimeError):
    """Ranks that must agree (rule, parameters, dtypes, versions, anchor) do not; the message names the rank."""


class RingError(SlackringError, RuntimeError):
    """A round that cannot complete: a rank died, or all ranks wait for each other."""


class StoppedError(SlackringError, RuntimeError):
    """A local step after the ranks agreed that training is over."""


class DivergedError(SlackringError, RuntimeError):
    """A loss or parameter that is no longer a finite number."""


class DataError(SlackringError, ValueError):
    """A data file, trace or run folder that is missing or malformed."""


class PlanError(SlackringError, ValueError):
    """End times or intervals that no superstep can be planned from."""


class OutputError(DataError):
    """Results that cannot be written: the path is not writable, or the disk is full."""


class HorovodMissingError(SlackringError, ImportError):
    """Horovod is not installed, or was built for another torch."""


class PoolError(SlackringError, RuntimeError):
    """Ranks that cannot be started on a Dask cluster: too few workers, or workers that differ; the message names the worker."""


class RankError(PoolError):
    """A rank of a Dask cluster that raised, died, or lost its worker.

    Parameters
    ----------
    message
        One sentence, and the rank's own traceback or the end of its log below it.
    rank
        Which rank failed first.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[RankError], tuple[str, int]]:
        return type(self), (str(self), self.rank)
