"""What workers load that this process starts on its own machine."""

from __future__ import annotations

import multiprocessing
import signal
from typing import Any

__all__ = ["dask_setup"]


def dask_setup(worker: Any) -> None:
    """Leave Ctrl-C to the process that has started this worker: a terminal, and Jupyter, send it to both."""
    if multiprocessing.parent_process() is not None:  # not with processes: false
        signal.signal(signal.SIGINT, signal.SIG_IGN)
