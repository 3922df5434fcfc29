"""Slackring: relaxed synchronisation for data-parallel training over Horovod.

The names below are imported when they are first used, so that the command line answers before torch is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slackring._version import __version__

# Bound here at once, since the package of the same name would take its place when one of its modules is imported.
from slackring.ring.ambient import ring

if TYPE_CHECKING:
    from slackring import rules, stragglers, testing
    from slackring.cluster import VirtualCluster
    from slackring.errors import SlackringError
    from slackring.optim.optimizer import DistributedOptimizer, RelaxedOptimizer
    from slackring.optim.progress import Budget, Progress
    from slackring.ring.collectives import allreduce, barrier, broadcast
    from slackring.ring.network import Network
    from slackring.rules import BSP, LOSP, OSP, CoCoD, LocalSGD, Relaxed, Rule, parse_rule


_HOME = {
    "BSP": "rules",
    "LOSP": "rules",
    "OSP": "rules",
    "CoCoD": "rules",
    "LocalSGD": "rules",
    "Relaxed": "rules",
    "Rule": "rules",
    "parse_rule": "rules",
    "Budget": "optim.progress",
    "Progress": "optim.progress",
    "DistributedOptimizer": "optim.optimizer",
    "RelaxedOptimizer": "optim.optimizer",
    "Network": "ring.network",
    "allreduce": "ring.collectives",
    "barrier": "ring.collectives",
    "broadcast": "ring.collectives",
    "SlackringError": "errors",
    "VirtualCluster": "cluster",
}
_MODULES = ("rules", "stragglers", "testing")

__all__ = [*_HOME, *_MODULES, "__version__", "ring"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"slackring.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"slackring.{name}")
    raise AttributeError(f"module 'slackring' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
