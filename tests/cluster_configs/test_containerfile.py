"""The container file agrees with the repository and with the pods that run its image. No container engine builds it here."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "cluster_configs"
LINES = (CONFIGS / "Containerfile").read_text().replace("\\\n", " ").splitlines()
STEPS = [re.split(r"\s+", line, maxsplit=1) for line in LINES if line and not line.startswith("#")]


def test_what_is_copied_is_there() -> None:
    copied = [value.split()[:-1] for name, value in STEPS if name == "COPY" and not value.startswith("--from")]
    assert copied
    assert all((ROOT / source).exists() for sources in copied for source in sources)


def test_everything_is_installed_at_the_tested_versions() -> None:
    installs = [value for name, value in STEPS if name == "RUN" and value.startswith("pip install")]
    assert len(installs) == 2
    assert all("-c cluster_configs/constraints.txt" in install for install in installs)


def test_compiler_stays_behind() -> None:
    last = max(index for index, (name, _) in enumerate(STEPS) if name == "FROM")
    packages = [value for name, value in STEPS[last:] if name == "RUN"]
    assert packages and "g++" not in " ".join(packages)


def test_image_and_pods_run_as_the_same_user() -> None:
    (user,) = (value for name, value in STEPS if name == "USER")
    manifest = yaml.safe_load((CONFIGS / "kubernetes.yaml").read_text())
    for part in ("scheduler", "worker"):
        context = manifest["spec"][part]["spec"]["securityContext"]
        assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
        assert context["runAsNonRoot"]
