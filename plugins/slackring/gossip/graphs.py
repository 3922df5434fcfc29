"""Who talks to whom, and with which weights neighbours average."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slackring.errors import SpecError

__all__ = ["AMB_ICLR_10", "Graph", "complete", "convergence_factor", "metropolis_weights", "ring"]


@dataclass(frozen=True)
class Graph:
    """An undirected, connected graph of nodes.

    Parameters
    ----------
    size
        Nodes, named 0 to ``size - 1``.
    edges
        Pairs of different nodes that talk to each other, each once.

    Raises
    ------
    SpecError
        For edges that are not such pairs, or a node that no path leads to.
    """

    size: int
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if self.size < 1:
            raise SpecError(f"a graph has at least one node, not {self.size}.")
        seen = set()
        for edge in self.edges:
            one, two = edge
            if not (0 <= one < self.size and 0 <= two < self.size) or one == two or frozenset(edge) in seen:
                raise SpecError(
                    f"a graph of {self.size} nodes has edges between two different ones from 0 to {self.size - 1}, each "
                    f"once; {edge} is none."
                )
            seen.add(frozenset(edge))
        reached = np.linalg.matrix_power(self.adjacency() + np.eye(self.size), self.size - 1)[0] > 0
        if not reached.all():
            raise SpecError(f"a graph is connected, but no path leads from node 0 to node {int(reached.argmin())}.")

    def adjacency(self) -> NDArray[np.float64]:
        """1 for each pair of neighbours, else 0; shape ``(size, size)``."""
        matrix = np.zeros((self.size, self.size))
        for one, two in self.edges:
            matrix[one, two] = matrix[two, one] = 1
        return matrix


def ring(size: int) -> Graph:
    """Each node talks to the next and to the last one.

    Examples
    --------
    >>> ring(4).edges
    ((0, 1), (1, 2), (2, 3), (0, 3))
    """
    closing = ((0, size - 1),) if size > 2 else ()
    return Graph(size, (*itertools.pairwise(range(size)), *closing))


def complete(size: int) -> Graph:
    """All nodes talk to each other, so that one round of averaging is exact."""
    return Graph(size, tuple(itertools.combinations(range(size), 2)))


AMB_ICLR_10 = Graph(
    10,
    (
        *((0, 1), (0, 5), (0, 9), (1, 2), (1, 3), (1, 6), (1, 7), (1, 9)),
        *((2, 3), (3, 5), (3, 7), (4, 5), (5, 8), (5, 9), (6, 7), (8, 9)),
    ),
)
"""The ten nodes of "Anytime Minibatch" (ICLR 2019), from its authors' code (github.com/thadikari/consensus_optimization)."""


def metropolis_weights(graph: Graph, *, lazy: bool = False) -> NDArray[np.float64]:
    """Weights P by which a node averages itself and its neighbours: symmetric, all rows and columns sum to 1.

    ``P_ij = 1 / (1 + max(degree_i, degree_j))`` for neighbours, and the rest on the diagonal.

    Parameters
    ----------
    graph
        Who talks to whom.
    lazy
        Take ``(P + I) / 2``, which has no negative eigenvalue, as the analysis of "Anytime Minibatch" assumes; it needs about
        twice the rounds.

    Returns
    -------
    ndarray
        Shape ``(size, size)``.

    Examples
    --------
    >>> metropolis_weights(complete(2))
    array([[0.5, 0.5],
           [0.5, 0.5]])
    """
    adjacency = graph.adjacency()
    degrees = adjacency.sum(axis=1)
    weights: NDArray[np.float64] = adjacency / (1 + np.maximum(degrees[:, None], degrees))
    np.fill_diagonal(weights, 1 - weights.sum(axis=1))
    return (weights + np.eye(graph.size)) / 2 if lazy else weights


def convergence_factor(weights: NDArray[np.float64]) -> float:
    """By how much a round shrinks the distance to the average, at least: the second largest absolute eigenvalue.

    Parameters
    ----------
    weights
        Symmetric, all rows sum to 1; shape ``(n, n)``.
    """
    return float(np.sort(np.abs(np.linalg.eigvalsh(weights)))[-2]) if len(weights) > 1 else 0.0
