"""Real ranks that are started once and run job after job, since a rank costs seconds to start."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "SLACKRING_TEST_POOL"  # environment variable by which every process of a pool is found again
RANK = "SLACKRING_TEST_RANK"  # environment variable that tells a rank its kind and number
_START_SECONDS = 120.0
_GRACE_SECONDS = 15.0  # for the other ranks, once one has failed
_LOG_TAIL = 40


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


def processes_of_pools(mark: str | None = None) -> list[psutil.Process]:
    """Processes that this process's pools (or the one with this mark) started, directly or not, and that still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            value = process.environ().get(MARK)
            ours = value is not None and (value == mark if mark else value.startswith(f"{os.getpid()}-"))
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
        self.size, self.kind, self.mark = size, kind, f"{os.getpid()}-{uuid.uuid4().hex}"
        self._meeting = contextlib.ExitStack()
        self.alive = True
        self._folder = Path(tempfile.mkdtemp(prefix="ring"))
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        settings = {
            "OMP_NUM_THREADS": "1",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
            # A deadlock ends as an error on every rank, which lists who is missing.
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30",
            MARK: self.mark,
        }
        try:
            slots = self._meeting.enter_context(_MEETING_POINTS[kind](size))
            with Listener(str(self._folder / "jobs"), "AF_UNIX", backlog=size) as listener:
                for rank, slot in enumerate(slots):
                    with (self._folder / f"{rank}.log").open("wb") as out:
                        command = [sys.executable, "-m", "tests.multirank.worker", str(listener.address)]
                        env = {**os.environ, **settings, RANK: f"{kind} {rank}", **slot, **(environment or {})}
                        self._ranks.append(
                            subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
                        )
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
            elif any(rank.poll() is not None for rank in self._ranks) or time.monotonic() > deadline:
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
                    code = self._ranks[rank].wait(_GRACE_SECONDS)
                    answers[rank] = False, f"died with exit code {code}; its log ends with\n{self._logs([rank])}"
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
            self._ranks[rank].send_signal(signal.SIGUSR1)
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

    def close(self) -> None:
        """End all ranks, whatever they do, and wait for them."""
        if not self.alive:
            return
        self.alive = False
        for link in self._links:
            link.close()  # a rank whose link is gone exits at once
        for process in self._ranks:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for left in processes_of_pools(self.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
                left.wait(5.0)
        self._meeting.close()
        shutil.rmtree(self._folder)
