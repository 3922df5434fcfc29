"""Runs a training function on the workers of a Dask cluster, one rank a worker, as ``horovodrun`` would on hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import cloudpickle

from slackring.dask.clusters import asked_for
from slackring.dask.code import Bundle, bundle, dump_call
from slackring.dask.pool import Pool, Settings
from slackring.dask.run import Callback, Run
from slackring.errors import PoolError
from slackring.naming import new_name

__all__ = ["DaskExecutor"]


class DaskExecutor:
    """Ranks of Horovod on the workers of a Dask cluster; a context manager.

    The methods are those of ``horovod.ray.RayExecutor``. Each rank is a process of its own beside its worker, and stays from
    :meth:`start` to :meth:`shutdown`, so that only the first call waits for it. Functions of a script or notebook, and the
    modules and packages beside it, reach the ranks by themselves; packages that are installed have to be installed there, too.

    With an asynchronous client, ``async with`` and ``await`` go before what would wait.

    Parameters
    ----------
    client
        A ``distributed.Client``.
    num_workers
        Ranks, each on a worker of its own. None is all workers: those that the client's cluster was asked for, and it waits for
        them; at an address, and after a failure, those that there are.
    settings
        What :meth:`create_settings` gives.
    use_gpu
        Whether each rank has a GPU of its own, which is number ``hvd.local_rank()``. None uses GPUs where there are enough;
        False hides them.
    modules
        Names of further modules of the user's that ranks import: needed for those that are imported by a computed name.
    out
        Folder for the runs' folders.

    Examples
    --------
    ::

        with sr.DaskExecutor(Client(cluster), num_workers=4) as executor:
            results = executor.run(train, kwargs={"epochs": 3})

    Notes
    -----
    If a rank fails, all ranks end, and the next call starts new ones, with a new executable if there was one.
    """

    def __init__(
        self,
        client: Any,
        num_workers: int | None = None,
        *,
        settings: Settings | None = None,
        use_gpu: bool | None = None,
        modules: Sequence[str] = (),
        out: str | Path = "runs",
    ) -> None:
        if num_workers is not None and num_workers < 1:
            raise PoolError(f"num_workers= must be at least 1, not {num_workers}.")
        self._client, self._number, self._use_gpu = client, num_workers, use_gpu
        self._settings = settings or Settings()
        self._modules, self._out = tuple(modules), Path(out)
        self._environment: dict[str, str] = {}
        self._executable: bytes | None = None
        self._pool: Pool | None = None
        self._turn: asyncio.Lock | None = None
        self._runs: list[Run] = []
        self._started = False

    @property
    def size(self) -> int:
        """How many ranks there are; 0 before they have started."""
        return 0 if self._pool is None else len(self._pool.places)

    @classmethod
    def create_settings(
        cls, timeout_s: float = 30.0, placement_timeout_s: float = 100.0, nics: Sequence[str] | None = None
    ) -> Settings:
        """Make settings; see :class:`slackring.dask.pool.Settings` for what they are."""
        return Settings(timeout_s, placement_timeout_s, None if nics is None else tuple(nics))

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> Any:
        """Start the ranks.

        Parameters
        ----------
        executable_cls, executable_args, executable_kwargs
            What to make an object of on every rank, for :meth:`execute`.
        extra_env_vars
            Environment variables for every rank.

        Raises
        ------
        PoolError
            If there are too few workers, if they differ, if others have them for too long, or if they cannot reach each other;
            the message names the worker.
        HorovodMissingError
            If a worker lacks Horovod.
        """
        self._check_client()
        self._environment = {name: str(value) for name, value in (extra_env_vars or {}).items()}
        modules = self._bundled(executable_cls, executable_args, executable_kwargs)
        self._executable = (
            None
            if executable_cls is None
            else dump_call(executable_cls, executable_args or (), executable_kwargs or {})
        )
        return self._client.sync(self._start, modules)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results by rank.

        Parameters
        ----------
        fn
            The training function; it calls ``hvd.init()``, as a script under ``horovodrun`` does.
        args, kwargs
            Its arguments, the same on all ranks.
        callbacks
            Each is called here with a dict of what a rank gave to ``sr.report``, and the rank as ``rank``; in a thread.

        Raises
        ------
        RankError
            If a rank raises, dies or loses its worker; all ranks have ended then. The message has the rank's own traceback, or
            the end of its log; an exception that it raised is the cause.
        KeyboardInterrupt
            On Ctrl-C; all ranks have ended then.
        """
        return self._to_the_end(self.run_remote(fn, args, kwargs, callbacks))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> Run:
        """Begin what :meth:`run` does, and return at once; also with an asynchronous client."""
        return self._begin(fn, args or (), kwargs or {}, callbacks or ())

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> Any:
        """Call ``fn(executable)`` on every rank and return the results by rank."""
        return self._to_the_end(self._begin(fn, (), {}, callbacks or (), executable=True))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(executable)`` on rank 0 alone and return its result; it must not wait for other ranks."""
        run = self._begin(fn, (), {}, (), executable=True, ranks=(0,))
        if self._client.asynchronous:
            return self._first(run)
        return self._to_the_end(run)[0]

    def shutdown(self) -> Any:
        """End all ranks, and what runs on them."""
        self._started = False
        return self._client.sync(self._shutdown)

    def __enter__(self) -> Self:
        if not self._started:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        if not self._started:
            await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    def _begin(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        callbacks: Sequence[Callback],
        *,
        executable: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> Run:
        if not self._started:
            raise PoolError("this executor has no ranks: use it in a with block, or call start() first.")
        self._check_client()
        if executable and self._executable is None:
            raise PoolError("there is no executable: give start() an executable_cls=, or use run().")
        what = getattr(fn, "__name__", type(fn).__name__)
        content, modules = dump_call(fn, args, kwargs), self._bundled(fn, *args, kwargs)
        run = Run(self._client, self._out / new_name(what.strip("<>")), what, callbacks)
        run.begin(self._carry_out(run, content, modules, executable, ranks))
        self._runs = [*(earlier for earlier in self._runs if not earlier.done()), run]
        return run

    def _check_client(self) -> None:
        if self._client.status in ("closing", "closed"):
            raise PoolError(
                "the client of this executor is closed, and its ranks have ended; make an executor of another."
            )

    def _bundled(self, *what: Any) -> Bundle:
        """The user's modules for a call, and for those before it: ranks that have some need not be started anew for others."""
        found = bundle(*what, modules=self._modules)
        self._modules = tuple({*self._modules, *found.names})
        return found

    def _to_the_end(self, run: Run) -> Any:
        """Wait for a run that nobody else has a hold of."""
        if self._client.asynchronous:
            return self._await_to_the_end(run)
        try:
            return run.result()
        except BaseException:
            if not run.done():
                run.cancel()
            raise

    async def _await_to_the_end(self, run: Run) -> Any:
        try:
            return await run.result()
        except BaseException:
            if not run.done():
                await asyncio.shield(run.cancel())
            raise

    async def _first(self, run: Run) -> Any:
        return (await self._await_to_the_end(run))[0]

    # On the client's event loop

    async def _start(self, modules: Bundle) -> None:
        async with self._lock():
            await self._renew(modules)
            self._started = True

    async def _carry_out(
        self, run: Run, content: bytes, modules: Bundle, executable: bool, ranks: Sequence[int] | None
    ) -> list[Any]:
        async with self._lock():
            if self._pool is None or self._pool.has_others_than(modules) or not await self._pool.ready():
                await self._renew(modules)
            assert self._pool is not None
            run.run_on(self._pool)
            contents = await self._pool.call(
                content,
                modules,
                run.what,
                run.take,
                run=run.id,
                ranks=ranks,
                executable=executable,
                stopping=run.stopping,
            )
        return [_loaded(rank, result) for rank, result in enumerate(contents)]

    async def _renew(self, modules: Bundle) -> None:
        """Start new ranks, in place of those there may be."""
        again = self._pool is not None and bool(self._pool.places)  # a worker that has died may not come back
        if self._pool is not None:
            await self._pool.close()
        self._pool = Pool(
            self._client,
            self._number,
            (lambda: 1) if again else (lambda: asked_for(self._client.cluster) or 1),
            self._settings,
            self._use_gpu,
            self._environment,
        )
        await self._pool.open()
        if self._executable is not None:
            await self._pool.call(self._executable, modules, "the executable", lambda rank, event: None, keep=True)

    async def _shutdown(self) -> None:
        for run in self._runs:
            if not run.done():
                await run.cancel()
        async with self._lock():
            if self._pool is not None:
                await self._pool.close()
            self._pool = None

    def _lock(self) -> asyncio.Lock:
        """What runs hold, one after the other; made on the loop."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        return self._turn


def _loaded(rank: int, content: bytes) -> Any:
    try:
        return cloudpickle.loads(content)
    except Exception as exc:
        raise PoolError(
            f"what rank {rank} returned cannot be read here ({type(exc).__name__}: {exc}); return plain values or CPU tensors."
        ) from exc
