"""What a worker tells about itself, and whether workers are alike enough to train together."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import ipaddress
import json
import os
import platform
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from distributed.comm.addressing import get_address_host
from distributed.utils import ensure_ip

from slackring._version import __version__
from slackring.errors import HorovodMissingError, PoolError

__all__ = ["WorkerFacts", "check_alike", "look", "read_answers"]

_BUILD = "build it there for its torch, in a clone of the repository: python cluster_configs/horovod/build.py"


@dataclass(frozen=True)
class WorkerFacts:
    """A Dask worker, as far as the ranks of a training run care.

    Parameters
    ----------
    address, name
        Where the scheduler reaches it, and what the cluster calls it.
    incarnation
        Unique for the worker's process: a restarted worker has the address and name of the one before, but not this.
    host
        The IP address in its address; workers with the same are on one machine.
    interface
        The network interface that has this IP address; None if none of the machine's has it.
    hostname
        What the machine calls itself.
    threads
        How many threads the worker was given.
    gpus
        How many GPUs the machine has.
    visible
        The worker's ``CUDA_VISIBLE_DEVICES``; None if it is not set.
    python, machine
        Version of Python, and architecture of the processor.
    versions
        Versions of torch, Horovod, Slackring, cloudpickle and distributed; None for a package that is missing.
    built_for
        The torch that Horovod was built for; None if it was built for none.
    """

    address: str
    name: str | int
    incarnation: str
    host: str
    interface: str | None
    hostname: str
    threads: int
    gpus: int
    visible: str | None
    python: str
    machine: str
    versions: Mapping[str, str | None]
    built_for: str | None

    def __str__(self) -> str:
        return f"worker {self.name!r} ({self.address})"

    def to_json(self) -> dict[str, Any]:
        """Give the fields as a dictionary that JSON can write."""
        return dataclasses.asdict(self) | {"versions": dict(self.versions)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> WorkerFacts:
        """Take the fields back from what :meth:`to_json` gave."""
        return cls(**fields)


def look(dask_worker: Any) -> dict[str, Any]:
    """Look at a worker, on the worker: ``client.run(look)``.

    It answers within milliseconds, since it runs on the worker's event loop: torch and Horovod are not imported.

    Parameters
    ----------
    dask_worker
        Dask fills it in.

    Returns
    -------
    dict
        The JSON of :class:`WorkerFacts`.
    """
    address = str(dask_worker.address)
    # Workers inside the client's process have an address that no other process can use.
    host = "127.0.0.1" if address.startswith("inproc://") else str(ensure_ip(get_address_host(address)))
    horovod = _folder("horovod")
    metadata = None if horovod is None else horovod / "metadata.json"
    return WorkerFacts(
        address=address,
        name=dask_worker.name,
        incarnation=dask_worker.id,
        host=host,
        interface=_interface(host, psutil.net_if_addrs()),
        hostname=socket.gethostname(),
        threads=dask_worker.state.nthreads,
        gpus=_gpus(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        python=platform.python_version(),
        machine=platform.machine(),
        versions={
            "torch": _torch_version(),
            "horovod": _version("horovod"),
            "slackring": __version__,
            "cloudpickle": _version("cloudpickle"),
            "distributed": _version("distributed"),
        },
        built_for=json.loads(metadata.read_text()).get("pytorch") if metadata and metadata.exists() else None,
    ).to_json()


def read_answers(answers: Mapping[str, Any]) -> list[WorkerFacts]:
    """Read what all workers told.

    Parameters
    ----------
    answers
        What ``client.run(look, on_error="return")`` returned: facts or an exception by the workers' addresses.

    Raises
    ------
    PoolError
        If a worker could not look, for example since it has no Slackring; the message names its address.
    """
    for address, answer in answers.items():
        if isinstance(answer, ModuleNotFoundError):
            raise PoolError(
                f"the worker at {address} has no module {answer.name!r}; install there what the client has: "
                f"pip install 'slackring[dask]=={__version__}'."
            ) from answer
        if isinstance(answer, BaseException):
            raise PoolError(
                f"the worker at {address} cannot tell what it has ({type(answer).__name__}: {answer})."
            ) from answer
    return [WorkerFacts.from_json(answer) for answer in answers.values()]


def check_alike(
    workers: Sequence[WorkerFacts], python: str = platform.python_version(), slackring: str = __version__
) -> list[str]:
    """Compare what workers have with each other, and with the client.

    Ranks may be unequally fast, so unequal threads and machines are only told. The client needs neither torch nor Horovod.

    Parameters
    ----------
    workers
        At least one.
    python, slackring
        Versions of the client's Python and Slackring.

    Returns
    -------
    list of str
        Sentences that the user should read: workers whose threads, processors or builds of torch differ.

    Raises
    ------
    HorovodMissingError
        If a worker has no Horovod, or one that was built for another torch.
    PoolError
        If a worker has no torch, or versions differ, or some workers can be reached from their own machine only; the message
        names the worker.
    """
    for worker in workers:
        _check(worker, python, slackring)
    first = workers[0]
    for worker in workers:
        for package, version in (("torch", _torch_release), ("horovod", lambda facts: facts.versions["horovod"])):
            if version(worker) != version(first):
                raise PoolError(
                    f"{worker} has {package} {version(worker)}, but {first} has {version(first)}; "
                    "install the same version everywhere."
                )
        if _is_loopback(worker.host) != _is_loopback(first.host):
            alone, other = (worker, first) if _is_loopback(worker.host) else (first, worker)
            raise PoolError(
                f"{alone} can be reached from its own machine only, and {other} is elsewhere; start the scheduler and all "
                "workers on addresses that the others reach (dask worker --host)."
            )
    warnings = []
    if told := _unequal(workers, lambda worker: worker.threads):
        warnings.append(f"Workers have different numbers of threads, so ranks will be unequally fast: {told}.")
    if told := _unequal(workers, lambda worker: worker.machine):
        warnings.append(f"Workers have different processors, so equal work may give different bits: {told}.")
    if told := _unequal(workers, lambda worker: worker.versions["torch"]):
        warnings.append(f"Workers have different builds of torch, so equal work may give different bits: {told}.")
    return warnings


def _check(worker: WorkerFacts, python: str, slackring: str) -> None:
    """Check what a worker must have, whatever the others have."""
    # Functions travel as bytecode, which is another in each minor version.
    if worker.python.split(".")[:2] != python.split(".")[:2]:
        raise PoolError(
            f"{worker} runs Python {worker.python}, but the client runs {python}, which cannot send it functions; use the "
            f"same minor version on both."
        )
    if worker.versions["slackring"] != slackring:
        raise PoolError(
            f"{worker} has slackring {worker.versions['slackring']}, but the client has {slackring}; install the same "
            "version on both."
        )
    torch, horovod = worker.versions["torch"], worker.versions["horovod"]
    if torch is None:
        raise PoolError(f"{worker} has no torch; install it there: pip install torch.")
    if horovod is None:
        raise HorovodMissingError(f"{worker} has no Horovod; {_BUILD}.")
    if worker.built_for != torch:
        built_for = f"torch {worker.built_for}" if worker.built_for else "no torch"
        raise HorovodMissingError(f"{worker} has a Horovod built for {built_for}, but its torch is {torch}; {_BUILD}.")


def _torch_release(worker: WorkerFacts) -> str:
    """The version without the build, which differs between machines with and without GPUs."""
    return str(worker.versions["torch"]).partition("+")[0]


def _unequal(workers: Sequence[WorkerFacts], fact: Callable[[WorkerFacts], object]) -> str:
    """Tell which workers have what; nothing if all have the same."""
    names: dict[object, list[str]] = {}
    for worker in workers:
        names.setdefault(fact(worker), []).append(repr(worker.name))
    if len(names) < 2:
        return ""
    return "; ".join(f"{value} on {', '.join(those)}" for value, those in names.items())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _torch_version() -> str | None:
    """What ``torch.__version__`` is: it names the build ("+cu130"), where the package's metadata may not."""
    folder = _folder("torch")
    found = re.search(r"^__version__ = '(.+)'", (folder / "version.py").read_text(), re.MULTILINE) if folder else None
    return found[1] if found else _version("torch")


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _interface(host: str, addresses: Mapping[str, Sequence[Any]]) -> str | None:
    """Find the interface of an IP address; all of 127.0.0.0/8 belongs to the loopback's."""
    for name, entries in addresses.items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                mine = entry.address.partition("%")[0]
                if mine == host or (_is_loopback(host) and _is_loopback(mine)):
                    return name
    return None


def _gpus(root: Path = Path("/")) -> int:
    """Count the machine's GPUs (NVIDIA's), without CUDA, which would keep some of their memory."""
    # Before the first use there may be no devices yet, and a container may show its devices alone.
    devices = [path for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return max(len(devices), len(list(root.glob("proc/driver/nvidia/gpus/*"))))
