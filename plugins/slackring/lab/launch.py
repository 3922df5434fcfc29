"""Where the runs of a comparison are trained: on ranks of this machine, on those of a Dask cluster, or on virtual ranks."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from slackring import errors
from slackring.errors import DivergedError, HorovodMissingError, RingError, SlackringError, SpecError
from slackring.lab._ranks import EVENT
from slackring.lab.config import TrainConfig
from slackring.lab.interrupt import Interrupt
from slackring.lab.runs import run_name, save_run
from slackring.lab.train import train_virtual
from slackring.spec import nearest

__all__ = ["BACKENDS", "Launch", "launcher", "require_horovod", "run_on_horovod", "run_virtual"]

BACKENDS = ("dask", "horovod", "virtual")
"""What :func:`launcher` knows."""

Launch = Callable[[Sequence[TrainConfig], int, Path, Interrupt], Iterator[Path | None]]
"""Trains runs on so many ranks; see :func:`run_on_horovod`."""

_KEPT_LINES = 100  # the ranks' tracebacks, and what the launcher prints behind them
_PATIENCE = 20.0  # seconds that ranks get to write their results after an interrupt


def launcher(backend: str, cluster: str = "", wait: float = 100.0) -> Launch:
    """Choose where the runs of a comparison are trained.

    Parameters
    ----------
    backend
        ``"dask"``; ``"horovod"`` for ``horovodrun`` on this machine; or ``"virtual"``.
    cluster
        For Dask, as of :func:`slackring.lab.on_dask.dask_ranks`.
    wait
        Seconds to wait for a cluster's workers.

    Raises
    ------
    SpecError
        If there is no such backend, or the cluster's file is wrong.
    PoolError
        If nobody answers at the cluster's address.

    Examples
    --------
    >>> launcher("virtual").__name__
    'run_virtual'
    """
    if backend not in BACKENDS:
        raise SpecError(f"there is no backend {backend!r}; {nearest(backend, BACKENDS)}.")
    if backend != "dask":
        if cluster:
            raise SpecError(
                f"backend {backend!r} has no use for the cluster {cluster!r}; leave it out, or take 'dask'."
            )
        return run_virtual if backend == "virtual" else run_on_horovod
    from slackring.lab.on_dask import check_cluster, run_on_dask

    check_cluster(cluster)
    return functools.partial(run_on_dask, cluster=cluster, wait=wait)


def require_horovod() -> None:
    """Find out before anything else whether real ranks can be started.

    Raises
    ------
    HorovodMissingError
        If Horovod is not installed.
    """
    if importlib.util.find_spec("horovod") is None:
        raise HorovodMissingError(
            "Horovod is not installed, and real ranks need it; build it, in a clone of the repository: python "
            "cluster_configs/horovod/build.py (or compare on virtual ranks: --virtual)."
        )


def run_on_horovod(
    jobs: Sequence[TrainConfig], workers: int, folder: Path, interrupt: Interrupt
) -> Iterator[Path | None]:
    """Train one run after another on the same Horovod ranks, since a rank takes seconds to start.

    Parameters
    ----------
    jobs
        The runs.
    workers
        Number of ranks, all on this machine.
    folder
        Every run gets a folder in it.
    interrupt
        Ends it early: the run that is being trained is written as far as it came.

    Yields
    ------
    Path or None
        A run's folder as soon as it is there; None for a run that diverged.

    Raises
    ------
    RingError
        If the ranks fail; the message carries the end of what they printed.
    """
    with tempfile.TemporaryDirectory(prefix="slackring-") as scratch:
        orders = Path(scratch) / "orders.json"
        orders.write_text(json.dumps({"folder": str(folder.resolve()), "jobs": [job.to_json() for job in jobs]}))
        with _Ranks(workers, orders) as ranks:
            yield from ranks.outcomes(len(jobs), interrupt)


def run_virtual(jobs: Sequence[TrainConfig], workers: int, folder: Path, interrupt: Interrupt) -> Iterator[Path | None]:
    """Train one run after another on virtual ranks; as :func:`run_on_horovod`."""
    for job in jobs:
        if interrupt.signal is not None:
            return
        try:
            run = train_virtual(job, workers, interrupt=interrupt)
        except DivergedError:
            yield None
            continue
        yield save_run(run, folder, run_name(job))


class _Ranks:
    """A running `horovodrun`, and the lines that its ranks print."""

    def __init__(self, workers: int, orders: Path) -> None:
        # The interfaces are named, since Horovod's own search for them is slow and fails in containers. Ranks that share the
        # cores get one thread each.
        launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "--network-interfaces", "lo"]
        ranks = ["-np", str(workers), "-H", f"localhost:{workers}"]
        self._process = subprocess.Popen(
            [*launcher, *ranks, sys.executable, "-m", "slackring.lab._ranks", str(orders)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C comes to this process alone, which passes it on once
        )
        self._events: Queue[dict[str, Any] | None] = Queue()
        self._printed: deque[str] = deque(maxlen=_KEPT_LINES)
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            # Its children notice that it is gone, and end the ranks.
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        if self._process.stdout is not None:
            with self._process.stdout as lines:
                for line in lines:
                    _, event, text = line.partition(EVENT)
                    if event:
                        self._events.put(json.loads(text))
                    else:
                        self._printed.append(line.rstrip())
        self._events.put(None)

    def outcomes(self, number: int, interrupt: Interrupt) -> Iterator[Path | None]:
        """Yield the runs' folders as they are finished."""
        passed_on = False
        while number:
            if interrupt.signal is not None and not passed_on:
                self._process.terminate()
                passed_on = True
            try:
                event = self._events.get(timeout=0.2)
            except Empty:
                continue
            if event is None:
                if passed_on:
                    return
                raise RingError(
                    "the Horovod ranks ended before their work was done; they printed:\n" + "\n".join(self._printed)
                )
            if "error" in event:
                raise getattr(errors, event["kind"], SlackringError)(event["error"])
            yield None if event["run"] is None else Path(event["run"])
            number -= 1
        self._process.wait(_PATIENCE)
