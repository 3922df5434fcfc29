"""Averaging with neighbours only, round after round."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["consensus", "weighted_consensus"]

Array = NDArray[np.float64]


def consensus(messages: Array, weights: Array, rounds: int) -> Array:
    """Replace each node's message by the weighted average of its own and its neighbours', several times.

    Parameters
    ----------
    messages
        One a node, shape ``(n, d)``.
    weights
        Doubly stochastic, shape ``(n, n)``.
    rounds
        How many times.

    Returns
    -------
    ndarray
        ``weights ** rounds @ messages``; it approaches the plain mean by :func:`convergence_factor` a round.
    """
    for _ in range(rounds):
        messages = weights @ messages
    return messages


def weighted_consensus(values: Array, counts: Array, weights: Array, rounds: int) -> tuple[Array, Array]:
    """Let every node estimate ``sum(counts * values) / sum(counts)`` over all nodes.

    Node i starts with the message ``n * counts_i * values_i``, and with ``n * counts_i`` beside it; both are averaged alike, and
    divided in the end: the consensus phase of "Anytime Minibatch" (ICLR 2019).

    Parameters
    ----------
    values
        One vector a node, shape ``(n, d)``.
    counts
        What each weighs, shape ``(n,)``; at least 0.
    weights
        Doubly stochastic, shape ``(n, n)``.
    rounds
        Of :func:`consensus`.

    Returns
    -------
    averages : ndarray
        Each node's estimate, shape ``(n, d)``; its own value where no count has reached it.
    totals : ndarray
        Each node's estimate of ``sum(counts)``, shape ``(n,)``.

    Examples
    --------
    >>> from slackring.gossip.graphs import complete, metropolis_weights
    >>> values, counts = np.array([[1.0], [4.0]]), np.array([1.0, 2.0])
    >>> averages, totals = weighted_consensus(values, counts, metropolis_weights(complete(2)), rounds=1)
    >>> averages.ravel().tolist(), totals.tolist()
    ([3.0, 3.0], [3.0, 3.0])
    """
    n = len(counts)
    mixed = consensus(np.column_stack([n * counts[:, None] * values, n * counts]), weights, rounds)
    totals = mixed[:, -1]
    averages = values.copy()
    np.divide(mixed[:, :-1], totals[:, None], out=averages, where=totals[:, None] > 0)
    return averages, totals
