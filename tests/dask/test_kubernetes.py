"""The Kubernetes manifest: what it starts, and what the operator's definition says about it. No Kubernetes runs here."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import click
import dask
import pytest
import yaml
from distributed.cli import dask_scheduler, dask_worker
from jsonschema import Draft4Validator

from slackring.dask.clusters import load_cluster

CONFIGS = Path(__file__).parents[2] / "cluster_configs"
KUBERNETES: dict[str, Any] = yaml.safe_load((CONFIGS / "kubernetes.yaml").read_text())


@pytest.mark.parametrize(("part", "command"), [("scheduler", dask_scheduler.main), ("worker", dask_worker.main)])
def test_pods_start_what_dask_has(part: str, command: click.Command) -> None:
    (container,) = KUBERNETES["spec"][part]["spec"]["containers"]
    assert container["args"][:2] == ["dask", part]
    given = command.make_context(part, list(container["args"][2:])).params
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert given["dashboard_address"] == f":{ports['http-dashboard']}"
    assert container["readinessProbe"]["httpGet"]["port"] in ports
    if part == "scheduler":
        assert int(given["port"]) == ports["tcp-comm"]
        served = {port["targetPort"]: port["port"] for port in KUBERNETES["spec"]["scheduler"]["service"]["ports"]}
        assert served == ports
    else:
        assert given["nthreads"] == int(container["resources"]["limits"]["cpu"])


def test_pods_of_the_scheduler_get_the_settings_of_the_other_files() -> None:
    (container,) = KUBERNETES["spec"]["scheduler"]["spec"]["containers"]
    told = dask.config.collect_env({entry["name"]: entry["value"] for entry in container["env"]})
    other = yaml.safe_load((CONFIGS / "local.yaml").read_text())["dask_config"]
    for name, value in other.items():
        assert dask.config.get(name, config=told) == value


def test_service_finds_the_scheduler_by_the_name_of_the_cluster() -> None:
    selector = KUBERNETES["spec"]["scheduler"]["service"]["selector"]
    assert selector == {"dask.org/cluster-name": KUBERNETES["metadata"]["name"], "dask.org/component": "scheduler"}


def test_manifest_is_what_the_operator_defines() -> None:
    found = importlib.util.find_spec("dask_kubernetes")
    if found is None or found.origin is None:
        pytest.skip("dask-kubernetes, which brings the definition, is not installed")
    definition = "operator/deployment/helm/dask-kubernetes-operator/crds/daskcluster.yaml"
    (version,) = yaml.safe_load((Path(found.origin).parent / definition).read_text())["spec"]["versions"]
    schema = _closed(version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    assert [error.message for error in Draft4Validator(schema).iter_errors(KUBERNETES["spec"])] == []


def _closed(schema: Any) -> Any:
    """Refuse keys that a schema does not know, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def test_pods_are_asked_for_in_the_number_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class KubeCluster:
        scheduler_address = "tcp://10.0.0.1:8786"

        def __init__(self, **kwargs: Any) -> None:
            self.kwargs = kwargs

    module = types.ModuleType("dask_kubernetes.operator")
    module.KubeCluster = KubeCluster  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dask_kubernetes", types.ModuleType("dask_kubernetes"))
    monkeypatch.setitem(sys.modules, "dask_kubernetes.operator", module)
    asked = load_cluster(CONFIGS / "kubernetes.yaml", workers=7).kwargs  # type: ignore[union-attr]
    assert asked["custom_cluster_spec"]["spec"]["worker"]["replicas"] == 7
    assert asked["custom_cluster_spec"]["metadata"] == KUBERNETES["metadata"]
    assert asked["namespace"] is None
