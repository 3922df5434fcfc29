"""Dask clusters that a file describes, or that already run at an address."""

from __future__ import annotations

import copy
import html
import multiprocessing
import shlex
import shutil
import socket
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import dask
import distributed
from distributed.core import Status

from slackring.dask.cluster_files import check_arguments, find_class, own_arguments, read, settings, tls_settings
from slackring.errors import PoolError, SpecError

if TYPE_CHECKING:
    from distributed.deploy.cluster import Cluster

__all__ = ["RunningCluster", "asked_for", "connect", "load_cluster", "workers_of"]

_CONNECT_SECONDS = 10.0

# What cluster_configs/local.yaml has, for those who have no clone of the repository.
_LOCAL: Mapping[str, Any] = {
    "module": "distributed",
    "class": "LocalCluster",
    "kwargs": {
        "n_workers": 2,
        "threads_per_worker": 1,
        "host": "127.0.0.1",
        "memory_limit": 0,
        "dashboard_address": "127.0.0.1:0",
        "worker_dashboard_address": "127.0.0.1:0",
    },
    "dask_config": {
        "distributed.scheduler.allowed-failures": 0,
        "distributed.scheduler.work-stealing": False,
        "distributed.scheduler.worker-ttl": None,
    },
}


_replicas: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Workers of clusters that cannot tell themselves."""


class RunningCluster:
    """A Dask cluster that somebody else started; closing it leaves it running.

    Parameters
    ----------
    address
        Of its scheduler, such as ``tcp://10.0.0.1:8786``.
    """

    def __init__(self, address: str) -> None:
        self.scheduler_address = address
        #: Certificates, from Dask's own settings (``distributed.comm.tls``).
        self.security = distributed.Security()
        self.status = Status.running

    def __enter__(self) -> RunningCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RunningCluster({self.scheduler_address!r})"

    def _repr_html_(self) -> str:
        # A notebook that shows a client shows its cluster, too.
        return html.escape(repr(self))

    def __await__(self) -> Generator[None, None, RunningCluster]:
        # A client waits for its cluster when it starts, and for its close() when it shuts down.
        yield from ()
        return self

    def close(self) -> RunningCluster:
        """Forget the cluster."""
        self.status = Status.closed
        return self


def load_cluster(cluster: str | Path = "", workers: int | None = None) -> Cluster | RunningCluster:
    """Start the Dask cluster that a file describes, or find the one at an address.

    Parameters
    ----------
    cluster
        A YAML file: one like those in ``cluster_configs/``, or a Kubernetes manifest of kind ``DaskCluster``. Or the address of
        a scheduler, ``tcp://...`` or ``tls://...``; the latter's certificates are those of Dask's own settings. Empty: workers on
        this machine, as ``cluster_configs/local.yaml`` has them.
    workers
        How many workers to start, instead of the number in the file; at an address, none are started.

    Returns
    -------
    Cluster or RunningCluster
        For ``with``, and for a `distributed.Client`. Closing it ends what was started, and nothing else.

    Raises
    ------
    SpecError
        For a mistake in the file, naming the key and what it can be.
    PoolError
        If the cluster does not start, or nobody answers at the address.

    Examples
    --------
    >>> import slackring as sr
    >>> from distributed import Client
    >>> with sr.dask.load_cluster("cluster_configs/local.yaml", workers=1) as cluster, Client(cluster) as client:
    ...     client.submit(sum, [1, 2]).result()
    3
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A worker's process imports the script that started it, and would now start a cluster of its own.
        raise SystemExit(
            f"slackring: {cluster or 'a cluster'} is loaded when the script is imported: put the call below "
            '`if __name__ == "__main__":`.'
        )
    if workers is not None and workers < 1:
        raise SpecError(f"{cluster or 'this machine'}: {workers} workers were asked for, and at least 1 is needed.")
    if not str(cluster):
        return _start(_LOCAL, Path("this machine"), workers)
    if "://" in str(cluster):
        return _find(str(cluster))
    path = Path(cluster)
    document = read(path)
    return _start_pods(document, path, workers) if "kind" in document else _start(document, path, workers)


def workers_of(cluster: str | Path) -> int | None:
    """How many workers a cluster has: those its file asks for, or those that there are at its address.

    Parameters
    ----------
    cluster
        As of :func:`load_cluster`.

    Returns
    -------
    int or None
        None if the file does not say, or there are none yet.

    Raises
    ------
    SpecError, PoolError
        As of :func:`load_cluster`.
    """
    if "://" in str(cluster):
        with connect(load_cluster(cluster)) as client:
            return len(client.scheduler_info(n_workers=-1)["workers"]) or None
    document = read(Path(cluster)) if str(cluster) else _LOCAL
    if "kind" in document:
        replicas: int = document["spec"]["worker"]["replicas"]
        return replicas
    kwargs = document.get("kwargs", {})
    there, each = _hosts(kwargs)
    number: int = kwargs.get("n_workers") or there * each
    return number or None


def connect(cluster: Cluster | RunningCluster) -> distributed.Client:
    """Make a client of a cluster.

    Raises
    ------
    PoolError
        If its scheduler does not answer.
    """
    try:
        return distributed.Client(cluster)
    except OSError as exc:
        raise PoolError(f"no Dask scheduler answers at {cluster.scheduler_address}: {exc}.") from exc


def asked_for(cluster: Any) -> int:
    """How many workers a cluster was asked for, whether they are there or not; 0 if it cannot be told.

    Parameters
    ----------
    cluster
        Any of Dask's clusters, or None.
    """
    if cluster is None:
        return 0
    if hasattr(type(cluster), "job_cls"):  # jobs are what it counts, and one may start several workers
        return len(cluster.worker_spec) * int(cluster._dummy_job.worker_processes)
    return _replicas.get(cluster) or len(getattr(cluster, "plan", ()))


def _hosts(kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """How many hosts are reached by ssh to start workers, after the scheduler's, and how many workers start on each."""
    return len(kwargs.get("hosts") or [None]) - 1, kwargs.get("worker_options", {}).get("n_workers", 1)


def _find(address: str) -> RunningCluster:
    try:
        parts = urlsplit(address)
        where = (parts.hostname or "", parts.port or 0)
    except ValueError:
        where = ("", 0)
    if not all(where) or parts.scheme not in ("tcp", "tls"):
        raise SpecError(f"{address!r} is no address of a Dask cluster: tcp://HOST:PORT and tls://HOST:PORT are.")
    cluster = RunningCluster(address)
    context = cluster.security.get_connection_args("client").get("ssl_context")
    if parts.scheme == "tls" and context is None:
        raise SpecError(
            f"{address} takes certificates: give Dask distributed.comm.tls.ca-file, .client.cert and .client.key, in its "
            "settings or as DASK_DISTRIBUTED__COMM__TLS__CA_FILE and so on in the environment."
        )
    try:
        with socket.create_connection(where, timeout=_CONNECT_SECONDS) as connection:
            if parts.scheme == "tls":
                context.wrap_socket(connection, server_hostname=where[0]).close()
    except OSError as exc:
        raise PoolError(f"no Dask scheduler answers at {address}: {exc.strerror or exc}.") from exc
    return cluster


def _start(document: Mapping[str, Any], path: Path, workers: int | None) -> Cluster:
    """Start what a file with a class describes."""
    name, where = document["class"], str(path)
    target = find_class(document["module"], name, where)
    kwargs = dict(document.get("kwargs", {}))
    check_arguments(target, kwargs, f"{where}: kwargs")
    config = settings(document.get("dask_config", {}), where)
    tls = tls_settings(document.get("security", {}), path)
    if hasattr(target, "job_cls"):
        kwargs |= _for_jobs(target, kwargs, config, where)
    if isinstance(target, type) and issubclass(target, distributed.LocalCluster):
        given = kwargs.get("preload", ())
        kwargs["preload"] = [*([given] if isinstance(given, str) else given), "slackring.dask.preload"]
    own = own_arguments(target)
    if workers is not None and "n_workers" in own:
        kwargs["n_workers"] = workers
    elif workers is not None and "hosts" in own:
        kwargs |= _fewer_hosts(kwargs, workers, where)
    with dask.config.set(config | tls):
        if tls:
            kwargs["security"] = distributed.Security()
        cluster = _made(lambda: target(*document.get("args", []), **kwargs), name, where)
        if workers is not None and not own & {"n_workers", "hosts"}:
            cluster.scale(workers)
    return cluster


def _start_pods(document: Mapping[str, Any], path: Path, workers: int | None) -> Cluster:
    """Start what a Kubernetes manifest describes."""
    target = find_class("dask_kubernetes.operator", "KubeCluster", str(path))
    manifest = copy.deepcopy(dict(document))
    if workers is not None:
        manifest["spec"]["worker"]["replicas"] = workers
    options = {"custom_cluster_spec": manifest, "namespace": manifest["metadata"].get("namespace"), "quiet": True}
    cluster = _made(lambda: target(**options), "KubeCluster", str(path))
    _replicas[cluster] = manifest["spec"]["worker"]["replicas"]
    return cluster


def _made(make: Callable[[], Any], name: str, where: str) -> Cluster:
    try:
        cluster: Cluster = make()
    except Exception as exc:
        raise PoolError(f"{where}: {name} did not start: {str(exc).rstrip('.') or type(exc).__name__}.") from exc
    return cluster


def _for_jobs(target: Any, kwargs: Mapping[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Give what the jobs of a queue need; dask-jobqueue itself tells only in a log that it could not submit one."""
    command = shlex.split(target.job_cls.submit_command)[0]
    if shutil.which(command) is None:
        raise PoolError(f"{where}: this machine has no command {command!r}, by which {target.__name__} starts jobs.")
    # A job starts in an environment of its own, which knows nothing of the settings here.
    section = kwargs.get("config_name", target.job_cls.config_name)
    prologue = kwargs.get("job_script_prologue", dask.config.get(f"jobqueue.{section}.job-script-prologue"))
    inherit = [f"export DASK_INTERNAL_INHERIT_CONFIG={dask.config.serialize(config)}"] if config else []
    return {"job_script_prologue": [*prologue, *inherit]}


def _fewer_hosts(kwargs: Mapping[str, Any], workers: int, where: str) -> dict[str, Any]:
    """Leave out the hosts of a cluster over ssh that are not needed; the first one is the scheduler's."""
    there, each = _hosts(kwargs)
    needed, rest = divmod(workers, each)
    if rest or needed > there:
        raise SpecError(
            f"{where}: kwargs.hosts: {workers} workers were asked for, and after the scheduler's host there are {there} "
            f"with {each} each."
        )
    lists = {key: kwargs.get(key) for key in ("hosts", "connect_options", "remote_python")}
    return {key: value[: needed + 1] for key, value in lists.items() if isinstance(value, list)}
