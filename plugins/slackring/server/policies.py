"""When a parameter server lets its workers go on: BSP, ASP, SSP, DSSP and ElasticBSP, as published.

Everything here is a value or a pure decision: no clock, no network, no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np

from slackring import zipline
from slackring.errors import RuleError
from slackring.spec import parse, render

__all__ = [
    "ASP",
    "BSP",
    "DSSP",
    "POLICIES",
    "SSP",
    "ElasticBSP",
    "Gate",
    "Policy",
    "Verdict",
    "extra_steps",
    "parse_policy",
]


class Verdict(NamedTuple):
    """What a server does about the pushes that have just arrived.

    Attributes
    ----------
    answered
        Workers that get their OK now, and the new weights with it; ascending.
    pooled
        Those of the pushing workers whose gradient waits for the barrier. All that have waited are averaged into one update
        when their workers are answered; every other gradient is applied as it arrives.
    """

    answered: tuple[int, ...]
    pooled: tuple[int, ...] = ()


class Gate(ABC):
    """Decides, for one run, which workers go on; made by :meth:`Policy.gate`.

    Parameters
    ----------
    size
        Number of workers.

    Attributes
    ----------
    pushes : list of int
        By worker, how many of its pushes have arrived.
    training : set of int
        Workers that have not left.
    held : set of int
        Workers that wait for their OK.
    """

    def __init__(self, size: int) -> None:
        self.pushes = [0] * size
        self.training = set(range(size))
        self.held: set[int] = set()

    def pushed(self, workers: Sequence[int], at: float) -> Verdict:
        """Decide about pushes that arrived at the same time.

        Parameters
        ----------
        workers
            Who pushed; each was answered before (or has just begun), and has not left.
        at
            When, in any unit; whole numbers keep ties exact.
        """
        for worker in workers:
            self.pushes[worker] += 1
        self.held.update(workers)
        self._observe(workers, at)
        return Verdict(pooled=tuple(worker for worker in workers if self._pools(worker)), answered=self._answer())

    def left(self, worker: int, at: float) -> Verdict:
        """Decide what changes when a worker without an open push leaves: nobody waits for it any more."""
        self.training.discard(worker)
        self._observe((), at)
        return Verdict(self._answer())

    def lead(self, worker: int) -> int:
        """How many pushes a worker is ahead of the slowest one that still trains."""
        return self.pushes[worker] - min(self.pushes[other] for other in self.training)

    def _observe(self, workers: Sequence[int], at: float) -> None:  # noqa: B027  # few gates need more than the counts
        """Take note of pushes, or of a leave, before anything is decided about them."""

    def _pools(self, worker: int) -> bool:
        """Whether the gradient of a worker that has just pushed waits for the barrier."""
        return False

    @abstractmethod
    def _may_go(self, worker: int) -> bool:
        """Whether a held worker gets its OK."""

    def _answer(self) -> tuple[int, ...]:
        answered = tuple(sorted(worker for worker in self.held if self._may_go(worker)))
        self.held.difference_update(answered)
        return answered


@dataclass(frozen=True)
class Policy(ABC):
    """How a parameter server answers its workers: a value whose ``str()`` :func:`parse_policy` reads back.

    Attributes
    ----------
    name
        The policy's text name; ``server/`` tells it from a rule of the ring.
    averages
        Whether every update is an average over all workers, so that the learning rate grows with their number.
    """

    name: ClassVar[str]
    averages: ClassVar[bool] = False

    @abstractmethod
    def gate(self, size: int) -> Gate:
        """Start deciding for `size` workers."""

    def __str__(self) -> str:
        return render(self.name, self)

    def _at_least(self, least: int, **options: int) -> None:
        for option, value in options.items():
            if value < least:
                raise RuleError(f"policy {self.name!r}: {option} is {least} or more, not {value}.")


@dataclass(frozen=True)
class BSP(Policy):
    """Bulk-synchronous parallel: a barrier at every step, one update from the average of all gradients.

    Examples
    --------
    >>> gate = BSP().gate(2)
    >>> gate.pushed([0], at=1.0), gate.pushed([1], at=4.0)
    (Verdict(answered=(), pooled=(0,)), Verdict(answered=(0, 1), pooled=(1,)))
    """

    name: ClassVar[str] = "server/bsp"
    averages: ClassVar[bool] = True

    def gate(self, size: int) -> Gate:
        """Start deciding for `size` workers."""
        return _Barrier(size)


class _Barrier(Gate):
    def _pools(self, worker: int) -> bool:
        return True

    def _may_go(self, worker: int) -> bool:
        return self.held == self.training


@dataclass(frozen=True)
class ASP(Policy):
    """Asynchronous parallel: every push is answered at once, and nobody ever waits for another.

    Examples
    --------
    >>> ASP().gate(2).pushed([0], at=1.0)
    Verdict(answered=(0,), pooled=())
    """

    name: ClassVar[str] = "server/asp"

    def gate(self, size: int) -> Gate:
        """Start deciding for `size` workers."""
        return _Open(size)


class _Open(Gate):
    def _may_go(self, worker: int) -> bool:
        return True


@dataclass(frozen=True)
class SSP(Policy):
    """Stale synchronous parallel: a worker waits while it is more than `staleness` pushes ahead of the slowest.

    So no worker computes more than `staleness` pushes ahead, and none has pushed more than ``staleness + 1`` ahead. 0 lets all
    workers take the same steps without pooling their gradients.

    Parameters
    ----------
    staleness
        The published *s*; at least 0.

    Examples
    --------
    >>> gate = SSP(staleness=1).gate(2)
    >>> [gate.pushed([0], at=1.0).answered, gate.pushed([0], at=2.0).answered, gate.pushed([1], at=4.0).answered]
    [(0,), (), (0, 1)]
    """

    name: ClassVar[str] = "server/ssp"
    staleness: int = 3

    def __post_init__(self) -> None:
        self._at_least(0, staleness=self.staleness)

    def gate(self, size: int) -> Gate:
        """Start deciding for `size` workers."""
        return _Bounded(size, self.staleness)


class _Bounded(Gate):
    def __init__(self, size: int, staleness: int) -> None:
        super().__init__(size)
        self._staleness = staleness

    def _may_go(self, worker: int) -> bool:
        return self.lead(worker) <= self._staleness


@dataclass(frozen=True)
class DSSP(Policy):
    """Dynamic SSP: like SSP with `lower`, but the fastest worker may be let on to where it will wait least.

    When the fastest worker is more than `lower` pushes ahead, the server predicts its next pushes and those of the slowest
    from the last interval of each, and grants it the number of further steps after which a push of both lies closest together.
    From "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning" (ICDCS 2019), algorithm 1 with its
    controller. *r* granted steps are *r* steps, as the text has it (the printed listing makes them one more). Of several
    slowest workers the first counts.

    Parameters
    ----------
    lower, upper
        The published *s_L* and *s_U*; 0 <= lower <= upper.
    bounded
        Grant nothing beyond `upper`, so that the bound of the paper's theorem holds: no worker computes more than `upper` pushes
        ahead of the slowest. The printed listing lets a worker that has used up its grant ask for up to ``upper - lower``
        more at once, and so bounds nothing; only so can DSSP be as fast as ASP between workers of unlike speed, as the paper
        found it.

    Examples
    --------
    >>> str(DSSP(lower=2, upper=8))
    'server/dssp:lower=2,upper=8'
    """

    name: ClassVar[str] = "server/dssp"
    lower: int = 3
    upper: int = 15
    bounded: bool = True

    def __post_init__(self) -> None:
        self._at_least(0, lower=self.lower)
        if self.upper < self.lower:
            raise RuleError(
                f"policy {self.name!r}: lower <= upper must hold, not lower={self.lower} and upper={self.upper}."
            )

    def gate(self, size: int) -> Gate:
        """Start deciding for `size` workers."""
        return _Dynamic(size, self)


class _LastTwo:
    """By worker, when its last two pushes arrived: the table of DSSP's controller, and what ElasticBSP predicts from."""

    def __init__(self, size: int) -> None:
        self._times: list[tuple[float, ...]] = [()] * size

    def note(self, workers: Iterable[int], at: float) -> None:
        for worker in workers:
            self._times[worker] = (*self._times[worker][-1:], at)

    def complete(self, workers: Iterable[int]) -> bool:
        return all(len(self._times[worker]) == 2 for worker in workers)

    def __getitem__(self, worker: int) -> tuple[float, float]:
        before, last = self._times[worker]
        return before, last


def _predicted(times: tuple[float, float], pushes: range) -> list[float]:
    """When a worker's pushes after the last one will arrive, if its interval stays as it was."""
    before, last = times
    return [last + number * (last - before) for number in pushes]


def extra_steps(own: tuple[float, float], slowest: tuple[float, float], most: int) -> int:
    """How many more steps a worker takes so as to wait least for the slowest one: the controller of DSSP.

    The least ``abs(Sim_slowest[k] - Sim_own[r])`` tells r, with ``Sim_own[r] = last + r * interval`` and ``Sim_slowest[k] =
    last + (k + 1) * interval`` for r and k from 0 to `most`; of several pairs the one with the fewest steps.

    Parameters
    ----------
    own, slowest
        When the last two pushes of each arrived, the earlier one first.
    most
        Steps that may be granted.

    Examples
    --------
    After three steps the worker pushes at 130, as the slowest will:

    >>> extra_steps(own=(90, 100), slowest=(60, 95), most=4)
    3
    """
    mine = np.array(_predicted(own, range(most + 1)))
    theirs = np.array(_predicted(slowest, range(1, most + 2)))
    return int(np.abs(mine[:, None] - theirs).min(axis=1).argmin())


class _Dynamic(Gate):
    def __init__(self, size: int, policy: DSSP) -> None:
        super().__init__(size)
        self._policy = policy
        self._times = _LastTwo(size)
        self._granted = [0] * size
        self._passing: set[int] = set()

    def _observe(self, workers: Sequence[int], at: float) -> None:
        self._times.note(workers, at)
        self._passing.clear()
        fastest = max((self.pushes[worker] for worker in self.training), default=0)
        for worker in workers:
            if not self._granted[worker] and self.lead(worker) > self._policy.lower and self.pushes[worker] == fastest:
                self._granted[worker] = self._grant(worker)
            if self._granted[worker]:
                self._granted[worker] -= 1
                self._passing.add(worker)

    def _grant(self, worker: int) -> int:
        slowest = min(self.training, key=lambda other: (self.pushes[other], other))
        policy = self._policy
        most = policy.upper - (self.lead(worker) - 1 if policy.bounded else policy.lower)
        if most < 1 or not self._times.complete((worker, slowest)):
            return 0
        return extra_steps(self._times[worker], self._times[slowest], most)

    def _may_go(self, worker: int) -> bool:
        return worker in self._passing or self.lead(worker) <= self._policy.lower


@dataclass(frozen=True)
class ElasticBSP(Policy):
    """Elastic BSP: a barrier of all workers where ZipLine predicts the least wait, and asynchronous steps until there.

    After a barrier the server watches until every worker has pushed twice, predicts each one's next `lookahead` pushes from
    its last interval, and has :func:`slackring.zipline.plan` choose a last push for each. Every push is applied as it arrives
    and answered, but a worker's last one: those wait for each other and are averaged into one update, as in BSP. From "Elastic
    Bulk Synchronous Parallel Model for Distributed Deep Learning" (ICDM 2019); that the last gradients are pooled is how we
    read its "gradients aggregation similarly to BSP".

    Between two barriers a worker takes at most `lookahead` steps after the plan, which bounds its lead but for the steps that
    it took before the plan.

    Parameters
    ----------
    lookahead
        The published *R*: pushes of each worker that are predicted; at least 1.

    Examples
    --------
    Rank 1 takes twice as long, so it pushes three times while rank 0 pushes six times:

    >>> gate = ElasticBSP(lookahead=15).gate(2)
    >>> [len(gate.pushed([0, 1] if at % 2 == 0 else [0], at).pooled) for at in range(1, 7)]
    [0, 0, 0, 0, 0, 2]
    """

    name: ClassVar[str] = "server/elastic_bsp"
    lookahead: int = 15

    def __post_init__(self) -> None:
        self._at_least(1, lookahead=self.lookahead)

    def gate(self, size: int) -> Gate:
        """Start deciding for `size` workers."""
        return _Elastic(size, self.lookahead)


class _Elastic(Gate):
    def __init__(self, size: int, lookahead: int) -> None:
        super().__init__(size)
        self._lookahead = lookahead
        self._begin()

    def _begin(self) -> None:
        """Begin a superstep."""
        self._times = _LastTwo(len(self.pushes))
        self._targets: dict[int, int] | None = None  # by worker, the number of its last push

    def _observe(self, workers: Sequence[int], at: float) -> None:
        self._times.note(workers, at)
        ranks = sorted(self.training)
        if self._targets is None and ranks and self._times.complete(ranks):
            ends = [_predicted(self._times[worker], range(1, self._lookahead + 1)) for worker in ranks]
            found = zipline.plan(np.array(ends)).targets.tolist()
            self._targets = {
                worker: self.pushes[worker] + 1 + index for worker, index in zip(ranks, found, strict=True)
            }

    def _pools(self, worker: int) -> bool:
        return self._targets is not None and self.pushes[worker] >= self._targets[worker]

    def _may_go(self, worker: int) -> bool:
        return not self._pools(worker) or self._all_there()

    def _all_there(self) -> bool:
        return all(self._pools(worker) for worker in self.training)

    def _answer(self) -> tuple[int, ...]:
        barrier = self._all_there()
        answered = super()._answer()
        if barrier:
            self._begin()
        return answered


POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {policy.name: policy for policy in (BSP, ASP, SSP, DSSP, ElasticBSP)}
)
"""Every policy by its text name."""


def parse_policy(text: str | Policy) -> Policy:
    """Read a policy from its text, with or without ``server/``; a policy is returned as it is.

    Raises
    ------
    RuleError
        For an unknown policy or option (with the nearest valid name) or a malformed value.

    Examples
    --------
    >>> parse_policy("ssp:staleness=1") == parse_policy("server/ssp:staleness=1") == SSP(staleness=1)
    True
    """
    if isinstance(text, Policy):
        return text
    return parse(f"server/{text.strip().removeprefix('server/')}", POLICIES, kind="policy", error=RuleError)
