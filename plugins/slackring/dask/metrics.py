"""Prometheus gauges of the ranks of a Dask worker: what is set here appears on the worker's ``/metrics``."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from slackring.dask.snapshots import REPORTED, Snapshot, wait_share

if TYPE_CHECKING:
    from prometheus_client import Gauge

__all__ = ["forget", "update"]

_ABOUT = {
    "rounds": "Rounds that have landed on the rank in this run",
    "steps": "Local steps of the rank in this run",
    "samples": "Samples in the rank's local steps in this run",
    "step_seconds": "Median seconds that a recent local step of the rank computed",
    "wait_share": "Share of its time, since the update before, in which the rank waited for rounds",
    "loss": "What the rank's code reported last as its loss",
}

_lock = threading.Lock()
_gauges: dict[str, Gauge] | None = None
_before: dict[tuple[str, int], Snapshot] = {}


def update(run: str, rank: int, snapshot: Snapshot) -> None:
    """Show a rank's newest snapshot; does nothing without prometheus_client, which Dask does not need either.

    Of what is reported, the loss alone is shown: each name would be a metric more.

    Parameters
    ----------
    run, rank
        The labels.
    snapshot
        Of the rank's telemetry.
    """
    with _lock:
        gauges = _made()
        numbers = {
            **{name: snapshot.get(name) for name in ("rounds", "steps", "samples", "step_seconds")},
            "wait_share": wait_share(_before.get((run, rank), {}), snapshot),
            "loss": snapshot.get(f"{REPORTED}loss"),
        }
        _before[run, rank] = snapshot
        for name, gauge in gauges.items():
            number = numbers[name]
            if isinstance(number, int | float):
                gauge.labels(run, rank).set(number)


def forget(run: str, rank: int) -> None:
    """Show a rank no longer, since its run has ended."""
    with _lock:
        if _before.pop((run, rank), None) is not None:
            for gauge in _made().values():
                with contextlib.suppress(
                    KeyError
                ):  # of a loss that was never reported, with an older prometheus_client
                    gauge.remove(run, str(rank))


def _made() -> dict[str, Gauge]:
    """The gauges, made at their first use, once a process; none without prometheus_client."""
    global _gauges
    if _gauges is None:
        try:
            from prometheus_client import Gauge
        except ImportError:
            _gauges = {}
        else:
            _gauges = {name: Gauge(f"slackring_rank_{name}", about, ("run", "rank")) for name, about in _ABOUT.items()}
    return _gauges
