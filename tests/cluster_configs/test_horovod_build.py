"""Horovod's builder, without building Horovod: the set-up that runs before these tests does that for real."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from cluster_configs.horovod import build as builder
from cluster_configs.horovod.build import Build, BuildError

BUILD = Build(
    horovod="0.28.1",
    torch="2.13.0+cpu",
    cuda=None,
    python="cpython-311-x86_64-linux-gnu",
    standard=17,
    platform="linux-x86_64 glibc 2.36",
    compiler="g++ 12.2.0",
    instructions=("f16c", "avx", "fma"),
    flags=builder.CPU,
    recipe="0123456789abcdef",
)


# The key


@pytest.mark.parametrize(
    "change",
    [
        {"horovod": "0.28.2"},
        {"torch": "2.13.0"},
        {"cuda": "13.0"},
        {"python": "cpython-312-x86_64-linux-gnu"},
        {"standard": 20},
        {"platform": "linux-aarch64 glibc 2.36"},
        {"compiler": "g++ 13.1.0"},
        {"instructions": ()},
        {"flags": builder.NCCL},
        {"recipe": "f" * 16},
    ],
    ids=lambda change: str(next(iter(change))),
)
def test_key_changes_with_everything_that_shapes_the_wheel(change: dict[str, object]) -> None:
    assert dataclasses.replace(BUILD, **change).key != BUILD.key  # type: ignore[arg-type]


def test_every_field_is_covered_by_the_test_above() -> None:
    assert len(dataclasses.fields(Build)) == 10


def test_key_does_not_depend_on_the_order_of_flags_and_is_a_file_name() -> None:
    shuffled = dict(reversed(list(builder.CPU.items())))
    assert dataclasses.replace(BUILD, flags=shuffled).key == BUILD.key
    assert "/" not in BUILD.key and " " not in BUILD.key
    assert json.loads(BUILD.describe())["torch"] == "2.13.0+cpu"


def test_this_machine() -> None:
    import torch

    here = builder.this_build()
    assert here.torch == torch.__version__
    assert here.cuda == torch.version.cuda
    assert here.standard in builder.STANDARDS
    assert here.key == builder.this_build().key


# What PyTorch's headers need


def _fake_torch(folder: Path, needed: int) -> Path:
    for path in ("ATen/ATen.h", "torch/csrc/api/include/torch/all.h"):
        header = folder / "include" / path
        header.parent.mkdir(parents=True)
        header.write_text(f"#if __cplusplus < {needed}L\n#error a newer C++ is required\n#endif\n")
    return folder


@pytest.mark.parametrize(("needed", "standard"), [(201402, 17), (201703, 17), (202002, 20)])
def test_standard_is_the_oldest_that_the_headers_accept(needed: int, standard: int, tmp_path: Path) -> None:
    assert builder.cxx_standard(_fake_torch(tmp_path, needed), builder.compiler()) == standard


def test_standard_that_no_compiler_has(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="install a newer compiler") as caught:
        builder.cxx_standard(_fake_torch(tmp_path, 209901), builder.compiler())
    assert "a newer C++ is required" in caught.value.log


def test_headers_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="headers are missing"):
        builder.cxx_standard(tmp_path, builder.compiler())


# The edits


def _sources(folder: Path, edits: Sequence[builder.Edit] = builder.EDITS) -> Path:
    """What the edits look for, once in each file."""
    for edit in edits:
        path = folder / edit.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"# before\n{edit.old}\n# after\n" * edit.count)
    return folder


def test_edits_raise_the_standard_and_leave_cuda_out(tmp_path: Path) -> None:
    builder.apply_edits(_sources(tmp_path), standard=20)
    main = (tmp_path / "CMakeLists.txt").read_text()
    assert "set(CMAKE_CXX_STANDARD 20)" in main
    assert "check_language(CUDA)" not in main
    assert "set(CMAKE_CXX_STANDARD 20)" in (tmp_path / "horovod" / "torch" / "CMakeLists.txt").read_text()
    assert "torch.version.cuda" not in (tmp_path / "cmake" / "Modules" / "FindPytorch.cmake").read_text()
    assert main.count("# before") == main.count("# after") == 2


@pytest.mark.parametrize("text", ["", "set(CMAKE_CXX_STANDARD 14)\n" * 2], ids=["none", "twice"])
def test_edits_refuse_another_release(text: str, tmp_path: Path) -> None:
    (_sources(tmp_path) / "horovod" / "torch" / "CMakeLists.txt").write_text(text)
    with pytest.raises(BuildError, match=r"horovod/torch/CMakeLists.txt does not contain .* is this 0.28.1"):
        builder.apply_edits(tmp_path, standard=17)


def test_edits_for_nccl_leave_cuda_in(tmp_path: Path) -> None:
    _sources(tmp_path, builder.NCCL_EDITS)
    builder.apply_edits(_sources(tmp_path, builder.EDITS[2:]), standard=17, edits=builder.NCCL_EDITS)
    main = (tmp_path / "CMakeLists.txt").read_text()
    assert "set(CMAKE_CXX_STANDARD 17)" in main
    assert "check_language(CUDA)" in main
    assert "torch.version.cuda" in (tmp_path / "cmake" / "Modules" / "FindPytorch.cmake").read_text()
    kernels = tmp_path / "horovod" / "common" / "ops" / "cuda" / "CMakeLists.txt"
    assert "set(CMAKE_CUDA_STANDARD 17)" in kernels.read_text()


# NCCL: what it takes, and where that is


def _cuda(folder: Path, release: str = "13.0") -> Path:
    """A CUDA toolkit, as far as it is looked at."""
    for path in ("bin", "include"):
        (folder / path).mkdir(parents=True)
    (folder / "include" / "cuda_runtime.h").write_text("")
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    nvcc.chmod(0o755)
    return folder


def _nccl(folder: Path, library: str = "lib/libnccl.so.2") -> Path:
    """NCCL, laid out as in its wheel."""
    (folder / "include").mkdir(parents=True)
    version = '#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 9\n#define NCCL_SUFFIX ""\n'
    (folder / "include" / "nccl.h").write_text(version)
    (folder / library).parent.mkdir(parents=True)
    (folder / library).write_text("")
    return folder


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has CUDA and NCCL only where a test says so."""
    monkeypatch.setattr(builder, "CUDA_HOMES", ())
    monkeypatch.setattr(builder, "NCCL_HOMES", ())


def _site(folder: Path) -> Path:
    """PyTorch's folder, with NCCL's wheel beside it."""
    _nccl(folder / "nvidia" / "nccl")
    return folder / "torch"


@pytest.mark.parametrize("name", ["HOROVOD_CUDA_HOME", "CUDA_HOME", "PATH"])
def test_nccl_is_chosen_where_all_is_there(
    name: str, bare: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cuda = _cuda(tmp_path / "cuda")
    environ = {"PATH": str(tmp_path), name: str(cuda / "bin" if name == "PATH" else cuda)}
    gpu = builder.find_gpu("auto", "13.0", _site(tmp_path), environ)
    wheel = tmp_path / "nvidia" / "nccl"
    assert gpu == builder.Gpu(cuda, wheel / "include", wheel / "lib" / "libnccl.so.2", "CUDA 13.0, NCCL 2.28.9")
    assert capsys.readouterr().out == ""
    assert builder.find_gpu("none", "13.0", tmp_path / "torch", environ) is None


def test_a_script_that_calls_nvcc_elsewhere_is_no_toolkit(
    bare: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = _cuda(tmp_path / "local")
    (wrapper / "include" / "cuda_runtime.h").unlink()
    cuda = _cuda(tmp_path / "cuda")
    monkeypatch.setattr(builder, "CUDA_HOMES", (cuda,))
    gpu = builder.find_gpu("auto", "13.0", _site(tmp_path), {"PATH": str(wrapper / "bin")})
    assert gpu is not None
    assert gpu.cuda == cuda


@pytest.mark.parametrize("library", ["lib/libnccl.so", "lib64/libnccl.so.2", "lib/x86_64-linux-gnu/libnccl.so.2"])
def test_nccl_of_the_system_and_of_ones_own(library: str, bare: None, tmp_path: Path) -> None:
    home = _nccl(tmp_path / "home", library)
    environ = {"PATH": "", "CUDA_HOME": str(_cuda(tmp_path / "cuda")), "HOROVOD_NCCL_HOME": str(home)}
    gpu = builder.find_gpu("NCCL", "13.0", _site(tmp_path), environ)
    assert gpu is not None
    assert gpu.library == home / library


@pytest.mark.parametrize(
    ("release", "wheel", "why"),
    [(None, True, "no nvcc"), ("12.8", True, "nvcc of CUDA 12.8, beside PyTorch's 13.0"), ("13.0", False, "no NCCL")],
)
def test_what_is_missing_is_told_in_one_line(
    release: str | None, wheel: bool, why: str, bare: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"PATH": str(tmp_path)} | ({"CUDA_HOME": str(_cuda(tmp_path / "cuda", release))} if release else {})
    torch = _site(tmp_path) if wheel else tmp_path / "torch"
    assert builder.find_gpu("auto", "13.0", torch, environ) is None
    assert capsys.readouterr().out == (
        f"Horovod without NCCL, since there is {why}: GPU tensors will travel through host memory\n"
    )
    assert builder.find_gpu("none", "13.0", torch, environ) is None
    assert capsys.readouterr().out == ""
    with pytest.raises(
        BuildError, match=f"cannot build with NCCL, since there is {why}: set CUDA_HOME or HOROVOD_NCCL"
    ):
        builder.find_gpu("NCCL", "13.0", torch, environ)


def test_a_pytorch_without_cuda_gets_gloo_without_a_word(
    bare: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"PATH": "", "CUDA_HOME": str(_cuda(tmp_path / "cuda"))}
    assert builder.find_gpu("auto", None, _site(tmp_path), environ) is None
    assert capsys.readouterr().out == ""


def test_the_key_tells_a_build_with_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "cxx_standard", lambda torch, command: 17)
    gpu = builder.Gpu(tmp_path, tmp_path, tmp_path, "CUDA 13.0, NCCL 2.28.9")
    with_nccl, without = builder.this_build(gpu), builder.this_build()
    assert with_nccl.key != without.key
    assert with_nccl.recipe != without.recipe
    assert json.loads(with_nccl.describe())["flags"]["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert with_nccl.compiler == f"{without.compiler}, CUDA 13.0, NCCL 2.28.9"
    newer = dataclasses.replace(gpu, versions="CUDA 13.0, NCCL 2.29.1")
    assert builder.this_build(newer).key != with_nccl.key


def test_nccl_is_laid_out_as_cmake_looks_for_it(tmp_path: Path) -> None:
    home = _nccl(tmp_path / "wheel")
    gpu = builder.Gpu(tmp_path / "cuda", home / "include", home / "lib" / "libnccl.so.2", "")
    given = builder.gpu_environment(gpu, tmp_path / "laid out")
    found = Path(given["HOROVOD_NCCL_HOME"])
    assert (found / "lib" / "libnccl.so").resolve() == gpu.library
    assert "NCCL_MAJOR" in (found / "include" / "nccl.h").read_text()
    assert given["CUDA_HOME"] == given["HOROVOD_CUDA_HOME"] == str(tmp_path / "cuda")
    assert given["PATH"].split(os.pathsep)[0] == str(tmp_path / "cuda" / "bin")


# The environment


def test_environment_is_the_builds_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_WITH_MPI", "1")
    monkeypatch.setenv("HOROVOD_CMAKE", "/somewhere/cmake")
    monkeypatch.setenv("CXXFLAGS", "-O1")
    monkeypatch.setenv("MAKEFLAGS", "-j64 --jobserver-auth=3,4")
    given = builder.environment(BUILD, jobs=3)
    assert {name: given[name] for name in given if name.startswith("HOROVOD_")} == {
        **builder.CPU,
        "HOROVOD_CMAKE": "/somewhere/cmake",
        "HOROVOD_BUILD_ARCH_FLAGS": "-mf16c -mavx -mfma",
    }
    assert given["CXXFLAGS"] == "-O1 -include cstdint -include stdexcept -include string"
    assert given["MAKEFLAGS"] == "-j3"
    assert given["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"


def test_forced_headers_are_flags_that_the_compiler_knows(tmp_path: Path) -> None:
    source = tmp_path / "uses.cc"
    source.write_text("std::uint8_t f() { throw std::runtime_error(std::string()); }\n")
    flags = builder.environment(BUILD, jobs=1)["CXXFLAGS"].split()
    subprocess.run([*builder.compiler(), *flags, "-fsyntax-only", str(source)], check=True)


# The cache


def _wheel(folder: Path, text: str) -> tuple[Path, Path]:
    folder.mkdir()
    wheel, log = folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl", folder / "log"
    wheel.write_text(text)
    log.write_text("built")
    return wheel, log


def test_store_keeps_the_wheel_its_key_and_its_log(tmp_path: Path) -> None:
    assert builder.cached_wheel(BUILD, tmp_path) is None
    stored = builder.store(BUILD, *_wheel(tmp_path / "work", "one"), tmp_path)
    assert builder.cached_wheel(BUILD, tmp_path) == stored
    assert stored.read_text() == "one"
    assert sorted(path.name for path in stored.parent.iterdir()) == ["build.log", stored.name, "key.json"]
    assert json.loads((stored.parent / "key.json").read_text())["compiler"] == "g++ 12.2.0"
    assert builder.cached_wheel(dataclasses.replace(BUILD, standard=20), tmp_path) is None


def test_store_leaves_what_another_process_stored_first(tmp_path: Path) -> None:
    builder.store(BUILD, *_wheel(tmp_path / "first", "one"), tmp_path)
    stored = builder.store(BUILD, *_wheel(tmp_path / "second", "two"), tmp_path)
    assert stored.read_text() == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([BUILD.key, "first", "second"])


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert builder.cache_folder() == tmp_path / "slackring" / "horovod"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert builder.cache_folder() == Path("/home/someone/.cache/slackring/horovod")


# What can be missing: one line, exit status 1, nothing stored


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; nothing may be installed from it, and torch's headers are not compiled to find their standard."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(builder, "install", lambda wheel, gpu: pytest.fail("must not install"))
    monkeypatch.setattr(builder, "cxx_standard", lambda torch, command: 17)
    return tmp_path / "cache" / "slackring" / "horovod"


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str], cache: Path) -> Callable[[], tuple[str, str]]:
    """Run the builder, see that it fails as it should, and return its one line and the end of the log above it."""

    def run() -> tuple[str, str]:
        assert builder.main(["--jobs", "1"]) == 1
        *log, line = capsys.readouterr().err.splitlines()
        assert line.startswith("horovod build: ")
        assert all(entry.startswith("  | ") for entry in log)
        assert len(log) <= builder.LOG_TAIL
        assert not list(cache.glob("*/*.whl")) and not list(cache.glob(".new-*"))
        return line, "\n".join(log)

    return run


def _path_with(folder: Path, monkeypatch: pytest.MonkeyPatch, *commands: str) -> Path:
    """Make a PATH that holds these commands only."""
    folder.mkdir()
    for command in commands:
        real = next(p for d in os.environ["PATH"].split(":") if (p := Path(d) / command).exists())
        (folder / command).symlink_to(real)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    return folder


Fails = Callable[[], tuple[str, str]]


def test_no_compiler(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _path_with(tmp_path / "bin", monkeypatch, "make", "cmake")
    line, log = fails()
    assert "no C++ compiler found: `apt-get install g++`" in line
    assert log == ""


def test_compiler_that_cxx_names_is_missing(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    assert "no C++ compiler found ($CXX is 'no-such-compiler')" in fails()[0]


def test_no_make(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _path_with(tmp_path / "bin", monkeypatch, "c++", "cmake")
    assert "make is missing" in fails()[0]


def test_no_cmake(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _path_with(tmp_path / "bin", monkeypatch, "c++", "make")
    assert "cmake is missing: `apt-get install cmake`" in fails()[0]


def test_old_cmake(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _path_with(tmp_path / "bin", monkeypatch, "c++", "make")
    (folder / "cmake").write_text("#!/bin/sh\necho cmake version 3.10.2\n")
    (folder / "cmake").chmod(0o755)
    assert "cmake is version 3.10, and 3.13 or newer is needed" in fails()[0]


def test_no_python_headers(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / name))
    assert f"Python's headers are missing ({tmp_path}/include/Python.h)" in fails()[0]


def test_full_disk(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=300_000_000))
    assert "has 0.3 GB free and the build needs 1 GB" in fails()[0]


def test_disk_that_fills_up_while_building(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> Path:
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(builder, "download", full)
    assert fails()[0].endswith("No space left on device")


def test_cache_that_cannot_be_written(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot write to" in (line := fails()[0]) and "set XDG_CACHE_HOME" in line


def test_no_network(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    line, log = fails()
    assert "could not download horovod 0.28.1" in line
    assert "No matching distribution found" in log


def test_no_torch(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "PyTorch is not installed" in fails()[0]


def test_nccl_that_cannot_be(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    monkeypatch.setattr(builder, "installed_torch", lambda: ("2.13.0+cpu", None, tmp_path))
    assert "cannot build with NCCL, since there is a PyTorch without CUDA" in fails()[0]


def test_gpu_operations_that_are_not_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "MPI")
    with pytest.raises(SystemExit, match="2"):
        builder.main([])
    assert "HOROVOD_GPU_OPERATIONS is 'MPI', and can be auto, NCCL, none" in capsys.readouterr().err


def test_no_job() -> None:
    with pytest.raises(SystemExit, match="2"):
        builder.main(["--jobs", "0"])


# From the download to the cache, with a stand-in for Horovod's sources


def _release(folder: Path, setup: str) -> None:
    """Lay out an archive named like Horovod's release, as pip's download would."""
    sources = folder / "sources"
    _sources(sources)
    (sources / "setup.py").write_text(setup)
    (sources / "horovod" / "__init__.py").write_text("")
    (sources / "horovod" / "torch" / "__init__.py").write_text("")
    (sources / "horovod" / "torch" / "mpi_lib_v2.cpython-311.so").write_text("")
    with tarfile.open(folder / "horovod-0.28.1.tar.gz", "w:gz") as tar:
        tar.add(sources, "horovod-0.28.1")


SETUP = """
from setuptools import setup
print("[ 50%] Building CXX object, as if")
{extra}
setup(name="horovod", version="0.28.1", packages=["horovod", "horovod.torch"], package_data={{"horovod.torch": {data}}})
"""


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let pip "download" an archive with this setup script."""

    def use(setup: str) -> None:
        real = builder.run_pip

        def run_pip(arguments: list[str], failure: str) -> None:
            if arguments[0] != "download":
                real(arguments, failure)
            else:
                _release(Path(arguments[-1]), setup)

        monkeypatch.setattr(builder, "run_pip", run_pip)

    return use


def test_build_that_does_not_compile(fails: Fails, release: Callable[[str], None], cache: Path) -> None:
    release(SETUP.format(extra="raise SystemExit('fatal error: ' + 'x' * 9)", data=[]))
    line, log = fails()
    assert "Horovod did not compile; the whole log is " in line
    assert "fatal error: xxxxxxxxx" in log
    (kept,) = cache.glob("*.log")
    assert str(kept) in line
    assert "fatal error: xxxxxxxxx" in kept.read_text()


def test_the_first_error_is_shown_also_when_other_jobs_went_on_printing() -> None:
    log = "\n".join(["compiling"] * 50 + ["a.cc:1:2: error: no"] + ["compiling"] * 100)
    shown = builder.telling_lines(log)
    assert shown[0] == "a.cc:1:2: error: no"
    assert len(shown) == builder.LOG_TAIL


def test_build_without_its_pytorch_library(fails: Fails, release: Callable[[str], None]) -> None:
    release(SETUP.format(extra="", data=[]))
    assert "without its PyTorch library" in fails()[0]


def test_second_run_takes_the_wheel_of_the_first(
    release: Callable[[str], None],
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    installed: list[Path] = []
    monkeypatch.setattr(builder, "install", lambda wheel, gpu: installed.append(wheel))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    release(SETUP.format(extra="", data=["*.so"]))
    assert builder.main(["--jobs", "1"]) == 0
    assert "  Horovod  50 %" in capsys.readouterr().out.splitlines()
    monkeypatch.setattr(builder, "download", lambda folder: pytest.fail("must not download again"))
    assert builder.main([]) == 0
    assert "already built" in capsys.readouterr().out
    assert len(installed) == 2
    assert installed[0] == installed[1]
    assert installed[0].parent.parent == cache
    assert not list(cache.glob("*.log")) and not list(tmp_path.glob("slackring-horovod-*"))


def test_interrupt_ends_the_compilers_and_leaves_nothing(tmp_path: Path) -> None:
    # The driver is interrupted alone, as by a job scheduler; a terminal's Ctrl-C reaches the compilers as well.
    driver = """
import signal
import sys
from pathlib import Path
from cluster_configs.horovod import build as builder
from tests.cluster_configs import test_horovod_build as tests

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored

def download(folder):
    tests._sources(folder / "src")
    (folder / "src" / "setup.py").write_text(f"import time; print('[ 50%] as if'); time.sleep(60)  # {folder}")
    return folder / "src"

builder.download = download
sys.exit(builder.main(["--jobs", "1"]))
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", driver],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        while "50 %" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "horovod build: interrupted\n"
    assert process.returncode == 130
    assert not list(tmp_path.glob("slackring-horovod-*"))
    assert not list((tmp_path / "slackring" / "horovod").glob("*/*.whl"))
    running = [p.info["cwd"] or "" for p in psutil.process_iter(["cwd"])]
    assert not any(folder.startswith(str(tmp_path)) for folder in running)


def test_progress_on_a_terminal_rewrites_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    progress = builder.Progress()
    for line in ("[  1%] Building", "no percentage", "[  1%] Building", "[ 42%] Linking", "[ 17%] late"):
        progress.see(line)
    progress.close()
    assert terminal.getvalue() == "\r  Horovod   1 %\r  Horovod  42 %\n"
