"""What workers tell about themselves, and which differences are refused."""

from __future__ import annotations

import json
import platform
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, LocalCluster

from slackring import __version__
from slackring.dask import facts
from slackring.dask.facts import WorkerFacts, check_alike, look, read_answers
from slackring.errors import HorovodMissingError, PoolError

PYTHON = platform.python_version()
ALL = {
    "torch": "2.13.0+cpu",
    "horovod": "0.28.1",
    "slackring": __version__,
    "cloudpickle": "3.1",
    "distributed": "2026.8",
}
ONE = WorkerFacts(
    address="tcp://10.0.0.1:4001",
    name="w1",
    incarnation="Worker-1",
    host="10.0.0.1",
    interface="eth0",
    hostname="node1",
    threads=2,
    gpus=0,
    visible=None,
    python=PYTHON,
    machine="x86_64",
    versions=ALL,
    built_for="2.13.0+cpu",
)


def other(versions: dict[str, str | None] | None = None, **fields: Any) -> WorkerFacts:
    known: dict[str, Any] = {"address": "tcp://10.0.0.2:4002", "name": "w2", "versions": {**ALL, **(versions or {})}}
    return replace(ONE, **{**known, **fields})


def test_facts_of_real_workers() -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=3, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        workers = read_answers(client.run(look, on_error="return"))
        addresses = set(client.scheduler_info(n_workers=-1)["workers"])
    assert {worker.address for worker in workers} == addresses
    assert {worker.name for worker in workers} == {0, 1}
    assert len({worker.incarnation for worker in workers}) == 2
    for worker in workers:
        assert (worker.host, worker.threads, worker.hostname) == ("127.0.0.1", 3, socket.gethostname())
        assert (worker.python, worker.machine) == (PYTHON, platform.machine())
        assert worker.interface is not None and worker.interface.startswith("lo")
        assert worker.versions["slackring"] == __version__ and worker.versions["distributed"]
        assert WorkerFacts.from_json(json.loads(json.dumps(worker.to_json()))) == worker


def test_torch_is_told_as_it_tells_itself() -> None:
    torch = pytest.importorskip("torch")
    worker = WorkerFacts.from_json(look(fake_worker("tcp://127.0.0.1:4000")))
    assert worker.versions["torch"] == torch.__version__


def fake_worker(address: str) -> Any:
    return SimpleNamespace(address=address, name="w1", id="Worker-1", state=SimpleNamespace(nthreads=1))


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://127.0.0.1:4000", "127.0.0.1"),
        ("tls://localhost:4000", "127.0.0.1"),
        ("tcp://[::1]:4000", "::1"),
        ("inproc://192.0.2.7/12/3", "127.0.0.1"),
        ("tcp://192.0.2.7:4000", "192.0.2.7"),
    ],
)
def test_host_is_an_ip_address(address: str, host: str) -> None:
    assert look(fake_worker(address))["host"] == host


def test_interface_that_has_the_address() -> None:
    def entry(family: int, address: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=address)

    addresses = {
        "lo": [entry(socket.AF_INET, "127.0.0.1"), entry(socket.AF_INET6, "::1")],
        "eth0": [entry(socket.AF_PACKET, "02:42:ac:11:00:02"), entry(socket.AF_INET, "10.0.0.1")],
        "ib0": [entry(socket.AF_INET, "10.1.0.1"), entry(socket.AF_INET6, "fe80::1%ib0")],
    }
    found = {
        host: facts._interface(host, addresses) for host in ("127.0.0.9", "::1", "10.1.0.1", "fe80::1", "10.2.0.1")
    }
    assert found == {"127.0.0.9": "lo", "::1": "lo", "10.1.0.1": "ib0", "fe80::1": "ib0", "10.2.0.1": None}


def test_gpus_are_counted_by_the_drivers_files(tmp_path: Path) -> None:
    assert facts._gpus(tmp_path) == 0
    for device in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / device).mkdir(parents=True)
    assert facts._gpus(tmp_path) == 2
    for bus in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)
    assert facts._gpus(tmp_path) == 3


def test_equal_workers_pass_without_a_word() -> None:
    assert check_alike([ONE, other()]) == []


def test_patch_versions_of_python_may_differ() -> None:
    assert check_alike([replace(ONE, python="3.11.2"), other(python="3.11.9")], python="3.11.4") == []


@pytest.mark.parametrize(
    ("worker", "told"),
    [
        (other(python="3.10.4"), ["runs Python 3.10.4", f"client runs {PYTHON}"]),
        (other({"slackring": "0.0.1"}), ["slackring 0.0.1", f"client has {__version__}"]),
        (other({"torch": None}), ["has no torch"]),
        (other({"torch": "2.12.0+cpu"}, built_for="2.12.0+cpu"), ["torch 2.12.0", "'w1'", "has 2.13.0"]),
        (other({"horovod": "0.27.0"}), ["horovod 0.27.0", "'w1'", "has 0.28.1"]),
        (other(host="127.0.0.1"), ["its own machine only", "'w1'"]),
    ],
)
def test_differences_are_refused(worker: WorkerFacts, told: list[str]) -> None:
    with pytest.raises(PoolError) as caught:
        check_alike([ONE, worker])
    for part in ["worker 'w2' (tcp://10.0.0.2:4002)", *told]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("worker", "told"),
    [
        (other({"horovod": None}, built_for=None), "has no Horovod"),
        (other(built_for="2.12.0+cpu"), "built for torch 2.12.0+cpu, but its torch is 2.13.0+cpu"),
        (other(built_for=None), "built for no torch"),
    ],
)
def test_horovod_that_cannot_be_used(worker: WorkerFacts, told: str) -> None:
    with pytest.raises(
        HorovodMissingError, match=r"worker 'w2' \(tcp://10.0.0.2:4002\).*python cluster_configs/horovod"
    ) as caught:
        check_alike([ONE, worker])
    assert told in str(caught.value)


def test_unequal_machines_are_only_told() -> None:
    gpu_node = other({"torch": "2.13.0+cu130"}, built_for="2.13.0+cu130", threads=8, machine="aarch64")
    threads, machine, torch = check_alike([ONE, gpu_node, replace(ONE, name=3)])
    assert "2 on 'w1', 3; 8 on 'w2'" in threads
    assert "x86_64 on 'w1', 3; aarch64 on 'w2'" in machine
    assert "2.13.0+cu130 on 'w2'" in torch


def test_worker_without_slackring_is_named() -> None:
    answers = {"tcp://10.0.0.1:1": ONE.to_json(), "tcp://10.0.0.2:1": ModuleNotFoundError(name="slackring")}
    with pytest.raises(PoolError, match=r"worker at tcp://10.0.0.2:1 has no module 'slackring'"):
        read_answers(answers)


def test_worker_that_cannot_look_is_named() -> None:
    with pytest.raises(PoolError, match=r"worker at tcp://10.0.0.2:1 cannot tell .*OSError: gone"):
        read_answers({"tcp://10.0.0.2:1": OSError("gone")})
