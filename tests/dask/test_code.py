"""What travels to a rank: calls and local modules, loaded by a Python that has never seen the project."""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slackring.dask import code
from slackring.dask.code import bundle, dump_call, load_call, local_modules, unpack
from slackring.errors import PoolError

PROJECT = {
    "nets/__init__.py": "from .layers import Layer\nfrom . import sizes\n",
    "nets/layers.py": "from .sizes import WIDTH\n\nclass Layer:\n    def width(self):\n        return WIDTH\n",
    "nets/sizes.py": "WIDTH = 7\n",
    "nets/data/words.txt": "one two three",
    "nets/words.py": """
from importlib import resources

def count():
    return len((resources.files("nets") / "data" / "words.txt").read_text().split())
""",
    "helper.py": "import late_helper\n\ndef double(x):\n    return late_helper.TWO * x\n",
    "late_helper.py": "TWO = 2\n",
    "lazy.py": "def answer():\n    return 42\n",
    "unused.py": "raise RuntimeError('nobody imports this')\n",
    "space/part/tools.py": "def triple(x):\n    return 3 * x\n",
    "train.py": """
import pathlib
import sys

import helper
import nets
import nets.words
from space.part import tools

FACTOR = 5


class Base:
    def scale(self):
        return FACTOR


class Wide(Base, nets.Layer):
    def scale(self):
        return super().scale() * self.width()


def package_with_relative_imports():
    return nets.Layer().width()


def data_file():
    return nets.words.count()


def class_hierarchy():
    return Wide().scale()


def module_level_global(times, plus=0):
    return FACTOR * times + plus


def single_module():
    return helper.double(4)


def namespace_package():
    return tools.triple(4)


def imported_when_called():
    import lazy

    return lazy.answer()


def closure(offset):
    def inner(x):
        return x + offset

    return inner


CALLS = {
    **{fn.__name__: (fn, (), {}) for fn in (package_with_relative_imports, data_file, class_hierarchy, single_module)},
    **{fn.__name__: (fn, (), {}) for fn in (namespace_package, imported_when_called)},
    "module_level_global": (module_level_global, (2,), {"plus": 1}),
    "lambda": (lambda layer: layer.width() + 1, (nets.Layer(),), {}),
    "closure": (closure(10), (5,), {}),
    "function of a module": (helper.double, (8,), {}),
    "bound method": (Wide().scale, (), {}),
}

if __name__ == "__main__":
    from slackring.dask.code import bundle, dump_call

    out = pathlib.Path(sys.argv[1])
    for number, (name, (fn, args, kwargs)) in enumerate(CALLS.items()):
        (out / f"{number}.name").write_text(name)
        (out / f"{number}.call").write_bytes(dump_call(fn, args, kwargs))
        (out / f"{number}.zip").write_bytes(bundle(fn, args, kwargs).archive)
""",
}

RANK = """
import json, pathlib, sys
from slackring.dask.code import load_call, unpack

call, archive, folder = map(pathlib.Path, sys.argv[1:])
unpack(archive.read_bytes(), folder)
sys.path.insert(0, str(folder))
fn, args, kwargs = load_call(call.read_bytes())
print(json.dumps(fn(*args, **kwargs)))
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The project's folder, on the path of this process."""
    folder = write(tmp_path / "project", PROJECT)
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]
    importlib.invalidate_caches()


def names(archive: bytes) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(archive)).namelist()


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Call and archive by the call's name, as a client wrote them that ran the project's script."""
    out = tmp_path_factory.mktemp("sent")
    project = write(tmp_path_factory.mktemp("client"), PROJECT)
    subprocess.run([sys.executable, project / "train.py", out], check=True, cwd=out)
    return {path.read_text(): (path.with_suffix(".call"), path.with_suffix(".zip")) for path in out.glob("*.name")}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("package_with_relative_imports", 7),
        ("data_file", 3),
        ("class_hierarchy", 35),
        ("single_module", 8),
        ("namespace_package", 12),
        ("imported_when_called", 42),
        ("module_level_global", 11),
        ("lambda", 8),
        ("closure", 15),
        ("function of a module", 16),
        ("bound method", 35),
    ],
)
def test_script_runs_on_a_rank(sent: dict[str, tuple[Path, Path]], name: str, value: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RANK, *sent[name], tmp_path / "code"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == value


def test_a_traceback_has_the_lines_of_code_that_is_in_no_file_of_the_rank(tmp_path: Path) -> None:
    script = """
import linecache, pathlib, sys

from slackring.dask.code import dump_call

CELL = "def of_a_cell():\\n    raise ValueError('in a cell')\\n"
linecache.cache["/notebook/cell"] = (len(CELL), None, CELL.splitlines(True), "/notebook/cell")
exec(compile(CELL, "/notebook/cell", "exec"))

def train():
    of_a_cell()  # the line of the script

pathlib.Path("call").write_bytes(dump_call(train))
"""
    client = write(tmp_path / "client", {"script.py": script})
    subprocess.run([sys.executable, "script.py"], check=True, cwd=client)
    call = (client / "call").rename(tmp_path / "call")
    (client / "script.py").unlink()
    load = """
import pathlib, sys, traceback

from slackring.dask.code import load_call

try:
    load_call(pathlib.Path(sys.argv[1]).read_bytes())[0]()
except ValueError:
    traceback.print_exc()
"""
    done = subprocess.run([sys.executable, "-c", load, call], capture_output=True, text=True, cwd=tmp_path)
    assert "of_a_cell()  # the line of the script" in done.stderr
    assert "raise ValueError('in a cell')" in done.stderr


def test_script_run_as_a_module_of_a_package(tmp_path: Path) -> None:
    """Such a script's functions belong to ``__main__``, but import from their package."""
    script = """
import pathlib, sys

from slackring.dask.code import bundle, dump_call

def train():
    from . import sizes

    return sizes.WIDTH

pathlib.Path(sys.argv[1], "call").write_bytes(dump_call(train))
pathlib.Path(sys.argv[1], "zip").write_bytes(bundle(train).archive)
"""
    project = write(
        tmp_path / "project", {"app/__init__.py": "", "app/sizes.py": "WIDTH = 9\n", "app/train.py": script}
    )
    subprocess.run([sys.executable, "-m", "app.train", tmp_path], check=True, cwd=project)
    command = [sys.executable, "-c", RANK, tmp_path / "call", tmp_path / "zip", tmp_path / "code"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("9", "")


def test_only_what_is_used_is_sent(project: Path) -> None:
    helper, nets = importlib.import_module("helper"), importlib.import_module("nets")
    assert local_modules(helper.double) == {
        "helper": (project / "helper.py",),
        "late_helper": (project / "late_helper.py",),
    }
    assert names(bundle(helper.double).archive) == ["helper.py", "late_helper.py"]
    assert list(local_modules(nets.Layer())) == ["nets"]


def test_installed_modules_stay_where_they_are() -> None:
    def train() -> None:
        import yaml

        print(yaml, json, functools.partial(code.bundle), pytest)

    assert local_modules(json.dumps, code.bundle, pytest.fixture) == {}
    # This test is local, and so is what any of the tests imports; nothing else is.
    assert all(
        Path(__file__).parents[2] in place.parents for places in local_modules(train).values() for place in places
    )


def test_modules_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found in the current folder too, also if it is not on the path."""
    write(tmp_path, {"own_task_of_test.py": "import own_data_of_test\n", "own_data_of_test/__init__.py": ""})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert names(bundle(modules=["own_task_of_test"]).archive) == [
        "own_data_of_test/__init__.py",
        "own_task_of_test.py",
    ]
    assert local_modules(modules=["json"]) == {}
    with pytest.raises(PoolError, match="no module 'own_taks'"):
        bundle(modules=["own_taks"])


def test_folder_of_data_is_no_package(project: Path) -> None:
    write(project, {"absent/table.csv": "1,2", "uses_absent.py": "try:\n    import absent\nexcept ImportError: ...\n"})
    assert names(bundle(modules=["uses_absent"]).archive) == ["uses_absent.py"]


def test_digest_follows_the_contents(project: Path) -> None:
    digest = bundle(modules=["nets"]).digest
    os.utime(project / "nets/sizes.py", (1, 1))
    (project / "nets/__pycache__").mkdir(exist_ok=True)
    (project / "nets/__pycache__/sizes.pyc").write_bytes(b"compiled")
    (project / "nets/.env").write_text("PASSWORD=secret")
    assert bundle(modules=["nets"]).digest == digest
    (project / "nets/data/words.txt").write_text("four")
    changed = bundle(modules=["nets"]).digest
    assert changed != digest
    (project / "nets/data/words.txt").rename(project / "nets/data/text.txt")
    assert bundle(modules=["nets"]).digest not in (changed, digest)


def test_nothing_local_is_an_archive_of_nothing(tmp_path: Path) -> None:
    assert bundle(json.dumps) == code.Bundle((), "", b"")
    unpack(b"", tmp_path / "code")
    assert list((tmp_path / "code").iterdir()) == []


def test_size_is_limited(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "nets/data/images.bin").write_bytes(bytes(3_000_000))
    assert "nets/data/images.bin" in names(bundle(modules=["nets"]).archive)
    monkeypatch.setattr(code, "_LIMIT", 2_000_000)
    with pytest.raises(
        PoolError, match=r"modules nets take 3 MB, more than the 2 MB .* 3 MB of it are in .*nets/data'"
    ):
        bundle(modules=["nets"])


def test_unreadable_file_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    bytes_of = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (refuse if path.name == "words.txt" else bytes_of)(path))
    with pytest.raises(PoolError, match=r"words.txt' cannot be sent to the ranks \(Permission denied\)"):
        bundle(modules=["nets"])


def test_unpacked_files_are_private(project: Path, tmp_path: Path) -> None:
    (project / "nets/tool.sh").write_text("#!/bin/sh\n")
    (project / "nets/tool.sh").chmod(0o755)
    unpack(bundle(modules=["nets"]).archive, tmp_path / "runs" / "code")
    modes = {
        name: (tmp_path / "runs/code" / name).stat().st_mode & 0o777 for name in (".", "nets/tool.sh", "nets/sizes.py")
    }
    assert modes == {".": 0o700, "nets/tool.sh": 0o700, "nets/sizes.py": 0o600}


@pytest.mark.parametrize("name", ["../escaped.py", "/tmp/escaped.py", "a/../../escaped.py"])
def test_no_file_escapes_its_folder(name: str, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "")
    with pytest.raises(PoolError, match="outside its folder"):
        unpack(buffer.getvalue(), tmp_path / "code")
    assert not list(tmp_path.rglob("escaped.py"))


def with_lock_of_closure() -> Callable[[], Any]:
    lock = threading.Lock()
    return lambda: lock


def with_lock_below() -> Callable[[], Any]:
    class Trainer:
        def __init__(self) -> None:
            self.settings = {"steps": 1, "guard": threading.Lock()}

    trainer = Trainer()

    def helper() -> Any:
        return trainer

    def train() -> Any:
        return [helper() for _ in range(1)]

    return train


def with_lock_of_default() -> Callable[..., Any]:
    def train(steps: int, lock: Any = threading.Lock()) -> None: ...  # noqa: B008

    return train


def with_global_lock() -> Callable[..., Any]:
    """A function of a notebook, say: nowhere to be imported from."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("import threading\nlock = threading.Lock()\ndef train():\n    return [lock for _ in range(3)]", namespace)
    train: Callable[..., Any] = namespace["train"]
    return train


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (with_lock_of_closure, "<lambda>() cannot be sent to the ranks: it uses 'lock', of type _thread.lock (cannot"),
        (with_lock_of_default, "train() cannot be sent to the ranks: it uses 'lock', of type _thread.lock (cannot"),
        (with_global_lock, "train() cannot be sent to the ranks: it uses 'lock', of type _thread.lock (cannot"),
        (with_lock_below, "'settings', of type dict, which uses 'guard', of type _thread.lock (cannot pickle"),
    ],
)
def test_variable_that_cannot_be_sent_is_named(make: Callable[[], Callable[..., Any]], told: str) -> None:
    fn = make()
    for send in (dump_call, bundle):
        with pytest.raises(PoolError) as caught:
            send(fn)
        assert told in str(caught.value)
        assert "\n" not in str(caught.value)


def test_argument_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(
        PoolError, match=r"argument 2 of print\(\) cannot be sent to the ranks: it is of type generator \(can"
    ):
        dump_call(print, [1, (x for x in range(3))])
    with pytest.raises(PoolError, match=r"argument 'sep' of print\(\) .* it uses 0, of type _thread.lock"):
        dump_call(print, kwargs={"sep": [threading.Lock()]})


def test_missing_module_is_named(project: Path) -> None:
    data = dump_call(importlib.import_module("helper").double, [1])
    sys.path.remove(str(project))
    for name in ("helper", "late_helper"):
        del sys.modules[name]
    with pytest.raises(PoolError, match=r"needs the module 'helper', which is missing here.*modules="):
        load_call(data)
