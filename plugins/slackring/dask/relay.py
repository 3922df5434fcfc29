"""Lets Horovod's C++, which cannot sign its requests, talk to the rendezvous of its pool."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import logging
import os
import socket
import socketserver
import stat
import threading
from collections.abc import Callable
from typing import Any

from slackring.dask.signing import MAX_BODY, NONCE, SIGNATURE, Nonces, same_signature, sign_request, sign_response
from slackring.errors import PoolError

__all__ = ["Relay", "ping"]

_LOOPBACK = "127.0.0.1"
_PATIENCE = 10.0  # seconds for an answer of the rendezvous
_POLL = 0.1  # seconds that stopping takes at most

log = logging.getLogger("slackring")


class Relay:
    """Takes the plain HTTP requests of this process, signs them, and hands them on to the rendezvous.

    It listens on the loopback, and refuses (403) what comes from other processes. Answers that the rendezvous did not sign
    are withheld (502), with a warning in the log.

    Parameters
    ----------
    host, port
        Of the rendezvous.
    secret
        The pool's.

    Attributes
    ----------
    generation
        Which meeting of the ranks the requests are about; to be set before ``hvd.init``.
    port
        Where it listens.

    Examples
    --------
    >>> relay = Relay("127.0.0.1", 2000, b"secret")
    >>> relay.generation = "1"
    >>> relay.environment()["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    '127.0.0.1'
    >>> relay.stop()
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self.generation = ""
        self._caller = _Caller(host, port, secret, _PATIENCE)
        self._server = _Server(self._answer)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=[_POLL], name="slackring-relay", daemon=True
        )
        self._thread.start()

    def environment(self) -> dict[str, str]:
        """The variables by which Horovod finds this relay."""
        return {"HOROVOD_GLOO_RENDEZVOUS_ADDR": _LOOPBACK, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port)}

    def stop(self) -> None:
        """Close the port and all connections, after the request in hand; a second call does nothing."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._caller.close()

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        try:
            return self._caller.ask(method, f"/{self.generation}{path}", body)
        except PoolError as exc:
            log.warning("the ranks cannot meet: %s", exc)
            return 502, b""


class _Server(socketserver.TCPServer):
    """Serves one connection after the other, which is how Horovod asks, and none of other processes."""

    request_queue_size = 128

    def __init__(self, answer: Callable[[str, str, bytes], tuple[int, bytes]]) -> None:
        super().__init__((_LOOPBACK, 0), _Handler)
        self.answer = answer

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuse a stranger before reading a byte, so that it cannot hold up this process."""
        own = _is_own(request)
        if not own:
            with contextlib.suppress(OSError):
                request.sendall(b"HTTP/1.0 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        return own

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Go on: Horovod asks again when a connection breaks."""
        log.warning("a request of this rank was not answered:", exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE
    wbufsize = -1  # an answer goes out in one piece

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, answer = self.server.answer(self.command, self.path, body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_DELETE = do_GET

    def log_message(self, *args: object) -> None:
        pass


def ping(host: str, port: int, secret: bytes, timeout: float) -> str | None:
    """Try whether this machine reaches the rendezvous of a pool.

    Parameters
    ----------
    host, port
        Of the rendezvous.
    secret
        The pool's.
    timeout
        Seconds to wait for the connection, and again for the answer.

    Returns
    -------
    str or None
        Why not, in a sentence; None if it is reached and has the same secret.
    """
    with contextlib.closing(_Caller(host, port, secret, timeout)) as caller:
        try:
            caller.ask("GET", "/ping", b"")
        except PoolError as exc:
            return str(exc)
    return None


class _Caller:
    """Asks a rendezvous with signed requests over one connection, one at a time."""

    def __init__(self, host: str, port: int, secret: bytes, timeout: float) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout)
        self._where = f"{host}:{port}"
        self._secret = secret
        self._nonces = Nonces()

    def ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Give the answer's status and body; raise `PoolError` if there is none that can be trusted."""
        try:
            try:
                return self._ask(method, path, body)
            except ConnectionError:  # the rendezvous drops connections that were idle for long
                return self._ask(method, path, body)
        except (OSError, http.client.HTTPException) as exc:
            reason = str(exc) or type(exc).__name__
            raise PoolError(f"the rendezvous at {self._where} cannot be reached from this machine ({reason}).") from exc

    def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        nonce = self._nonces.fresh()
        try:
            headers = {NONCE: nonce, SIGNATURE: sign_request(self._secret, method, path, nonce, body)}
            self._connection.request(method, path, body, headers)
            response = self._connection.getresponse()
            answer = response.read(MAX_BODY + 1)
            expected = sign_response(self._secret, nonce, response.status, answer)
            if not same_signature(expected, response.headers.get(SIGNATURE, "")):
                raise PoolError(
                    f"what answers at {self._where} has not this pool's secret (status {response.status}, not signed by it); "
                    "another program may listen there."
                )
        except BaseException:
            self.close()  # what else comes over it would not be the next answer
            raise
        return response.status, answer

    def close(self) -> None:
        self._connection.close()


def _is_own(connection: socket.socket) -> bool:
    """Whether the other end of a connection over the loopback is a socket of this process."""
    with contextlib.suppress(OSError):
        ends = connection.getpeername(), connection.getsockname()
        # One's own sockets are fewer than the lines of /proc/net/tcp, where each closed connection stays for a minute.
        return any(_ends(int(name)) == ends for name in os.listdir("/proc/self/fd"))
    return False


def _ends(fd: int) -> tuple[object, object] | None:
    """The own and the peer's address, if this is a connected socket."""
    with contextlib.suppress(OSError):
        # Copying a file and closing the copy would free its locks.
        if stat.S_ISSOCK(os.stat(fd).st_mode):
            with socket.socket(fileno=os.dup(fd)) as copy:
                return copy.getsockname(), copy.getpeername()
    return None
