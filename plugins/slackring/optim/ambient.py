"""What whoever runs a rank adds to every optimizer of the process, unknown to the user's code: a wish to stop, and watchers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from slackring.optim.records import Recorder

if TYPE_CHECKING:
    from torch import Tensor

    from slackring.optim.progress import LandedRound

__all__ = ["Watcher", "recorders", "report", "slowed", "stop_wish", "watchers", "watching"]

stop_wish = threading.Event()
"""While set, by any thread, this process asks all ranks to stop, as ``request_stop()`` of each of its optimizers does."""

slowed = threading.Event()
"""While set, ranks are slowed on purpose, so that nobody is to be warned of stragglers."""


class Watcher(Recorder, Protocol):
    """A recorder of every optimizer of the process; called on the hot path, so it should only store what it is told."""

    def landed(self, landed: LandedRound) -> object:
        """Take a landed round, before the recorder's row of it."""
        ...

    def report(self, values: Mapping[str, float | str | Tensor]) -> object:
        """Take what the user's code reports."""
        ...


watchers: list[Watcher] = []
"""Those of this process; see :func:`watching`."""


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of what all optimizers of this process do, and of what is reported, for as long as the context is open.

    Examples
    --------
    >>> class Printer:
    ...     def report(self, values):
    ...         print(values)
    >>> with watching(Printer()):
    ...     report(loss=0.5)
    {'loss': 0.5}
    >>> report(loss=0.25)
    """
    watchers.append(watcher)
    try:
        yield
    finally:
        watchers.remove(watcher)


def recorders(own: Recorder | None) -> Sequence[Recorder]:
    """An optimizer's own recorder and the process's watchers."""
    return watchers if own is None else (own, *watchers)


def report(**values: float | str | Tensor) -> None:
    """Tell whoever watches this rank the newest numbers of the training loop; nobody may.

    It can be called in every local step: values are kept by name, and looked at a few times a second, only then waiting for
    a tensor that a GPU has yet to compute.

    Parameters
    ----------
    **values
        Numbers, texts, or tensors of one element, which are detached.

    Examples
    --------
    >>> report(loss=0.3, accuracy=0.9, phase="warm-up")
    """
    for watcher in watchers:
        watcher.report(values)
