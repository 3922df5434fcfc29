"""Does a rule keep the promises? Checks for any rule, also one of your own, on any ring.

Examples
--------
>>> import slackring as sr
>>> sr.testing.check_rule("losp:k_max=8,compensation=0.75", size=2)
"""

from __future__ import annotations

import itertools

from slackring.cluster import VirtualCluster
from slackring.ring.network import Network
from slackring.rules import Rule, parse_rule
from slackring.testing.promises import PROMISES, PromiseBroken
from slackring.testing.scenario import UNIT

__all__ = ["PROMISES", "PromiseBroken", "check_rule", "rank_checks"]

_INTERLEAVINGS = 5
_NETWORKS = (Network(), Network(latency=2.3 * UNIT))


def check_rule(rule: Rule | str, size: int = 4, seed: int = 0) -> None:
    """Run every promise on a rule, on virtual clusters.

    Parameters
    ----------
    rule
        A rule or its text.
    size
        Virtual ranks.
    seed
        Of data and interleavings; another one checks other interleavings.

    Raises
    ------
    PromiseBroken
        Naming the promise, what was found, and the call that shows it again.

    Examples
    --------
    >>> check_rule("bsp", size=2)
    """
    rule = parse_rule(rule)
    for name, promise in PROMISES.items():
        seeds = range(seed, seed + (_INTERLEAVINGS if name == "any_interleaving_works" else 1))
        # A rank that trains alone does the same on each rank of any ring.
        alone = name == "size_one_is_the_plain_optimizer"
        rings = [(1, Network())] if alone else [(size, network) for network in _NETWORKS]
        for (ranks, network), each in itertools.product(rings, seeds):
            try:
                VirtualCluster(ranks, UNIT, network=network, seed=each).run(promise, rule, each)
            except Exception as exc:
                raise PromiseBroken(
                    f"rule '{rule}' does not keep the promise {name!r} on {ranks} ranks (network: {network}): {exc} "
                    f"Again: slackring.testing.check_rule({str(rule)!r}, size={size}, seed={each})"
                ) from exc


def rank_checks(rule: Rule | str, seed: int = 0) -> None:
    """Run every promise on a rule, on the ambient ring; every rank calls this.

    Parameters
    ----------
    rule
        A rule or its text.
    seed
        Of data and interleavings, the same on all ranks.

    Raises
    ------
    PromiseBroken
        On every rank, naming the promise and what was found.
    """
    rule = parse_rule(rule)
    for name, promise in PROMISES.items():
        try:
            promise(rule, seed)
        except PromiseBroken as exc:
            raise PromiseBroken(f"rule '{rule}' does not keep the promise {name!r}: {exc}") from exc
