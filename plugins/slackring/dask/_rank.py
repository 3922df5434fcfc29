"""What runs in a rank's process: ``python -m slackring.dask._rank PIPE``; its supervisor tells it the rest."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from slackring.dask.code import load_call, unpack
from slackring.dask.relay import Relay
from slackring.dask.saving import send_by, write_whole
from slackring.dask.telemetry import Telemetry
from slackring.errors import PoolError
from slackring.optim.ambient import stop_wish

_BUFFER = 1 << 16
_LONGEST = 20_000  # characters of an error or of its traceback
_OF_PEERS = {"HorovodInternalError", "RingError"}  # what ranks raise because another one has failed


class _Supervisor:
    """The supervisor, as the rank sees it; once it is gone, so is the rank."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._lock = pipe, threading.Lock()
        self._current = self._stopped = ""  # generations: of the call under way, and of the last that is to stop
        self.orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._input = os.dup(0)
        os.set_inheritable(pipe, False)  # the rank's own children
        with open(os.devnull, "rb") as nothing:  # input is not for the user's code
            os.dup2(nothing.fileno(), 0)
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, event: dict[str, Any]) -> None:
        """Tell it something; from any thread."""
        # Dask cannot send halves of characters, of which names of files may consist.
        line = json.dumps(event, ensure_ascii=False).encode(errors="replace") + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._pipe, line) :]

    def _listen(self) -> None:
        unread = b""
        try:
            # Not by a buffered file, which would abort the interpreter when it ends while this waits.
            while part := os.read(self._input, _BUFFER):
                *lines, unread = (unread + part).split(b"\n")
                for line in lines:
                    order = json.loads(line)
                    if order["op"] == "stop":
                        self._stop(order["generation"])
                    else:
                        self.orders.put(order)
        finally:
            os.killpg(os.getpgid(0), signal.SIGKILL)  # this rank, and all that it has started

    def _stop(self, generation: str) -> None:
        with self._lock:
            self._stopped = generation
            if generation == self._current:
                stop_wish.set()

    def begin(self, order: dict[str, Any]) -> None:
        """Begin a call: a wish to stop is one for this call, and may have come before it, but not for an earlier one."""
        with self._lock:
            self._current = order["generation"]
            stop_wish.clear()
            if order["stopping"] or self._stopped == self._current:
                stop_wish.set()


def main(pipe: int) -> int:
    """Carry out orders until there are no more."""
    faulthandler.enable()
    supervisor = _Supervisor(pipe)
    hello = supervisor.orders.get()
    relay = Relay(hello["host"], hello["port"], bytes.fromhex(hello["secret"]))
    os.environ.update(relay.environment())
    folder = Path(hello["folder"])
    send = functools.partial(_send, supervisor, folder)
    supervisor.tell({"kind": "started", "pid": os.getpid()})
    executable: list[Any] = []
    while (order := supervisor.orders.get())["op"] != "quit":
        if order["op"] == "rest":
            _rest()
            continue
        if order["op"] == "ready":
            supervisor.tell({"kind": "ready"})
            continue
        relay.generation = order["generation"]
        supervisor.begin(order)
        send_by(send if order["run"] else None)
        result = Path(order["result"])
        try:
            with Telemetry(hello["rank"], supervisor.tell):
                _take_modules(Path(order["archive"]), folder / "modules")
                value = _call(Path(order["call"]), executable if order["executable"] else ())
            if order["keep"]:
                executable, value = [value], None
            _write(value, result, f"what {order['what']} returns")
        except BaseException as exc:
            supervisor.tell({"kind": "failed", **_told(exc, result)})
        else:
            supervisor.tell({"kind": "done", "content": str(result)})
    return 0


def _send(supervisor: _Supervisor, folder: Path, name: str, content: bytes) -> None:
    """Send a file to the run's folder; a newer one takes the place of one that is still here."""
    file = folder / f"saved-{name}"
    write_whole(file, content)
    supervisor.tell({"kind": "saved", "name": name, "content": str(file)})


def _rest() -> None:
    """Leave Horovod, whose thread takes a fifth of a core also while nothing is to be done; the next call meets anew."""
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        hvd.shutdown()


def _take_modules(file: Path, folder: Path) -> None:
    """Make the user's modules importable, if any have come."""
    archive = file.read_bytes()
    file.unlink()
    if archive:
        unpack(archive, folder)
        sys.path.insert(0, str(folder))


def _call(file: Path, first: Sequence[Any]) -> Any:
    content = file.read_bytes()
    file.unlink()
    fn, args, kwargs = load_call(content)
    rank = os.getpid()
    try:
        return fn(*first, *args, **kwargs)
    except SystemExit as exc:
        if exc.code not in (None, 0):
            raise
    except BaseException:
        if os.getpid() != rank:
            traceback.print_exc()
        raise
    finally:
        with contextlib.suppress(Exception):  # the user's code may have closed or replaced it
            sys.stdout.flush()
        if os.getpid() != rank:
            os._exit(0)  # a copy of the rank that the function has forked, and which is none


def _write(value: object, file: Path, what: str) -> None:
    try:
        content = cloudpickle.dumps(value)
    except Exception as exc:
        raise PoolError(f"{what} is of type {type(value).__name__} and cannot be sent: {exc}") from exc
    file.write_bytes(content)


def _told(exc: BaseException, file: Path) -> dict[str, Any]:
    """What the supervisor is told of an error."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # the user's own part of it
    text = "".join(traceback.format_exception(type(exc), exc, trace))
    with contextlib.suppress(Exception):  # the user's code may have closed it
        print(text, file=sys.stderr, flush=True)
    of_peers = bool(_OF_PEERS.intersection(cls.__name__ for cls in type(exc).__mro__))
    # All of it is in the log.
    told = {"error": _sentence(exc)[:_LONGEST], "text": text[-_LONGEST:], "of_peers": of_peers}
    try:
        content = cloudpickle.dumps(exc)
        cloudpickle.loads(content)
        file.write_bytes(content)
    except Exception:  # of any kind: the class is the user's, and the disk may be full
        return told
    return {**told, "content": str(file)}


def _sentence(exc: BaseException) -> str:
    name = type(exc).__name__
    try:
        return f"{name}: {exc}".rstrip(": ")
    except Exception:
        return f"{name}, which has no text"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
