"""The ranges, the pins and the conda environment say the same."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _requirements(path: Path) -> list[Requirement]:
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return [Requirement(line) for line in lines if line]


PINS = {str(canonicalize_name(pin.name)): pin for pin in _requirements(ROOT / "cluster_configs" / "constraints.txt")}
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
DECLARED: list[Requirement] = [
    *map(Requirement, PROJECT["build-system"]["requires"]),
    *map(Requirement, PROJECT["project"]["dependencies"]),
    *(Requirement(text) for texts in EXTRAS.values() for text in texts),
    *_requirements(ROOT / "cluster_configs" / "horovod" / "requirements.txt"),
]


@pytest.mark.parametrize("requirement", DECLARED, ids=str)
def test_every_dependency_has_a_tested_version_within_its_range(requirement: Requirement) -> None:
    pin = PINS[canonicalize_name(requirement.name)]
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    assert requirement.specifier.contains(Version(specifier.version))


def test_conda_environment_has_the_same_ranges() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    entries = map(Requirement, (c for c in conda if "=" not in c or ">" in c))
    ranges = {canonicalize_name(entry.name): entry.specifier for entry in entries}
    for text in [*PROJECT["project"]["dependencies"], *EXTRAS["dask"], *EXTRAS["lab"]]:
        wanted = Requirement(text)
        if wanted.name == "torch":
            (given,) = (Requirement(line) for line in pip["pip"] if line.startswith("torch"))
            assert given.specifier == PINS["torch"].specifier
        else:
            assert ranges[canonicalize_name(wanted.name)] == wanted.specifier
    python = next(entry for entry in conda if entry.startswith("python="))
    assert Version(python.removeprefix("python=")) in Requirement("x" + PROJECT["project"]["requires-python"]).specifier


def test_conda_environment_leaves_horovod_to_the_builder() -> None:
    text = (ROOT / "environment.yml").read_text()
    assert "horovod" not in str(yaml.safe_load(text)).lower()
    assert "python cluster_configs/horovod/build.py" in text
