"""Where ranks run: on the workers of a Dask cluster.

The names below are imported when they are first used, so that nothing loads Dask before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slackring.errors import SlackringError

if TYPE_CHECKING:
    from slackring.dask.clusters import RunningCluster, load_cluster
    from slackring.dask.executor import DaskExecutor
    from slackring.dask.pool import Settings
    from slackring.dask.run import Run
    from slackring.dask.saving import save

__all__ = ["DaskExecutor", "Run", "RunningCluster", "Settings", "load_cluster", "save"]

_HOME = {
    "clusters": ("RunningCluster", "load_cluster"),
    "executor": ("DaskExecutor",),
    "pool": ("Settings",),
    "run": ("Run",),
    "saving": ("save",),
}
_EXTRA = ("cloudpickle", "dask", "distributed", "jsonschema", "prometheus_client", "yaml")


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            try:
                return getattr(import_module(f"slackring.dask.{module}"), name)
            except ModuleNotFoundError as exc:
                if exc.name not in _EXTRA:
                    raise
                raise SlackringError(
                    f"slackring.dask needs the package {exc.name!r}: pip install 'slackring[dask]'."
                ) from exc
    raise AttributeError(f"module 'slackring.dask' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
