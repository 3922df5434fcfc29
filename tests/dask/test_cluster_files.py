"""Each mistake in a cluster file gets one sentence that says where it is and what would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import distributed
import pytest
import yaml

from slackring.dask import cluster_files
from slackring.dask.clusters import load_cluster
from slackring.errors import PoolError, SpecError

CONFIGS = Path(__file__).parents[2] / "cluster_configs"

LOCAL: dict[str, Any] = {"version": 1, "module": "distributed", "class": "LocalCluster"}
SSH = LOCAL | {"class": "SSHCluster"}
KUBERNETES: dict[str, Any] = {
    "apiVersion": "kubernetes.dask.org/v1",
    "kind": "DaskCluster",
    "metadata": {"name": "slackring"},
    "spec": {
        "worker": {"replicas": 1, "spec": {"containers": [{"name": "worker", "image": "slackring"}]}},
        "scheduler": {
            "spec": {"containers": [{"name": "scheduler", "image": "slackring"}]},
            "service": {"selector": {}, "ports": []},
        },
    },
}


@pytest.fixture
def refusal(tmp_path: Path) -> Any:
    """Give what is said about a file, without its name."""

    def said(document: Any, workers: int | None = None) -> str:
        path = tmp_path / "cluster.yaml"
        path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
        with pytest.raises(SpecError) as caught:
            load_cluster(path, workers)
        text = str(caught.value)
        assert text.startswith(f"{path}: ") and text.endswith(".") and "\n" not in text
        return text.removeprefix(f"{path}: ")

    return said


def without(document: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Leave out one key, however deep."""
    first, *rest = keys
    changed = {key: value for key, value in document.items() if key != first or rest}
    return changed | {first: without(document[first], *rest)} if rest else changed


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("", "the file is None, and must be a mapping with 'module' and 'class', or a Kubernetes manifest of kind"),
        ("- 1\n", "the file is [1], and must be a mapping"),
        ("version: 1\nmodule: [\n", "line 3: this is no YAML: "),
        ("version: 1\n\tmodule: distributed\n", "line 2: this is no YAML: "),
        (without(LOCAL, "class"), "the key 'class' is missing."),
        (LOCAL | {"version": 2}, "version is 2, and must be the number 1."),
        (LOCAL | {"kwrags": {}}, "there is no key 'kwrags'; did you mean 'kwargs'? Known: args, class, dask_config,"),
        (LOCAL | {"kwargs": [1]}, "kwargs is [1], and must be a mapping of named arguments of the class."),
        (LOCAL | {"module": "os.system('x')"}, "module is \"os.system('x')\", and must be the dotted name"),
        (LOCAL | {"module": "distribted"}, "module: there is no module 'distribted'; did you mean 'distributed'?"),
        (LOCAL | {"module": "distributed.cloud"}, "module: there is no module 'distributed.cloud';"),
        (
            LOCAL | {"class": "LocalClutser"},
            "class: distributed has no cluster class 'LocalClutser'; did you mean 'Local",
        ),
        (LOCAL | {"class": "Client"}, "class: distributed has no cluster class 'Client';"),
        (LOCAL | {"kwargs": {"workers": 2}}, "kwargs: LocalCluster takes no 'workers'; did you mean 'n_workers'?"),
        (
            LOCAL | {"kwargs": {"memory_limt": 0}},
            "kwargs: LocalCluster takes no 'memory_limt'; did you mean 'memory_limit'?",
        ),
        (LOCAL | {"kwargs": {"asynchronous": True}}, "kwargs: LocalCluster takes no 'asynchronous'"),
        (SSH | {"kwargs": {"n_workers": 2}}, "kwargs: SSHCluster takes no 'n_workers'"),
        (
            SSH | {"kwargs": {"hosts": ["a", "b"], "worker_options": {"nthread": 2}}},
            "kwargs.worker_options: a worker takes no 'nthread'; did you mean 'nthreads'?",
        ),
        (
            SSH | {"kwargs": {"hosts": ["a", "b"], "scheduler_options": {"prot": 0}}},
            "kwargs.scheduler_options: a scheduler takes no 'prot'; did you mean 'port'?",
        ),
        (
            LOCAL | {"dask_config": {"distributed.scheduler.worksteal": False}},
            "dask_config: Dask has no setting 'distributed.scheduler.worksteal'; did you mean 'work-stealing'?",
        ),
        (
            LOCAL | {"dask_config": {"distributed": {"scheduler": {"worker-ttl": {"seconds": 1}}}}},
            "dask_config: Dask has no setting 'distributed.scheduler.worker-ttl.seconds'",
        ),
        (
            LOCAL | {"security": {"tls_ca": "ca.pem"}},
            "there is no key 'tls_ca' in 'security'; did you mean 'tls_ca_file'?",
        ),
        (LOCAL | {"security": {"tls_client_key": "key.pem"}}, "the key 'tls_ca_file' is missing in 'security'."),
        (LOCAL | {"security": {"tls_ca_file": "ca.pem"}}, "security.tls_ca_file: there is no file /"),
        (KUBERNETES | {"kind": "DaskJob"}, "kind is 'DaskJob', and must be DaskCluster."),
        (
            KUBERNETES | {"metadata": {"name": "My_cluster"}},
            "metadata.name is 'My_cluster', and must be a name of at most",
        ),
        (without(KUBERNETES, "spec", "worker", "replicas"), "the key 'replicas' is missing in 'spec.worker'."),
        (without(KUBERNETES, "spec", "scheduler", "service"), "the key 'service' is missing in 'spec.scheduler'."),
    ],
)
def test_mistake_is_named(refusal: Any, document: Any, said: str) -> None:
    assert refusal(document).startswith(said)


@pytest.mark.parametrize(
    ("document", "package"),
    [
        (LOCAL | {"module": "dask_jobqueue", "class": "SLURMCluster"}, "dask-jobqueue"),
        (SSH | {"kwargs": {"hosts": ["a", "b"]}}, "asyncssh"),
        (KUBERNETES, "dask-kubernetes"),
    ],
)
def test_missing_package_is_named_with_the_command_that_brings_it(
    refusal: Any, document: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = package.replace("-", "_")
    find = cluster_files.importlib.util.find_spec
    import_module = cluster_files.importlib.import_module

    def no_import(module: str) -> Any:
        if module.partition(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_module(module)

    monkeypatch.setattr(cluster_files.importlib, "import_module", no_import)
    monkeypatch.setattr(
        cluster_files.importlib.util, "find_spec", lambda module: find(module) if module != name else None
    )
    assert refusal(document).endswith(f"the package {name!r} is not installed: pip install {package}.")


def test_number_of_workers_must_be_one_that_the_hosts_can_start(refusal: Any) -> None:
    document = SSH | {"kwargs": {"hosts": ["a", "b", "c"], "worker_options": {"n_workers": 2}}}
    for workers in (3, 6):
        assert refusal(document, workers).startswith(f"kwargs.hosts: {workers} workers were asked for, and")
    with pytest.raises(SpecError, match="0 workers were asked for, and at least 1 is needed"):
        load_cluster("local.yaml", workers=0)


@pytest.mark.parametrize("address", ["http://127.0.0.1:80", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "tls://:8786"])
def test_address_must_be_one_of_a_scheduler(address: str) -> None:
    with pytest.raises(SpecError, match="is no address of a Dask cluster"):
        load_cluster(address)


def test_address_where_nobody_answers_is_named() -> None:
    with pytest.raises(PoolError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:1: Connection refused"):
        load_cluster("tcp://127.0.0.1:1")


def test_file_that_is_not_there_is_named() -> None:
    with pytest.raises(SpecError, match=r"there is no cluster file nowhere\.yaml"):
        load_cluster("nowhere.yaml")


def test_cluster_that_does_not_start_says_why(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(SSH | {"kwargs": {"hosts": []}}))
    with pytest.raises(PoolError, match=r"cluster\.yaml: SSHCluster did not start: `hosts` must be"):
        load_cluster(path)


def test_settings_may_be_nested_and_keep_their_neighbours() -> None:
    given = {
        "distributed": {"nanny": {"pre-spawn-environ": {"OMP_NUM_THREADS": 4}}, "worker": {"resources": {"GPU": 1}}}
    }
    settings = cluster_files.settings(given | {"distributed.scheduler.work_stealing": False}, "here")
    before = dask.config.get("distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_")
    with dask.config.set(settings):
        assert dask.config.get("distributed.nanny.pre-spawn-environ.OMP_NUM_THREADS") == 4
        assert dask.config.get("distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_") == before
        assert dask.config.get("distributed.worker.resources") == {"GPU": 1}
        assert dask.config.get("distributed.scheduler.work-stealing") is False


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_have_no_mistake(path: Path) -> None:
    document = cluster_files.read(path)
    if "class" in document:
        target = cluster_files.find_class(document["module"], document["class"], path.name)
        cluster_files.check_arguments(target, document["kwargs"], path.name)
        assert cluster_files.settings(document["dask_config"], path.name)


def test_every_argument_of_a_class_that_says_nothing_is_let_through() -> None:
    class Cluster:
        scheduler_address = ""

        def __init__(self, **kwargs: Any) -> None: ...

    cluster_files.check_arguments(Cluster, {"anything": 1}, "here")
    with pytest.raises(SpecError, match="SpecCluster takes no 'anything'"):
        cluster_files.check_arguments(distributed.SpecCluster, {"anything": 1}, "here")
