"""Where ranks are placed, held against Horovod's own launcher."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackring.dask.facts import WorkerFacts
from slackring.dask.placement import Place, place
from slackring.errors import PoolError


def worker(host: str, name: str | int, visible: str | None = None, gpus: int = 0, threads: int = 1) -> WorkerFacts:
    return WorkerFacts(
        address=f"tcp://{host}:{name}",
        name=name,
        incarnation=f"Worker-{host}-{name}",
        host=host,
        interface="eth0",
        hostname=host,
        threads=threads,
        gpus=gpus,
        visible=visible,
        python="3.11.2",
        machine="x86_64",
        versions={},
        built_for=None,
    )


def names(places: tuple[Place, ...]) -> list[str | int]:
    return [place.worker.name for place in places]


@given(
    slots=st.lists(st.integers(1, 5), min_size=1, max_size=6), shuffle=st.randoms(use_true_random=False), data=st.data()
)
def test_ranks_are_numbered_as_horovod_does(slots: list[int], shuffle: random.Random, data: st.DataObject) -> None:
    hosts = pytest.importorskip("horovod.runner.common.util.hosts")
    workers = [worker(f"10.0.0.{host}", f"w{k}") for host, slot in enumerate(slots) for k in range(slot)]
    shuffle.shuffle(workers)
    number = data.draw(st.integers(1, len(workers)))
    places = place(workers, number)

    used = sorted({place.worker.host for place in places}, key=lambda host: int(host.rpartition(".")[2]))
    counts = [sum(place.worker.host == host for place in places) for host in used]
    expected = hosts.get_host_assignments([hosts.HostInfo(*pair) for pair in zip(used, counts, strict=True)], number)
    assert [
        (p.worker.host, p.rank, p.local_rank, p.cross_rank, p.size, p.local_size, p.cross_size) for p in places
    ] == [(e.hostname, e.rank, e.local_rank, e.cross_rank, e.size, e.local_size, e.cross_size) for e in expected]
    assert len({place.worker.incarnation for place in places}) == number
    # No choice of fewer hosts would hold them.
    assert sum(sorted(slots, reverse=True)[: len(used) - 1]) < number


def test_order_is_natural_and_does_not_depend_on_arrival() -> None:
    workers = [worker(host, f"w{k}") for host in ("10.0.0.10", "10.0.0.9") for k in (10, 2, 1)]
    expected = [("10.0.0.9", "w1"), ("10.0.0.9", "w2"), ("10.0.0.9", "w10"), ("10.0.0.10", "w1")]
    for order in (workers, workers[::-1]):
        places = place(order, 6)
        assert [(p.worker.host, p.worker.name) for p in places[:4]] == expected


def test_names_may_be_numbers_and_texts() -> None:
    assert names(place([worker("10.0.0.1", name) for name in ("a", 10, 9, "b-2", "b-1")], 5)) == [
        9,
        10,
        "a",
        "b-1",
        "b-2",
    ]


def test_fewer_ranks_fill_the_largest_host_first() -> None:
    workers = [worker("10.0.0.1", "a"), *(worker("10.0.0.2", f"b{k}") for k in range(3)), worker("10.0.0.3", "c")]
    assert names(place(workers, 2)) == ["b0", "b1"]
    assert names(place(workers, 4)) == ["a", "b0", "b1", "b2"]


@pytest.mark.parametrize(("number", "told"), [(0, "at least 1"), (3, "the cluster has 2")])
def test_numbers_that_cannot_be_placed(number: int, told: str) -> None:
    with pytest.raises(PoolError, match=told):
        place([worker("10.0.0.1", 0), worker("10.0.0.1", 1)], number)


def test_environment_is_what_horovod_sets() -> None:
    gloo_run = pytest.importorskip("horovod.runner.gloo_run")
    hosts = pytest.importorskip("horovod.runner.common.util.hosts")
    places = place([worker("10.0.0.1", 0), worker("10.0.0.1", 1), worker("10.0.0.2", 2, threads=8)], 3)
    slots = hosts.get_host_assignments([hosts.HostInfo("10.0.0.1", 2), hosts.HostInfo("10.0.0.2", 1)], 3)
    for found, slot in zip(places, slots, strict=True):
        # The address and port of the rendezvous are added by what starts it.
        run = gloo_run.create_run_env_vars("host", ["eth0"], 1)
        mine = found.environment()
        expected = gloo_run.create_slot_env_vars(slot) | {k: v for k, v in run.items() if "RENDEZVOUS" not in k}
        assert {name: mine[name] for name in expected} == expected
    assert {places[2].environment()[f"{library}_NUM_THREADS"] for library in ("OMP", "MKL", "OPENBLAS")} == {"8"}


def test_horovod_gets_no_colon() -> None:
    environment = place([worker("fd00::1:2", 0)], 1)[0].environment()
    assert environment["HOROVOD_HOSTNAME"] == "fd00--1-2"


def test_interfaces_can_be_given() -> None:
    (found,) = place([replace(worker("10.0.0.1", "w1"), interface=None)], 1)
    given = found.environment(nics=["ib0", "ib1"])
    assert (given["HOROVOD_GLOO_IFACE"], given["NCCL_SOCKET_IFNAME"]) == ("ib0", "ib0,ib1")
    with pytest.raises(PoolError, match=r"worker 'w1' .* has the address 10.0.0.1; .*nics="):
        found.environment()


def visible(places: tuple[Place, ...]) -> list[str | None]:
    return [place.environment().get("CUDA_VISIBLE_DEVICES") for place in places]


@pytest.mark.parametrize("use_gpu", [None, True])
def test_workers_with_a_gpu_of_their_own(use_gpu: bool | None) -> None:
    rotated = [worker("10.0.0.1", 0, "0,1,2"), worker("10.0.0.1", 1, "1,2,0"), worker("10.0.0.1", 2, "2,0,1")]
    assert visible(place(rotated, 3, use_gpu)) == ["0,1,2"] * 3
    single = [worker("10.0.0.1", 0, "GPU-b"), worker("10.0.0.1", 1, "GPU-a"), worker("10.0.0.2", 2, "3")]
    assert visible(place(single, 3, use_gpu)) == ["GPU-b,GPU-a", "GPU-b,GPU-a", "3"]


@pytest.mark.parametrize("use_gpu", [None, True])
def test_workers_that_share_gpus(use_gpu: bool | None) -> None:
    assert visible(place([worker("10.0.0.1", k, gpus=2) for k in range(2)], 2, use_gpu)) == [None, None]
    assert visible(place([worker("10.0.0.1", k, "4,5") for k in range(2)], 2, use_gpu)) == [None, None]


@pytest.mark.parametrize(
    "few",
    [
        [worker("10.0.0.2", k, gpus=1) for k in range(2)],
        [worker("10.0.0.2", k, "0") for k in range(2)],
        [worker("10.0.0.2", k, "0,-1,1", gpus=2) for k in range(2)],
        [worker("10.0.0.2", k, "", gpus=2) for k in range(2)],
        [worker("10.0.0.2", 0, "0", gpus=2), worker("10.0.0.2", 1, "", gpus=2)],
        [worker("10.0.0.2", k) for k in range(2)],
    ],
)
def test_too_few_gpus_on_one_host(few: list[WorkerFacts]) -> None:
    workers = [worker("10.0.0.1", "a", gpus=1), *few]
    assert visible(place(workers, 3)) == ["", "", ""]
    with pytest.raises(PoolError, match=r"host 10.0.0.2 has 2 ranks, but its workers see [01] GPUs"):
        place(workers, 3, use_gpu=True)


def test_gpus_can_be_left_alone() -> None:
    assert visible(place([worker("10.0.0.1", 0, "0")], 1, use_gpu=False)) == [""]


def test_module_imports_neither_torch_nor_horovod() -> None:
    code = "import sys, slackring.dask.placement; print(sorted({'torch', 'horovod'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
