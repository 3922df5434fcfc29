"""Clusters from files and addresses really start, and bind where they should."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
import yaml
from distributed import Client, LocalCluster
from distributed.cli import dask_worker
from distributed.security import Security
from tests.dask.conftest import until
from tests.dask.sshd import ssh_server

import slackring as sr
from slackring.dask import clusters
from slackring.dask.cluster_files import tls_settings
from slackring.dask.clusters import RunningCluster, load_cluster
from slackring.errors import PoolError, SpecError

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


def test_without_a_file_the_cluster_is_that_of_local_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(clusters, "_start", lambda document, path, workers: started.append((document, workers)))
    load_cluster(workers=3)
    document = yaml.safe_load((CONFIGS / "local.yaml").read_text())
    assert started == [({key: value for key, value in document.items() if key != "version"}, 3)]


def test_ctrl_c_at_the_terminal_leaves_local_workers_alone(local: Client) -> None:
    for pid in local.run(os.getpid).values():
        os.kill(pid, signal.SIGINT)
    assert local.submit(sum, [1, 2]).result(timeout=20) == 3
    assert local.run(signal.getsignal, signal.SIGINT) == dict.fromkeys(
        local.scheduler_info()["workers"], signal.SIG_IGN
    )


def test_local_cluster_has_the_workers_of_the_file(local: Client) -> None:
    workers = local.scheduler_info()["workers"].values()
    assert [(worker["nthreads"], worker["memory_limit"]) for worker in workers] == [(1, 0)] * 2


@pytest.mark.parametrize(("name", "number"), [("local", 2), ("ssh", 2), ("slurm", 8), ("kubernetes", 4)])
def test_a_file_says_how_many_workers_there_will_be(name: str, number: int) -> None:
    assert clusters.workers_of(CONFIGS / f"{name}.yaml") == number


def test_local_cluster_is_reachable_from_this_machine_only(local: Client, others: set[tuple[int, str, int]]) -> None:
    started = _listening() - others
    # here the scheduler, its dashboard and two nannies; in each of two children a worker and its metrics
    assert len(started) == 8
    assert {address for _, address, _ in started} == {"127.0.0.1"}


def test_workers_inherit_the_settings_and_this_process_does_not_keep_them(local: Client) -> None:
    assert dask.config.get("distributed.scheduler.work-stealing") is True
    assert set(local.run(dask.config.get, "distributed.scheduler.work-stealing").values()) == {False}
    assert local.run_on_scheduler(lambda dask_scheduler: dask_scheduler.allowed_failures) == 0


def test_running_cluster_is_found_by_its_address_and_left_running(local: Client) -> None:
    address = local.cluster.scheduler_address
    assert clusters.workers_of(address) == 2
    with sr.dask.load_cluster(address, workers=1) as cluster, Client(cluster) as client:
        assert isinstance(cluster, RunningCluster)
        assert client.submit(sum, [1, 2], pure=False).result() == 3
        assert client._repr_html_()
        client.shutdown()
    assert local.submit(sum, [3, 4], pure=False).result() == 7
    with pytest.raises(RuntimeError, match="closed"):
        Client(cluster)


def test_a_cluster_at_an_address_may_have_no_workers_yet() -> None:
    with LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0", silence_logs=50) as cluster:
        assert clusters.workers_of(cluster.scheduler_address) is None


def test_class_that_takes_no_number_of_workers_is_scaled(tmp_path: Path) -> None:
    options = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    kwargs = {
        "scheduler": {"cls": "distributed.Scheduler", "options": options},
        "worker": {"cls": "distributed.Worker", "options": options | {"nthreads": 1}},
    }
    path = tmp_path / "spec.yaml"
    path.write_text(
        yaml.safe_dump({"version": 1, "module": "distributed", "class": "SpecCluster", "kwargs": kwargs}),
    )
    with load_cluster(path, workers=2) as cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=60)
        assert len(client.scheduler_info()["workers"]) == 2


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


def _certificates(folder: Path) -> dict[str, str]:
    """Give the `security` section of a cluster file, with one certificate for all, signed by itself."""
    temporary = Security.temporary()
    files = {"tls_ca_file": "ca.pem"}
    for role in ("scheduler", "worker", "client"):
        files |= {f"tls_{role}_cert": "cert.pem", f"tls_{role}_key": "key.pem"}
    for key, name in files.items():
        (folder / name).write_text(getattr(temporary, key))
    return {key: str(folder / name) for key, name in files.items()}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """Write a copy of a file of `cluster_configs`, with other arguments or sections."""

    def write(name: str, kwargs: dict[str, Any], **sections: Any) -> Path:
        document = yaml.safe_load((CONFIGS / name).read_text())
        path = tmp_path / name
        path.write_text(yaml.safe_dump(document | sections | {"kwargs": document["kwargs"] | kwargs}))
        return path

    return write


def test_certificates_of_the_file_are_used_and_needed(
    changed: Callable[..., Path], certificates: dict[str, str], tmp_path: Path
) -> None:
    path = changed("local.yaml", {"n_workers": 1}, security=certificates)
    with load_cluster(path) as cluster, Client(cluster) as client:
        assert cluster.scheduler_address.startswith("tls://127.0.0.1:")
        assert client.submit(sum, [1, 2]).result() == 3
        assert all(worker.startswith("tls://") for worker in client.scheduler_info()["workers"])
        with pytest.raises(SpecError, match=r"takes certificates: give Dask distributed\.comm\.tls\.ca-file"):
            load_cluster(cluster.scheduler_address)
        with (
            dask.config.set(tls_settings(_certificates(tmp_path), path)),
            pytest.raises(PoolError, match="certificate verify failed"),
        ):
            load_cluster(cluster.scheduler_address)
        with dask.config.set(tls_settings(certificates, path)):
            found = load_cluster(cluster.scheduler_address)
        with found, Client(found) as client:
            assert client.submit(sum, [3, 4]).result() == 7


@pytest.mark.multirank
@pytest.mark.multirank
def test_ranks_run_over_ssh(changed: Callable[..., Path], certificates: dict[str, str], tmp_path: Path) -> None:
    def train() -> list[float]:
        import horovod.torch as hvd
        import torch

        hvd.init()
        summed: list[float] = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name="x").tolist()
        return summed

    before = _listening()
    with ssh_server(tmp_path) as options:
        path = changed("ssh.yaml", {"connect_options": options}, security=certificates)
        with load_cluster(path, workers=2) as cluster, Client(cluster) as client:
            assert cluster.scheduler_address.startswith("tls://127.0.0.1:")
            with sr.DaskExecutor(client, num_workers=2, out=tmp_path / "runs") as executor:
                assert executor.run(train) == [[3.0], [3.0]]
                started = _listening() - before
            assert set(client.run(dask.config.get, "distributed.scheduler.worker-ttl").values()) == {None}
    # the server for ssh, the scheduler, two nannies, two workers, three pages for a browser, and what the ranks need
    assert len(started) >= 9
    assert {address for _, address, _ in started} == {"127.0.0.1"}
    assert not _listening() - before


def _running(group: int) -> list[int]:
    """Give the processes of a job, without those that ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand-ins for `sbatch` and `scancel`: a job is a process without the environment of who submits it.

    Gives the folder in which the submitted scripts are kept.
    """
    commands = {
        "sbatch": f"""
            cp "$1" {tmp_path}/$$.sh
            env -i PATH=/usr/bin:/bin PYTHONPATH="$PYTHONPATH" setsid bash {tmp_path}/$$.sh >{tmp_path}/$$.log 2>&1 &
            echo $! >{tmp_path}/$$.pid
            echo "Submitted batch job $$"
        """,
        "scancel": f"kill -KILL -- -$(cat {tmp_path}/$1.pid)",
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{textwrap.dedent(text)}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for pid in tmp_path.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid.read_text()), signal.SIGKILL)


def test_slurm_jobs_ask_for_what_the_file_says(slurm: Path, changed: Callable[..., Path]) -> None:
    options = {"interface": "lo", "n_workers": 0, "queue": "compute", "account": "project"}
    with load_cluster(changed("slurm.yaml", options)) as cluster:
        script = cluster.job_script()
    path = slurm / "rendered.sh"
    path.write_text(script)
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    asked = {"-p compute", "-A project", "-n 1", "--cpus-per-task=16", "--mem=64G", "-t 04:00:00"}
    assert asked <= set(lines)
    command = shlex.split(script.splitlines()[-1])
    assert command[1:3] == ["-m", "distributed.cli.dask_worker"]
    given = dask_worker.main.make_context("worker", command[3:]).params
    expected = {"n_workers": "4", "nthreads": 4, "memory_limit": "16.00GiB", "interface": "lo"}
    assert {key: given[key] for key in expected} == expected
    assert given["dashboard_address"] == "127.0.0.1:0"


@pytest.mark.multirank
def test_slurm_jobs_start_workers_that_inherit_the_settings(slurm: Path, changed: Callable[..., Path]) -> None:
    path = changed("slurm.yaml", {"interface": "lo", "cores": 2, "processes": 2, "memory": "2GiB"})
    with load_cluster(path, workers=2) as cluster, Client(cluster) as client:
        with sr.DaskExecutor(client, out=slurm / "runs") as executor:  # waits for all workers that were asked for
            assert executor.size == 2
        assert [worker["nthreads"] for worker in client.scheduler_info()["workers"].values()] == [1, 1]
        assert set(client.run(dask.config.get, "distributed.scheduler.worker-ttl").values()) == {None}
        assert len(list(slurm.glob("*.pid"))) == 1
    (job,) = (int(pid.read_text()) for pid in slurm.glob("*.pid"))
    until(lambda: not _running(job), "the job ends")


def test_machine_without_slurm_is_told_so(changed: Callable[..., Path]) -> None:
    path = changed("slurm.yaml", {"interface": "lo"})
    with pytest.raises(PoolError, match="this machine has no command 'sbatch', by which SLURMCluster starts jobs"):
        load_cluster(path)
