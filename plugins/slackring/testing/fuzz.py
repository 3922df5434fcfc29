"""Many interleavings of one rule: a hunt for the one that breaks a promise."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from slackring.cluster import VirtualCluster
from slackring.ring.network import Network
from slackring.rules import Rule
from slackring.testing.promises import PROMISES, PromiseBroken
from slackring.testing.scenario import UNIT

__all__ = ["Interleaving", "fuzz"]


@dataclass(frozen=True)
class Interleaving:
    """One interleaving, wholly given by its seed: ranks, network, and what each rank does when.

    Examples
    --------
    >>> Interleaving.draw(7) == Interleaving.draw(7)
    True
    """

    seed: int
    size: int
    network: Network

    @classmethod
    def draw(cls, seed: int) -> Interleaving:
        """Draw ranks and network; what the ranks do is drawn from the same seed when it is played."""
        draw = random.Random(f"slackring interleaving {seed}")
        latency = draw.choice([0.0, 0.0, 0.3, 1.0, 5.0]) * UNIT
        return cls(seed, draw.randint(1, 5), Network(latency, draw.choice([1e5, float("inf")])))

    def check(self, rule: Rule) -> None:
        """Play it under a rule.

        Raises
        ------
        PromiseBroken
            With the command that plays it again.
        """
        cluster = VirtualCluster(self.size, UNIT, network=self.network, seed=self.seed)
        try:
            cluster.run(PROMISES["any_interleaving_works"], rule, self.seed)
        except Exception as exc:
            raise PromiseBroken(
                f"rule '{rule}', {self.size} ranks, network {self.network}: {exc} "
                f"Again: slackring fuzz --rule {str(rule)!r} --seed {self.seed} --count 1"
            ) from exc


def fuzz(rules: list[Rule], seed: int, count: int, progress: Callable[[int], object] = lambda done: None) -> None:
    """Play interleavings under rules in turn.

    Parameters
    ----------
    rules
        The rules; one is taken after the other.
    seed
        Of the first interleaving; the next ones count on from there.
    count
        How many interleavings in all.
    progress
        Told how many are done.

    Raises
    ------
    PromiseBroken
        At the first that breaks a promise.

    Examples
    --------
    >>> from slackring.rules import parse_rules
    >>> fuzz(parse_rules("bsp,losp"), seed=0, count=4)
    """
    for done, rule in zip(range(count), itertools.cycle(rules), strict=False):
        Interleaving.draw(seed + done).check(rule)
        progress(done + 1)
