"""Real ranks that run job after job, forked from a process that has imported what costs every rank seconds to import."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.connection import Connection, Listener, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
from tests.multirank import worker

ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 120.0
_GRACE_SECONDS = 15.0  # for the other ranks, once one has failed
_LOG_TAIL = 40
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch._dynamo", "torch.distributed", "horovod.torch"])
_started: set[int] = set()


class RankFailure(AssertionError):
    """A job that failed on some rank: with each rank's traceback, or the end of its log if it died or hangs."""


def job_name(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and name by which a rank finds a function; it must stand at the top level of its module."""
    if "." in function.__qualname__ or function.__name__ == "<lambda>":
        raise ValueError(f"a job is a top-level function, not {function.__qualname__}")
    module = sys.modules[function.__module__]
    path = Path(str(module.__file__)).resolve()
    if path.is_relative_to(ROOT / "tests"):
        return ".".join(path.relative_to(ROOT).with_suffix("").parts), function.__name__
    return function.__module__, function.__name__


@contextlib.contextmanager
def rendezvous(size: int) -> Iterator[list[dict[str, str]]]:
    """Gloo's meeting point for Horovod ranks; yields each rank's environment."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousServer

    state = random.getstate()  # Horovod draws the port from it
    server = RendezvousServer(verbose=0)
    port = server.start(handler_cls=RendezvousHandler)
    random.setstate(state)
    try:
        plan = get_host_assignments([HostInfo("localhost", size)], size, size)
        server.init(plan)
        shared = create_run_env_vars("127.0.0.1", ["lo"], port, elastic=False)
        yield [{key: str(value) for key, value in {**shared, **create_slot_env_vars(slot)}.items()} for slot in plan]
    finally:
        server.stop()
        server._httpd.server_close()  # stop() forgets it


@contextlib.contextmanager
def torch_store(size: int) -> Iterator[list[dict[str, str]]]:
    """The store of ``torch.distributed``, as torchrun keeps it for its ranks; yields each rank's environment."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(size),
    }
    yield [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


@contextlib.contextmanager
def rendezvous_for_sets(size: int) -> Iterator[list[dict[str, str]]]:
    """The meeting point of Horovod ranks that may make process sets after their start, which costs every cycle an exchange."""
    with rendezvous(size) as slots:
        yield [{**slot, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"} for slot in slots]


_MEETING_POINTS = {"horovod": rendezvous, "horovod_sets": rendezvous_for_sets, "torch": torch_store}


def processes_of_pools(ranks: Collection[int] | None = None) -> list[psutil.Process]:
    """Processes that ranks (those of all pools, unless some are given by number) are or started, and that still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ours = os.getsid(process.pid) in (_started if ranks is None else ranks)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Pool:
    """Ranks over Gloo on this machine.

    Parameters
    ----------
    size
        Ranks.
    environment
        Variables to set in the ranks beside those of their library.
    kind
        "horovod", "horovod_sets" if jobs make process sets, or "torch" for ``torch.distributed``.
    """

    def __init__(self, size: int, environment: dict[str, str] | None = None, kind: str = "horovod") -> None:
        self.size, self.kind = size, kind
        self._meeting = contextlib.ExitStack()
        self.alive = True
        self._folder = Path(tempfile.mkdtemp(prefix="ring"))
        self._ranks: list[ForkServerProcess] = []
        self._links: list[Connection] = []
        settings = {
            "OMP_NUM_THREADS": "1",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
            # A deadlock ends as an error on every rank, which lists who is missing.
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30",
        }
        try:
            slots = self._meeting.enter_context(_MEETING_POINTS[kind](size))
            with Listener(str(self._folder / "jobs"), "AF_UNIX", backlog=size) as listener:
                for rank, slot in enumerate(slots):
                    variables = {**os.environ, **settings, **slot, **(environment or {})}
                    call = kind, rank, str(listener.address), str(self._log(rank)), variables
                    self._ranks.append(_FORKS.Process(target=worker.main, args=call))
                    self._ranks[-1].start()
                    _started.add(self._ranks[-1].pid)
                self._links = self._accept(listener)
                for rank, (worked, value) in self._collect("start", _START_SECONDS).items():
                    if not worked:
                        raise RankFailure(f"rank {rank} of {size} did not start:\n{value}")
        except BaseException:
            self.close()
            raise

    def _accept(self, listener: Listener) -> list[Connection]:
        """Wait until every rank has called; the first thing it says is which one it is."""
        links: dict[int, Connection] = {}
        deadline = time.monotonic() + _START_SECONDS
        door = listener._listener._socket  # type: ignore[attr-defined]
        while len(links) < self.size:
            if wait([door], 0.2):
                link = listener.accept()
                links[pickle.loads(link.recv_bytes())] = link
            elif any(rank.exitcode is not None for rank in self._ranks) or time.monotonic() > deadline:
                raise RankFailure(f"the ranks of a pool of {self.size} did not start:\n{self._logs(range(self.size))}")
        return [links[rank] for rank in range(self.size)]

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, dies: Collection[int] = (), **kwargs: Any
    ) -> list[Any]:
        """Call a function on every rank.

        Parameters
        ----------
        function
            Stands at the top level of a module.
        *args, **kwargs
            Pickled, as are the results.
        timeout
            Seconds until the ranks that have not returned count as hanging.
        dies
            Ranks that are expected to die in the job; their result is None, and the pool ends with the job.

        Returns
        -------
        list
            Results by rank.

        Raises
        ------
        RankFailure
            If the function raises on a rank, or a rank dies or hangs. The pool is closed then.
        """
        if not self.alive:
            raise RuntimeError("this pool is closed; ask for a new one")
        name = f"{function.__module__}.{function.__name__}"
        job = pickle.dumps((*job_name(function), args, kwargs))
        try:
            for link in self._links:
                link.send_bytes(job)
            answers = self._collect(name, timeout, dies)
        except BaseException:
            self.close()
            raise
        failed = {rank: value for rank, (worked, value) in answers.items() if not worked}
        if failed or dies:
            self.close()
        if failed:
            told = "\n".join(f"--- rank {rank} of {self.size}\n{value}" for rank, value in sorted(failed.items()))
            raise RankFailure(f"{name} failed on rank {', '.join(map(str, sorted(failed)))}:\n{told}")
        return [answers[rank][1] if rank in answers else None for rank in range(self.size)]

    def _collect(self, name: str, timeout: float, dies: Collection[int] = ()) -> dict[int, tuple[bool, Any]]:
        """One answer of each rank, as (worked, result or traceback)."""
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {link: rank for rank, link in enumerate(self._links)}
        deadline, failing = time.monotonic() + timeout, False
        while waiting:
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0.0))
            for link in ready:
                assert isinstance(link, Connection)
                rank = waiting.pop(link)
                try:
                    answers[rank] = pickle.loads(link.recv_bytes())
                except (EOFError, ConnectionResetError):
                    if rank in dies:
                        continue
                    self._ranks[rank].join(_GRACE_SECONDS)
                    code, log = self._ranks[rank].exitcode, self._logs([rank])
                    answers[rank] = False, f"died with exit code {code}; its log ends with\n{log}"
            if not failing and any(not worked for worked, _ in answers.values()):
                # The others may wait for that rank for ever.
                deadline, failing = min(deadline, time.monotonic() + _GRACE_SECONDS), True
            elif not ready:
                stacks = self._stacks(list(waiting.values()))
                if failing:
                    answers |= {
                        rank: (False, f"still busy when another had failed:\n{stacks}") for rank in waiting.values()
                    }
                    break
                hanging = ", ".join(map(str, sorted(waiting.values())))
                raise RankFailure(
                    f"{name}: rank {hanging} of {self.size} did not return within {timeout:g} s:\n{stacks}"
                )
        return answers

    def _stacks(self, ranks: Sequence[int]) -> str:
        """Have ranks write where they are into their logs."""
        sizes = {rank: self._log(rank).stat().st_size for rank in ranks}
        for rank in ranks:
            os.kill(self._ranks[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and any(
            self._log(rank).stat().st_size == size for rank, size in sizes.items()
        ):
            time.sleep(0.02)
        return self._logs(ranks)

    def _log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"

    def _logs(self, ranks: Sequence[int]) -> str:
        parts = []
        for rank in ranks:
            lines = self._log(rank).read_text(errors="replace").splitlines() if self._log(rank).exists() else []
            parts.append("\n".join([f"--- log of rank {rank}", *lines[-_LOG_TAIL:]]))
        return "\n".join(parts)

    def log(self, rank: int) -> str:
        """Everything a rank has written to its standard output and error so far."""
        return self._log(rank).read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """What still runs of the ranks, and of what they started."""
        return processes_of_pools({rank.pid for rank in self._ranks})

    def close(self) -> None:
        """End all ranks, whatever they do, and wait for them."""
        if not self.alive:
            return
        self.alive = False
        for link in self._links:
            link.close()  # a rank whose link is gone exits at once
        for process in self._ranks:
            process.join(5.0)
            process.kill()
            process.join()
        for left in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
                left.wait(5.0)
        self._meeting.close()
        shutil.rmtree(self._folder)
