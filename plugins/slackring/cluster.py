"""A cluster of virtual ranks in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from slackring.errors import SpecError
from slackring.ring.network import Network, parse_network
from slackring.ring.virtual import run_virtual
from slackring.stragglers import Pacer, Straggler, parse

__all__ = ["VirtualCluster"]

T = TypeVar("T")


class VirtualCluster:
    """Runs a training function on virtual ranks under a virtual clock.

    The ranks are greenlets of this process. Computing takes no virtual time: a local step costs what `step_time` and
    `straggler` say, a round what `network` says, and a run is the same every time.

    Parameters
    ----------
    size
        Ranks.
    step_time
        Seconds of an undisturbed local step.
    straggler
        A straggler model or its text, such as ``"persistent:ranks=3,factor=4"``.
    network
        What a round costs, or its text, such as ``"latency=0.01,bandwidth=1e9"``; nothing by default.
    seed
        Of the straggler's draws and of every rank's random streams.

    Raises
    ------
    SpecError
        For values that cannot be.

    Examples
    --------
    >>> import slackring as sr
    >>> cluster = VirtualCluster(4, step_time=0.1)
    >>> def train():
    ...     ring = sr.ring()
    ...     ring.clock.sleep(ring.rank)
    ...     ring.barrier()
    ...     return ring.clock.now()
    >>> cluster.run(train)
    [3.0, 3.0, 3.0, 3.0]
    """

    def __init__(
        self,
        size: int,
        step_time: float = 0.1,
        straggler: Straggler | str | None = None,
        network: Network | str | None = None,
        seed: int = 0,
    ) -> None:
        if size < 1:
            raise SpecError(f"a cluster has at least one rank, not {size}.")
        model = (parse(straggler) if isinstance(straggler, str) else straggler) or parse("none")
        model.check(size)
        self.size, self._seed = size, seed
        self._network = (parse_network(network) if isinstance(network, str) else network) or Network()
        self._pacer = Pacer(model.seeded(seed), step_time)

    def run(self, fn: Callable[..., T], *args: object, **kwargs: object) -> list[T]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results by rank.

        Raises
        ------
        RingError
            If all ranks wait for each other; the message names who lacks in what.
        Exception
            The first error of a rank, with a note that names it.
        """
        return run_virtual([self._pacer] * self.size, self._network, self._seed, fn, args, kwargs)
