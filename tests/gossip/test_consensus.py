"""Graphs, weights and averages; oracles are numbered as in the notes on the Anytime Minibatch papers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from slackring import gossip
from slackring.errors import SpecError


@st.composite
def graphs(draw: st.DrawFn) -> gossip.Graph:
    """A tree, and any other edges."""
    size = draw(st.integers(1, 9))
    tree = [(draw(st.integers(0, node - 1)), node) for node in range(1, size)]
    others = [(one, two) for two in range(size) for one in range(two) if (one, two) not in tree]
    more = draw(st.lists(st.sampled_from(others), unique=True)) if others else []
    return gossip.Graph(size, (*tree, *more))


def values_and_counts(n: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)), rng.integers(0, 20, size=n).astype(float)


@given(graphs(), st.booleans())
def test_metropolis_weights_are_symmetric_doubly_stochastic_and_local(graph: gossip.Graph, lazy: bool) -> None:
    weights = gossip.metropolis_weights(graph, lazy=lazy)
    assert np.array_equal(weights, weights.T)
    np.testing.assert_allclose(weights.sum(axis=0), 1, rtol=1e-12)
    assert (weights >= -1e-15).all()
    assert np.array_equal(weights - np.diag(np.diag(weights)) > 0, graph.adjacency() > 0)
    assert gossip.convergence_factor(weights) < 1
    if lazy:
        assert np.linalg.eigvalsh(weights).min() >= -1e-12


def test_oracle_6_the_iclr_graph_has_lambda_2_of_0_888() -> None:
    assert len(gossip.AMB_ICLR_10.edges) == 16
    assert gossip.convergence_factor(gossip.metropolis_weights(gossip.AMB_ICLR_10)) == pytest.approx(0.8884, abs=5e-5)
    lazy = gossip.metropolis_weights(gossip.AMB_ICLR_10, lazy=True)
    assert gossip.convergence_factor(lazy) == pytest.approx((1 + 0.8884) / 2, abs=5e-5)


@given(st.integers(1, 12), st.integers(0, 100))
def test_oracle_6_one_round_among_all_is_an_all_reduce(n: int, seed: int) -> None:
    weights = gossip.metropolis_weights(gossip.complete(n))
    np.testing.assert_allclose(weights, np.full((n, n), 1 / n), rtol=1e-12)
    values, counts = values_and_counts(n, seed)
    counts[0] += 1
    averages, totals = gossip.weighted_consensus(values, counts, weights, rounds=1)
    np.testing.assert_allclose(averages, np.tile(counts @ values / counts.sum(), (n, 1)), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(totals, counts.sum(), rtol=1e-12)


@given(graphs(), st.integers(0, 100))
def test_oracle_6_messages_have_the_right_mean_whatever_the_rounds(graph: gossip.Graph, seed: int) -> None:
    """``(1 / b) mean_i n b_i (z + g_i) = z + g``, with the same z everywhere, and averaging keeps the mean."""
    n = graph.size
    gradients, counts = values_and_counts(n, seed)
    counts[0] += 1
    z = np.array([3.0, -1.0, 2.0])
    messages = n * counts[:, None] * (z + gradients)
    wanted = z + counts @ gradients / counts.sum()
    for rounds in (0, 1, 7):
        mixed = gossip.consensus(messages, gossip.metropolis_weights(graph), rounds)
        np.testing.assert_allclose(mixed.mean(axis=0) / counts.sum(), wanted, rtol=1e-9, atol=1e-12)


@given(graphs(), st.integers(0, 100), st.integers(0, 30))
def test_oracle_6_the_error_shrinks_by_the_factor_in_each_round(graph: gossip.Graph, seed: int, rounds: int) -> None:
    weights = gossip.metropolis_weights(graph)
    messages, _ = values_and_counts(graph.size, seed)
    error = np.linalg.norm(messages - messages.mean(axis=0))
    left = np.linalg.norm(gossip.consensus(messages, weights, rounds) - messages.mean(axis=0))
    assert left <= gossip.convergence_factor(weights) ** rounds * error + 1e-9


def test_oracle_6_on_the_iclr_graph_no_faster() -> None:
    weights = gossip.metropolis_weights(gossip.AMB_ICLR_10)
    messages, _ = values_and_counts(10, seed=0)
    errors = [
        np.linalg.norm(gossip.consensus(messages, weights, rounds) - messages.mean(axis=0)) for rounds in (60, 61)
    ]
    assert errors[1] / errors[0] == pytest.approx(0.8884, abs=1e-4)


@given(graphs(), st.integers(0, 100), st.randoms())
def test_oracle_3_other_names_of_nodes_change_nothing(graph: gossip.Graph, seed: int, random: object) -> None:
    order = list(range(graph.size))
    random.shuffle(order)  # type: ignore[attr-defined]
    renamed = gossip.Graph(graph.size, tuple((order[one], order[two]) for one, two in graph.edges))
    values, counts = values_and_counts(graph.size, seed)
    there_values, there_counts = np.empty_like(values), np.empty_like(counts)
    there_values[order], there_counts[order] = values, counts
    here, _ = gossip.weighted_consensus(values, counts, gossip.metropolis_weights(graph), 4)
    there, _ = gossip.weighted_consensus(there_values, there_counts, gossip.metropolis_weights(renamed), 4)
    np.testing.assert_allclose(there[order], here, rtol=1e-9, atol=1e-12)


def test_oracle_4_a_node_without_samples_contributes_nothing() -> None:
    weights = gossip.metropolis_weights(gossip.complete(3))
    values, counts = np.array([[1.0], [4.0], [1e9]]), np.array([1.0, 2.0, 0.0])
    averages, totals = gossip.weighted_consensus(values, counts, weights, 1)
    np.testing.assert_allclose(averages, 3)
    np.testing.assert_allclose(totals, 3)


def test_oracle_4_without_any_samples_each_node_keeps_its_own() -> None:
    values = np.array([[1.0], [2.0], [3.0]])
    averages, totals = gossip.weighted_consensus(values, np.zeros(3), gossip.metropolis_weights(gossip.ring(3)), 5)
    assert np.array_equal(averages, values)
    assert np.array_equal(totals, np.zeros(3))


def test_a_node_that_no_samples_reach_keeps_its_own() -> None:
    """On a line of four, node 0's samples come as far as node 2 in two rounds."""
    line = gossip.Graph(4, ((0, 1), (1, 2), (2, 3)))
    values, counts = np.array([[5.0], [6.0], [7.0], [8.0]]), np.array([3.0, 0.0, 0.0, 0.0])
    averages, totals = gossip.weighted_consensus(values, counts, gossip.metropolis_weights(line), 2)
    np.testing.assert_allclose(averages.ravel(), [5, 5, 5, 8])
    assert totals[3] == 0


@pytest.mark.parametrize(
    ("size", "edges", "message"),
    [
        (0, (), "at least one node, not 0"),
        (2, ((0, 0),), r"edges between two different ones from 0 to 1, each once; \(0, 0\) is none"),
        (2, ((0, 2),), r"\(0, 2\) is none"),
        (2, ((0, 1), (1, 0)), r"\(1, 0\) is none"),
        (4, ((0, 1), (2, 3)), "no path leads from node 0 to node 2"),
    ],
)
def test_impossible_graphs_are_refused(size: int, edges: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        gossip.Graph(size, edges)


def test_small_rings_and_complete_graphs() -> None:
    assert [gossip.ring(size).edges for size in (1, 2, 3)] == [(), ((0, 1),), ((0, 1), (1, 2), (0, 2))]
    assert [len(gossip.complete(size).edges) for size in (1, 2, 5)] == [0, 1, 10]
    assert gossip.convergence_factor(gossip.metropolis_weights(gossip.complete(1))) == 0
