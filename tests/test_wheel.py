"""What a user gets from the package without a clone: a wheel, installed where neither Horovod nor this checkout is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import slackring

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources, since a build leaves files beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    shutil.copytree(
        ROOT / "plugins", folder / "plugins", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", ".*")
    )
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder / "dist"),
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel and its dependencies, but without Horovod; returns the folder of its commands."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    # The dependencies are those of this environment, one link each: installing PyTorch again would take a minute.
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    left_out = ("horovod", "slackring", "__editable__", "distutils-precedence.pth")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(left_out):
            (dependencies / entry.name).symlink_to(entry)
    python = folder / "venv" / "bin" / "python"
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return python.parent


@pytest.fixture
def run(bin_folder: Path, tmp_path: Path) -> Callable[[str], str]:
    """Run Python code in that environment, and return what it prints."""

    def run_code(code: str) -> str:
        command = [str(bin_folder / "python"), "-I", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run_code


def test_wheel_carries_types_and_licence_and_only_the_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"slackring/py.typed", "slackring/dask/cluster.schema.json"} <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"slackring"}
    sources = {str(path.relative_to(ROOT / "plugins")) for path in (ROOT / "plugins" / "slackring").rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}


def test_version_is_said_once(run: Callable[[str], str]) -> None:
    code = "import importlib.metadata as m, slackring; print(slackring.__version__, m.version('slackring'))"
    assert run(code) == f"{slackring.__version__} {slackring.__version__}"


def test_import_needs_neither_horovod_nor_torch(run: Callable[[str], str]) -> None:
    code = "import sys, slackring; print(slackring.__file__, sorted({'torch', 'horovod'} & set(sys.modules)))"
    where, loaded = run(code).split(" ", 1)
    assert str(ROOT) not in where
    assert loaded == "[]"
    assert run("import importlib.util as u; print(u.find_spec('horovod'))") == "None"


def test_without_horovod_only_its_ring_raises_and_names_the_command(run: Callable[[str], str]) -> None:
    code = """
import torch, slackring as sr
from slackring.errors import HorovodMissingError
from slackring.ring.horovod import HorovodRing

def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule="losp")
    torch.manual_seed(sr.ring().rank)
    for _ in range(20):
        x = torch.randn(8, 2)
        optimizer.zero_grad()
        ((model(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
        optimizer.step(samples=8)
    optimizer.join()
    return [p.detach().tolist() for p in model.parameters()]

models = sr.VirtualCluster(4, step_time=0.1, straggler="persistent:ranks=3,factor=4").run(train)
assert all(model == models[0] for model in models), models
print(len(models))
try:
    HorovodRing()
except HorovodMissingError as error:
    print(error)
"""
    trained, told = run(code).splitlines()
    assert trained == "4"
    assert "cluster_configs/horovod/build.py" in told


def test_command_answers_at_once(bin_folder: Path, run: Callable[[str], str]) -> None:
    command = [str(bin_folder / "slackring"), "--version"]
    assert slackring.__version__ in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = """
import sys
from slackring.cli import cli
cli(["compare", "--help"], standalone_mode=False)
print(sorted({"torch", "horovod", "pandas"} & set(sys.modules)))
"""
    assert run(code).splitlines()[-1] == "[]"


def test_compare_on_the_virtual_cluster_works_without_horovod(bin_folder: Path, tmp_path: Path) -> None:
    options = ["--task=digits", "--rules=bsp,losp", "--virtual", "--workers=2", "--seconds=1", "--lr-grid=0.1"]
    command = [str(bin_folder / "slackring"), "compare", *options, "--json", f"--out={tmp_path / 'runs'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [run["rule"] for run in json.loads(done.stdout)["runs"]] == ["bsp", "losp"]


def test_doctor_says_that_horovod_is_missing(bin_folder: Path) -> None:
    done = subprocess.run([str(bin_folder / "slackring"), "doctor", "--json"], capture_output=True, text=True)
    assert done.returncode == 1
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["horovod"]["status"] == "fail"
    assert "not installed" in checks["horovod"]["detail"]
    assert checks["horovod"]["remedy"].endswith("cluster_configs/horovod/build.py")
