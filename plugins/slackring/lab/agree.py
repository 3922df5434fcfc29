"""What must succeed on every rank before any of them goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from slackring import errors
from slackring.errors import SlackringError
from slackring.ring.base import Ring

__all__ = ["on_every_rank"]

T = TypeVar("T")


def on_every_rank(ring: Ring, compute: Callable[[], T]) -> T:
    """Compute something on every rank; if one of them fails, all of them raise the same error.

    Without this, the ranks that succeed would wait in a round for the one that has left.

    Parameters
    ----------
    ring
        Collective: every rank calls this.
    compute
        What may raise a `SlackringError`.

    Raises
    ------
    SlackringError
        The error of the lowest rank that failed, of the same class, naming the rank if it failed on some ranks only.

    Examples
    --------
    >>> from slackring.ring.single import SingleRing
    >>> on_every_rank(SingleRing(), lambda: 42)
    42
    """
    failure: SlackringError | None = None
    try:
        result = compute()
    except SlackringError as exc:
        failure = exc
    mine = [] if failure is None else [type(failure).__name__, str(failure)]
    verdicts = [json.loads(verdict) for verdict in ring.gather(json.dumps(mine).encode(), "slackring.lab.agree")]
    failed = [rank for rank, verdict in enumerate(verdicts) if verdict]
    if not failed:
        return result
    kind, text = verdicts[failed[0]]
    if len(failed) < ring.size:
        text = f"rank {failed[0]}: {text}"
    raise getattr(errors, kind, SlackringError)(text) from failure
