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


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int, str], Pool]]:
    """Give the pool of a size and kind. One is alive at a time, and a pool that failed is replaced."""
    listening_before = _listening()
    alive: list[Pool] = []

    def pool_of(size: int, kind: str) -> Pool:
        if not alive or not alive[0].alive or (alive[0].size, alive[0].kind) != (size, kind):
            while alive:
                alive.pop().close()
            alive.append(Pool(size, kind=kind))
        return alive[0]

    yield pool_of
    while alive:
        alive.pop().close()
    assert not processes_of_pools(), "ranks were left running"
    assert _listening() <= listening_before, "ports were left open"


@pytest.fixture(scope="session")
def ranks(pools: Callable[[int, str], Pool]) -> Callable[[int], Pool]:
    """Give the pool of Horovod ranks of a size."""
    pytest.importorskip("horovod", reason="Horovod is not installed: python cluster_configs/horovod/build.py")
    return partial(pools, kind="horovod")


@pytest.fixture(scope="session")
def torch_ranks(pools: Callable[[int, str], Pool]) -> Callable[[int], Pool]:
    """Give the pool of ``torch.distributed`` ranks of a size."""
    return partial(pools, kind="torch")


def _listening() -> set[tuple[str, int]]:
    here = psutil.Process()
    processes = [here, *here.children(recursive=True)]
    connections = [connection for process in processes for connection in process.net_connections("inet")]
    return {(connection.laddr.ip, connection.laddr.port) for connection in connections if connection.status == "LISTEN"}
