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
    from slackring import dask, data, gossip, optim, rules, server, stragglers, testing, zipline
    from slackring.cluster import VirtualCluster
    from slackring.dask.executor import DaskExecutor
    from slackring.errors import SlackringError
    from slackring.optim.ambient import report
    from slackring.optim.optimizer import DistributedOptimizer, RelaxedOptimizer
    from slackring.optim.progress import Budget, Progress
    from slackring.ring.collectives import allreduce, barrier, broadcast
    from slackring.ring.network import Network
    from slackring.rules import BSP, LOSP, OSP, AnytimeMinibatch, CoCoD, ElasticBSP, LocalSGD, Relaxed, Rule, parse_rule
    from slackring.server.server import ParameterServer


__all__ = [
    "BSP",
    "LOSP",
    "OSP",
    "AnytimeMinibatch",
    "Budget",
    "CoCoD",
    "DaskExecutor",
    "DistributedOptimizer",
    "ElasticBSP",
    "LocalSGD",
    "Network",
    "ParameterServer",
    "Progress",
    "Relaxed",
    "RelaxedOptimizer",
    "Rule",
    "SlackringError",
    "VirtualCluster",
    "__version__",
    "allreduce",
    "barrier",
    "broadcast",
    "dask",
    "data",
    "gossip",
    "optim",
    "parse_rule",
    "report",
    "ring",
    "rules",
    "server",
    "stragglers",
    "testing",
    "zipline",
]

_HOME = {
    "rules": (
        "BSP",
        "LOSP",
        "OSP",
        "AnytimeMinibatch",
        "CoCoD",
        "ElasticBSP",
        "LocalSGD",
        "Relaxed",
        "Rule",
        "parse_rule",
    ),
    "optim.ambient": ("report",),
    "optim.optimizer": ("DistributedOptimizer", "RelaxedOptimizer"),
    "optim.progress": ("Budget", "Progress"),
    "ring.collectives": ("allreduce", "barrier", "broadcast"),
    "ring.network": ("Network",),
    "cluster": ("VirtualCluster",),
    "dask": ("DaskExecutor",),
    "server.server": ("ParameterServer",),
    "errors": ("SlackringError",),
}


def __getattr__(name: str) -> Any:
    if name in ("dask", "data", "gossip", "optim", "rules", "server", "stragglers", "testing", "zipline"):
        return import_module(f"slackring.{name}")
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"slackring.{module}"), name)
    raise AttributeError(f"module 'slackring' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
