"""Real Horovod ranks find each other through relays and our rendezvous, about as fast as at Horovod's own server."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slackring.dask.rendezvous import Rendezvous
from slackring.dask.signing import new_secret

SIZE = 4
MEETINGS = 5
SCOPES = {"global": SIZE, "local_127.0.0.1": SIZE, **{f"cross_{rank}": 1 for rank in range(SIZE)}}
TOTALS = ([10.0, 4.0], [10.0], [10.0, 4.0], [10.0])  # of all ranks, and of ranks 0 and 2
RANK = Path(__file__).with_name("meeting_rank.py")

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


class Ranks:
    """The processes of one meeting after the other."""

    def __init__(self, stack: contextlib.ExitStack, where: dict[str, Any] | None, **environment: str) -> None:
        self._processes = []
        for rank in range(SIZE):
            slot = {
                "HOROVOD_RANK": rank,
                "HOROVOD_SIZE": SIZE,
                "HOROVOD_LOCAL_RANK": rank,
                "HOROVOD_LOCAL_SIZE": SIZE,
                "HOROVOD_CROSS_RANK": 0,
                "HOROVOD_CROSS_SIZE": 1,
                "HOROVOD_HOSTNAME": "127.0.0.1",
                "HOROVOD_GLOO_IFACE": "lo",
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "OMP_NUM_THREADS": 1,
            }
            process = subprocess.Popen(
                [sys.executable, RANK],
                env={**os.environ, **{name: str(value) for name, value in slot.items()}, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            self._processes.append(process)
        assert self.tell(where) == ["ready"] * SIZE

    def tell(self, order: Any) -> list[Any]:
        """Give all ranks an order, and their answers by rank."""
        for process in self._processes:
            assert process.stdin
            print(json.dumps(order), file=process.stdin, flush=True)
        return [json.loads(process.stdout.readline()) for process in self._processes if process.stdout]

    def finish(self) -> list[int]:
        """Exit codes, once there are no more orders."""
        for process in self._processes:
            assert process.stdin
            process.stdin.close()
        return [process.wait(30) for process in self._processes]


@contextlib.contextmanager
def horovods_server() -> Iterator[dict[str, str]]:
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousServer

    state = random.getstate()  # Horovod draws the port from it
    server = RendezvousServer()
    port = server.start()
    random.setstate(state)
    server.init(get_host_assignments([HostInfo("127.0.0.1", SIZE)], SIZE, SIZE))
    yield {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
    server.stop()
    server._httpd.server_close()


def test_ranks_meet_in_every_generation_as_fast_as_at_horovods_own_server(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("horovod", reason="Horovod is not installed: python cluster_configs/horovod/build.py")
    secret = new_secret()
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        rendezvous = Rendezvous("127.0.0.1", secret)
        stack.callback(rendezvous.stop)
        ranks = Ranks(stack, {"host": rendezvous.host, "port": rendezvous.port, "secret": secret.hex()})
        for meeting in range(MEETINGS):
            rendezvous.open(str(meeting), SCOPES)
            totals, times = zip(*ranks.tell(str(meeting)), strict=True)
            assert totals == TOTALS
            seconds.setdefault("relays", []).append(max(times))
        assert ranks.finish() == [0] * SIZE
    with contextlib.ExitStack() as stack:
        ranks = Ranks(stack, None, **stack.enter_context(horovods_server()))
        for _ in range(MEETINGS):
            totals, times = zip(*ranks.tell(None), strict=True)
            assert totals == TOTALS
            seconds.setdefault("horovod", []).append(max(times))
        assert ranks.finish() == [0] * SIZE
    # A busy machine slows some meetings, but a request that Horovod had to repeat costs each of them half a second.
    fastest = {name: min(times) for name, times in seconds.items()}
    with capsys.disabled():
        print(
            f"\nhvd.init of {SIZE} ranks, at best: "
            + ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in fastest.items())
        )
    assert fastest["relays"] < fastest["horovod"] + 0.5
