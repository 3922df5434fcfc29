"""ElasticBSP: supersteps that end where ranks of unequal speed happen to meet."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from slackring.errors import RuleError
from slackring.rules.base import Payload, Plan, Rule, Seen, Weighting
from slackring.rules.planner import Objective, next_steps, predict
from slackring.rules.triggers import Planned, Trigger

__all__ = ["ElasticBSP"]


@dataclass(frozen=True)
class ElasticBSP(Rule):
    r"""ElasticBSP: each rank takes as many local steps as fit until all ranks can meet with the least waiting.

    ``x_i <- w``, where ``w <- w + mean_j(delta_j)`` and rank j has taken ``steps_j`` local steps: the index of its end in
    ``argmin over Z of max(Z) - min(Z)``, Z holding one of the next `lookahead` predicted ends of every rank.

    From "Elastic Bulk Synchronous Parallel Model for Distributed Deep Learning" (ICDM 2019, arXiv 2001.01347) and its journal
    form (Machine Learning 2021); :func:`slackring.zipline.plan` is the search. There, workers push every gradient to a
    parameter server inside the superstep, so that each is an update of its own that the others see. On a ring ranks meet only
    at the barrier, and train on their own until then. What else differs: steps are predicted from the superstep before, not
    from the beginning of this one; all ranks leave a barrier at once, so durations are all that is needed, no common clock;
    and `resolution` and `minimum_gain` keep supersteps short. The first two are one local step long: the first is not
    measured, since programs warm up in it. Equal ranks meet after every step, as under BSP.

    Parameters
    ----------
    lookahead
        R, the most local steps of a rank in a superstep.
    objective
        ``"gap"``: the least time between the first and the last rank's end, as published. ``"rate"``: the most local steps per
        second, with the cost of a round counted, which makes supersteps longer where rounds are dear.
    smoothing
        0 predicts that the next steps take as long as the rank's last one, as published. Above it, the mean over each superstep
        counts, with this weight for the prediction before.
    resolution, minimum_gain
        See :func:`slackring.rules.planner.next_steps`.
    payload
        ``"delta"``, or ``"gradient"``: the model stays where it is until the barrier, and the sample-weighted mean of all
        gradients goes through the optimizer once: BSP with batches that fit the ranks' speeds.
    weighting
        See :class:`Relaxed`. ``"steps"`` lets fast ranks move the model farther; ``"ranks"`` does not, as in FedNova (NeurIPS
        2020); ``"sum"`` counts every local step in full, as a parameter server does.

    Notes
    -----
    The defaults were measured: MNIST digits, four virtual ranks 1, 1, 1.3 and 4 times as slow as a step of 0.1 s, each choice at
    its own tuned learning rate, seconds to an accuracy of 0.88, medians and ranges of three seeds::

        slackring compare --virtual --seconds 20 --seeds 0,1,2 --lr-grid 0.1,0.2,0.4,0.8,1.6 \
        --straggler persistent:ranks=2+3,factor=1.3+4 --network latency=0.01 --rules \
        elastic_bsp,elastic_bsp:weighting=ranks,elastic_bsp:weighting=sum,elastic_bsp:payload=gradient

    Deltas weighted by steps take 8.3 (7.6 to 9.0), by ranks 12.3 (9.5 to 13.3), summed 14.1 (13.3 to 15.6), gradients 17.8
    (16.8 to 19.8). "gap" and "rate" plan the same supersteps here. With rounds of 0.2 s (``--network latency=0.2``) "rate" makes
    them longer and gets 0.81 of the no-wait limit instead of 0.63, but needs 14.0 (12.6 to 15.4) instead of 12.2 (11.0 to
    13.4): more steps, and fewer averages. Where any step may be slow (``--straggler shifted_exponential:mean=0.5``, five seeds)
    smoothing 0.5 with "rate" trains most, 0.73 of the limit instead of 0.69, and the target is reached no sooner. So the
    published choices stay the defaults.

    Examples
    --------
    >>> str(ElasticBSP(lookahead=30, objective="rate"))
    'elastic_bsp:lookahead=30,objective=rate'
    """

    name: ClassVar[str] = "elastic_bsp"
    lookahead: int = 15
    objective: Objective = "gap"
    smoothing: float = 0.0
    resolution: float | None = None
    minimum_gain: float = 0.05
    payload: Payload = "delta"  # type: ignore[misc]  # a choice here
    weighting: Weighting = "steps"

    def check(self) -> None:
        """Raise `RuleError` for values that no superstep can be planned with."""
        if self.lookahead < 1:
            raise RuleError(f"rule 'elastic_bsp': lookahead is 1 or more local steps, not {self.lookahead}.")
        if self.objective not in ("gap", "rate"):
            raise RuleError(f"rule 'elastic_bsp': objective is 'gap' or 'rate', not {self.objective!r}.")
        for name in ("smoothing", "minimum_gain"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise RuleError(f"rule 'elastic_bsp': {name} is a share, at least 0 and less than 1, not {value}.")
        if self.resolution is not None and not 0 < self.resolution < math.inf:
            raise RuleError(f"rule 'elastic_bsp': resolution is in seconds, above 0, not {self.resolution}.")
        super().check()

    @property
    def trigger(self) -> Trigger:
        """After the planned local steps."""
        return Planned()

    def plan(self, seen: Seen, plan: Plan) -> Plan:
        """Plan the next superstep from how long the last one's local steps took."""
        if not plan.memory:
            return replace(plan, memory=(0.0,) * len(seen.steps))
        intervals = predict(seen.step_seconds if self.smoothing else seen.last_seconds, plan.memory, self.smoothing)
        steps = next_steps(
            intervals,
            seen.training,
            seen.round_seconds,
            lookahead=self.lookahead,
            objective=self.objective,
            resolution=self.resolution,
            minimum_gain=self.minimum_gain,
        )
        return Plan(steps, memory=intervals)
