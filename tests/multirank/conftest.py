"""Real ranks for the tests in this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """Give the pool of a size. One is alive at a time, and a pool that failed is replaced."""
    pytest.importorskip("horovod", reason="Horovod is not installed: python cluster_configs/horovod/build.py")
    listening_before = _listening()
    pools: dict[int, Pool] = {}

    def pool_of(size: int) -> Pool:
        for other in pools.values():
            if other.size != size:
                other.close()
        if size not in pools or not pools[size].alive:
            pools[size] = Pool(size)
        return pools[size]

    yield pool_of
    for pool in pools.values():
        pool.close()
    assert not processes_of_pools(), "ranks were left running"
    assert _listening() <= listening_before, "ports were left open"


def _listening() -> set[tuple[str, int]]:
    here = psutil.Process()
    processes = [here, *here.children(recursive=True)]
    connections = [connection for process in processes for connection in process.net_connections("inet")]
    return {(connection.laddr.ip, connection.laddr.port) for connection in connections if connection.status == "LISTEN"}
