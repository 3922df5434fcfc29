"""Snapshots: how far a rank is, in numbers that add up from the start of its run."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["REPORTED", "Snapshot", "gained", "reported", "wait_share"]

Snapshot = Mapping[str, float | int | str | None]
"""What a rank has done since its start.

``rounds`` and ``steps``; ``samples``; ``seconds`` on the wall clock, and ``compute``, ``blocked`` and ``bookkeeping`` of them;
``step_seconds``, the median that a recent local step computed (None before the first one); and what the user's code reported,
each under its name behind ``reported.``
"""

REPORTED = "reported."


def reported(snapshot: Snapshot) -> dict[str, float | int | str | None]:
    """What the user's code reported, by name.

    Examples
    --------
    >>> reported({"steps": 3, "reported.loss": 0.5})
    {'loss': 0.5}
    """
    return {name.removeprefix(REPORTED): value for name, value in snapshot.items() if name.startswith(REPORTED)}


def gained(before: Snapshot, now: Snapshot, name: str) -> float:
    """How much a number has grown; `before` may be empty, the start.

    Examples
    --------
    >>> gained({"steps": 3}, {"steps": 5}, "steps"), gained({}, {"steps": 5}, "steps")
    (2.0, 5.0)
    """
    return float(now.get(name) or 0) - float(before.get(name) or 0)


def wait_share(before: Snapshot, now: Snapshot) -> float | None:
    """Share of the time between two snapshots in which a rank waited for rounds; None if it did nothing.

    Examples
    --------
    >>> wait_share({"compute": 1, "blocked": 0, "bookkeeping": 0}, {"compute": 4, "blocked": 1, "bookkeeping": 0})
    0.25
    """
    blocked, compute, bookkeeping = (gained(before, now, name) for name in ("blocked", "compute", "bookkeeping"))
    total = blocked + compute + bookkeeping
    return blocked / total if total > 0 else None
