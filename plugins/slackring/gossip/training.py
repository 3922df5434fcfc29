"""Dual averaging by nodes that compute for a while and then gossip, in virtual time with real gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slackring.errors import SpecError
from slackring.gossip.consensus import weighted_consensus
from slackring.gossip.graphs import Graph, metropolis_weights
from slackring.optim.dual_averaging import regularisation
from slackring.rules.timing import staleness_for
from slackring.stragglers import Straggler, parse

__all__ = ["AnytimeMinibatch", "Epoch", "FixedMinibatch", "GossipRun"]

Array = NDArray[np.float64]
Gradient = Callable[[int, Array, int, np.random.Generator], ArrayLike]

# Of one: what a quotient of times may lack to a whole number, since 0.3 / 0.1 is below 3 in floats.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Epoch:
    """One epoch of all nodes.

    Attributes
    ----------
    number
        From 1.
    seconds
        Virtual time at which the models with this epoch's gradients are there.
    batches
        Samples that each node has processed.
    disagreement
        Largest distance of a node's sum of gradients z to their mean, relative to that mean's length; 0 while there is none.
    """

    number: int
    seconds: float
    batches: tuple[int, ...]
    disagreement: float


@dataclass(frozen=True)
class GossipRun:
    """What the nodes came to.

    Attributes
    ----------
    models
        Each node's, shape ``(n, d)``.
    epochs
        All of them, in order.
    """

    models: Array
    epochs: tuple[Epoch, ...]


class _Nodes:
    """The nodes' models w and sums of gradients z; shapes ``(n, d)``."""

    def __init__(self, start: Array, weights: Array, rounds: int, lr: float, growth: float, staleness: int) -> None:
        self._weights, self._rounds = weights, rounds
        self._lr, self._growth, self._staleness = lr, growth, staleness
        self._start = start
        self._updates = np.zeros(len(weights), dtype=int)
        self._sums = np.zeros((len(weights), len(start)))
        self.models = np.tile(start, (len(weights), 1))

    def send(self, gradients: Array, counts: Array) -> tuple[Array, Array, Array]:
        """What leaves at the end of an epoch: the part of z that is sent, that part with the gradients, and the counts."""
        part = self._sums / (self._staleness + 1)
        return part, part + gradients, counts

    def land(self, part: Array, message: Array, counts: Array) -> None:
        """Replace what was sent by its average, and move the models; nodes that no sample has reached stay."""
        averages, totals = weighted_consensus(message, counts, self._weights, self._rounds)
        heard = totals > 0
        self._updates[heard] += 1
        self._sums = np.where(heard[:, None], self._sums - part + averages, self._sums)
        strength = [regularisation(updates + 1, self._growth, self._staleness) for updates in self._updates.tolist()]
        moved = self._start - self._lr * self._sums / np.array(strength)[:, None]
        self.models = np.where(heard[:, None], moved, self.models)

    def disagreement(self) -> float:
        mean = self._sums.mean(axis=0)
        spread = float(np.linalg.norm(self._sums - mean, axis=1).max())
        return spread / float(np.linalg.norm(mean)) if spread else 0.0


@dataclass(frozen=True, kw_only=True)
class _Gossip(ABC):
    """What the two ways to spend an epoch share."""

    graph: Graph
    share: int
    communication_time: float = 0.0
    rounds: int | None = None
    round_time: float | None = None
    lazy: bool = False
    straggler: Straggler | str = "none"
    step_time: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.share < 1 or not 0 < self.step_time < math.inf:
            raise SpecError(
                f"a share is at least one sample that takes more than 0 s, not {self.share} in {self.step_time} s."
            )
        if not 0 <= self.communication_time < math.inf:
            raise SpecError(
                f"the communication time is a finite number of at least 0 s, not {self.communication_time}."
            )
        if self.rounds is None and self.round_time is None:
            raise SpecError("how often neighbours average is told by rounds=, or by round_time= for as often as fits.")
        if self.round_time is not None and not self.round_time > 0:
            raise SpecError(f"a round of gossip takes more than 0 s, not {self.round_time}.")
        if not 1 <= self._rounds <= self._fitting:
            raise SpecError(
                f"{self._rounds} rounds of gossip are not between 1 and the {self._fitting} that fit the communication time "
                f"of {self.communication_time} s."
            )
        self._model().check(self.graph.size)

    @property
    def _fitting(self) -> float:
        if self.round_time is None:
            return math.inf
        return math.floor(self.communication_time / self.round_time + _TOLERANCE)

    @property
    def _rounds(self) -> int:
        return int(self._fitting) if self.rounds is None else self.rounds

    def _model(self) -> Straggler:
        model = parse(self.straggler) if isinstance(self.straggler, str) else self.straggler
        return model.seeded(self.seed)

    @property
    @abstractmethod
    def staleness(self) -> int:
        """How many epochs nodes compute while an average is on its way."""

    @abstractmethod
    def _work(self, share_seconds: Array) -> tuple[Array, float]:
        """Samples of each node, and seconds from one epoch to the next, if a share takes each node this long."""

    def run(
        self,
        gradient: Gradient,
        start: ArrayLike,
        epochs: int,
        *,
        lr: float,
        growth: float = 0.0,
        on_epoch: Callable[[Epoch, Array], object] = lambda epoch, models: None,
    ) -> GossipRun:
        """Train for a number of epochs, and let the averages land that are on their way then.

        Parameters
        ----------
        gradient
            Called with a node, its model, how many samples it has time for (at least 1) and a random generator of the node's
            own; returns the mean gradient over that many new samples.
        start
            The first model of all nodes, a vector of length d.
        epochs
            How many.
        lr, growth
            Of :class:`slackring.optim.DualAveraging`.
        on_epoch
            Called with each epoch once its models are there, and with these, shape ``(n, d)``.

        Returns
        -------
        GossipRun
            The last models, and all epochs.
        """
        n, straggler = self.graph.size, self._model()
        weights = metropolis_weights(self.graph, lazy=self.lazy)
        nodes = _Nodes(np.array(start, dtype=np.float64), weights, self._rounds, lr, growth, self.staleness)
        generators = [np.random.default_rng(seed) for seed in np.random.SeedSequence(self.seed).spawn(n)]
        in_flight: deque[tuple[Array, Array, Array]] = deque()
        done: list[Epoch] = []
        seconds = 0.0
        for number in range(epochs + self.staleness):
            counts, length = self._work(
                np.array([straggler.step_seconds(node, number, self.step_time) for node in range(n)])
            )
            seconds += length
            if number < epochs:
                gradients = np.zeros_like(nodes.models)
                for node in np.flatnonzero(counts).tolist():
                    gradients[node] = gradient(node, nodes.models[node].copy(), int(counts[node]), generators[node])
                in_flight.append(nodes.send(gradients, counts))
            if number >= self.staleness:
                part, message, counts = in_flight.popleft()
                nodes.land(part, message, counts)
                done.append(Epoch(len(done) + 1, seconds, tuple(map(int, counts)), nodes.disagreement()))
                on_epoch(done[-1], nodes.models)
        return GossipRun(nodes.models, tuple(done))


@dataclass(frozen=True, kw_only=True)
class AnytimeMinibatch(_Gossip):
    """Anytime Minibatch, fully distributed: compute for a fixed time, average with neighbours for a fixed time.

    In epoch t node i processes as many samples b_i(t) as it has time for, and comes to their mean gradient g_i(t) at its model
    w_i(t). Then, with averages as of :func:`weighted_consensus`, weighted by b_i(t), and by dual averaging
    (:class:`slackring.optim.DualAveraging`)::

        z_i(t + 1) = average_i(z(t) + g(t))                   as nodes agree:  z(t) + sum(b_i g_i) / sum(b_i)
        w_i(t + 1) = w(1) - z_i(t + 1) / beta(t + 1)

    "Anytime Minibatch" (ICLR 2019, arXiv 2006.05752). An epoch takes ``compute_time + communication_time``, whoever is slow.

    With `stale`, nodes go on computing while they average ("Anytime Minibatch with Delayed Gradients", arXiv 2012.08616): an
    epoch takes ``compute_time``, and its average lands tau = `staleness` epochs later. Several averages are then on their way
    at once, so a node sends, and replaces by the average, one part in tau + 1 of its z. With s the epoch that lands::

        z_i <- z_i + average_i(z(s) / (tau + 1) + g(s)) - z_i(s) / (tau + 1)

    Where averages are exact, this is the paper's update; how the paper does it on a graph is not known to us. Had all of z been
    sent each time, what nodes disagree on would grow for tau > 1; had none been sent, it would add up.

    Parameters
    ----------
    graph
        Who talks to whom.
    compute_time
        T, in seconds; above 0.
    share
        How many samples take a node `step_time` if nothing disturbs it.
    communication_time
        T_c, in seconds.
    rounds
        Rounds of averaging; None for as many as fit the communication time.
    round_time
        Seconds of one round; None if it does not matter.
    lazy
        See :func:`metropolis_weights`.
    stale
        Whether nodes compute during communication.
    straggler
        A model or its text. It draws once an epoch for each node, for the time of `share` samples; within an epoch a node's
        speed is constant.
    step_time
        Seconds.
    seed
        Of the straggler's draws and of the random generators that gradients are given.

    Raises
    ------
    SpecError
        For values that cannot be, and rounds that do not fit.

    Examples
    --------
    Ten nodes find the mean of a normal distribution; some are slower than others in each epoch.

    >>> from slackring.gossip import AMB_ICLR_10
    >>> nodes = AnytimeMinibatch(
    ...     graph=AMB_ICLR_10, compute_time=2.5, share=60, communication_time=0.5, rounds=5,
    ...     straggler="shifted_exponential:mean=1.5,shift=1,unit=seconds")
    >>> run = nodes.run(lambda node, w, samples, rng: w - rng.normal(7, 1, size=samples).mean(), [0.0], epochs=20, lr=0.5)
    >>> run.epochs[-1].seconds, bool(abs(run.models - 7).max() < 0.2)
    (60.0, True)
    """

    compute_time: float
    stale: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.compute_time < math.inf:
            raise SpecError(f"the compute time is a finite number above 0 s, not {self.compute_time}.")
        super().__post_init__()

    @property
    def staleness(self) -> int:
        """``ceil(communication_time / compute_time)`` with `stale`, else 0."""
        return staleness_for(self.communication_time, self.compute_time) if self.stale else 0

    def _work(self, share_seconds: Array) -> tuple[Array, float]:
        samples = np.floor(self.share * self.compute_time / share_seconds + _TOLERANCE)
        return samples, self.compute_time if self.stale else self.compute_time + self.communication_time


@dataclass(frozen=True, kw_only=True)
class FixedMinibatch(_Gossip):
    """The same with a fixed minibatch of `share` samples a node: each epoch waits for the slowest node.

    What "Anytime Minibatch" compares itself with. Parameters are those of :class:`AnytimeMinibatch`, without a compute time.

    Examples
    --------
    >>> from slackring.gossip import ring
    >>> nodes = FixedMinibatch(graph=ring(4), share=60, rounds=5, straggler="persistent:ranks=3,factor=4")
    >>> nodes.run(lambda node, w, samples, rng: w, [1.0], epochs=3, lr=0.5).epochs[-1].seconds
    12.0
    """

    @property
    def staleness(self) -> int:
        """0: nodes wait."""
        return 0

    def _work(self, share_seconds: Array) -> tuple[Array, float]:
        return np.full(len(share_seconds), float(self.share)), float(share_seconds.max()) + self.communication_time
