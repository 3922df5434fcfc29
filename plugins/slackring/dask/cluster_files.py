"""Files that describe Dask clusters, and the one sentence that each mistake in them gets."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from inspect import Parameter
from pathlib import Path
from typing import Any

import dask
import distributed
import yaml
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import best_match

from slackring.errors import SpecError
from slackring.spec import nearest

__all__ = ["check_arguments", "find_class", "own_arguments", "read", "settings", "tls_settings"]

# Packages that bring cluster classes, or that one of them needs, by the name they are imported by.
_PACKAGES = {
    "asyncssh": "asyncssh",
    "dask_cloudprovider": "dask-cloudprovider",
    "dask_cuda": "dask-cuda",
    "dask_gateway": "dask-gateway",
    "dask_jobqueue": "dask-jobqueue",
    "dask_kubernetes": "dask-kubernetes",
}

# Arguments that are not for a file to give: what `load_cluster` gives, and what a class fills in for its base.
_OURS = {"asynchronous", "loop", "security"}
_INNER = {"scheduler", "worker", "workers"}

# Arguments that are arguments of something else.
_NESTED = {
    "scheduler_kwargs": (distributed.Scheduler,),
    "scheduler_options": (distributed.Scheduler,),
    "worker_options": (distributed.Nanny, distributed.Worker),
}

# Settings of Dask below which the user chooses the names.
_OPEN_SETTINGS = {"default-task-durations", "environ", "logging", "pre-spawn-environ", "resources"}


def read(path: Path) -> dict[str, Any]:
    """Read a file, and check it against the schema.

    Raises
    ------
    SpecError
        For a file that is missing or no YAML, naming the line, and for a key or value that cannot be.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise SpecError(f"there is no cluster file {path}; an address begins with tcp:// or tls://.") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise SpecError(f"{path} cannot be read: {exc}.") from exc
    except yaml.MarkedYAMLError as exc:
        line = f"line {exc.problem_mark.line + 1}: " if exc.problem_mark else ""
        raise SpecError(f"{path}: {line}this is no YAML: {exc.problem}.") from None
    except yaml.YAMLError as exc:
        raise SpecError(f"{path}: this is no YAML: {exc}.") from None
    schema = json.loads(resources.files("slackring.dask").joinpath("cluster.schema.json").read_text())
    error = best_match(Draft202012Validator(schema).iter_errors(document))
    if error is not None:
        raise SpecError(f"{path}: {_sentence(error)}.")
    return dict(document)


def _sentence(error: ValidationError) -> str:
    key = ".".join(map(str, error.absolute_path))
    within = f" in {key!r}" if key else ""
    given: Any = error.instance
    schema: Any = error.schema
    if error.validator == "additionalProperties":
        unknown = next(name for name in given if name not in schema["properties"])
        return f"there is no key {unknown!r}{within}; {nearest(str(unknown), schema['properties'])}"
    if error.validator == "required":
        missing = next(name for name in schema["required"] if name not in given)
        return f"the key {missing!r} is missing{within}"
    return f"{key or 'the file'} is {reprlib.repr(given)}, and must be {schema['description']}"


def find_class(module: str, name: str, where: str) -> Any:
    """Import a cluster class, or a function that makes a cluster.

    Parameters
    ----------
    module, name
        As in the file.
    where
        The file, for error messages.

    Raises
    ------
    SpecError
        For one that does not exist, naming the nearest that does, or the command that installs its package.
    """
    root = module.partition(".")[0]
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name == root and root in _PACKAGES:
            raise SpecError(_not_installed(root, f"{where}: module")) from None
        if exc.name is not None and f"{module}.".startswith(f"{exc.name}."):
            known = ["distributed", *(package for package in _PACKAGES if package.startswith("dask_"))]
            raise SpecError(f"{where}: module: there is no module {module!r}; {nearest(module, known)}.") from None
        raise SpecError(f"{where}: module: {module} cannot be imported: {exc}.") from exc
    target = getattr(home, name, None)
    if not (inspect.isfunction(target) or hasattr(target, "scheduler_address")):
        known = [known for known in dir(home) if known.endswith("Cluster")]
        raise SpecError(f"{where}: class: {module} has no cluster class {name!r}; {nearest(name, known)}.")
    if target is distributed.SSHCluster and importlib.util.find_spec("asyncssh") is None:
        raise SpecError(_not_installed("asyncssh", f"{where}: class"))
    return target


def _not_installed(package: str, key: str) -> str:
    return f"{key}: the package {package!r} is not installed: pip install {_PACKAGES[package]}."


def check_arguments(target: Any, given: Mapping[str, Any], where: str) -> None:
    """Refuse arguments that a class does not take, nor what it hands its arguments on to.

    Parameters
    ----------
    target
        The class, or function. One that says nothing about its arguments is not checked.
    given
        The arguments by name.
    where
        The file and the key, for error messages.

    Raises
    ------
    SpecError
        For the first such argument, naming the nearest that would do.
    """
    handed_on: tuple[Any, ...] = ()
    if target is distributed.SSHCluster:
        handed_on = (distributed.SpecCluster,)
    elif inspect.isclass(target) and issubclass(target, distributed.LocalCluster):
        handed_on = (distributed.Nanny, distributed.Worker)
    elif hasattr(target, "job_cls"):
        handed_on = (target.job_cls,)
    names, complete = _arguments(target)
    if not (complete or handed_on):
        return
    own = own_arguments(target) - _OURS
    taken = names.union(*(_arguments(other)[0] for other in handed_on)) - (_INNER - own) - _OURS
    _refuse_others(given, taken, own, where, target.__name__)
    for key, classes in _NESTED.items():
        if isinstance(given.get(key), Mapping) and "worker_class" not in given:
            taken = {"n_workers"}.union(*(_arguments(other)[0] for other in classes))
            _refuse_others(given[key], taken, set(), f"{where}.{key}", f"a {classes[-1].__name__.lower()}")


def _refuse_others(given: Iterable[str], taken: set[str], own: set[str], where: str, what: str) -> None:
    for name in given:
        if name not in taken:
            # All that are taken may be a hundred: the class's own, and what comes near.
            known = own.union(difflib.get_close_matches(str(name), taken)) or taken
            raise SpecError(f"{where}: {what} takes no {name!r}; {nearest(str(name), known)}.")


def own_arguments(target: Any) -> set[str]:
    """Give the names of the arguments that a class's own signature, or a function's, has."""
    return _named(_calls(target)[0])[0]


def _arguments(target: Any) -> tuple[set[str], bool]:
    """Give the names of the arguments that a class and its bases take, and whether these are all."""
    found: set[str] = set()
    for call in _calls(target):
        names, complete = _named(call)
        found |= names
        if complete:
            return found, True
    return found, False


def _named(call: Callable[..., Any]) -> tuple[set[str], bool]:
    kinds = {name: each.kind for name, each in inspect.signature(call).parameters.items() if name != "self"}
    names = {name for name, kind in kinds.items() if kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}
    return names, Parameter.VAR_KEYWORD not in kinds.values()


def _calls(target: Any) -> list[Callable[..., Any]]:
    """Give the functions that see the arguments of a call, one after the other."""
    if not inspect.isclass(target):
        return [target]
    return [vars(base)["__init__"] for base in target.__mro__ if "__init__" in vars(base)]


def settings(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Give Dask's settings one by one, their names dotted.

    (Dask would take a nested one for the whole of its level.)

    Raises
    ------
    SpecError
        For a setting that Dask does not have, naming the nearest.
    """
    found = dict(_dotted(given))
    for name in found:
        level: Any = dask.config.config
        for part in name.split("."):
            if part in _OPEN_SETTINGS:
                break
            part = part if part in level else part.replace("_", "-")
            if part not in level:
                hint = nearest(part, level) if level else "the one above it has a value of its own"
                raise SpecError(f"{where}: dask_config: Dask has no setting {name!r}; {hint}.")
            level = level[part] if isinstance(level[part], Mapping) else {}
    return found


def _dotted(given: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in given.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def tls_settings(files: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Give the TLS files of a cluster file as settings of Dask, which what is started elsewhere inherits.

    Parameters
    ----------
    files
        By the names that `distributed.Security` has for them.
    path
        The cluster file, from whose folder they are.

    Raises
    ------
    SpecError
        For a file that is not there.
    """
    found: dict[str, Any] = {}
    for key, name in files.items():
        file = (path.parent / Path(name).expanduser()).resolve()
        if not file.is_file():
            raise SpecError(f"{path}: security.{key}: there is no file {file}.")
        role = key.removeprefix("tls_")
        found[f"distributed.comm.tls.{'ca-file' if role == 'ca_file' else role.replace('_', '.')}"] = str(file)
    if found:
        found |= {"distributed.comm.require-encryption": True, "distributed.comm.default-scheme": "tls"}
    return found
