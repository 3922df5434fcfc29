"""Ctrl-C, SIGTERM and SIGUSR1 as a wish that training honours between two local steps."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interrupt"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupt:
    """Takes the first SIGINT, SIGTERM or SIGUSR1 as the wish to stop; the next one acts as if this were not here.

    SIGUSR1 comes from schedulers before a time limit, perhaps more than once, and is never more than a wish.
    Horovod's launcher passes Ctrl-C on to its ranks as SIGTERM, and kills them about five seconds later.

    Attributes
    ----------
    signal : int or None
        The number of the signal that came, if one did.

    Examples
    --------
    >>> with Interrupt() as interrupt:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupt.signal == signal.SIGINT
    True
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._take) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for other, handler in self._before.items():
            if other != signal.SIGUSR1:
                signal.signal(other, handler)
