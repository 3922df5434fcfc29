"""Trains runs on the ranks of a Dask cluster."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from slackring.dask import DaskExecutor, load_cluster
from slackring.dask import Run as RunningRun
from slackring.dask.cluster_files import read
from slackring.dask.clusters import connect, workers_of
from slackring.dask.live import show
from slackring.errors import DivergedError, RankError, RingError, SlackringError
from slackring.lab._ranks import CHECKPOINT, train_on_rank
from slackring.lab.checkpoint import Checkpoints, Earlier
from slackring.lab.config import TrainConfig
from slackring.lab.interrupt import Interrupt
from slackring.lab.runs import Run, git_revision, run_name, save_run, writing
from slackring.lab.tasks import module_of

__all__ = ["check_cluster", "dask_ranks", "keep_logs", "run_on_dask", "train_on_dask", "workers_of"]

_TICK = 0.05  # seconds between two looks at whether a run is over


def check_cluster(cluster: str) -> None:
    """Find out before anything else whether a cluster's file can be read, or a scheduler answers at its address.

    Raises
    ------
    SpecError, PoolError
        As :func:`slackring.dask.load_cluster` does.
    """
    if _is_address(cluster):
        load_cluster(cluster)
    elif cluster:
        read(Path(cluster))


@contextmanager
def dask_ranks(
    cluster: str, workers: int | None, tasks: Iterable[str], out: Path, wait: float
) -> Iterator[DaskExecutor]:
    """Start ranks on a cluster, and the cluster too if a file describes it.

    Parameters
    ----------
    cluster
        A file or an address, as of :func:`slackring.dask.load_cluster`; empty for this machine.
    workers
        How many ranks; None is all workers, as of :class:`~slackring.dask.DaskExecutor`.
    tasks
        Texts of what will be trained: the user's own are sent to the ranks.
    out
        Parent of the folders that the ranks' logs go to.
    wait
        Seconds to wait for the workers.

    Yields
    ------
    DaskExecutor
        With its ranks.

    Raises
    ------
    SlackringError
        If the cluster or the ranks do not start.
    """
    modules = tuple(filter(None, map(module_of, tasks)))
    settings = DaskExecutor.create_settings(placement_timeout_s=wait)
    with (
        load_cluster(cluster, workers) as where,
        connect(where) as client,
        DaskExecutor(client, workers, settings=settings, modules=modules, out=out) as executor,
    ):
        yield executor


def train_on_dask(
    executor: DaskExecutor,
    config: TrainConfig,
    interrupt: Interrupt,
    *,
    cluster: str = "",
    checkpoints: Checkpoints | None = None,
    earlier: Earlier | None = None,
    console: Console | None = None,
) -> tuple[Run, Path]:
    """Train one run.

    Parameters
    ----------
    executor
        Has the ranks.
    config
        The run.
    interrupt
        Ends it early, on all ranks after the same round.
    cluster
        Where it runs, as of :func:`dask_ranks`.
    checkpoints
        When to take checkpoints; what is kept is kept here. None takes none, not even at the end.
    earlier
        The run to continue.
    console
        Where to draw how far it is; None draws nothing.

    Returns
    -------
    tuple
        What all ranks measured, and the folder of the ranks' logs.

    Raises
    ------
    SlackringError
        What the ranks raised, if that is one of :mod:`slackring.errors`.
    RankError
        If a rank failed otherwise; the message has its traceback or the end of its log.
    """
    every = None if checkpoints is None else checkpoints.every
    running = executor.run_remote(train_on_rank, [config, checkpoints is not None, every, earlier])

    def keep() -> None:
        """Keep the checkpoint that has come since the last one, if one has."""
        file = running.folder / "saved" / CHECKPOINT
        if checkpoints is not None and file.exists():
            taken = file.replace(running.folder / CHECKPOINT)  # out of the way of the next one
            checkpoints.keep(_placed(pickle.loads(taken.read_bytes()), running, cluster))
            taken.unlink()

    try:
        try:
            _follow(running, config.rule, interrupt, keep, console)
        finally:
            keep()
        run = next(result for result in running.result() if result is not None)
    except RankError as exc:
        cause = exc.__cause__
        if not isinstance(cause, SlackringError) or isinstance(cause, RingError):
            raise
        if type(cause) is SlackringError:  # of the user's code, whose traceback is in a log
            raise SlackringError(f"{cause} The logs are in {str(running.folder)!r}.") from None
        if _drop_if_empty(running.folder / "saved"):
            shutil.rmtree(running.folder, ignore_errors=True)
        raise cause from None
    _drop_if_empty(running.folder / "saved")
    return _placed(run, running, cluster), running.folder


def run_on_dask(
    jobs: Sequence[TrainConfig],
    workers: int,
    folder: Path,
    interrupt: Interrupt,
    cluster: str,
    wait: float,
) -> Iterator[Path | None]:
    """Train one run after another on the same ranks of a cluster.

    Parameters
    ----------
    jobs, workers, folder, interrupt
        As of :func:`slackring.lab.launch.run_on_horovod`.
    cluster, wait
        As of :func:`dask_ranks`.

    Yields
    ------
    Path or None
        A run's folder as soon as it is there; None for a run that diverged.

    Raises
    ------
    SlackringError
        As of :func:`dask_ranks` and :func:`train_on_dask`.
    """
    with dask_ranks(cluster, workers, {job.task for job in jobs}, folder.parent, wait) as executor:
        for job in jobs:
            if interrupt.signal is not None:
                return
            try:
                run, logs = train_on_dask(executor, job, interrupt, cluster=cluster)
            except DivergedError:
                yield None
                continue
            saved = save_run(run, folder, run_name(job))
            keep_logs(logs, saved)
            yield saved


def keep_logs(logs: Path, run: Path) -> None:
    """Put the logs of the ranks into the run's folder, as ``ranks``."""
    with writing(run):
        logs.rename(run / "ranks")


def _drop_if_empty(saved: Path) -> bool:
    """Remove the folder of saved files if there is nothing in it, which would be the task's own; tell whether it is gone."""
    with suppress(OSError):
        saved.rmdir()
    return not saved.exists()


def _placed(run: Run, running: RunningRun, cluster: str) -> Run:
    """Add to what ranks know of their run what is known here."""
    hosts = [place.worker.hostname for place in running.places]
    where = {"launcher": "dask", "cluster": cluster, "hosts": hosts, "git": git_revision()}
    return dataclasses.replace(run, facts={**run.facts, **where})


def _is_address(cluster: str) -> bool:
    return "://" in cluster


def _follow(
    running: RunningRun, title: str, interrupt: Interrupt, keep: Callable[[], None], console: Console | None
) -> None:
    """Wait for a run's end, keep its checkpoints, and pass a wish to stop on to it."""
    while running.board is None and not running.done():
        time.sleep(_TICK)
    if running.board is None:
        return
    running.board.title = title
    if console is None:
        for _ in _until_done(running, interrupt, keep):
            pass
    else:
        show(running.board, _until_done(running, interrupt, keep), console)


def _until_done(running: RunningRun, interrupt: Interrupt, keep: Callable[[], None]) -> Iterator[None]:
    while not running.done():
        keep()
        if interrupt.signal is not None and not running.stopping:
            running.stop()
        yield
        time.sleep(_TICK)
    if running.board is not None:
        running.board.end()
