"""A relay signs for its own process and no other, and passes on only what the rendezvous has signed."""

from __future__ import annotations

import http.client
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from slackring.dask import relay as relays
from slackring.dask.http_thread import Answer, HttpThread
from slackring.dask.relay import Relay
from slackring.dask.rendezvous import Rendezvous
from slackring.dask.signing import NONCE, SIGNATURE, new_secret, sign_response

SECRET = new_secret()


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    rendezvous = Rendezvous("127.0.0.1", SECRET)
    rendezvous.open("1", {"global": 1})
    yield rendezvous
    rendezvous.stop()


@pytest.fixture
def relay(rendezvous: Rendezvous) -> Iterator[Relay]:
    relay = Relay(rendezvous.host, rendezvous.port, SECRET)
    relay.generation = "1"
    yield relay
    relay.stop()


def ask(relay: Relay, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Ask as Horovod does: with a connection for each request, and bare headers."""
    host, port = relay.environment().values()
    with socket.create_connection((host, int(port)), timeout=5.0) as connection:
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        response = http.client.HTTPResponse(connection, method=method)
        response.begin()
        return response.status, response.read()


def test_a_request_goes_to_the_current_generation_and_its_answer_comes_back(
    rendezvous: Rendezvous, relay: Relay
) -> None:
    assert ask(relay, "GET", "/global/0") == (404, b"")
    assert ask(relay, "PUT", "/global/0", b"here\0") == (200, b"")
    assert ask(relay, "GET", "/global/0") == (200, b"here\0")
    assert ask(relay, "DELETE", "/global/0") == (200, b"")
    assert ask(relay, "GET", "/global/0") == (404, b"")
    rendezvous.open("2", {"global": 1})
    assert ask(relay, "GET", "/global/0") == (410, b"")
    relay.generation = "2"
    assert ask(relay, "GET", "/global/0") == (404, b"")


def test_the_environment_names_the_relay(relay: Relay) -> None:
    assert relay.environment() == {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(relay.port),
    }
    listening = [conn.laddr for conn in psutil.Process().net_connections("inet") if conn.laddr.port == relay.port]
    assert listening == [("127.0.0.1", relay.port)]


STRANGER = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=5)
try:
    connection.request("PUT", "/global/0", b"evil")
    print(connection.getresponse().status)
except ConnectionError:
    print("closed")
"""


def test_another_process_cannot_use_it(relay: Relay) -> None:
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", STRANGER, str(relay.port)], capture_output=True, text=True)
        assert done.stdout.strip() in ("403", "closed"), done.stderr
    assert ask(relay, "GET", "/global/0") == (404, b"")


def test_a_stranger_that_stalls_is_told_off_and_holds_up_nobody(relay: Relay) -> None:
    code = "import socket, sys; print(socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(99)); input()"
    command = [sys.executable, "-c", code, str(relay.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout and b"HTTP/1.0 403" in stranger.stdout.readline()
        assert ask(relay, "GET", "/global/0") == (404, b"")
        stranger.communicate(b"\n")


def test_whose_connection_it_is_counts_as_unknown_where_it_cannot_be_told(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_proc(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(relays.os, "listdir", no_proc)
    assert ask(relay, "GET", "/global/0")[0] == 403


@pytest.mark.parametrize("kind", ["unsigned", "other secret", "other nonce", "other body", "other status"])
def test_a_forged_answer_is_withheld(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def forge(request: object) -> Answer:
        nonce = request.headers[NONCE]  # type: ignore[attr-defined]
        signature = {
            "unsigned": "",
            "other secret": sign_response(new_secret(), nonce, 200, b"evil"),
            "other nonce": sign_response(SECRET, nonce + "0", 200, b"evil"),
            "other body": sign_response(SECRET, nonce, 200, b"good"),
            "other status": sign_response(SECRET, nonce, 404, b"evil"),
        }[kind]
        return Answer(200, b"evil", {SIGNATURE: signature})

    forger = HttpThread("127.0.0.1", forge, "forger")
    relay = Relay(forger.host, forger.port, SECRET)
    with caplog.at_level(logging.WARNING, "slackring"):
        assert ask(relay, "GET", "/global/0") == (502, b"")
    relay.stop()
    forger.stop()
    assert "has not this pool's secret (status 200" in caplog.text


def test_a_dropped_connection_is_made_anew(relay: Relay) -> None:
    assert ask(relay, "PUT", "/global/0", b"here") == (200, b"")
    relay._caller._connection.sock.shutdown(socket.SHUT_RDWR)
    assert ask(relay, "GET", "/global/0") == (200, b"here")


def test_a_rendezvous_that_is_gone_is_told_in_the_log(
    rendezvous: Rendezvous, relay: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    assert ask(relay, "GET", "/global/0") == (404, b"")
    rendezvous.stop()
    assert ask(relay, "GET", "/global/0") == (502, b"")
    assert "the ranks cannot meet: the rendezvous at 127.0.0.1:" in caplog.text


def test_starting_and_stopping_leaves_no_file_and_no_thread() -> None:
    here = psutil.Process()

    def once() -> None:
        rendezvous = Rendezvous("127.0.0.1", SECRET)
        rendezvous.open("1", {})
        relay = Relay(rendezvous.host, rendezvous.port, SECRET)
        relay.generation = "1"
        assert ask(relay, "GET", "/global/0") == (404, b"")
        relay.stop()
        relay.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", relay.port))
        rendezvous.stop()

    once()
    before = here.num_fds(), threading.active_count()
    for _ in range(20):
        once()
    assert (here.num_fds(), threading.active_count()) == before
