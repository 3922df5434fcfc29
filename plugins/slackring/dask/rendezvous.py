"""Where the ranks of a pool find each other: a key-value store for those who know the pool's secret."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tornado.httputil import HTTPServerRequest

from slackring.dask.http_thread import Answer, HttpThread
from slackring.dask.signing import NONCE, SIGNATURE, SeenNonces, same_signature, sign_request, sign_response

__all__ = ["Rendezvous"]


class Rendezvous:
    """The HTTP key-value store that Horovod's ranks meet at; it stores bytes and never looks into them.

    A path is ``/<generation>/<scope>/<key>``. Requests that are unsigned, signed with another secret, or replayed are
    refused (403), as are those of a generation that is over (410). A signed ``GET /ping`` is answered with 200.

    Parameters
    ----------
    host
        The one address to listen on, or a name of it. The port is a free one.
    secret
        The pool's, from :func:`slackring.dask.signing.new_secret`.

    Attributes
    ----------
    host, port
        Where it listens.

    Raises
    ------
    PoolError
        If this machine has no such address.

    Examples
    --------
    >>> rendezvous = Rendezvous("127.0.0.1", b"secret")
    >>> rendezvous.open("1", {"global": 2, "local_127.0.0.1": 2, "cross_0": 1, "cross_1": 1})
    >>> rendezvous.stop()
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._seen = SeenNonces()
        self._store = _Store("/", {})  # which no path can name
        self._server = HttpThread(host, self._answer, "slackring-rendezvous")
        self.host, self.port = self._server.host, self._server.port

    def open(self, generation: str, scope_sizes: Mapping[str, int]) -> None:
        """Start with an empty store, and forget what earlier generations left.

        Parameters
        ----------
        generation
            Names one meeting of all ranks; never used before, and fit for a path: letters, digits, hyphens.
        scope_sizes
            How many ranks meet in each of Horovod's scopes (``global``, ``local_<host>``, ``cross_<local rank>``). A
            scope is emptied when so many have finished; in other scopes, a finished rank only takes back its own key.
        """
        self._store = _Store(generation, scope_sizes)

    def stop(self) -> None:
        """Close the port and all connections; a second call does nothing."""
        self._server.stop()

    def _answer(self, request: HTTPServerRequest) -> Answer:
        method, path = str(request.method), str(request.uri)
        nonce, signature = request.headers.get(NONCE, ""), request.headers.get(SIGNATURE, "")
        expected = sign_request(self._secret, method, path, nonce, request.body)
        if not (same_signature(expected, signature) and self._seen.accept(nonce)):
            return Answer(403)
        status, body = self._serve(method, path, request.body)
        return Answer(status, body, {SIGNATURE: sign_response(self._secret, nonce, status, body)})

    def _serve(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if (method, path) == ("GET", "/ping"):
            return 200, b""
        parts = path.split("/")
        if len(parts) != 4:
            return 400, b""
        _, generation, scope, key = parts
        store = self._store  # open() puts another in its place at any time
        if generation != store.generation:
            return 410, b""
        match method:
            case "GET":
                value = store.get(scope, key)
                return (404, b"") if value is None else (200, value)
            case "PUT":
                store.put(scope, key, body)
            case "DELETE":
                store.finish(scope, key)
            case _:
                return 405, b""
        return 200, b""


class _Store:
    """What the ranks of one generation have told each other."""

    def __init__(self, generation: str, scope_sizes: Mapping[str, int]) -> None:
        self.generation = generation
        self._sizes = dict(scope_sizes)
        self._values: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        self._finished: defaultdict[str, set[str]] = defaultdict(set)

    def get(self, scope: str, key: str) -> bytes | None:
        return self._values.get(scope, {}).get(key)

    def put(self, scope: str, key: str, value: bytes) -> None:
        self._values[scope][key] = value

    def finish(self, scope: str, key: str) -> None:
        """A rank has met all others of a scope; it counts once, should it say so twice."""
        if scope not in self._sizes:
            self._values.get(scope, {}).pop(key, None)
            return
        self._finished[scope].add(key)
        if len(self._finished[scope]) == self._sizes[scope]:
            del self._finished[scope]
            self._values.pop(scope, None)
