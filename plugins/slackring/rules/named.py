"""The rules of the papers and their baselines, as named points of the space that `Relaxed` spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slackring.errors import RuleError
from slackring.rules.base import Compensation, Payload, Rule, Weighting
from slackring.rules.triggers import Every, Trigger, WhenFree

__all__ = ["BSP", "LOSP", "OSP", "CoCoD", "LocalSGD", "Relaxed"]


@dataclass(frozen=True)
class BSP(Rule):
    """Bulk-synchronous parallel: average the gradients of all ranks at every step.

    ``w <- w - lr * sum(samples_i * gradient_i) / sum(samples_i)``

    The baseline that the other rules relax, and the right choice when ranks are equal and the network is fast. Communication
    overlaps the backward pass.

    Parameters
    ----------
    accumulate
        Local steps (micro-batches) in a window.

    Examples
    --------
    >>> str(BSP(accumulate=2))
    'bsp:accumulate=2'
    """

    name: ClassVar[str] = "bsp"
    payload: ClassVar[Payload] = "gradient"
    accumulate: int = 1

    @property
    def trigger(self) -> Trigger:
        """Every `accumulate` local steps."""
        return Every(self.accumulate)


@dataclass(frozen=True)
class LocalSGD(Rule):
    """Local SGD: step alone, and average the models after every few steps, blocking.

    ``x_i <- w + mean_j(x_j - w)``; the first average comes after the first `steps` completed local steps.

    Parameters
    ----------
    steps
        Local steps in a window.
    weighting
        See :class:`Relaxed`.
    """

    name: ClassVar[str] = "local_sgd"
    steps: int = 4
    weighting: Weighting = "steps"

    @property
    def trigger(self) -> Trigger:
        """Every `steps` local steps."""
        return Every(self.steps)


@dataclass(frozen=True)
class OSP(Rule):
    """OSP: always one round in flight, and every window starts from the newest anchor.

    ``x_i <- w``, where ``w <- w + mean_j(delta_j of the round before)``

    A round lasts as long as the communication or the slowest rank's step, and each rank fits in the local steps it can. Work
    done while a round is in flight is not in the model a rank continues from; it arrives one round later. From "OSP:
    Overlapping Computation and Communication in Parameter Server" (ICPP 2019); the OSP of arXiv 2306.16926 ("2-stage
    synchronization") is another method.

    Parameters
    ----------
    k_min, k_max
        Least and most local steps in a window.
    weighting
        See :class:`Relaxed`.
    """

    name: ClassVar[str] = "osp"
    k_min: int = 1
    k_max: int = 64
    weighting: Weighting = "steps"

    @property
    def trigger(self) -> Trigger:
        """When the ring is free."""
        return WhenFree(self.k_min, self.k_max)

    @property
    def staleness(self) -> int:
        """One round in flight."""
        return 1


@dataclass(frozen=True)
class LOSP(OSP):
    """LOSP: OSP with local compensation.

    ``x_i <- w + compensation * (own delta of the window that is not in w yet)``

    From "LOSP: Overlap Synchronization Parallel With Local Compensation" (IEEE JSAC 2021), whose ``gamma / eta`` is the
    compensation: 0 is OSP, 1 keeps all of a rank's own progress.

    Parameters
    ----------
    k_min, k_max
        Least and most local steps in a window.
    weighting
        See :class:`Relaxed`.
    compensation
        Any number. The default keeps the recursion stable over the widest range of learning rates on a noise-free quadratic,
        and ``slackring compare --rules losp:compensation=0.5,losp:compensation=0.75,losp:compensation=1 --virtual`` tells how
        it fares on a task; shards with different labels want less. ``"auto"`` is the share of a rank's last own delta that
        the average confirmed, ``clip(<average, own> / <own, own>, 0, 1)``, measured anew in every round (ours, not the
        paper's).

    Examples
    --------
    >>> str(LOSP(compensation="auto", k_max=16))
    'losp:k_max=16,compensation=auto'
    """

    name: ClassVar[str] = "losp"
    compensation: Compensation = 0.75


@dataclass(frozen=True)
class CoCoD(Rule):
    """CoCoD-SGD: a round every few steps, one in flight, own progress kept whole.

    ``x_i <- mean_j(s_j) + (x_i - s_i)``, with s the models at the round's launch.

    Parameters
    ----------
    steps
        Local steps in a window.
    weighting
        See :class:`Relaxed`.
    """

    name: ClassVar[str] = "cocod"
    steps: int = 4
    weighting: Weighting = "steps"

    @property
    def trigger(self) -> Trigger:
        """Every `steps` local steps."""
        return Every(self.steps)

    @property
    def staleness(self) -> int:
        """One round in flight."""
        return 1

    @property
    def compensation(self) -> Compensation:
        """All of a rank's own progress."""
        return 1.0


@dataclass(frozen=True)
class Relaxed(Rule):
    """Compose a rule from its choices; combinations that cannot work are refused.

    Parameters
    ----------
    payload
        ``"gradient"`` or ``"delta"``, see :class:`Rule`.
    steps
        Local steps in a window; 0 closes it as soon as the ring is free, within `k_min` and `k_max`.
    k_min, k_max
        Least and most local steps in a window; only with ``steps=0``.
    staleness
        Rounds in flight while a rank computes; it waits when a launch would make it one more.
    compensation
        ``x_i <- w + compensation * (own deltas not in w yet)``; a number or ``"auto"`` (see :class:`LOSP`).
    weighting
        What counts alike in an averaged delta (m training ranks, K local steps, b samples a step, means with a bar):
        ``"steps"``: ``mean(delta)``; ``"ranks"``: ``K_bar / m * sum(delta_i / K_i)``;
        ``"samples"``: ``1 / (m * b_bar) * sum(b_i * delta_i)``; ``"sum"``: ``sum(delta_i)``, as on a parameter server that
        applies whatever comes, which wants a learning rate m times smaller.

    Examples
    --------
    >>> str(Relaxed(steps=2, staleness=1, compensation=0.75))
    'relaxed:steps=2,staleness=1,compensation=0.75'
    """

    name: ClassVar[str] = "relaxed"
    payload: Payload = "delta"  # type: ignore[misc]  # a choice here, fixed in the named rules
    steps: int = 0
    k_min: int = 1
    k_max: int = 64
    staleness: int = 0
    compensation: Compensation = 0.0
    weighting: Weighting = "steps"

    def check(self) -> None:
        """Raise `RuleError` for a combination that no rule can have."""
        if self.steps < 0:
            raise RuleError(f"rule 'relaxed': steps is 0 (as soon as the ring is free) or more, not {self.steps}.")
        if self.steps and (self.k_min, self.k_max) != (1, 64):
            raise RuleError(
                "rule 'relaxed': k_min and k_max bound windows that wait for the ring; with steps= leave them out."
            )
        super().check()

    @property
    def trigger(self) -> Trigger:
        """Every `steps` local steps, or when the ring is free."""
        return Every(self.steps) if self.steps else WhenFree(self.k_min, self.k_max)
