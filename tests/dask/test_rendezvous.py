"""The rendezvous stores what Horovod's own does, for those who know the secret, and closes without leftovers."""

from __future__ import annotations

import http.client
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from slackring.dask.relay import _Caller, ping
from slackring.dask.rendezvous import Rendezvous
from slackring.dask.signing import MAX_BODY, NONCE, SIGNATURE, Nonces, new_secret, sign_request
from slackring.errors import PoolError

SECRET = new_secret()
SIZES = {"global": 2, "local_127.0.0.1": 2, "cross_0": 1, "cross_1": 1}


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    rendezvous = Rendezvous("127.0.0.1", SECRET)
    rendezvous.open("1", SIZES)
    yield rendezvous
    rendezvous.stop()


@pytest.fixture
def caller(rendezvous: Rendezvous) -> Iterator[_Caller]:
    caller = _Caller(rendezvous.host, rendezvous.port, SECRET, 5.0)
    yield caller
    caller.close()


def ask(rendezvous: Rendezvous, method: str, path: str, body: bytes = b"", **headers: str) -> int:
    """Status of a request with these headers only."""
    connection = http.client.HTTPConnection(rendezvous.host, rendezvous.port, timeout=5.0)
    connection.request(method, path, body, headers)
    status = connection.getresponse().status
    connection.close()
    return status


def signed(secret: bytes, nonce: str, method: str, path: str, body: bytes = b"") -> dict[str, str]:
    return {NONCE: nonce, SIGNATURE: sign_request(secret, method, path, nonce, body)}


def test_a_value_is_found_under_its_scope_and_key(caller: _Caller) -> None:
    assert caller.ask("GET", "/1/global/0", b"") == (404, b"")
    assert caller.ask("PUT", "/1/global/0", b"\0here") == (200, b"")
    assert caller.ask("GET", "/1/global/0", b"") == (200, b"\0here")
    assert caller.ask("GET", "/1/global/1", b"") == (404, b"")
    assert caller.ask("GET", "/1/cross_0/0", b"") == (404, b"")


def test_a_scope_is_emptied_when_all_its_ranks_have_finished(caller: _Caller) -> None:
    for scope in ("global", "local_127.0.0.1"):
        caller.ask("PUT", f"/1/{scope}/0", b"here")
    for _ in range(2):  # a rank that says it twice is still one
        assert caller.ask("DELETE", "/1/global/0", b"") == (200, b"")
        assert caller.ask("GET", "/1/global/0", b"") == (200, b"here")
    caller.ask("DELETE", "/1/local_127.0.0.1/0", b"")
    caller.ask("DELETE", "/1/global/1", b"")
    assert caller.ask("GET", "/1/global/0", b"") == (404, b"")
    assert caller.ask("GET", "/1/local_127.0.0.1/0", b"") == (200, b"here")
    caller.ask("DELETE", "/1/local_127.0.0.1/1", b"")
    assert caller.ask("GET", "/1/local_127.0.0.1/0", b"") == (404, b"")


def test_in_a_scope_of_unknown_size_a_rank_takes_back_its_own_key(caller: _Caller) -> None:
    scope = "/1/global_process_set_hash_1"
    caller.ask("PUT", f"{scope}/0", b"zero")
    caller.ask("PUT", f"{scope}/1", b"one")
    assert caller.ask("DELETE", f"{scope}/0", b"") == (200, b"")
    assert caller.ask("GET", f"{scope}/0", b"") == (404, b"")
    assert caller.ask("GET", f"{scope}/1", b"") == (200, b"one")


def test_a_new_generation_starts_empty_and_ends_the_one_before(rendezvous: Rendezvous, caller: _Caller) -> None:
    caller.ask("PUT", "/1/global/0", b"here")
    caller.ask("DELETE", "/1/global/0", b"")
    rendezvous.open("2", SIZES)
    assert caller.ask("GET", "/2/global/0", b"") == (404, b"")
    caller.ask("PUT", "/2/global/0", b"here")
    caller.ask("DELETE", "/2/global/1", b"")
    assert caller.ask("GET", "/2/global/0", b"") == (200, b"here"), "who had finished before counts no more"
    assert caller.ask("GET", "/1/global/0", b"") == (410, b"")
    assert caller.ask("PUT", "/1/global/0", b"late") == (410, b"")


def test_before_the_first_generation_nothing_is_stored() -> None:
    rendezvous = Rendezvous("127.0.0.1", SECRET)
    caller = _Caller(rendezvous.host, rendezvous.port, SECRET, 5.0)
    for generation in ("", "1", "%2F"):
        assert caller.ask("PUT", f"/{generation}/global/0", b"early") == (410, b"")
    caller.close()
    rendezvous.stop()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/ping", 200), ("GET", "/1/global", 400), ("PUT", "/ping", 400), ("POST", "/1/global/0", 405)],
)
def test_paths_and_methods(caller: _Caller, method: str, path: str, status: int) -> None:
    assert caller.ask(method, path, b"")[0] == status


def test_unsigned_and_wrongly_signed_requests_are_refused_and_store_nothing(
    rendezvous: Rendezvous, caller: _Caller
) -> None:
    path = "/1/global/0"
    nonce = Nonces().fresh()
    good = signed(SECRET, nonce, "PUT", path, b"evil")
    for headers in (
        {},
        {NONCE: nonce},
        {SIGNATURE: good[SIGNATURE]},
        {NONCE: nonce, SIGNATURE: ""},
        {NONCE: nonce, SIGNATURE: "é"},
        signed(new_secret(), nonce, "PUT", path, b"evil"),
        signed(SECRET, nonce, "GET", path, b"evil"),
        signed(SECRET, nonce, "PUT", "/1/global/1", b"evil"),
        signed(SECRET, nonce, "PUT", path, b"good"),
        {**good, NONCE: Nonces().fresh()},
    ):
        assert ask(rendezvous, "PUT", path, b"evil", **headers) == 403
        assert caller.ask("GET", path, b"") == (404, b"")
    assert ask(rendezvous, "GET", "/ping") == 403
    assert ask(rendezvous, "PUT", path, b"evil", **good) == 200, "the request that the others are variants of is fine"


def test_a_replayed_request_is_refused_and_stores_nothing(rendezvous: Rendezvous, caller: _Caller) -> None:
    headers = signed(SECRET, Nonces().fresh(), "PUT", "/1/global/0", b"old")
    assert ask(rendezvous, "PUT", "/1/global/0", b"old", **headers) == 200
    caller.ask("PUT", "/1/global/0", b"new")
    assert ask(rendezvous, "PUT", "/1/global/0", b"old", **headers) == 403
    assert caller.ask("GET", "/1/global/0", b"") == (200, b"new")


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("unpickled",)


def test_nothing_is_unpickled(caller: _Caller) -> None:
    bomb = pickle.dumps(Bomb())
    for scope in ("global", "worker_addresses"):
        caller.ask("PUT", f"/1/{scope}/127.0.0.1:0", bomb)
        assert caller.ask("GET", f"/1/{scope}/127.0.0.1:0", b"") == (200, bomb)


def test_a_body_above_the_limit_is_not_read(rendezvous: Rendezvous, caller: _Caller) -> None:
    assert caller.ask("PUT", "/1/global/0", bytes(MAX_BODY)) == (200, b"")
    with socket.create_connection((rendezvous.host, rendezvous.port), timeout=5.0) as connection:
        connection.sendall(f"PUT /1/global/1 HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY + 1}\r\n\r\n".encode())
        assert connection.makefile("rb").readline().startswith(b"HTTP/1.1 400")
    assert caller.ask("GET", "/1/global/1", b"") == (404, b"")


def test_connections_that_stall_hold_up_nobody(rendezvous: Rendezvous, caller: _Caller) -> None:
    stalled = []
    for said in (b"", b"GET /1/global/0 HT", b"PUT /1/global/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nsome"):
        for _ in range(20):
            stalled.append(socket.create_connection((rendezvous.host, rendezvous.port)))
            stalled[-1].sendall(said)
    assert caller.ask("PUT", "/1/global/0", b"here") == (200, b"")
    rendezvous.stop()
    for connection in stalled:
        with connection:
            connection.settimeout(5.0)
            assert connection.recv(1) == b"", "stopping closes them"


def test_connections_that_stall_are_closed(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slackring.dask.http_thread._PATIENCE", 0.1)
    impatient = Rendezvous("127.0.0.1", SECRET)
    for said in (b"", b"GET /1/gl", b"PUT /1/global/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nsome"):
        with socket.create_connection((impatient.host, impatient.port), timeout=5.0) as connection:
            connection.sendall(said)
            assert connection.recv(1) == b""
    impatient.stop()


def test_it_listens_on_its_one_address_only(rendezvous: Rendezvous) -> None:
    ours = [conn.laddr for conn in psutil.Process().net_connections("inet") if conn.status == psutil.CONN_LISTEN]
    assert [address for address in ours if address.port == rendezvous.port] == [("127.0.0.1", rendezvous.port)]


def test_a_host_name_stands_for_one_address() -> None:
    rendezvous = Rendezvous("localhost", SECRET)
    doors = [conn.laddr for conn in psutil.Process().net_connections("inet") if conn.laddr.port == rendezvous.port]
    rendezvous.stop()
    assert doors == [(rendezvous.host, rendezvous.port)] and rendezvous.host in ("127.0.0.1", "::1")


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_a_clear_error(host: str) -> None:
    with pytest.raises(PoolError, match=rf"cannot listen on '{host}' \(.+\); give an address of this machine\."):
        Rendezvous(host, SECRET)


def test_ping_tells_who_answers(rendezvous: Rendezvous) -> None:
    where = rendezvous.host, rendezvous.port
    assert ping(*where, SECRET, 5.0) is None
    assert "has not this pool's secret (status 403" in str(ping(*where, new_secret(), 5.0))
    rendezvous.stop()
    assert "cannot be reached from this machine ([Errno 111] Connection refused)" in str(ping(*where, SECRET, 5.0))


def test_ping_does_not_wait_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "cannot be reached from this machine (timed out)" in str(
            ping("127.0.0.1", silent.getsockname()[1], SECRET, 0.1)
        )


def test_starting_and_stopping_leaves_no_file_and_no_thread() -> None:
    here = psutil.Process()

    def once() -> None:
        rendezvous = Rendezvous("127.0.0.1", SECRET)
        assert ping(rendezvous.host, rendezvous.port, SECRET, 5.0) is None
        rendezvous.stop()
        rendezvous.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((rendezvous.host, rendezvous.port))

    once()
    files, threads = here.num_fds(), threading.active_count()
    for _ in range(100):
        once()
    assert (here.num_fds(), threading.active_count()) == (files, threads)


def test_neither_side_needs_horovod_or_torch() -> None:
    code = """
import sys
import slackring.dask.relay, slackring.dask.rendezvous
print([name for name in ("horovod", "torch", "distributed") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
