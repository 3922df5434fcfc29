"""Telemetry: what a rank's process tells whoever runs it, a few times a second."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from slackring.dask.snapshots import REPORTED, Snapshot
from slackring.optim.ambient import slowed, watching
from slackring.stragglers.watch import StragglerWatch

if TYPE_CHECKING:
    from torch import Tensor

    from slackring.optim.progress import LandedRound
    from slackring.optim.records import RoundRecord, StepRecord

__all__ = ["Telemetry"]

_INTERVAL = 0.25  # seconds between samples
_SILENCE = 1.0  # seconds, at most: that nothing happens is told, too
_RECENT = 20  # local steps
_MOST_VALUES, _LONGEST_TEXT = 32, 200


class Telemetry:
    """Watches all optimizers of this process, and tells of them while its context is open.

    Events are dicts that JSON can carry:

    - ``{"kind": "progress", **snapshot}``, when something has changed, else every second, and once at the end;
    - ``{"kind": "report", "values": {...}, "step": ..., "seconds": ...}``, the newest values that were reported since the last
      one, the local step and the seconds of the newest;
    - ``{"kind": "warning", "text": ...}``, on rank 0, of a rank that straggles.

    Parameters
    ----------
    rank
        Of this process.
    emit
        Takes each event; called by one thread at a time, and no longer once the context is left.

    Examples
    --------
    >>> from slackring.optim.ambient import report
    >>> with Telemetry(0, lambda event: print(event["kind"], event.get("values", ""))):
    ...     report(loss=0.5)
    report {'loss': 0.5}
    progress
    """

    def __init__(self, rank: int, emit: Callable[[dict[str, Any]], object]) -> None:
        self._emit = emit
        self._warnings: deque[str] = deque()
        self._watch = StragglerWatch(say=self._warnings.append) if rank == 0 else None
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._rounds = self._steps = 0
        self._samples = self._compute = self._blocked = self._bookkeeping = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._values: dict[str, object] = {}
        self._fresh: set[str] = set()
        self._reported_at = 0, 0.0  # local steps and seconds
        self._changed, self._told = True, -_SILENCE
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._run, name="slackring-telemetry", daemon=True)
        self._watching = watching(self)

    def __enter__(self) -> Self:
        self._watching.__enter__()
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.__exit__(None, None, None)
        self._over.set()
        self._sampler.join()
        self._changed = True
        self._sample()

    # -- what the optimizers tell, on the hot path --------------------------------------------------------------------------

    def step(self, record: StepRecord) -> None:
        """Count a local step."""
        with self._lock:
            self._steps += 1
            self._samples += record.samples
            self._compute += record.compute
            self._bookkeeping += record.bookkeeping
            self._recent.append(record.compute)
            self._changed = True

    def round(self, record: RoundRecord) -> None:
        """Count a round."""
        with self._lock:
            self._rounds += 1
            self._blocked += record.blocked  # in drain() and join() as well, of which no local step tells
            self._changed = True

    def landed(self, landed: LandedRound) -> None:
        """Look for stragglers."""
        if self._watch is not None and not slowed.is_set():
            self._watch(landed)

    def report(self, values: Mapping[str, float | str | Tensor]) -> None:
        """Keep values, and not the graphs that they were computed in."""
        with self._lock:
            for name, value in values.items():
                if name in self._values or len(self._values) < _MOST_VALUES:
                    self._values[name] = value.detach() if hasattr(value, "detach") else value
                    self._fresh.add(name)
            self._reported_at = self._steps, self._seconds()
            self._changed = True

    # -- what is made of it --------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What this rank has done since the context was opened; from any thread."""
        with self._lock:
            values, recent = dict(self._values), list(self._recent)
            numbers: dict[str, float | int | str | None] = {
                "rounds": self._rounds,
                "steps": self._steps,
                "samples": self._samples,
                "seconds": self._seconds(),
                "compute": self._compute,
                "blocked": self._blocked,
                "bookkeeping": self._bookkeeping,
            }
        numbers["step_seconds"] = statistics.median(recent) if recent else None
        return numbers | {REPORTED + name: _plain(value) for name, value in values.items()}

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _run(self) -> None:
        while not self._over.wait(_INTERVAL):
            self._sample()

    def _sample(self) -> None:
        while self._warnings:
            self._emit({"kind": "warning", "text": self._warnings.popleft()})
        with self._lock:
            if not self._changed and self._seconds() - self._told < _SILENCE:
                return
            self._changed, self._told = False, self._seconds()
            fresh, self._fresh = {name: self._values[name] for name in self._fresh}, set()
            step, seconds = self._reported_at
        if fresh:
            values = {name: _plain(value) for name, value in fresh.items()}
            self._emit({"kind": "report", "values": values, "step": step, "seconds": seconds})
        self._emit({"kind": "progress", **self.snapshot()})


def _plain(value: Any) -> float | int | str:
    """A value as JSON can carry it; of a tensor on a GPU, this waits until it is computed."""
    if isinstance(value, Integral):
        return int(value)
    if not isinstance(value, str):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):  # what a tensor of several elements raises
            pass
    return str(value)[:_LONGEST_TEXT]
