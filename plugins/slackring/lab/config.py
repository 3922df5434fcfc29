"""Everything that shapes one training run, as one value."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Self

from slackring.errors import SpecError
from slackring.lab.choices import parse_choice
from slackring.optim.wire import read_compression
from slackring.ring.network import Network, parse_network
from slackring.rules import Rule
from slackring.server import Policy
from slackring.stragglers import Straggler
from slackring.stragglers import parse as parse_straggler

__all__ = ["SINGLE_RANK_LR", "TrainConfig"]

SINGLE_RANK_LR = 0.2
"""The learning rate of one rank, where none is given."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What one run trains, under which rule, with what injected, for how long.

    Parameters
    ----------
    task, rule, straggler, network
        Texts, as on the command line; a rule that begins with ``server/`` is a policy of the parameter server.
    compression
        "none" or "fp16": how contributions travel.
    step_time
        Seconds that an undisturbed local step is filled up to with sleep; None leaves it as long as it is.
    batch_size
        Samples in a micro-batch of one rank.
    lr
        Learning rate of SGD, as the optimizer takes it. None takes :data:`SINGLE_RANK_LR` and, for rules that average gradients,
        that times the number of ranks, since the average moves the model once for all of them.
    lr_source
        How `lr` was chosen, for the record.
    momentum
        Of SGD.
    seconds, samples, rounds
        The run ends with the first limit that is reached: seconds of the ring's clock, samples of all ranks, rounds.
    target
        Accuracy (0 to 1) whose first reaching is timed.
    stop_at_target
        End the run there.
    eval_every
        Seconds of the ring's clock between two evaluations.
    seed
        Of the model, the batches and the straggler.

    Raises
    ------
    SpecError
        For a value that cannot be.

    Examples
    --------
    >>> config = TrainConfig(rule="losp:k_max=16", seconds=20.0)
    >>> TrainConfig.from_json(config.to_json()) == config
    True
    """

    task: str = "mnist5k"
    rule: str = "bsp"
    straggler: str = "none"
    network: str = "none"
    compression: str = "none"
    step_time: float | None = None
    batch_size: int = 32
    lr: float | None = None
    lr_source: str = "given"
    momentum: float = 0.0
    seconds: float | None = None
    samples: float | None = None
    rounds: int | None = None
    target: float = 0.88
    stop_at_target: bool = False
    eval_every: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        rule = parse_choice(self.rule)
        object.__setattr__(self, "rule", str(rule))
        parse_straggler(self.straggler)
        parse_network(self.network)
        if read_compression(self.compression) and isinstance(rule, Policy):
            raise SpecError(
                f"rule {self.rule!r}: nothing is compressed on a parameter server; leave --compression out."
            )
        for name in ("step_time", "lr", "seconds", "samples", "rounds", "eval_every", "batch_size"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise SpecError(f"--{name.replace('_', '-')} must be a finite number above 0, not {value}.")
        if not 0 <= self.momentum < 1:
            raise SpecError(f"--momentum must be at least 0 and below 1, not {self.momentum}.")
        if not 0 < self.target <= 1:
            raise SpecError(f"--target is an accuracy, above 0 and at most 1, not {self.target}.")
        if not 0 <= self.seed < 2**63:
            raise SpecError(f"a seed must be at least 0 and below 2**63, not {self.seed}.")
        if self.seconds is None and self.samples is None and self.rounds is None:
            raise SpecError("a run needs an end: give --seconds, --samples or --rounds.")

    def parsed_rule(self) -> Rule | Policy:
        """The rule of the ring, or the policy of the server, as a value."""
        return parse_choice(self.rule)

    def parsed_straggler(self) -> Straggler:
        """The straggler as a value, seeded by this run's seed unless its text has a seed."""
        return parse_straggler(self.straggler, seed=self.seed)

    def parsed_network(self) -> Network | None:
        """The injected network as a value."""
        return parse_network(self.network)

    def with_lr(self, size: int) -> Self:
        """Fill in the learning rate of a run on `size` ranks, where none is given."""
        if self.lr is not None:
            return self
        rule = self.parsed_rule()
        averages = rule.averages if isinstance(rule, Policy) else rule.payload == "gradient"
        return dataclasses.replace(
            self,
            lr=SINGLE_RANK_LR * (size if averages else 1),
            lr_source=f"default: {SINGLE_RANK_LR}"
            + (" times the ranks, whose gradients are averaged" if averages else ""),
        )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any] | str) -> Self:
        """Read what :meth:`to_json` gave, or its text."""
        return cls(**(json.loads(values) if isinstance(values, str) else values))
