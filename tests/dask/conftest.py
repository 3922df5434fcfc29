"""A cluster of this machine that tests share, and what checks that a test leaves nothing on it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster

MARK = "STARTED_BY_TESTS"  # environment variable that workers and their ranks inherit
PATIENCE = 20.0  # seconds until what should come counts as missing


os.environ.setdefault(MARK, str(os.getpid()))  # workers import this, too


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {patience:g} s"
        time.sleep(0.02)


def rank_processes() -> set[int]:
    """Processes of ranks on clusters that this process has started, and those that they started."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE or "slackring.dask._rank" not in process.cmdline():
                continue
            if process.environ().get(MARK) == os.environ[MARK]:
                found |= {process.pid, *(child.pid for child in process.children(recursive=True))}
    return found


def ports() -> set[int]:
    """Ports on which this process listens, or a process that it started, its worker's aside."""
    found = set()
    with contextlib.suppress(psutil.Error):
        found = {
            connection.laddr.port
            for connection in psutil.Process().net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Four workers of one thread each."""
    with LocalCluster(
        n_workers=4, threads_per_worker=1, dashboard_address="127.0.0.1:0", memory_limit=0, silence_logs=50
    ) as made:
        yield made


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    """A client of the shared cluster, whose workers are all there."""
    with Client(cluster) as made:
        made.wait_for_workers(4, timeout=60)
        yield made


@pytest.fixture
def nothing_left(client: Client, tmp_path: Path) -> Iterator[None]:
    """Check that the test leaves no process, port or file."""
    before = rank_processes(), ports()
    yield
    until(lambda: rank_processes() <= before[0], "no process of a rank is left")
    until(lambda: ports() <= before[1], "no port is left")
    client.wait_for_workers(4, timeout=60)
    until(lambda: not any(client.run(_folders).values()), "no file is left")
    until(lambda: not any(client.run(_holder).values()), "no worker is held")


def _holder(dask_worker: object) -> str | None:
    from slackring.dask.site import Site

    return Site.of(dask_worker).holder


def _folders(dask_worker: Any) -> list[str]:
    return [str(path) for path in Path(dask_worker.local_directory).glob("slackring-*")]
