"""Clusters from files and addresses really start, and bind where they should."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dask
import psutil
import pytest
from distributed import Client

import slackring as sr
from slackring.dask.clusters import RunningCluster, load_cluster

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "cluster_configs"


def _listening() -> set[tuple[int, str, int]]:
    """Give process number, address and port of what this process and its children listen on."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {
        (process.pid, connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.fixture(scope="module")
def others() -> set[tuple[int, str, int]]:
    """What listens before a cluster is started."""
    return _listening()


@pytest.fixture(scope="module")
def local(others: set[tuple[int, str, int]]) -> Iterator[Client]:
    with load_cluster(CONFIGS / "local.yaml") as cluster, Client(cluster) as client:
        yield client


def _setting(name: str) -> object:
    return dask.config.get(name)


def test_local_cluster_has_the_workers_of_the_file(local: Client) -> None:
    workers = local.scheduler_info()["workers"].values()
    assert [(worker["nthreads"], worker["memory_limit"]) for worker in workers] == [(1, 0)] * 2


def test_local_cluster_is_reachable_from_this_machine_only(local: Client, others: set[tuple[int, str, int]]) -> None:
    started = _listening() - others
    # here the scheduler, its dashboard and two nannies; in each of two children a worker and its metrics
    assert len(started) == 8
    assert {address for _, address, _ in started} == {"127.0.0.1"}


def test_workers_inherit_the_settings_and_this_process_does_not_keep_them(local: Client) -> None:
    assert dask.config.get("distributed.scheduler.work-stealing") is True
    assert set(local.run(_setting, "distributed.scheduler.work-stealing").values()) == {False}
    assert local.run_on_scheduler(lambda dask_scheduler: dask_scheduler.allowed_failures) == 0


def test_running_cluster_is_found_by_its_address_and_left_running(local: Client) -> None:
    with sr.dask.load_cluster(local.cluster.scheduler_address) as cluster, Client(cluster) as client:
        assert isinstance(cluster, RunningCluster)
        assert client.submit(sum, [1, 2], pure=False).result() == 3
        assert client._repr_html_()
        client.shutdown()
    assert local.submit(sum, [3, 4], pure=False).result() == 7
    with pytest.raises(RuntimeError, match="closed"):
        Client(cluster)


def test_script_without_a_guard_gets_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import slackring as sr\nsr.dask.load_cluster({str(CONFIGS / 'local.yaml')!r}, workers=1)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert 'put the call below `if __name__ == "__main__":`' in done.stderr.splitlines()[0]
    assert "LocalCluster did not start" in done.stderr.splitlines()[-1]


def test_nothing_loads_dask_before_it_is_used() -> None:
    code = "import sys, slackring.dask; print(sorted({'dask', 'distributed', 'torch', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
