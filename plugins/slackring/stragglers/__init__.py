"""What slows a rank: models of stragglers, the pace that injects them into local steps, and a watch that finds real ones.

A model is a pure function of (seed, rank, step), so every rule that is compared meets the same delays.

Examples
--------
>>> from slackring import stragglers
>>> straggler = stragglers.parse("persistent:ranks=2+3,factor=1.3+4")
>>> [straggler.step_seconds(rank, step=0, step_time=0.1) for rank in range(4)]
[0.1, 0.1, 0.13, 0.4]
>>> str(straggler)
'persistent:ranks=2+3,factor=1.3+4.0'
"""

from __future__ import annotations

from slackring.stragglers.base import Straggler
from slackring.stragglers.models import (
    MODELS,
    Constant,
    NoStraggler,
    Persistent,
    ShiftedExponential,
    Trace,
    no_wait_limit,
    parse,
)
from slackring.stragglers.pace import Pacer
from slackring.stragglers.published import Bernoulli, Cedar, Mixture, Niagara, Pauses, SciNet
from slackring.stragglers.watch import StragglerWatch, Straggling

__all__ = [
    "MODELS",
    "Bernoulli",
    "Cedar",
    "Constant",
    "Mixture",
    "Niagara",
    "NoStraggler",
    "Pacer",
    "Pauses",
    "Persistent",
    "SciNet",
    "ShiftedExponential",
    "Straggler",
    "StragglerWatch",
    "Straggling",
    "Trace",
    "no_wait_limit",
    "parse",
]
