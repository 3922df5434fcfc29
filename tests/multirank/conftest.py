"""Real ranks for the tests in this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import psutil
import pytest
from tests.multirank.pool import Pool, processes_of_pools

SIZES = (2, 4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/multirank/" in item.path.as_posix():
            item.add_marker("multirank")


@pytest.fixture(scope="session", params=SIZES, ids="{}ranks".format)
def size(request: pytest.FixtureRequest) -> int:
    """A number of ranks; tests of one size run one after the other."""
    return int(request.param)


class Pools:
    """The pools of all sizes and kinds. One is alive at a time, and a pool that failed is replaced."""

    def __init__(self) -> None:
        self._alive: list[Pool] = []

    def __call__(self, size: int, kind: str) -> Pool:
        """Give the pool of a size and kind."""
        if not self._alive or not self._alive[0].alive or (self._alive[0].size, self._alive[0].kind) != (size, kind):
            self.close()
            self._alive.append(Pool(size, kind=kind))
        return self._alive[0]

    def close(self) -> None:
        """End the ranks, if there are any."""
        while self._alive:
            self._alive.pop().close()


@pytest.fixture(scope="package")
def pools() -> Iterator[Pools]:
    """Give the pool of a size and kind; all ranks end with the tests of this folder."""
    listening_before = _listening()
    pools = Pools()
    yield pools
    pools.close()
    assert not processes_of_pools(), "ranks were left running"
    assert _listening() <= listening_before, "ports were left open"


@pytest.fixture(autouse=True)
def no_idle_ranks(request: pytest.FixtureRequest) -> None:
    """End the ranks before a test that has no use for them: idle ones ask each other all the time whether there is work."""
    if "pools" not in request.fixturenames:
        request.getfixturevalue("pools").close()


@pytest.fixture(scope="package")
def ranks(pools: Pools) -> Callable[[int], Pool]:
    """Give the pool of Horovod ranks of a size."""
    pytest.importorskip("horovod", reason="Horovod is not installed: python cluster_configs/horovod/build.py")
    return partial(pools, kind="horovod")


@pytest.fixture(scope="package")
def torch_ranks(pools: Pools) -> Callable[[int], Pool]:
    """Give the pool of ``torch.distributed`` ranks of a size."""
    return partial(pools, kind="torch")


def _listening() -> set[tuple[str, int]]:
    here = psutil.Process()
    processes = [here, *here.children(recursive=True)]
    connections = [connection for process in processes for connection in process.net_connections("inet")]
    return {(connection.laddr.ip, connection.laddr.port) for connection in connections if connection.status == "LISTEN"}
