"""An HTTP server on one address, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import responses

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders, HTTPServerRequest, ResponseStartLine

from slackring.dask.signing import MAX_BODY
from slackring.errors import PoolError

__all__ = ["Answer", "HttpThread"]

_PATIENCE = 30.0  # seconds for a request to arrive; also how long an unused connection is kept


@dataclass(frozen=True)
class Answer:
    """What an HTTP server says to one request."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpThread:
    """Answers HTTP requests in a thread until it is stopped.

    No connection holds up another: all are served by one event loop, and one that stalls is closed.

    Parameters
    ----------
    host
        The one address to bind, or a name of it; the port is a free one.
    answer
        Called in the server's thread with one request after the other.
    name
        Of the thread.

    Raises
    ------
    PoolError
        If this machine has no such address.
    """

    def __init__(self, host: str, answer: Callable[[HTTPServerRequest], Answer], name: str) -> None:
        self._answer = answer
        door = _listen(host)
        self.host, self.port = door.getsockname()[:2]
        self._loop, self._stopping = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=[door], name=name, daemon=True)
        self._thread.start()

    def _run(self, door: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(door))

    async def _serve(self, door: socket.socket) -> None:
        server = HTTPServer(
            self._on_request, idle_connection_timeout=_PATIENCE, body_timeout=_PATIENCE, max_body_size=MAX_BODY
        )
        server.add_socket(door)
        await self._stopping.wait()
        server.stop()
        await server.close_all_connections()

    def _on_request(self, request: HTTPServerRequest) -> None:
        answer = self._answer(request)
        headers = HTTPHeaders({**answer.headers, "Content-Length": str(len(answer.body))})
        connection = request.connection
        assert connection is not None  # of a request that came by network
        line = ResponseStartLine("HTTP/1.1", answer.status, responses[answer.status])
        connection.write_headers(line, headers, answer.body)
        connection.finish()

    def stop(self) -> None:
        """Close all connections and end the thread; a second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()


def _listen(host: str) -> socket.socket:
    """A socket on the first address of a host, not on all of them."""
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        door = socket.create_server((str(address[0]), 0), family=family)
    except OSError as exc:
        raise PoolError(f"cannot listen on {host!r} ({exc.strerror}); give an address of this machine.") from exc
    door.setblocking(False)
    return door
