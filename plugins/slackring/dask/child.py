"""The process of one rank, as its supervisor sees it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Child"]

_BUFFER = 1 << 16
_GRACE = 3.0  # seconds between SIGTERM and SIGKILL


class Child:
    """A rank's process; a context manager that leaves nothing of it running.

    Orders go down its standard input, events come up a pipe, both as JSON lines; what it prints goes to a file. It leads a
    process group, so that what it has started ends with it.

    Parameters
    ----------
    folder
        Private to it.
    environment
        All its environment variables.

    Attributes
    ----------
    pipe : int
        The file descriptor on which events arrive.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._log = (folder / "rank.log").open("w+b")
        self._logged = 0
        self.pipe, theirs = os.pipe()
        os.set_blocking(self.pipe, False)
        try:
            self._process = subprocess.Popen(
                # Not the current folder, but what is bundled is where the user's modules come from (-P).
                [sys.executable, "-P", "-m", "slackring.dask._rank", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                env=dict(environment),
                start_new_session=True,
            )
        except BaseException:
            os.close(self.pipe)
            self._log.close()
            raise
        finally:
            os.close(theirs)
        self._unread: list[bytes] = []
        """Parts of a line whose end has not come."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        os.close(self.pipe)
        self._log.close()

    @property
    def code(self) -> int | None:
        """Its exit code, minus the signal's number if one ended it; None while it runs."""
        return self._process.poll()

    def send(self, order: Mapping[str, Any]) -> None:
        """Send it an order; one that has ended does not hear it."""
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def events(self) -> list[dict[str, Any]]:
        """Take the events that have arrived."""
        lines: list[bytes] = []
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.pipe, _BUFFER):
                head, *rest = part.split(b"\n")
                self._unread.append(head)
                for piece in rest:
                    lines.append(b"".join(self._unread))
                    self._unread = [piece]
        return [json.loads(line) for line in lines]

    def printed(self) -> Iterator[str]:
        """Take what it has printed since the last time, in parts; not what it prints meanwhile."""
        end = os.fstat(self._log.fileno()).st_size
        while self._logged < end:
            part = os.pread(self._log.fileno(), min(_BUFFER, end - self._logged), self._logged)
            # A character may be written in parts; at the end of the file it may stay broken.
            whole = len(part)
            while whole > max(len(part) - 4, 0) and self.code is None and _broken(part[:whole]):
                whole -= 1
            if not whole:
                return
            self._logged += whole
            yield part[:whole].decode(errors="replace")

    def tail(self, lines: int, characters: int) -> str:
        """Give the end of what it has printed."""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), 4 * characters, max(size - 4 * characters, 0)).decode(errors="replace")
        return "".join(text.splitlines(keepends=True)[-lines:])[-characters:]

    def end(self) -> None:
        """End it and all that it has started: politely, and after some seconds by force."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.code is None:
                self._signal(number)
                self._signal(signal.SIGCONT)  # one that is stopped would not hear of it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE)
        self._signal(signal.SIGKILL)  # to what it has left behind

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _broken(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError as exc:
        return exc.reason == "unexpected end of data"
    return False
