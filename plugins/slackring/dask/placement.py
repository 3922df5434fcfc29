"""Which rank runs on which worker, and what its environment says about that."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from slackring.dask.facts import WorkerFacts
from slackring.errors import PoolError

__all__ = ["Place", "place"]


@dataclass(frozen=True)
class Place:
    """A rank's place among all ranks.

    Parameters
    ----------
    worker
        Where the rank runs.
    rank, size
        Its number, and how many ranks there are.
    local_rank, local_size
        The same among the ranks of its host.
    cross_rank, cross_size
        The same among the ranks that have its local rank on their hosts.
    devices
        ``CUDA_VISIBLE_DEVICES`` of the rank: its own GPU has index ``local_rank`` in it. None leaves the worker's as it is.
    """

    worker: WorkerFacts
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    devices: str | None = None

    def environment(self, nics: Sequence[str] | None = None) -> dict[str, str]:
        """Give the variables from which Horovod, CUDA and the numerical libraries learn this place.

        Parameters
        ----------
        nics
            Network interfaces to use; by default the one that has the worker's own address.

        Raises
        ------
        PoolError
            If no interface is given, and none has the worker's address.
        """
        if nics is None and self.worker.interface is None:
            raise PoolError(
                f"{self.worker} is on a machine none of whose network interfaces has the address {self.worker.host}; name the "
                "interface that leads to the other workers (nics=)."
            )
        interfaces = nics or [str(self.worker.interface)]
        threads = str(self.worker.threads)
        environment = {
            # Horovod puts a port after a colon, and an IPv6 address has colons.
            "HOROVOD_HOSTNAME": re.sub(r"[^\w.-]", "-", self.worker.host),
            "HOROVOD_RANK": str(self.rank),
            "HOROVOD_SIZE": str(self.size),
            "HOROVOD_LOCAL_RANK": str(self.local_rank),
            "HOROVOD_LOCAL_SIZE": str(self.local_size),
            "HOROVOD_CROSS_RANK": str(self.cross_rank),
            "HOROVOD_CROSS_SIZE": str(self.cross_size),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": interfaces[0],  # Gloo takes one, NCCL several
            "NCCL_SOCKET_IFNAME": ",".join(interfaces),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
        }
        if self.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices
        return environment


def place(workers: Sequence[WorkerFacts], number: int, use_gpu: bool | None = None) -> tuple[Place, ...]:
    """Place ranks on workers, one on each.

    Ranks of one host are neighbours. Hosts are in the natural order of their addresses, and workers of one host in that of
    their names ("w2" before "w10"). Where not all workers are needed, the hosts with the most workers are filled first, so that
    the ranks are on as few hosts as possible.

    Parameters
    ----------
    workers
        What there is, in any order.
    number
        How many ranks to place.
    use_gpu
        Whether each rank has a GPU of its own (True, False), or has one if there are enough on every host (None).

    Returns
    -------
    tuple of Place
        By rank.

    Raises
    ------
    PoolError
        If there are too few workers, or, for ``use_gpu=True``, a host has too few GPUs; the message names the host.
    """
    if number < 1:
        raise PoolError(f"{number} ranks cannot train; ask for at least 1.")
    if number > len(workers):
        raise PoolError(
            f"{number} ranks need as many workers, and the cluster has {len(workers)}; start more, or ask for fewer ranks."
        )
    hosts: dict[str, list[WorkerFacts]] = defaultdict(list)
    for worker in sorted(workers, key=lambda worker: (_natural(worker.name), _natural(worker.address))):
        hosts[worker.host].append(worker)
    chosen: dict[str, list[WorkerFacts]] = {}
    left = number
    for host in sorted(hosts, key=lambda host: (-len(hosts[host]), _natural(host))):
        if left:
            chosen[host] = hosts[host][:left]
            left -= len(chosen[host])
    devices = _devices(chosen, use_gpu)
    places: list[Place] = []
    for host in sorted(chosen, key=_natural):
        for local_rank, worker in enumerate(chosen[host]):
            across = [place for place in places if place.local_rank == local_rank]
            places.append(
                Place(
                    worker=worker,
                    rank=len(places),
                    size=number,
                    local_rank=local_rank,
                    local_size=len(chosen[host]),
                    cross_rank=len(across),
                    cross_size=sum(len(others) > local_rank for others in chosen.values()),
                    devices=devices[host],
                )
            )
    return tuple(places)


def _natural(name: str | int) -> list[str | int]:
    """A key that sorts numbers within texts by value: texts and numbers take turns in it."""
    return [int(part) if index % 2 else part for index, part in enumerate(re.split(r"(\d+)", str(name)))]


def _devices(hosts: dict[str, list[WorkerFacts]], use_gpu: bool | None) -> dict[str, str | None]:
    """Find the ``CUDA_VISIBLE_DEVICES`` of each host's ranks; None leaves the workers' as they are."""
    if use_gpu is False:
        return dict.fromkeys(hosts, "")
    devices: dict[str, str | None] = {}
    for host, workers in hosts.items():
        lists = [_visible(worker) for worker in workers]
        firsts = [visible[0] for visible in lists if visible]
        own = [visible[local_rank] for local_rank, visible in enumerate(lists) if len(visible) > local_rank]
        if len(set(firsts)) == len(workers) and all(worker.visible is not None for worker in workers):
            # As dask-cuda starts workers: each has a list that begins with its own GPU.
            devices[host] = ",".join(firsts)
        elif len(set(own)) == len(workers):
            devices[host] = None
        elif use_gpu:
            raise PoolError(
                f"host {host} has {len(workers)} ranks, but its workers see {len(set().union(*lists))} GPUs; start fewer workers "
                "there, or train without GPUs (use_gpu=False)."
            )
        else:
            # One host without GPUs keeps all from using them: a sum over ranks is either on GPUs or not.
            return dict.fromkeys(hosts, "")
    return devices


def _visible(worker: WorkerFacts) -> list[str]:
    """List the GPUs that a worker sees; CUDA reads its list up to the first that does not exist."""
    if worker.visible is None:
        return [str(index) for index in range(worker.gpus)]
    names = [name.strip() for name in worker.visible.split(",")]
    end = next((index for index, name in enumerate(names) if name in ("", "-1")), len(names))
    return names[:end]
