"""Anytime Minibatch without a ring: nodes that average with their neighbours on a graph, in virtual time.

Examples
--------
>>> from slackring import gossip
>>> round(gossip.convergence_factor(gossip.metropolis_weights(gossip.AMB_ICLR_10)), 4)
0.8884
"""

from __future__ import annotations

from slackring.gossip.consensus import consensus, weighted_consensus
from slackring.gossip.graphs import AMB_ICLR_10, Graph, complete, convergence_factor, metropolis_weights, ring
from slackring.gossip.modules import module_gradient
from slackring.gossip.training import AnytimeMinibatch, Epoch, FixedMinibatch, GossipRun

__all__ = [
    "AMB_ICLR_10",
    "AnytimeMinibatch",
    "Epoch",
    "FixedMinibatch",
    "GossipRun",
    "Graph",
    "complete",
    "consensus",
    "convergence_factor",
    "metropolis_weights",
    "module_gradient",
    "ring",
    "weighted_consensus",
]
