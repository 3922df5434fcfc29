"""What must succeed on every rank before any of them goes on."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TypeVar

from slackring import errors
from slackring.errors import SlackringError
from slackring.ring.base import Ring

__all__ = ["on_every_rank"]

T = TypeVar("T")

log = logging.getLogger("slackring")


def on_every_rank(ring: Ring, compute: Callable[[], T]) -> T:
    """Compute something on every rank; if one of them fails, all of them raise the same error.

    Without this, the ranks that succeed would wait in a round for the one that has left.

    Parameters
    ----------
    ring
        Collective: every rank calls this.
    compute
        What may fail, the user's own code included: of an error that is no `SlackringError`, its rank logs the traceback.

    Raises
    ------
    SlackringError
        The error of the lowest rank that failed, naming the rank if it failed on some ranks only; of the same class, if that
        is one of :mod:`slackring.errors`.

    Examples
    --------
    >>> from slackring.ring.single import SingleRing
    >>> on_every_rank(SingleRing(), lambda: 42)
    42
    """
    failure: Exception | None = None
    mine: list[str] = []
    try:
        result = compute()
    except SlackringError as exc:
        failure, mine = exc, [type(exc).__name__, str(exc)]
    except Exception as exc:
        log.exception("rank %d failed:", ring.rank)
        failure, mine = (
            exc,
            ["SlackringError", f"{type(exc).__name__}: {exc} (the traceback is in that rank's output)."],
        )
    verdicts = [json.loads(verdict) for verdict in ring.gather(json.dumps(mine).encode(), "slackring.lab.agree")]
    failed = [rank for rank, verdict in enumerate(verdicts) if verdict]
    if not failed:
        return result
    kind, text = verdicts[failed[0]]
    if len(failed) < ring.size:
        text = f"rank {failed[0]}: {text}"
    raise getattr(errors, kind, SlackringError)(text) from failure
